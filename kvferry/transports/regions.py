"""The regions of one transport, and private memory for regions."""

import ctypes
import mmap
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvferry.errors import SharedMemoryError
from kvferry.layouts.arrays import HOST, ByteArray, Int64s, MemorySpan
from kvferry.transports.packing import Packer

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_POPULATE_WRITE = 23
"""Advice number of ``madvise``; in Linux 5.14 and later."""
_MADV_COLLAPSE = 25
"""Advice number of ``madvise``; in Linux 6.1 and later."""
_kept: list[ByteArray] = []


def private_memory(nbytes: int, *, huge_pages: bool = True) -> ByteArray:
    """Zeroed private memory with pages already present; freed when its last array is deleted.

    Args:
        nbytes: number of bytes.
        huge_pages: whether to use huge pages if the host has huge pages.

    Raises:
        ValueError: ``nbytes`` is not positive.
        SharedMemoryError: there is no room for ``nbytes``.
    """
    if nbytes <= 0:
        raise ValueError(f"nbytes: {nbytes} is not positive")
    try:
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise SharedMemoryError(
            f"cannot allocate {nbytes} bytes of memory ({error}); lower num_blocks"
        ) from error
    memory: ByteArray = np.frombuffer(mapping, dtype=np.uint8)
    if huge_pages:
        _advise(memory, mmap.MADV_HUGEPAGE)
    # One call takes a fifth of the time of a fault per page, and leaves no fault to the first load.
    _advise(memory, _MADV_POPULATE_WRITE)
    return memory


def keep_for_ever(memories: Iterable[ByteArray]) -> None:
    """Keeps memory until the process ends, because late bytes may still land there."""
    _kept.extend(memories)


def make_huge(memory: ByteArray) -> None:
    """Asks the kernel for huge pages, for present pages and for pages touched later.

    Moving present pages takes some 0.2 ms per huge page. A part of the memory too small for a huge
    page stays as it was. A reader with ``process_vm_readv``, which looks up every source page,
    becomes a third to two thirds faster, measured.
    """
    if _HUGE_PAGES.exists() and "[never]" not in _HUGE_PAGES.read_text():
        _advise(memory, mmap.MADV_HUGEPAGE)
        _advise(memory, _MADV_COLLAPSE)


def _advise(memory: ByteArray, advice: int) -> None:
    """Calls ``madvise`` on the pages wholly inside the memory.

    If the system does not follow the advice, the memory is slower but just as correct.
    """
    first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(advice)
        )


class Regions:
    """Memory by region id, in the order of registration. Regions are never removed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: tuple[ByteArray, ...] = ()
        self._spans: tuple[MemorySpan, ...] = ()
        self._served: tuple[int, ...] = ()
        self._nbytes: Int64s = np.empty(0, dtype=np.int64)
        self._addresses: Int64s = np.empty(0, dtype=np.int64)
        self._devices: npt.NDArray[np.uint64] = np.empty(0, dtype=np.uint64)
        self.packer: Packer | None = None
        """Packer of served regions that the host cannot touch; ``None`` without such regions."""

    def add(self, memory: ByteArray, *, serve: bool) -> int:
        """Adds a region; returns its id.

        Raises:
            ValueError: not a C-contiguous, writable 1-d ``uint8`` array.
        """
        check_flat(memory)
        return self._add(MemorySpan(memory.ctypes.data, memory.nbytes, HOST), memory, serve)

    def add_device(self, memory: MemorySpan, *, serve: bool) -> int:
        """Adds memory that the host cannot touch; returns the region id. Its array is empty."""
        return self._add(memory, np.empty(0, dtype=np.uint8), serve)

    def _add(self, span: MemorySpan, array: ByteArray, serve: bool) -> int:
        with self._lock:
            self._arrays = (*self._arrays, array)
            self._spans = (*self._spans, span)
            self._served = (*self._served, span.nbytes if serve else 0)
            self._nbytes = np.array([each.nbytes for each in self._spans], dtype=np.int64)
            self._addresses = np.array([each.address for each in self._spans], dtype=np.int64)
            self._devices = np.array([_gpu_number(each) for each in self._spans], dtype=np.uint64)
            return len(self._spans) - 1

    @property
    def nbytes(self) -> Int64s:
        """Number of bytes of each region."""
        return self._nbytes

    @property
    def served_nbytes(self) -> tuple[int, ...]:
        """Number of bytes that peers may read in each region; 0 for a region that is not served."""
        return self._served

    @property
    def addresses(self) -> Int64s:
        """Address of each region in this process."""
        return self._addresses

    @property
    def devices(self) -> npt.NDArray[np.uint64]:
        """Number of the GPU on which each region lies; 0 for host memory."""
        return self._devices

    @property
    def spans(self) -> tuple[MemorySpan, ...]:
        """Address, size and device of each region."""
        return self._spans

    @property
    def arrays(self) -> tuple[ByteArray, ...]:
        """Array of each region; empty for device memory."""
        return self._arrays


def _gpu_number(span: MemorySpan) -> int:
    return 0 if span.is_host else int(span.device.removeprefix("cuda:"))


def check_flat(memory: ByteArray) -> None:
    """Checks the form of memory that will become a region.

    Raises:
        ValueError: not a C-contiguous, writable 1-d ``uint8`` array.
    """
    flat = memory.dtype == np.uint8 and memory.ndim == 1
    if not flat or not memory.flags.c_contiguous or not memory.flags.writeable:
        raise ValueError("memory: expected a contiguous, writable 1-d array of uint8")
