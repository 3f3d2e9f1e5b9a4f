"""POSIX shared memory segments that live exactly as long as the process that made them.

Segments are plain files in ``/dev/shm``, opened with :func:`os.open` and mapped with
:mod:`mmap`. ``multiprocessing.shared_memory`` is not used: before Python 3.13 every process that
attaches a segment registers it with its resource tracker, which unlinks it when that *reader*
ends.

**Who is alive** is answered by the kernel: the owner holds a POSIX record lock on its segment,
which goes away with the process (however it dies), is not inherited by ``fork``, and is seen from
another PID namespace too. A process id in the name could not tell that: ids are used again, and
mean nothing in another container that shares ``/dev/shm``. The price is a rule of POSIX: a process
that closes *any* descriptor of a file loses its lock on it. So this module never opens a segment
of its own process a second time (:data:`_owned`).

A segment is locked before it is given a size. Whoever finds one that has a size and no lock has
found the remains of a dead process.
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
import numpy.typing as npt

from kvferry.errors import BoundsError, PeerLostError, SharedMemoryError

ByteArray = npt.NDArray[np.uint8]

SHM_DIR = Path("/dev/shm")  # noqa: S108  (the place that POSIX shared memory has on Linux)
_NAME = re.compile(r"kvferry\.\d+\.[0-9a-f]{16}")
_UNSIZED_GRACE_S = 60.0
"""A file without a size may be about to get one; older than this, its maker died before."""
_MADV_POPULATE_READ = 22
"""Linux 5.14 and later; :mod:`mmap` does not name it."""
_FLOCK = struct.Struct("@hhqqi4x")
"""The C ``struct flock``: l_type, l_whence, l_start, l_len, l_pid."""

#: Name → segment of this process, ``None`` while it is being made. Guards the record locks.
_owned: dict[str, "OwnedSegment | None"] = {}
_owned_lock = threading.Lock()


class OwnedSegment:
    """Shared memory made by this process. ``close`` takes its name away."""

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
            _owned[name] = None  # from here on a sweep of ours leaves it alone
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
            # Reserves the pages. A file that is only given a size takes them at the first write,
            # and a full /dev/shm is then SIGBUS in the middle of a model step.
            os.posix_fallocate(descriptor, 0, nbytes)
            # The page tables are filled here: it costs a fifth of taking a fault per page later.
            mapping = mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        except OSError as error:
            path.unlink()
            os.close(descriptor)
            raise SharedMemoryError(_no_room(nbytes, error)) from error
        return cls(name, descriptor, np.frombuffer(mapping, dtype=np.uint8))

    def close(self) -> None:
        """Removes the name and gives up the lock: readers see the owner as gone. Idempotent.

        The memory itself is unmapped when the last array that views it goes.
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
        """Whether this process still owns it."""
        return self._descriptor >= 0 and os.getpid() == self._pid


class PeerSegment:
    """A segment of another process (or of another transport in this one), mapped to be read."""

    def __init__(
        self, mapping: mmap.mmap | ByteArray, descriptor: int, own: OwnedSegment | None
    ) -> None:
        self.array: ByteArray = np.frombuffer(mapping, dtype=np.uint8)
        """``uint8``, read-only."""
        self._mapping = mapping
        self._descriptor = descriptor
        self._own = own

    @classmethod
    def attach(cls, name: str, nbytes: int) -> "PeerSegment":
        """Maps ``nbytes`` of the segment ``name``.

        Raises:
            BoundsError: the name is none of ours, or the segment is smaller than ``nbytes``.
            PeerLostError: there is no such segment, or its owner is dead.
            SharedMemoryError: it cannot be mapped.
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
        """Whether the owner still holds its lock; two microseconds."""
        if self._own is not None:
            return self._own.is_open
        return self._descriptor >= 0 and _is_locked(self._descriptor)

    def populate(self, first: int, nbytes: int) -> bool:
        """Fills the page tables of ``nbytes`` from the page-aligned ``first`` on.

        Returns whether that is possible: it is not before Linux 5.14, and not needed for memory
        of this process. Without it reads are right, the first of each page is slower.
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
        """Lets go of the segment; unmapped when the last array that views it goes. Idempotent."""
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
    except OSError:  # another process swept it first, or another user owns it
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
