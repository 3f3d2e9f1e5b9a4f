"""Prompts that are lent, and loaded, while they are computed.

The source computes in chunks and the target reads what is written. The fake engines compare every
cell that arrives, bit for bit, whatever the two engines' shapes; what each rank has moved is
compared with a load of the same prompt once it is whole.
"""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull import groups, lender, loads
from kvferry.connectors.pull.pace import PromptPace
from kvferry.connectors.pull.peer import SourcePeer
from kvferry.connectors.pull.pursuit import TIMES_ANEW, Growth, LoadState, Pursuit, PursuitState
from kvferry.connectors.records import digest_mismatch
from kvferry.control import leases
from kvferry.control.leases import LeaseOutcome
from kvferry.control.messages import FinishAnswer, LeaseAnswer, Renewed
from kvferry.control.tickets import TransferId
from kvferry.errors import KVFerryError, TransferError
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.testing.connector_conformance import WINDOW, WINDOWED, small_geometry
from kvferry.testing.fake_engine import FakeEngine, Groups, run
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S, until
from kvferry.transports.shm import ShmTransport
from tests.connectors.engines import KEY, pull_config, renew_now
from tests.connectors.test_pull_chains import FAMILIES
from tests.connectors.test_pull_staged_geometries import CASES, WithoutProof

Choose = Callable[[Sequence[Any]], Any]


@dataclass
class Scene:
    """A source whose tickets are handed on as soon as they are, and a target."""

    source: FakeEngine
    target: FakeEngine
    tickets: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    """Request id → the params of its leases, the one that was granted last at the end."""

    def __post_init__(self) -> None:
        tickets: Any = self.source.scheduler.lender.tickets  # type: ignore[attr-defined]
        told = tickets.tell_lent

        def tell(ticket: Any) -> dict[str, Any]:
            params = tickets.params(ticket)
            self.tickets.setdefault(ticket.request_id, []).append(params)
            return told(ticket)

        tickets.tell_lent = tell

    def begin(self, name: str, num_tokens: int, chunk: int, *, hit: int = 0) -> FakeRequest:
        """The source has computed the first chunk of a prompt, all other ones are to come."""
        self.source.chunk_tokens = chunk
        tokens = range(7000, 7000 + num_tokens)
        transfer = TransferId.begin("127.0.0.1:1", KEY.encode()).text
        asked = {"do_remote_decode": True, "transfer": transfer}
        request = self.source.add(name, tokens, asked, local_blocks=hit)
        self.source.step()
        return request

    def load(self, name: str, *, hit: int = 0) -> FakeRequest:
        """The target is given the newest ticket of a prompt, and the token that will follow it."""
        prompt = self.source.requests[name].prompt_token_ids
        tokens = (*prompt, len(prompt))
        return self.target.add(name, tokens, self.tickets[name][-1], local_blocks=hit)

    def run(self, until: Callable[[], bool], what: str, *engines: FakeEngine) -> None:
        """Steps engines, the target alone unless others are named."""
        run(engines or [self.target], until, timeout_s=WAIT_S, what=what)

    def end(self, *requests: FakeRequest) -> None:
        """Steps both until requests have ended, and nothing is left of them."""
        both = self.source, self.target
        self.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "the end", *both)
        for request in self.source.requests.values():
            # Nobody comes any more for what was lent after all.
            self.source.scheduler.take_back(request.response_params or {})
        self.run(lambda: all(each.is_idle for each in both), "both to be idle", *both)
        for engine in both:
            assert engine.num_free_blocks == engine.num_blocks - 1
            engine.check_memory()

    def hear(self, load: FakeRequest) -> None:
        """The target knows what can be read at this moment."""
        sources: Any = self.target.scheduler.sources  # type: ignore[attr-defined]
        known = self.target.scheduler.borrower.loads[load.request_id].pursuit  # type: ignore[attr-defined]
        self.run(lambda: known.source.knows_us and is_ours(known), "the lease")
        with sources.agenda.lock:
            sources.pursuits.renewals.send(known.source, [known], sources.agenda.clock())
        while known.is_asked:
            sources.client.pump()
        self.target.step()

    def moved(self, name: str) -> dict[int, int]:
        """Rank of the target → bytes that it has moved for a request."""
        records = [r for out in self.target.outputs for r in out.transfer_records]
        return {r.rank: r.nbytes for r in records if r.request_id == name and r.ok}


