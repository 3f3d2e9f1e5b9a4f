"""Staging: a transport around another transport, for cells that the inner transport cannot place.

Dense chunks land in leased slots of bounded staging memory. Local threads unpack the chunks into
the target, and convert elements if the target has another dtype::

    source ── inner transport ──▶ slot ── convert ── unpack (movers, or the device) ──▶ target

A staged read is terminal once it can no longer change the target, whatever the inner transport can
prove. Only local threads write the target, and slots with transfers that go on after the end of the
read stay in quarantine (:mod:`kvferry.transports.staging`). So a staged transport always fences.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial

import msgspec
import numpy as np

from kvferry.errors import HostError, StalledError
from kvferry.layouts.arrays import HOST, ByteArray, MemorySpan
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.convert import convert as convert_elements
from kvferry.layouts.device import CopyStream, Placer
from kvferry.layouts.staging import WIRE_CHUNK_BYTES, StagedChunk, stage
from kvferry.layouts.tiles import Runs, Tiles, box_bytes, copy_rows, num_bytes
from kvferry.lifetimes import Closing
from kvferry.mailbox import Serial
from kvferry.topology.tensors import ITEMSIZES
from kvferry.transports.base import (
    Addressing,
    Peer,
    Transfer,
    Transfers,
    TransferState,
    Transport,
    TransportAround,
    TransportOptions,
    Waitable,
    as_transfer_error,
)
from kvferry.transports.movers import MoverPool, start_after
from kvferry.transports.regions import keep_for_ever
from kvferry.transports.staging import ALIGNMENT, Claim, Slot, StagingNumbers, StagingPool

logger = logging.getLogger(__name__)

CHUNKS_AT_ONCE = 8
"""A chunk has at most this fraction (1/8) of the staging memory, so that wire and unpacking overlap
in the half that a single source may fill."""


class Staging(Closing):
    """The staging memory of one rank, and the path from there into the rank's cache.

    The transports of the rank share this object. The object takes memory and threads only when a
    first read is prepared or begun.
    """

    def __init__(
        self,
        regions: Sequence[MemorySpan],
        *,
        nbytes: int,
        stall_timeout_s: float,
        threads: int = 1,
        streams: Sequence[CopyStream] = (),
    ) -> None:
        """Args:
        regions: the cache, by region id, on one device.
        nbytes: size of the staging memory.
        stall_timeout_s: seconds without progress after which a read fails.
        threads: number of threads that unpack.
        streams: copy on the cache's device, if not the host; still belong to the caller.
        """
        addresses = [region.address for region in regions]
        self.device = regions[0].device if regions else HOST
        """Device of the cache."""
        self.region_bytes = tuple(region.nbytes for region in regions)
        """Number of bytes of each region of the cache, by region id."""
        self.stall_timeout_s = stall_timeout_s
        self.pool = StagingPool(nbytes, stall_timeout_s)
        self.serial = Serial("staging")
        """Owns the pool and all reads."""
        self._placer = Placer(addresses, streams)
        self.movers = MoverPool("unpack", threads)
        """Threads that unpack, or ask a device to unpack."""
        self._waiter = MoverPool("unpacked", 1)  # waits for a device

    @property
    def numbers(self) -> StagingNumbers:
        """Numbers of the staging memory's use."""
        return self.pool.numbers

    @cached_property
    def memory(self) -> ByteArray:
        """The staging memory; its pages are taken at the first write."""
        padded = np.empty(self.pool.nbytes + ALIGNMENT, dtype=np.uint8)
        first = -padded.ctypes.data % ALIGNMENT
        memory = padded[first : first + self.pool.nbytes]
        try:
            self._placer.adopt(memory)
        except HostError as error:  # the memory is slower but correct
            logger.warning("staging memory: %s", error)
        return memory

    def unpack(
        self,
        chunk: StagedChunk,
        slot: Slot,
        conversion: tuple[str, str] | None,
        done: Callable[[Exception | None], object],
    ) -> None:
        """Unpacks a slot into the cache. Runs on a mover, and does not wait for a device.

        Args:
            chunk: the chunk in the slot.
            slot: the slot, which stays leased until ``done`` is called.
            conversion: dtypes of source and target if they differ.
            done: called with the error or ``None``, once no byte of the chunk can land any more.
        """
        try:
            landed = self.memory[slot.offset : slot.offset + chunk.nbytes]
            if conversion is not None:
                converted = np.empty(chunk.unpack_nbytes, dtype=np.uint8)
                convert_elements(landed, conversion[0], converted, conversion[1])
                landed = converted
            event = self._placer.place(landed, chunk.unpack_tiles, chunk.unpack_runs)
        except Exception as caught:
            done(caught)
            return
        if event is None:
            done(None)
        else:
            self._waiter.wait(event, done, keeps=landed)

    def stop(self) -> None:
        """Waits for running unpack tasks, and starts no more. Idempotent.

        Call this method after the transports are closed, and before a stream is closed.
        """
        self.movers.close()
        self._waiter.close()

    def close(self) -> None:
        """Stops, then releases the memory.

        Memory in which bytes may still land is kept.
        """
        self.stop()
        self._placer.close()
        if self.pool.may_be_written:
            keep_for_ever([self.memory])


