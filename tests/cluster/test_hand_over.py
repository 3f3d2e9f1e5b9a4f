"""The sequence of a hand-over, with played requests: what follows each failure of an engine."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvferry.errors import DrainingError, TransferError
from kvferry.observe.spans import RequestSpan
from kvferry.router.engine_client import EngineClient
from kvferry.router.engines import Engine
from kvferry.router.hand_over import HandOver
from kvferry.router.health import Status
from kvferry.router.members import EnginePool, NoEngineError
from kvferry.router.replies import EngineDownError, EngineRefusedError, Refusal, Reply
from kvferry.router.rooms import Joined
from kvferry.router.routed_request import MOST_FAILED_LOADS, Loan, RoutedRequest
from kvferry.serving.messages import Role
from kvferry.serving.openai import ApiError

TICKET = {"ticket": "t"}
FOREIGN = {"remote_block_ids": [[1]]}


class PlayedEngine(Engine):
    """Fails as it is told, and then no more."""

    def __init__(self, name: str, role: Role) -> None:
        super().__init__(name, f"http://{name}", role, EngineClient({}))
        self.health.status = Status(healthy=True)
        self.fails: list[BaseException] = []
        self.taken_back: list[Mapping[str, Any]] = []

    def take_back(
        self, kv_transfer_params: Mapping[str, Any], request_id: str, otherwise: Any = None
    ) -> None:
        self.taken_back.append(kv_transfer_params)


@dataclass(slots=True, kw_only=True)
class PlayedRequest(RoutedRequest[str]):
    """Notes who is asked for what."""

    lends: Mapping[str, Any] = field(default_factory=lambda: TICKET)
    asked: list[str] = field(default_factory=list)
    given: list[dict[str, Any]] = field(default_factory=list)
    """What the decode engines got, without the router's seconds."""
    breaks_off: bool = False
    """Whether a decode engine fails after its first reply."""

    @property
    def wants_prefill(self) -> bool:
        return True

    @property
    def may_be_at_once(self) -> bool:
        return False

    def pays_at_once(self, prefill: Engine, decode: Engine) -> bool:
        raise AssertionError

    def join(self, prefill: Engine, decode: Engine, key: bytes | None) -> Joined:
        raise AssertionError

    def ask(self, engine: Engine) -> None:
        self.asked.append(engine.name)
        assert isinstance(engine, PlayedEngine)
        if engine.fails:
            raise engine.fails.pop(0)

    async def compute(self, engine: Engine, loan: Mapping[str, Any] | None) -> Reply:
        self.ask(engine)
        return Reply(kv_transfer_params=dict(self.lends))

    def take_first(self, reply: Reply, prefill: Engine) -> Sequence[str]:
        return (f"first of {prefill.name}",)

    async def draw(
        self, engine: Engine, lent: Mapping[str, Any] | None
    ) -> AsyncGenerator[str, None]:
        self.given.append({name: each for name, each in (lent or {}).items() if name != "router_s"})
        if self.breaks_off:
            self.breaks_off = False
            self.asked.append(engine.name)
            yield "a beginning"
            raise gone()
        self.ask(engine)
        yield f"rest of {engine.name}"


def gone() -> EngineDownError:
    return EngineDownError("engine", "it went away", reached=True)


def unreached() -> EngineDownError:
    return EngineDownError("engine", "nobody listens", reached=False)


def broken() -> EngineDownError:
    return EngineDownError("engine", "a connection broke", reached=True, is_well=True)


def draining() -> EngineRefusedError:
    refusal = Refusal(message="it drains", code=DrainingError.__name__)
    return EngineRefusedError("engine", refusal, b"", [])


def paused() -> EngineRefusedError:
    return EngineRefusedError("engine", Refusal(message="it is paused"), b"", [])


def unloaded() -> ApiError:
    return ApiError(500, "it did not come", code=TransferError.__name__)


class Scene:
    """Two prefill engines, two decode engines, and a request."""

    def __init__(self, lends: Mapping[str, Any] = TICKET) -> None:
        self.prefill = [PlayedEngine(name, "prefill") for name in ("p0", "p1")]
        self.decode = [PlayedEngine(name, "decode") for name in ("d0", "d1")]
        self.request = PlayedRequest(
            request_id="r", died=set(), span=RequestSpan(None, "request", ""), lends=lends
        )

    def run(self) -> list[str]:
        """The replies for the client."""

        async def consume() -> list[str]:
            ways = HandOver(
                EnginePool("prefill", 60.0, engines=[*self.prefill]),
                EnginePool("decode", 60.0, engines=[*self.decode]),
            )
            return [reply async for reply in ways.run(self.request)]

        return asyncio.run(consume())

    @property
    def taken_back(self) -> int:
        return sum(len(engine.taken_back) for engine in self.prefill)

    @property
    def lent(self) -> int:
        return sum(engine.lent for engine in self.prefill)