@contextmanager
def open_scene(
    source: Groups,
    target: Groups,
    *,
    early_load: str = "now",
    layer_windows: dict[int, int] | None = None,
    configured: Callable[[KVTransferConfig], KVTransferConfig] = lambda config: config,
    **extra: Any,
) -> Iterator[Scene]:
    with ExitStack() as stack:
        keys: dict[str, Any] = {"lease_duration_s": 600.0, "early_load": early_load} | extra

        def opened(role: str, name: str, groups: Groups) -> FakeEngine:
            config = configured(pull_config(role, name, **keys))
            engine = FakeEngine.open(config, groups, num_blocks=128, layer_windows=layer_windows)
            stack.callback(engine.close)
            return engine

        yield Scene(opened("kv_both", "p", source), opened("kv_consumer", "d", target))


def is_ours(pursuit: Pursuit) -> bool:
    """Whether the source has said that the lease is the target's."""
    return pursuit.standing.state in (PursuitState.GROWING, PursuitState.HELD)


def readable(scene: Scene, name: str) -> int | None:
    load: Any = scene.target.scheduler.borrower.loads[name]  # type: ignore[attr-defined]
    spec = load.spec
    return None if spec is None else spec.readable


SOURCE, TARGET = small_geometry("HND", 4, tp=2), small_geometry("NHD", 6, pp=2)


def test_what_is_written_is_read_while_the_rest_is_computed() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        scene.run(lambda: readable(scene, "a") == 12, "the first part, which ends with a block")
        assert scene.target.requests["a"].stage is Stage.LOADING
        scene.source.step()
        scene.run(lambda: readable(scene, "a") == 24, "the second part")
        scene.end(scene.source.requests["a"], load)
        assert load.external_tokens == 60
        assert not load.failed


def test_a_load_in_parts_moves_what_a_whole_one_does() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        scene.begin("a", 50, chunk=8)
        early = scene.load("a")
        scene.end(scene.source.requests["a"], early)
        scene.source.chunk_tokens = None
        whole = scene.source.add("b", range(7000, 7050), {"do_remote_decode": True})
        scene.run(lambda: whole.stage is Stage.FINISHED, "the prompt", scene.source)
        late = scene.target.add("b", (*range(7000, 7050), 50), whole.response_params)
        scene.end(late)
        assert scene.moved("a") == scene.moved("b")
        assert sorted(scene.moved("a")) == [0, 1]


def test_off_waits_until_the_prompt_is_whole() -> None:
    with open_scene(SOURCE, TARGET, early_load="off") as scene:
        scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        scene.hear(load)
        assert load.stage is Stage.WAITING
        assert scene.target.num_free_blocks == scene.target.num_blocks - 1
        scene.end(scene.source.requests["a"], load)
        assert load.external_tokens == 60


def test_a_prompt_of_one_chunk_is_lent_once() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        request = scene.begin("a", 30, chunk=30)
        scene.run(lambda: request.stage is Stage.FINISHED, "the prompt", scene.source)
        assert len(scene.tickets["a"]) == 1
        scene.end(scene.load("a"))


def test_whoever_comes_after_the_prompt_is_whole_gets_the_same_lease() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        request = scene.begin("a", 30, chunk=8)
        scene.run(lambda: request.stage is Stage.FINISHED, "the prompt", scene.source)
        first, last = scene.tickets["a"]
        assert first["remote_num_tokens"] == last["remote_num_tokens"] == 30
        load = scene.target.add("a", (*range(7000, 7030), 30), first)
        scene.end(load)
        assert load.external_tokens == 30
        assert not load.failed


@pytest.mark.parametrize("how", ["preempt", "abort"])
def test_a_prompt_that_is_not_computed_to_its_end_fails_the_load(how: str) -> None:
    with open_scene(SOURCE, TARGET) as scene:
        request = scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        scene.run(lambda: readable(scene, "a") == 12, "the first part")
        getattr(scene.source, how)("a")
        scene.end(request, load)
        assert load.failed
        counters = scene.source.scheduler.counters()
        assert counters["leases_revoked"] == 1
        assert "asks_denied" not in counters


def test_a_preempted_prompt_is_lent_anew_once_it_is_whole() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        request = scene.begin("a", 60, chunk=16)
        scene.source.preempt("a")
        scene.run(lambda: request.stage is Stage.FINISHED, "the prompt", scene.source)
        first, last = scene.tickets["a"]
        assert first["ticket"] != last["ticket"]
        load = scene.load("a")
        scene.end(load)
        assert not load.failed


