"""What engines remember of their requests, and tell whoever asks."""

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pytest

from kvferry.connectors.registry import connector_context
from kvferry.control.client import ControlClient, fetch_status
from kvferry.control.leases import Lease, LeaseTable
from kvferry.control.messages import MAX_ID_CHARS, MAX_TRACES, RequestTrace, TraceReply
from kvferry.errors import TicketError
from kvferry.integrations.rooms import RoomLoad, RoomRequest, Rooms, RoomState
from kvferry.observe import records as module
from kvferry.observe.records import MAX_ERROR_CHARS, MAX_RANKS, REMEMBERED, RequestRecords
from kvferry.testing.connector_conformance import REMOTE_DECODE, Pair, small_geometry
from kvferry.testing.fake_engine import FakeEngine, fake_model
from kvferry.testing.fake_rank import FakeRank, FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S, until
from tests.connectors.engines import SOURCE, TARGET, params_of, pull_config, pull_scheduler

OpenEngine = Callable[..., FakeEngine]
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def pair(open_engine: OpenEngine) -> Pair:
    producer = open_engine("p", SOURCE, lease_duration_s=600.0)
    return Pair(producer, open_engine("d", TARGET), WAIT_S)


def told(engine: FakeEngine, request_id: str) -> TraceReply:
    """What an engine answers over its control channel."""
    with ControlClient(engine_id="test", incarnation="test") as client:
        return client.trace(f"127.0.0.1:{engine.scheduler.port}", request_id).result(WAIT_S)  # type: ignore[attr-defined]


def trace_of(engine: FakeEngine, request_id: str) -> RequestTrace:
    (trace,) = told(engine, request_id).requests
    return trace


def names(trace: RequestTrace) -> list[str]:
    """Its parts, each rank's with its number."""
    return [part.name if part.rank is None else f"{part.name} {part.rank}" for part in trace.parts]


def moved(pair: Pair, request_id: str = "r") -> FakeRequest:
    request = pair.decode(pair.prefill(request_id, 21))
    pair.finish(request)
    pair.settle()
    assert not request.failed
    return request


def test_source_and_target_tell_of_every_part_of_a_request(pair: Pair) -> None:
    moved(pair)

    lent, loaded = trace_of(pair.producer, "r"), trace_of(pair.consumer, "r")

    assert names(lent) == ["queue", "prefill", "untaken", "held"]
    assert (lent.peer, lent.outcome) == ("d", "lease done")
    scheduler_half = {"handshake", "lease", "wait", "load", "first token", "answer"}
    ranks = {"read 0", "confirm 0", "read 1", "confirm 1"}
    assert len(loaded.parts) == 10
    assert set(names(loaded)) == scheduler_half | ranks
    assert (loaded.peer, loaded.peer_request_id, loaded.outcome) == ("p", "r", "length")
    assert not any(part.is_open or part.error for part in lent.parts + loaded.parts)


def test_a_request_is_open_at_each_engine_until_that_engine_may_stop(pair: Pair) -> None:
    def opened() -> list[int | None]:
        ports = [engine.scheduler.port for engine in (pair.producer, pair.consumer)]  # type: ignore[attr-defined]
        return [fetch_status("127.0.0.1", port, WAIT_S).open_requests for port in ports]

    assert opened() == [0, 0]
    params = pair.prefill("r", 21)
    assert opened() == [1, 0], "it is lent"
    request = pair.decode(params)
    assert opened()[1] == 1, "it is loaded, or decoded"
    pair.finish(request)
    pair.settle()
    assert opened() == [0, 0]


