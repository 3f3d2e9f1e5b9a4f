"""Runs the loads of one rank, off its step thread.

A load becomes a read on every route from its source. When nothing of them can change the cache any
more the source is told (``Finish``) and its answer is the confirm: only then does the load count.
The thread owns every load; the step thread hands in commands and takes out results.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

from kvferry.connectors.pull.load import LoadPart, RankLoad
from kvferry.connectors.pull.metadata import LoadSpec
from kvferry.connectors.pull.peer import RankIdentity, SourcePeer
from kvferry.connectors.pull.reads import TargetMemory, as_load_error
from kvferry.connectors.pull.routes import RouteOptions
from kvferry.connectors.pull.staging import StagingNumbers
from kvferry.control.client import ControlClient
from kvferry.control.messages import FinishAnswer
from kvferry.errors import (
    CancelledError,
    EngineError,
    KVFerryError,
    LeaseRevokedError,
    PeerLostError,
)
from kvferry.topology import GroupPair, check_block_ids
from kvferry.topology.description import EngineDescription
from kvferry.transports.base import Transport, Waitable

logger = logging.getLogger(__name__)

CONFIRM_ATTEMPTS = 3
"""How often the source is asked whether a load counts before it is given up."""

POLL_S = 0.0003
"""Pause between two looks at running reads."""
QUARANTINE_S = 0.02
"""Pause where no load reads and only quarantined staging memory is watched."""
IDLE_S = 1.0
"""Pause of an idle loader; transports let go of dead peers when they are polled."""

PROGRESS_S = 0.05
"""How often the progress of all loads is looked at: it is for people, and steps ask for it."""

Digest = Callable[[LoadSpec, Iterable[GroupPair]], tuple[int, ...]]
"""A load and all pairs of the source's groups and ours → digest of this rank's cells per token."""


@dataclass(frozen=True, slots=True)
class _Confirmed:
    load: RankLoad
    future: "Future[FinishAnswer]"


_Command = EngineDescription | RankLoad | str | _Confirmed | None


class Loader:
    """The thread that runs a rank's loads. Every method may be called from any thread."""

    def __init__(
        self,
        identity: RankIdentity,
        memory: TargetMemory,
        transports: Mapping[str, Transport],
        client: ControlClient,
        digest: Digest | None,
        options: RouteOptions,
    ) -> None:
        """Starts the thread. Memory, transports and client stay the caller's.

        Args:
            identity: this rank.
            memory: its cache, and what reads need around it.
            transports: open transports by name, best first.
            client: sends the Finishes.
            digest: computes the digest of loaded cells; ``None`` records none.
            options: what a user said about routes.
        """
        self._identity = identity
        self._memory = memory
        self._options = options
        self._transports = transports
        self._client = client
        self._digest = digest
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._known: dict[str, EngineDescription] = {}
        self._peers: dict[str, SourcePeer] = {}
        self._loads: dict[str, RankLoad] = {}
        self._ended: list[RankLoad] = []
        self._progress: dict[str, tuple[int, int]] = {}
        self._next_progress = 0.0
        self._lock = threading.Lock()
        self._defect: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="kvferry-loader", daemon=True)
        self._thread.start()

    def meet(self, description: EngineDescription) -> None:
        """A source engine's handshake succeeded; replaces an older start of it."""
        self._inbox.put(description)

    def load(self, spec: LoadSpec, after: Waitable | None = None) -> None:
        """Starts a load from an engine that was met; nothing is written before ``after``."""
        self._inbox.put(RankLoad(spec, time.time(), after))

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
        """Request id → (bytes in place, bytes in all) of the loads under way, :data:`PROGRESS_S`
        ago at most; not to be changed.
        """
        return self._progress

    @property
    def staging(self) -> StagingNumbers:
        """What the staging memory is doing."""
        return self._memory.staging.numbers

    def close(self) -> None:
        """Gives up what runs and ends the thread. Idempotent."""
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
            self._memory.staging.sweep()
            now = time.monotonic()
            for load in list(self._loads.values()):
                if not load.confirming:
                    self._advance(load, now)
            if now >= self._next_progress:
                self._note_progress(now)
        for load in self._loads.values():
            self._give_up(load, CancelledError("the connector was closed"))
        for peer in self._peers.values():
            peer.close()
        self._memory.stop()

    def _note_progress(self, now: float) -> None:
        """Replaces what :meth:`progress` says: the step's thread may be reading the older one."""
        self._next_progress = now + PROGRESS_S
        self._progress = {
            load.spec.request_id: (load.bytes_done, load.nbytes) for load in self._loads.values()
        }

    def _serve_inbox(self) -> bool:
        """Handles every waiting command; sleeps first if there is nothing to watch."""
        if any(not load.confirming for load in self._loads.values()):
            pause = POLL_S
        else:
            pause = QUARANTINE_S if self._memory.staging.is_watched else IDLE_S
        try:
            command = self._inbox.get(timeout=pause)
            while True:
                if command is None:
                    return False
                self._serve(command)
                command = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _serve(self, command: EngineDescription | RankLoad | str | _Confirmed) -> None:
        if isinstance(command, EngineDescription):
            self._meet(command)
        elif isinstance(command, RankLoad):
            self._start(command)
        elif isinstance(command, _Confirmed):
            self._conclude(command)
        elif (load := self._loads.get(command)) is not None:
            self._give_up(load, CancelledError(f"request {load.spec.request_id} was aborted"))

    def _meet(self, description: EngineDescription) -> None:
        engine_id = description.engine_id
        known = self._known.get(engine_id)
        if known is not None and known.incarnation != description.incarnation:
            older = self._peers.pop(engine_id, None)
            if older is not None:
                self._abandon(older)
        self._known[engine_id] = description
        try:
            self._connected(description)
        except Exception as error:
            # Loads will try again, and say what is wrong.
            ours = as_load_error(error, "an engine could not be connected to")
            logger.warning("cannot read from engine %s: %s", engine_id, ours)

    def _abandon(self, peer: SourcePeer) -> None:
        """An engine was started again: nothing more comes from its earlier start."""
        for load in self._loads.values():
            if load.peer is peer:
                self._give_up(load, PeerLostError(f"engine {load.spec.engine_id!r} restarted"))
        peer.close()

    def _connected(self, description: EngineDescription) -> SourcePeer:
        """The connections to an engine that was met, made now if there are none."""
        peer = self._peers.get(description.engine_id)
        if peer is None:
            peer = self._peers[description.engine_id] = SourcePeer.connect(
                description, self._identity, self._memory, self._transports, self._options
            )
        return peer

    def _start(self, load: RankLoad) -> None:
        self._loads[load.spec.lease_id] = load
        try:
            self._read(load, self._peer(load.spec))
        except Exception as error:
            # Tables, memory and endpoints came from elsewhere: whatever they provoke is the end of
            # this load, not of the rank.
            self._give_up(load, as_load_error(error, "the read could not be started"))

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
            check_block_ids(copies, *group.num_blocks)
            for route in group.routes:
                connections = {rank: peer.connections[rank] for rank in route.source_ranks}
                read = route.start(copies, connections, load.after)
                if read is not None:
                    load.parts.append(LoadPart(route, copies, connections, read))

    def _advance(self, load: RankLoad, now: float) -> None:
        """Goes on with a load; once it is settled asks for its confirm."""
        for part in load.parts:
            part.read.advance(now)
        if load.is_settled and not self._read_again(load):
            self._confirm(load)

    def _read_again(self, load: RankLoad) -> bool:
        """Repeats, once, the reads that failed because their connection was lost.

        A connection may break at any time, also while nothing is read, and the source be well. If
        it is not, the second connection fails too. The lease covers both: it is one until the
        Finish, and the first read is settled, so that nothing of it can change the cache any more.
        """
        lost = [part for part in load.parts if isinstance(part.read.error, PeerLostError)]
        peer = load.peer
        if load.error is not None or not lost or any(part.repeated for part in lost):
            return False
        assert peer is not None  # there are reads
        if self._peers.get(load.spec.engine_id) is not peer:
            return False  # we closed it ourselves: the engine was started again
        try:
            for part in lost:
                part.repeated = True
                part.connections |= {
                    rank: peer.reconnect(rank, connection)
                    for rank, connection in part.connections.items()
                    if connection in part.read.lost  # other loads read over the others
                }
                again = part.route.start(part.copies, part.connections, load.after)
                assert again is not None  # there was something to move
                part.read = again
        except Exception as error:
            self._give_up(load, as_load_error(error, "the read could not be repeated"))
        return True

    def _give_up(self, load: RankLoad, error: KVFerryError) -> None:
        """Stops a load; it ends once nothing of it can change the cache any more."""
        if load.confirming:
            return
        load.error = load.error or error
        for part in load.parts:
            part.read.give_up(error)

    def _confirm(self, load: RankLoad) -> None:
        """The load is settled. Asks whether it counts."""
        load.confirming = True
        load.finished = time.time()
        for part in load.parts:
            load.error = load.error or part.read.error
        if load.error is None and self._digest is not None:
            assert load.peer is not None  # set before the first part
            if not load.peer.converts:  # else the cells are others than the source's
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
        self._next_progress = 0.0  # it is no longer under way
        with self._lock:
            self._ended.append(load)