def test_a_load_that_is_aborted_leaves_the_prompt_alone() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        request = scene.begin("a", 60, chunk=16)
        scene.load("a")
        scene.run(lambda: readable(scene, "a") == 12, "the first part")
        scene.target.abort("a")
        scene.run(lambda: scene.target.is_idle, "the load to be given up")
        scene.end(request)
        assert request.finished_cleanly
        assert request.response_params is None, "who wanted it has gone"


def test_a_source_that_ends_fails_the_load() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        scene.run(lambda: readable(scene, "a") == 12, "the first part")
        scene.source.close()
        renew_now(scene.target, "a")
        scene.run(lambda: load.stage is Stage.FINISHED, "the load to fail")
        assert load.failed


def test_a_target_reads_as_late_as_all_but_the_last_chunk_can_move_in_time() -> None:
    with open_scene(SOURCE, TARGET, early_load="late") as scene:
        scene.begin("a", 60, chunk=4)
        load = scene.load("a")
        known: Any = scene.target.scheduler.borrower.loads["a"].pursuit  # type: ignore[attr-defined]
        scene.run(lambda: is_ours(known), "the lease")
        scene.target.step()
        assert load.stage is Stage.WAITING, "no pace is known"
        sources: Any = scene.target.scheduler.sources  # type: ignore[attr-defined]
        pace = PromptPace()
        pace.note(0, 10, 4.0)
        pace.note(10, 20, 6.0)  # and so 8, 10, 11, 11 for those that follow
        # Nobody reads by what is put here, so it is put back.
        before, known.growth = known.growth, Growth(times=((0.0, 10), (12.0, 20)), chunk=10)
        known.source.pace.computes = pace  # this prompt takes twice as long
        sources.agenda.clock = lambda: 15.0  # 3 of 80 s have passed; 50 tokens are to move in time
        known.source.pace.moves = 50 / 76
        assert not sources.pursuits.is_due_early(known, waits=True)
        known.source.pace.moves = 50 / 78
        assert sources.pursuits.is_due_early(known, waits=True)
        sources.agenda.clock = time.monotonic
        known.growth = before
        scene.end(scene.source.requests["a"], load)
        assert load.external_tokens == 60


def test_of_a_source_that_is_not_known_the_first_chunk_tells_when_all_is_computed() -> None:
    with open_scene(SOURCE, TARGET, early_load="late") as scene:
        scene.begin("a", 60, chunk=4)
        load = scene.load("a")
        known: Any = scene.target.scheduler.borrower.loads["a"].pursuit  # type: ignore[attr-defined]
        scene.run(lambda: is_ours(known), "the lease")
        sources: Any = scene.target.scheduler.sources  # type: ignore[attr-defined]
        before = (known.growth, known.standing)
        known.growth, known.standing = Growth(), replace(known.standing, written=0)
        states, written = {known.lease_id: LeaseAnswer.HELD}, {known.lease_id: 0}
        sources.agenda.clock = lambda: 5.0
        news = Renewed(id=7, states=states, written=written)
        sources.pursuits.renewals.told(known.source.address, news)
        growth, unknown = known.growth, PromptPace()
        assert growth.times == ((5.0, 0),)
        assert growth.whole_in(6.0, 60, unknown) == float("inf")
        growth.times = (*growth.times, (15.0, 20))
        assert growth.whole_in(18.0, 60, unknown) == 17.0
        sources.agenda.clock = time.monotonic
        known.growth, known.standing = before
        scene.end(scene.source.requests["a"], load)
        assert not load.failed


def test_a_link_that_has_become_slower_is_believed_sooner_than_one_that_is_faster() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        request = scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        source: Any = scene.target.scheduler.borrower.loads["a"].pursuit.source  # type: ignore[attr-defined]
        scene.end(request, load)
        assert source.pace.moves > 0, "of the load that has ended"
        source.pace.moves = None
        for seconds, pace in ((6.0, 10.0), (60.0, 20 / 11), (6.0, 40 / 13)):
            source.pace.moved(60, seconds)
            assert source.pace.moves == pytest.approx(pace)


