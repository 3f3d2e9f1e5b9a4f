"""Agents that read, and the connections that share them.

NIXL cannot take a READ back; what ends one that does not complete is the end of its agent (see
:mod:`~kvferry.transports.nixl_agents`). An agent costs as much registered memory as it reads into,
so their number is bounded, and connections may share one. Whatever forces the end of an agent, only
what caused it fails: READs of sources that answer have a while to complete, and what is left of
them is posted again by the agent that takes its place.

Each agent has one lock, and who holds it posts READs and sees which are done. A short read is
posted by the thread that asks for it, which over shared memory is all there is to do. What that
thread cannot do at once, because somebody else has the lock or because it takes long, is done by
the thread of the service, which looks at what is under way::

    read() ──▶ peer.turns ──▶ post ──▶ peer.posts ──▶ done
                 ▲                         │
                 └─── posted again ◀── agent ended

A READ under way counts as a writer of its :class:`~kvferry.transports.base.Transfer`, so that no
read is terminal before each of its READs is done, or its agent has provably ended.
"""

import contextlib
import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from kvferry.errors import KVFerryError, PeerLostError, ProtocolError, StalledError
from kvferry.transports.base import Peer, Transfer, Transfers
from kvferry.transports.nixl_agents import Agent, AgentOptions, Endpoint, Handle, Rows
from kvferry.transports.nixl_segments import Request, Segments
from kvferry.transports.regions import Regions

logger = logging.getLogger(__name__)

_READS_AHEAD = 4
"""READs posted per connection at a time; beyond, cancelling would come too late."""
SHORT_BYTES = 2 << 20
"""Bytes of a read that is posted by the thread that asks for it."""
END_S = 3.0
"""Seconds that READs under way have to complete, once their read was cancelled or their agent must
end. Not less: over TCP, UCX aborts the process of a source that still answers READs when it finds
their reader gone (1.22; its replies to a READ do not expect a connection that has failed)."""


class NixlRead(Transfer):
    """One read, and the READs that have not been posted yet."""

    def __init__(self, nbytes: int, transfers: Transfers, requests: Iterator[Request]) -> None:
        super().__init__(nbytes, transfers)
        self.requests = requests
        self.given_up: float | None = None
        """``time.monotonic()`` when it was first found stopped with READs under way."""


@dataclass(slots=True, eq=False)
class _Post:
    """One READ under way."""

    read: NixlRead
    request: Request
    handle: Handle


class NixlPeer(Peer):
    """A connection to one serving rank."""

    def __init__(
        self, endpoint: Endpoint, agent: "SharedAgent", wake: Callable[[], object]
    ) -> None:
        """``wake`` has the service look at it."""
        self.endpoint = endpoint
        self.agent = agent
        """What reads from it."""
        self.region_bytes = tuple(region.nbytes for region in endpoint.regions)
        """By region id; 0 where nothing is served."""
        self.kinds = tuple(region.memory for region in endpoint.regions)
        """By region id: NIXL's name of the kind of memory."""
        self.addresses = np.array([region.address for region in endpoint.regions], np.int64)
        self.devices = np.array([region.device for region in endpoint.regions], np.uint64)
        self.turns: deque[NixlRead] = deque()
        """Reads that have READs left to post, next first. Anybody may append."""
        self.posts: list[_Post] = []
        """Guarded by the agent's lock."""
        self.lost: KVFerryError | None = None
        """Why it is gone, once it is."""
        self.drains = False
        """Whether READs under way are waited for although it is gone: this side has closed it."""
        self._wake = wake

    def lose(self, error: KVFerryError) -> None:
        """Nothing is read from it any more; the service ends what is under way. Idempotent."""
        if self.lost is None:
            kept = isinstance(error, PeerLostError | ProtocolError)
            # Without its frames, which would keep the agent alive.
            error = error.with_traceback(None)
            self.lost = error if kept else PeerLostError(f"the connection is lost: {error}")
        self._wake()

    def refuse_turns(self) -> None:
        """Fails what waits at a lost connection. By whoever finds it lost after adding to it."""
        error = PeerLostError(f"the peer was lost before: {self.lost}")
        with contextlib.suppress(IndexError):  # others do the same
            while True:
                self.turns.popleft().fail(error)

    def close(self) -> None:
        """See :meth:`Peer.close`. Returns at once; the reads end in ``poll``."""
        self.drains |= self.lost is None
        self.lose(PeerLostError("the connection was closed on this side"))