class _StagedRead(Transfer):
    """A staged read. Except the fence, only tasks of the staging's serial touch a read."""

    def __init__(
        self,
        transport: "StagedTransport",
        nbytes: int,
        peer: Peer,
        source: str,
        chunks: Iterable[StagedChunk],
        conversion: tuple[str, str] | None,
    ) -> None:
        super().__init__(nbytes, transport.transfers)
        self._transport = transport
        self.peer = peer
        self.source = source
        """Name of the source whose share of the staging memory the read uses."""
        self.conversion = conversion
        self.waiting = deque(chunks)
        self.claims: list[Claim] = []
        """Claim of the next chunk, if that chunk has no slot yet."""
        self.chunks: dict[Slot, StagedChunk] = {}
        """Slot → chunk that is on its way into the slot, or is being unpacked."""
        self.unpacking: set[Slot] = set()

    def ended(self, state: TransferState) -> None:
        """See :meth:`Transfer.ended`: returns or quarantines the slots of the read."""
        self._transport.give_back(self)


class NoExtraConfig(msgspec.Struct, frozen=True):
    """Staging takes no configuration keys."""


class StagedTransport(TransportAround):
    """Reads through staging memory, over an inner transport that still belongs to its opener."""

    name = "staged"
    addressing = Addressing.PACKED
    fences = True
    ExtraConfig = NoExtraConfig

    def __init__(self, inner: Transport, staging: Staging) -> None:
        """Args:
        inner: moves the chunks; need not fence.
        staging: staging memory of the reading rank; the regions of the rank are the target.
        """
        super().__init__(inner)
        self._staging = staging
        self._serial = staging.serial
        self._pool = staging.pool
        self.transfers = Transfers()
        """Running transfers, and ended transfers not yet polled."""
        self._reads: set[_StagedRead] = set()

    @classmethod
    def open(cls, options: TransportOptions) -> "StagedTransport":  # noqa: ARG003  (never opened)
        """Always fails: a staged transport is made around an open transport, not by name.

        Raises:
            TypeError: always.
        """
        raise TypeError("staging is made around an open transport: StagedTransport(inner, staging)")

    def check(self, tiles: Tiles, tokens: int) -> None:
        """Checks that a chunk of one tile and ``tokens`` tokens fits into the staging memory.

        Raises:
            ConfigError: the chunk does not fit.
        """
        self._pool.check(box_bytes(tiles) * tokens)

    def prepare(self, peer: Peer, tiles: Tiles, most_tokens: int) -> None:
        """See :meth:`Transport.prepare`: takes the staging memory.

        A mover pins and registers the memory, not the calling thread. All tiles share this memory.
        """
        self._staging.movers.submit(partial(self._serial.post, self._take_memory))

    def read(
        self,
        peer: Peer,
        tiles: Tiles,
        runs: Runs,
        *,
        after: Waitable | None = None,
        source: str = "",
        conversion: tuple[str, str] | None = None,
    ) -> Transfer:
        """See :meth:`Transport.read`.

        Args:
            peer: a peer from the inner transport's ``connect``.
            tiles: with a conversion, ``itemsize`` belongs to the source, target strides to the
                target.
            runs: a 1-d array of ``RUN_DTYPE``.
            after: event after which the target may be written.
            source: name of the source whose share of the staging memory the read uses; the reads of
                a source leave room for the reads of other sources.
            conversion: dtypes of source and target if they differ.

        The inner transport checks the source's regions, chunk by chunk; an error there fails the
        read.

        Raises:
            BoundsError: a tile and a run leave the target's regions.
            ConfigError: a chunk is larger than the staging memory.
        """
        itemsize = None if conversion is None else ITEMSIZES[conversion[1]]
        most = max(self._pool.nbytes // CHUNKS_AT_ONCE, 1)
        chunks = stage(tiles, runs, min(WIRE_CHUNK_BYTES, most), target_itemsize=itemsize)
        for chunk in chunks:
            self._pool.check(chunk.nbytes)
            check_bounds(
                chunk.unpack_tiles,
                chunk.unpack_runs,
                (chunk.unpack_nbytes,),
                self._staging.region_bytes,
            )
        read = _StagedRead(self, num_bytes(tiles, runs), peer, source, chunks, conversion)
        if not self.transfers.add(read):
            return read
        # Not on the calling thread, which runs engine steps: some transports copy a short chunk in
        # read().
        begin = partial(self._serial.post, partial(self._begin, read))
        start_after(after, read, partial(self._staging.movers.submit, begin))
        return read

    def poll(self) -> list[Transfer]:
        """See :meth:`Transport.poll`. Also checks the clocks of stalls and quarantine.

        A connection over which a read goes on in quarantine for too long is closed.
        """
        self._inner.poll()  # releases the resources of dead peers
        self._serial.post(self._sweep)
        return self.transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transport.cancel`; terminal once the chunks being unpacked are in place."""
        self.transfers.cancel(transfer)

    def close(self) -> None:
        """Fails running reads. The caller closes the inner transport and the staging next."""
        self.transfers.close()

    def give_back(self, read: _StagedRead) -> None:
        """Returns the slots of an ended read; slots with running transfers go into quarantine."""
        self._serial.post(lambda: self._give_back(read))

    # ---- tasks of the staging's serial --------------------------------------------------------

    def _take_memory(self) -> int | None:
        return None if self.transfers.closed else self._staging_region

    def _begin(self, read: _StagedRead) -> None:
        if read.stopped:  # and perhaps given back already: no later task would remove the read
            return
        self._reads.add(read)
        self._advance(read)

    def _advance(self, read: _StagedRead) -> None:
        """Leases slots for the next chunks as long as it is this read's turn."""
        try:
            while read.waiting and not read.stopped and self._start_next(read):
                pass
        except Exception as error:
            read.fail(as_transfer_error(error, "a chunk could not be read"))

    def _start_next(self, read: _StagedRead) -> bool:
        """Starts the next chunk; false if no slot is free yet, or the read has failed."""
        if not read.claims:
            nbytes = read.waiting[0].nbytes
            advance = partial(self._serial.post, partial(self._advance, read))
            read.claims.append(self._pool.claim(nbytes, read.source, advance))
        (claim,) = read.claims
        if claim.error is not None:
            read.claims.clear()
            read.fail(claim.error)
            return False
        if claim.slot is None:
            return False
        self._start(read, read.waiting[0], claim.slot)
        read.claims.clear()
        read.waiting.popleft()
        return True

    def _start(self, read: _StagedRead, chunk: StagedChunk, slot: Slot) -> None:
        tiles = copy_rows(chunk.pack_tiles)
        tiles["target_region"] = self._staging_region
        tiles["target_offset"] += slot.offset
        slot.connection = read.peer
        transfer = slot.transfer = self._inner.read(read.peer, tiles, chunk.pack_runs)
        read.chunks[slot] = chunk
        read.progressed = time.monotonic()
        transfer.on_end(lambda ended: self._serial.post(partial(self._landed, read, slot, ended)))

    @cached_property
    def _staging_region(self) -> int:
        """Region id of the staging memory in the inner transport."""
        return self._inner.register(self._staging.memory, serve=False)

    def _landed(self, read: _StagedRead, slot: Slot, landed: Transfer) -> None:
        """Handles the end of a chunk's transfer: unpacks the chunk, or fails the read."""
        if slot not in read.chunks:  # given up: the slot waited in quarantine for this end
            self._pool.sweep()
        elif landed.state is TransferState.DONE:
            read.progressed = time.monotonic()
            read.unpacking.add(slot)
            self._staging.movers.submit(partial(self._unpack, read, slot, read.chunks[slot]))
        else:
            assert landed.error is not None  # set before the state
            read.fail(landed.error)

    def _unpacked(self, read: _StagedRead, slot: Slot) -> None:
        del read.chunks[slot]
        read.unpacking.remove(slot)
        self._pool.release(slot)
        self._advance(read)

    def _give_back(self, read: _StagedRead) -> None:
        self._reads.discard(read)
        read.waiting.clear()
        for claim in read.claims:
            self._pool.withdraw(claim)
        read.claims.clear()
        for slot in list(read.chunks):
            if slot in read.unpacking:
                continue  # released when unpacking has ended
            del read.chunks[slot]
            assert slot.transfer is not None  # set with the chunk
            if slot.transfer.is_terminal:
                self._pool.release(slot)
            else:
                self._inner.cancel(slot.transfer)
                self._pool.quarantine(slot)

    def _sweep(self) -> None:
        """Checks stalls and quarantine against the clock."""
        now = time.monotonic()
        for read in list(self._reads):
            self._check_progress(read, now)
        self._pool.sweep()

    def _check_progress(self, read: _StagedRead, now: float) -> None:
        """Fails a stalled read if the inner transport does not fence and so cannot end reads."""
        running = read.chunks.keys() - read.unpacking
        if self._inner.fences or not running:
            return
        under_way = [slot.transfer for slot in running if slot.transfer is not None]
        progressed = max(one.progressed for one in (read, *under_way))
        if now - progressed > self._staging.stall_timeout_s:
            read.fail(
                StalledError(
                    f"{self._inner.name}: no progress for {self._staging.stall_timeout_s:g} s "
                    f"(stall_timeout_s), {read.bytes_done} of {read.nbytes} bytes are in place"
                )
            )
            read.peer.close()  # so that the read's slots come back; see StagingPool.sweep

    def _unpack(self, read: _StagedRead, slot: Slot, chunk: StagedChunk) -> None:
        """Unpacks a chunk, on a mover thread."""
        if read.enter():
            placed = partial(self._placed, read, slot, chunk)
            self._staging.unpack(chunk, slot, read.conversion, placed)
        else:
            self._serial.post(partial(self._unpacked, read, slot))

    def _placed(
        self, read: _StagedRead, slot: Slot, chunk: StagedChunk, error: Exception | None
    ) -> None:
        """Handles the end of unpacking: no byte of the chunk can land any more."""
        if error is not None:
            read.fail(as_transfer_error(error, "a chunk could not be unpacked"))
        assert slot.transfer is not None  # the transfer has landed
        read.leave(0 if error is not None else chunk.nbytes, slot.transfer.segments)
        self._serial.post(partial(self._unpacked, read, slot))
