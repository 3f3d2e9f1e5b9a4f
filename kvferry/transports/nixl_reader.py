"""Agents that read, and the connections that share these agents.

NIXL cannot take a READ back. A READ that does not complete ends only with its agent (see
:mod:`~kvferry.transports.nixl_agents`). Each agent registers all memory into which it reads, so the
number of agents is bounded, and connections may share an agent. Whatever forces the end of an
agent, only the reads of its cause fail. READs of sources that answer have some time to complete;
the agent's successor posts the remaining READs again.

Each agent has a lock. The holder of the lock posts READs and checks which READs are done. The
thread that calls ``read`` posts a short read itself; over shared memory this completes the read.
The thread of the transport does everything that the calling thread cannot do at once, because
another thread has the lock or because the work takes long. The thread of the transport also checks
READs in progress::

    read() ──▶ peer.turns ──▶ post ──▶ peer.posts ──▶ done
                 ▲                         │
                 └─── posted again ◀── agent ended

A READ in progress counts as a writer of its :class:`~kvferry.transports.base.Transfer`. So no read
is terminal before each of its READs is done, or its agent has provably ended.
"""

import contextlib
import itertools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvferry.errors import KVFerryError, PeerLostError, ProtocolError, StalledError
from kvferry.layouts.arrays import Int64s
from kvferry.transports.base import Peer, Transfer, Transfers
from kvferry.transports.nixl_agents import Agent, AgentEndpoint, AgentOptions, Handle, Rows
from kvferry.transports.nixl_segments import SegmentRequest, Segments
from kvferry.transports.regions import Regions

logger = logging.getLogger(__name__)

_READS_AHEAD = 4
"""Number of READs posted per connection at a time; with more, cancelling would come too late."""
SHORT_BYTES = 2 << 20
"""Number of bytes up to which the calling thread itself posts a read."""
END_S = 3.0
"""Seconds that READs in progress have to complete, after their read was cancelled or their agent
must end. Not less: over TCP, and over shared memory without CMA, UCX aborts the process of a source
that still answers READs when UCX finds their reader gone (1.22; UCX's replies to a READ do not
expect a failed connection)."""

_MEET_S = 1.0
"""Seconds for which UCX gets processor time to make a connection, once a peer is known."""


class NixlRead(Transfer):
    """A read, and its READs that are not posted yet."""

    def __init__(
        self, nbytes: int, transfers: Transfers, requests: Iterator[SegmentRequest]
    ) -> None:
        super().__init__(nbytes, transfers)
        self.requests = requests
        self.given_up: float | None = None
        """``time.monotonic()`` at which the read was first found stopped with READs in progress."""


@dataclass(slots=True, eq=False)
class _Post:
    """A READ in progress."""

    read: NixlRead
    request: SegmentRequest
    handle: Handle


class NixlPeer(Peer):
    """A connection to one serving rank."""

    def __init__(
        self, endpoint: AgentEndpoint, agent: "SharedAgent", wake: Callable[[], object]
    ) -> None:
        """``wake`` makes the transport's thread look at the peer."""
        self.endpoint = endpoint
        self.agent = agent
        """Agent that reads from the peer."""
        self.region_bytes = tuple(region.nbytes for region in endpoint.regions)
        """Number of bytes of each region, by region id; 0 for a region that is not served."""
        self.kinds = tuple(region.memory for region in endpoint.regions)
        """NIXL's name of the kind of memory of each region, by region id."""
        self.addresses = np.array([region.address for region in endpoint.regions], np.int64)
        self.devices = np.array([region.device for region in endpoint.regions], np.uint64)
        self.turns: deque[NixlRead] = deque()
        """Reads with READs left to post, next first. Any thread may append."""
        self.posts: list[_Post] = []
        """READs in progress. Guarded by the agent's lock."""
        self.lost: KVFerryError | None = None
        """Error that ended the connection; ``None`` while the peer is there."""
        self.drains = False
        """Whether to wait for READs in progress although the peer is lost, because this side closed
        it."""
        self.meets_until = math.inf
        """``time.monotonic()`` until which the connection is made; infinite before the
        beginning."""
        self._wake = wake

    @property
    def is_busy(self) -> bool:
        """Whether the peer reads or waits to read, or its connection is being made."""
        return bool(self.turns or self.posts) or time.monotonic() < self.meets_until

    def lose(self, error: KVFerryError) -> None:
        """Marks the peer as lost; the transport's thread ends its READs in progress. Idempotent."""
        if self.lost is None:
            kept = isinstance(error, PeerLostError | ProtocolError)
            # Without its frames, which would keep the agent alive.
            error = error.with_traceback(None)
            self.lost = error if kept else PeerLostError(f"the connection is lost: {error}")
        self._wake()

    def refuse_turns(self) -> None:
        """Fails waiting reads; called by a thread that finds the peer lost after adding a read."""
        error = PeerLostError(f"the peer was lost before: {self.lost}")
        with contextlib.suppress(IndexError):  # other threads do the same
            while True:
                self.turns.popleft().fail(error)

    def close(self) -> None:
        """See :meth:`Peer.close`. Returns at once; the reads end in ``poll``."""
        self.drains |= self.lost is None
        self.lose(PeerLostError("the connection was closed on this side"))


