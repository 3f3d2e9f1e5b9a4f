"""The serving side of the tcp transport: threads that send chunks to readers in turns.

Each connection belongs to one thread. Data that a reader does not take stays in the regions: TCP
holds back data without room on the reader's side, and the reader has its next turn when the socket
takes more. So a reader that stops reading holds the buffers of one local socket, and delays no
other reader.
"""

import contextlib
import functools
import logging
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from kvferry.decoding import decode
from kvferry.errors import KVFerryError, NotReadyError, PeerLostError, ProtocolError, TransferError
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.mailbox import Mailbox
from kvferry.transports.packing import PackedPiece
from kvferry.transports.regions import Regions
from kvferry.transports.tcp_link import WAITS, TcpLink, listen
from kvferry.transports.tcp_tls import TlsLink
from kvferry.transports.wire import ServedReader, WireServer
from kvferry.transports.wire_chunks import ChunkPlan
from kvferry.transports.wire_messages import (
    MAX_READS,
    MAX_REQUEST_BYTES,
    TCP_REQUESTS,
    Cancel,
    Hello,
    TcpRequest,
)
from kvferry.zeromq import keep_alive

logger = logging.getLogger(__name__)

SILENCE_S = 120.0
"""Seconds without taking any requested data after which a reader counts as hung."""
MAX_STRANGERS = 64
"""Largest number of connections of one thread without a token; above it, the oldest is dropped."""
MAX_HELLO_BYTES = 1024
"""Largest message, in bytes, of a connection without a token."""
MAX_ANSWERS = 4 * MAX_READS
"""Largest number of refusals waiting for one reader; a reader with more is refused altogether."""
TURN_BYTES = 4 << 20
"""Number of bytes sent to a fast reader before the next reader has its turn; also the number of
bytes of requests handled in one turn."""
_MESSAGES_PER_TURN = 64
"""Number of requests of one reader handled before a reader is served."""
LOCAL_BYTES = 512 << 10
"""Number of bytes in flight to a reader on the same host, where the latency is tiny. So many bytes
stay in the second-level cache until received (the cache has 1 MiB here; the system takes twice as
much memory for the bytes). Half or twice the number moves 0.8 and 0.9 of the bytes per second; the
system's own choice moves 0.8."""
HOLD_S = 0.1
"""Seconds for which a reader that takes nothing keeps packed pieces from other readers."""
SLOW_BYTES = 256 << 10
"""Number of bytes per piece for a reader that took nothing, until the end of its chunk: such a
reader takes little of a piece before the piece is taken back."""
_PIECES_AHEAD = 2
"""Number of pieces of one reader that are sent or packed at a time."""
_LINGER_S = 1.0
"""Seconds that a refused reader has to leave. A connection that is ended at once would often end
before the message with the reason arrives."""
_AGAIN_S = 1.0
"""Seconds until the next ``accept`` after a failed ``accept``."""


@dataclass(slots=True, eq=False)
class _Part:
    """A part of a read, sent in one go: a chunk, or a piece of a chunk that a device packs."""

    transfer: int
    """The reader's number of the read."""
    plan: ChunkPlan
    index: int
    """Row of the chunk in the chunk table."""
    tables: tuple[Tiles, Runs]
    """Tiles and runs: where the bytes lie in the regions, and in the chunk."""
    piece: PackedPiece | None = None
    """The packed bytes; ``None`` if the chunk is sent from the regions, or while the reader takes
    nothing."""
    sent: int = 0
    """Number of bytes of the piece sent before the piece was taken back from the reader."""
    is_copied: bool = False
    """Whether the connection has its own copy of the last bytes, so no piece is needed."""

    @property
    def header(self) -> tuple[int, int, int]:
        """Header to send before the chunk."""
        return self.transfer, self.index, int(self.plan.nbytes[self.index])


@dataclass(slots=True, eq=False)
class _Reader(ServedReader):
    """A reader, with its turns."""

    link: TcpLink
    welcome: bool = False
    """Whether the reader has shown the token."""
    turns: deque[tuple[int, ChunkPlan, int]] = field(default_factory=deque)
    """Reads with chunks left, each with the index of the next chunk; the next read to serve is
    first."""
    parts: deque[_Part] = field(default_factory=deque)
    """The part that is being sent, and parts packed in advance."""
    uncut: deque[_Part] = field(default_factory=deque)
    """The rest of the chunk that the last of ``parts`` is a piece of."""
    queued: bool = False
    """Whether the reader is in the queue of its thread."""
    full: float | None = None
    """``time.monotonic()`` since which the socket takes nothing; ``None`` while the socket takes
    data."""
    refused: float | None = None
    """``time.monotonic()`` of the refusal of the whole connection; later messages are ignored."""


