"""Staging memory of one rank: bounded, shared by its reads in turn, quarantined until proved quiet.

Chunks are served first come, first served, as long as their source leaves room for others. A
source that has no slot gets one in its turn, and another only if at least as much is free
after that as it holds. So what stands still leaves something to what moves: the first source that
stops keeps at most half of the memory, the next one a quarter, and so on; and ``n`` sources that
all move come to hold ``1 / (n + 1)`` of it each. A source at its bound is passed over, and its
chunk keeps its place. It is served next at the latest when all slots of its source are back, so
nobody waits for ever.

A slot is leased for one chunk. It comes back once nothing can land in it any more (its transfer is
terminal) and what it held was unpacked. If the read is over before, the slot is in quarantine: it
stays out of use, and the memory outlives the pool itself if its transfers never end.

One caller at a time; :attr:`StagingPool.numbers` may be read by anyone.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.errors import ConfigError, StagingFullError
from kvferry.transports.base import Peer, Transfer

ALIGNMENT = 64
"""Bytes to which slots are aligned: no two share a cache line."""


@dataclass(slots=True, eq=False)
class Slot:
    """Staging memory that one chunk has to itself."""

    offset: int
    """Bytes from the start of the staging memory."""
    nbytes: int
    source: str
    """Whose share of the memory it counts to."""
    transfer: Transfer | None = None
    """What lands in it."""
    connection: Peer | None = None
    """Over which that comes."""
    quarantined: float | None = None
    """Since when it is in quarantine, seconds of the pool's clock."""


@dataclass(slots=True, eq=False)
class Claim:
    """A chunk's place in the queue for staging memory."""

    nbytes: int
    source: str
    """Whose share of the memory it counts to."""
    number: int
    """Of those before it."""
    decided: Callable[[], object]
    """Called once either of what follows is set."""
    slot: Slot | None = None
    """Set when its turn has come."""
    error: StagingFullError | None = None
    """Set when its turn will not come."""


@dataclass(slots=True, eq=False)
class _Share:
    """What one source has of the memory."""

    leased: int = 0
    """Bytes of its slots in use."""
    quarantined: int = 0
    """Bytes of its slots in quarantine."""
    waiting: deque[Claim] = field(default_factory=deque)

    @property
    def is_empty(self) -> bool:
        return not (self.leased or self.quarantined or self.waiting)


@dataclass(frozen=True, slots=True)
class StagingNumbers:
    """What a pool is doing."""

    used_bytes: int = 0
    """Leased to loads that go on."""
    quarantined_bytes: int = 0
    """Out of use, because something may still land there."""
    waiting: int = 0
    """Chunks in the queue."""
    quarantined: int = 0
    """Slots that were ever put in quarantine."""
    refused: int = 0
    """Chunks that quarantine left no room for."""


