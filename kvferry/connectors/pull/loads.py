"""The loads of one rank: bound, read, confirmed.

A load reads from each source rank, for each pair of KV cache groups; each such read is a transfer.
When no transfer can change the cache any more, the rank tells the source (``Finish``). The source's
answer is the confirm: only then the load counts.

A load changes threads as seldom as possible. The step thread binds the load and starts its
transfers; short transfers are copied on the step thread. The thread that ends the last transfer
sends the Finish, and the thread that finds the answer in the socket concludes the load. The step
thread looks into the socket itself before it takes the ended loads::

    step thread    start ─ bind ─ read ─┐                               ┌─ pump ─ take_ended
    mover                               └─ copy ─ ended ─ Finish ──▶ P ──▶ held

A load whose source still computes the prompt is read in parts: the engine calls
:meth:`Loads.read_on` when more tokens can be read. Each token is read once. All parts together have
one Finish and one answer. If the lease was revoked meanwhile and there is another lease, all tokens
are read again, as soon as no transfer of the first lease can change the cache any more.

Long work has a thread of its own: connecting to an engine, cutting a long load for staging,
digests.

:class:`RankLoadState` is the state of a load::

    WAITING ─ read ──▶ READING ─ read the rest ──▶ ALL_BEGUN ─ settled ──▶ CONFIRMING
       ▲                  └──────┬─────────────────────┘                       ▲
       └─ settled ─ STALE ◀─ another lease          failed, and settled ───────┘

A load is settled when none of its transfers can change the cache any more; a load may fail in every
state.
"""

import enum
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvferry.connectors.pull.metadata import LoadSpec, ids_of
from kvferry.connectors.pull.peer import (
    Move,
    PairPlan,
    SourcePeer,
    SourcePeers,
    TargetRank,
    as_load_error,
)
from kvferry.control.client import ControlClient
from kvferry.control.messages import FinishAnswer
from kvferry.control.proofs import lease_of
from kvferry.errors import (
    CancelledError,
    KVFerryError,
    LeaseRevokedError,
    PeerLostError,
)
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox, Serial
from kvferry.observe.records import TransferRecord
from kvferry.topology import GroupPair
from kvferry.topology.description import EngineDescription
from kvferry.transports.base import Waitable

CONFIRM_ATTEMPTS = 3
"""Number of times that the source is asked whether a load counts before the load is given up."""

CUT_TOKENS = 8192
"""Number of tokens above which the step thread does not start a staged load itself: cutting a load
of 131,072 tokens for the staging memory takes a second. A placed load of as many tokens starts in 2
ms."""

IDLE_S = 1.0
"""Longest time in seconds between two looks at work that depends on time; in such a look,
transports let go of dead peers."""

PROGRESS_S = 0.05
"""Seconds between two looks at the progress of all loads; people read the progress, and steps ask
for the values."""

Digest = Callable[[LoadSpec, Iterable[GroupPair]], tuple[int, ...]]
"""Function from a load and all pairs of the source's groups and ours to one digest per token, over
this rank's cells."""


class RankLoadState(enum.Enum):
    """State of a load on a rank."""

    WAITING = enum.auto()
    """No transfer has begun."""
    READING = enum.auto()
    """Some transfers have begun, and more tokens will be readable."""
    ALL_BEGUN = enum.auto()
    """All transfers have begun."""
    STALE = enum.auto()
    """The begun transfers count for nothing; the load begins again once they are settled."""
    CONFIRMING = enum.auto()
    """The load is settled, and the answer of its source is awaited."""


@dataclass(slots=True, eq=False)
class Confirm:
    """State of asking the source of a settled load whether the load counts."""

    nonce: bytes = field(default_factory=partial(secrets.token_bytes, 8))
    """Random bytes by which the source tells a repetition of our Finish from any other Finish."""
    attempts: int = 0
    """Number of times that the source was asked."""
    began: float = 0.0
    """Unix seconds at which no transfer of the load could change the cache any more."""
    ended: float = 0.0
    """Unix seconds at which the source had said whether the load counts, or had not answered in
    time."""


