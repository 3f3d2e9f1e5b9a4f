"""The thread of the nixl transport: it owns every agent, posts READs and sees how they get on.

There is one agent that serves our memory and **one per connection** that reads. NIXL cannot take a
READ back; the one thing that ends it is the end of its agent (see
:mod:`~kvferry.transports.nixl_agents`), and with an agent of its own a lost peer costs no other
peer anything. A READ under way counts as a writer of its transfer's
:class:`~kvferry.transports.base.Transfer`: one that was cancelled or failed stays running
until each of its READs is done, or its agent is gone.
"""

import contextlib
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvferry.errors import KVFerryError, PeerLostError, ProtocolError, TransferError
from kvferry.layouts.chunks import chunk_slices, cut_chunks
from kvferry.layouts.copier import expand
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import Peer, Transfer, Transfers
from kvferry.transports.nixl_agents import Agent, AgentOptions, Handle, Rows
from kvferry.transports.nixl_wire import Endpoint
from kvferry.transports.regions import Regions

logger = logging.getLogger(__name__)

T = TypeVar("T")

_READS_AHEAD = 4
"""READs posted per connection at a time; beyond, cancelling would come too late."""
_BUSY_S = 2e-5
"""A look at the serving agent that took longer found something to do: look again at once."""
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3
"""Pauses between two looks; they double while nothing happens."""


class NixlRead(Transfer):
    """One read, and the pieces that have not been posted yet."""

    def __init__(
        self,
        nbytes: int,
        transfers: Transfers,
        requests: Iterator[tuple[str, npt.NDArray[np.void]]],
    ) -> None:
        """``requests``: kind of the source's memory, and rows of ``SEGMENT_DTYPE`` of one READ."""
        super().__init__(nbytes, transfers)
        self.requests = requests


@dataclass(slots=True, eq=False)
class _Post:
    """One READ under way."""

    read: NixlRead
    handle: Handle
    nbytes: int
    segments: int
    done: bool = False


class NixlPeer(Peer):
    """A connection to one serving rank. All but ``close`` belongs to the service's thread."""

    def __init__(self, endpoint: Endpoint, service: "NixlService") -> None:
        self.endpoint = endpoint
        self.region_bytes = tuple(region.nbytes for region in endpoint.regions)
        """By region id; 0 where nothing is served."""
        self.addresses = np.array([region.address for region in endpoint.regions], np.uint64)
        self.devices = np.array([region.device for region in endpoint.regions], np.uint64)
        self.agent: Agent | None = None
        """What reads from it; none before the first read, nor after the end."""
        self.registered: set[int] = set()
        """Those of our regions that that agent knows: the ones into which it has read."""
        self.turns: deque[NixlRead] = deque()
        """Reads that have pieces left to post, next first."""
        self.posts: list[_Post] = []
        self.lost: KVFerryError | None = None
        """Why it is gone, once it is."""
        self._service = service

    def close(self) -> None:
        """See :meth:`Peer.close`. Returns at once; the reads end in ``poll``."""
        error = PeerLostError("the connection was closed on this side")
        self._service.post(lambda: self._service.lose(self, error))


