"""Copies on a device, and between it and host memory.

A :class:`CopyStream` is what is asked of a device that copies: a stream that works in order, and
events on it. :class:`~kvferry.layouts.cuda_stream.CudaCopyStream` is that of a CUDA device. All
that follows is written against this contract, so that it is tested without a device, with
``kvferry.testing.HostCopyStream``, a thread that takes the place of one.

For a wire that reads host memory alone (``kv_buffer_device: cpu``), dense chunks land in host
memory, and a :class:`Placer` puts them where they belong::

    wire ──▶ staging (host) ──▶ strided copy ──────────────────▶ cache in host memory
                            ──▶ upload ──▶ bounce, unpack ─────▶ cache on the device

On the way out a :class:`HostMirror` holds copies of blocks that were lent, and a wire serves those.
A :class:`HostLane` copies between the device and host memory of any order, in either direction.
"""

import mmap
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import HOST, MemorySpan
from kvferry.layouts.copier import Int64s, copy_tiles
from kvferry.layouts.staging import WIRE_CHUNK_BYTES, StagedChunk, stage
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.lifetimes import Closing

ByteArray = npt.NDArray[np.uint8]


class CopyEvent(ABC):
    """A point of a stream. Errors of the device surface here, as it works behind our back."""

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before it has been carried out. Never waits.

        Raises:
            TransferError: the device failed; nothing that was enqueued is carried out any more.
        """

    @abstractmethod
    def wait(self) -> None:
        """Returns when everything before it has been carried out; the calling thread waits.

        Raises:
            TransferError: the device failed.
        """


class CopyStream(Closing):
    """Copies that one device carries out in the order in which they were enqueued.

    Nothing waits but ``close``. Addresses are those that the device sees; whoever owns the memory
    keeps it until an event recorded after the last copy is done. Thread-safe.
    """

    device: str
    """For example ``cuda:0``."""

    @abstractmethod
    def allocate(self, nbytes: int) -> MemorySpan:
        """Zeroed memory of the device, which lives until ``close``.

        Raises:
            HostError: there is no room for ``nbytes``.
        """

    @abstractmethod
    def pin(self, memory: ByteArray) -> None:
        """Keeps host memory in place, so that the device reaches it under the same address.

        Raises:
            HostError: it cannot be pinned.
        """

    @abstractmethod
    def unpin(self, memory: ByteArray) -> None:
        """Undoes :meth:`pin`, once no copy uses the memory any more."""

    @abstractmethod
    def upload(self, source: ByteArray, target: int) -> None:
        """Enqueues a copy of pinned host bytes to an address of the device."""

    @abstractmethod
    def download(self, source: int, target: ByteArray) -> None:
        """Enqueues a copy from an address of the device into pinned host bytes."""

    @abstractmethod
    def copy(
        self,
        source_addresses: Sequence[int] | Int64s,
        target_addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        runs: Runs,
    ) -> None:
        """Enqueues the copy of ``tiles`` × ``runs``, unchecked; the tables may change afterwards.

        Args:
            source_addresses: address of each source region.
            target_addresses: address of each target region.
            tiles: a 1-d array of ``TILE_DTYPE``.
            runs: a 1-d array of ``RUN_DTYPE``.

        Raises:
            TransferError: the device failed; nothing of this copy was enqueued.
        """

    @abstractmethod
    def follow_engine(self) -> None:
        """What is enqueued from now on is carried out after what the engine has asked of the
        device so far, from the calling thread.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def record(self) -> CopyEvent:
        """An event after everything that was enqueued so far.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def engine_event(self) -> CopyEvent:
        """An event after what the engine has asked of the device so far, from the calling thread.

        Recorded on the step thread, it is the ``after`` of reads into blocks that an earlier step
        may still use; behind a step, it says when what the step writes is there.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for what was enqueued, then frees what was allocated. Idempotent."""


class Placer(Closing):
    """Puts chunks that have landed in host memory where they belong in a cache. Thread-safe.

    In host memory that is one strided copy on the calling thread. Into a device they go up dense,
    into a bounce buffer, and from there strided into place: a dense upload runs at the rate of the
    bus without the help of the device's cores, and the strided pass costs next to nothing beside
    it. The stream keeps order, so that one bounce buffer serves all chunks: it is overwritten after
    it was unpacked.
    """

    def __init__(self, addresses: Sequence[int] | Int64s, stream: CopyStream | None = None) -> None:
        """Args:
        addresses: address of each region of the cache.
        stream: copies on the cache's device, and stays the caller's; none for host memory.
        """
        self._addresses = np.array(addresses, dtype=np.int64)
        self._stream = stream
        self._bounce = MemorySpan(0, 0, HOST if stream is None else stream.device)
        self._pinned: list[ByteArray] = []
        self._lock = threading.Lock()

    def adopt(self, staging: ByteArray) -> None:
        """Prepares memory in which chunks will land, for speed alone; it lives until ``close``.

        Raises:
            HostError: it cannot be pinned.
        """
        if self._stream is not None:
            self._stream.pin(staging)
            self._pinned.append(staging)

    def place(self, landed: ByteArray, tiles: Tiles, runs: Runs) -> None:
        """Copies a chunk into the cache, unchecked; when it returns, the bytes are in place.

        The calling thread waits. ``landed`` may be used again afterwards.

        Args:
            landed: the chunk; source region 0 of the tables.
            tiles: a 1-d array of ``TILE_DTYPE``, as :func:`~kvferry.layouts.staging.stage` unpacks.
            runs: a 1-d array of ``RUN_DTYPE``.

        Raises:
            HostError: the device has no room for a chunk of this size.
            TransferError: the device failed.
        """
        if self._stream is None:
            copy_tiles([landed.ctypes.data], self._addresses, tiles, runs)
            return
        with self._lock:  # the three belong together on the stream
            if self._bounce.nbytes < landed.nbytes:
                # Doubled, as what the stream has allocated lives as long as the stream.
                room = max(landed.nbytes, 2 * self._bounce.nbytes)
                self._bounce = self._stream.allocate(room)
            self._stream.upload(landed, self._bounce.address)
            self._stream.copy([self._bounce.address], self._addresses, tiles, runs)
            event = self._stream.record()
        event.wait()

    def close(self) -> None:
        """Gives up what :meth:`adopt` took. Nobody may be in :meth:`place`. Idempotent."""
        pinned, self._pinned = self._pinned, []
        if self._stream is not None:
            for staging in pinned:
                self._stream.unpin(staging)


class HostMirror(Closing):
    """Host memory of the same size and order as a device's regions, for blocks that are lent.

    A wire serves :attr:`arrays` under the ids of the device's regions, so one description of the
    rank's memory holds for both. A block's bytes are there once the event of its :meth:`copy_out`
    is done: nobody may read under a lease before, and the block must not be written until then.
    """

    def __init__(self, stream: CopyStream, regions: Sequence[MemorySpan]) -> None:
        """Takes as much host memory as the regions have, and pins it.

        Args:
            stream: copies on the regions' device; stays the caller's.
            regions: the device's, by region id.

        Raises:
            HostError: the memory cannot be pinned.
        """
        self._stream = stream
        # A mapping begins on a page, and pins must not share one.
        self.arrays: tuple[ByteArray, ...] = tuple(
            np.frombuffer(mmap.mmap(-1, region.nbytes), dtype=np.uint8) for region in regions
        )
        """The host's bytes, by region id."""
        self._sources = np.array([region.address for region in regions], dtype=np.int64)
        self._targets = np.array([array.ctypes.data for array in self.arrays], dtype=np.int64)
        self._pinned: list[ByteArray] = []
        self._lock = threading.Lock()
        try:
            for array in self.arrays:
                stream.pin(array)
                self._pinned.append(array)
        except BaseException:
            self.close()
            raise

    def copy_out(self, tiles: Tiles, runs: Runs) -> CopyEvent:
        """Begins to copy ``tiles`` × ``runs``, both sides alike, unchecked; returns at once.

        Call it when the steps that wrote the blocks have retired, or after
        :meth:`CopyStream.follow_engine` on the thread that steps.

        Args:
            tiles: a 1-d array of ``TILE_DTYPE``, as ``topology.own_tiles`` gives them.
            runs: a 1-d array of ``RUN_DTYPE``, as ``topology.binding.bind_own`` gives them.

        Raises:
            TransferError: the device failed.
        """
        with self._lock:
            self._stream.copy(self._sources, self._targets, tiles, runs)
            return self._stream.record()

    def close(self) -> None:
        """Unpins the memory. No copy may be under way. Idempotent."""
        pinned, self._pinned = self._pinned, []
        for array in pinned:
            self._stream.unpin(array)


