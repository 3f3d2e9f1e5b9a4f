"""One TCP connection of the tcp transport: messages and chunks in both directions.

Each message and each chunk follows a header (:data:`~kvferry.transports.wire_messages.HEADER`).
Messages are queued. A chunk is sent straight from the regions, as much as the socket takes, and
received straight into the regions, as much as has come (:mod:`~kvferry.transports.tcp_kernels`). A
call may wait for a short time only if the thread has nothing else to do. While data flows, a return
to the thread's poller would cost more than the wait for the next bytes.
"""

import contextlib
import errno
import os
import select
import socket
import threading
from collections import deque
from collections.abc import Iterator

import msgspec
import numpy as np

from kvferry.errors import HostError, KVFerryError, PeerLostError, ProtocolError
from kvferry.layouts.arrays import Int64s
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows, blank_runs, box_bytes
from kvferry.lifetimes import Closing
from kvferry.transports import tcp_kernels as kernels
from kvferry.transports.wire_messages import HEADER, MESSAGE, encode
from kvferry.zeromq import BACKLOG, KEEPALIVE, error_of, join_address, listen_errors

READABLE, WRITABLE = select.POLLIN, select.POLLIN | select.POLLOUT
"""Poll flags of a connection: for received data, and for sending queued data as well."""
_FIRST_BYTES = 64 << 10
"""Initial bytes of a message's buffer. The buffer grows only with received bytes, so a peer cannot
make the buffer large by announcing a large message."""
_INFO_BYTES, _DATA_SENT, _DATA_RECEIVED, _ACK_RECEIVED = 60, 11, 13, 14
"""Positions in the struct ``tcp_info``: number of bytes to read from the struct, then indexes of
32-bit words. The words hold the milliseconds since data was last sent, since data last came, and
since an acknowledgement last came."""
_ANSWER_S = 1.0
"""Seconds that the remote kernel has to answer."""
WAITS = 16
"""Number of waits of a thread at one connection before the next connection: some milliseconds."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address of this machine; port 0 takes a free port.

    Raises:
        PortInUseError: the port is taken.
        HostError: the address is not of this machine, or the port needs privileges.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        with listen_errors(host, port, "port"):
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("" if host == "*" else host, port))
            listener.listen(BACKLOG)
    except KVFerryError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener


def dial(host: str, port: int) -> socket.socket:
    """A socket that has begun to connect to an address; see :data:`~kvferry.zeromq.KEEPALIVE`.

    Raises:
        PeerLostError, HostError: the connection cannot be begun.
    """
    doing = f"cannot connect to {join_address(host, port)}"
    try:
        (family, kind, _, _, address), *_ = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )
        tcp = socket.socket(family, kind)
    except OSError as error:
        raise HostError(f"{doing}: {error}") from error
    tcp.setblocking(False)
    # No TCP_USER_TIMEOUT: it would also end connections to a process without room for data.
    for option in KEEPALIVE:
        tcp.setsockopt(*option)
    failed = tcp.connect_ex(address)
    if failed not in (0, errno.EINPROGRESS):
        tcp.close()
        raise error_of(OSError(failed, errno.errorcode.get(failed, "?")), doing)
    return tcp


class TcpLink(Closing):
    """A connection of one thread; other threads may only :meth:`send` and :meth:`flush`."""

    def __init__(self, tcp: socket.socket, other: str) -> None:
        """Takes over a non-blocking socket; ``other`` names the remote side."""
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.descriptor = tcp.fileno()
        self.left = 0
        """Number of bytes left of the current chunk, sent or received. One end of a connection only
        sends chunks; the other end only receives chunks."""
        self.at_hand = 0
        """How many bytes of ``left`` are in memory: fewer than ``left`` for a chunk that is
        supplied in pieces, see :meth:`begin_packed`."""
        self.other = other
        """Name of the remote side in messages."""
        self._supplied = 0
        """Number of bytes in the last call of :meth:`supply`."""
        self._sends = False
        self._socket = tcp
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._buffer = bytearray(HEADER.size)
        self._got = 0
        self._wanted = HEADER.size
        self._is_header = True
        self._part: kernels.Part | None = None
        """Tables and buffers of this end; made with the first chunk."""
        self._chunk: tuple[kernels.Part, Int64s, Tiles, Runs] | None = None
        """The current chunk. Released with its last byte: a connection may be idle for days, and
        tables may be large."""

    def close(self) -> None:
        """Closes the connection."""
        with self._lock:
            self.descriptor = -1
            self._queue.clear()
            self._chunk = None
            self._socket.close()

    @property
    def is_closed(self) -> bool:
        """Whether the connection was closed on this side."""
        return self.descriptor < 0

    @property
    def unanswered_s(self) -> float:
        """Seconds from the last answer of the remote kernel to the last unanswered sending.

        0 if the remote process only has no room, because its kernel still answers.
        """
        with self._lock:
            if self.is_closed:
                return 0.0
            info = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
        words = memoryview(info.ljust(_INFO_BYTES, b"\0")).cast("I")
        sent_s = words[_DATA_SENT] / 1000
        answered_s = min(words[_DATA_RECEIVED], words[_ACK_RECEIVED]) / 1000
        return max(0.0, answered_s - sent_s) if sent_s >= _ANSWER_S else 0.0

    @property
    def queued(self) -> int:
        """Number of messages that wait to be sent."""
        return len(self._queue)

    def hang_up(self) -> None:
        """Ends the sending direction: the remote side still reads the data sent before."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def has_pending(self) -> bool:
        """Whether data has come that no poller reports any more."""
        return False

    def flags(self, *, is_full: bool) -> int:
        """Poll flags of the connection; ``is_full`` says that some data could not be sent yet."""
        return WRITABLE if is_full else READABLE

    # Messages. Any thread may call send() and flush().

    def send(self, message: msgspec.Struct) -> bool:
        """Sends a message after all queued messages; returns whether everything has left.

        Raises:
            PeerLostError: the connection is gone.
        """
        body = encode(message)
        with self._lock:
            self._queue.append(HEADER.pack(MESSAGE, 0, len(body)) + body)
        return self.flush()

    def flush(self) -> bool:
        """Sends queued messages, unless a chunk is unfinished; returns whether everything has left.

        Raises:
            PeerLostError: the connection is gone.
        """
        with self._lock, self._errors():
            if self.is_closed:  # the code that closed the connection has reported why
                return True
            while self._queue:
                if self._sends and self.left:
                    return False
                sent = self._write(self._queue[0])
                if sent < len(self._queue[0]):
                    self._queue[0] = self._queue[0][sent:]
                    return False
                self._queue.popleft()
        return True

    def receive(self, most: int) -> bytes | tuple[int, int, int] | None:
        """The next message, or the header of a chunk; ``None`` if neither has come.

        The caller must receive the whole last chunk before.

        Raises:
            PeerLostError: the connection is gone.
            ProtocolError: a message of more than ``most`` bytes, or of none.
        """
        with self._errors():
            while self._has_come():
                came = bytes(self._buffer)
                self._got = 0
                if not self._is_header:
                    self._expect(HEADER.size, is_header=True)
                    return came
                transfer, chunk, nbytes = HEADER.unpack(came)
                if transfer != MESSAGE:
                    return transfer, chunk, nbytes
                if chunk != 0:
                    raise ProtocolError(f"a message's header says chunk {chunk}; expected 0")
                if not 0 < nbytes <= most:
                    raise ProtocolError(f"a message of {nbytes} bytes; expected 1 to {most}")
                self._expect(nbytes, is_header=False)
        return None

    def _expect(self, nbytes: int, *, is_header: bool) -> None:
        self._wanted, self._is_header = nbytes, is_header
        self._buffer = bytearray(min(nbytes, _FIRST_BYTES))

    def _has_come(self) -> bool:
        while self._got < self._wanted:
            if self._got == len(self._buffer):
                self._buffer.extend(bytes(min(self._got, self._wanted - self._got)))
            with memoryview(self._buffer)[self._got :] as free:
                nbytes = self._read(free)
            if not nbytes:
                return False
            self._got += nbytes
        return True

    # Chunks.

    def begin(
        self,
        nbytes: int,
        addresses: Int64s,
        tables: tuple[Tiles, Runs],
        *,
        header: tuple[int, int, int] | None = None,
        stream: bool = False,
    ) -> None:
        """Begins a chunk; :meth:`push` or :meth:`pull` continues the chunk.

        Args:
            nbytes: bytes of the chunk.
            addresses: addresses of the local regions.
            tables: tiles and runs with the dense chunk on their other side.
            header: header to send before the chunk; ``None`` for a received chunk. The message
                queue must be empty.
            stream: whether short pieces are stored in place around the cache.
        """
        tiles, runs = as_rows(tables[0], TILE_DTYPE), as_rows(tables[1], RUN_DTYPE)
        part = self._part_of(box_bytes(tiles) * int(runs[0]["tokens"]))
        self._sends = header is not None
        if header is not None:
            part.header[:] = header
            nbytes += HEADER.size
        kernels.begin(part, self._direct_bytes, stream, header is not None)
        self._chunk = part, addresses, tiles, runs
        self.left = self.at_hand = nbytes

    def begin_packed(self, header: tuple[int, int, int]) -> None:
        """Begins to send a chunk whose bytes come later, with :meth:`supply`.

        Args:
            header: header to send before the chunk. The message queue must be empty.
        """
        part = self._part_of(0)
        part.header[:] = header
        kernels.begin(part, self._direct_bytes, stream=False, header=True)
        self._sends = True
        self.left = header[2] + HEADER.size

    def supply(self, address: int, nbytes: int) -> None:
        """Supplies the next bytes of a chunk begun with :meth:`begin_packed`.

        The bytes must stay in place until they are sent or taken back.
        """
        part = self._part_of(0)
        has_header = bool(part.state["header"][0])
        kernels.begin(part, self._direct_bytes, stream=False, header=has_header)
        tiles = np.zeros(1, dtype=TILE_DTYPE)
        tiles["source_element_stride"] = tiles["target_element_stride"] = 1
        tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, nbytes, 1
        runs = blank_runs(1)
        runs["tokens"] = 1
        self._chunk = part, np.array([address], dtype=np.int64), tiles, runs
        self._supplied = nbytes
        self.at_hand = nbytes + (HEADER.size if has_header else 0)

    def take_back(self) -> int | None:
        """Sends no more of the last supplied bytes; some of these bytes must be :attr:`at_hand`.

        Returns:
            How many supplied bytes have left. ``None`` in the middle of a header: then sending
                continues.
        """
        header_left = max(0, self.at_hand - self._supplied)
        if 0 < header_left < HEADER.size:
            return None
        sent = self._supplied - (self.at_hand - header_left)
        self._part_of(0).state["header"] = header_left > 0
        self._chunk, self.at_hand = None, 0
        return sent

    def push(self, most: int, *, waits: int = 0) -> int:
        """Sends about ``most`` bytes of the chunk at most; returns the number of sent bytes.

        A result below ``most`` while bytes are :attr:`at_hand` means that the socket takes no more
        now.

        Args:
            most: bytes.
            waits: how often the call may wait for a short time until the socket takes more.

        Raises:
            PeerLostError: the connection is gone.
        """
        assert self._chunk is not None  # some bytes of the chunk are left
        sent, failed = kernels.send(self.descriptor, *self._chunk, most, waits)
        self._went(sent)
        self._check(failed)
        return int(sent)

    def pull(self, most: int, *, waits: int = 0) -> tuple[int, int, int]:
        """Receives about ``most`` bytes of the chunk at most, into place.

        Args:
            most: bytes.
            waits: how often the call may wait for a short time until more has come.

        Returns:
            Number of received bytes; a number below ``most`` while bytes are :attr:`left` means
                that no more has come. Number of bytes put in place since the last call, and number
                of their segments.

        Raises:
            PeerLostError: the connection is gone.
        """
        assert self._chunk is not None  # some bytes of the chunk are left
        state = self._chunk[0].state
        before = int(state["segments"][0])
        came, placed, failed = kernels.receive(self.descriptor, *self._chunk, most, waits)
        self._went(came)
        self._check(failed)
        return int(came), int(placed), int(state["segments"][0]) - before

    def drop(self) -> int:
        """Receives and drops bytes of an unwanted chunk; returns the number of bytes.

        Raises:
            PeerLostError: the connection is gone.
        """
        with self._errors(), self._part_of(0).buffer.data as scratch:
            came = self._read(scratch[: self.left])
        self._went(came)
        return came

    def _went(self, nbytes: int) -> None:
        """Counts ``nbytes`` of the chunk as sent or received."""
        self.left -= nbytes
        self.at_hand = max(0, self.at_hand - nbytes)
        if not self.at_hand:
            self._chunk = None

    def discard(self) -> None:
        """Receives all present data and drops the data.

        Raises:
            PeerLostError: the connection is gone.
        """
        with self._errors():
            self._read(memoryview(bytearray(_FIRST_BYTES)))

    # Calls of the socket; these return 0 bytes instead of waiting.

    _direct_bytes = kernels.DIRECT_BYTES

    def _write(self, data: bytes | memoryview) -> int:
        try:
            return self._socket.send(data, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return 0

    def _read(self, into: memoryview) -> int:
        try:
            nbytes = self._socket.recv_into(into)
        except BlockingIOError:
            return 0
        if not nbytes:
            raise PeerLostError(f"the connection to {self.other} is gone: it was ended there")
        return nbytes

    def _check(self, failed: int) -> None:
        if failed:
            why = "it was ended there" if failed < 0 else os.strerror(failed)
            raise PeerLostError(f"the connection to {self.other} is gone: {why}")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PeerLostError(
                f"the connection to {self.other} is gone: {error.strerror}"
            ) from error

    def _part_of(self, box: int) -> kernels.Part:
        """Tables and buffer of a chunk; a run larger than the usual buffer gets its own."""
        if box > kernels.PACK_BYTES:
            return kernels.new_part(min(box, kernels.MAX_PACK_BYTES))
        if self._part is None:
            self._part = kernels.new_part()
        return self._part