class StagingPool:
    """Leases slots of one piece of memory, in turn."""

    def __init__(
        self,
        nbytes: int,
        stall_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        nbytes: size of the staging memory, which is the caller's.
        stall_timeout_s: seconds for which quarantine may stand in the way of a claim, and
            after which the connection goes over which a read still lands there.
        clock: seconds of a monotonic clock.
        """
        self.nbytes = nbytes
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._free = [(0, nbytes)]
        self._used: set[Slot] = set()
        self._quarantine: set[Slot] = set()
        self._shares: dict[str, _Share] = {}
        """By source; none is empty."""
        self._numbers = itertools.count()
        self._blocked_since: float | None = None
        self._quarantined = self._refused = 0
        self.numbers = StagingNumbers()
        """As of the last change; replaced, never changed."""

    def check(self, nbytes: int) -> None:
        """Checks that a chunk fits at all.

        Raises:
            ConfigError: it is larger than the staging memory.
        """
        if _aligned(nbytes) > self.nbytes:
            raise ConfigError(
                f"staging_bytes: one block of one tensor is {nbytes} bytes and does not fit into "
                f"{self.nbytes}; write at least {4 * _aligned(nbytes)}"
            )

    def claim(
        self, nbytes: int, source: str, decided: Callable[[], object] = lambda: None
    ) -> Claim:
        """Queues for a slot of ``nbytes``; granted at once if it is free and nobody comes before.

        Args:
            nbytes: bytes of the chunk.
            source: whose share of the memory it counts to.
            decided: called when the slot is there, or never will be.

        Raises:
            ConfigError: see :meth:`check`.
        """
        self.check(nbytes)
        claim = Claim(_aligned(nbytes), source, next(self._numbers), decided)
        self._shares.setdefault(source, _Share()).waiting.append(claim)
        self._grant()
        return claim

    def withdraw(self, claim: Claim) -> None:
        """A claim is no longer wanted. One that was granted gives its slot back: nothing landed."""
        if claim.slot is not None:
            self.release(claim.slot)
        elif claim.error is None:
            self._shares[claim.source].waiting.remove(claim)
            self._grant()

    def release(self, slot: Slot) -> None:
        """A slot comes back: its transfer is terminal and what it held was unpacked."""
        assert slot.transfer is None or slot.transfer.is_terminal  # else it is quarantine's
        self._used.remove(slot)
        self._shares[slot.source].leased -= slot.nbytes
        self._give_back(slot)
        self._grant()

    def quarantine(self, slot: Slot) -> None:
        """Nobody waits for a slot's transfer any more; the slot comes back when that has ended."""
        self._used.remove(slot)
        self._quarantine.add(slot)
        share = self._shares[slot.source]
        share.leased -= slot.nbytes
        share.quarantined += slot.nbytes
        slot.quarantined = self._clock()
        self._quarantined += 1
        self._grant()

    def sweep(self) -> None:
        """Takes back the slots whose transfers ended; refuses claims that were blocked too long.

        The end of a connection is to some transports the only proof that nothing lands any more:
        one over which a read goes on for too long is closed, or a peer that stands still would keep
        the memory of all others.
        """
        now = self._clock()
        for slot in list(self._quarantine):
            if _is_quiet(slot):
                self._quarantine.remove(slot)
                self._shares[slot.source].quarantined -= slot.nbytes
                self._give_back(slot)
                self._blocked_since = None
            elif slot.connection is not None:
                assert slot.quarantined is not None  # it is in quarantine
                if now - slot.quarantined >= self._stall_timeout_s:
                    slot.connection.close()
                    slot.connection = None
        self._grant()

    @property
    def may_be_written(self) -> bool:
        """Whether something may still land in the memory: then it must be kept."""
        return any(not _is_quiet(slot) for slot in (*self._used, *self._quarantine))

    def _grant(self) -> None:
        """Serves the queue in order: a small chunk never overtakes a large one that may be next."""
        self._serve()
        while (oldest := self._oldest()) is not None and self._is_blocked():
            self._refuse(oldest)
            self._serve()  # what stood behind it may be smaller
        if self._used:
            self._blocked_since = None
        self._shares = {name: share for name, share in self._shares.items() if not share.is_empty}
        shares = self._shares.values()
        self.numbers = StagingNumbers(
            used_bytes=sum(share.leased for share in shares),
            quarantined_bytes=sum(share.quarantined for share in shares),
            waiting=sum(len(share.waiting) for share in shares),
            quarantined=self._quarantined,
            refused=self._refused,
        )

    def _oldest(self, *, ready: bool = False) -> Claim | None:
        """The head of the queue, or the first one in it whose source is not at its bound."""
        heads = (
            share.waiting[0]
            for share in self._shares.values()
            if share.waiting and (not ready or self._may_take(share))
        )
        return min(heads, key=lambda claim: claim.number, default=None)

    def _may_take(self, share: _Share) -> bool:
        """Whether a source leaves enough to others if it gets what it waits for."""
        if not share.leased:
            return True
        nbytes = share.waiting[0].nbytes
        free = sum(length for _, length in self._free)
        return share.leased + share.quarantined + nbytes <= free - nbytes

    def _serve(self) -> None:
        while (claim := self._oldest(ready=True)) is not None:
            claim.slot = self._take(claim)
            if claim.slot is None:
                return
            self._shares[claim.source].waiting.popleft()
            claim.decided()

    def _is_blocked(self) -> bool:
        """Whether quarantine has stood in the way of the queue's head for too long."""
        if self._used:
            return False  # some of it will come back
        # From here on nobody is at a bound: only memory is missing.
        now = self._clock()
        if self._blocked_since is None:
            self._blocked_since = now
        return now - self._blocked_since >= self._stall_timeout_s

    def _refuse(self, claim: Claim) -> None:
        self._shares[claim.source].waiting.popleft()
        held = sum(slot.nbytes for slot in self._quarantine)
        self._refused += 1
        claim.error = StagingFullError(
            f"staging_bytes: {held} of {self.nbytes} bytes have been in quarantine for "
            f"{self._stall_timeout_s:g} s or more (stall_timeout_s): reads that were given up "
            "may still land there; look at their peers, or give it more"
        )
        claim.decided()

    def _take(self, claim: Claim) -> Slot | None:
        for index, (offset, length) in enumerate(self._free):
            if length >= claim.nbytes:
                rest = [(offset + claim.nbytes, length - claim.nbytes)]
                self._free[index : index + 1] = rest if length > claim.nbytes else []
                slot = Slot(offset, claim.nbytes, claim.source)
                self._used.add(slot)
                self._shares[claim.source].leased += slot.nbytes
                return slot
        return None

    def _give_back(self, slot: Slot) -> None:
        merged: list[tuple[int, int]] = []
        for offset, length in sorted([*self._free, (slot.offset, slot.nbytes)]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((offset, length))
        self._free = merged


def _is_quiet(slot: Slot) -> bool:
    return slot.transfer is None or slot.transfer.is_terminal


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