class TcpServer:
    """Listens, and distributes the connections over the serving threads."""

    def __init__(
        self,
        regions: Regions,
        token: bytes,
        identity: ssl.SSLContext | None = None,
        *,
        host: str,
        port: int,
        max_readers: int,
        threads: int,
    ) -> None:
        """Binds the port and starts the threads.

        With an ``identity`` (:func:`~kvferry.transports.tcp_tls.new_identity`) the server encrypts.

        Raises:
            PortInUseError: ``port`` is taken.
            HostError: ``host`` is no address of this machine.
        """
        self._identity = identity
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        """TCP port on which the server listens."""
        self.threads = [
            ServingThread(regions, token, max_readers, number, threads) for number in range(threads)
        ]
        for thread in self.threads:
            thread.mailbox.start()
        self._acceptor = self.threads[0].mailbox
        self._acceptor.post(self._listen)

    @property
    def refused(self) -> int:
        """Number of refused messages."""
        return sum(thread.refused for thread in self.threads)

    def close(self) -> None:
        """Ends the threads and frees the port. Idempotent."""
        for thread in self.threads:
            thread.close()
        self._listener.close()

    # The methods below run in the first thread.

    def _listen(self) -> None:
        self._acceptor.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            tcp, (host, port, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no free descriptor, for example; accept would be called again
            logger.warning("a connection cannot be accepted: %s", error.strerror)
            self._acceptor.unwatch(self._listener.fileno())
            again = threading.Timer(_AGAIN_S, self._acceptor.post, [self._listen])
            again.daemon = True
            again.start()
            return
        tcp.setblocking(False)
        # A suspended reader takes nothing for a while, but is not gone.
        keep_alive(tcp, SILENCE_S)
        if tcp.getsockname()[0] == host:
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BYTES)
        # Turns would not give equal shares, because connections end in any order.
        thread = min(self.threads, key=lambda each: each.dealt - each.gone)
        thread.dealt += 1
        other = f"{host}:{port}"
        link = TlsLink(tcp, other, self._identity) if self._identity else TcpLink(tcp, other)
        if thread.mailbox is self._acceptor:
            thread.add(link)
        else:  # closed after this thread, so that no connection is forgotten
            thread.mailbox.post(functools.partial(thread.add, link))


