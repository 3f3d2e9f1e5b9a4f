"""Moments between two steps of the PullConnector at which another thread or host interferes."""

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

import kvferry.transports.shm as shm
from kvferry.connectors.pull.pursuit import PROMPT_S, Load, LoadState, PursuitState, Standing
from kvferry.connectors.pull.sources import NAMED_S
from kvferry.control.client import fetch_status
from kvferry.control.messages import LeaseAnswer
from kvferry.errors import (
    EngineError,
    LeaseTakenError,
    PeerLostError,
    SharedMemoryError,
    TicketError,
)
from kvferry.testing.connector_conformance import Pair
from kvferry.testing.fake_engine import FakeEngine
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S, until
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.wire_messages import decode_endpoint, encode
from tests.clock import Clock
from tests.connectors.engines import (
    SOURCE,
    TARGET,
    end_leases,
    keep_parked,
    passed_on,
    renew_now,
    retold,
    served,
)

OpenEngine = Callable[..., FakeEngine]


def wait_for_lease(load: Any) -> None:
    """Neither engine is stepped meanwhile."""
    until(lambda: load.pursuit.standing.state is PursuitState.HELD, what="the lease")


# ---- the sources' thread changes a load between two looks of the scheduler ----------------------


def test_a_load_whose_lease_is_lost_as_it_starts_keeps_its_blocks_until_the_ranks_have_reported(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer, consumer = open_engine("p", SOURCE), open_engine("d", TARGET)
    pair = Pair(producer, consumer, WAIT_S)
    request = pair.decode(pair.prefill("r", 21))
    allocated: Any = consumer.scheduler.update_state_after_alloc

    def lost_just_before(*args: Any) -> None:
        load: Any = consumer.scheduler.borrower.loads["r"]  # type: ignore[attr-defined]
        producer.scheduler.lender.leases.revoke([load.lease_id])  # type: ignore[attr-defined]
        renew_now(consumer, "r")
        until(lambda: load.pursuit.standing.state is PursuitState.LOST, what="a renewal's answer")
        monkeypatch.undo()
        allocated(*args)

    held: list[bool] = []

    def abort_before_the_ranks_run() -> None:
        if request.stage is Stage.LOADING and not held:
            consumer.abort("r")
            held.append(bool(consumer.held))

    monkeypatch.setattr(consumer.scheduler, "update_state_after_alloc", lost_just_before)
    consumer.during_step = abort_before_the_ranks_run
    pair.run(lambda: bool(held), "the load to start")
    assert held == [True], "the blocks are free while the ranks may still write to them"
    pair.settle()


class _Changing:
    """A pursuit of which every look sees the next state."""

    def __init__(self, pursuit: Any, *states: PursuitState) -> None:
        self._pursuit, self._states = pursuit, list(states)

    @property
    def standing(self) -> Standing:
        state = self._states.pop(0)
        error = PeerLostError("the handshake took too long")
        is_lost = state is PursuitState.LOST
        return Standing(state, self._pursuit.ticket, error=error if is_lost else None)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pursuit, name)


def test_a_load_that_fails_while_it_is_looked_at_is_not_offered(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S)
    request = pair.decode(pair.prefill("r", 21))
    scheduler: Any = pair.consumer.scheduler
    load = scheduler.borrower.loads["r"]
    changing = _Changing(load.pursuit, PursuitState.LEASING, PursuitState.LOST)
    scheduler.borrower.loads["r"] = Load(changing, started=0.0)  # type: ignore[arg-type]
    monkeypatch.setattr(scheduler.client, "pump", lambda: False)
    assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
    with pytest.raises(PeerLostError):
        scheduler.get_num_new_matched_tokens(request, 0)
    scheduler.borrower.loads["r"] = load
    pair.finish(request)
    pair.settle()


