"""Staging memory of one rank: bounded, shared by reads in turn, quarantined until proved quiet.

Chunks are served first come, first served, as long as their source leaves room for other sources. A
source without slots gets a slot in its turn. A source with slots gets another slot only if
afterwards at least as many bytes are free as the source holds. So a source that stands still leaves
room for sources that move: the first source that stops keeps at most half of the memory, the next a
quarter, and so on. If ``n`` sources all move, each comes to hold ``1 / (n + 1)`` of the memory. A
source at its bound is passed over, and its chunk keeps its place in the queue. Such a chunk is
served at the latest when all slots of its source are back, so no chunk waits for ever.

A slot is leased for a single chunk. The slot comes back once no byte can land in it any more (its
transfer is terminal) and its chunk was unpacked. If the read ends before, the slot is in
quarantine: the slot stays out of use, and if its transfer never ends, the memory outlives the pool.

Not thread-safe, except that any thread may read :attr:`StagingPool.numbers`.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvferry.errors import ConfigError, StagingFullError
from kvferry.transports.base import Peer, Transfer

ALIGNMENT = 64
"""Alignment of slots in bytes: two slots never share a cache line."""


@dataclass(slots=True, eq=False)
class Slot:
    """Staging memory for a single chunk."""

    offset: int
    """Number of bytes from the start of the staging memory."""
    nbytes: int
    source: str
    """Name of the source whose share of the memory contains the slot."""
    transfer: Transfer | None = None
    """Transfer that lands in the slot."""
    connection: Peer | None = None
    """Connection over which the transfer comes."""
    quarantined: float | None = None
    """Time at which the quarantine began, in seconds of the pool's clock; ``None`` without
    quarantine."""


@dataclass(slots=True, eq=False)
class Claim:
    """A chunk's place in the queue for staging memory."""

    nbytes: int
    source: str
    """Name of the source whose share of the memory the claim counts to."""
    number: int
    """Number of earlier claims."""
    decided: Callable[[], object]
    """Callback, called once ``slot`` or ``error`` is set."""
    slot: Slot | None = None
    """Granted slot; set when the claim's turn has come."""
    error: StagingFullError | None = None
    """Error of the claim; set if its turn will not come."""


@dataclass(slots=True, eq=False)
class _Share:
    """The part of the memory that belongs to one source."""

    leased: int = 0
    """Number of bytes of the source's slots in use."""
    quarantined: int = 0
    """Number of bytes of the source's slots in quarantine."""
    waiting: deque[Claim] = field(default_factory=deque)

    @property
    def is_empty(self) -> bool:
        return not (self.leased or self.quarantined or self.waiting)


@dataclass(frozen=True, slots=True)
class StagingNumbers:
    """Numbers of a pool's use."""

    used_bytes: int = 0
    """Number of bytes leased to running loads."""
    quarantined_bytes: int = 0
    """Number of bytes out of use, because bytes may still land there."""
    waiting: int = 0
    """Number of chunks in the queue."""
    quarantined: int = 0
    """Number of slots that were ever put in quarantine."""
    refused: int = 0
    """Number of chunks refused because quarantine left no room."""