class HostLane:
    """Copies between a device and the host through two pinned buffers.

    While one is filled on one side, the other is emptied on the other side. Thread-safe.
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
        """Copies, after what the device's current stream holds so far; done when it returns."""
        under_way: list[Callable[[], object]] = []
        with self._lock:
            self._stream.engine_event().wait()
            for number, chunk in enumerate(stage(tiles, runs)):
                if len(under_way) == len(self._buffers):
                    under_way.pop(0)()  # the buffer is free afterwards
                dense = [self._room(number % len(self._buffers), chunk.nbytes)]
                under_way.append(self._begin(sources, dense, targets, chunk, to_device))
            for finish in under_way:
                finish()

    def _begin(
        self,
        sources: Sequence[int],
        dense: Sequence[int],
        targets: Sequence[int],
        chunk: StagedChunk,
        to_device: bool,
    ) -> Callable[[], object]:
        """Begins to move one chunk; what is left to do is what it returns."""
        pack = chunk.pack_tiles, chunk.pack_runs
        unpack = chunk.unpack_tiles, chunk.unpack_runs
        if to_device:
            copy_tiles(sources, dense, *pack)
            self._stream.copy(dense, targets, *unpack)
            return self._stream.record().wait
        self._stream.copy(sources, dense, *pack)
        packed = self._stream.record()

        def finish() -> None:
            packed.wait()
            copy_tiles(dense, targets, *unpack)

        return finish

    def _room(self, index: int, nbytes: int) -> int:
        """Address of a buffer of at least so many bytes."""
        if self._buffers[index].nbytes < nbytes:
            if self._buffers[index].nbytes:
                self._stream.unpin(self._buffers[index])
            # A mapping begins on a page, and pins must not share one.
            memory = mmap.mmap(-1, max(nbytes, WIRE_CHUNK_BYTES))
            self._buffers[index] = np.frombuffer(memory, dtype=np.uint8)
            self._stream.pin(self._buffers[index])
        return int(self._buffers[index].ctypes.data)
