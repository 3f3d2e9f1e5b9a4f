"""Upper limits of the path between two processes: bare copy loops without kvferry's transports.

The benchmarks and ``kvferry bench`` compare a transport's speed with the speed of these loops, with
the same memory in the same run.
"""

import contextlib
import hmac
import os
import secrets
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from kvferry.errors import NotReadyError, PeerLostError
from kvferry.layouts.arrays import ByteArray
from kvferry.lifetimes import Closing
from kvferry.transports.base import Transfer
from kvferry.transports.vm_process import read_memory
from kvferry.zeromq import join_address, keep_alive, listen_errors

TOKEN_BYTES = 16
"""Length in bytes of a :class:`BareSource`'s secret, and of a reader's name."""
MAX_CONNECTIONS = 64
"""Maximum number of connections to a :class:`BareSource`; further connections close at once."""
_HELLO_S = 5.0
"""Seconds within which a new connection must identify itself."""
_GONE_S = 30.0
"""Seconds without a sign of life after which the other host counts as gone."""
_ADMITTED, _BUSY = b"\1", b"\0"

Copy: TypeAlias = Callable[[int, int, int], object]
"""Copies bytes, with the arguments of ``ctypes.memmove``: target, source, number of bytes."""


def part_of(nbytes: int, number: int, parts: int) -> tuple[int, int]:
    """Begin and end of a part, if ``nbytes`` bytes are divided into ``parts`` nearly equal parts.

    >>> part_of(10, 1, 3)
    (3, 6)
    """
    return nbytes * number // parts, nbytes * (number + 1) // parts


def copy_from(pid: int) -> Copy:
    """A copy function that reads from the memory of a process with ``process_vm_readv(2)``.

    It raises ``OSError`` if the process may not be read, has ended, or lacks a part of the memory.
    """

    def copy(target: int, source: int, nbytes: int) -> None:
        if number := read_memory(pid, target, source, nbytes):
            raise OSError(number, os.strerror(number))

    return copy


def copy_pieces(
    pool: ThreadPoolExecutor, copy: Copy, ends: tuple[int, int], nbytes: int, piece_bytes: int
) -> None:
    """Copies a contiguous range in pieces; each free thread of a pool takes the next piece.

    Args:
        pool: the threads.
        copy: function that copies a piece.
        ends: addresses of target and source.
        nbytes: number of bytes of all pieces together.
        piece_bytes: number of bytes of each piece; the last piece may be shorter.
    """
    target, source = ends

    def work(first: int) -> None:
        copy(target + first, source + first, min(piece_bytes, nbytes - first))

    list(pool.map(work, range(0, nbytes, piece_bytes)))


def wait_for_end(reads: Sequence[Transfer]) -> None:
    """Waits until all reads have ended, with or without success, without polling."""
    ended = threading.Semaphore(0)
    for read in reads:
        read.on_end(lambda _: ended.release())
    for _ in reads:
        ended.acquire()


class BareSource(Closing):
    """Sends parts of a memory region over TCP, each with a ``sendall``; serves a reader at a time.

    A connection begins with the token and the name of the reader. The answer is a byte: either the
    reader is admitted, or another reader is being served. Then, every two bytes from the reader
    request a part: the number of the part, and the number of parts.
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
            memory: the memory to send.
            host: address of this machine.
            context: TLS context that encrypts the connections; ``None`` for plain TCP.

        Raises:
            HostError: this machine does not have the address.
        """
        self.token = secrets.token_bytes(TOKEN_BYTES)
        """Secret that permits a reader to read."""
        self._memory, self._context = memory, context
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with listen_errors(host, 0, "port"):
            self._listener = socket.create_server((host, 0), family=family)
        self.port: int = self._listener.getsockname()[1]
        """TCP port of the listener."""
        self._lock = threading.Lock()
        self._connections: set[socket.socket] = set()
        self._reader = b""
        self._admitted = 0
        """Number of connections of the current reader."""
        threading.Thread(target=self._accept, name="kvferry-bare", daemon=True).start()

    def close(self) -> None:
        """Frees the port and ends the connections. Idempotent."""
        with self._lock:
            ended = [self._listener, *self._connections]
        for each in ended:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # wakes the threads that wait for this socket
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
                # Each connection has a thread, so a silent connection delays no other connection.
                threading.Thread(
                    target=self._serve, args=(tcp,), name="kvferry-bare", daemon=True
                ).start()

    def _serve(self, tcp: socket.socket) -> None:
        try:
            # The reader may have gone, or may speak another protocol.
            with tcp, contextlib.suppress(OSError):
                tcp.settimeout(_HELLO_S)
                if self._context is None:
                    self._speak(tcp)
                else:
                    with self._context.wrap_socket(tcp, server_side=True) as encrypted:
                        with self._lock:
                            self._connections.remove(tcp)  # wrap_socket has detached this socket
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
    """Connects to a :class:`BareSource`.

    Args:
        host: host of the source.
        port: TCP port of the source.
        token: secret of the source.
        reader: name of the reader, ``TOKEN_BYTES`` bytes, equal for all connections of a reader.
        encrypted: whether the source uses TLS; its certificate is not checked.

    Raises:
        PeerLostError: no source answers, or the token is wrong.
        NotReadyError: the source serves another reader.
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
    """Receives a part of a :class:`BareSource`'s memory into its place in ``target``.

    Args:
        tcp: a connection from :func:`dial`.
        target: memory of the same size as the source's memory.
        number: number of the part, from 0.
        parts: number of parts, at most 255.

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


def receive_all(
    pool: ThreadPoolExecutor, sockets: Sequence[socket.socket], target: ByteArray
) -> None:
    """Receives the whole memory of a :class:`BareSource`, with a part and a thread per connection.

    Raises:
        PeerLostError: see :func:`receive_part`.
    """
    parts = len(sockets)

    def receive(number: int) -> None:
        receive_part(sockets[number], target, number, parts)

    list(pool.map(receive, range(parts)))


def _receive(tcp: socket.socket, nbytes: int) -> bytes:
    """Receives ``nbytes`` bytes, or fewer if the connection ends."""
    found = b""
    while len(found) < nbytes and (more := tcp.recv(nbytes - len(found))):
        found += more
    return found
