"""Copies on a device, and between a device and host memory.

A :class:`CopyStream` is the contract of a device that copies: a stream that works in order, and
events on the stream. :class:`~kvferry.layouts.cuda_stream.CudaCopyStream` implements the contract
for a CUDA device. The classes below use only this contract. So tests need no device:
``kvferry.testing.HostCopyStream`` is a thread in place of a device.

Dense chunks from a wire land in host memory, and a :class:`Placer` puts the chunks into place::

    wire ──▶ staging (host) ──▶ strided copy ──────────────────▶ cache in host memory
                            ──▶ upload ──▶ bounce, unpack ─────▶ cache on the device

Dense chunks for a wire take the opposite way, through the same :class:`Bounces`.

A :class:`HostLane` copies between the device and host memory of any order, in either direction.
"""

import itertools
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import ByteArray, Int64s, MemorySpan, whole_pages
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.staging import WIRE_CHUNK_BYTES, StagedChunk, stage
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.lifetimes import Closing


class CopyEvent(ABC):
    """A point of a stream. The device works asynchronously, so its errors surface here."""

    @abstractmethod
    def done(self) -> bool:
        """Whether all work before the event has been carried out. Never waits.

        Raises:
            TransferError: the device failed; no enqueued work is carried out any more.
        """

    @abstractmethod
    def wait(self) -> None:
        """Returns when all work before the event has been carried out; the calling thread waits.

        Raises:
            TransferError: the device failed.
        """


PreparedCopy: TypeAlias = Callable[[Runs], CopyEvent]
"""Function that enqueues the copy of its tiles × the given runs, and returns an event after the
copy. The runs are not checked, and may change afterwards. Raises ``TransferError`` if the device
failed, and ``HostError`` if there is no room for the runs; nothing of the copy was enqueued
then."""


