"""What the path between two processes could carry: bare loops, with nothing of ours around them.

The benchmarks and ``kvferry bench`` set a transport's figure beside the one of these loops, from
the same memory in the same run.
"""

import contextlib
import ctypes
import errno
import functools
import hmac
import os
import secrets
import socket
import ssl
import threading

import numpy as np
import numpy.typing as npt

from kvferry.errors import NotReadyError, PeerLostError
from kvferry.lifetimes import Closing
from kvferry.transports.base import ByteArray
from kvferry.zeromq import join_address, keep_alive, listen_errors

TOKEN_BYTES = 16
"""Bytes of the secret of a :class:`BareSource`, and of the name that a reader gives itself."""
MAX_CONNECTIONS = 64
"""Connections to a :class:`BareSource`; more are closed at once."""
_HELLO_S = 5.0
"""Seconds in which a connection says who it is."""
_GONE_S = 30.0
"""Seconds without a sign of the other host after which it is gone."""
_ADMITTED, _BUSY = b"\1", b"\0"


def part_of(nbytes: int, number: int, parts: int) -> tuple[int, int]:
    """Where one of several equal parts begins and ends.

    >>> part_of(10, 1, 3)
    (3, 6)
    """
    return nbytes * number // parts, nbytes * (number + 1) // parts


def read_process(pid: int, local: npt.NDArray[np.int64], remote: npt.NDArray[np.int64]) -> None:
    """One ``process_vm_readv(2)``.

    Args:
        pid: of the process that is read.
        local: ``[spans, 2]``, address and bytes of each span of memory here.
        remote: the same of that process; at most 1,024 spans, and less than 2 GiB.

    Raises:
        OSError: it may not be read, has ended, or has not all of the memory.
    """
    spans = (
        ctypes.c_void_p(local.ctypes.data),
        ctypes.c_ulong(len(local)),
        ctypes.c_void_p(remote.ctypes.data),
        ctypes.c_ulong(len(remote)),
    )
    done = _libc().process_vm_readv(pid, *spans, ctypes.c_ulong(0))
    if done < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    wanted = int(remote[:, 1].sum())
    if done != wanted:
        raise OSError(errno.EIO, f"{done} of {wanted} bytes were read")


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


class BareSource(Closing):
    """Sends parts of a region over TCP, each with one ``sendall``, to one reader at a time.

    A connection begins with the token and the reader's name. It is answered with one byte: whether
    it is admitted, or another reader is being served. Then each two bytes name a part, and how many
    parts there are.
    """

    def __init__(
        self,
        memory: ByteArray,
        *,
        host: str = "127.0.0.1",
        context: ssl.SSLContext | None = None,
    ) -> None:
        """Listens on a free port.

        Args:
            memory: what is sent.
            host: address of this machine.
            context: encrypts the connections.

        Raises:
            HostError: the address is not of this machine.
        """
        self.token = secrets.token_bytes(TOKEN_BYTES)
        """Whoever has it may read."""
        self._memory, self._context = memory, context
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with listen_errors(host, 0, "port"):
            self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        """Where it listens."""
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._reader = b""
        self._admitted = 0
        """Connections of the reader that is being served."""
        threading.Thread(target=self._accept, name="kvferry-bare", daemon=True).start()

    def close(self) -> None:
        """Frees the port and ends the connections. Idempotent."""
        with self._lock:
            ended = [self._listener, *self._connections]
        for each in ended:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes who waits for it
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                tcp, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                full = len(self._connections) >= MAX_CONNECTIONS
                if not full:
                    self._connections.add(tcp)
            if full:
                tcp.close()
            else:
                # One thread each: who says nothing keeps nobody else waiting.
                threading.Thread(
                    target=self._serve, args=(tcp,), name="kvferry-bare", daemon=True
                ).start()

    def _serve(self, tcp: socket.socket) -> None:
        try:
            # It may have gone, or speak another protocol.
            with tcp, contextlib.suppress(OSError):
                tcp.settimeout(_HELLO_S)
                if self._context is None:
                    self._speak(tcp)
                else:
                    with self._context.wrap_socket(tcp, server_side=True) as encrypted:
                        with self._lock:
                            self._connections.remove(tcp)  # it has no socket any more
                            tcp = encrypted
                            self._connections.add(tcp)
                        self._speak(tcp)
        finally:
            with self._lock:
                self._connections.discard(tcp)

    def _speak(self, tcp: socket.socket) -> None:
        hello = _receive(tcp, 2 * TOKEN_BYTES)
        if not hmac.compare_digest(hello[:TOKEN_BYTES], self.token):
            return
        if not self._admit(hello[TOKEN_BYTES:]):
            tcp.sendall(_BUSY)
            return
        try:
            tcp.sendall(_ADMITTED)
            keep_alive(tcp, _GONE_S)
            tcp.settimeout(None)
            while len(asked := _receive(tcp, 2)) == 2 and asked[0] < asked[1]:
                first, last = part_of(self._memory.nbytes, *asked)
                tcp.sendall(self._memory.data[first:last])
        finally:
            with self._lock:
                self._admitted -= 1

    def _admit(self, reader: bytes) -> bool:
        with self._lock:
            if self._admitted and reader != self._reader:
                return False
            self._reader = reader
            self._admitted += 1
            return True


def dial(
    host: str, port: int, token: bytes, reader: bytes, *, encrypted: bool = False
) -> socket.socket:
    """A connection to a :class:`BareSource`.

    Args:
        host: where it listens.
        port: where it listens.
        token: its secret.
        reader: the reader's name, ``TOKEN_BYTES`` bytes, the same for all of its connections.
        encrypted: whether it speaks TLS; its certificate is not checked.

    Raises:
        PeerLostError: nobody is there, or the token is wrong.
        NotReadyError: another reader is being served.
    """
    where = join_address(host, port)
    try:
        tcp = socket.create_connection((host, port), _HELLO_S)
    except OSError as error:
        raise PeerLostError(
            f"{where}: {error.strerror or error}; open the port to this machine"
        ) from error
    try:
        if encrypted:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            tcp = context.wrap_socket(tcp)
        tcp.sendall(token + reader)
        answer = _receive(tcp, 1)
        if answer == _ADMITTED:
            keep_alive(tcp, _GONE_S)
            tcp.settimeout(None)
            return tcp
    except OSError as error:
        tcp.close()
        raise PeerLostError(f"{where}: {error.strerror or error}") from error
    tcp.close()
    if answer == _BUSY:
        raise NotReadyError(f"{where}: it serves another reader; try again when that has ended")
    raise PeerLostError(f"{where}: the connection was closed; it was started again, or is full")


def receive_part(tcp: socket.socket, target: ByteArray, number: int, parts: int) -> None:
    """Receives one of several parts of what a :class:`BareSource` has, to where it belongs.

    Args:
        tcp: what :func:`dial` returned.
        target: as many bytes as the source has.
        number: which part, from 0.
        parts: 255 at most.

    Raises:
        PeerLostError: the connection broke.
    """
    memory = target.data
    first, last = part_of(target.nbytes, number, parts)
    try:
        tcp.sendall(bytes((number, parts)))
        while first < last:
            moved = tcp.recv_into(memory[first:last])
            if not moved:
                raise PeerLostError("the source has closed the bare connection")
            first += moved
    except OSError as error:
        raise PeerLostError(f"the bare connection broke: {error.strerror or error}") from error


def _receive(tcp: socket.socket, nbytes: int) -> bytes:
    """So many bytes, or fewer where the connection ends."""
    found = b""
    while len(found) < nbytes and (more := tcp.recv(nbytes - len(found))):
        found += more
    return found
