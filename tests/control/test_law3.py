"""Law 3 at the source: blocks are freed only when no read that will be counted can still run.

A state machine plays a source engine, two target engines and a network that delays, repeats,
reorders and loses messages. The oracle keeps what the code under test cannot see: when each read
began and ended, and when blocks were freed. Time is the world's; the source's clock runs an hour
ahead of it and drifts, and the targets act whenever they like, which covers every clock of theirs.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kvferry.control import messages
from kvferry.control.leases import SLOW, Lease, LeaseOutcome, LeaseTable
from kvferry.control.messages import (
    ErrorReply,
    Finish,
    FinishAnswer,
    Finishes,
    Handshake,
    LeaseAnswer,
    Release,
    Renew,
)
from kvferry.control.options import ControlOptions
from kvferry.control.proofs import prove
from kvferry.control.server import ControlService
from tests.control.simulation.defects import (
    ConfirmsAfterTheEnd,
    ForgetsFormerHolders,
    FreesAfterTheFirstTaker,
    KeepsClaims,
    PublishesTheFastestRank,
)

DURATION = 30.0
ENGINES = {"x": 2, "y": 3}  # engine id -> ranks
WRITERS = (0, 1)
"""Ranks of the source that write leases which grow."""
TOKENS = 3
"""Tokens of each lease."""

engines = st.sampled_from(sorted(ENGINES))
picks = st.integers(0, 3)
seldom = st.sampled_from((False, False, False, True))


@dataclass
class Read:
    """One rank of one start of a target, reading the blocks of one lease."""

    target: tuple[str, str]
    rank: int
    lease_id: str
    began: int
    """Number of the step."""
    tokens: dict[int, int] = field(default_factory=dict)
    """Token → number of the step in which it was read."""
    ended: int | None = None
    counts: bool = False
    """Whether its rank has reported success."""


@dataclass
class Kept:
    """What is kept under one lease."""

    lease_id: str
    granted: float
    """Reading of the source's clock."""
    shared: bool
    freed: int | None = None
    """Number of the step in which the blocks were freed."""
    withdrawn: bool = False
    revoked: bool = False
    written: dict[int, list[int]] = field(default_factory=dict)
    """Of a lease that grows, rank of the source → the steps in which it wrote each token."""

    @property
    def is_whole(self):
        return all(len(steps) == TOKENS for steps in self.written.values())


@dataclass
class Granted:
    """A lease, or a claim on a shared one."""

    lease_id: str
    incarnation: str
    """Start of the source that granted it."""
    secret: bytes
    """What its ticket carries."""
    kept: Kept
    heard: float = 0.0
    """Reading of the source's clock when its last holder took or renewed it."""
    holders: list[tuple[str, str]] = field(default_factory=list)
    """Targets that were told held, in the order of the first time."""
    seen: set[tuple[tuple[str, str], int]] = field(default_factory=set)
    """Target and rank for which somebody who saw the ticket has reported."""


@dataclass
class Sent:
    payload: bytes
    target: tuple[str, str]
    read: Read | None = None
    """What is reported; ``None`` also where it is not the target that reports."""
    forged: bool = False
    """Whether it comes from somebody who never saw the ticket."""


