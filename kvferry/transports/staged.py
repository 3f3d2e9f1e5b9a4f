"""Staging: a transport around another one, for what that one must not, or cannot, put in place.

Dense chunks land in bounded staging memory, in leased slots, and are unpacked into the target by
threads of our own, converted where its elements are of another dtype::

    source ── inner transport ──▶ slot ── convert ── unpack (movers, or the device) ──▶ target

A staged read is terminal once nothing of it can change the target any more, whatever the inner
transport can prove: only our threads write the target, and slots whose transfers go on after the
read is over stay in quarantine (:mod:`kvferry.transports.staging`). So it fences always.
"""

import logging
import time
from collections import deque
from collections.abc import Iterable, Sequence
from functools import cached_property, partial

import msgspec
import numpy as np

from kvferry.errors import HostError, StalledError
from kvferry.layouts.arrays import HOST, MemorySpan
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.convert import convert as convert_elements
from kvferry.layouts.device import CopyStream, Placer
from kvferry.layouts.staging import WIRE_CHUNK_BYTES, StagedChunk, stage
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.lifetimes import Closing
from kvferry.mailbox import Serial
from kvferry.topology.tensors import ITEMSIZES
from kvferry.transports.base import (
    Addressing,
    ByteArray,
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
"""A chunk is at most this part of the staging memory, so that wire and unpacking overlap in the
half of it that one source may fill."""


class Staging(Closing):
    """The staging memory of one rank, and the way from there into its cache.

    Shared by the transports of the rank. Takes neither memory nor threads before they are needed.
    """

    def __init__(
        self,
        regions: Sequence[MemorySpan],
        *,
        nbytes: int,
        stall_timeout_s: float,
        threads: int = 1,
        stream: CopyStream | None = None,
    ) -> None:
        """Args:
        regions: the cache, by region id, on one device.
        nbytes: size of the staging memory.
        stall_timeout_s: seconds without progress after which a read is given up.
        threads: how many unpack.
        stream: copies on the cache's device, if that is not the host; stays the caller's.
        """
        addresses = [region.address for region in regions]
        self.device = regions[0].device if regions else HOST
        """On which the cache is."""
        self.region_bytes = tuple(region.nbytes for region in regions)
        """Of the cache, by region id."""
        self.stall_timeout_s = stall_timeout_s
        self.pool = StagingPool(nbytes, stall_timeout_s)
        self.serial = Serial("staging")
        """Owns the pool and all reads."""
        self._placer = Placer(addresses, stream)
        self.movers = MoverPool("unpack", threads)
        """The threads that unpack."""

    @property
    def numbers(self) -> StagingNumbers:
        """What the staging memory is doing."""
        return self.pool.numbers

    @cached_property
    def memory(self) -> ByteArray:
        """The staging memory; its pages are taken as they are first written to."""
        padded = np.empty(self.pool.nbytes + ALIGNMENT, dtype=np.uint8)
        first = -padded.ctypes.data % ALIGNMENT
        memory = padded[first : first + self.pool.nbytes]
        try:
            self._placer.adopt(memory)
        except HostError as error:  # it is slower, and right
            logger.warning("staging memory: %s", error)
        return memory

    def unpack(self, chunk: StagedChunk, slot: Slot, conversion: tuple[str, str] | None) -> None:
        """Puts what a slot holds into the cache; on a mover, which waits for it.

        Raises:
            HostError, TransferError: the device has no room, or failed.
        """
        landed = self.memory[slot.offset : slot.offset + chunk.nbytes]
        if conversion is not None:
            converted = np.empty(chunk.unpack_nbytes, dtype=np.uint8)
            convert_elements(landed, conversion[0], converted, conversion[1])
            landed = converted
        self._placer.place(landed, chunk.unpack_tiles, chunk.unpack_runs)

    def stop(self) -> None:
        """Waits for what is being unpacked, and unpacks nothing more. Idempotent.

        Call it when the transports are closed, and before a stream is.
        """
        self.movers.close()

    def close(self) -> None:
        """Stops, then lets go of the memory.

        Memory into which something may still land is kept.
        """
        self.stop()
        self._placer.close()
        if self.pool.may_be_written:
            keep_for_ever([self.memory])


class _StagedRead(Transfer):
    """One staged read. All but its fence is touched by tasks of the staging's serial only."""

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
        """Whose share of the staging memory it uses."""
        self.conversion = conversion
        self.waiting = deque(chunks)
        self.claims: list[Claim] = []
        """The place in the queue of its next chunk, if that has none yet."""
        self.chunks: dict[Slot, StagedChunk] = {}
        """Slot → the chunk that is on its way into it, or is being unpacked."""
        self.unpacking: set[Slot] = set()

    def ended(self, state: TransferState) -> None:
        """See :meth:`Transfer.ended`: what it still holds goes back, or into quarantine."""
        self._transport.give_back(self)


class NoExtraConfig(msgspec.Struct, frozen=True):
    """Staging takes no keys of its own."""


class StagedTransport(TransportAround):
    """Reads through staging memory, over a transport that stays its opener's."""

    name = "staged"
    addressing = Addressing.PACKED
    fences = True
    ExtraConfig = NoExtraConfig

    def __init__(self, inner: Transport, staging: Staging) -> None:
        """Args:
        inner: moves the chunks; it need not fence.
        staging: of the rank whose memory is read into; its regions are the target's.
        """
        super().__init__(inner)
        self._staging = staging
        self._serial = staging.serial
        self._pool = staging.pool
        self.transfers = Transfers()
        """Those under way, and those that ended and were not polled."""
        self._reads: set[_StagedRead] = set()

    @classmethod
    def open(cls, options: TransportOptions) -> "StagedTransport":  # noqa: ARG003  (never opened)
        """Not by name: it is made around a transport that is open.

        Raises:
            TypeError: always.
        """
        raise TypeError("staging is made around an open transport: StagedTransport(inner, staging)")

    def check(self, tiles: Tiles, tokens: int) -> None:
        """Checks that a chunk of one tile and so many tokens fits into the staging memory.

        Raises:
            ConfigError: it does not.
        """
        row_bytes = tiles["heads"] * tiles["elements"] * tiles["itemsize"]
        self._pool.check(int(row_bytes.max(initial=0)) * tokens)

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
            peer: what the inner transport's ``connect`` returned.
            tiles: with a conversion, ``itemsize`` is the source's, target strides are the target's.
            runs: as always.
            after: when the target may be written.
            source: whose share of the staging memory it uses; those of one source leave room for
                those of others.
            conversion: dtype of the source and of the target where they differ.

        What leaves the source's regions is found by the inner transport, chunk by chunk, and ends
        the read as failed.

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
        start_after(after, read, lambda: self._serial.post(partial(self._begin, read)))
        return read

    def poll(self) -> list[Transfer]:
        """See :meth:`Transport.poll`. What depends on time happens here: stalls, and the end of
        connections over which a read goes on in quarantine for too long.
        """
        self._inner.poll()  # it drops what dead peers have left
        self._serial.post(self._sweep)
        return self.transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transport.cancel`; terminal once what is being unpacked is in place."""
        self.transfers.cancel(transfer)

    def close(self) -> None:
        """Gives up what is under way. The inner transport and the staging are closed next."""
        self.transfers.close()

    def give_back(self, read: _StagedRead) -> None:
        """A read is over: slots whose transfers go on are quarantined."""
        self._serial.post(lambda: self._give_back(read))

    # ---- tasks of the staging's serial --------------------------------------------------------

    def _begin(self, read: _StagedRead) -> None:
        if read.stopped:  # and perhaps given back already: nobody would take it out again
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
        """Starts the next chunk; false if there is no slot for it yet, or none will be."""
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
        tiles = chunk.pack_tiles.copy()
        tiles["target_region"] = self._staging_region
        tiles["target_offset"] += slot.offset
        slot.connection = read.peer
        transfer = slot.transfer = self._inner.read(read.peer, tiles, chunk.pack_runs)
        read.chunks[slot] = chunk
        read.progressed = time.monotonic()
        transfer.on_end(lambda ended: self._serial.post(partial(self._landed, read, slot, ended)))

    @cached_property
    def _staging_region(self) -> int:
        """The id under which the inner transport knows the staging memory."""
        return self._inner.register(self._staging.memory, serve=False)

    def _landed(self, read: _StagedRead, slot: Slot, landed: Transfer) -> None:
        """A chunk's transfer has ended: unpacks it, or gives its slot back."""
        if slot not in read.chunks:  # given up: its slot waited for this in quarantine
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
                continue  # it is released when that has ended
            del read.chunks[slot]
            assert slot.transfer is not None  # set with the chunk
            if slot.transfer.is_terminal:
                self._pool.release(slot)
            else:
                self._inner.cancel(slot.transfer)
                self._pool.quarantine(slot)

    def _sweep(self) -> None:
        """What depends on time."""
        now = time.monotonic()
        for read in list(self._reads):
            self._check_progress(read, now)
        self._pool.sweep()

    def _check_progress(self, read: _StagedRead, now: float) -> None:
        """The stall clock of transports that cannot end a read themselves, as they do not fence."""
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
            read.peer.close()  # so that its slots come back; see StagingPool.sweep

    def _unpack(self, read: _StagedRead, slot: Slot, chunk: StagedChunk) -> None:
        """Runs on a mover thread."""
        if read.enter():
            nbytes = 0
            try:
                self._staging.unpack(chunk, slot, read.conversion)
                nbytes = chunk.nbytes
            except Exception as caught:
                read.fail(as_transfer_error(caught, "a chunk could not be unpacked"))
            finally:
                assert slot.transfer is not None  # it has landed
                read.leave(nbytes, slot.transfer.segments)
        self._serial.post(partial(self._unpacked, read, slot))
