"""A request's life over several engines: each of them is asked once."""

import pytest

from kvferry.control.client import ControlClient
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import RequestTrace, TracePart
from kvferry.control.options import ControlOptions
from kvferry.control.server import ControlServer
from kvferry.control.timeline import gather, rows_of


@pytest.fixture
def engines():
    """The control channels of a source ``p7`` and a target ``d9``."""
    options = {"incarnation": "1", "leases": LeaseTable(max_blocks=9)}
    with (
        ControlServer(engine_id="p7", role="kv_producer", **options) as source,
        ControlServer(engine_id="d9", role="kv_consumer", **options) as target,
    ):
        yield source, target


@pytest.fixture
def client():
    options = ControlOptions(request_timeout_s=60.0)
    with ControlClient(engine_id="trace", incarnation="1", options=options) as client:
        yield client


def remembers(engine, name, request_id, peer_request_id=""):
    """An engine that knows one request; returns what it is asked for."""
    asked = []
    trace = RequestTrace(
        request_id=request_id,
        peer_request_id=peer_request_id,
        started=100.0,
        seconds=1.0,
        outcome="over",
        parts=(TracePart(name=name, started=100.0, seconds=1.0),),
    )

    def find(wanted):
        asked.append(wanted)
        return 1, (trace,) if wanted in (request_id, peer_request_id) else ()

    engine.set_traces(find)
    return asked


def addresses(engines):
    return [f"127.0.0.1:{engine.port}" for engine in engines]


def test_each_engine_is_asked_once(engines, client):
    asked = [remembers(engines[0], "prefill", "r1"), remembers(engines[1], "load", "r1", "r1")]

    answers = gather(client, addresses(engines), "r1")

    assert asked == [["r1"], ["r1"]]
    assert {row.part.name for row in rows_of(answers)} == {"prefill", "load"}
    assert all(answer.clock_unsure_s > 0 for answer in answers)


def test_and_once_more_for_the_id_at_the_source_of_its_load(engines, client):
    asked = [
        remembers(engines[0], "prefill", "r1-at-p"),
        remembers(engines[1], "load", "r1", "r1-at-p"),
    ]

    answers = gather(client, addresses(engines), "r1")

    assert asked == [["r1", "r1-at-p"]] * 2
    assert [len(answer.requests) for answer in answers] == [1, 1]
