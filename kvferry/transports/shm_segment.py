"""POSIX shared memory segments that live exactly as long as the process that made them.

Segments are plain files in ``/dev/shm``, opened with :func:`os.open` and mapped with :mod:`mmap`.
This module does not use ``multiprocessing.shared_memory``: before Python 3.13, every process that
attaches a segment registers the segment with its resource tracker, and the tracker unlinks the
segment when that *reader* ends.

**Whether an owner is alive** is answered by the kernel. The owner holds a POSIX record lock on its
segment. The lock goes away with the process, however the process dies. ``fork`` does not pass the
lock on, and other PID namespaces see the lock too. A process id in the name could not answer: ids
are used again, and mean nothing in another container that shares ``/dev/shm``. The price is a rule
of POSIX: a process that closes *any* descriptor of a file loses its lock on the file. So this
module never opens a segment of its own process a second time (:data:`_owned`).

A segment is locked before it gets a size. So a segment with a size and without a lock is the
remains of a dead process.
"""

import fcntl
import mmap
import os
import re
import secrets
import struct
import threading
import time
from pathlib import Path

import numpy as np

from kvferry.errors import BoundsError, PeerLostError, SharedMemoryError
from kvferry.layouts.arrays import ByteArray

SHM_DIR = Path("/dev/shm")  # noqa: S108  (the place that POSIX shared memory has on Linux)
_NAME = re.compile(r"kvferry\.\d+\.[0-9a-f]{16}")
_UNSIZED_GRACE_S = 60.0
"""Seconds for which a file without a size may still get a size; an older file has a dead maker."""
_MADV_POPULATE_READ = 22
"""Advice number of ``madvise``; Linux 5.14 and later. :mod:`mmap` has no name for the number."""
_FLOCK = struct.Struct("@hhqqi4x")
"""The C ``struct flock``: l_type, l_whence, l_start, l_len, l_pid."""

#: Name → segment of this process, ``None`` while the segment is being made. Guards the record
#: locks.
_owned: dict[str, "OwnedSegment | None"] = {}
_owned_lock = threading.Lock()


class OwnedSegment:
    """Shared memory made by this process. ``close`` removes its name."""

    def __init__(self, name: str, descriptor: int, array: ByteArray) -> None:
        self.name = name
        self.array = array
        self._descriptor = descriptor
        self._pid = os.getpid()

    @classmethod
    def create(cls, nbytes: int) -> "OwnedSegment":
        """Makes a zeroed segment of ``nbytes`` and maps it.

        Raises:
            ValueError: ``nbytes`` is not positive.
            SharedMemoryError: there is no room, or no ``/dev/shm``.
        """
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} is not positive")
        name = f"kvferry.{os.getpid()}.{secrets.token_hex(8)}"
        with _owned_lock:
            _owned[name] = None  # from now on, sweeps of this process spare the file
        try:
            segment = cls._map(name, nbytes)
        except BaseException:
            with _owned_lock:
                del _owned[name]
            raise
        with _owned_lock:
            _owned[name] = segment
        return segment

    @classmethod
    def _map(cls, name: str, nbytes: int) -> "OwnedSegment":
        path = SHM_DIR / name
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise SharedMemoryError(f"{path}: cannot be created: {error.strerror}") from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Reserves the pages. Otherwise the file would take pages at the first write, and a full
            # /dev/shm would then raise SIGBUS in the middle of a model step.
            os.posix_fallocate(descriptor, 0, nbytes)
            # Fills the page tables here, at a fifth of the cost of a fault per page later.
            mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            path.unlink()
            os.close(descriptor)
            raise SharedMemoryError(_no_room(nbytes, error)) from error
        return cls(name, descriptor, np.frombuffer(mapping, dtype=np.uint8))

    def close(self) -> None:
        """Removes the name and gives up the lock, so readers see the owner as gone. Idempotent.

        The memory itself is unmapped when the last array over the memory is deleted.
        """
        with _owned_lock:
            # A forked child inherits this object, not the right to remove its parent's memory.
            if self._descriptor < 0 or os.getpid() != self._pid:
                return
            _owned.pop(self.name, None)
            (SHM_DIR / self.name).unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    @property
    def is_open(self) -> bool:
        """Whether this process still owns the segment."""
        return self._descriptor >= 0 and os.getpid() == self._pid