def test_a_hand_over_asks_one_engine_of_each_role():
    scene = Scene()
    assert scene.run() == ["first of p0", "rest of d0"]
    assert scene.request.asked == ["p0", "d0"]
    assert (scene.taken_back, scene.lent) == (0, 0)


@pytest.mark.parametrize("fails", [gone, unreached, draining, paused])
def test_another_prefill_engine_takes_the_place_of_one_that_fails(fails):
    scene = Scene()
    scene.prefill[0].fails = [fails()]
    scene.run()
    assert scene.request.asked == ["p0", "p1", "d0"]
    assert scene.request.attempt == 1
    # The answer of an engine that got the request may have been on its way.
    assert scene.prefill[0].taken_back == ([{}] if fails in (gone, paused) else [])


def test_what_an_answer_lends_is_given_back_if_nobody_waits_for_the_answer_any_more():
    scene = Scene()
    scene.prefill[0].fails = [asyncio.CancelledError()]
    with pytest.raises(asyncio.CancelledError):
        scene.run()
    assert (scene.prefill[0].taken_back, scene.lent) == ([{}], 0)


@pytest.mark.parametrize(
    ("fails", "lends", "is_computed_again"),
    [
        (unreached, TICKET, False),
        (unreached, FOREIGN, False),
        (draining, TICKET, False),
        (gone, TICKET, False),  # the lease passes on
        (gone, FOREIGN, True),
        (paused, TICKET, True),  # it may have given back what it was to load
        (broken, TICKET, True),
        (unloaded, TICKET, True),
    ],
)
def test_a_prompt_is_computed_again_only_if_its_kv_helps_nobody(fails, lends, is_computed_again):
    scene = Scene(lends)
    scene.decode[0].fails = [fails()]
    told = scene.run()
    assert told[-1].startswith("rest of")
    assert (scene.request.asked[:2], scene.request.asked[-1][0]) == (["p0", "d0"], "d")
    assert len(scene.request.asked) == (4 if is_computed_again else 3)
    assert scene.request.engine_request_id == ("r-try2" if is_computed_again else "r")
    assert scene.taken_back == (1 if is_computed_again else 0)
    passes_on = lends == TICKET and not is_computed_again
    assert scene.request.given[1] == {**lends, **({"passed_on": True} if passes_on else {})}
    assert scene.lent == 0


def test_loads_that_fail_end_the_request_after_some_attempts():
    scene = Scene()
    for engine in scene.decode:
        engine.fails = [unloaded() for _ in range(9)]
    with pytest.raises(ApiError, match="it did not come"):
        scene.run()
    assert len(scene.request.asked) == 2 * (1 + MOST_FAILED_LOADS)
    assert (scene.taken_back, scene.lent) == (1 + MOST_FAILED_LOADS, 0)


def test_an_engine_that_fails_in_the_middle_of_its_answer_is_replaced():
    scene = Scene()
    scene.request.breaks_off = True
    assert scene.run() == ["first of p0", "a beginning", "first of p1", "rest of d1"]
    assert (scene.taken_back, scene.lent) == (0, 0)  # the first engine had fetched it


def test_no_third_engine_is_risked():
    scene = Scene()
    for engine in scene.prefill:
        engine.fails = [gone()]
    with pytest.raises(EngineDownError, match="it went away"):
        scene.run()
    assert scene.request.asked == ["p0", "p1"]


@pytest.mark.parametrize(
    ("fails", "error"), [(paused, EngineRefusedError), (unreached, NoEngineError)]
)
def test_without_an_engine_the_client_gets_the_last_refusal(fails, error, monkeypatch):
    scene = Scene()
    for engine in scene.decode:
        engine.fails = [fails()]
        monkeypatch.setattr(engine.health, "probe", _nothing)
    with pytest.raises(error):
        scene.run()
    assert scene.lent == 0
    assert scene.taken_back == (2 if fails is paused else 1)


async def _nothing() -> None:
    """A health check without news."""


def test_what_is_no_fault_of_an_engine_reaches_the_client_at_once():
    scene = Scene()
    scene.decode[0].fails = [ApiError(400, "it is too long")]
    with pytest.raises(ApiError, match="it is too long"):
        scene.run()
    assert scene.request.asked == ["p0", "d0"]
    assert scene.taken_back == 1


def test_a_loan_goes_back_once_unless_it_is_fetched():
    lender = PlayedEngine("p0", "prefill")
    with Loan(lender, TICKET, "r") as loan:
        assert lender.lent == 1
        loan.give_back()
        loan.give_back()
    assert (lender.taken_back, lender.lent) == ([TICKET], 0)
    with Loan(lender, TICKET, "r") as loan:
        loan.fetched()
        loan.fetched()
    assert (lender.taken_back, lender.lent) == ([TICKET], 0)


def test_where_nothing_is_lent_nothing_is_counted():
    lender = PlayedEngine("p0", "prefill")
    for nothing in (Loan(), Loan(lender), Loan(lender, {})):
        with nothing:
            assert (nothing.passed_on(), lender.lent) == (None, 0)
    assert not lender.taken_back
