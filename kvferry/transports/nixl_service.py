"""What a nixl transport has open: the agent that serves, those that read, and a thread for both.

The thread makes the progress that readers of our memory wait for, where a backend needs ours, and
looks after READs that are under way. NIXL wakes nobody, so it looks again and again, ever less
often while nothing happens, and not at all where nothing can.
"""

import logging
import threading
import time
from functools import partial

from kvferry.errors import TransferError
from kvferry.mailbox import Mailbox
from kvferry.transports.nixl_agents import Agent, AgentOptions
from kvferry.transports.nixl_reader import SHORT_BYTES, NixlPeer, NixlRead, SharedAgent
from kvferry.transports.nixl_wire import Endpoint
from kvferry.transports.regions import Regions

logger = logging.getLogger(__name__)

_BUSY_S = 2e-5
"""A look at the serving agent that took longer found something to do: look again at once."""
_SHORTEST_S, _LONGEST_S = 2e-5, 1e-3
"""Pauses between two looks; they double while nothing happens."""


class NixlService:
    """The agents of a transport. Every method may be called from any thread."""

    def __init__(
        self, options: AgentOptions, regions: Regions, max_agents: int, stall_timeout_s: float
    ) -> None:
        """Raises ConfigError: see :class:`~kvferry.transports.nixl_agents.Agent`."""
        self._regions = regions
        self._max_agents = max_agents
        self._make = partial(SharedAgent, options, regions, stall_timeout_s)
        self._serving: Agent = Agent(options)
        self._lock = threading.Lock()
        """Of the serving agent."""
        self._serves = False
        self._agents: tuple[SharedAgent, ...] = ()
        self._joins = threading.Lock()
        """Guards the choice of an agent."""
        self._pause_s = _SHORTEST_S
        self._closed = False
        self._thread = Mailbox("nixl", self._look).start()

    @property
    def may_be_written(self) -> bool:
        """Whether bytes of an ended connection may still land."""
        return any(agent.may_be_written for agent in self._agents)

    def serve(self, region: int) -> None:
        """Lets peers read a region of ours.

        Raises:
            TransferError: it cannot be registered, or the transport is closed.
        """
        with self._lock:
            self._check_open()
            self._serving.register(self._regions.spans[region], int(self._regions.devices[region]))
        self._serves = True
        self.wake()

    def metadata(self) -> tuple[str, bytes]:
        """Name and metadata of the agent that serves.

        Raises:
            TransferError: the transport is closed.
        """
        with self._lock:
            self._check_open()
            return self._serving.name, self._serving.metadata()

    def connect(self, endpoint: Endpoint) -> NixlPeer:
        """A connection, over an agent of its own as long as there may be one more."""
        with self._joins:
            agent = min(self._agents, key=partial(_load_of, endpoint.agent), default=None)
            if agent is None or (agent.names and len(self._agents) < self._max_agents):
                agent = self._make()
                self._agents = (*self._agents, agent)
            peer = NixlPeer(endpoint, agent, self.wake)
            agent.join(peer)
            return peer

    def start(self, peer: NixlPeer, read: NixlRead) -> None:
        """Begins a read; a short one is often over when this returns."""
        peer.turns.append(read)
        if peer.lost is not None:
            peer.refuse_turns()
        elif read.nbytes > SHORT_BYTES or not peer.agent.post_now(peer):
            self.wake()

    def wake(self) -> None:
        """Has the thread look now."""
        self._thread.post(self._hurry)

    def close(self) -> None:
        """Ends the agents and the thread. Idempotent."""
        self._thread.close()
        for agent in self._agents:
            agent.close()
        with self._lock:
            if not self._closed:
                self._closed = True
                self._serving.destroy([])

    def _check_open(self) -> None:
        if self._closed:
            raise TransferError("the transport is closed")

    # ---- the thread ---------------------------------------------------------------------------

    def _hurry(self) -> None:
        self._pause_s = _SHORTEST_S

    def _look(self) -> float | None:
        """One look at everything; seconds until the next."""
        progressed, under_way = False, False
        for agent in self._agents:
            ended, more = agent.look()
            progressed |= ended
            under_way |= more
        if self._serves:
            progressed |= self._serve()
        if progressed:
            self._pause_s = _SHORTEST_S
            return 0.0
        if not under_way:
            return _LONGEST_S if self._serves else None
        pause_s = self._pause_s
        self._pause_s = min(2 * pause_s, _LONGEST_S)
        return pause_s

    def _serve(self) -> bool:
        began = time.perf_counter()
        with self._lock:
            self._serving.serve()
        return time.perf_counter() - began > _BUSY_S


def _load_of(name: str, agent: SharedAgent) -> tuple[bool, int]:
    """Connections to one serving agent are better kept apart: they would end together."""
    names = agent.names
    return name in names, len(names)
