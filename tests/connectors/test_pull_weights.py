"""An engine whose weights change lends and loads nothing that older ones computed."""

from collections.abc import Callable

import pytest

from kvferry.errors import IncompatibleError, LeaseRevokedError, TicketExpiredError
from kvferry.testing.connector_conformance import REMOTE_DECODE, Pair, prompt
from kvferry.testing.fake_engine import FakeEngine
from kvferry.testing.fake_rank import FakeRequest, Stage
from tests.connectors.engines import SOURCE, TARGET, served

OpenEngine = Callable[..., FakeEngine]


@pytest.fixture
def pair(open_engine: OpenEngine) -> Pair:
    """Two engines that know each other."""
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    pair = Pair(producer, open_engine("d", TARGET), 60.0)
    served(pair, "first")
    return pair


def change(engine: FakeEngine, digest: str, *outdated: FakeRequest) -> None:
    """The engine's weights change between two steps."""
    ids = [request.request_id for request in outdated]
    engine.scheduler.set_weights(digest, ids)


def load_until(pair: Pair, request: FakeRequest, stage: Stage) -> None:
    pair.run(lambda: request.stage is stage, f"{request.request_id!r} to be {stage}")


def test_leases_of_the_source_end(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    request = pair.decode(pair.prefill("r", 21))
    change(pair.producer, "new")
    pair.finish(request)
    # A read that had begun fails in the engine, and its cause is logged.
    assert LeaseRevokedError.__name__ in (caplog.text if request.failed else repr(request.error))
    pair.settle()


def test_a_load_that_has_not_begun_fails_with_both_digests(pair: Pair) -> None:
    request = pair.decode(pair.prefill("r", 21))
    change(pair.consumer, "new")
    pair.finish(request)
    assert isinstance(request.error, TicketExpiredError)
    assert "computed with known, this engine has new" in str(request.error)
    pair.settle()


def test_what_was_half_computed_is_not_lent_and_what_comes_after_is(pair: Pair) -> None:
    request = pair.producer.add("r", prompt(21, "r"), REMOTE_DECODE)
    change(pair.producer, "new", request)
    change(pair.consumer, "new")
    load_until(pair, request, Stage.FINISHED)
    assert request.response_params is None
    served(pair, "next")


def test_the_handshake_tells_of_the_weights_of_now(open_engine: OpenEngine) -> None:
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    pair = Pair(producer, open_engine("d", TARGET), 60.0)
    change(producer, "new")
    request = pair.decode(pair.prefill("r", 21))
    pair.finish(request)
    assert isinstance(request.error, IncompatibleError)
    assert "engine 'p' has new" in str(request.error)
    # Once the target has them too, it asks again at once.
    change(pair.consumer, "new")
    served(pair, "next")