def test_a_source_that_has_forgotten_us_is_met_again_before_the_lease_expires(
    clock: Clock, open_engine: OpenEngine
) -> None:
    consumer = open_engine("d", TARGET, progress_timeout_s=6000.0)
    pair = Pair(open_engine("p", SOURCE, lease_duration_s=60.0), consumer, WAIT_S)
    request = pair.decode(pair.prefill("r", 21))
    load: Any = consumer.scheduler.borrower.loads["r"]  # type: ignore[attr-defined]
    wait_for_lease(load)
    pair.producer.scheduler.server.peers.forget("d")  # type: ignore[attr-defined]
    keep_parked(clock, pair, 60.0)  # the consumer has no blocks for it yet
    pair.finish(request)
    assert request.error is None
    assert not request.failed
    pair.settle()


def test_the_lease_of_a_source_that_is_known_is_had_while_no_other_thread_runs(
    open_engine: OpenEngine,
) -> None:
    pair = Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S)
    served(pair, "before")
    source = pair.prefill("r", 21)
    scheduler: Any = pair.consumer.scheduler
    go_on, stopped = threading.Event(), threading.Barrier(3)
    for thread in (scheduler.sources.thread, scheduler.client._mailbox):
        thread.post(lambda: (stopped.wait(WAIT_S), go_on.wait(WAIT_S)))
    stopped.wait(WAIT_S)
    try:
        request = pair.decode(source)

        def is_had() -> bool:
            scheduler.has_news()  # a step ends
            return bool(scheduler.get_num_new_matched_tokens(request, 0) != (None, False))

        until(is_had, every_s=0.001, what="the lease")
    finally:
        go_on.set()
    pair.finish(request)
    assert request.error is None
    pair.settle()


@pytest.mark.parametrize("ended_by", ["has_news", "build_connector_meta"])
def test_a_step_looks_for_answers_once_however_many_requests_wait(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, ended_by: str
) -> None:
    target = open_engine("d", TARGET, early_load="off")  # else each state is looked at once more
    pair = Pair(open_engine("p", SOURCE), target, WAIT_S)
    served(pair, "before")  # so there is no news of a handshake, which would be lost here
    sources = [pair.prefill(name, 21) for name in "abc"]
    requests = [pair.decode(source) for source in sources]
    scheduler: Any = pair.consumer.scheduler
    loads = {name: scheduler.borrower.loads[name] for name in "abc"}
    for name, load in loads.items():
        changing: Any = _Changing(load.pursuit, *[PursuitState.LEASING] * 2)
        scheduler.borrower.loads[name] = Load(changing, started=0.0)
    looks: list[None] = []
    with monkeypatch.context() as patch:
        patch.setattr(scheduler.client, "pump", lambda: looks.append(None))
        for step in (1, 2):
            for request in requests:
                assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
            assert len(looks) == step
            if ended_by == "has_news":
                scheduler.has_news()
            else:
                scheduler.build_connector_meta(None)
    scheduler.borrower.loads.update(loads)
    for request in requests:
        pair.finish(request)
    pair.settle()


def test_a_renewal_answered_after_the_load_has_ended_is_no_news_of_it(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S)
    request = pair.decode(pair.prefill("r", 21))
    scheduler: Any = pair.consumer.scheduler
    load = scheduler.borrower.loads["r"]
    wait_for_lease(load)
    late: Future[dict[str, LeaseAnswer]] = Future()
    asked = threading.Event()

    def renew(*_: Any) -> "Future[dict[str, LeaseAnswer]]":
        asked.set()
        return late

    monkeypatch.setattr(scheduler.client, "renew", renew)
    renew_now(pair.consumer, "r")
    assert asked.wait(WAIT_S)
    pair.run(lambda: load.state is LoadState.LOADED, "the ranks")
    late.set_result({load.lease_id: LeaseAnswer.DONE})
    assert load.state is LoadState.LOADED  # a request preempted now would else fail for it
    pair.finish(request)
    pair.settle()