class SharedAgent:
    """An agent that reads for some connections. There is none while nothing is read."""

    def __init__(self, options: AgentOptions, regions: Regions, stall_timeout_s: float) -> None:
        self._options = options
        self._regions = regions
        self._stall_timeout_s = stall_timeout_s
        self._lock = threading.Lock()
        self._peers: list[NixlPeer] = []
        self._joining: deque[NixlPeer] = deque()
        self.agent: Agent | None = None
        self.registered: set[int] = set()
        """Those of our regions that the agent knows: the ones into which it has read."""
        self._known: dict[str, bytes] = {}
        """Name of a serving agent → digest of the metadata with which ours knows it."""
        self._ends_since: float | None = None
        """``time.monotonic()`` when it was found that the agent must end: nothing more is posted,
        and what can still complete is waited for."""
        self._ended: list[tuple[Agent, list[NixlRead]]] = []
        """Agents whose end is not proved, and whose READs those are that were under way."""
        self._reports: list[Callable[[], object]] = []
        """What is to be told when the lock is released: who hears of an end may ask for more."""

    # ---- any thread ---------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Names of the serving agents of its connections."""
        return [peer.endpoint.agent for peer in (*self._peers, *self._joining)]

    def join(self, peer: NixlPeer) -> None:
        """Reads for one more connection."""
        self._joining.append(peer)

    def post_now(self, peer: NixlPeer) -> bool:
        """Posts what is waiting at a connection if that can be done at once.

        It does not wait for other threads. Whether nothing is left to do for the connection.
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
        """Whether READs are under way."""
        return any(peer.posts for peer in self._peers)

    @property
    def may_be_written(self) -> bool:
        """Whether something may land of which nothing is known."""
        return any(reads for _, reads in self._ended)

    # ---- the service's thread -----------------------------------------------------------------

    def look(self) -> tuple[bool, bool]:
        """Does what is due; whether anything ended, and whether anything is under way."""
        self._lock.acquire()
        try:
            while self._joining:
                self._peers.append(self._joining[0])  # in this order: it is never in none of them
                self._joining.popleft()
            for peer in self._peers:
                if peer.lost is None and (peer.turns or peer.posts):
                    self._go_on(peer)
                elif peer.drains:
                    self._check(peer)
            self._end_what_must_end(time.monotonic())
            self._look_for_the_end()
            under_way = any(peer.turns or peer.posts for peer in self._peers)
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
        try:
            if not self._knows(peer):
                self._introduce(peer)
        except KVFerryError as error:
            peer.lose(error)
            return
        self._check(peer)
        self._post(peer, may_register=True)

    def _introduce(self, peer: NixlPeer) -> None:
        """Makes the agent if need be, and the peer known to it."""
        if self.agent is None:
            self.agent = Agent(self._options)
        self.agent.connect(peer.endpoint.metadata, peer.endpoint.agent)
        self._known[peer.endpoint.agent] = peer.endpoint.digest

    def _check(self, peer: NixlPeer) -> None:
        """Ends the READs that are done."""
        for post in list(peer.posts):
            assert self.agent is not None  # it has posted them
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
        """Posts READs of the reads whose turn it is; few, as others want the lock too."""
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

    def _put_back(self, peer: NixlPeer, read: NixlRead, request: Request) -> None:
        """A READ that was not posted, or that has ended with its agent, is posted later."""
        read.requests = itertools.chain([request], read.requests)
        if read not in peer.turns:
            peer.turns.appendleft(read)
        self._reports.append(partial(read.leave, 0, 0))

    def _post_one(self, peer: NixlPeer, read: NixlRead, request: Request) -> None:
        assert self.agent is not None  # who called has made it
        segments = request.segments
        read.progressed = time.monotonic()
        try:
            self._register(self.agent, segments)
            source = _rows(segments, "source", peer.addresses, peer.devices)
            target = _rows(segments, "target", self._regions.addresses, self._regions.devices)
            kinds = request.source_memory, request.target_memory
            handle = self.agent.prepare(peer.endpoint.agent, kinds, source, target)
        except KVFerryError as error:  # nothing of it was posted
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
        # Not all of them: a cache of many GB that is only served would be pinned for each agent.
        for region in set(segments["target_region"].tolist()) - self.registered:
            agent.register(self._regions.spans[region], int(self._regions.devices[region]))
            self.registered.add(region)

    # ---- ends ---------------------------------------------------------------------------------

    def _end_what_must_end(self, now: float) -> None:
        """Drops lost connections, and ends the agent where READs cannot be waited for."""
        stuck: list[NixlPeer] = []
        if self._options.fenced:
            alive = [peer for peer in self._peers if peer.lost is None]
            stuck = [peer for peer in alive if self._is_stuck(peer, now)]
        lost = [peer for peer in self._peers if peer.lost is not None]
        self._reports += [peer.refuse_turns for peer in lost if peer.turns]
        # A connection ends for all who read from the same serving agent over it.
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
        """Whether a READ of a cancelled read takes too long, or one has stalled.

        Of a stalled connection all reads fail that have stalled themselves; the others were lost.
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
        """Ends the agent. What had to do with lost connections fails, the rest is posted again."""
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
        """Reads whose READs may land at any time fail, and are not terminal before that is over."""
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
        """Agents that somebody held on to may have ended by now."""
        for ended in list(self._ended):
            agent, reads = ended
            if agent.is_over():
                self._ended.remove(ended)
                self._reports += [partial(read.leave, 0, 0) for read in reads]


def _rows(
    segments: Segments,
    side: str,
    addresses: npt.NDArray[np.int64],
    devices: npt.NDArray[np.uint64],
) -> Rows:
    region = segments[f"{side}_region"]
    rows = np.empty((len(segments), 3), dtype=np.uint64)
    rows[:, 0] = addresses[region] + segments[f"{side}_offset"]
    rows[:, 1] = segments["nbytes"]
    rows[:, 2] = devices[region]
    return rows