class ServingThread(WireServer):
    """Some of the connections, and the thread that owns these connections."""

    def __init__(
        self, regions: Regions, token: bytes, max_readers: int, number: int, threads: int
    ) -> None:
        super().__init__(regions, token, max_readers, threads)
        self.readers: list[_Reader] = []
        """All readers of the thread, oldest first."""
        self.dealt = self.gone = 0
        """Number of connections from the acceptor, and how many of these have ended."""
        self._queue: deque[_Reader] = deque()
        """Readers with data to send and a socket that takes data; the next to serve is first."""
        self._next_look = 0.0
        self.mailbox = Mailbox(f"tcp-server-{number}", self._turn, poller=select.poll())

    def close(self) -> None:
        """Ends the thread, then the connections. Idempotent."""
        self.mailbox.close()
        for reader in list(self.readers):
            self._forget(reader)

    # The methods below run in this thread.

    def add(self, link: TcpLink) -> None:
        """Adds a new connection."""
        strangers = [reader for reader in self.readers if not reader.welcome]
        if len(strangers) >= MAX_STRANGERS:
            self._forget(strangers[0])
        reader = _Reader(link=link)
        self.readers.append(reader)
        self._watch(reader)

    def _turn(self) -> float | None:
        """Serves the next reader; returns the seconds until the next turn."""
        if self._queue:
            reader = self._queue.popleft()
            reader.queued = False
            if not reader.link.is_closed:
                with self._losing(reader):
                    self._serve(reader)
        pause_s = self._look()
        return 0.0 if self._queue else pause_s

    def _ready(self, reader: _Reader) -> None:
        """Handles an event: data has come, or the socket takes more, or the reader is gone."""
        if reader.link.is_closed:
            return
        if reader.full is not None:
            reader.full = None
            self._watch(reader)
            self._enqueue(reader)
        with self._losing(reader):
            if reader.refused is not None:
                reader.link.discard()
                return
            try:
                self._receive(reader)
            except ProtocolError as error:
                self._refuse_all(reader, error)
            if reader.link.has_pending:
                self.mailbox.post(functools.partial(self._ready, reader))

    def _receive(self, reader: _Reader) -> None:
        nbytes = 0
        for _ in range(_MESSAGES_PER_TURN):
            frame = reader.link.receive(MAX_REQUEST_BYTES if reader.welcome else MAX_HELLO_BYTES)
            if frame is None:
                return
            if isinstance(frame, tuple):
                raise ProtocolError(f"readers send messages; this says {frame[2]} bytes of a chunk")
            reader.heard = time.monotonic()
            self._handle(reader, decode(TCP_REQUESTS, frame, "request"))
            nbytes += len(frame)
            if nbytes >= TURN_BYTES:
                return

    def _handle(self, reader: _Reader, message: TcpRequest) -> None:
        if isinstance(message, Hello):
            self._check_hello(message)
            self._make_welcome(reader)
        elif not reader.welcome:
            raise ProtocolError(f"{type(message).__name__} came before Hello; connect again")
        elif isinstance(message, Cancel):
            plan = reader.reads.pop(message.transfer, None)
            # The turns are removed now, because a reader that takes nothing has no turn. Such a
            # reader would fill this process with the tables of cancelled reads.
            reader.turns = deque(turn for turn in reader.turns if turn[1] is not plan)
        else:
            try:
                plan = self._plan(reader, self.readers, message)
            except (ProtocolError, TransferError, NotReadyError) as error:
                reader.link.send(self._refusal(message.transfer, error))
                if reader.link.queued > MAX_ANSWERS:
                    raise ProtocolError(
                        f"{reader.link.queued} refusals were not taken, allowed are {MAX_ANSWERS}; "
                        "receive what is sent"
                    ) from error
            else:
                reader.reads[message.transfer] = plan
                reader.turns.append((message.transfer, plan, 0))
            self._enqueue(reader)

    def _make_welcome(self, reader: _Reader) -> None:
        others = [other for other in self.readers if other.welcome and other is not reader]
        if len(others) >= self._max_readers:
            self._forget(self._silent_longest(others))
        reader.welcome = True

    def _enqueue(self, reader: _Reader) -> None:
        if not (reader.queued or reader.full is not None or reader.link.is_closed):
            reader.queued = True
            self._queue.append(reader)

    def _serve(self, reader: _Reader) -> None:
        """Sends the rest of a chunk, then queued messages, then the next chunk."""
        link = reader.link
        if self._has_bytes(reader):
            sent = link.push(TURN_BYTES, waits=0 if self._queue else WAITS)
            if sent:
                reader.heard = time.monotonic()
            is_full = sent < TURN_BYTES and link.at_hand > 0
            if not link.at_hand:
                self._end(reader)
        else:
            is_full = link.queued > 0 and not link.left
        if is_full:
            reader.full = time.monotonic()
            if self._regions.packer is not None:  # other readers may soon need the reader's slots
                self._next_look = min(self._next_look, reader.full + HOLD_S)
            self._watch(reader)
        elif self._has_more(reader):
            self._enqueue(reader)
        elif reader.refused is not None and not reader.parts:
            link.hang_up()

    def _has_bytes(self, reader: _Reader) -> bool:
        """Whether bytes of a chunk can be sent now; begins the next part if needed."""
        link = reader.link
        if link.at_hand:
            return True
        if not link.left and not link.flush():
            return False
        self._take_turns(reader)
        if not (reader.parts and self._is_there(reader.parts[0])):
            return False
        part = reader.parts[0]
        if part.piece is None:
            header = part.header
            link.begin(header[2], self._regions.addresses, part.tables, header=header)
            return True
        if not link.left:
            link.begin_packed(part.header)
        link.supply(part.piece.address + part.sent, part.piece.nbytes - part.sent)
        return True

    def _has_more(self, reader: _Reader) -> bool:
        """Whether data can be sent to a reader now, without waiting for a piece."""
        link = reader.link
        if link.at_hand or (link.queued and not link.left):
            return True
        if self._regions.packer is None:
            return bool(reader.turns)
        self._take_turns(reader)
        return bool(reader.parts) and self._is_there(reader.parts[0])

    def _is_there(self, part: _Part) -> bool:
        """Whether the bytes of a part can be sent."""
        if self._regions.packer is None:
            return True
        return part.piece is not None and part.piece.address != 0

    def _take_turns(self, reader: _Reader) -> None:
        """Takes the next chunks, in turns over the reads of a reader, and starts to pack pieces."""
        packer = self._regions.packer
        while len(reader.parts) < (1 if packer is None else _PIECES_AHEAD):
            if not reader.uncut:
                if not reader.turns:
                    break
                transfer, plan, index = reader.turns.popleft()
                tables = plan.pack(index)
                pieces = [tables] if packer is None else packer.pieces(*tables)
                reader.uncut.extend(_Part(transfer, plan, index, piece) for piece in pieces)
                if index + 1 < len(plan.chunks):
                    reader.turns.append((transfer, plan, index + 1))
            reader.parts.append(reader.uncut.popleft())
        if packer is None:
            return
        for part in reader.parts:
            if part.piece is None and not part.is_copied:
                ready = functools.partial(
                    self.mailbox.post, functools.partial(self._packed, reader)
                )
                part.piece = PackedPiece(*part.tables, ready)
                packer.pack(part.piece, self._regions.addresses, reader.link.other)

    def _packed(self, reader: _Reader) -> None:
        """Handles a piece of a reader that was packed, or whose packing failed."""
        if reader.link.is_closed:
            return
        for part in reader.parts:
            if part.piece is not None and part.piece.error is not None:
                logger.warning("%s is served no more: %s", reader.link.other, part.piece.error)
                self._forget(reader)
                return
        self._enqueue(reader)

    def _end(self, reader: _Reader) -> None:
        """Handles the end of a part that was sent."""
        part = reader.parts.popleft()
        self._release(part)
        is_last = not reader.link.left and part.index + 1 == len(part.plan.chunks)
        if is_last and reader.reads.get(part.transfer) is part.plan:
            del reader.reads[part.transfer]

    def _release(self, part: _Part) -> None:
        if part.piece is not None and self._regions.packer is not None:
            self._regions.packer.release(part.piece)
            part.piece = None

    def _take_back(self, reader: _Reader) -> None:
        """Takes pieces back from a stuck reader, makes room for others, and cuts pieces again."""
        packer = self._regions.packer
        assert packer is not None  # the packer has packed the pieces
        copied: list[_Part] = []
        if reader.link.at_hand:
            if (sent := reader.link.take_back()) is None:
                return
            first = reader.parts[0]
            first.sent += sent
            if first.is_copied:
                copied.append(reader.parts.popleft())
            elif reader.link.at_hand:
                copied.append(replace(first, piece=None, is_copied=True))
        left: deque[_Part] = deque()
        for part in (*reader.parts, *reader.uncut):
            self._release(part)
            sent = part.sent
            for tables in packer.pieces(*part.tables, SLOW_BYTES):
                nbytes = num_bytes(*tables)
                if sent < nbytes:
                    left.append(_Part(part.transfer, part.plan, part.index, tables, sent=sent))
                sent = max(0, sent - nbytes)
        reader.parts, reader.uncut = deque(copied), left

    def _look(self) -> float | None:
        """Drops lost readers: nothing else detects the loss of a reader that takes nothing.

        Returns:
            Seconds until a reader may be lost; ``None`` without readers.
        """
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + SILENCE_S / 4
            for reader in list(self.readers):
                if reader.full is not None and any(part.piece for part in reader.parts):
                    if now - reader.full >= HOLD_S:
                        self._take_back(reader)
                    self._next_look = min(self._next_look, now + HOLD_S)
                if reader.refused is not None:
                    self._next_look = min(self._next_look, now + _LINGER_S)
                    silent = now - reader.refused >= _LINGER_S
                else:
                    heard = max(reader.heard, self.mailbox.awake_since)
                    # A reader without reads may be silent for any time.
                    waits = reader.reads or reader.link.left or not reader.welcome
                    if reader.parts and reader.full is None and not reader.link.at_hand:
                        waits = False  # this side waits, for a device
                    silent = bool(waits) and now - heard >= SILENCE_S
                if silent:
                    logger.debug("a reader was silent for too long")
                    self._forget(reader)
        return self._next_look - now if self.readers else None

    def _refuse_all(self, reader: _Reader, error: KVFerryError) -> None:
        """Ends a connection whose messages can no longer be understood."""
        reader.refused = time.monotonic()
        self._next_look = min(self._next_look, reader.refused + _LINGER_S)
        reader.reads.clear()
        reader.turns.clear()
        reader.link.send(self._refusal(None, error))
        self._enqueue(reader)

    def _watch(self, reader: _Reader) -> None:
        flags = reader.link.flags(is_full=reader.full is not None)
        self.mailbox.watch(reader.link.descriptor, functools.partial(self._ready, reader), flags)

    @contextlib.contextmanager
    def _losing(self, reader: _Reader) -> Iterator[None]:
        """Drops the reader if the block fails; other readers go on."""
        try:
            yield
        except PeerLostError as error:
            logger.debug("a reader is gone: %s", error)
            self._forget(reader)
        except Exception:  # a kvferry bug
            self._forget(reader)
            raise

    def _forget(self, reader: _Reader) -> None:
        if not reader.link.is_closed:
            self.readers.remove(reader)
            self.gone += 1
            reader.reads.clear()
            reader.turns.clear()
            for part in reader.parts:
                self._release(part)
            self.mailbox.unwatch(reader.link.descriptor)
            reader.link.close()
