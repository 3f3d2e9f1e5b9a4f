"""Huge pages for memory that peers read.

``process_vm_readv`` looks up every page of the source by itself: with pages of 2 MiB instead of 4
KiB it reads a third to two thirds faster, measured. All of this is advice; where the system does
not follow it, reads are slower and as right.
"""

import ctypes
import mmap
from pathlib import Path

import numpy as np

from kvferry.errors import SharedMemoryError
from kvferry.transports.base import ByteArray

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later."""
_MADV_COLLAPSE = 25
"""Linux 6.1 and later."""


def allocate(nbytes: int, *, huge_pages: bool) -> ByteArray:
    """Zeroed private memory, whose pages are there. Freed when the last array of it goes.

    Raises:
        ValueError: ``nbytes`` is not positive.
        SharedMemoryError: there is no room for it.
    """
    if nbytes <= 0:
        raise ValueError(f"nbytes: {nbytes} is not positive")
    try:
        mapping = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise SharedMemoryError(
            f"cannot allocate {nbytes} bytes of memory ({error}); lower num_blocks"
        ) from error
    memory = np.frombuffer(mapping, dtype=np.uint8)
    if huge_pages:
        _advise(memory, _MADV_HUGEPAGE)
    # One call takes a fifth of the time of a fault per page, and none is left for the first load.
    _advise(memory, _MADV_POPULATE_WRITE)
    return memory


def make_huge(memory: ByteArray) -> None:
    """Has the kernel put memory in huge pages: what is there now, and what is touched later.

    It moves what is there, some 0.2 ms per huge page. What does not fill a huge page stays.
    """
    if _ENABLED.exists() and "[never]" not in _ENABLED.read_text():
        _advise(memory, _MADV_HUGEPAGE)
        _advise(memory, _MADV_COLLAPSE)


def _advise(memory: ByteArray, advice: int) -> None:
    """``madvise`` on the pages that lie wholly inside; refusals are ignored."""
    first = -(-memory.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (memory.ctypes.data + memory.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > first:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(first), ctypes.c_size_t(end - first), ctypes.c_int(advice)
        )