class World(RuleBasedStateMachine):
    """See the top of the file."""

    table_class: type[LeaseTable]
    service_class: type[ControlService]
    describe: staticmethod

    @initialize(drift=st.floats(0.8, 1.2), shared=st.booleans())
    def start(self, drift, shared):
        self.now = 0.0
        self.step = 0
        self.lives = True
        """Whether the source takes the targets' connections for living."""
        self.clock = lambda: 3600.0 + self.now * drift
        self.starts = Counter(p=0, x=0, y=0)
        self.network: list[Sent] = []
        self.reads: list[Read] = []
        self.leases: list[Granted] = []
        self.given_up: set[tuple[tuple[str, str], str]] = set()
        self.readable: dict[tuple[tuple[str, str], str], int] = {}
        """Target and lease → tokens that the target was told that it may read."""
        self.boot_source()
        for engine in ENGINES:
            self.shake_hands(engine)
        self.network = []
        self.grant(shared)

    def boot_source(self):
        self.starts["p"] += 1
        self.incarnation = f"p{self.starts['p']}"
        self.table = self.table_class(duration_s=DURATION, max_blocks=1000, clock=self.clock)
        self.service = self.service_class(
            engine_id="p",
            incarnation=self.incarnation,
            role="kv_producer",
            leases=self.table,
            options=ControlOptions(lease_duration_s=DURATION),
            clock=self.clock,
        )
        # A service without sockets knows nothing.
        self.service._lives = lambda target: self.lives  # type: ignore[method-assign]
        self.service.set_description(self.descriptions("p", self.incarnation))

    def descriptions(self, engine_id, incarnation, tp=1):
        return self.describe(engine_id, incarnation, tp=tp, num_layers=1)

    def target(self, engine: str) -> tuple[str, str]:
        return engine, f"{engine}{self.starts[engine]}"

    # ---- the source ------------------------------------------------------------------------

    @rule(paused=seldom, lives=st.booleans())
    def sweep_and_free(self, paused=False, lives=False):
        """The source may have been paused, and its targets' connections may live."""
        self.table.expire(awake_s=0.0 if paused else DURATION, lives=lambda _: lives)
        for ended in self.table.sweep():
            lease = self.find(ended.lease_id)
            assert lease.kept.freed is None, "freed twice"
            lease.kept.freed = self.step
            if lease.kept.shared:
                self.check_shared(lease.kept)
            elif ended.outcome is LeaseOutcome.DONE:
                assert self.has_finished(lease, ended.target), "a rank is still reading"
            elif ended.outcome is LeaseOutcome.RELEASED and not lease.kept.withdrawn:
                assert (ended.target, ended.lease_id) in self.given_up, "nobody gave it up"

    def has_finished(self, lease, target):
        """Whether each rank of a target has reported."""
        finished = {
            read.rank
            for read in self.reads
            if read.lease_id == lease.lease_id and read.target == target and read.ended is not None
        }
        finished |= {rank for seen, rank in lease.seen if seen == target}
        return finished == set(range(ENGINES[target[0]]))

    def check_shared(self, kept):
        """Nobody took a shared lease away before its time, nor from one who may be reading."""
        if kept.revoked:
            return
        age = self.clock() - kept.granted
        assert kept.withdrawn or age >= SLOW * DURATION, "a shared lease ended before its time"
        for claim in self.leases:
            if claim.kept is kept and claim.holders:
                holder = claim.holders[-1]
                assert (
                    self.has_finished(claim, holder)
                    or (holder, claim.lease_id) in self.given_up
                    or self.clock() - claim.heard >= DURATION
                ), "a taker of a shared lease may still be reading"

    def grant(self, shared=False, grows=False):
        writers = WRITERS if grows else ()
        lease = self.table.grant(
            "request", 10, shared=shared, num_tokens=TOKENS * grows, writers=writers
        )
        assert isinstance(lease, Lease)
        secret = self.service.secret(lease.lease_id)
        kept = Kept(lease.lease_id, self.clock(), shared)
        kept.written = {rank: [] for rank in writers}
        # Two loads under one ticket, of a release before there were shared leases and of ours.
        for name in ("", "/claim") if shared else ("",):
            self.leases.append(Granted(lease.lease_id + name, self.incarnation, secret, kept))

    @rule(pick=picks, rank=st.sampled_from(WRITERS), count=st.integers(1, TOKENS))
    def write(self, pick, rank, count):
        """A rank of the source writes the next tokens of a lease that grows, and reports them."""
        kept = self.pick_lease(pick).kept
        steps = kept.written.get(rank)
        if steps is not None and kept.freed is None and not kept.revoked:
            steps += [self.step] * min(count, TOKENS - len(steps))
            self.service.written(kept.lease_id, rank, len(steps))

    def restart_source(self):
        self.boot_source()
        for lease in self.leases:
            if lease.kept.freed is None:
                lease.kept.freed = self.step

    @rule(pick=picks, revokes=st.booleans())
    def take_back(self, pick, revokes):
        """The router will not have it fetched, or the source itself needs the blocks."""
        kept = self.pick_lease(pick).kept
        if revokes:
            kept.revoked = True
            self.table.revoke([kept.lease_id])
        elif pick % 2:
            kept.withdrawn = True
            self.table.withdraw(kept.lease_id)

    # ---- the targets -----------------------------------------------------------------------

    @rule(engine=engines, pick=picks, late=seldom, lives=st.booleans(), grows=st.booleans())
    def renew(self, engine, pick, late, lives, grows):
        self.lives = lives
        lease, target = self.pick_lease(pick), self.target(engine)
        self.post(self.renewal(lease, target, grows=grows), target, late=late)

    @rule(engine=engines, pick=picks, keep=st.booleans(), late=seldom)
    def release(self, engine, pick, keep, late):
        lease, target = self.pick_lease(pick), self.target(engine)
        self.given_up.add((target, lease.lease_id))
        self.post(self.giving_up(lease, target, keep), target, late=late)

    @rule(engine=engines, rank=st.integers(0, 2), pick=picks, at_once=st.booleans())
    def begin_read(self, engine, rank, pick, at_once):
        lease, target = self.pick_lease(pick), self.target(engine)
        rank %= ENGINES[engine]
        begun = {(read.target, read.rank, read.lease_id) for read in self.reads}
        # The target's one duty: each rank reads a lease at most once per start.
        if (target, rank, lease.lease_id) not in begun and (
            (target, lease.lease_id) not in self.given_up
        ):
            read = Read(target, rank, lease.lease_id, self.step)
            self.reads.append(read)
            self.read_on(read)
            if at_once:
                self.finish(read, ok=True, late=False)

    @precondition(lambda self: any(read.ended is None for read in self.reads))
    @rule(pick=picks, fails=seldom, late=seldom)
    def end_read(self, pick, fails, late):
        running = [read for read in self.reads if read.ended is None]
        self.finish(running[pick % len(running)], ok=not fails, late=late)

    def read_on(self, read):
        """Reads the tokens that can be read: the target's other duty."""
        kept = self.find(read.lease_id).kept
        known = TOKENS if not kept.written else 0
        known = self.readable.get((read.target, read.lease_id), known)
        for token in range(len(read.tokens), known):
            read.tokens[token] = self.step

    def finish(self, read, *, ok, late):
        """The rank reports, and does not say that it has read what it was not told to read."""
        self.step += 1
        self.read_on(read)
        read.ended = self.step
        lease, nonce = self.find(read.lease_id), f"{read.target}{read.rank}".encode()
        lies = ok and len(read.tokens) < TOKENS
        read.counts = ok and not (lies and lease.kept.is_whole)
        message = self.report(lease, read.target, read.rank, read.counts, nonce)
        if lies and read.counts:  # unless that shows, because not all of it is written yet
            self.hand_over(Sent(messages.encode(message), read.target, read))
        else:
            self.post(message, read.target, read, late=late)

    def shake_hands(self, engine, late=False):
        target = self.target(engine)
        description = self.descriptions(*target, tp=ENGINES[engine])
        self.post(Handshake(id=1, description=description), target, late=late)

    # ---- strangers -------------------------------------------------------------------------

    @rule(
        kind=st.sampled_from(("renew", "finish", "release")),
        engine=engines,
        rank=st.integers(0, 2),
        pick=picks,
    )
    def forge(self, kind, engine, rank, pick):
        """Somebody who knows every name and number, and not the ticket, speaks for a target."""
        lease, target = self.pick_lease(pick), self.target(engine)
        wrong = replace(lease, secret=bytes(len(lease.secret)))
        match kind:
            case "renew":
                message = self.renewal(wrong, target)
            case "finish":
                message = self.report(wrong, target, rank % ENGINES[engine], True, b"forged")
            case _:
                message = self.giving_up(wrong, target, False)
        self.hand_over(Sent(messages.encode(message), target, forged=True))

    @rule(
        engine=engines, ranks=st.sampled_from(((0,), (1,), (2,), (0, 1, 2), (0, 1, 2))), pick=picks
    )
    def report_with_a_ticket_that_was_seen(self, engine, ranks, pick):
        """Somebody who saw the ticket reports for ranks: the load may fail, and that is all."""
        lease, target = self.pick_lease(pick), self.target(engine)
        for rank in {rank % ENGINES[engine] for rank in ranks}:
            lease.seen.add((target, rank))
            message = self.report(lease, target, rank, True, b"seen")
            self.hand_over(Sent(messages.encode(message), target))

    # ---- between them ----------------------------------------------------------------------

    @rule(seconds=st.sampled_from((0.5, DURATION / 6, DURATION / 2, DURATION / 2, DURATION)))
    def wait(self, seconds):
        self.now += seconds

    @rule(
        kind=st.sampled_from(
            (
                "restart target",
                "late handshake",
                "restart source",
                "lose",
                "grant",
                "share",
                "share",
                "grow",
                "grow",
            )
        ),
        engine=engines,
        pick=picks,
    )
    def mishap(self, kind, engine, pick):
        match kind:
            case "restart target":
                # Reads of the old start go on: it may be a process that only looked dead.
                self.starts[engine] += 1
                self.shake_hands(engine)
            case "late handshake":
                self.starts[engine] += 1
                self.shake_hands(engine, late=True)
            case "restart source" if pick == 0:
                self.restart_source()
                for known in ENGINES:
                    self.shake_hands(known)
            case "lose" if self.network:
                del self.network[pick % len(self.network)]
            case _:
                self.grant(shared=kind == "share", grows=kind == "grow")

    @precondition(lambda self: self.network)
    @rule(pick=picks, keep=st.booleans())
    def deliver(self, pick, keep):
        """Hands one of the messages over, maybe one that was delivered before."""
        index = pick % len(self.network)
        sent = self.network[index] if keep else self.network.pop(index)
        self.hand_over(sent)

    def post(self, message, target, read=None, *, late=False):
        sent = Sent(messages.encode(message), target, read)
        self.network.append(sent)  # those delivered at once stay to be delivered again
        self.network = self.network[-4:]
        if not late:
            self.hand_over(sent)

    def hand_over(self, sent):
        self.step += 1
        reply = messages.decode_reply(self.service.handle(sent.payload))
        if sent.forged:
            assert "held" not in messages.encode(reply).decode("latin-1"), "a stranger was believed"
        elif isinstance(reply, messages.Renewed):
            for lease_id, answer in reply.states.items():
                if answer is LeaseAnswer.HELD:
                    self.check_held(lease_id, sent.target)
                    self.find(lease_id).heard = self.clock()
                    self.check_readable(lease_id, sent, reply.written.get(lease_id))
        elif isinstance(reply, messages.FinishReply):
            (confirm,) = reply.answers
            if confirm is FinishAnswer.HELD and sent.read is not None:
                self.check_confirmed(sent)
        elif isinstance(reply, ErrorReply):
            assert reply.name == "HandshakeNeededError", reply

    def check_confirmed(self, sent):
        read = sent.read
        lease = self.find(read.lease_id)
        freed = lease.kept.freed
        assert freed is None or freed > read.ended, (
            f"read from step {read.began} to {read.ended} was confirmed, "
            f"its blocks were freed in step {freed}"
        )
        for token in range(TOKENS if read.counts else 0):
            assert token in read.tokens, "a read of a part was confirmed"
            for steps in lease.kept.written.values():
                written = steps[token] if token < len(steps) else self.step
                assert written < read.tokens[token], (
                    f"token {token} was read in step {read.tokens[token]} and confirmed, "
                    f"and a rank wrote it in step {written}"
                )
        self.check_held(read.lease_id, sent.target)

    def check_readable(self, lease_id, sent, readable):
        """A target is told how many tokens of a lease it may read."""
        kept = self.find(lease_id).kept
        request = messages.decode_request(sent.payload)
        assert isinstance(request, Renew)
        assert request.grows or kept.is_whole, "an old release is given a lease that grows"
        least = min(map(len, kept.written.values()), default=TOKENS)
        told = TOKENS if readable is None else readable
        assert told <= least, "tokens were published that a rank has not written"
        self.readable[sent.target, lease_id] = told

    def check_held(self, lease_id, target):
        """A target that has lost a lease to another never gets it back."""
        lease = self.find(lease_id)
        if target not in lease.holders:
            lease.holders.append(target)
            lease.heard = self.clock()
        assert lease.holders[-1] == target, "two targets hold one lease"

    def header(self, lease, target):
        return {
            "id": 1,
            "engine_id": target[0],
            "incarnation": target[1],
            "source_incarnation": lease.incarnation,
        }

    def renewal(self, lease, target, *, grows=True):
        proofs = self.proofs("Renew", lease, target)
        return Renew(**self.header(lease, target), leases=proofs, grows=grows)

    def giving_up(self, lease, target, keep):
        proofs = self.proofs("Release", lease, target, keep)
        return Release(**self.header(lease, target), leases=proofs, keep=keep)

    def report(self, lease, target, rank, ok, nonce):
        (proof,) = self.proofs("Finish", lease, target, rank, ok, nonce).values()
        item = Finish(lease_id=lease.lease_id, rank=rank, ok=ok, nonce=nonce, proof=proof)
        return Finishes(**self.header(lease, target), items=(item,))

    def proofs(self, action, lease, target, *said):
        said = (*target, lease.incarnation, *said)
        return {lease.lease_id: prove(lease.secret, action, lease.lease_id, *said)}

    def pick_lease(self, pick):
        return self.leases[-1 - pick % min(2, len(self.leases))]

    def find(self, lease_id):
        return next(lease for lease in self.leases if lease.lease_id == lease_id)

    def check_invariants(self, *args, **kwargs):
        # Hypothesis calls this after every rule; it also numbers the steps.
        super().check_invariants(*args, **kwargs)
        self.step = getattr(self, "step", 0) + 1

    def teardown(self):
        """Left alone, every lease ends within three durations: no block stays pinned for ever."""
        if hasattr(self, "table"):
            self.table.revoke([lease.lease_id for lease in self.leases if not lease.kept.is_whole])
            for lease in self.leases:
                lease.kept.revoked |= not lease.kept.is_whole
            self.now += 3 * DURATION / 0.8 + 1
            self.sweep_and_free()
            pinned = "a block stays pinned for ever"
            assert self.table.pinned_blocks == self.table.num_open == 0, pinned
            assert all(lease.kept.freed is not None for lease in self.leases), pinned