@dataclass(slots=True, eq=False)
class RankLoad:
    """One load on this rank, from its start to its result."""

    spec: LoadSpec
    after: Waitable | None = None
    """Event after which the cache may be written; ``None`` if no event has to pass."""
    started: float = field(default_factory=time.time)
    """Unix seconds at which the load started."""
    state: RankLoadState = RankLoadState.WAITING
    peer: SourcePeer | None = None
    """Source that the load reads from; ``None`` while the source is not connected."""
    read_to: dict[PairPlan, int] = field(default_factory=dict)
    """Pair of groups → the token up to which its cells are read."""
    moves: list[Move] = field(default_factory=list)
    """The reads that the load has begun."""
    moving_since: float | None = None
    """Clock reading since which a transfer is running; ``None`` while no transfer is."""
    moving: float = 0.0
    """Seconds in which a transfer was running before :attr:`moving_since`."""
    error: KVFerryError | None = None
    """The first error of the load."""
    token_digests: tuple[int, ...] | None = None
    confirm: Confirm = field(default_factory=Confirm)

    @property
    def is_settled(self) -> bool:
        """Whether no transfer of the load can change the cache any more."""
        return all(move.transfer.is_terminal for move in self.moves)

    @property
    def is_over(self) -> bool:
        """Whether no more tokens are to be read for a settled load."""
        if self.state is RankLoadState.ALL_BEGUN or self.error is not None:
            return True
        return any(move.transfer.error for move in self.moves)

    @property
    def nbytes(self) -> int:
        """Number of bytes that the load's transfers move."""
        return sum(move.transfer.nbytes for move in list(self.moves))

    @property
    def bytes_done(self) -> int:
        """Number of bytes in place; any thread may ask, also while transfers are being started."""
        return sum(move.transfer.bytes_done for move in list(self.moves))

    def stop(self) -> None:
        """Asks the begun transfers to stop."""
        for move in self.moves:
            assert self.peer is not None  # a transfer has begun
            self.peer.cancel(move)

    def add_digests(self, digest: Digest, peer: SourcePeer) -> None:
        """Computes the digests of the loaded cells; without them the load fails."""
        try:
            self.token_digests = digest(self.spec, peer.pairs)
        except Exception as error:
            self.error = as_load_error(error, "what was loaded has no digest")

    def record(self, rank: int) -> TransferRecord:
        """The load's record of this rank."""
        return TransferRecord(
            request_id=self.spec.request_id,
            lease_id=lease_of(self.spec.ticket.lease_id),
            rank=rank,
            peer=self.spec.ticket.engine_id,
            direction="recv",
            first_token=self.spec.first_token,
            tokens=self.spec.num_tokens - self.spec.first_token,
            nbytes=self.nbytes,
            copies=sum(move.transfer.segments for move in self.moves),
            started=self.started,
            finished=self.confirm.began,
            ok=self.error is None,
            error="" if self.error is None else f"{type(self.error).__name__}: {self.error}",
            token_digests=self.token_digests,
            transport="" if self.peer is None or not self.moves else self.peer.movement,
            source_ranks=tuple(sorted({move.source_rank for move in self.moves})),
            confirmed=self.confirm.ended,
            moving=self.moving,
        )