class StagingPool:
    """Leases slots of the staging memory, in turn."""

    def __init__(
        self,
        nbytes: int,
        stall_timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        *,
        key: str = "staging_bytes",
    ) -> None:
        """Args:
        nbytes: size of the staging memory, which belongs to the caller.
        stall_timeout_s: seconds for which quarantine may block a claim; also the seconds after
            which a connection with a transfer in quarantine is closed.
        clock: seconds of a monotonic clock.
        key: configuration key of the size, for messages.
        """
        self._key = key
        self.nbytes = nbytes
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self._free = [(0, nbytes)]
        self.used: set[Slot] = set()
        self._quarantine: set[Slot] = set()
        self._shares: dict[str, _Share] = {}
        """Share of each source, by name of the source; no share is empty."""
        self._numbers = itertools.count()
        self._blocked_since: float | None = None
        self._quarantined = self._refused = 0

    @property
    def numbers(self) -> StagingNumbers:
        """Numbers of the pool's use now."""
        shares = list(self._shares.values())  # at once, as the pool may change meanwhile
        return StagingNumbers(
            used_bytes=sum(share.leased for share in shares),
            quarantined_bytes=sum(share.quarantined for share in shares),
            waiting=sum(len(share.waiting) for share in shares),
            quarantined=self._quarantined,
            refused=self._refused,
        )

    def check(self, nbytes: int) -> None:
        """Checks that a chunk fits into the staging memory at all.

        Raises:
            ConfigError: the chunk is larger than the staging memory.
        """
        if _aligned(nbytes) > self.nbytes:
            raise ConfigError(
                f"{self._key}: one block of one tensor is {nbytes} bytes and does not fit into "
                f"{self.nbytes}; write at least {4 * _aligned(nbytes)}"
            )

    def claim(
        self, nbytes: int, source: str, decided: Callable[[], object] = lambda: None
    ) -> Claim:
        """Queues for a slot of ``nbytes``; granted at once if the slot is free and the queue empty.

        Args:
            nbytes: bytes of the chunk.
            source: name of the source whose share of the memory the claim counts to.
            decided: called when the slot is granted, or never will be.

        Raises:
            ConfigError: see :meth:`check`.
        """
        self.check(nbytes)
        claim = Claim(_aligned(nbytes), source, next(self._numbers), decided)
        self._shares.setdefault(source, _Share()).waiting.append(claim)
        self._grant()
        return claim

    def withdraw(self, claim: Claim) -> None:
        """Withdraws a claim; a granted claim returns its slot, in which no byte has landed."""
        if claim.slot is not None:
            self.release(claim.slot)
        elif claim.error is None:
            self._shares[claim.source].waiting.remove(claim)
            self._grant()

    def release(self, slot: Slot) -> None:
        """Returns a slot whose transfer is terminal and whose chunk was unpacked."""
        assert slot.transfer is None or slot.transfer.is_terminal  # else it must be quarantined
        self.used.remove(slot)
        self._shares[slot.source].leased -= slot.nbytes
        self._give_back(slot)
        self._grant()

    def quarantine(self, slot: Slot) -> None:
        """Puts a slot without a waiting read into quarantine, until the slot's transfer ends."""
        self.used.remove(slot)
        self._quarantine.add(slot)
        share = self._shares[slot.source]
        share.leased -= slot.nbytes
        share.quarantined += slot.nbytes
        slot.quarantined = self._clock()
        self._quarantined += 1
        self._grant()

    def sweep(self) -> None:
        """Takes back slots with ended transfers; refuses claims that were blocked too long.

        For some transports, the end of a connection is the only proof that no byte lands any more.
        So a connection over which a transfer goes on for too long is closed; otherwise a peer that
        stands still would keep the memory from all other sources.
        """
        now = self._clock()
        for slot in list(self._quarantine):
            if _is_quiet(slot):
                self._quarantine.remove(slot)
                self._shares[slot.source].quarantined -= slot.nbytes
                self._give_back(slot)
                self._blocked_since = None
            elif slot.connection is not None:
                assert slot.quarantined is not None  # the slot is in quarantine
                if now - slot.quarantined >= self._stall_timeout_s:
                    slot.connection.close()
                    slot.connection = None
        self._grant()

    @property
    def may_be_written(self) -> bool:
        """Whether bytes may still land in the memory, so that the memory must be kept."""
        return any(not _is_quiet(slot) for slot in (*self.used, *self._quarantine))

    def _grant(self) -> None:
        """Serves the queue in order: a small chunk never overtakes a large chunk that is next."""
        self._serve()
        while (oldest := self._oldest()) is not None and self._is_blocked():
            self._refuse(oldest)
            self._serve()  # the chunks behind may be smaller
        if self.used:
            self._blocked_since = None
        self._shares = {name: share for name, share in self._shares.items() if not share.is_empty}

    def _oldest(self, *, ready: bool = False) -> Claim | None:
        """Head of the queue; with ``ready``, the first claim whose source is below its bound."""
        heads = (
            share.waiting[0]
            for share in self._shares.values()
            if share.waiting and (not ready or self._may_take(share))
        )
        return min(heads, key=lambda claim: claim.number, default=None)

    def _may_take(self, share: _Share) -> bool:
        """Whether a source, given its next slot, still leaves enough for other sources."""
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
        """Whether quarantine has blocked the head of the queue for too long."""
        if self.used:
            return False  # some slots will come back
        # From here on no source is at a bound: only memory is missing.
        now = self._clock()
        if self._blocked_since is None:
            self._blocked_since = now
        return now - self._blocked_since >= self._stall_timeout_s

    def _refuse(self, claim: Claim) -> None:
        self._shares[claim.source].waiting.popleft()
        held = sum(slot.nbytes for slot in self._quarantine)
        self._refused += 1
        claim.error = StagingFullError(
            f"{self._key}: {held} of {self.nbytes} bytes have been in quarantine for "
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
                self.used.add(slot)
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