def test_as_much_is_read_as_the_slowest_rank_has_written() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        rank = scene.source.ranks[1]
        whole = rank.run

        def slow(*step: Any) -> Any:
            report = whole(*step)
            report.written.clear()
            return report

        rank.run = slow  # type: ignore[method-assign, assignment]
        scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        scene.hear(load)
        assert readable(scene, "a") in (None, 0)
        rank.run = whole  # type: ignore[method-assign]
        scene.source.step()
        scene.run(lambda: readable(scene, "a") == 24, "what both have written")
        scene.end(scene.source.requests["a"], load)
        assert not load.failed


def test_old_news_and_news_that_come_twice_change_nothing() -> None:
    with open_scene(SOURCE, TARGET, early_load="off") as scene:
        scene.begin("a", 60, chunk=16)
        scene.load("a")
        pull: Any = scene.target.scheduler
        load = pull.borrower.loads["a"].pursuit
        scene.run(lambda: is_ours(load), "the lease")
        states = {load.lease_id: LeaseAnswer.HELD}

        def told(tokens: int | None, *table: int) -> None:
            written = {} if tokens is None else {load.lease_id: tokens}
            tables: dict[str, tuple[tuple[int, ...], ...]] = {load.lease_id: (table,)}
            news = Renewed(id=0, states=states, written=written, tables=tables)
            pull.sources.pursuits.renewals.told(load.source.address, news)

        told(32, 1, 2, 3)
        told(16, 1)
        told(32, 1, 2, 3, 4)
        assert (load.standing.written, load.ticket.block_ids) == (32, ((1, 2, 3),))
        told(None, 1, 2, 3, 4, 5)
        told(48, 1, 2)
        assert (load.standing.written, load.ticket.block_ids) == (None, ((1, 2, 3, 4, 5),))
        assert load.standing.state is PursuitState.HELD


def test_a_part_that_cannot_be_read_fails_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_scene(SOURCE, TARGET) as scene:
        request = scene.begin("a", 60, chunk=16)
        load = scene.load("a")
        scene.run(lambda: readable(scene, "a") == 12, "the first part")

        def broken(peer: Any, *_: Any) -> Any:
            raise TransferError("nothing comes")

        monkeypatch.setattr(SourcePeer, "read", broken)
        scene.source.step()
        scene.run(lambda: load.stage is not Stage.LOADING, "the end of the load")
        scene.end(request, load)
        assert load.failed


@contextmanager
def open_case(case: str, *, staged: bool) -> Iterator[Scene]:
    """A scene of a case, whose digests are compared."""
    source, target = CASES[case]
    windows = dict.fromkeys(WINDOWED, WINDOW) if isinstance(source, tuple) else {}
    transport = WithoutProof if staged else ShmTransport
    with (
        temporary_plugin(TRANSPORTS, "shm", transport),
        open_scene(source, target, layer_windows=windows, record_digests=True) as scene,
    ):
        yield scene


@pytest.mark.parametrize("staged", [False, True], ids=["placed", "staged"])
@pytest.mark.parametrize("case", list(CASES))
def test_parts_of_all_kinds_arrive_and_their_digests_agree(case: str, staged: bool) -> None:
    with open_case(case, staged=staged) as scene:
        scene.begin("a", 53, chunk=7)
        load = scene.load("a")
        for _ in range(7):
            hear(scene, load)
            scene.source.step()
        scene.end(scene.source.requests["a"], load)
        assert not load.failed
        both = scene.source, scene.target
        sent, received = ([r for o in e.outputs for r in o.transfer_records] for e in both)
        assert digest_mismatch(sent, received) is None


@dataclass
class Asked:
    """A request that was sent to both engines of a scene at once."""

    scene: Scene
    source: FakeRequest
    target: FakeRequest

    @classmethod
    def begin(cls, scene: Scene) -> "Asked":
        """The source has computed the first chunk of 60 tokens."""
        port = scene.source.scheduler.port  # type: ignore[attr-defined]
        transfer = TransferId.begin(f"127.0.0.1:{port}", KEY.encode()).text
        tokens = range(7000, 7060)
        asks = {"do_remote_prefill": True, "transfer": transfer}
        target = scene.target.add("d", (*tokens, 60), asks)
        scene.source.chunk_tokens = 16
        lends = {"do_remote_decode": True, "transfer": transfer}
        source = scene.source.add("p", tokens, lends)
        scene.source.step()
        return cls(scene, source, target)

    def readable(self) -> int | None:
        loads = self.scene.target.scheduler.borrower.loads  # type: ignore[attr-defined]
        return readable(self.scene, "d") if "d" in loads else None

    def asks_again(self) -> bool:
        """Whether the target has lost the lease that it reads, and waits for another."""
        loads = self.scene.target.scheduler.borrower.loads  # type: ignore[attr-defined]
        return "d" in loads and loads["d"].state is LoadState.RESTARTING

    def assert_moved_once(self) -> None:
        assert self.target.external_tokens == 60
        assert not self.target.failed
        reports = [out.finished_recving for out in self.scene.target.outputs]
        assert sum("d" in report for report in reports) == 1