class PeerSegment:
    """A segment of another process (or another transport of this process), mapped for reading."""

    def __init__(
        self, mapping: mmap.mmap | ByteArray, descriptor: int, own: OwnedSegment | None
    ) -> None:
        self.array: ByteArray = np.frombuffer(mapping, dtype=np.uint8)
        """``[nbytes]``, ``uint8``, read-only."""
        self._mapping = mapping
        self._descriptor = descriptor
        self._own = own

    @classmethod
    def attach(cls, name: str, nbytes: int) -> "PeerSegment":
        """Maps ``nbytes`` of the segment ``name``.

        Raises:
            BoundsError: the name is no name of kvferry, or the segment is smaller than ``nbytes``.
            PeerLostError: there is no such segment, it belongs to another user, or its owner is
                dead.
            SharedMemoryError: the segment cannot be mapped.
        """
        if not _NAME.fullmatch(name) or nbytes <= 0:
            raise BoundsError(f"segment {name[:80]!r} of {nbytes} bytes: not a kvferry segment")
        with _owned_lock:
            own = _owned.get(name)
        if own is not None and own.is_open:
            _check_size(name, nbytes, own.array.nbytes)
            array = own.array[:nbytes]
            array.flags.writeable = False
            return cls(array, -1, own)
        path = SHM_DIR / name
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise PeerLostError(
                f"{path}: no such segment; its owner has ended, or runs in a container with "
                "another /dev/shm (share it, or use the tcp transport)"
            ) from error
        except PermissionError as error:
            raise PeerLostError(
                f"{path}: cannot be opened: {error.strerror}; its owner runs as another user (run "
                "both engines as one user, or use the tcp transport)"
            ) from error
        except OSError as error:
            raise SharedMemoryError(f"{path}: cannot be opened: {error.strerror}") from error
        try:
            return cls._map(name, nbytes, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    @classmethod
    def _map(cls, name: str, nbytes: int, descriptor: int) -> "PeerSegment":
        _check_size(name, nbytes, os.fstat(descriptor).st_size)
        try:
            mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ)
        except OSError as error:
            raise SharedMemoryError(f"segment {name!r}: cannot be mapped: {error}") from error
        segment = cls(mapping, descriptor, None)
        if not segment.owner_is_alive():
            raise PeerLostError(f"segment {name!r}: its owner is dead")
        return segment

    def owner_is_alive(self) -> bool:
        """Whether the owner still holds its lock; takes two microseconds."""
        if self._own is not None:
            return self._own.is_open
        return self._descriptor >= 0 and _is_locked(self._descriptor)

    def populate(self, first: int, nbytes: int) -> bool:
        """Fills the page tables of ``nbytes``, beginning at the page-aligned offset ``first``.

        Returns whether this is possible. Before Linux 5.14 it is not; for memory of this process it
        is not needed. Without it, reads are correct, but the first read of each page is slower.
        """
        if not isinstance(self._mapping, mmap.mmap):
            return False
        try:
            self._mapping.madvise(
                _MADV_POPULATE_READ, first, min(nbytes, self.array.nbytes - first)
            )
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Releases the segment, which is unmapped when its last array is deleted. Idempotent."""
        self._mapping = self.array = np.empty(0, dtype=np.uint8)
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def sweep_dead_segments() -> list[str]:
    """Unlinks the segments of this user whose owners are dead; returns their names.

    A segment of a live process is never touched, whatever its process id or namespace.
    """
    swept = []
    for path in SHM_DIR.glob("kvferry.*"):
        with _owned_lock:
            ours = path.name in _owned
        if not ours and _NAME.fullmatch(path.name) and _is_dead(path):
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return swept


def _is_dead(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # another process swept the file first, or another user owns the file
        return False
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.getuid() or _is_locked(descriptor):
            return False
        return status.st_size > 0 or time.time() - status.st_mtime > _UNSIZED_GRACE_S
    finally:
        os.close(descriptor)


def _is_locked(descriptor: int) -> bool:
    wanted = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, wanted)
    return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)


def _check_size(name: str, said: int, actual: int) -> None:
    if actual < said:
        raise BoundsError(f"segment {name!r}: is said to have {said} bytes, has {actual}")


def _no_room(nbytes: int, error: OSError) -> str:
    try:
        status = os.statvfs(SHM_DIR)
        free = status.f_bavail * status.f_frsize
    except OSError as missing:
        return f"{SHM_DIR}: cannot be used: {missing.strerror}"
    return (
        f"{SHM_DIR}: {nbytes} bytes needed, {free} free ({error.strerror}); lower num_blocks, "
        "end what fills it, or enlarge it (`mount -o remount,size=…`, for containers --shm-size)"
    )
