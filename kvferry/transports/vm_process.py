"""A process of this host whose memory is read, identified by more than its process id.

**Identity.** A process id is used again, and means nothing in another PID namespace. So the serving
side names its host, its namespace, its start time, and the address of a token of 16 random bytes in
its memory. The reader holds a pidfd, which stands for the same process however its id is used
later: as long as the pidfd says alive, the id still belongs to the process.

**Service.** The token is wiped when the serving transport is closed. A process that has called
``execve`` has other bytes at the address, or none.
"""

import ctypes
import errno
import os
import secrets
import select
import sys
from functools import cache
from pathlib import Path

import msgspec
import numpy as np

from kvferry.errors import HostError, PeerLostError, TransferError
from kvferry.transports.local import boot_id

TOKEN_BYTES = 16
_PR_SET_PTRACER = 0x59616D61
_PR_SET_PTRACER_ANY = ctypes.c_ulong(-1)


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """A process that serves memory, as peers see the process."""

    host: str
    """Boot id of the host."""
    namespace: str
    """PID namespace in which ``pid`` counts."""
    pid: int
    started: int
    """Clock ticks from the start of the host to the start of the process."""
    token: bytes
    token_address: int


class Token:
    """Bytes which prove that a transport's memory is still served."""

    def __init__(self) -> None:
        self._bytes = np.frombuffer(bytearray(secrets.token_bytes(TOKEN_BYTES)), dtype=np.uint8)
        pid = os.getpid()
        self.identity = Identity(
            host=boot_id(),
            namespace=_pid_namespace(),
            pid=pid,
            started=_started(pid),
            token=self._bytes.tobytes(),
            token_address=self._bytes.ctypes.data,
        )
        """Identity of this process."""

    def wipe(self) -> None:
        """Wipes the bytes: from now on readers see that the memory is not served any more."""
        self._bytes[:] = 0


class RemoteProcess:
    """A process whose memory may be read."""

    def __init__(self, identity: Identity) -> None:
        """Finds the process, and tries to read its token.

        Raises:
            PeerLostError: the process is on another host or in another PID namespace, has ended,
                has closed its transport, or may not be read; the message gives the reason.
        """
        self.pid = identity.pid
        self._identity = identity
        self._pidfd = -1
        _check_reach(identity)
        try:
            self._pidfd = os.pidfd_open(identity.pid)
        except OSError as error:
            raise self.error(error.errno or errno.EIO) from error
        lost = self.lost()
        if lost is None and _started(identity.pid) != identity.started:
            lost = PeerLostError(
                f"process {self.pid} has started again, or its id is another process's now"
            )
        if lost is not None:
            self.close()
            raise lost

    def lost(self) -> PeerLostError | None:
        """Error that prevents reads from the process, or ``None``; takes a few microseconds."""
        ended = select.poll()  # a new poller: threads cannot share a poller
        ended.register(self._pidfd, select.POLLIN)
        if ended.poll(0):
            return PeerLostError(f"process {self.pid}, which owns the memory, has ended")
        found = ctypes.create_string_buffer(TOKEN_BYTES)
        address = self._identity.token_address
        if number := read_memory(self.pid, ctypes.addressof(found), address, TOKEN_BYTES):
            return self.error(number)
        if found.raw != self._identity.token:
            return PeerLostError(f"process {self.pid} has closed the transport, or started again")
        return None

    def error(self, number: int) -> PeerLostError:
        """The error for the ``errno`` of a call that concerned the process."""
        if number == errno.ESRCH:
            return PeerLostError(f"process {self.pid}, which owns the memory, has ended")
        reason = os.strerror(number)
        if number in {errno.EPERM, errno.EACCES, errno.ENOSYS}:
            return PeerLostError(
                f"this process may not read the memory of process {self.pid} ({reason}): both must "
                "run as the same user, and neither kernel.yama.ptrace_scope nor a seccomp filter "
                "of the container may forbid it; or use shm or tcp"
            )
        return PeerLostError(f"process {self.pid}: its memory cannot be read: {reason}")

    def reading_error(self, number: int) -> TransferError:
        """The error for a failed read: unmapped memory is a TransferError, not a lost process."""
        lost = self.lost()
        if lost is not None:
            return lost
        if number == errno.EFAULT:
            return TransferError(
                f"process {self.pid} serves memory that it has unmapped; its engine must keep what "
                "it registers until the transport is closed"
            )
        return self.error(number)

    def close(self) -> None:
        """Closes the pidfd. Idempotent."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def let_anybody_trace() -> None:
    """Permits all processes of this user to read this process, even under Yama.

    With ``kernel.yama.ptrace_scope`` 1, which several distributions set, only ancestors may
    otherwise read a process. Without Yama the call fails, and is not needed.
    """
    _libc().prctl(_PR_SET_PTRACER, _PR_SET_PTRACER_ANY, 0, 0, 0)


def check_host() -> None:
    """Raises ``HostError`` if the system has no ``process_vm_readv``."""
    if not sys.platform.startswith("linux") or not hasattr(_libc(), "process_vm_readv"):
        raise HostError("vm: needs Linux and process_vm_readv; use another transport")


def _check_reach(identity: Identity) -> None:
    if identity.host != boot_id():
        raise PeerLostError("the peer runs on another host; use tcp")
    if identity.namespace != _pid_namespace():
        raise PeerLostError(
            f"the peer runs in the PID namespace {identity.namespace}, this process in "
            f"{_pid_namespace()}; give both containers one (--pid), or use tcp"
        )


def _pid_namespace() -> str:
    """The PID namespace of this process: process ids mean nothing in another namespace."""
    return str(Path("/proc/self/ns/pid").readlink())


def _started(pid: int) -> int:
    """Start time of a process, in clock ticks since the host's start; -1 without a process."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return -1
    # The name, in brackets, may hold anything; field 22 of proc(5) is the 20th field after it.
    return int(status.rpartition(")")[2].split()[19])


def read_memory(pid: int, target: int, source: int, nbytes: int) -> int:
    """Calls ``process_vm_readv(2)`` once.

    Args:
        pid: id of the process to read from.
        target: address in this process.
        source: address in the other process.
        nbytes: number of bytes, less than 2 GiB.

    Returns:
        The ``errno``, or 0 if all bytes were read.
    """
    local, remote = ((ctypes.c_size_t * 2)(address, nbytes) for address in (target, source))
    done = _libc().process_vm_readv(
        pid, local, ctypes.c_ulong(1), remote, ctypes.c_ulong(1), ctypes.c_ulong(0)
    )
    if done == nbytes:
        return 0
    return ctypes.get_errno() if done < 0 else errno.EFAULT


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    if hasattr(libc, "process_vm_readv"):
        libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc
