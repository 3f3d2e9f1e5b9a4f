"""Runs the loads of one rank, off its step thread.

A load becomes one read per source rank and pair of KV cache groups. When all of them are terminal
the source is told (``Finish``) and its answer is the confirm: only then does the load count. The
thread owns every load; the step thread hands in commands and takes out results.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from kvferry.connectors.base import TransferRecord
from kvferry.connectors.pull.metadata import LoadSpec
from kvferry.connectors.pull.peer import SourcePeer
from kvferry.control.client import ControlClient
from kvferry.control.messages import FinishAnswer
from kvferry.errors import (
    BlockTableError,
    CancelledError,
    EngineError,
    KVFerryError,
    LeaseRevokedError,
    PeerLostError,
    TransferError,
)
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.topology import EngineGeometry, GroupPair, check_block_ids
from kvferry.topology.description import EngineDescription, RankMemory
from kvferry.transports.base import Peer, Transfer, TransferState, Transport

logger = logging.getLogger(__name__)

CONFIRM_ATTEMPTS = 3
"""How often the source is asked whether a load counts before it is given up."""

POLL_S = 0.0003
"""Pause between two looks at running reads."""
IDLE_S = 1.0
"""Pause of an idle loader; transports let go of dead peers when they are polled."""

Digest = Callable[[LoadSpec, Iterable[GroupPair]], tuple[int, ...]]
"""A load and all pairs of the source's groups and ours → digest of this rank's cells per token."""


@dataclass(slots=True, eq=False)
class _Read:
    """The part of a load that comes from one source rank."""

    source_rank: int
    tiles: Tiles
    runs: Runs
    connection: Peer
    transfer: Transfer
    repeated: bool = False
    """Whether it runs over a second connection, as the first was lost."""


@dataclass(slots=True, eq=False)
class RankLoad:
    """One load on this rank, from its start to its result."""

    spec: LoadSpec
    started: float
    """Unix seconds."""
    reads: list[_Read] = field(default_factory=list)
    peer: SourcePeer | None = None
    """Whom it reads from; set before the first read."""
    error: KVFerryError | None = None
    """The first thing that went wrong."""
    token_digests: tuple[int, ...] | None = None
    finished: float = 0.0
    """Unix seconds at which its last read became terminal."""
    confirming: bool = False
    """Whether the source was told and its answer is awaited."""
    confirms: int = 0
    """How often the source was asked for the confirm."""

    @property
    def transfers(self) -> list[Transfer]:
        """What its reads move; one per source rank and pair of groups."""
        return [read.transfer for read in self.reads]

    @property
    def nbytes(self) -> int:
        """Bytes that its reads move."""
        return sum(transfer.nbytes for transfer in self.transfers)

    @property
    def bytes_done(self) -> int:
        """Bytes already in place."""
        return sum(transfer.bytes_done for transfer in self.transfers)

    def record(self, rank: int) -> TransferRecord:
        """What it did."""
        return TransferRecord(
            request_id=self.spec.request_id,
            lease_id=self.spec.lease_id,
            rank=rank,
            peer=self.spec.engine_id,
            direction="recv",
            first_token=self.spec.first_token,
            tokens=self.spec.num_tokens - self.spec.first_token,
            nbytes=self.nbytes,
            copies=sum(transfer.segments for transfer in self.transfers),
            started=self.started,
            finished=self.finished,
            ok=self.error is None,
            error="" if self.error is None else f"{type(self.error).__name__}: {self.error}",
            token_digests=self.token_digests,
        )


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which rank this is, and what it holds."""

    engine_id: str
    rank: int
    groups: tuple[EngineGeometry, ...]
    memory: tuple[RankMemory, ...]
    """One per group."""


@dataclass(frozen=True, slots=True)
class _Confirmed:
    load: RankLoad
    future: "Future[FinishAnswer]"


_Command = EngineDescription | LoadSpec | str | _Confirmed | None