def test_a_target_that_asks_reads_what_is_written() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        asked = Asked.begin(scene)
        scene.run(lambda: asked.readable() == 12, "the first part")
        scene.end(asked.source, asked.target)
        asked.assert_moved_once()


@pytest.mark.parametrize("staged", [False, True], ids=["placed", "staged"])
@pytest.mark.parametrize("case", list(CASES))
def test_what_a_preempted_source_computes_anew_is_read_anew(case: str, staged: bool) -> None:
    with open_case(case, staged=staged) as scene:
        asked = Asked.begin(scene)
        scene.run(lambda: asked.target.stage is Stage.LOADING, "the load to begin")
        scene.source.preempt("p")
        scene.end(asked.source, asked.target)
        asked.assert_moved_once()
        outcomes = scene.source.scheduler.lender.leases.counters()  # type: ignore[attr-defined]
        assert outcomes == {LeaseOutcome.REVOKED: 1, LeaseOutcome.DONE: 1}
        both = scene.source, scene.target
        sent, received = ([r for o in e.outputs for r in o.transfer_records] for e in both)
        assert digest_mismatch(sent, received) is None


def test_a_target_asks_again_whose_source_was_preempted_while_it_read() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        asked = Asked.begin(scene)
        scene.run(lambda: asked.readable() == 12, "the first part")
        scene.source.preempt("p")
        scene.source.step()
        scene.run(asked.asks_again, "the target to ask again")
        assert asked.target.stage is Stage.LOADING, "in the blocks that it has"
        scene.end(asked.source, asked.target)
        asked.assert_moved_once()


def test_a_target_whose_source_ends_the_preempted_prompt_fails_the_load() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        asked = Asked.begin(scene)
        scene.run(lambda: asked.readable() == 12, "the first part")
        scene.source.preempt("p")
        scene.source.abort("p")
        scene.end(asked.source, asked.target)
        assert asked.target.failed


def test_a_target_that_waits_for_another_lease_can_be_aborted() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        asked = Asked.begin(scene)
        scene.run(lambda: asked.readable() == 12, "the first part")
        scene.source.preempt("p")
        scene.source.step()
        scene.run(asked.asks_again, "the target to ask again")
        scene.target.abort("d")
        scene.end(asked.source, asked.target)
        assert asked.source.finished_cleanly


def test_a_target_waits_for_another_lease_as_long_as_for_progress() -> None:
    with open_scene(SOURCE, TARGET, progress_timeout_s=120.0) as scene:
        asked = Asked.begin(scene)
        scene.run(lambda: asked.readable() == 12, "the first part")
        scene.source.preempt("p")
        scene.source.chunk_tokens = 1  # it goes on, and is far from its end
        scene.source.step()
        scene.run(asked.asks_again, "the target to ask again")
        pull: Any = scene.target.scheduler
        now = pull.borrower.active._clock()
        pull.borrower.active._clock = lambda: now + 121.0
        scene.run(lambda: asked.target.stage is not Stage.LOADING, "the end of the load")
        assert asked.target.failed
        scene.source.chunk_tokens = None
        scene.end(asked.source, asked.target)


def test_a_lease_that_is_revoked_as_its_load_begins_is_asked_for_again() -> None:
    """Between what the scheduler is told can be loaded and the blocks that it allocates for it."""
    with open_scene(SOURCE, TARGET) as scene:
        asked = Asked.begin(scene)
        target: Any = scene.target
        allocate = target._allocate

        def after_the_end(*said: Any, **more: Any) -> bool:
            target._allocate = allocate
            load = target.scheduler.borrower.loads["d"]
            scene.source.preempt("p")
            scene.source.step()
            until(lambda: load.pursuit.standing.state is PursuitState.LOST)
            return bool(allocate(*said, **more))

        target._allocate = after_the_end
        scene.run(lambda: asked.target.stage is Stage.LOADING, "the load to begin")
        assert target._allocate == allocate
        scene.end(asked.source, asked.target)
        asked.assert_moved_once()