def test_a_lent_prompt_stays_open_while_many_others_come_and_end(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    scheduler = pull_scheduler(pair.producer)
    num_open, leases = scheduler.records.num_open, scheduler.lender.leases
    lent = pair.prefill("lent", 21)
    for number in range(4):
        pair.finish(pair.decode(pair.prefill(f"r{number}", 21)))
    pair.run(lambda: leases.num_open == 1, "the other leases to end")
    pair.producer.step()

    assert num_open() == 1
    assert trace_of(pair.producer, "lent").outcome == "lent"
    assert told(pair.producer, "r1").requests == ()
    pair.finish(pair.decode(lent))
    pair.settle()
    assert num_open() == 0


def test_a_prompt_that_is_computed_to_be_lent_is_an_open_request() -> None:
    records = RequestRecords(lambda: 500.0)
    record = records.begin(lending("r"), loads=False)
    assert records.num_open() == 1
    records.end(record, "over")
    assert records.num_open() == 0


def test_the_parts_of_a_load_follow_each_other_without_gaps(pair: Pair) -> None:
    moved(pair)
    trace = trace_of(pair.consumer, "r")
    parts = {part.name: part for part in trace.parts if part.rank is None}

    ends = [parts[name].started + parts[name].seconds for name in ("lease", "wait", "load")]
    begins = [parts[name].started for name in ("wait", "load", "first token")]

    assert ends == pytest.approx(begins, abs=1e-6)
    assert parts["answer"].started + parts["answer"].seconds == pytest.approx(
        trace.started + trace.seconds, abs=1e-6
    )


def test_the_time_in_the_engines_front_is_the_first_part() -> None:
    now, request = 500.0, lending("r")
    request.received = time.time() - 3600.0
    records = RequestRecords(lambda: now)

    records.begin(request, loads=True)

    (trace,) = records.find("r")[1]
    (front,) = [part for part in trace.parts if part.name == "front"]
    assert front.seconds == pytest.approx(3600.0, abs=60.0)
    assert trace.started == pytest.approx(request.received, abs=60.0)


@pytest.mark.parametrize("said", [None, "1.0", -1.0, float("nan"), float("inf"), True, [1.0]])
def test_what_a_router_says_is_a_part_only_if_it_may_be_true(said: object) -> None:
    records = RequestRecords(lambda: 500.0)
    for name, routed in (("true", 0.25), ("false", said)):
        request = FakeRequest(name, (1, 2), {"do_remote_prefill": True, "router_s": routed})
        request.received = time.time()
        records.begin(request, loads=True)

    parts = {name: records.find(name)[1][0].parts for name in ("true", "false")}

    (router, front) = parts["true"]
    assert (router.name, front.name) == ("router", "front")
    assert router.seconds == pytest.approx(0.25, abs=1e-6)
    assert [part.name for part in parts["false"]] == ["front"]


def test_reads_name_transport_bytes_and_the_sources_ranks(pair: Pair) -> None:
    moved(pair)
    reads = [part for part in trace_of(pair.consumer, "r").parts if part.name == "read"]
    records = pair.consumer.outputs

    nbytes = {r.rank: r.nbytes for output in records for r in output.transfer_records}

    assert {part.rank: part.nbytes for part in reads} == nbytes
    assert {part.source_ranks for part in reads} == {(0, 1)}
    assert all(part.transport and part.seconds > 0 for part in reads)


def test_a_second_load_from_a_known_source_waits_for_no_handshake(pair: Pair) -> None:
    moved(pair, "first")
    moved(pair, "second")

    assert "handshake" in names(trace_of(pair.consumer, "first"))
    assert "handshake" not in names(trace_of(pair.consumer, "second"))


def test_what_is_under_way_is_told_as_open(pair: Pair) -> None:
    pair.prefill("r", 21)

    trace = trace_of(pair.producer, "r")

    assert trace.outcome == "lent"
    assert [part.name for part in trace.parts if part.is_open] == ["untaken"]


def test_a_lease_that_is_taken_while_its_prompt_is_computed_is_held_and_never_untaken() -> None:
    clock = itertools.count(100.0).__next__
    leases = LeaseTable(max_blocks=100, clock=clock)
    records = RequestRecords(clock, leases=leases.snapshot)
    request = lending("r")
    records.begin(request, loads=False)
    records.admitted(request, 0)
    lease = leases.grant("r", 10, num_tokens=2, writers=[0])
    assert isinstance(lease, Lease)
    (trace,) = records.find("r")[1]
    assert [part.name for part in trace.parts if part.is_open] == ["prefill"]

    leases.renew("d", "1", [lease.lease_id], grows=True)
    (trace,) = records.find("r")[1]
    assert [part.name for part in trace.parts if part.is_open] == ["prefill", "held"]

    leases.written(lease.lease_id, 0, 2)
    records.finished(request, True, {"ticket": "t"})
    leases.finish(lease.lease_id, "d", "1", rank=0, ok=True, nonce=b"n", world_size=1)
    records.freed(*leases.sweep())
    (trace,) = records.find("r")[1]
    assert names(trace) == ["queue", "prefill", "held"]
    assert all(part.seconds > 0 and not part.is_open for part in trace.parts)


def test_a_lease_that_a_target_holds_is_told_as_held(pair: Pair) -> None:
    pair.prefill("r", 21)
    leases = pull_scheduler(pair.producer).server.leases
    (lease,) = leases.snapshot()
    leases.renew("d", "1", [lease.lease_id])

    trace = trace_of(pair.producer, "r")

    assert names(trace) == ["queue", "prefill", "untaken", "held"]
    assert [part.name for part in trace.parts if part.is_open] == ["held"]
    assert trace.peer == "d"


def test_a_load_that_fails_tells_why_and_what_came_then(pair: Pair) -> None:
    source = pair.prefill("r", 21)
    pair.producer.scheduler.take_back(params_of(source))  # the lease ends before it is taken
    request = pair.decode(source)
    pair.finish(request)

    trace = trace_of(pair.consumer, "r")

    assert request.error is not None
    assert trace.error.startswith("LeaseRevokedError: ")
    (lease,) = [part for part in trace.parts if part.name == "lease"]
    assert lease.error == trace.error
    assert names(trace)[-2:] == ["prefill", "answer"]  # computed here, as the fake engine does


def test_no_lease_and_no_secret_is_told_to_strangers(pair: Pair) -> None:
    source = pair.prefill("r", 21)
    lease_id = pair.producer.scheduler.lender.leases.snapshot()[0].lease_id  # type: ignore[attr-defined]
    pair.producer.scheduler.take_back(params_of(source))
    pair.finish(pair.decode(source))

    both = msgspec.json.encode([told(pair.producer, "r"), told(pair.consumer, "r")])

    assert lease_id[:8].encode() in both  # of the error, so that people find it in a log
    assert lease_id.encode() not in both


def test_a_refused_ticket_is_told(pair: Pair) -> None:
    source = pair.prefill("r", 21)
    source.response_params = {**params_of(source), "ticket": "forged"}
    with pytest.raises(TicketError):
        pair.decode(source)

    trace = trace_of(pair.consumer, "r")

    assert trace.outcome == "refused"
    assert "Ticket" in trace.error


def test_an_ordinary_request_is_none_of_the_records(pair: Pair) -> None:
    pair.finish(pair.consumer.add("r", range(9)))

    reply = told(pair.consumer, "r")

    assert (reply.engine_id, reply.remembered, reply.requests) == ("d", 0, ())


def test_an_id_is_found_between_hyphens_and_as_the_sources(pair: Pair) -> None:
    source = pair.prefill("cmpl-7f3a-0-1b", 21)
    source.request_id = "cmpl-7f3a-0-9c"  # vLLM gives each engine's request an end of its own
    pair.finish(pair.decode(source))

    for wanted in ("cmpl-7f3a-0-1b", "7f3a", "cmpl-7f3a"):
        assert len(told(pair.producer, wanted).requests) == 1, wanted
        assert len(told(pair.consumer, wanted).requests) == 1, wanted
    for unknown in ("7f3", "cmpl", "cmpl-7f3a-0-9"):
        known = unknown == "cmpl"
        assert bool(told(pair.consumer, unknown).requests) == known, unknown


def test_the_trace_context_is_kept_if_it_is_one(pair: Pair) -> None:
    for text, kept in ((TRACEPARENT, TRACEPARENT), ("00-\x1b[2J-01", ""), (f"{TRACEPARENT}\n", "")):
        request = FakeRequest(f"r{len(text)}", (1, 2), {"do_remote_decode": True})
        request.traceparent = text
        pair.producer.scheduler.on_new_request(request)

        assert trace_of(pair.producer, request.request_id).traceparent == kept


# ---- bounds -------------------------------------------------------------------------------------


def lending(request_id: str) -> FakeRequest:
    return FakeRequest(request_id, (1, 2), {"do_remote_decode": True})


def test_all_open_requests_and_the_last_that_ended_are_remembered() -> None:
    records = RequestRecords(itertools.count().__next__)
    lives = records.begin(lending("lives"), loads=False)
    for number in range(REMEMBERED + 10):
        records.end(records.begin(lending(f"r{number}"), loads=False), "over")

    assert records.num_open() == 1
    assert records.find("r9") == (REMEMBERED + 1, ())
    assert len(records._by_id) == REMEMBERED + 1
    assert [len(records.find(name)[1]) for name in ("lives", "r10")] == [1, 1]
    records.end(lives, "over")
    assert records.num_open() == 0
    assert records.find("r10") == (REMEMBERED, ())


def test_every_request_is_open_until_its_own_end() -> None:
    records = RequestRecords(itertools.count().__next__)
    requests = [lending(f"r{number}") for number in range(REMEMBERED + 10)]
    for request in requests:
        records.begin(request, loads=False)
    assert records.num_open() == len(requests)

    for left, request in enumerate(requests[::-1]):
        assert records.num_open() == len(requests) - left
        records.finished(request, False, None)

    assert records.num_open() == 0


def test_a_request_of_an_endless_id_is_open_and_not_remembered() -> None:
    records = RequestRecords(itertools.count().__next__)
    request = lending("r-" + "x" * MAX_ID_CHARS)

    records.begin(request, loads=False)

    assert records.num_open() == 1
    assert records.find("r") == records.find(request.request_id) == (0, ())
    records.finished(request, False, None)
    assert records.num_open() == 0


def test_requests_of_one_id_end_one_by_one() -> None:
    records = RequestRecords(itertools.count().__next__)
    request = lending("r")
    records.begin(request, loads=False)
    records.begin(request, loads=False)
    records.end(records.begin(request, loads=True), "refused by the engine's front")
    assert records.num_open() == 2

    records.finished(request, False, None)
    assert records.num_open() == 1
    records.finished(request, False, None)
    assert records.num_open() == 0


def test_of_many_requests_of_one_id_the_newest_are_told() -> None:
    records = RequestRecords(itertools.count().__next__)
    for number in range(MAX_TRACES + 5):
        records.begin(lending(f"r-{number}"), loads=False)

    _, found = records.find("r")

    assert [trace.request_id for trace in found] == [f"r-{n}" for n in range(5, MAX_TRACES + 5)]


def test_a_record_is_bounded_whatever_ranks_and_errors_say(pair: Pair) -> None:
    moved(pair)
    (report, *_) = [r for output in pair.consumer.outputs for r in output.transfer_records]
    records = RequestRecords(itertools.count().__next__)
    record = records.begin(lending("r"), loads=True)

    for rank in range(2 * MAX_RANKS):
        records.add(
            msgspec.structs.replace(
                report, request_id="r", rank=rank, error="x" * 9999, token_digests=(1,) * 9999
            )
        )
    record.fail(1.0, "y" * 9999)

    assert len(msgspec.msgpack.encode(record.trace(2.0))) < MAX_RANKS * (2 * MAX_ERROR_CHARS)
    assert all(kept.token_digests is None for kept in record.ranks)
    assert len(record.ranks) == MAX_RANKS


class ToldSpans:
    """Stands for what makes spans."""

    def __init__(self) -> None:
        self.told: list[Callable[[], RequestTrace]] = []

    def tell(self, trace: Callable[[], RequestTrace]) -> None:
        self.told.append(trace)


def test_an_ended_record_is_handed_on_once() -> None:
    spans = ToldSpans()
    records = RequestRecords(itertools.count().__next__, spans)  # type: ignore[arg-type]
    record = records.begin(lending("r"), loads=False)

    records.end(record, "abort")
    records.end(record, "again")

    assert [trace().outcome for trace in spans.told] == ["abort"]


# ---- rooms --------------------------------------------------------------------------------------


OWN_PROMPT = range(21)


@pytest.fixture
def rooms() -> Iterator[Rooms]:
    """The rooms of an engine of one rank that lends and loads."""
    groups = (small_geometry("NHD", 4),)
    plugin, context = connector_context(
        pull_config("kv_both", "rooms"),
        incarnation="of the rooms",
        groups=groups,
        model=fake_model(groups),
        num_blocks=64,
        world_size=1,
    )
    worker: Any = FakeRank.open(plugin, context, 0).worker
    with Rooms.open(context, worker) as opened:
        yield opened


def loaded(rooms: Rooms, tokens: Sequence[int], params: dict[str, Any] | None) -> RoomLoad:
    """The room, at its end, of a prompt whose tokens are all there before it is loaded."""
    tables = (list(range(1, 7)),)
    request = RoomRequest(
        request_id="d",
        prompt_token_ids=tokens,
        kv_transfer_params=params,
        weights="w",
        tables=tables,
    )
    load = rooms.load(request, len(tokens))

    def is_over() -> bool:
        rooms.step()
        return load.is_over

    until(is_over)
    return load


def test_a_room_that_needs_no_token_is_not_open_any_more(
    rooms: Rooms, open_engine: OpenEngine
) -> None:
    source = open_engine("p", SOURCE)
    lent = source.add("r", OWN_PROMPT, REMOTE_DECODE, content={"weights": "w"})
    until(lambda: source.step() or lent.stage is Stage.FINISHED)

    load = loaded(rooms, lent.prompt_token_ids, params_of(lent))

    assert (load.state, load.error) == (RoomState.DONE, "")
    assert rooms.scheduler.records.num_open() == 0


def test_a_room_of_the_engines_own_prompt_is_not_open_any_more(rooms: Rooms) -> None:
    own = RoomRequest(
        request_id="p",
        prompt_token_ids=OWN_PROMPT,
        kv_transfer_params=REMOTE_DECODE,
        weights="w",
        tables=([1, 2, 3, 4, 5, 6],),
        num_computed_tokens=len(OWN_PROMPT),
        finish_reason="length",
    )
    rooms.scheduler.on_new_request(own)
    _, params = rooms.scheduler.request_finished(own, own.tables)

    load = loaded(rooms, OWN_PROMPT, params)

    assert load.state is RoomState.FAILED
    rooms.step()
    assert rooms.scheduler.records.num_open() == 0