def test_a_source_that_was_silent_is_not_waited_for_again_until_it_answers(
    clock: Clock, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = open_engine("d", TARGET, handshake_timeout_s=120.0)
    pair = Pair(open_engine("p", SOURCE), consumer, WAIT_S)
    scheduler: Any = consumer.scheduler

    def unanswered(*_: Any) -> "Future[Any]":
        lost: Future[Any] = Future()
        lost.set_exception(PeerLostError("no answer"))
        return lost

    monkeypatch.setattr(scheduler.client, "handshake", unanswered)
    first = pair.decode(pair.prefill("first", 21))
    beside = pair.decode(pair.prefill("beside", 21))
    scheduler.borrower.loads["beside"].pursuit.deadline += 1000
    pair.run(clock.passing(lambda: first.stage is Stage.FINISHED), "'first' to end")
    assert "did not grant lease" in str(first.error)
    pair.finish(beside)
    assert "has been silent: no answer" in str(beside.error)
    (source,) = scheduler.sources.agenda.sources.values()
    assert scheduler.silent_peers() == (source.address,)
    second = pair.decode(pair.prefill("second", 21))
    assert scheduler.borrower.loads["second"].pursuit.standing.state is PursuitState.LOST
    pair.finish(second)
    assert "has been silent: no answer" in str(second.error)
    monkeypatch.undo()
    pair.run(clock.passing(lambda: not source.silence), "an answer, which no load asks for")
    assert scheduler.silent_peers() == ()
    served(pair, "third")


def test_a_silent_source_that_nobody_asks_any_more_is_named_for_a_while_only(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = open_engine("d", TARGET, handshake_timeout_s=2.0)
    pair = Pair(open_engine("p", SOURCE), consumer, WAIT_S)
    scheduler: Any = consumer.scheduler
    sources = scheduler.sources

    def unanswered(*_: Any) -> "Future[Any]":
        lost: Future[Any] = Future()
        lost.set_exception(PeerLostError("no answer"))
        return lost

    monkeypatch.setattr(sources.client, "handshake", unanswered)
    pair.finish(pair.decode(pair.prefill("first", 21)))
    (source,) = sources.agenda.sources.values()
    pair.run(lambda: not source.given_up, "the attempt to give its lease back")
    assert sources.silent_peers() == (source.name,)
    clock = sources.agenda.clock
    monkeypatch.setattr(sources.agenda, "clock", lambda: clock() + NAMED_S)
    assert sources.silent_peers() == ()
    assert not sources._needs_handshake(source, sources.agenda.clock())


def test_what_comes_late_of_a_forgotten_source_changes_nothing_of_the_one_in_its_place(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S)
    served(pair, "first")
    scheduler: Any = pair.consumer.scheduler
    sources = scheduler.sources
    monkeypatch.setattr(sources.client, "is_connected", lambda _: False)
    (source,) = sources.agenda.sources.values()
    with sources.agenda.lock:
        later = sources.agenda.clock() + 2 * NAMED_S
        sources._plan_end(source, later)
        assert not sources.agenda.sources
        sources._plan_end(source, later)  # something has woken it once more
        other = sources.agenda.find(source.address, later)
        sources._plan_end(source, later)
        assert sources.agenda.sources == {source.address: other}
    served(pair, "second")


def test_a_load_waits_for_the_answer_to_a_handshake_though_the_one_before_failed(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = open_engine("d", TARGET, handshake_timeout_s=0.1)
    pair = Pair(open_engine("p", SOURCE), consumer, WAIT_S)
    scheduler: Any = consumer.scheduler
    sources = scheduler.sources
    answers: list[Future[Any]] = [Future(), Future()]
    asked = iter(answers)
    monkeypatch.setattr(sources.client, "handshake", lambda *_: next(asked, answers[1]))
    request = pair.decode(pair.prefill("r", 21))
    (pursuit,) = sources.agenda.pursuits
    pursuit.deadline += 1000
    (source,) = sources.agenda.sources.values()
    answers[0].set_exception(PeerLostError("it is just starting"))
    pair.run(lambda: source.handshake is answers[1], "the second handshake")
    pair.run(lambda: sources.thread.awake_s > 0.1, "that nobody blames our own slowness")
    pursuit.deadline = 0.0
    sources._turn()
    assert pursuit.awaits_source  # it is connected, and slow
    answers[1].set_exception(PeerLostError("now it is gone"))
    pair.finish(request)
    assert "now it is gone" in str(request.error)


def test_a_load_waits_for_the_answer_to_a_renewal_though_the_one_before_failed(
    clock: Clock, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = open_engine("d", TARGET, handshake_timeout_s=120.0)
    pair = Pair(open_engine("p", SOURCE), consumer, WAIT_S)
    served(pair, "first")  # the two know each other
    scheduler: Any = consumer.scheduler
    sources = scheduler.sources
    answers: list[Future[Any]] = [Future(), Future()]
    asked = iter(answers)
    second = threading.Event()

    def renew(*_: Any) -> "Future[Any]":
        answer = next(asked, answers[1])
        if answer is answers[1]:
            second.set()
        return answer

    monkeypatch.setattr(sources.client, "renew", renew)
    request = pair.decode(passed_on(pair.prefill("r", 21)))
    (pursuit,) = sources.agenda.pursuits
    pursuit.deadline += 1000
    answers[0].set_exception(PeerLostError("the connection broke"))
    assert second.wait(WAIT_S)
    has_run = clock.passing(lambda: sources.thread.awake_s > 120.0)
    pair.run(has_run, "that nobody blames our own slowness")
    pursuit.deadline = 0.0
    sources._turn()
    assert pursuit.awaits_source  # it is connected, and slow
    answers[1].set_exception(PeerLostError("now it is gone"))
    pair.finish(request)
    assert "now it is gone" in str(request.error)


def test_a_rank_that_hangs_does_not_keep_the_blocks_of_the_source(
    clock: Clock, open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = open_engine("p", SOURCE, lease_duration_s=120.0)
    pair = Pair(producer, open_engine("d", TARGET, progress_timeout_s=120.0), WAIT_S)
    request = pair.decode(pair.prefill("r", 21))
    hung: Any = pair.consumer.workers[0]
    monkeypatch.setattr(hung, "start_load_kv", lambda *_: None)
    pair.run(clock.passing(lambda: not producer.held), "the source's blocks")
    assert request.stage is Stage.LOADING  # its own blocks stay: the rank may come to life
    errors = pair.consumer.scheduler.server.status().errors  # type: ignore[attr-defined]
    assert any("progress_timeout_s: 120" in event.message for event in errors)
    # It was given up: a lease of a living connection is not left to expire.
    assert producer.scheduler.lender.leases.counters()["released"] == 1  # type: ignore[attr-defined]


@pytest.fixture
def taken(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """``taken(lease_duration_s)``: a lease that one consumer holds and another one was given too;
    the pairs of both with the producer, and the other one's request, which has been told so."""

    def make(lease_duration_s: float) -> tuple[Pair, Pair, FakeRequest]:
        producer = open_engine("p", SOURCE, lease_duration_s=lease_duration_s)
        consumer = open_engine("d-holder", TARGET, progress_timeout_s=6000.0)
        holder = Pair(producer, consumer, WAIT_S)
        source = holder.prefill("r", 21)
        for worker in holder.consumer.workers:
            monkeypatch.setattr(worker, "start_load_kv", lambda *_: None)
        held = holder.decode(source)
        holder.run(lambda: held.stage is Stage.LOADING, "the load to start")
        other = Pair(producer, open_engine("d-other", TARGET), WAIT_S)
        request = other.decode(source)
        load = other.consumer.scheduler.borrower.loads["r"]  # type: ignore[attr-defined]
        other.run(lambda: load.pursuit.standing.state is PursuitState.CONTENDED, "the answer")
        return holder, other, request

    return make


def test_a_lease_passes_on_although_its_holders_end_is_noticed_late(
    taken: Callable[..., Any],
) -> None:
    holder, other, request = taken(600.0)
    assert request.stage is Stage.WAITING
    holder.consumer.close()

    other.finish(request)

    assert request.error is None
    assert request.external_tokens == 21


def test_a_lease_whose_holder_lives_is_waited_for_no_longer_than_it_lasts(
    clock: Clock, taken: Callable[..., Any]
) -> None:
    _, other, request = taken(60.0)
    # However late its renewals are.
    other.producer.scheduler.lender.leases._takeover_after_s = math.inf

    other.run(clock.passing(lambda: request.stage is Stage.FINISHED), "the end of the wait")

    assert isinstance(request.error, LeaseTakenError)
    assert request.external_tokens == 0


def test_a_load_waits_for_a_source_whose_thread_stands_still(
    clock: Clock, open_engine: OpenEngine
) -> None:
    """For longer than it would wait for one that cannot be reached, and than a lease lasts."""
    producer = open_engine("p", SOURCE, lease_duration_s=60.0)
    consumer = open_engine("d", TARGET, handshake_timeout_s=60.0, request_timeout_s=6000.0)
    pair = Pair(producer, consumer, WAIT_S)
    server: Any = producer.scheduler.server  # type: ignore[attr-defined]
    stands, goes_on = threading.Event(), threading.Event()

    def stand() -> list[Any]:
        with clock.stopped():
            stands.set()
            goes_on.wait(WAIT_S)
        return []

    for name in ("met anew", "known"):
        stands.clear()
        goes_on.clear()
        server.set_transfers(stand)
        asked = threading.Thread(target=fetch_status, args=("127.0.0.1", server.port, WAIT_S))
        asked.start()
        try:
            assert stands.wait(WAIT_S)
            request = pair.decode(pair.prefill(name, 21))
            for _ in range(200):
                clock.advance(1.0)
                producer.step()
                consumer.step()
            assert request.error is None
        finally:
            goes_on.set()
            asked.join()
        server.set_transfers(list)
        pair.finish(request)
        assert request.error is None
        assert not request.failed
        assert request.external_tokens > 0


def test_a_defect_that_ends_the_thread_of_sources_ends_the_engine_and_is_not_waited_for(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S)
    source = pair.prefill("r", 21)

    def broken(*_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(pair.consumer.scheduler.client, "handshake", broken)  # type: ignore[attr-defined]
    request = pair.decode(source)
    with pytest.raises(EngineError, match="ZeroDivisionError"):
        pair.finish(request)


# ---- connections that break, and such as cannot be made -----------------------------------------


@pytest.mark.parametrize("transport", ["shm", "vm", "tcp"])
def test_a_connection_that_broke_is_made_again(open_engine: OpenEngine, transport: str) -> None:
    producer = open_engine("p", SOURCE, transport=transport)
    pair = Pair(producer, open_engine("d", TARGET, transport=transport), WAIT_S)
    served(pair, "before")
    for worker in pair.consumer.workers:
        for connection in worker.cache.loads.peers.connected["p"].connections.values():  # type: ignore[attr-defined]
            connection.close()
    served(pair, "after")


def test_a_reader_that_had_to_make_room_for_another_comes_back(open_engine: OpenEngine) -> None:
    tcp = {"transport": "tcp", "transport_config": {"tcp": {"max_readers": 6}}}
    producer = open_engine("p", SOURCE, **tcp)
    one, two = open_engine("d1", TARGET, **tcp), open_engine("d2", TARGET, **tcp)
    for number, consumer in enumerate((one, two, one, two)):
        served(Pair(producer, consumer, WAIT_S), f"r{number}")


def test_a_connection_that_could_not_be_made_at_the_handshake_is_made_by_the_load(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect = shm.ShmTransport.connect
    failures: list[SharedMemoryError] = []

    def fail_once(transport: shm.ShmTransport, endpoint: bytes) -> shm.ShmPeer:
        if not failures:
            failures.append(SharedMemoryError("too many open files"))
            raise failures[0]
        return connect(transport, endpoint)

    monkeypatch.setattr(shm.ShmTransport, "connect", fail_once)
    served(Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S), "r")
    assert failures


@pytest.mark.parametrize(
    ("transport", "boot_id"),
    [("shm", "kvferry.transports.local.boot_id"), ("vm", "kvferry.transports.vm_process.boot_id")],
)
def test_where_the_best_transport_does_not_reach_the_next_one_is_taken(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch, transport: str, boot_id: str
) -> None:
    producer = open_engine("p", SOURCE, transport=[transport, "tcp"])
    monkeypatch.setattr(boot_id, lambda: "another host")
    consumer = open_engine("d", TARGET, transport=[transport, "tcp"])
    served(Pair(producer, consumer, WAIT_S), "r")
    for worker in consumer.workers:
        assert worker.cache.loads.peers.connected["p"].transport.name == "tcp"  # type: ignore[attr-defined]


# ---- what comes from elsewhere ------------------------------------------------------------------


@pytest.mark.parametrize("host", ["[", "]", "[]"])
def test_a_ticket_that_names_no_address_is_refused(open_engine: OpenEngine, host: str) -> None:
    pair = Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S)
    source = pair.prefill("r", 21)
    assert source.response_params is not None
    source.response_params = retold(source.response_params, host=host)
    with pytest.raises(TicketError, match="host:port"):
        pair.decode(source)
    end_leases(pair.producer)
    served(pair, "next")


def test_an_endpoint_with_impossible_numbers_fails_the_loads_from_its_engine_only(
    open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = TcpTransport.endpoint

    def boastful(transport: TcpTransport) -> bytes:
        told = decode_endpoint(endpoint(transport))
        return encode(msgspec.structs.replace(told, regions=(2**64 - 1,)))

    with monkeypatch.context() as patch:
        patch.setattr(TcpTransport, "endpoint", boastful)
        bad = open_engine("p-bad", SOURCE, transport="tcp")
    good = open_engine("p-good", SOURCE, transport="tcp")
    consumer = open_engine("d", TARGET, transport="tcp")
    request = Pair(bad, consumer, WAIT_S).decode(Pair(bad, consumer, WAIT_S).prefill("r", 21))
    Pair(bad, consumer, WAIT_S).finish(request)
    assert request.failed
    served(Pair(good, consumer, WAIT_S), "next")


# ---- the ranks may read before the source has said that the lease is ours ------------------------


@pytest.fixture
def unanswered(open_engine: OpenEngine, monkeypatch: pytest.MonkeyPatch) -> Pair:
    """Engines that know each other; no Renew is answered any more."""
    pair = Pair(open_engine("p", SOURCE), open_engine("d", TARGET), WAIT_S)
    served(pair, "first")
    scheduler: Any = pair.consumer.scheduler
    monkeypatch.setattr(scheduler.sources.client, "renew", lambda *_: Future())
    return pair


def test_what_a_whole_ticket_names_is_read_before_the_source_says_that_the_lease_is_ours(
    unanswered: Pair,
) -> None:
    request = unanswered.decode(unanswered.prefill("r", 21))
    assert unanswered.consumer.scheduler.borrower.loads["r"].pursuit.standing.is_trusted  # type: ignore[attr-defined]
    unanswered.finish(request)
    assert (request.error, request.failed, request.external_tokens) == (None, False, 21)
    unanswered.settle()


def test_what_is_read_under_a_lease_that_had_ended_is_not_used(unanswered: Pair) -> None:
    source = unanswered.prefill("r", 21)
    producer: Any = unanswered.producer.scheduler
    (lease,) = producer.lender.leases.snapshot()
    producer.lender.leases.revoke([lease.lease_id])
    request = unanswered.decode(source)
    unanswered.finish(request)
    assert request.failed
    status = fetch_status("127.0.0.1", unanswered.consumer.scheduler.port)  # type: ignore[attr-defined]
    assert "ended before the load was confirmed" in status.errors[-1].message


@pytest.mark.parametrize(
    "why", ["it was passed on", "it is not whole", "the source owes an answer", "it failed to give"]
)
def test_a_load_waits_for_its_lease_where_the_word_of_its_source_counts(
    unanswered: Pair, why: str
) -> None:
    source = unanswered.prefill("r", 21)
    sources: Any = unanswered.consumer.scheduler.sources  # type: ignore[attr-defined]
    (known,) = sources.agenda.sources.values()
    assert source.response_params is not None
    match why:
        case "it was passed on":
            passed_on(source)
        case "it is not whole":
            source.response_params = retold(source.response_params, whole=False)
        case "the source owes an answer":
            known.awaited = time.monotonic() - PROMPT_S
        case _:
            known.error = PeerLostError("it was slow")
    unanswered.decode(source)
    assert unanswered.consumer.scheduler.borrower.loads["r"].pursuit.awaits_source  # type: ignore[attr-defined]