class NixlService:
    """Owns the agents, in a thread of its own."""

    def __init__(self, options: AgentOptions, regions: Regions) -> None:
        """Raises ConfigError: see :class:`~kvferry.transports.nixl_agents.Agent`."""
        self._options = options
        self._regions = regions
        self._serving: Agent = Agent(options)
        self._serves = False
        self._peers: list[NixlPeer] = []
        self._tasks: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._closing = False
        self.unproven = False
        """Whether bytes of an ended connection may still land: its backend proves nothing."""
        self._thread = threading.Thread(target=self._run, name="kvferry-nixl", daemon=True)
        self._thread.start()

    # Called from any thread.

    def post(self, task: Callable[[], object]) -> None:
        """Has the thread call ``task``. After ``close`` nothing happens."""
        self._tasks.put(task)

    def serve(self, region: int) -> None:
        """Lets peers read a region of ours; waits for the READs that are being posted.

        Raises:
            TransferError: it cannot be registered, or the transport is closed.
        """
        array = self._regions.arrays[region]

        def register() -> None:
            self._serving.register([array])
            self._serves = True

        self._call(register)

    def metadata(self) -> tuple[str, bytes]:
        """Name and metadata of the agent that serves.

        Raises:
            TransferError: the transport is closed.
        """
        return self._call(lambda: (self._serving.name, self._serving.metadata()))

    def start(self, peer: NixlPeer, read: NixlRead) -> None:
        """Begins a read."""
        self.post(lambda: self._start(peer, read))

    def close(self) -> None:
        """Ends the agents and the thread. Idempotent."""
        self._closing = True
        self.post(lambda: None)
        self._thread.join()

    def _call(self, task: Callable[[], T]) -> T:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(task())
            except Exception as error:  # the caller's, whatever it is
                future.set_exception(error)

        self.post(run)
        while True:
            with contextlib.suppress(TimeoutError):
                return future.result(timeout=1.0)
            if not self._thread.is_alive() and not future.done():
                raise TransferError("the transport is closed")

    # What follows runs in the service's thread.

    def lose(self, peer: NixlPeer, error: KVFerryError) -> None:
        """Fails everything that runs on the connection, and ends it with its agent."""
        if peer.lost is not None:
            return
        kept = isinstance(error, PeerLostError | ProtocolError)
        peer.lost = lost = error if kept else PeerLostError(f"the connection is lost: {error}")
        if peer in self._peers:
            self._peers.remove(peer)
        for read in [*peer.turns, *(post.read for post in peer.posts)]:
            read.fail(lost)
        peer.turns.clear()
        posts, peer.posts = peer.posts, []
        agent, peer.agent = peer.agent, None
        handles = [post.handle for post in posts]
        for post in posts:
            post.handle = None
        if agent is not None and not agent.destroy(handles) and posts:
            self.unproven = True
            logger.error(
                "%d READs from a lost peer may land at any time: its staging stays in quarantine "
                "until this process ends (backends: %s)",
                len(posts),
                ", ".join(self._options.backends),
            )
            return
        for post in posts:
            post.read.leave(0, 0)

    def _run(self) -> None:
        pause_s = _SHORTEST_S
        while not self._closing:
            try:
                progressed = self._round()
            except Exception:  # a bug must not end the thread that every read needs
                logger.exception("the nixl thread failed; it goes on")
                progressed = False
            pause_s = _SHORTEST_S if progressed else min(2 * pause_s, _LONGEST_S)
            self._run_tasks(0.0 if progressed else self._pause(pause_s))
        self._run_tasks(0.0)
        for peer in list(self._peers):
            self.lose(peer, PeerLostError("the transport was closed"))
        self._serving.destroy([])

    def _pause(self, pause_s: float) -> float | None:
        """How long to wait for a task: for ever where nothing else can happen."""
        if any(peer.posts for peer in self._peers):
            return pause_s
        return _LONGEST_S if self._serves else None

    def _run_tasks(self, wait_s: float | None) -> None:
        with contextlib.suppress(queue.Empty):
            task = self._tasks.get(block=wait_s != 0.0, timeout=wait_s)
            while True:
                self._guarded(task)
                task = self._tasks.get_nowait()

    def _guarded(self, task: Callable[[], object]) -> None:
        try:
            task()
        except Exception:  # as above
            logger.exception("a task of the nixl thread failed")

    def _round(self) -> bool:
        """One look at everything; whether anything went on."""
        progressed = False
        for peer in list(self._peers):
            try:
                progressed |= self._check(peer) | self._post(peer)
            except KVFerryError as error:
                # Without its frames, which would keep the agent alive.
                self.lose(peer, error.with_traceback(None))
                progressed = True
        if self._serves:
            began = time.perf_counter()
            self._serving.serve()
            progressed |= time.perf_counter() - began > _BUSY_S
        return progressed

    def _start(self, peer: NixlPeer, read: NixlRead) -> None:
        if peer.lost is None and peer.agent is None:
            self._open(peer)
        if peer.lost is not None:
            read.fail(PeerLostError(f"the peer was lost before: {peer.lost}"))
        else:
            peer.turns.append(read)

    def _open(self, peer: NixlPeer) -> None:
        try:
            peer.agent = Agent(self._options)
            peer.agent.connect(peer.endpoint.metadata, peer.endpoint.agent)
        except KVFerryError as error:
            self.lose(peer, error.with_traceback(None))
        else:
            self._peers.append(peer)

    def _check(self, peer: NixlPeer) -> bool:
        """Ends the READs that are done."""
        assert peer.agent is not None
        running: list[_Post] = []
        for number, post in enumerate(peer.posts):
            try:
                if not post.done and not peer.agent.is_done(post.handle):
                    running.append(post)
                    continue
                peer.agent.release(post.handle)
            except KVFerryError:
                peer.posts = running + peer.posts[number:]
                raise
            post.read.leave(post.nbytes, post.segments)
        progressed = len(running) < len(peer.posts)
        peer.posts = running
        return progressed

    def _post(self, peer: NixlPeer) -> bool:
        """Posts READs of the reads whose turn it is."""
        posted = False
        while peer.turns and len(peer.posts) < _READS_AHEAD:
            read = peer.turns.popleft()
            request = next(read.requests, None)
            if request is not None and read.enter():
                peer.turns.append(read)
                self._post_one(peer, read, *request)
                posted = True
        return posted

    def _post_one(
        self, peer: NixlPeer, read: NixlRead, memory: str, pieces: npt.NDArray[np.void]
    ) -> None:
        assert peer.agent is not None
        try:
            self._register(peer, peer.agent, pieces["target_region"])
            source = _rows(pieces, "source", peer.addresses, peer.devices)
            target = _rows(pieces, "target", self._regions.addresses.astype(np.uint64), None)
            handle = peer.agent.prepare(peer.endpoint.agent, memory, source, target)
        except PeerLostError:
            read.leave(0, 0)
            raise
        except KVFerryError as error:  # this read's fault, and nothing of it was posted
            read.fail(error.with_traceback(None))
            read.leave(0, 0)
            return
        post = _Post(read, handle, int(pieces["nbytes"].sum()), len(pieces))
        peer.posts.append(post)  # first: whatever start() says, bytes may land from here on
        post.done = peer.agent.start(handle)

    def _register(self, peer: NixlPeer, agent: Agent, regions: npt.NDArray[np.int64]) -> None:
        # Not all of them: a cache of many GB that is only served would be pinned for each peer.
        unknown = set(np.unique(regions).tolist()) - peer.registered
        if unknown:
            agent.register([self._regions.arrays[region] for region in unknown])
            peer.registered |= unknown


