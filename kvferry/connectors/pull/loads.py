"""The loads of one rank: bound, read, confirmed.

A load reads what each source rank gives of each pair of KV cache groups; each of these is a
transfer. When no transfer can change the cache any more the source is told (``Finish``), and its
answer is the confirm: only then does the load count.

A load changes threads as seldom as can be. The step thread binds it and starts its transfers; short
ones are copied there and then. Whoever ends the last transfer sends the Finish, and whoever finds
its answer in the socket concludes the load; the step thread looks there itself before it asks what
has ended::

    step thread    start ─ bind ─ read ─┐                               ┌─ pump ─ take_ended
    mover                               └─ copy ─ ended ─ Finish ──▶ P ──▶ held

A load whose source still computes the prompt is read in parts: :meth:`Loads.read_on` says when
there is more. Each token is read once, and what was said of a load holds for all its parts
together: one Finish, one answer. Where the lease was revoked meanwhile and there is another, all of
it is read again, as soon as nothing of the first reads can change the cache any more.

What takes long has a thread of its own: connecting to an engine, cutting a long load for staging,
digests.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from kvferry.connectors.base import TransferRecord
from kvferry.connectors.pull.metadata import LoadSpec
from kvferry.connectors.pull.peer import Move, PairPlan, SourcePeer, TargetRank
from kvferry.control.client import ControlClient
from kvferry.control.messages import FinishAnswer
from kvferry.control.proofs import lease_of
from kvferry.errors import (
    BlockTableError,
    CancelledError,
    KVFerryError,
    LeaseRevokedError,
    PeerLostError,
)
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox, Serial
from kvferry.topology import GroupPair
from kvferry.topology.description import EngineDescription
from kvferry.transports.base import Waitable, as_transfer_error

logger = logging.getLogger(__name__)

CONFIRM_ATTEMPTS = 3
"""How often the source is asked whether a load counts before it is given up."""

CUT_TOKENS = 8192
"""Tokens from which on the step thread does not start a staged load itself: cutting one of 131,072
for the staging memory takes a second. A placed one of as many is started in 2 ms."""

IDLE_S = 1.0
"""Seconds between two looks at what depends on time, at most; transports let go of dead peers
then."""

PROGRESS_S = 0.05
"""How often the progress of all loads is looked at: it is for people, and steps ask for it."""

Digest = Callable[[LoadSpec, Iterable[GroupPair]], tuple[int, ...]]
"""A load and all pairs of the source's groups and ours → digest of this rank's cells per token."""


@dataclass(slots=True, eq=False)
class RankLoad:
    """One load on this rank, from its start to its result."""

    spec: LoadSpec
    after: Waitable | None = None
    """When the cache may be written, if that is not now."""
    started: float = field(default_factory=time.time)
    """Unix seconds."""
    peer: SourcePeer | None = None
    """Whom it reads from; ``None`` while that is not connected to, or cannot be."""
    read_to: dict[PairPlan, int] = field(default_factory=dict)
    """Pair of groups → the token up to which that is."""
    is_begun: bool = False
    """Whether the first part is."""
    is_all_begun: bool = False
    """Whether nothing is left to begin."""
    is_stale: bool = False
    """Whether what it has begun counts for nothing, and it begins anew once that is settled."""
    moving_since: float | None = None
    """Clock reading since which something moves; ``None`` while nothing does."""
    moving: float = 0.0
    """Seconds in which something moved before that."""
    moves: list[Move] = field(default_factory=list)
    """What it has begun to read."""
    error: KVFerryError | None = None
    """The first thing that went wrong."""
    token_digests: tuple[int, ...] | None = None
    finished: float = 0.0
    """Unix seconds at which nothing of it could change the cache any more."""
    confirmed: float = 0.0
    """Unix seconds at which its source had said whether it counts, or had not in time."""
    nonce: bytes = field(default_factory=partial(secrets.token_bytes, 8))
    """Tells the source a repetition of our Finish from anybody else's."""
    confirms: int = 0
    """How often the source was asked for the confirm."""
    confirming: bool = False
    """Whether it is settled, and what the source says of it is awaited."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing of it can change the cache any more."""
        return all(move.transfer.is_terminal for move in self.moves)

    @property
    def is_over(self) -> bool:
        """Whether it is settled, and nothing more is to be read."""
        if not self.is_settled:
            return False
        failed = self.error or any(move.transfer.error for move in self.moves)
        return bool(failed) or self.is_all_begun

    @property
    def nbytes(self) -> int:
        """Bytes that its transfers move."""
        return sum(move.transfer.nbytes for move in list(self.moves))

    @property
    def bytes_done(self) -> int:
        """Bytes already in place; any thread may ask, also while transfers are being started."""
        return sum(move.transfer.bytes_done for move in list(self.moves))

    def forget(self) -> None:
        """It is settled, and begins anew."""
        self.is_stale = self.is_begun = self.is_all_begun = False
        self.read_to, self.moves = {}, []

    def record(self, rank: int) -> TransferRecord:
        """What it did."""
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
            finished=self.finished,
            ok=self.error is None,
            error="" if self.error is None else f"{type(self.error).__name__}: {self.error}",
            token_digests=self.token_digests,
            transport="" if self.peer is None or not self.moves else self.peer.movement,
            source_ranks=tuple(sorted({move.source_rank for move in self.moves})),
            confirmed=self.confirmed,
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
        """Starts a thread for what is long. Memory, transports and client stay the caller's.

        Args:
            target: this rank.
            client: sends the Finishes.
            digest: computes the digest of loaded cells; ``None`` records none.
            clock: seconds that never run backwards.
            mailbox: makes the thread.
        """
        self._target = target
        self._client = client
        self._digest = digest
        self._clock = clock
        self._known: dict[str, EngineDescription] = {}
        self._peers: dict[str, SourcePeer] = {}
        self._loads: dict[str, RankLoad] = {}
        self._unconnected: dict[str, list[RankLoad]] = {}
        self._ended: deque[RankLoad] = deque()
        self._progress: dict[str, tuple[int, int]] = {}
        self._next_progress = 0.0
        self._closed = False
        self._serial = Serial("the loads of this rank")
        self._thread = mailbox("loads", self._look_at_time).start()

    def meet(self, description: EngineDescription) -> None:
        """A source engine's handshake succeeded; replaces an older start of it."""
        self._serial.post(lambda: self._meet(description))

    def forget(self, engine_id: str, incarnation: str) -> None:
        """Drops a start of a source engine with its connections, unless a load reads from it."""
        self._serial.post(partial(self._forget, engine_id, incarnation))

    def start(self, spec: LoadSpec, after: Waitable | None = None) -> None:
        """Starts a load from an engine that was met; nothing is written before ``after``."""
        self._serial.post(partial(self._begin, RankLoad(spec, after)))

    def read_on(self, spec: LoadSpec) -> None:
        """More of a load can be read, as ``spec`` says; loads that are over are ignored."""
        self._serial.post(partial(self._read_on, spec))

    def cancel(self, lease_id: str, reason: str = "") -> None:
        """Gives a load up, for ``reason``, or as its request was aborted; it still ends in
        :meth:`take_ended`. Unknown ids are ignored.
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
        """Request id → (bytes in place, bytes in all) of the loads under way, :data:`PROGRESS_S`
        ago at most; not to be changed.
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
        """Gives up what runs and drops the connections. Idempotent."""
        self._thread.close()
        self._serial.post(self._close)

    # ---- the thread for what is long ----------------------------------------------------------

    def _look_at_time(self) -> float:
        """Has the transports see to what depends on time; returns when to look again."""
        for staged in self._target.staged.values():
            staged.poll()
        # Also while nothing runs: a short load that begins meanwhile does not wake this thread.
        return min(IDLE_S, max(0.02, self._target.staging.stall_timeout_s / 8))

    def _connect(self, description: EngineDescription, *, for_a_load: bool) -> None:
        found: SourcePeer | KVFerryError
        try:
            found = SourcePeer.connect(description, self._target)
        except Exception as error:
            found = as_load_error(error, "an engine could not be connected to")
            logger.warning("cannot read from engine %s: %s", description.engine_id, found)
        self._serial.post(partial(self._connected, description, found, for_a_load))

    def _add_digests(self, load: RankLoad) -> None:
        assert self._digest is not None  # who posted this has looked
        assert load.peer is not None  # it has read something
        try:
            load.token_digests = self._digest(load.spec, load.peer.pairs)
        except Exception as error:
            load.error = as_load_error(error, "what was loaded has no digest")
        self._serial.post(partial(self._ask, load))

    # ---- one task at a time -------------------------------------------------------------------

    def _meet(self, description: EngineDescription) -> None:
        engine_id = description.engine_id
        known = self._known.get(engine_id)
        if known is not None and known.incarnation != description.incarnation:
            older = self._peers.pop(engine_id, None)
            if older is not None:
                self._abandon(older)
        self._known[engine_id] = description
        if engine_id not in self._peers and engine_id not in self._unconnected:
            self._begin_to_connect(description, for_a_load=False)

    def _forget(self, engine_id: str, incarnation: str) -> None:
        known = self._known.get(engine_id)
        if known is None or known.incarnation != incarnation or engine_id in self._unconnected:
            return
        peer = self._peers.get(engine_id)
        if peer is not None and any(load.peer is peer for load in self._loads.values()):
            return
        del self._known[engine_id]
        if peer is not None:
            del self._peers[engine_id]
            peer.close()

    def _abandon(self, peer: SourcePeer) -> None:
        """An engine was started again: nothing more comes from its earlier start."""
        for load in list(self._loads.values()):
            if load.peer is peer:
                engine_id = load.spec.ticket.engine_id
                self._give_up(load, PeerLostError(f"engine {engine_id!r} restarted"))
        peer.close()

    def _begin_to_connect(self, description: EngineDescription, *, for_a_load: bool) -> None:
        self._unconnected[description.engine_id] = []
        self._thread.post(partial(self._connect, description, for_a_load=for_a_load))

    def _connected(
        self, description: EngineDescription, found: SourcePeer | KVFerryError, for_a_load: bool
    ) -> None:
        engine_id = description.engine_id
        waiting = self._unconnected.pop(engine_id)
        newest = self._known[engine_id]
        restarted = newest.incarnation != description.incarnation
        if isinstance(found, SourcePeer):
            if restarted or self._closed:
                found.close()
            else:
                self._peers[engine_id] = found
        if restarted:
            self._begin_to_connect(newest, for_a_load=False)
        for load in waiting:
            if isinstance(found, KVFerryError) and for_a_load and not restarted:
                self._give_up(load, found)  # another load will try again
            else:
                self._begin(load)  # it came since this was tried, or there is a peer

    def _begin(self, load: RankLoad) -> None:
        ticket = load.spec.ticket
        if self._closed or load.confirming:
            return  # given up while it waited
        self._loads[ticket.lease_id] = load
        description = self._known.get(ticket.engine_id)
        if description is None or description.incarnation != ticket.incarnation:
            restarted = f"engine {ticket.engine_id!r} restarted: the lease is from start"
            self._give_up(load, PeerLostError(f"{restarted} {ticket.incarnation}"))
        elif (peer := self._peers.get(ticket.engine_id)) is not None:
            load.peer = peer
            read = partial(self._read, load, peer)
            if load.spec.num_tokens > CUT_TOKENS and peer.stages:
                self._thread.post(partial(self._serial.post, read))
            else:
                read()
        else:
            if ticket.engine_id not in self._unconnected:
                self._begin_to_connect(description, for_a_load=True)
            self._unconnected[ticket.engine_id].append(load)

    def _read_on(self, spec: LoadSpec) -> None:
        lease_id = spec.ticket.lease_id
        load = self._loads.get(spec.replaces or lease_id)
        if load is None or load.confirming:
            return  # it is over, or given up
        load.spec = spec
        if spec.replaces:
            self._loads[lease_id] = self._loads.pop(spec.replaces)
            load.is_stale = load.is_begun
            self._stop(load)
            self._look(load)
        elif load.is_begun and not load.is_stale and load.peer is not None:
            self._read(load, load.peer)  # else it is read to here as it begins

    def _read(self, load: RankLoad, peer: SourcePeer) -> None:
        """Reads what can be read and was not read yet."""
        spec = load.spec
        if load.confirming or load.error is not None:
            return  # given up while it waited
        load.is_begun = True
        if load.moving_since is None:
            load.moving_since = self._clock()
        end = spec.num_tokens if spec.readable is None else spec.readable
        try:
            for pair in peer.plans:
                first = load.read_to.get(pair, spec.starts[pair.index])
                if first >= end and (spec.readable is not None or pair in load.read_to):
                    continue
                copies = pair.bind(
                    spec.ticket.block_ids[pair.pair.source_group],
                    spec.target_block_ids[pair.pair.target_group],
                    end,
                    first,
                )
                load.read_to[pair] = end
                for source_rank in pair.tiles:
                    move = peer.read(pair, source_rank, copies, load.after)
                    if move is not None:
                        self._follow(load, move)
            load.is_all_begun = spec.readable is None
        except Exception as error:
            # Tables, memory and endpoints came from elsewhere: whatever they provoke is the end of
            # this load, not of the rank.
            self._give_up(load, as_load_error(error, "the read could not be started"))
        else:
            self._look(load)

    def _follow(self, load: RankLoad, move: Move) -> None:
        load.moves.append(move)
        if not move.transfer.is_terminal:
            move.transfer.on_end(lambda _: self._serial.post(partial(self._look, load)))

    def _look(self, load: RankLoad) -> None:
        """Goes on with a load once nothing of it can change the cache any more."""
        if load.confirming or self._closed or not load.is_settled:
            return
        if load.moving_since is not None:
            load.moving += self._clock() - load.moving_since
            load.moving_since = None
        if load.is_stale and load.error is None:
            load.forget()
            self._begin(load)
        elif not self._read_again(load) and load.is_over:
            self._confirm(load)

    def _read_again(self, load: RankLoad) -> bool:
        """Repeats, once, the transfers that failed because their connection was lost.

        A connection may break at any time, also while nothing is read, and the source be well. If
        it is not, the second connection fails too. The lease covers both: it is one until the
        Finish, and the first transfer is over, so that nothing of it can change the cache any more.
        """
        lost = [move for move in load.moves if isinstance(move.transfer.error, PeerLostError)]
        peer = load.peer
        if load.error is not None or not lost or any(move.is_repeated for move in lost):
            return False
        if peer is None or self._peers.get(load.spec.ticket.engine_id) is not peer:
            return False  # we closed it ourselves: the engine was started again
        try:
            # Several may have been lost with one connection, and other loads, or other parts of
            # this one, may read over a newer one by now: that one stays.
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
        """Stops a load; it ends once nothing of it can change the cache any more."""
        if load.confirming:
            return
        load.error = load.error or error
        self._stop(load)
        self._look(load)

    def _stop(self, load: RankLoad) -> None:
        for move in load.moves:
            assert load.peer is not None  # something moves
            load.peer.cancel(move)

    def _confirm(self, load: RankLoad) -> None:
        """The load is settled. Asks whether it counts."""
        load.confirming = True
        load.finished = time.time()
        for move in load.moves:
            load.error = load.error or move.transfer.error
        # Of converted cells a digest says nothing: they are others than the source's.
        wanted = self._digest is not None and load.peer is not None and not load.peer.converts
        if wanted and load.error is None:
            self._thread.post(partial(self._add_digests, load))
        else:
            self._ask(load)

    def _ask(self, load: RankLoad) -> None:
        """Sends the Finish."""
        load.confirms += 1
        ticket = load.spec.ticket
        future = self._client.finish(
            ticket.address,
            ticket.incarnation,
            ticket.lease_id,
            ticket.secret,
            rank=self._target.rank,
            ok=load.error is None,
            nonce=load.nonce,
        )
        future.add_done_callback(
            lambda answered: self._serial.post(partial(self._conclude, load, answered))
        )

    def _conclude(self, load: RankLoad, answered: "Future[FinishAnswer]") -> None:
        ticket, error = load.spec.ticket, answered.exception()
        if isinstance(error, PeerLostError) and load.confirms < CONFIRM_ATTEMPTS:
            self._ask(load)  # an answer that was lost is given again
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
        load.confirmed = time.time()
        del self._loads[ticket.lease_id]
        self._next_progress = 0.0  # it is no longer under way
        self._ended.append(load)

    def _close(self) -> None:
        self._closed = True
        for load in list(self._loads.values()):
            self._give_up(load, CancelledError("the connector was closed"))
        for peer in self._peers.values():
            peer.close()


def as_load_error(error: Exception, what: str) -> KVFerryError:
    """The error of a load; for a defect of ours, which is logged, one that says so."""
    if isinstance(error, ValueError) and not isinstance(error, KVFerryError):
        return BlockTableError(str(error))  # a table, from a ticket, that does not fit the plan
    return as_transfer_error(error, what)