class SharedAgent:
    """An agent that reads for some connections. The agent is made with the first connection."""

    def __init__(self, options: AgentOptions, regions: Regions, stall_timeout_s: float) -> None:
        self._options = options
        self._regions = regions
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._peers: list[NixlPeer] = []
        self._joining: deque[NixlPeer] = deque()
        self.agent: Agent | None = None
        self.registered: set[int] = set()
        """Ids of local regions that the agent has registered: the regions into which it has
        read."""
        self._known: dict[str, bytes] = {}
        """Name of a serving agent → digest of the metadata with which the local agent knows it."""
        self._ends_since: float | None = None
        """``time.monotonic()`` at which the agent was found to need an end; then no more READs are
        posted, and READs that can still complete are awaited."""
        self._ended: list[tuple[Agent, list[NixlRead]]] = []
        """Agents without a proved end, each with the reads whose READs were in progress."""
        self._reports: list[Callable[[], object]] = []
        """Callbacks for after the release of the lock: a listener of an end may start another
        read."""

    # ---- any thread ---------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the serving agents of the connections."""
        return [peer.endpoint.agent for peer in (*self._peers, *self._joining)]

    def join(self, peer: NixlPeer) -> None:
        """Adds a connection."""
        self._joining.append(peer)

    def post_now(self, peer: NixlPeer) -> bool:
        """Posts the waiting reads of a connection if that can be done at once.

        Does not wait for other threads. Returns whether no work is left for the connection.
        """
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if peer.lost is None and self._knows(peer):
                self._check(peer)
                self._post(peer, may_register=False)
            return not peer.turns and not peer.posts
        finally:
            self._release()

    @property
    def is_reading(self) -> bool:
        """Whether READs are in progress."""
        return any(peer.posts for peer in self._peers)

    @property
    def may_be_written(self) -> bool:
        """Whether bytes of READs with an unknown outcome may still land."""
        return any(reads for _, reads in self._ended)

    # ---- the service's thread -----------------------------------------------------------------

    def look(self) -> tuple[bool, bool]:
        """Does all due work; returns whether any read ended, and whether work is in progress."""
        self._lock.acquire()
        try:
            while self._joining:
                self._peers.append(self._joining[0])  # in this order: never in neither list
                self._joining.popleft()
            for peer in self._peers:
                if peer.lost is None and peer.is_busy:
                    self._go_on(peer)
                elif peer.drains:
                    self._check(peer)
            self._end_what_must_end(time.monotonic())
            self._look_for_the_end()
            under_way = any(peer.is_busy for peer in self._peers)
            return bool(self._reports), under_way or (self._options.fenced and bool(self._ended))
        finally:
            self._release()

    def close(self) -> None:
        """Closes all connections. The agent ends in :meth:`look`."""
        for peer in (*self._peers, *self._joining):
            peer.close()

    # ---- under the lock -----------------------------------------------------------------------

    def _release(self) -> None:
        reports, self._reports = self._reports, []
        self._lock.release()
        for report in reports:
            report()

    def _knows(self, peer: NixlPeer) -> bool:
        return self._known.get(peer.endpoint.agent) == peer.endpoint.digest

    def _go_on(self, peer: NixlPeer) -> None:
        is_met = peer.meets_until < math.inf
        try:
            if not self._knows(peer) and (peer.turns or not is_met):
                self._introduce(peer)
            elif self.agent is not None and not (peer.turns or peer.posts):
                self.agent.serve()  # UCX makes the connection while asked for notifications
        except KVFerryError as error:
            peer.lose(error)
            return
        peer.meets_until = min(peer.meets_until, time.monotonic() + _MEET_S)
        self._check(peer)
        if self._knows(peer):  # a read may have come since the look at the turns
            self._post(peer, may_register=True)

    def _introduce(self, peer: NixlPeer) -> None:
        """Makes the agent if needed, and makes the peer known to the agent."""
        if self.agent is None:
            self.agent = Agent(self._options)
        self.agent.connect(peer.endpoint.metadata, peer.endpoint.agent)
        self._known[peer.endpoint.agent] = peer.endpoint.digest

    def _check(self, peer: NixlPeer) -> None:
        """Ends the READs that are done."""
        for post in list(peer.posts):
            assert self.agent is not None  # the agent has posted the READs
            try:
                if not self.agent.is_done(post.handle):
                    continue
                self.agent.release(post.handle)
            except KVFerryError as error:
                peer.drains = False
                peer.lose(error)
                return
            peer.posts.remove(post)
            self._done(post)

    def _done(self, post: _Post) -> None:
        nbytes, segments = post.request.nbytes, len(post.request.segments)
        post.read.progressed = time.monotonic()
        self._reports.append(partial(post.read.leave, nbytes, segments))

    def _post(self, peer: NixlPeer, *, may_register: bool) -> None:
        """Posts a few READs of the next reads; only a few, as other threads want the lock too."""
        for _ in range(_READS_AHEAD):
            if not peer.turns or len(peer.posts) >= _READS_AHEAD or peer.lost is not None:
                return
            if self._ends_since is not None:
                return
            read = peer.turns.popleft()
            request = next(read.requests, None)
            if request is None or not read.enter():
                continue
            if not (may_register or self._registered_all(request.segments)):
                self._put_back(peer, read, request)
                return
            peer.turns.append(read)
            self._post_one(peer, read, request)

    def _registered_all(self, segments: Segments) -> bool:
        return self.registered.issuperset(segments["target_region"].tolist())

    def _put_back(self, peer: NixlPeer, read: NixlRead, request: SegmentRequest) -> None:
        """Keeps a READ for later that was not posted, or that has ended with its agent."""
        read.requests = itertools.chain([request], read.requests)
        if read not in peer.turns:
            peer.turns.appendleft(read)
        self._reports.append(partial(read.leave, 0, 0))

    def _post_one(self, peer: NixlPeer, read: NixlRead, request: SegmentRequest) -> None:
        assert self.agent is not None  # the caller has made the agent
        segments = request.segments
        read.progressed = time.monotonic()
        try:
            self._register(self.agent, segments)
            source = _rows(segments, "source", peer.addresses, peer.devices)
            target = _rows(segments, "target", self._regions.addresses, self._regions.devices)
            kinds = request.source_memory, request.target_memory
            handle = self.agent.prepare(peer.endpoint.agent, kinds, source, target)
        except KVFerryError as error:  # nothing of the READ was posted
            if isinstance(error, PeerLostError):
                peer.lose(error)
            read.fail(error.with_traceback(None))
            self._reports.append(partial(read.leave, 0, 0))
            return
        post = _Post(read, request, handle)
        peer.posts.append(post)  # first: whatever start() says, bytes may land from here on
        try:
            if not self.agent.start(handle):
                return
            self.agent.release(handle)
        except KVFerryError as error:
            peer.lose(error)
            return
        peer.posts.pop()
        self._done(post)

    def _register(self, agent: Agent, segments: Segments) -> None:
        # Not all regions: each agent would pin a cache of many GB that is only served.
        for region in set(segments["target_region"].tolist()) - self.registered:
            agent.register(self._regions.spans[region], int(self._regions.devices[region]))
            self.registered.add(region)

    # ---- ends ---------------------------------------------------------------------------------

    def _end_what_must_end(self, now: float) -> None:
        """Drops lost connections, and ends the agent if it cannot wait for READs."""
        stuck: list[NixlPeer] = []
        if self._options.fenced:
            alive = [peer for peer in self._peers if peer.lost is None]
            stuck = [peer for peer in alive if self._is_stuck(peer, now)]
        lost = [peer for peer in self._peers if peer.lost is not None]
        self._reports += [peer.refuse_turns for peer in lost if peer.turns]
        # A connection ends for all readers of the same serving agent over this agent.
        names = {peer.endpoint.agent for peer in lost}
        must_end = bool(stuck) or any(p.posts for p in self._peers if p.endpoint.agent in names)
        if self.agent is not None and must_end and self._waits(stuck, now):
            return
        self._ends_since = None
        self._peers = [peer for peer in self._peers if peer.lost is None]
        if self.agent is None:
            return
        if must_end or not self._peers:
            self._end(self.agent, lost)
            return
        for name in names & self._known.keys():
            del self._known[name]
            self.agent.forget(name)

    def _waits(self, stuck: list[NixlPeer], now: float) -> bool:
        """Whether an agent that must end waits for READs of sources that seem to answer."""
        if self._ends_since is None:
            self._ends_since = now
        answering = [peer for peer in self._peers if peer.lost is None or peer.drains]
        reading = any(peer.posts and peer not in stuck for peer in answering)
        return reading and now - self._ends_since <= END_S

    def _is_stuck(self, peer: NixlPeer, now: float) -> bool:
        """Whether a READ of a cancelled read takes too long, or a READ has stalled.

        When a connection stalls, all its stalled reads fail as stalled; its other reads fail as
        lost.
        """
        stuck = False
        for read in {post.read for post in peer.posts}:
            if read.stopped:
                read.given_up = now if read.given_up is None else read.given_up
                stuck |= now - read.given_up > END_S
            elif now - read.progressed > self._stall_timeout_s:
                stuck = True
                what = f"no progress for {self._stall_timeout_s:g} s (stall_timeout_s)"
                error = StalledError(f"nixl: {what}, {read.bytes_done} of {read.nbytes} bytes")
                read.fail(error)
                peer.lose(error)
        return stuck

    def _end(self, agent: Agent, lost: list[NixlPeer]) -> None:
        """Ends the agent. Reads of lost connections fail; the other READs are posted again."""
        handles: list[Handle] = []
        posts: list[tuple[NixlPeer, _Post]] = []
        for peer in (*self._peers, *lost):
            posts += [(peer, post) for post in peer.posts]
            peer.posts = []
        for _, post in posts:
            handles.append(post.handle)
            post.handle = None
        self.agent = None
        self.registered = set()
        self._known = {}
        proved = agent.destroy(handles)
        if not proved:
            self._keep(agent, posts)
            return
        for peer, post in posts:
            if peer.lost is not None:
                post.read.fail(peer.lost)
                self._reports.append(partial(post.read.leave, 0, 0))
            else:
                self._put_back(peer, post.read, post.request)

    def _keep(self, agent: Agent, posts: list[tuple[NixlPeer, _Post]]) -> None:
        """Fails reads whose READs may still land; these reads are not terminal before the proof."""
        if not posts:
            return
        for peer, post in posts:
            post.read.fail(peer.lost or PeerLostError("an agent that it shared had to end"))
        self._ended.append((agent, [post.read for _, post in posts]))
        logger.error(
            "%d READs may land at any time although their agent was ended (backends: %s): their "
            "targets stay with them until it is gone",
            len(posts),
            ", ".join(self._options.backends),
        )

    def _look_for_the_end(self) -> None:
        """Checks agents that were still referenced: these may have ended by now."""
        for ended in list(self._ended):
            agent, reads = ended
            if agent.is_over():
                self._ended.remove(ended)
                self._reports += [partial(read.leave, 0, 0) for read in reads]


def _rows(
    segments: Segments,
    side: str,
    addresses: Int64s,
    devices: npt.NDArray[np.uint64],
) -> Rows:
    region = segments[f"{side}_region"]
    rows = np.empty((len(segments), 3), dtype=np.uint64)
    rows[:, 0] = addresses[region] + segments[f"{side}_offset"]
    rows[:, 1] = segments["nbytes"]
    rows[:, 2] = devices[region]
    return rows