def play(classes, describe, examples, phases=tuple(Phase)):
    """Plays with a table, or a table and a service."""
    table_class, service_class = (*classes, ControlService)[:2]
    own = {
        "table_class": table_class,
        "service_class": service_class,
        "describe": staticmethod(describe),
    }
    machine = type("Machine", (World,), own)
    # The same examples in every run, and some that show each mutation early.
    machine = seed(1)(machine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            database=None,
            phases=phases,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_a_confirmed_read_ended_before_its_blocks_were_freed(describe):
    play((LeaseTable,), describe, examples=300)


class CountsReports(LeaseTable):
    """Mutation: reports are counted, not ranks."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.reports: Counter[str] = Counter()

    def _report(self, entry, rank, report):
        self.reports[entry.lease.lease_id] += 1
        return super()._report(entry, rank, report)

    def _is_done(self, entry, world_size):
        return self.reports[entry.lease.lease_id] >= world_size


class KeepsReports(LeaseTable):
    """Mutation: the reports of a former holder count for the next one."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.kept: defaultdict[str, dict] = defaultdict(dict)

    def _report(self, entry, rank, report):
        kept = self.kept[entry.lease.lease_id]
        kept[rank] = report
        entry.reports = kept
        return FinishAnswer.HELD


class FreesAtRelease(LeaseTable):
    """Mutation: a released lease is freed and still confirmed."""

    def _late_finish(self, lease_id, target, rank, report):
        ended = self._ended.get(lease_id)
        if ended is not None and ended.target == target:
            return FinishAnswer.HELD
        return FinishAnswer.REVOKED


class ForgetsNonces(LeaseTable):
    """Mutation: any report of a rank is taken for a repetition of its first one."""

    def _report(self, entry, rank, report):
        return super()._report(entry, rank, (report[0], b""))

    def _late_finish(self, lease_id, target, rank, report):
        return super()._late_finish(lease_id, target, rank, (report[0], b""))


class ForgetsOpenClaims(LeaseTable):
    """Mutation: a shared lease ends when its time is over, whoever reads."""

    def expire(self, **said):
        super().expire(**said)
        for entry in list(self._open.values()):
            if entry.claims and self._clock() >= entry.deadline:
                self._end(entry, LeaseOutcome.EXPIRED)


class EndsWithItsLastTaker(LeaseTable):
    """Mutation: a shared lease is over as soon as none of its claims is open."""

    def _end_claim(self, base, ended):
        base.deadline = self._clock()
        super()._end_claim(base, ended)


class ConfirmsAPart(LeaseTable):
    """Mutation: a report counts although tokens are still to be written."""

    def finish(self, lease_id, *said, ok, **more):
        entry = self._open.get(lease_id)
        if entry is not None:
            entry.written = {}
        return super().finish(lease_id, *said, ok=ok, **more)


class ConfirmsWhatIsRevoked(LeaseTable):
    """Mutation: a report is confirmed although the source has taken the lease back."""

    def _late_finish(self, lease_id, target, rank, report):
        ended = self._ended.get(lease_id)
        if ended is not None and ended.outcome is LeaseOutcome.REVOKED and ended.target == target:
            return FinishAnswer.HELD
        return super()._late_finish(lease_id, target, rank, report)


class GivesPartsToAnybody(LeaseTable):
    """Mutation: targets that know no leases that grow are given them."""

    def _renew(self, *said, grows):
        return super()._renew(*said, grows=True)


class BelievesAnybody(ControlService):
    """Mutation: nobody has to prove anything."""

    def _is_proven(self, peer, proof, action, lease_id, *said):
        return True


BROKEN = "|".join(
    (
        "was confirmed",
        "freed twice",
        "a rank is still reading",
        "nobody gave it up",
        "a shared lease ended before its time",
        "a taker of a shared lease may still be reading",
        "two targets hold one lease",
        "published that a rank has not written",
        "an old release is given a lease that grows",
        "a stranger was believed",
        "a block stays pinned for ever",
    )
)
"""What the machine says where the law does not hold. Which of it a mutation breaks first depends on
the games, and those on the modules that are loaded."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutation",
    [
        (ConfirmsAfterTheEnd,),
        (CountsReports,),
        (KeepsReports,),
        (ForgetsFormerHolders,),
        (FreesAtRelease,),
        (ForgetsNonces,),
        (FreesAfterTheFirstTaker,),
        (ForgetsOpenClaims,),
        (EndsWithItsLastTaker,),
        (KeepsClaims,),
        (PublishesTheFastestRank,),
        (ConfirmsAPart,),
        (ConfirmsWhatIsRevoked,),
        (GivesPartsToAnybody,),
        (LeaseTable, BelievesAnybody),
    ],
    ids=lambda mutation: mutation[-1].__name__,
)
def test_the_law_fails_for(mutation, describe):
    with pytest.raises(AssertionError, match=BROKEN):
        # Finding the failure is enough; shrinking it costs most of the time.
        play(mutation, describe, examples=6000, phases=(Phase.generate,))


@pytest.mark.parametrize("drift", [0.7, 1.0, 1.3])
def test_a_lease_is_kept_alive_by_renewals_timed_with_a_wrong_and_drifting_clock(
    drift, clock_class
):
    """The source's clock is an hour ahead and exact; the target renews by its own."""
    source = clock_class(3600.0)
    table = LeaseTable(duration_s=DURATION, max_blocks=10, clock=source)
    lease = table.grant("request", 1)
    assert isinstance(lease, Lease)
    lease_id = lease.lease_id
    target_clock, next_renewal = -5000.0, -5000.0
    for _ in range(1000):
        source.now += 1.0
        target_clock += drift
        if target_clock >= next_renewal:
            assert table.renew("d", "i", [lease_id]) == {lease_id: LeaseAnswer.HELD}
            next_renewal = target_clock + DURATION / 6
        table.expire()
        assert table.sweep() == []
    source.now += DURATION
    table.expire()
    assert [ended.outcome for ended in table.sweep()] == [LeaseOutcome.EXPIRED]