def test_a_load_begins_anew_a_few_times() -> None:
    with open_scene(SOURCE, TARGET) as scene:
        asked = Asked.begin(scene)
        scene.run(lambda: asked.readable() == 12, "the first part")
        load: Any = scene.target.scheduler.borrower.loads["d"]  # type: ignore[attr-defined]
        load.times_anew = TIMES_ANEW
        scene.source.preempt("p")
        scene.end(asked.source, asked.target)
        assert asked.target.failed


# ---- any two engines ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Game:
    """A prompt, two engines, and what happens while it is computed."""

    source: Groups
    target: Groups
    windows: dict[int, int]
    num_tokens: int
    chunk: int
    hits: tuple[int, int]
    """Local hits of source and target, in blocks; less where the prompt is too short."""
    early_load: str
    moves: tuple[str, ...]
    """Who steps, one after the other, or what happens; then both step in turn."""


def drawn(choose: Choose, family: str) -> Game:
    shape, windows = FAMILIES[family]
    events = ("source", "source", "target", "target", "hear", "within")
    once = ("", "", "", "preempt", "abort source", "abort target")
    moves = [choose(events) for _ in range(choose((4, 10, 20)))]
    moves.insert(choose(range(len(moves))), choose(once))
    return Game(
        shape(choose),
        shape(choose),
        dict(windows),
        choose((9, 22, 40, 57)),
        choose((3, 5, 8, 16)),
        (choose((0, 0, 1)), choose((0, 0, 1))),
        choose(("now", "now", "late", "off")),
        tuple(moves),
    )


