"""The copy stream of a CUDA device, beside the stream on which the engine computes."""

import ctypes
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.errors import HostError, TransferError
from kvferry.layouts.arrays import Int64s, MemorySpan, whole_pages
from kvferry.layouts.copier_triton import (
    BOX_WORDS,
    DeviceTiles,
    on_device,
    warm_device,
    write_boxes,
)
from kvferry.layouts.cuda_driver import CudaDriver, DriverEvent, driver_of
from kvferry.layouts.device import CopyEvent, CopyStream, PreparedCopy
from kvferry.layouts.digest_triton import digest_rows_device
from kvferry.layouts.tiles import RUN_DTYPE, Runs, Tiles, as_rows, blank_runs

LOOK_S = 1e-5
"""Seconds between the first looks at an event."""
MOST_LOOK_S = 1e-3
"""Largest number of seconds between two looks at an event."""

SLOT_BYTES = 64 << 10
"""Number of bytes of a slot for the runs of a copy: 1,170 runs, or 18,720 tokens in blocks of
16."""
_SLOTS = 8
"""Number of slots that a stream takes at the opening; more slots are taken if more copies are in
progress."""
_KEPT_SLOTS = 64
"""Number of slots that a stream keeps for the next time with as many copies in progress, because
pinning takes time."""


class CudaEvent(CopyEvent):
    """An event of CUDA for which the *calling thread* waits.

    ``torch.cuda.Event.wait`` makes a stream wait and returns at once. So a bare event of torch must
    not be given to a transport as ``after``.
    """

    def __init__(self, event: torch.cuda.Event, driver: CudaDriver) -> None:
        """Args:
        event: an event that is recorded.
        driver: driver of the event's device.
        """
        self.event = event
        self._driver = driver

    @classmethod
    def of_engine(cls, device: str) -> "CudaEvent":
        """An event after all work so far on the calling thread's current stream of ``device``."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        stream = torch.cuda.current_stream(device)
        with cuda_errors(f"{device}: recording an event"), driver_of(stream.device.index):
            event.record(stream)
        return cls(event, driver_of(stream.device.index))

    def done(self) -> bool:
        """See :meth:`CopyEvent.done`."""
        with cuda_errors("a copy on the device"), self._driver:
            return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See :meth:`CopyEvent.wait`; the thread looks again after a fiftieth of its wait so far.

        An event that wakes a sleeping thread does so 0.1 to 0.7 ms late, which is as long as a copy
        of some hundred megabytes takes.
        """
        began = time.monotonic()
        sharpen_timer()
        while not self.done():
            time.sleep(min(max((time.monotonic() - began) / 50, LOOK_S), MOST_LOOK_S))


_sharp = threading.local()
_PR_SET_TIMERSLACK = 29


def sharpen_timer() -> None:
    """Makes short sleeps of the calling thread end within some 10 µs; Linux adds 50 µs to each."""
    if not hasattr(_sharp, "once"):
        _sharp.once = ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1000)


class _Slot:
    """Room for a small table: pinned host memory, and as much device memory."""

    def __init__(self, nbytes: int, device: torch.device, driver: CudaDriver) -> None:
        self.memory = whole_pages(nbytes)
        self.address = self.memory.ctypes.data
        """Address of the pinned memory."""
        self.words = self.memory.view(np.int64)
        self.device = torch.empty(len(self.words), dtype=torch.int64, device=device)
        self.there = self.device.data_ptr()
        """Address of the device memory."""
        self._driver = driver
        driver.pin(self.address, nbytes)
        self.event = driver.event()
        """Event of the slot alone; a user that shows its event to others has another event."""
        self.used: DriverEvent | torch.cuda.Event = self.event
        """Event after the last work that read the table."""

    def close(self) -> None:
        """Unpins the memory, which no work may use any more; the context must be current."""
        self._driver.unpin(self.address)
        self.event.close()


