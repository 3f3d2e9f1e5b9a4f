"""One TCP connection of the tcp transport: what goes over it, either way, without waiting.

Messages and chunks go behind a header each
(:data:`~kvferry.transports.wire_messages.HEADER`). Messages are queued; of a chunk as much is sent
as the socket takes, straight from the regions, and received as has come, straight into them
(:mod:`~kvferry.transports.tcp_kernels`). Where the thread has nothing else to do, it may wait there
for a moment: while data flows, going back to its poller costs more than the next bytes take.
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

from kvferry.errors import HostError, KVFerryError, PeerLostError, ProtocolError
from kvferry.layouts.copier import Int64s
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, as_rows
from kvferry.lifetimes import Closing
from kvferry.transports import tcp_kernels as kernels
from kvferry.transports.wire_messages import HEADER, MESSAGE, encode
from kvferry.zeromq import BACKLOG, KEEPALIVE, error_of, join_address, listen_errors

READABLE, WRITABLE = select.POLLIN, select.POLLIN | select.POLLOUT
"""What to watch a connection for: what comes; also, until what is queued can be sent."""
_FIRST_BYTES = 64 << 10
"""A message's buffer grows with what comes of it: nobody makes it large by a word alone."""
_INFO_BYTES, _DATA_SENT, _DATA_RECEIVED, _ACK_RECEIVED = 60, 11, 13, 14
"""Of the struct ``tcp_info``: bytes as far as it is read; which of its 32-bit words say how many
milliseconds ago data was sent, and how many ago data or an acknowledgement came."""
_ANSWER_S = 1.0
"""Seconds that the other side's kernel has to answer."""
WAITS = 16
"""How often a thread waits at one connection before it looks for others: some milliseconds."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address of this machine; 0 takes a free port.

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
        PeerLostError, HostError: it cannot be begun.
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
    # No TCP_USER_TIMEOUT: it would also end what waits for a process that has no room for it.
    for option in KEEPALIVE:
        tcp.setsockopt(*option)
    failed = tcp.connect_ex(address)
    if failed not in (0, errno.EINPROGRESS):
        tcp.close()
        raise error_of(OSError(failed, errno.errorcode.get(failed, "?")), doing)
    return tcp


class TcpLink(Closing):
    """A connection. All but :meth:`send` and :meth:`flush` belongs to one thread."""

    def __init__(self, tcp: socket.socket, other: str) -> None:
        """Takes over a socket that does not block; ``other`` names its other side in messages."""
        tcp.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.descriptor = tcp.fileno()
        self.left = 0
        """Bytes of the chunk that is sent or received now which have not gone through yet. One end
        of a connection only sends chunks, the other only receives them."""
        self._sends = False
        self._socket = tcp
        self._other = other
        self._lock = threading.Lock()
        self._queue: deque[bytes] = deque()
        self._buffer = bytearray(HEADER.size)
        self._got = 0
        self._wanted = HEADER.size
        self._is_header = True
        self._part: kernels.Part | None = None
        """Made with the first chunk."""
        self._chunk: tuple[kernels.Part, Int64s, Tiles, Runs] | None = None
        """What goes through now. Let go of with its last byte: a connection may be idle for days,
        and tables may be large."""

    def close(self) -> None:
        """Ends the connection."""
        with self._lock:
            self.descriptor = -1
            self._queue.clear()
            self._chunk = None
            self._socket.close()

    @property
    def is_closed(self) -> bool:
        """Whether it was closed on this side."""
        return self.descriptor < 0

    @property
    def unanswered_s(self) -> float:
        """How many seconds after the other side's kernel last answered ours sent something again
        that it has not answered either. 0 for one that only has no room: it says so.
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
        """Messages that wait to be sent."""
        return len(self._queue)

    def hang_up(self) -> None:
        """Says that nothing more will be sent: the other side reads what came before."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    @property
    def has_pending(self) -> bool:
        """Whether something has come that no poller sees any more."""
        return False

    def flags(self, *, is_full: bool) -> int:
        """What to watch it for; ``is_full`` says that something could not be sent yet."""
        return WRITABLE if is_full else READABLE

    # Messages. The first two may be called by any thread.

    def send(self, message: msgspec.Struct) -> bool:
        """Sends a message behind those that were queued; whether all have left.

        Raises:
            PeerLostError: the connection is gone.
        """
        body = encode(message)
        with self._lock:
            self._queue.append(HEADER.pack(MESSAGE, 0, len(body)) + body)
        return self.flush()

    def flush(self) -> bool:
        """Sends what is queued, unless a chunk is in the middle; whether all has left.

        Raises:
            PeerLostError: the connection is gone.
        """
        with self._lock, self._errors():
            if self.is_closed:  # whoever closed it has said why
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

        Not before all of the last chunk has been received.

        Raises:
            PeerLostError: the connection is gone.
            ProtocolError: a message of more than ``most`` bytes, or none.
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
        """Begins with a chunk, which :meth:`push` or :meth:`pull` goes on with.

        Args:
            nbytes: of the chunk.
            addresses: of our regions.
            tables: tiles and runs of which the other half is the dense chunk.
            header: goes before it; ``None`` for a chunk that is received. Nothing may be queued.
            stream: whether short pieces are put in place around the cache.
        """
        tiles, runs = as_rows(tables[0], TILE_DTYPE), as_rows(tables[1], RUN_DTYPE)
        box = tiles["heads"] * tiles["elements"] * tiles["itemsize"]
        part = self._part_of(int(box.max()) * int(runs[0]["tokens"]))
        self._sends = header is not None
        if header is not None:
            part.header[:] = header
            nbytes += HEADER.size
        kernels.begin(part, self._direct_bytes, stream, header is not None)
        self._chunk = part, addresses, tiles, runs
        self.left = nbytes

    def push(self, most: int, *, waits: int = 0) -> int:
        """Sends about so many bytes of the chunk at most; returns how many. Fewer than ``most``,
        while some are :attr:`left`, is all that the socket takes for now.

        Args:
            most: bytes.
            waits: how often it may wait for a moment until the socket takes more.

        Raises:
            PeerLostError: the connection is gone.
        """
        assert self._chunk is not None  # some of it is left
        sent, failed = kernels.send(self.descriptor, *self._chunk, most, waits)
        self._went(sent)
        self._check(failed)
        return int(sent)

    def pull(self, most: int, *, waits: int = 0) -> tuple[int, int, int]:
        """Receives about so many bytes of the chunk at most into their places.

        Args:
            most: bytes.
            waits: how often it may wait for a moment until more has come.

        Returns:
            How many came; fewer than ``most``, while some are :attr:`left`, is all that has come.
            How many bytes are in place since the last call, and in how many segments.

        Raises:
            PeerLostError: the connection is gone.
        """
        assert self._chunk is not None  # some of it is left
        state = self._chunk[0].state
        before = int(state["segments"][0])
        came, placed, failed = kernels.receive(self.descriptor, *self._chunk, most, waits)
        self._went(came)
        self._check(failed)
        return int(came), int(placed), int(state["segments"][0]) - before

    def drop(self) -> int:
        """Receives what has come of a chunk that nobody wants any more; returns how many bytes.

        Raises:
            PeerLostError: the connection is gone.
        """
        with self._errors(), self._part_of(0).buffer.data as scratch:
            came = self._read(scratch[: self.left])
        self._went(came)
        return came

    def _went(self, nbytes: int) -> None:
        """So many bytes of the chunk went through."""
        self.left -= nbytes
        if not self.left:
            self._chunk = None

    def discard(self) -> None:
        """Receives what has come, and forgets it.

        Raises:
            PeerLostError: the connection is gone.
        """
        with self._errors():
            self._read(memoryview(bytearray(_FIRST_BYTES)))

    # What goes through the socket; 0 bytes where it would have to wait.

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
            raise PeerLostError(f"the connection to {self._other} is gone: it was ended there")
        return nbytes

    def _check(self, failed: int) -> None:
        if failed:
            why = "it was ended there" if failed < 0 else os.strerror(failed)
            raise PeerLostError(f"the connection to {self._other} is gone: {why}")

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise PeerLostError(
                f"the connection to {self._other} is gone: {error.strerror}"
            ) from error

    def _part_of(self, box: int) -> kernels.Part:
        """What a chunk goes through; with a buffer of its own where one run of it is so large."""
        if box > kernels.PACK_BYTES:
            return kernels.new_part(min(box, kernels.MAX_PACK_BYTES))
        if self._part is None:
            self._part = kernels.new_part()
        return self._part