def play(game: Game) -> bool:
    """Plays it; returns whether the load was good.

    Raises:
        AssertionError: a cell, a count or a block is not what it must be.
    """
    with open_scene(
        game.source, game.target, early_load=game.early_load, layer_windows=game.windows
    ) as scene:
        p, d = scene.source, scene.target
        hits = [
            min(hit, (game.num_tokens - 1) // each.block_size)
            for hit, each in zip(game.hits, (p, d), strict=True)
        ]
        request = scene.begin("a", game.num_tokens, game.chunk, hit=hits[0])
        if "a" not in scene.tickets:
            scene.end(request)
            return False  # all of it was in the first chunk
        load = scene.load("a", hit=hits[1])
        for move in game.moves:
            make(scene, move, request, load)
        scene.end(request, load)
        is_good = load.error is None and not load.failed and load.finished_cleanly
        spoilt = {"preempt", "abort source", "abort target"} & set(game.moves)
        assert is_good or spoilt
        if is_good:
            assert load.external_tokens == game.num_tokens - hits[1] * d.block_size
            check_moved(scene, hits[1])
        return is_good


def make(scene: Scene, move: str, request: FakeRequest, load: FakeRequest) -> None:
    p, d = scene.source, scene.target
    if move == "source":
        p.step()
    elif move == "target":
        d.step()
    elif move == "hear" and load.stage in (Stage.WAITING, Stage.LOADING):
        hear(scene, load)
    elif move == "within":
        # Between the schedule of a step and its ranks, the target reads all that it may.
        p.during_step = lambda: hear(scene, load)
        p.step()
        p.during_step = lambda: None
    elif move == "preempt":
        p.preempt("a")
    elif move == "abort source":
        p.abort("a")
    elif move == "abort target":
        d.abort("a")


def hear(scene: Scene, load: FakeRequest) -> None:
    """As :meth:`Scene.hear`, where there may be nothing to hear."""
    held: Any = scene.target.scheduler.borrower.loads  # type: ignore[attr-defined]
    known = held.get("a")
    if known is None or known.state in (LoadState.LOADED, LoadState.FAILED):
        return
    pursuit = known.pursuit
    waits = known.state is LoadState.WAITING or pursuit.awaits_source
    if waits and pursuit.wants_lease and load.stage is not Stage.FINISHED:
        scene.run(lambda: is_ours(pursuit) or not pursuit.wants_lease, "the lease")
        if is_ours(pursuit) and pursuit.wants_lease and "a" in held:
            scene.hear(load)
            scene.target.step()


def check_moved(scene: Scene, hit: int) -> None:
    """Compares the bytes of each rank with those of the same prompt, lent when it was whole."""
    p, d = scene.source, scene.target
    p.chunk_tokens = None
    prompt = p.requests["a"].prompt_token_ids
    source = p.add("b", prompt, {"do_remote_decode": True})
    scene.run(lambda: source.stage is Stage.FINISHED, "the prompt", p)
    whole = d.add("b", (*prompt, len(prompt)), source.response_params, local_blocks=hit)
    scene.end(whole)
    assert not whole.failed
    assert scene.moved("a") == scene.moved("b")


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("seed", range(4))
def test_a_prompt_arrives_whole(family: str, seed: int) -> None:
    play(drawn(random.Random(seed).choice, family))


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_prompt_arrives_whole(family: str, data: st.DataObject) -> None:
    play(drawn(lambda options: data.draw(st.sampled_from(options)), family))


# ---- defects that must be caught ----------------------------------------------------------------


def publishes_before_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that tokens are written when the step that writes them is put together."""
    grow = lender.Lender.grow

    def too_early(self: Any, output: Any) -> None:
        grow(self, output)
        for lent in self._news().writes:
            for rank in range(self._context.world_size):
                self._server.written(lent.lease_id, rank, lent.num_tokens)

    monkeypatch.setattr(lender.Lender, "grow", too_early)


def overlooks_preemptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lends on what a request that was preempted has lost."""
    grow = lender.Lender.grow

    def blind(self: Any, output: Any) -> None:
        grow(self, replace(output, preempted_req_ids=set()))

    monkeypatch.setattr(lender.Lender, "grow", blind)


def confirms_what_was_revoked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The source confirms in any case, and the target hears of no end."""
    finish = leases.LeaseTable.finish

    def held(self: Any, *said: Any, **more: Any) -> FinishAnswer:
        finish(self, *said, **more)
        return FinishAnswer.HELD

    monkeypatch.setattr(leases.LeaseTable, "finish", held)
    monkeypatch.setattr(loads.Loads, "_cancel", lambda self, lease_id, _: end_well(self, lease_id))


def end_well(ranks: Any, lease_id: str) -> None:
    load = ranks._loads.get(lease_id)
    if load is not None and load.state is not loads.RankLoadState.CONFIRMING:
        load.state = loads.RankLoadState.ALL_BEGUN
        ranks._look(load)


def reads_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begins each part where the first one began."""
    read = loads.Loads._read

    def again(self: Any, load: Any, peer: Any) -> None:
        if load.state is not loads.RankLoadState.ALL_BEGUN:
            load.read_to.clear()
        read(self, load, peer)

    monkeypatch.setattr(loads.Loads, "_read", again)


def leaves_a_part_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the second part for read."""
    read_on = loads.Loads._read_on

    def forgetful(self: Any, spec: Any) -> None:
        load = self._loads.get(spec.ticket.lease_id)
        if load is not None and spec.readable is not None and load.read_to:
            load.read_to = dict.fromkeys(load.read_to, spec.readable)
        read_on(self, spec)

    monkeypatch.setattr(loads.Loads, "_read_on", forgetful)


def keeps_the_first_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never tells of blocks that were allocated after the lease was granted."""
    allocated = leases.LeaseTable.allocated

    def once(self: Any, lease_id: str, tables: Any, note: bytes = b"") -> None:
        if not self.tables([lease_id]):
            allocated(self, lease_id, tables, note)

    monkeypatch.setattr(leases.LeaseTable, "allocated", once)


def moves_windows_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads of a window what the source has before it lets it go."""
    monkeypatch.setattr(groups.SourceGroups, "moves_early", lambda *_: True)


@pytest.mark.parametrize(
    ("defect", "family"),
    [
        (publishes_before_it_is_written, "plain"),
        (overlooks_preemptions, "plain"),
        (confirms_what_was_revoked, "plain"),
        (reads_twice, "plain"),
        (leaves_a_part_out, "plain"),
        (keeps_the_first_tables, "plain"),
        (moves_windows_early, "hybrid"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
@pytest.mark.slow
def test_a_game_finds_defects(
    defect: Callable[[pytest.MonkeyPatch], None], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.connectors.test_pull_early.WAIT_S", 10.0)
    games = [drawn(random.Random(seed).choice, family) for seed in range(200)]
    defect(monkeypatch)
    for game in games:
        try:
            play(replace(game, early_load="now"))
        except (AssertionError, KVFerryError):
            return
    pytest.fail("no game has found it")