class UploadSlots:
    """Slots of pinned memory through which small tables go to a device. Thread-safe.

    A slot is used again, in order, once the event after the last work that read the slot is done:
    no thread waits for a slot.
    """

    def __init__(
        self, driver: CudaDriver, device: torch.device, stream: torch.cuda.Stream | None = None
    ) -> None:
        """Args:
        driver: driver of the device.
        device: the device.
        stream: the only stream that uses the slots. ``None`` stands for every stream that is the
            current stream of a thread that takes a slot. Other streams must not use the first
            slots before all work that the current stream holds now is done: the memory may have
            had another use.
        """
        self.driver = driver
        self._device, self._stream = device, stream
        self.free: deque[_Slot] = deque()
        """Slots that no thread has taken, in the order of their events."""
        self._lock = threading.Lock()
        try:
            with driver:
                for _ in range(_SLOTS):
                    self.give_back(self._new_slot(SLOT_BYTES))
        except BaseException:
            self.close()
            raise

    def take(self, nbytes: int) -> _Slot:
        """A slot of at least ``nbytes`` bytes that no work uses any more, or a new slot.

        The context must be current.

        Raises:
            HostError: the memory of a new slot cannot be pinned.
            TransferError: the device failed.
        """
        with self._lock:
            slot = self.free.popleft() if self._is_one_free() else None
            many = len(self.free) >= _KEPT_SLOTS and self._is_one_free()
            spare = self.free.popleft() if many else None
        if spare is not None:  # from a time with more work in progress
            spare.close()
        if slot is None:
            return self._new_slot(max(nbytes, SLOT_BYTES))
        if slot.memory.nbytes >= nbytes:
            return slot
        slot.close()
        return self._new_slot(2 * nbytes)

    def send(self, slot: _Slot, words: Int64s, handle: int) -> None:
        """Enqueues the upload of ``words``, to ``slot.device``; the context must be current.

        Args:
            slot: a slot that was taken for at least as many bytes.
            words: words to upload; may change afterwards.
            handle: handle of the stream that uses the slot.

        Raises:
            TransferError: the device failed.
        """
        slot.words[: len(words)] = words
        self.driver.upload(slot.there, slot.address, words.nbytes, handle)

    def give_back(self, slot: _Slot) -> None:
        """Puts a slot back, with an event after the work that reads the slot in ``slot.used``."""
        with self._lock:
            self.free.append(slot)

    def close(self) -> None:
        """Unpins the slots. No work may use a slot any more. Idempotent."""
        with self._lock:
            slots, self.free = self.free, deque()
        with suppress(TransferError), self.driver:  # of a failed device
            for slot in slots:
                slot.close()

    def _new_slot(self, nbytes: int) -> _Slot:
        with on_device(self._device, self._stream):  # its allocator must know the memory's use
            return _Slot(-(-nbytes // 8) * 8, self._device, self.driver)

    def _is_one_free(self) -> bool:
        """Whether no work uses the first slot any more. The caller must hold the lock."""
        return bool(self.free and self.free[0].used.query())


class CudaCopyStream(CopyStream):
    """A private stream; a copy is one upload of its tables, through a slot, and one launch.

    The tables are the runs of prepared tiles, or tiles and runs.
    """

    def __init__(self, device: int) -> None:
        self.device = f"cuda:{device}"
        self.driver = driver_of(device)
        """The driver, in the context of the device."""
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._handle: int = self._stream.cuda_stream
        self._copying = f"{self.device}: a copy"
        self._allocated: list[torch.Tensor] = []
        self._compiled: dict[bool, Any] = {}
        """Compiled kernel of the tiles that are copied once; see ``DeviceTiles.compiled``."""
        self._lock = threading.Lock()
        self._slots = UploadSlots(self.driver, self._stream.device, self._stream)

    @classmethod
    def open(cls, device: int | None = None) -> "CudaCopyStream":
        """Opens a stream of the given device, or of the current device; compiles the kernel.

        Raises:
            HostError: there is no such device.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        wanted = (torch.cuda.current_device() if count else 0) if device is None else device
        if not 0 <= wanted < count:
            raise HostError(
                f"device: cuda:{wanted} is not one of the {count} CUDA devices that torch sees; "
                "give another, or use a transport for host memory (shm, tcp)"
            )
        with cuda_errors(f"cuda:{wanted}: opening a stream"), ExitStack() as opened:
            stream = cls(wanted)
            opened.callback(stream.close)
            warm_device(stream._stream)
            opened.pop_all()
            return stream

    def allocate(self, nbytes: int) -> MemorySpan:
        """See :meth:`CopyStream.allocate`."""
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} is not positive")
        with cuda_errors(f"{self.device}: allocating {nbytes} bytes"), self.driver:
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            torch.cuda.current_stream(self.device).synchronize()  # the zeros are on torch's stream
        with self._lock:
            self._allocated.append(tensor)
        return MemorySpan(tensor.data_ptr(), nbytes, self.device)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.pin`. Two pinned memories must not share a page."""
        with self.driver:
            self.driver.pin(memory.ctypes.data, memory.nbytes)

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.unpin`."""
        with suppress(TransferError), self.driver:  # of a failed device
            self.driver.unpin(memory.ctypes.data)

    def upload(self, source: npt.NDArray[np.uint8], target: int) -> None:
        """See :meth:`CopyStream.upload`."""
        with self.driver:
            self.driver.upload(target, source.ctypes.data, source.nbytes, self._handle)

    def download(self, source: int, target: npt.NDArray[np.uint8]) -> CopyEvent:
        """See :meth:`CopyStream.download`."""
        with self.driver:
            self.driver.download(target.ctypes.data, source, target.nbytes, self._handle)
            return self.record()

    def prepare(
        self,
        source_addresses: Sequence[int] | Int64s,
        target_addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        most_tokens: int = 0,
    ) -> PreparedCopy:
        """See :meth:`CopyStream.prepare`."""
        addresses = source_addresses, target_addresses
        with cuda_errors(self._copying), self.driver, torch.cuda.stream(self._stream):
            there = DeviceTiles.of(*addresses, tiles, self._stream.device, most_tokens)
        copy = partial(self._copy, there)
        if most_tokens:
            copy(blank_runs(1))  # zero tokens: compiles the kernel, and loads it on the device
        return copy

    def copy(
        self,
        source_addresses: Sequence[int] | Int64s,
        target_addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        runs: Runs,
    ) -> CopyEvent:
        """See :meth:`CopyStream.copy`. Tiles and runs go up together, and nothing is allocated."""
        if not len(tiles) or not len(runs):
            return self.record()
        addresses = source_addresses, target_addresses
        words = as_rows(runs, RUN_DTYPE).view(np.int64)
        # The region of a slot: rows of the tiles, a word to 16 bytes if need be, the runs. The
        # kernel is compiled for tables that are aligned to 16 bytes.
        num_boxes = len(tiles) * BOX_WORDS
        first = num_boxes + num_boxes % 2
        end = first + len(words)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with cuda_errors(self._copying), self.driver:
            slot = self._slots.take(8 * end)
            try:
                units = write_boxes(*addresses, tiles, slot.words[:num_boxes])
                slot.words[first:end] = words
                self.driver.upload(slot.there, slot.address, 8 * end, self._handle)
                there = DeviceTiles(slot.device, len(tiles), units, compiled=self._compiled)
                most_tokens = int(runs["tokens"].max())
                there.copy(slot.device[first:], len(runs), most_tokens, self._stream)
            finally:
                self._give_back(slot, event)
        return CudaEvent(event, self.driver)

    def _copy(self, tiles: DeviceTiles, runs: Runs) -> CopyEvent:
        if not tiles.num_tiles or not len(runs):
            return self.record()
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with cuda_errors(self._copying), self.driver:
            slot = self._slots.take(runs.nbytes)
            try:
                words = as_rows(runs, RUN_DTYPE).view(np.int64)
                self._slots.send(slot, words, self._handle)
                tiles.copy(slot.device, len(runs), int(runs["tokens"].max()), self._stream)
            finally:
                self._give_back(slot, event)
        return CudaEvent(event, self.driver)

    def _give_back(self, slot: _Slot, event: torch.cuda.Event) -> None:
        """Records the event after the copy that reads the tables of a slot."""
        slot.used = event
        event.record(self._stream)
        self._slots.give_back(slot)

    def follow(self, event: CopyEvent) -> None:
        """See :meth:`CopyStream.follow`."""
        assert isinstance(event, CudaEvent)
        with cuda_errors(f"{self.device}: waiting for an event"), self.driver:
            self._stream.wait_event(event.event)

    def digest(
        self,
        addresses: Sequence[int] | Int64s,
        tiles: Tiles,
        runs: Runs,
        positions: Int64s,
        keys: Int64s,
    ) -> npt.NDArray[np.uint64]:
        """See :meth:`CopyStream.digest`."""
        with cuda_errors(f"{self.device}: a digest"), self.driver:
            return digest_rows_device(addresses, tiles, runs, positions, keys, self._stream)

    def record(self) -> CopyEvent:
        """See :meth:`CopyStream.record`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with cuda_errors(f"{self.device}: recording an event"), self.driver:
            event.record(self._stream)
        return CudaEvent(event, self.driver)

    def engine_event(self) -> CopyEvent:
        """See :meth:`CopyStream.engine_event`; records on the calling thread's current stream."""
        return CudaEvent.of_engine(self.device)

    def close(self) -> None:
        """See :meth:`CopyStream.close`. A failed device carries out no more work."""
        with suppress(RuntimeError, TransferError), self.driver:
            self._stream.synchronize()
        with self._lock:
            self._allocated.clear()
        self._slots.close()


class cuda_errors:  # noqa: N801 - used as a function; a generator takes five times as long
    """Raises torch's CUDA errors in the block as the matching kvferry errors."""

    def __init__(self, doing: str) -> None:
        self._doing = doing

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if isinstance(error, torch.cuda.OutOfMemoryError):
            raise HostError(
                f"{self._doing}: the device's memory is full; lower num_blocks, or what else is on "
                "it"
            ) from error
        if isinstance(error, RuntimeError):
            raise TransferError(f"{self._doing}: {str(error).splitlines()[0]}") from error
