"""The regions of one transport, and private memory for them."""

import contextlib
import mmap
import threading

import numpy as np
import numpy.typing as npt

from kvferry.errors import SharedMemoryError
from kvferry.transports.base import ByteArray


def private_memory(nbytes: int) -> ByteArray:
    """Zeroed memory of this process, in huge pages where the host has them.

    Raises:
        ValueError: ``nbytes`` is not positive.
        SharedMemoryError: there is no room for it.
    """
    if nbytes <= 0:
        raise ValueError(f"nbytes: {nbytes} is not positive")
    try:
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise SharedMemoryError(f"cannot allocate {nbytes} bytes: {error}") from error
    with contextlib.suppress(OSError):  # a kernel without them: correct, only slower
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory: ByteArray = np.frombuffer(mapping, dtype=np.uint8)
    memory[:] = 0  # takes the pages now, not in the first transfer
    return memory


class Regions:
    """Memory by region id, in the order of registration. Only ever grows. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: tuple[ByteArray, ...] = ()
        self._served: tuple[int, ...] = ()
        self._nbytes: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
        self._addresses: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)

    def add(self, memory: ByteArray, *, serve: bool) -> int:
        """Adds a region; returns its id.

        Raises:
            ValueError: not a C-contiguous, writable 1-d ``uint8`` array.
        """
        check_flat(memory)
        with self._lock:
            self._arrays = (*self._arrays, memory)
            self._served = (*self._served, memory.nbytes if serve else 0)
            self._nbytes = np.array([each.nbytes for each in self._arrays], dtype=np.int64)
            self._addresses = np.array([each.ctypes.data for each in self._arrays], dtype=np.int64)
            return len(self._arrays) - 1

    @property
    def nbytes(self) -> npt.NDArray[np.int64]:
        """Bytes of each region."""
        return self._nbytes

    @property
    def served_nbytes(self) -> tuple[int, ...]:
        """Bytes of each region that peers may read; 0 where they may not."""
        return self._served

    @property
    def addresses(self) -> npt.NDArray[np.int64]:
        """Address of each region in this process."""
        return self._addresses

    @property
    def arrays(self) -> tuple[ByteArray, ...]:
        """The memory itself."""
        return self._arrays


def check_flat(memory: ByteArray) -> None:
    """Checks the form of memory that is to be a region.

    Raises:
        ValueError: not a C-contiguous, writable 1-d ``uint8`` array.
    """
    flat = memory.dtype == np.uint8 and memory.ndim == 1
    if not flat or not memory.flags.c_contiguous or not memory.flags.writeable:
        raise ValueError("memory: expected a contiguous, writable 1-d array of uint8")
