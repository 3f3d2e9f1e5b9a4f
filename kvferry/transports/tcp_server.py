"""The serving side of the tcp transport: threads that send chunks to readers in turns.

Each connection belongs to one thread. What a reader does not take stays in the regions: TCP holds
back what its side has no room for, and its turn comes again when the socket takes more. So a reader
that stops reading holds one socket's buffers of ours and nobody else's turn.
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
from dataclasses import dataclass, field

from kvferry.decoding import decode
from kvferry.errors import KVFerryError, PeerLostError, ProtocolError, TransferError
from kvferry.mailbox import Mailbox
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
"""Seconds after which a reader that takes nothing of what it reads counts as hung."""
MAX_STRANGERS = 64
"""Connections of one thread that have not shown the token yet; beyond them the oldest goes."""
MAX_HELLO_BYTES = 1024
"""Largest message of a stranger."""
MAX_ANSWERS = 4 * MAX_READS
"""Refusals that wait for one reader to take them; it is refused altogether beyond them."""
TURN_BYTES = 4 << 20
"""Bytes that a reader is sent before it is another one's turn, however fast it takes them; and
bytes of its requests that are looked through."""
_MESSAGES_PER_TURN = 64
"""Requests of one reader that are handled before somebody is served."""
LOCAL_BYTES = 512 << 10
"""Bytes under way to a reader of this host, where nothing is for long: so much stays in the second
level of the cache until it is received (of 1 MiB here; the system takes twice as much memory for
it). Half or twice of it moves 0.8 and 0.9 of the bytes, what the system would choose 0.8."""
_LINGER_S = 1.0
"""How long a reader that was refused may take to leave: ending the connection at once would often
be quicker than the message that says why."""
_AGAIN_S = 1.0
"""Seconds until the next connection is accepted after one could not be."""


@dataclass(slots=True, eq=False)
class _Reader(ServedReader):
    """A reader, with its turns."""

    link: TcpLink
    welcome: bool = False
    """Whether it has shown the token."""
    turns: deque[tuple[int, ChunkPlan, int]] = field(default_factory=deque)
    """Reads that have chunks left, each with the next of them; whose turn it is stands first."""
    sending: tuple[int, ChunkPlan, int] | None = None
    """The chunk that is being sent."""
    queued: bool = False
    """Whether it stands in the queue of its thread."""
    full: bool = False
    """Whether its socket takes nothing for now."""
    refused: float | None = None
    """When it was refused altogether. Nothing that it says counts any more."""


class TcpServer:
    """Listens, and deals the connections to the threads that serve them."""

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
        """Binds and starts; with an ``identity`` (:func:`~kvferry.transports.tcp_tls.new_identity`)
        it encrypts.

        Raises:
            PortInUseError: ``port`` is taken.
            HostError: ``host`` is no address of this machine.
        """
        self._identity = identity
        self._listener = listen(host, port)
        self.port: int = self._listener.getsockname()[1]
        """The TCP port it listens on."""
        self.threads = [
            ServingThread(regions, token, max_readers, number, threads) for number in range(threads)
        ]
        for thread in self.threads:
            thread.mailbox.start()
        self._acceptor = self.threads[0].mailbox
        self._acceptor.post(self._listen)

    @property
    def refused(self) -> int:
        """Messages that were refused."""
        return sum(thread.refused for thread in self.threads)

    def close(self) -> None:
        """Ends the threads and frees the port. Idempotent."""
        for thread in self.threads:
            thread.close()
        self._listener.close()

    # What follows runs in the first thread.

    def _listen(self) -> None:
        self._acceptor.watch(self._listener.fileno(), self._accept)

    def _accept(self) -> None:
        try:
            tcp, (host, port, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:  # no descriptor is free, for example; it would be called again
            logger.warning("a connection cannot be accepted: %s", error.strerror)
            self._acceptor.unwatch(self._listener.fileno())
            again = threading.Timer(_AGAIN_S, self._acceptor.post, [self._listen])
            again.daemon = True
            again.start()
            return
        tcp.setblocking(False)
        # A reader that was stopped takes nothing for a while, and is not gone.
        keep_alive(tcp, SILENCE_S)
        if tcp.getsockname()[0] == host:
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BYTES)
        # In turns they would not have equal shares: connections end in any order.
        thread = min(self.threads, key=lambda each: each.dealt - each.gone)
        thread.dealt += 1
        other = f"{host}:{port}"
        link = TlsLink(tcp, other, self._identity) if self._identity else TcpLink(tcp, other)
        if thread.mailbox is self._acceptor:
            thread.add(link)
        else:  # which is closed after this one, so that no connection is forgotten
            thread.mailbox.post(functools.partial(thread.add, link))


class ServingThread(WireServer):
    """Some of the connections, and the thread that they belong to."""

    def __init__(
        self, regions: Regions, token: bytes, max_readers: int, number: int, threads: int
    ) -> None:
        super().__init__(regions, token, max_readers, threads)
        self.readers: list[_Reader] = []
        """Oldest first."""
        self.dealt = self.gone = 0
        """Connections that the acceptor gave it, and those of them that have ended."""
        self._queue: deque[_Reader] = deque()
        """Who has something to be sent and a socket that takes it; whose turn it is first."""
        self._next_look = 0.0
        self.mailbox = Mailbox(f"tcp-server-{number}", self._turn, poller=select.poll())

    def close(self) -> None:
        """Ends the thread, then the connections. Idempotent."""
        self.mailbox.close()
        for reader in self.readers:
            reader.link.close()
        self.readers.clear()

    # What follows runs in the thread.

    def add(self, link: TcpLink) -> None:
        """Takes in a connection that somebody has begun."""
        strangers = [reader for reader in self.readers if not reader.welcome]
        if len(strangers) >= MAX_STRANGERS:
            self._forget(strangers[0])
        reader = _Reader(link=link)
        self.readers.append(reader)
        self._watch(reader)

    def _turn(self) -> float | None:
        """Serves whose turn it is; seconds until the next one."""
        if self._queue:
            reader = self._queue.popleft()
            reader.queued = False
            if not reader.link.is_closed:
                with self._losing(reader):
                    self._serve(reader)
        pause_s = self._look()
        return 0.0 if self._queue else pause_s

    def _ready(self, reader: _Reader) -> None:
        """Something has come of a reader, or its socket takes more, or it is gone."""
        if reader.link.is_closed:
            return
        if reader.full:
            reader.full = False
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
            # Not left to its turn, which never comes for who takes nothing: he would fill our
            # memory with tables of reads that he cancels.
            reader.turns = deque(turn for turn in reader.turns if turn[1] is not plan)
        else:
            try:
                plan = self._plan(reader, self.readers, message)
            except (ProtocolError, TransferError) as error:
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
        if not (reader.queued or reader.full or reader.link.is_closed):
            reader.queued = True
            self._queue.append(reader)

    def _serve(self, reader: _Reader) -> None:
        """Sends on: the rest of a chunk, then what is queued, then the next chunk."""
        link = reader.link
        if link.left or (link.flush() and self._begin(reader)):
            sent = link.push(TURN_BYTES, waits=0 if self._queue else WAITS)
            if sent:
                reader.heard = time.monotonic()
            reader.full = sent < TURN_BYTES and link.left > 0
            if not link.left:
                self._end(reader)
        else:
            reader.full = link.queued > 0
        if reader.full:
            self._watch(reader)
        elif reader.sending is not None or reader.turns or link.queued > 0:
            self._enqueue(reader)
        elif reader.refused is not None:
            link.hang_up()

    def _begin(self, reader: _Reader) -> bool:
        """Begins with the next chunk; false if there is none."""
        if not reader.turns:
            return False
        reader.sending = transfer, plan, index = reader.turns.popleft()
        nbytes = int(plan.nbytes[index])
        header = transfer, index, nbytes
        reader.link.begin(nbytes, self._regions.addresses, plan.pack(index), header=header)
        return True

    def _end(self, reader: _Reader) -> None:
        """A chunk has left; reads of one reader take turns too."""
        assert reader.sending is not None
        transfer, plan, index = reader.sending
        reader.sending = None
        if reader.reads.get(transfer) is not plan:
            return
        if index + 1 < len(plan.chunks):
            reader.turns.append((transfer, plan, index + 1))
        else:
            del reader.reads[transfer]

    def _look(self) -> float | None:
        """Drops readers that are gone: of those that take nothing, nothing else would tell.

        Returns:
            Seconds until somebody may be gone; ``None`` if nobody is there.
        """
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + SILENCE_S / 4
            for reader in list(self.readers):
                if reader.refused is not None:
                    self._next_look = min(self._next_look, now + _LINGER_S)
                    silent = now - reader.refused >= _LINGER_S
                else:
                    heard = max(reader.heard, self.mailbox.awake_since)
                    # One that reads nothing now may be silent as long as it likes.
                    waits = reader.reads or reader.link.left or not reader.welcome
                    silent = bool(waits) and now - heard >= SILENCE_S
                if silent:
                    logger.debug("a reader was silent for too long")
                    self._forget(reader)
        return self._next_look - now if self.readers else None

    def _refuse_all(self, reader: _Reader, error: KVFerryError) -> None:
        """Ends a connection of which we know no more what it says."""
        reader.refused = time.monotonic()
        self._next_look = min(self._next_look, reader.refused + _LINGER_S)
        reader.reads.clear()
        reader.turns.clear()
        reader.link.send(self._refusal(None, error))
        self._enqueue(reader)

    def _watch(self, reader: _Reader) -> None:
        flags = reader.link.flags(is_full=reader.full)
        self.mailbox.watch(reader.link.descriptor, functools.partial(self._ready, reader), flags)

    @contextlib.contextmanager
    def _losing(self, reader: _Reader) -> Iterator[None]:
        """Whatever goes wrong in the block, the others go on."""
        try:
            yield
        except PeerLostError as error:
            logger.debug("a reader is gone: %s", error)
            self._forget(reader)
        except Exception:  # a bug of ours
            self._forget(reader)
            raise

    def _forget(self, reader: _Reader) -> None:
        if not reader.link.is_closed:
            self.readers.remove(reader)
            self.gone += 1
            reader.reads.clear()
            reader.turns.clear()
            self.mailbox.unwatch(reader.link.descriptor)
            reader.link.close()
