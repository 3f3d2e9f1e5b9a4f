"""Reads through staging memory: for what a transport must not, or cannot, put in place itself."""

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from kvferry.connectors.pull.reads import Read, TargetMemory, Work, as_load_error
from kvferry.connectors.pull.staging import Claim, Slot
from kvferry.errors import KVFerryError, PeerLostError, StalledError
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.convert import convert
from kvferry.layouts.staging import StagedChunk
from kvferry.transports.base import Peer, Transfer, TransferState, Transport, Waitable


@dataclass(slots=True, eq=False)
class _Staged:
    """A chunk in a slot: under way, then being unpacked."""

    chunk: StagedChunk
    slot: Slot
    transfer: Transfer
    unpacking: Work | None = None


class StagedRead(Read):
    """Chunks through staging: landed, then unpacked (and converted) into the cache.

    Slots are leased one by one and in turn with other reads, so a read that is larger than the
    staging memory passes through it. Reads from one engine leave some of it to those from others.
    """

    def __init__(
        self,
        transport: Transport,
        connection: Peer,
        source: str,
        memory: TargetMemory,
        chunks: Iterable[StagedChunk],
        nbytes: int,
        conversion: tuple[str, str] | None = None,
        after: Waitable | None = None,
    ) -> None:
        """Starts with the first :meth:`advance`.

        Args:
            transport: moves the chunks; it need not fence.
            connection: to the source rank.
            source: id of its engine, whose reads share a bound on staging memory.
            memory: where to.
            chunks: what to move, in this order.
            nbytes: bytes of all chunks together.
            conversion: dtype in the chunks and dtype in the cache, where they differ.
            after: when the cache may be written; chunks land in staging before.
        """
        super().__init__(nbytes)
        self._transport = transport
        self._connection = connection
        self._source = source
        self._memory = memory
        self._conversion = conversion
        self._after = after
        self._waiting = deque(chunks)
        self._claim: Claim | None = None
        self._staged: list[_Staged] = []
        self._progressed = time.monotonic()
        self._bytes_done = 0
        self._segments = 0

    @property
    def bytes_done(self) -> int:
        """See :class:`Read`."""
        return self._bytes_done

    @property
    def segments(self) -> int:
        """See :class:`Read`."""
        return self._segments

    @property
    def lost(self) -> tuple[Peer, ...]:
        """See :class:`Read`."""
        return (self._connection,) if isinstance(self.error, PeerLostError) else ()

    @property
    def is_settled(self) -> bool:
        """See :class:`Read`."""
        return not (self._staged or self._waiting)

    def advance(self, now: float) -> None:
        """See :class:`Read`."""
        try:
            for staged in list(self._staged):
                if self.error is None or staged.unpacking is not None:
                    self._follow(staged)
            if self.error is None:
                self._check_progress(now)
                self._start_more()
        except Exception as error:
            self.give_up(as_load_error(error, "a chunk could not be read"))

    def give_up(self, error: KVFerryError) -> None:
        """See :class:`Read`. Slots whose transfers go on are quarantined."""
        self.error = self.error or error
        self._waiting.clear()
        if self._claim is not None:
            self._memory.staging.withdraw(self._claim)
            self._claim = None
        for staged in list(self._staged):
            if staged.unpacking is not None:
                continue  # until that has ended the cache may change
            self._staged.remove(staged)
            if staged.transfer.is_terminal:
                self._memory.staging.release(staged.slot)
            else:
                self._transport.cancel(staged.transfer)
                self._memory.staging.quarantine(staged.slot)

    def _follow(self, staged: _Staged) -> None:
        """Unpacks a chunk that has landed; gives back the slot of one that is unpacked."""
        transfer, work = staged.transfer, staged.unpacking
        self._progressed = max(self._progressed, transfer.progressed)
        if work is not None and work.done:
            self._staged.remove(staged)
            self._memory.staging.release(staged.slot)
            self._bytes_done += staged.chunk.nbytes
            if work.error is not None:
                self.give_up(work.error)
        elif work is None and transfer.state is TransferState.DONE:
            self._segments += transfer.segments
            staged.unpacking = self._memory.submit(
                "a chunk could not be unpacked",
                lambda: self._unpack(staged),
            )
        elif work is None and transfer.is_terminal:
            assert transfer.error is not None  # set before the state
            self.give_up(transfer.error)

    def _unpack(self, staged: _Staged) -> None:
        """Runs on a mover thread."""
        if self._after is not None:
            self._after.wait()
        unpack(staged.chunk, staged.slot, self._memory, self._conversion)

    def _check_progress(self, now: float) -> None:
        """The stall clock of transports that cannot end a read themselves, as they do not fence."""
        if self._transport.fences or not any(staged.unpacking is None for staged in self._staged):
            return
        stall_timeout_s = self._memory.stall_timeout_s
        if now - self._progressed > stall_timeout_s:
            self.give_up(
                StalledError(
                    f"{self._transport.name}: no progress for {stall_timeout_s:g} s "
                    f"(stall_timeout_s), {self._bytes_done} of {self.nbytes} bytes are in place"
                )
            )
            self._connection.close()  # so that its slots come back; see StagingPool.sweep

    def _start_more(self) -> None:
        """Leases slots for the next chunks as long as it is this read's turn."""
        while self._waiting:
            if self._claim is None:
                nbytes = self._waiting[0].nbytes
                self._claim = self._memory.staging.claim(nbytes, self._source)
            if self._claim.error is not None:
                error, self._claim = self._claim.error, None
                self.give_up(error)
                return
            if self._claim.slot is None:
                return
            self._start(self._waiting[0], self._claim.slot)
            self._claim = None
            self._waiting.popleft()

    def _start(self, chunk: StagedChunk, slot: Slot) -> None:
        check_bounds(
            chunk.unpack_tiles, chunk.unpack_runs, (chunk.unpack_nbytes,), self._memory.region_bytes
        )
        tiles = chunk.pack_tiles.copy()
        tiles["target_region"] = self._memory.staging_region(self._transport)
        tiles["target_offset"] += slot.offset
        slot.connection = self._connection
        slot.transfer = self._transport.read(self._connection, tiles, chunk.pack_runs)
        self._staged.append(_Staged(chunk, slot, slot.transfer))
        self._progressed = time.monotonic()


def unpack(
    chunk: StagedChunk, slot: Slot, memory: TargetMemory, conversion: tuple[str, str] | None
) -> None:
    """Puts what a slot holds into the cache, converted if it has another dtype."""
    landed = memory.staging.memory[slot.offset : slot.offset + chunk.nbytes]
    if conversion is not None:
        converted = np.empty(chunk.unpack_nbytes, dtype=np.uint8)
        convert(landed, conversion[0], converted, conversion[1])
        landed = converted
    memory.placer.place(landed, chunk.unpack_tiles, chunk.unpack_runs)