class CopyStream(Closing):
    """Copies that one device carries out in the order of enqueuing.

    Only ``digest`` and ``close`` wait for copies; ``allocate`` waits for the stream of the calling
    thread. Addresses are addresses as the device sees them. The owner of the memory keeps the
    memory alive until an event recorded after the last copy is done. Thread-safe.
    """

    device: str
    """Name of the device, for example ``cuda:0``."""

    @abstractmethod
    def allocate(self, nbytes: int) -> MemorySpan:
        """Zeroed memory of the device, which lives until ``close``.

        Raises:
            HostError: there is no room for ``nbytes``.
        """

    @abstractmethod
    def pin(self, memory: ByteArray) -> None:
        """Keeps host memory in place, so that the device reaches the memory under the same address.

        Raises:
            HostError: the memory cannot be pinned.
        """

    @abstractmethod
    def unpin(self, memory: ByteArray) -> None:
        """Undoes :meth:`pin`, once no copy uses the memory any more."""

    @abstractmethod
    def upload(self, source: ByteArray, target: int) -> None:
        """Enqueues a copy of pinned host bytes to an address of the device.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def download(self, source: int, target: ByteArray) -> CopyEvent:
        """Enqueues a copy from an address of the device to pinned host bytes.

        Returns an event after the copy.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def prepare(
        self,
        source_addresses: Sequence[int] | Int64s,
        target_addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        most_tokens: int = 0,
    ) -> PreparedCopy:
        """Puts the data shared by all copies of ``tiles`` on the device; a copy needs only runs.

        Args:
            source_addresses: address of each source region.
            target_addresses: address of each target region.
            tiles: a 1-d array of ``TILE_DTYPE``; may change afterwards.
            most_tokens: tokens of the longest expected run. If positive, everything is made ready
                for the first copy, which may take a second; 0 for tiles that are copied once.

        Raises:
            HostError: the device has no room for the tiles.
            TransferError: the device failed.
        """

    def copy(
        self,
        source_addresses: Sequence[int] | Int64s,
        target_addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        runs: Runs,
    ) -> CopyEvent:
        """Enqueues the copy of ``tiles`` × ``runs``, for tiles copied once; see :meth:`prepare`.

        Raises:
            TransferError: the device failed; nothing of this copy was enqueued.
        """
        return self.prepare(source_addresses, target_addresses, tiles)(runs)

    @abstractmethod
    def follow(self, event: CopyEvent) -> None:
        """Makes all later work of the stream wait for ``event``, an event of the same device.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def digest(
        self,
        addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        runs: Runs,
        positions: Int64s,
        keys: Int64s,
    ) -> npt.NDArray[np.uint64]:
        """Digests memory of the device; see :func:`~kvferry.layouts.digest.digest_rows`.

        The calling thread waits for all work enqueued before, and for the sums.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def record(self) -> CopyEvent:
        """An event after all work enqueued so far.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def engine_event(self) -> CopyEvent:
        """An event after all work that the engine has enqueued so far from the calling thread.

        Recorded on the step thread, the event is the ``after`` of reads into blocks that an earlier
        step may still use. Recorded after a step, the event tells when the writes of the step are
        in place.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for enqueued work, then frees allocated memory, even if the device has failed.

        Idempotent.
        """


@dataclass(slots=True, eq=False)
class _Bounce:
    """A stream, and memory of its device through which chunks go, one at a time."""

    stream: CopyStream
    memory: MemorySpan
    lock: threading.Lock = field(default_factory=threading.Lock)

    def room(self, nbytes: int) -> int:
        """Address of memory for ``nbytes`` bytes. The caller must hold the lock."""
        if self.memory.nbytes < nbytes:
            # Doubled, because memory allocated by the stream lives as long as the stream.
            self.memory = self.stream.allocate(max(nbytes, 2 * self.memory.nbytes))
        return self.memory.address


class Bounces:
    """Dense chunks between pinned host memory and a cache on a device. Thread-safe.

    A chunk crosses the bus dense, between host memory and a bounce buffer on the device, and is
    strided only on the device. A dense copy runs at the rate of the bus without the help of the
    device's cores, and the strided pass costs next to nothing in comparison. A stream keeps order,
    so a chunk overwrites the bounce buffer of a stream only after the chunk before has left the
    buffer. Of two streams, one crosses the bus while the other packs or unpacks.
    """

    def __init__(self, streams: Sequence[CopyStream]) -> None:
        """``streams`` copy on the cache's device, and still belong to the caller."""
        self._bounces = [_Bounce(each, MemorySpan(0, 0, each.device)) for each in streams]
        self._turns = itertools.cycle(self._bounces)

    def reserve(self, nbytes: int) -> None:
        """Allocates room for chunks of ``nbytes`` bytes; larger chunks allocate their own room.

        Raises:
            HostError: the device has no room.
        """
        for bounce in self._bounces:
            with bounce.lock:
                bounce.room(nbytes)

    def up(
        self, chunk: ByteArray, addresses: Sequence[int] | Int64s, tiles: Tiles, runs: Runs
    ) -> CopyEvent:
        """Enqueues the copy of a chunk, source region 0, to regions with the given addresses.

        Raises:
            HostError: the device has no room for a chunk of this size.
            TransferError: the device failed.
        """
        bounce = next(self._turns)
        with bounce.lock:  # upload and copy belong together on the stream
            room = bounce.room(chunk.nbytes)
            bounce.stream.upload(chunk, room)
            return bounce.stream.copy([room], addresses, tiles, runs)

    def down(
        self,
        addresses: Sequence[int] | Int64s,
        chunk: ByteArray,
        first_byte: int,
        tiles: Tiles,
        runs: Runs,
    ) -> CopyEvent:
        """Enqueues the copy of regions with the given addresses to a chunk, target region 0.

        The tables give the places of the bytes in a chunk that begins ``first_byte`` bytes before
        the given chunk.

        Raises:
            HostError: the device has no room for a chunk of this size.
            TransferError: the device failed.
        """
        bounce = next(self._turns)
        with bounce.lock:  # copy and download belong together on the stream
            room = bounce.room(chunk.nbytes)
            bounce.stream.copy(addresses, [room - first_byte], tiles, runs)
            return bounce.stream.download(room, chunk)


