"""Blocks of a cache on a device, packed into host memory when a reader requests them.

A wire sends host memory. The source of a wire asks its :class:`Packer` for the pieces of each chunk
that will be sent next. The device packs a piece, and copies the piece into a bounded ring of pinned
memory. The wire sends the piece from there::

    cache on the device ──▶ pack, bounce ──▶ download ──▶ slot of the ring (host, pinned) ──▶ wire

Only bytes that a reader requests are copied, and a lease waits for no copy: blocks are lent once
they are written, so they may be packed at any time.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

from kvferry.errors import ConfigError, KVFerryError, TransferError
from kvferry.layouts.arrays import Int64s, MemorySpan, whole_pages
from kvferry.layouts.chunks import chunk_slices, cut_chunks
from kvferry.layouts.device import Bounces, CopyStream
from kvferry.layouts.tiles import Runs, Tiles, box_bytes, num_bytes
from kvferry.lifetimes import Closing
from kvferry.mailbox import Serial
from kvferry.transports.base import Transport, as_transfer_error
from kvferry.transports.movers import MoverPool
from kvferry.transports.staging import Claim, StagingPool

PIECE_BYTES = 4 << 20
"""Approximate number of bytes of a piece; one run of one tile is never cut."""


@dataclass(slots=True, eq=False)
class PackedPiece:
    """Some bytes of a chunk, from the request to the device until the wire has sent the bytes."""

    tiles: Tiles
    """Rows of ``TILE_DTYPE``; their target is the dense chunk, in region 0."""
    runs: Runs
    """Rows of ``RUN_DTYPE``."""
    ready: Callable[[], object]
    """Callback for any thread once the address or the error is set. Must not block."""
    nbytes: int = field(init=False)
    """Number of bytes of the piece."""
    address: int = 0
    """Address of the packed bytes in the ring; 0 until the device has packed them."""
    error: KVFerryError | None = None
    """Error of the packing; ``None`` if the device packed the piece, or still may."""
    is_packing: bool = False
    """Whether the device may still write to the slot."""
    is_released: bool = False
    """Whether the packed bytes have no reader any more."""

    def __post_init__(self) -> None:
        self.nbytes = num_bytes(self.tiles, self.runs)

    @property
    def first_byte(self) -> int:
        """Number of bytes of the chunk before the piece."""
        before = self.runs["target_block"][0] * self.tiles["target_block_stride"][0]
        return int(self.tiles["target_offset"][0] + before)


class Packer(Closing):
    """The ring of one rank, and the path from the rank's cache into the ring. Thread-safe.

    All state belongs to a series of tasks; one thread waits for events of the device, in order.
    """

    def __init__(self, streams: Sequence[CopyStream], nbytes: int) -> None:
        """Allocates and pins the ring's memory.

        Args:
            streams: copy on the cache's device, in turn; still belong to the caller, who closes the
                streams after this object.
            nbytes: size of the ring.

        Raises:
            HostError: the memory cannot be pinned, or the device has no room.
        """
        self._streams = streams
        self._bounces = Bounces(streams)
        self._bounces.reserve(min(nbytes, PIECE_BYTES))
        self._pool = StagingPool(nbytes, 0.0, key="packing_bytes")
        self._serial = Serial("packing")
        self._waiter = MoverPool("packing", 1)
        self._claims: dict[PackedPiece, Claim] = {}
        """Claim of each piece: its place in the queue for a slot, then its slot."""
        self._ring = whole_pages(nbytes)
        streams[0].pin(self._ring)
        self.is_closed = False
        """Whether :meth:`close` was called."""

    @property
    def used_bytes(self) -> int:
        """Number of bytes of the ring that pieces hold."""
        return self._pool.numbers.used_bytes

    def pieces(
        self, tiles: Tiles, runs: Runs, most: int = PIECE_BYTES
    ) -> Iterator[tuple[Tiles, Runs]]:
        """The tables of the pieces of a chunk, in the order of the chunk's bytes.

        Args:
            tiles: a 1-d array of ``TILE_DTYPE`` whose target is the dense chunk, as in the result
                of :meth:`~kvferry.transports.wire_chunks.ChunkPlan.pack`.
            runs: a 1-d array of ``RUN_DTYPE``, all of the same length.
            most: approximate bytes of a piece; a quarter of the ring at most.
        """
        most = min(most, self._pool.nbytes // 4)
        for tile_range, run_range in chunk_slices(cut_chunks(tiles, runs, most)):
            yield tiles[tile_range], runs[run_range]

    def check(self, tiles: Tiles, runs: Runs) -> None:
        """Checks that every piece of a read fits into the ring.

        Raises:
            TransferError: one run of one tile does not fit.
        """
        try:
            self._pool.check(box_bytes(tiles) * int(runs["tokens"].max()))
        except ConfigError as error:
            raise TransferError(f"the source cannot pack this: {error}") from error

    def pack(self, piece: PackedPiece, addresses: Int64s, reader: str) -> None:
        """Asks the device to pack a new piece; returns without waiting for the device.

        Args:
            piece: the piece to pack.
            addresses: address of each region of the cache.
            reader: name of the requesting reader; a reader with many pieces leaves room for others.
        """
        self._serial.post(partial(self._claim, piece, addresses, reader))

    def release(self, piece: PackedPiece) -> None:
        """Releases the bytes of a piece; called once, at any time after :meth:`pack`.

        Never waits. The slot is free again once the device does not write to the slot.
        """
        self._serial.post(partial(self._release, piece))

    def close(self) -> None:
        """Waits until the device has packed all pieces, then releases the ring. Idempotent.

        The caller must close the requesting wires before, and the stream afterwards.
        """
        if self.is_closed:
            return
        self.is_closed = True
        self._waiter.close()
        with suppress(TransferError):  # a failed device writes nothing any more
            for stream in self._streams:
                stream.record().wait()
        self._streams[0].unpin(self._ring)

    # ---- tasks of the serial ------------------------------------------------------------------

    def _claim(self, piece: PackedPiece, addresses: Int64s, reader: str) -> None:
        begin = partial(self._begin, piece, addresses)
        decided = partial(self._serial.post, begin)
        try:
            self._claims[piece] = self._pool.claim(piece.nbytes, reader, decided)
        except ConfigError as error:  # see check()
            piece.error = error
            piece.ready()

    def _begin(self, piece: PackedPiece, addresses: Int64s) -> None:
        if piece.is_released:
            return
        slot = self._claims[piece].slot
        assert slot is not None  # no slot is ever in quarantine, so every claim is granted
        packed = self._ring[slot.offset : slot.offset + piece.nbytes]
        tables = piece.tiles, piece.runs
        try:
            event = self._bounces.down(addresses, packed, piece.first_byte, *tables)
        except Exception as caught:
            piece.error = as_transfer_error(caught, "a piece could not be packed")
            piece.ready()
            return
        piece.is_packing = True
        self._waiter.wait(event, partial(self._copied, piece, packed.ctypes.data))

    def _packed(self, piece: PackedPiece) -> None:
        piece.is_packing = False
        if piece.is_released:
            self._give_back(piece)

    def _release(self, piece: PackedPiece) -> None:
        piece.is_released = True
        if not piece.is_packing:
            self._give_back(piece)

    def _give_back(self, piece: PackedPiece) -> None:
        if (claim := self._claims.pop(piece, None)) is not None:
            self._pool.withdraw(claim)

    # ---- the thread that waits ----------------------------------------------------------------

    def _copied(self, piece: PackedPiece, address: int, error: Exception | None) -> None:
        if error is None:
            piece.address = address
        else:
            piece.error = as_transfer_error(error, "a piece could not be packed")
        self._serial.post(partial(self._packed, piece))
        piece.ready()


class PackingTransport(Transport):
    """A transport of host memory whose source can pack device memory on request.

    Reads land in host memory only.
    """

    @abstractmethod
    def register_packed(self, memory: MemorySpan, packer: Packer) -> int:
        """Serves device memory; returns its region id. The caller keeps the memory alive.

        Args:
            memory: memory of the device.
            packer: packs requested bytes; the same packer for all memory, and open until this
                transport is closed.
        """