def cut(
    tiles: Tiles, runs: Runs, endpoint: Endpoint, chunk_bytes: int, max_descriptors: int
) -> Iterator[tuple[str, npt.NDArray[np.void]]]:
    """The READs of a read, each of one kind of source memory, worked out when it is its turn.

    Args:
        tiles: a 1-d array of ``TILE_DTYPE``.
        runs: a 1-d array of ``RUN_DTYPE``.
        endpoint: of the peer that is read from.
        chunk_bytes: about how many bytes a READ moves.
        max_descriptors: how many pieces it has at most.
    """
    kinds = np.array([region.memory for region in endpoint.regions])[tiles["source_region"]]
    for kind in np.unique(kinds).tolist():
        alike = tiles[kinds == kind]
        for tile_range, run_range in chunk_slices(cut_chunks(alike, runs, chunk_bytes)):
            pieces = expand(alike[tile_range], runs[run_range])
            for first in range(0, len(pieces), max_descriptors):
                yield kind, pieces[first : first + max_descriptors]


def _rows(
    pieces: npt.NDArray[np.void],
    side: str,
    addresses: npt.NDArray[np.uint64],
    devices: npt.NDArray[np.uint64] | None,
) -> Rows:
    region = pieces[f"{side}_region"]
    rows = np.zeros((len(pieces), 3), dtype=np.uint64)
    rows[:, 0] = addresses[region] + pieces[f"{side}_offset"].astype(np.uint64)
    rows[:, 1] = pieces["nbytes"]
    if devices is not None:
        rows[:, 2] = devices[region]
    return rows
