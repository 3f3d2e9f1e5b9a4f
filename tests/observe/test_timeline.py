"""A request's life over several engines: each of them is asked once."""

import pytest

from kvferry.control.client import asking_client
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import RequestTrace, TracePart
from kvferry.control.server import ControlServer
from kvferry.observe.timeline import EngineAnswer, gather, handover, rows_of


@pytest.fixture
def engines():
    """The control channels of a source ``p7`` and a target ``d9``."""
    leases = LeaseTable(max_blocks=9)
    with (
        ControlServer(engine_id="p7", role="kv_producer", incarnation="1", leases=leases) as source,
        ControlServer(engine_id="d9", role="kv_consumer", incarnation="1", leases=leases) as target,
    ):
        yield source, target


@pytest.fixture
def client():
    with asking_client("trace", 60.0) as client:
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


# ---- from the end of prefill to the first token -------------------------------------------------


def of(engine_id, *parts, clock_ahead_s=0.0, **more):
    """What an engine says of one request: parts are names with the seconds at which they begin and
    end, and a rank where there is one.
    """
    made = tuple(
        TracePart(name=name, started=begin, seconds=end - begin, rank=rank[0] if rank else None)
        for name, begin, end, *rank in parts
    )
    trace = RequestTrace(
        request_id=f"at-{engine_id}", started=made[0].started, seconds=9.0, outcome="over",
        parts=made, **more,
    )  # fmt: skip
    return EngineAnswer(
        address=engine_id, engine_id=engine_id, requests=[trace], clock_ahead_s=clock_ahead_s
    )


LENT = (("queue", 0, 1), ("prefill", 1, 10), ("untaken", 10, 17), ("held", 17, 40))
LOADED = (
    ("front", 12, 15),
    ("handshake", 15, 16),
    ("lease", 16, 18),
    ("wait", 18, 21),
    ("load", 21, 33),
    ("read", 22, 28, 0),
    ("read", 23, 30, 1),
    ("confirm", 28, 31, 0),
    ("confirm", 30, 31.5, 1),
    ("first token", 33, 38),
    ("answer", 38, 99),
)
FROM_P = {"peer": "p", "peer_request_id": "at-p"}
TOLD = {
    "answer and router": 2, "front": 3, "handshake": 1, "lease": 2, "wait": 3, "order": 1,
    "read": 8, "confirm": 1.5, "report": 1.5, "first token": 5,
}  # fmt: skip


def told(stretches):
    return {stretch.name: stretch.seconds for stretch in stretches}


def test_the_stretches_of_a_hand_over_add_up_to_all_of_it():
    stretches = handover([of("p", *LENT), of("d", *LOADED, **FROM_P)])

    assert told(stretches) == TOLD
    assert sum(TOLD.values()) == 38 - 10
    assert {stretch.owner for stretch in stretches} == {
        "prefill engine, router", "decode engine", "kvferry",
    }  # fmt: skip


def test_a_router_that_says_how_long_it_took_has_a_stretch_of_its_own():
    stretches = handover([of("p", *LENT), of("d", *LOADED, ("router", 11.5, 12), **FROM_P)])

    before = {"answer": 1.5, "router": 0.5}
    assert told(stretches) == before | {
        name: took for name, took in TOLD.items() if name != "answer and router"
    }
    assert [stretch.owner for stretch in stretches[:2]] == ["prefill engine", "router"]


def test_a_hand_over_between_clocks_that_differ_is_the_same():
    parts = [(name, begin + 500, end + 500, *rank) for name, begin, end, *rank in LOADED]

    stretches = handover([of("d", *parts, clock_ahead_s=500.0, **FROM_P), of("p", *LENT)])

    assert told(stretches) == TOLD


def test_what_ran_while_the_prompt_was_computed_takes_no_time_of_the_hand_over():
    early = [
        ("front", 2, 3), ("ticket", 3, 6), ("lease", 6, 7), ("wait", 7, 8), ("load", 8, 14),
        ("read", 9, 12, 0), ("confirm", 12, 13, 0), ("first token", 14, 16),
    ]  # fmt: skip

    stretches = handover([of("p", *LENT), of("d", *early, **FROM_P)])

    assert {name: took for name, took in told(stretches).items() if took} == {
        "read": 2, "confirm": 1, "report": 1, "first token": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("p", *LENT), ("d", *LOADED)),  # it computed the prompt itself
        (("q", *LENT), ("d", *LOADED)),  # another engine's
        (("p", *LENT[:1]), ("d", *LOADED)),  # prefill is not over
        (("p", *LENT), ("d", *LOADED[:-2])),  # no first token yet
    ],
)
def test_there_is_no_hand_over_without_both_its_ends(source, target):
    more = {} if (source, target) == (("p", *LENT), ("d", *LOADED)) else FROM_P

    assert handover([of(*source), of(*target, **more)]) == []