class Placer(Closing):
    """Puts chunks that have landed in host memory into place in a cache. Thread-safe.

    For a cache in host memory, that is one strided copy on the calling thread. For a cache on a
    device, the chunks go through :class:`Bounces`.
    """

    def __init__(
        self, addresses: Sequence[int] | Int64s, streams: Sequence[CopyStream] = ()
    ) -> None:
        """Args:
        addresses: address of each region of the cache.
        streams: copy on the cache's device, and still belong to the caller; none for host memory.
        """
        self._addresses = np.array(addresses, dtype=np.int64)
        self._streams = streams
        self._bounces = Bounces(streams)
        self._pinned: list[ByteArray] = []

    def adopt(self, staging: ByteArray) -> None:
        """Prepares memory in which chunks will land, only for speed; kept until ``close``.

        Raises:
            HostError: the memory cannot be pinned, or the device has no room.
        """
        self._bounces.reserve(min(staging.nbytes, WIRE_CHUNK_BYTES))
        if self._streams:
            self._streams[0].pin(staging)
            self._pinned.append(staging)

    def place(self, landed: ByteArray, tiles: Tiles, runs: Runs) -> CopyEvent | None:
        """Copies a chunk into the cache, unchecked.

        Args:
            landed: the chunk; source region 0 of the tables.
            tiles: a 1-d array of ``TILE_DTYPE``, as :func:`~kvferry.layouts.staging.stage` unpacks.
            runs: a 1-d array of ``RUN_DTYPE``.

        Returns:
            Event after which the bytes are in place; ``None`` if the copy is complete. Until then
                ``landed`` must stay unchanged.

        Raises:
            HostError: the device has no room for a chunk of this size.
            TransferError: the device failed.
        """
        if not self._streams:
            copy_tiles([landed.ctypes.data], self._addresses, tiles, runs)
            return None
        return self._bounces.up(landed, self._addresses, tiles, runs)

    def close(self) -> None:
        """Unpins the memory of :meth:`adopt`. No chunk may be in progress. Idempotent."""
        pinned, self._pinned = self._pinned, []
        for staging in pinned:
            self._streams[0].unpin(staging)


class HostLane:
    """Copies between a device and the host through two pinned buffers.

    While a buffer is filled on one side, the other is emptied on the other side. Thread-safe.
    """

    def __init__(self, stream: CopyStream) -> None:
        """Takes ownership of the stream."""
        self._stream = stream
        self._buffers = [np.empty(0, dtype=np.uint8), np.empty(0, dtype=np.uint8)]
        self._lock = threading.Lock()

    def copy(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        tiles: Tiles,
        runs: Runs,
        *,
        to_device: bool,
    ) -> None:
        """Copies after all work so far on the device's current stream; complete at return.

        After an error, too, no byte moves any more.

        Raises:
            HostError: a buffer cannot be pinned, or the device has no room.
            TransferError: the device failed.
        """
        under_way: list[Callable[[], object]] = []
        with self._lock:
            self._stream.engine_event().wait()
            try:
                for number, chunk in enumerate(stage(tiles, runs)):
                    if len(under_way) == len(self._buffers):
                        under_way.pop(0)()  # the buffer is free afterwards
                    dense = [self._room(number % len(self._buffers), chunk.nbytes)]
                    under_way.append(self._begin(sources, dense, targets, chunk, to_device))
                for finish in under_way:
                    finish()
            finally:  # after an error too, nobody uses the buffers or the memory any more
                self._stream.record().wait()

    def _begin(
        self,
        sources: Sequence[int],
        dense: Sequence[int],
        targets: Sequence[int],
        chunk: StagedChunk,
        to_device: bool,
    ) -> Callable[[], object]:
        """Begins to move a chunk; returns a function that completes the move."""
        pack = chunk.pack_tiles, chunk.pack_runs
        unpack = chunk.unpack_tiles, chunk.unpack_runs
        if to_device:
            copy_tiles(sources, dense, *pack)
            return self._stream.copy(dense, targets, *unpack).wait
        packed = self._stream.copy(sources, dense, *pack)

        def finish() -> None:
            packed.wait()
            copy_tiles(dense, targets, *unpack)

        return finish

    def _room(self, index: int, nbytes: int) -> int:
        """Address of a pinned buffer of at least ``nbytes`` bytes."""
        if self._buffers[index].nbytes < nbytes:
            larger = whole_pages(max(nbytes, WIRE_CHUNK_BYTES))
            self._stream.pin(larger)  # may fail: a buffer of the list is always pinned
            if self._buffers[index].nbytes:
                self._stream.unpin(self._buffers[index])
            self._buffers[index] = larger
        return int(self._buffers[index].ctypes.data)