class Loader:
    """The thread that runs a rank's loads. Every method may be called from any thread."""

    def __init__(
        self,
        identity: RankIdentity,
        transports: Mapping[str, Transport],
        client: ControlClient,
        digest: Digest | None,
    ) -> None:
        """Starts the thread. Transports and client stay the caller's.

        Args:
            identity: this rank.
            transports: open transports by name, best first.
            client: sends the Finishes.
            digest: computes the digest of loaded cells; ``None`` records none.
        """
        self._identity = identity
        self._transports = transports
        self._client = client
        self._digest = digest
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._known: dict[str, EngineDescription] = {}
        self._peers: dict[str, SourcePeer] = {}
        self._loads: dict[str, RankLoad] = {}
        self._ended: list[RankLoad] = []
        self._lock = threading.Lock()
        self._defect: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-loader", daemon=True)
        self._thread.start()

    def meet(self, description: EngineDescription) -> None:
        """A source engine's handshake succeeded; replaces an older start of it."""
        self._inbox.put(description)

    def load(self, spec: LoadSpec) -> None:
        """Starts a load from an engine that was met."""
        self._inbox.put(spec)

    def cancel(self, lease_id: str) -> None:
        """Gives a load up; it still ends in :meth:`take_ended`. Unknown ids are ignored."""
        self._inbox.put(lease_id)

    def take_ended(self) -> list[RankLoad]:
        """Loads that ended since the last call, each exactly once.

        Raises:
            EngineError: the loader's thread has died of a defect; the rank cannot go on.
        """
        if self._defect is not None:
            raise EngineError(f"the loader's thread died: {self._defect!r}") from self._defect
        with self._lock:
            ended, self._ended = self._ended, []
            return ended

    def progress(self) -> dict[str, tuple[int, int]]:
        """Request id → (bytes in place, bytes in all) of the loads under way."""
        loads = list(self._loads.values())
        return {load.spec.request_id: (load.bytes_done, load.nbytes) for load in loads}

    def close(self) -> None:
        """Cancels what runs, waits until it is terminal, ends the thread. Idempotent."""
        self._inbox.put(None)
        self._thread.join()

    # ---- the loader's thread ------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve_forever()
        except BaseException as defect:
            logger.exception("the loader's thread died")
            self._defect = defect

    def _serve_forever(self) -> None:
        while self._serve_inbox():
            for transport in self._transports.values():
                transport.poll()
            for load in list(self._loads.values()):
                if load.confirming or not all(t.is_terminal for t in load.transfers):
                    continue
                if not self._read_again(load):
                    self._confirm(load)
        for load in self._loads.values():
            self._cancel(load)
        for peer in self._peers.values():
            peer.close()

    def _serve_inbox(self) -> bool:
        """Handles every waiting command; sleeps first if there is nothing to watch."""
        reading = any(not load.confirming for load in self._loads.values())
        try:
            command = self._inbox.get(timeout=POLL_S if reading else IDLE_S)
            while True:
                if command is None:
                    return False
                self._serve(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _serve(self, command: EngineDescription | LoadSpec | str | _Confirmed) -> None:
        if isinstance(command, EngineDescription):
            self._meet(command)
        elif isinstance(command, LoadSpec):
            self._start(command)
        elif isinstance(command, _Confirmed):
            self._conclude(command)
        elif (load := self._loads.get(command)) is not None:
            self._cancel(load)

    def _meet(self, description: EngineDescription) -> None:
        engine_id = description.engine_id
        known = self._known.get(engine_id)
        if known is not None and known.incarnation != description.incarnation:
            older = self._peers.pop(engine_id, None)
            if older is not None:
                older.close()
        self._known[engine_id] = description
        try:
            self._connected(description)
        except Exception as error:
            # Loads will try again, and say what is wrong.
            logger.warning("cannot read from engine %s: %s", engine_id, _as_ours(error))

    def _connected(self, description: EngineDescription) -> SourcePeer:
        """The connections to an engine that was met, made now if there are none."""
        peer = self._peers.get(description.engine_id)
        if peer is None:
            identity = self._identity
            peer = self._peers[description.engine_id] = SourcePeer.connect(
                description,
                rank=identity.rank,
                engine_id=identity.engine_id,
                groups=identity.groups,
                memory=identity.memory,
                transports=self._transports,
            )
        return peer

    def _start(self, spec: LoadSpec) -> None:
        load = RankLoad(spec, started=time.time())
        self._loads[spec.lease_id] = load
        try:
            self._read(load, self._peer(spec))
        except Exception as error:
            # Tables, memory and endpoints came from elsewhere: whatever they provoke is the end of
            # this load, not of the rank.
            load.error = _as_ours(error)
            self._cancel(load)

    def _peer(self, spec: LoadSpec) -> SourcePeer:
        description = self._known.get(spec.engine_id)
        if description is None or description.incarnation != spec.incarnation:
            raise PeerLostError(
                f"engine {spec.engine_id!r} restarted: the lease is from start {spec.incarnation}"
            )
        return self._connected(description)

    def _read(self, load: RankLoad, peer: SourcePeer) -> None:
        spec = load.spec
        load.peer = peer
        for group in peer.groups:
            copies = group.plan.bind(
                spec.source_block_ids[group.pair.source_group],
                spec.target_block_ids[group.pair.target_group],
                spec.num_tokens,
                spec.starts[group.index],
            )
            check_block_ids(copies, group.source_num_blocks, group.target_num_blocks)
            for source_rank, tiles in group.tiles.items():
                runs = copies.runs_of(source_rank)
                if not len(runs):
                    continue  # all that moves lies behind the window, or on other ranks
                connection = peer.connections[source_rank]
                transfer = peer.transport.read(connection, tiles, runs)
                load.reads.append(_Read(source_rank, tiles, runs, connection, transfer))

    def _read_again(self, load: RankLoad) -> bool:
        """Repeats, once, the reads that failed because their connection was lost.

        A connection may break at any time, also while nothing is read, and the source be well. If
        it is not, the second connection fails too. The lease covers both: it is one until the
        Finish, and the first read is terminal, so that nothing of it can land any more.
        """
        lost = [read for read in load.reads if isinstance(read.transfer.error, PeerLostError)]
        peer = load.peer
        if load.error is not None or not lost or any(read.repeated for read in lost):
            return False
        assert peer is not None  # there are reads
        if self._peers.get(load.spec.engine_id) is not peer:
            return False  # we closed it ourselves: the engine was started again
        try:
            for read in lost:
                read.repeated = True
                read.connection = peer.reconnect(read.source_rank, read.connection)
                read.transfer = peer.transport.read(read.connection, read.tiles, read.runs)
        except Exception as error:
            load.error = _as_ours(error)
            self._cancel(load)
        return True

    def _cancel(self, load: RankLoad) -> None:
        if load.error is None and not load.confirming:
            load.error = CancelledError(f"request {load.spec.request_id} was aborted")
        for transfer in load.transfers:
            assert load.peer is not None  # set before the first read
            load.peer.transport.cancel(transfer)

    def _confirm(self, load: RankLoad) -> None:
        """All reads are terminal: nothing lands any more. Asks whether they count."""
        load.confirming = True
        load.finished = time.time()
        for transfer in load.transfers:
            if transfer.state is not TransferState.DONE and load.error is None:
                load.error = transfer.error
        if load.error is None and self._digest is not None:
            assert load.peer is not None  # set before the first read
            load.token_digests = self._digest(load.spec, load.peer.pairs)
        self._ask(load)

    def _ask(self, load: RankLoad) -> None:
        """Sends the Finish; its answer comes through the inbox."""
        load.confirms += 1
        future = self._client.finish(
            load.spec.address,
            load.spec.incarnation,
            lease_id=load.spec.lease_id,
            rank=self._identity.rank,
            ok=load.error is None,
        )
        future.add_done_callback(lambda done: self._inbox.put(_Confirmed(load, done)))

    def _conclude(self, confirmed: _Confirmed) -> None:
        load, error = confirmed.load, confirmed.future.exception()
        if isinstance(error, PeerLostError) and load.confirms < CONFIRM_ATTEMPTS:
            self._ask(load)  # an answer that was lost is given again
            return
        if load.error is None:
            if isinstance(error, KVFerryError):
                load.error = error
            elif error is not None:
                raise error
            elif confirmed.future.result() is not FinishAnswer.HELD:
                load.error = LeaseRevokedError(
                    f"lease {load.spec.lease_id} of engine {load.spec.engine_id!r} ended before "
                    "the load was confirmed; what was read is not used"
                )
        del self._loads[load.spec.lease_id]
        with self._lock:
            self._ended.append(load)


def _as_ours(error: Exception) -> KVFerryError:
    """The error of a load; for a defect of ours, which is logged, one that says so."""
    if isinstance(error, KVFerryError):
        return error
    if isinstance(error, ValueError):
        return BlockTableError(str(error))  # a table, from a ticket, that does not fit the plan
    logger.error("a read could not be started", exc_info=error)
    return TransferError(f"the read could not be started: {error!r}")
