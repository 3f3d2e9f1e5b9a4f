"""The sources of a target engine, and the time of the next look at each of them."""

import heapq
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator

from kvferry.connectors.pull.pursuit import Pursuit, Source
from kvferry.errors import HandshakeNeededError, KVFerryError, PeerLostError
from kvferry.mailbox import Mailbox

logger = logging.getLogger(__name__)

_ASKED_AGAIN = "; peers names it, so it is asked until it answers: start it, or correct peers"


class Agenda:
    """All sources of this engine, by address, and a heap of the next looks. The caller of a method
    must hold :attr:`lock`.

    The cost of a look at a source depends on this source alone, not on the number of other sources.
    """

    thread: Mailbox
    """Thread for the due work; its owner sets the attribute before anything is planned."""

    def __init__(
        self,
        addresses: Iterable[str],
        *,
        note_error: Callable[[str, str], None],
        clock: Callable[[], float],
    ) -> None:
        """Args:
        addresses: ``host:port`` of the sources in ``peers``.
        note_error: takes the kind and text of an error, for ``kvferry status``.
        clock: monotonic clock, in seconds.
        """
        self.lock = threading.RLock()  # an answer may come while the asking thread has the lock
        """Lock for all changes of a source or a pursuit."""
        self.clock = clock
        """Monotonic clock, in seconds."""
        self.peers = frozenset(addresses)
        """Addresses of the sources to be asked until they answer, also without a request."""
        self.sources = {address: Source(address) for address in addresses}
        """Address → source."""
        self.sleeps_until = math.inf
        """Clock reading of the thread's next turn, if nothing wakes the thread before."""
        self._note_error = note_error
        self._used: dict[Source, float] = {}
        """Source → clock reading of its last use."""
        self._due: dict[Source, float] = {}
        """Source → clock reading of the next look; no entry if no look is planned."""
        self._dues: list[tuple[float, int, Source]] = []
        """Heap of planned looks. A source that was planned again has several entries; only the
        entry equal to :attr:`_due` counts."""
        self._numbers = itertools.count()

    def find(self, address: str, now: float) -> Source:
        """The source at an address, made if need be; the call counts as a use."""
        source = self.sources.get(address)
        if source is None:
            source = self.sources[address] = Source(address)
        self.use(source, now)
        return source

    def use(self, source: Source, now: float) -> None:
        """Notes the use of a source, or a live connection to the source."""
        self._used[source] = now

    def last_use(self, source: Source) -> float:
        """Clock reading of the last use of a source."""
        return self._used.get(source, 0.0)

    def forget(self, source: Source) -> None:
        """Forgets all knowledge of a source; the next use starts from nothing."""
        del self.sources[source.address]
        self._used.pop(source, None)

    @property
    def pursuits(self) -> list[Pursuit]:
        """All pursuits whose ticket has come."""
        return [each for source in self.sources.values() for each in source.pursuits.values()]

    def wake(self, source: Source) -> None:
        """Has the thread look at a source now."""
        self.plan(source, 0.0)

    def plan(self, source: Source, when: float) -> None:
        """Has the thread look at a source at the time ``when`` at the latest."""
        if when < self._due.get(source, math.inf):
            self._due[source] = when
            heapq.heappush(self._dues, (when, next(self._numbers), source))
            if when < self.sleeps_until:
                self.sleeps_until = when
                self.thread.post(lambda: None)

    def take_due(self, now: float) -> Iterator[Source]:
        """The sources due for a look now; the caller must plan the next look at each."""
        while self._dues:
            due, _, source = self._dues[0]
            is_next = due == self._due.get(source)
            if is_next and due > now:
                return
            heapq.heappop(self._dues)
            if is_next:
                del self._due[source]
                yield source

    @property
    def next_due(self) -> float:
        """Clock reading of the next look; infinity if none is planned."""
        return self._dues[0][0] if self._dues else math.inf

    def failed(self, source: Source, what: str, error: KVFerryError) -> None:
        """Remembers the error of a source, and that a source which asks for a handshake knows us no
        more; logs the same error once, not at every attempt.
        """
        if str(error) != str(source.error):
            text = f"{what} with {source.address}: {type(error).__name__}: {error}"
            # A failed load has its own log line; a peer may have no load yet.
            is_peer = source.address in self.peers
            was_never_there = source.description is None and isinstance(error, PeerLostError)
            told = logging.WARNING if is_peer or what == "renewal" else logging.INFO
            logger.log(told, "%s%s", text, _ASKED_AGAIN if is_peer and was_never_there else "")
            self._note_error(what, text)
        source.error = error
        source.stale |= isinstance(error, HandshakeNeededError)