class Loads(Closing):
    """Runs the loads of a rank. Every method may be called from any thread, and none waits."""

    def __init__(
        self,
        target: TargetRank,
        client: ControlClient,
        digest: Digest | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        mailbox: Callable[..., Mailbox] = Mailbox,
    ) -> None:
        """Starts a thread for long work. Memory, transports and client stay the caller's.

        Args:
            target: this rank.
            client: sends the Finishes.
            digest: computes the digests of loaded cells; ``None`` for no digests.
            clock: monotonic clock, in seconds.
            mailbox: makes the thread.
        """
        self._target = target
        self._client = client
        self._digest = digest
        self._clock = clock
        self._loads: dict[str, RankLoad] = {}
        self._ended: deque[RankLoad] = deque()
        self._progress: dict[str, tuple[int, int]] = {}
        self._next_progress = 0.0
        self._closed = False
        self._serial = Serial("the loads of this rank")
        self.thread = mailbox("loads", partial(look_at_time, target)).start()
        self.peers = SourcePeers(target, self.thread, self._serial, self._go_on)
        """The source engines, and the connections to them."""

    def meet(self, description: EngineDescription) -> None:
        """Takes a source engine whose handshake succeeded; replaces an older incarnation of the
        engine.
        """
        self._serial.post(lambda: self._meet(description))

    def forget(self, engine_id: str, incarnation: str) -> None:
        """Drops an incarnation of a source engine and its connections, unless a load reads from
        it.
        """
        self._serial.post(partial(self._forget, engine_id, incarnation))

    def start(self, spec: LoadSpec, after: Waitable | None = None) -> None:
        """Starts a load from an engine that was met; nothing is written before ``after``."""
        self._serial.post(partial(self._begin, RankLoad(spec, after)))

    def read_on(self, spec: LoadSpec) -> None:
        """Reads the tokens of a load that ``spec`` adds; loads that are over are ignored."""
        self._serial.post(partial(self._read_on, spec))

    def cancel(self, lease_id: str, reason: str = "") -> None:
        """Gives a load up, for ``reason``, or as its request was aborted; the load still comes out
        of :meth:`take_ended`. Unknown ids are ignored.
        """
        self._serial.post(partial(self._cancel, lease_id, reason))

    def take_ended(self) -> list[RankLoad]:
        """Loads that ended since the last call, each exactly once.

        Raises:
            EngineError: a defect of ours has shown; the rank cannot go on.
        """
        self._client.pump()
        self._serial.check()
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def progress(self) -> dict[str, tuple[int, int]]:
        """Request id → (bytes in place, bytes in all) of the loads under way, at most
        :data:`PROGRESS_S` old; the caller must not change the map.
        """
        now = self._clock()
        if now >= self._next_progress:
            self._next_progress = now + PROGRESS_S
            self._progress = {
                load.spec.request_id: (load.bytes_done, load.nbytes)
                for load in list(self._loads.values())
            }
        return self._progress

    def close(self) -> None:
        """Gives up all loads and drops the connections. Idempotent."""
        self.thread.close()
        self._serial.post(self._close)

    def end(self) -> None:
        """Ends all loads that were not taken, as failed: their cache goes. The caller has closed
        this object, the client and the transports, so nothing can change the cache any more.
        """

        def end_all() -> None:
            self._ended.extend(self._loads.values())
            self._loads.clear()
            for load in self._ended:
                load.error = load.error or CancelledError("the connector was closed")

        self._serial.post(end_all)

    # ---- one task at a time -------------------------------------------------------------------

    def _meet(self, description: EngineDescription) -> None:
        older = self.peers.replaced_by(description)
        if older is not None:  # nothing more comes from the older incarnation
            for load in list(self._loads.values()):
                if load.peer is older:
                    engine_id = load.spec.ticket.engine_id
                    self._give_up(load, PeerLostError(f"engine {engine_id!r} restarted"))
            older.close()
        self.peers.meet(description)

    def _forget(self, engine_id: str, incarnation: str) -> None:
        peer = self.peers.connected.get(engine_id)
        if peer is None or all(load.peer is not peer for load in self._loads.values()):
            self.peers.forget(engine_id, incarnation)

    def _go_on(self, waiting: Iterable[RankLoad], error: KVFerryError | None) -> None:
        """Begins the loads that waited for an engine, or gives the loads up with ``error``."""
        for load in waiting:
            if error is None:
                self._begin(load)
            else:
                self._give_up(load, error)  # another load will try again

    def _begin(self, load: RankLoad) -> None:
        ticket = load.spec.ticket
        if self._closed or load.state is RankLoadState.CONFIRMING:
            return  # given up while it waited
        self._loads[ticket.lease_id] = load
        try:
            peer = self.peers.peer_for(load, ticket.engine_id, ticket.incarnation)
        except PeerLostError as error:
            self._give_up(load, error)
            return
        if peer is None:
            return  # the load waits
        load.peer = peer
        if load.spec.num_tokens > CUT_TOKENS and peer.stages:
            read = partial(self._read, load, peer)
            self.thread.post(partial(self._serial.post, read))
        else:
            self._read(load, peer)

    def _read_on(self, spec: LoadSpec) -> None:
        lease_id = spec.ticket.lease_id
        load = self._loads.get(spec.replaces or lease_id)
        if load is None or load.state is RankLoadState.CONFIRMING:
            return  # the load is over, or given up
        load.spec = spec
        if spec.replaces:
            self._loads[lease_id] = self._loads.pop(spec.replaces)
            if load.state is not RankLoadState.WAITING:
                load.state = RankLoadState.STALE
            load.stop()
            self._look(load)
        elif load.state in (RankLoadState.READING, RankLoadState.ALL_BEGUN):
            assert load.peer is not None  # the load has begun
            self._read(load, load.peer)  # a load in WAITING reads this far when it begins

    def _read(self, load: RankLoad, peer: SourcePeer) -> None:
        """Reads the tokens that can be read and were not read yet."""
        spec = load.spec
        if load.state is RankLoadState.CONFIRMING or load.error is not None:
            return  # given up while it waited
        load.state = RankLoadState.READING
        if load.moving_since is None:
            load.moving_since = self._clock()
        end = spec.num_tokens if spec.readable is None else spec.readable
        try:
            for pair in peer.plans:
                first = load.read_to.get(pair, spec.starts[pair.index])
                if first >= end and (spec.readable is not None or pair in load.read_to):
                    continue
                copies = pair.bind(
                    ids_of(spec.source_tables[pair.pair.source_group]),
                    ids_of(spec.target_tables[pair.pair.target_group]),
                    end,
                    first,
                )
                load.read_to[pair] = end
                for source_rank in pair.tiles:
                    move = peer.read(pair, source_rank, copies, load.after)
                    if move is not None:
                        self._follow(load, move)
            if spec.readable is None:
                load.state = RankLoadState.ALL_BEGUN
        except Exception as error:
            # Tables, memory and endpoints came from another engine: an error that they cause ends
            # this load, not the rank.
            self._give_up(load, as_load_error(error, "the read could not be started"))
        else:
            self._look(load)

    def _follow(self, load: RankLoad, move: Move) -> None:
        load.moves.append(move)
        if not move.transfer.is_terminal:
            move.transfer.on_end(lambda _: self._serial.post(partial(self._look, load)))

    def _look(self, load: RankLoad) -> None:
        """Goes on with a load once no transfer of the load can change the cache any more."""
        if load.state is RankLoadState.CONFIRMING or self._closed or not load.is_settled:
            return
        if load.moving_since is not None:
            load.moving += self._clock() - load.moving_since
            load.moving_since = None
        if load.state is RankLoadState.STALE and load.error is None:
            load.state, load.read_to, load.moves = RankLoadState.WAITING, {}, []
            self._begin(load)
        elif not self._read_again(load) and load.is_over:
            self._confirm(load)

    def _read_again(self, load: RankLoad) -> bool:
        """Repeats, once, the transfers that failed because their connection was lost.

        A connection may break at any time, also while nothing is read, although the source is well.
        If the source is not well, the second connection fails too. The lease covers both transfers:
        the lease lasts until the Finish. The first transfer is over, and cannot change the cache
        any more.
        """
        lost = [move for move in load.moves if isinstance(move.transfer.error, PeerLostError)]
        peer = load.peer
        if load.error is not None or not lost or any(move.is_repeated for move in lost):
            return False
        if peer is None or self.peers.connected.get(load.spec.ticket.engine_id) is not peer:
            return False  # we closed the connection ourselves, as the engine was started again
        try:
            # Several transfers may have been lost with one connection, and other loads, or other
            # parts of this load, may read over a newer connection by now: the newer connection
            # stays.
            for move in lost:
                peer.reconnect(move)
            for move in lost:
                again = peer.read(move.pair, move.source_rank, move.copies, load.after)
                assert again is not None  # there was something to move
                again.is_repeated = True
                load.moves.remove(move)
                self._follow(load, again)
        except Exception as error:
            self._give_up(load, as_load_error(error, "the read could not be repeated"))
        else:
            self._look(load)
        return True

    def _cancel(self, lease_id: str, reason: str) -> None:
        if (load := self._loads.get(lease_id)) is not None:
            aborted = f"request {load.spec.request_id} was aborted"
            self._give_up(load, CancelledError(reason or aborted))

    def _give_up(self, load: RankLoad, error: KVFerryError) -> None:
        """Stops a load; the load ends once none of its transfers can change the cache any more."""
        if load.state is RankLoadState.CONFIRMING:
            return
        load.error = load.error or error
        load.stop()
        self._look(load)

    def _confirm(self, load: RankLoad) -> None:
        """Asks the source whether a settled load counts."""
        load.state, load.confirm.began = RankLoadState.CONFIRMING, time.time()
        for move in load.moves:
            load.error = load.error or move.transfer.error
        digest, peer = self._digest, load.peer
        # Digests of converted cells prove nothing: the cells differ from the source's cells.
        if digest is None or peer is None or peer.converts or load.error is not None:
            self._ask(load)
            return

        def add_digests() -> None:
            load.add_digests(digest, peer)
            self._serial.post(partial(self._ask, load))

        self.thread.post(add_digests)  # long work

    def _ask(self, load: RankLoad) -> None:
        """Sends the Finish."""
        load.confirm.attempts += 1
        ticket = load.spec.ticket
        future = self._client.finish(
            ticket.address,
            ticket.incarnation,
            ticket.lease_id,
            ticket.secret,
            rank=self._target.rank,
            ok=load.error is None,
            nonce=load.confirm.nonce,
        )
        future.add_done_callback(
            lambda answered: self._serial.post(partial(self._conclude, load, answered))
        )

    def _conclude(self, load: RankLoad, answered: "Future[FinishAnswer]") -> None:
        ticket, error = load.spec.ticket, answered.exception()
        if isinstance(error, PeerLostError) and load.confirm.attempts < CONFIRM_ATTEMPTS:
            self._ask(load)  # the source repeats a lost answer
            return
        if load.error is None:
            if isinstance(error, KVFerryError):
                load.error = error
            elif error is not None:
                raise error
            elif answered.result() is not FinishAnswer.HELD:
                load.error = LeaseRevokedError(
                    f"lease {ticket.lease_id} of engine {ticket.engine_id!r} ended before "
                    "the load was confirmed; what was read is not used"
                )
        load.confirm.ended = time.time()
        del self._loads[ticket.lease_id]
        self._next_progress = 0.0  # the load is no longer under way
        self._ended.append(load)

    def _close(self) -> None:
        self._closed = True
        for load in list(self._loads.values()):
            self._give_up(load, CancelledError("the connector was closed"))
        self.peers.close()


def look_at_time(target: TargetRank) -> float:
    """Has the transports do the work that depends on time; returns the seconds until the next
    look.
    """
    for staged in target.staged.values():
        staged.poll()
    # Look also while nothing runs: a short load that begins meanwhile does not wake this thread.
    return min(IDLE_S, max(0.02, target.staging.stall_timeout_s / 8))
