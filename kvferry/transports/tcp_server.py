"""The serving side of the tcp transport: one thread, one ROUTER socket, readers in turns.

A reader's window bounds what is on its way to it, so that one that stops reading holds a few
megabytes of ours and nobody else's turn. Chunks are packed into pooled buffers and handed to
ZeroMQ without a copy; a buffer is used again once ZeroMQ has let go of it.
"""

import logging
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import zmq

from kvferry.decoding import decode
from kvferry.errors import BoundsError, DecodeError, KVFerryError, ProtocolError, TransferError
from kvferry.layouts.copier import copy_tiles
from kvferry.mailbox import Mailbox
from kvferry.transports.base import ByteArray
from kvferry.transports.regions import Regions
from kvferry.transports.wire import ServedReader, WireServer
from kvferry.transports.wire_chunks import ChunkPlan
from kvferry.transports.wire_messages import (
    MAX_REQUEST_BYTES,
    TCP_REQUESTS,
    VERSION_MAX,
    Cancel,
    Chunk,
    Hello,
    Read,
    Taken,
    Welcome,
    encode,
)
from kvferry.zeromq import keep_alive, listen

logger = logging.getLogger(__name__)

MAX_CHUNKS_AHEAD = 64
"""Chunks on their way to one reader, whatever their size."""
SILENCE_S = 120.0
"""Seconds after which a reader that takes nothing of what it reads counts as hung."""
_MESSAGES_PER_TURN = 64
"""Requests handled before the next chunk is served."""


@dataclass(slots=True, eq=False)
class _Reader(ServedReader):
    """A reader, with its window and its turns."""

    identity: bytes
    window_bytes: int
    turns: deque[tuple[int, ChunkPlan, int]] = field(default_factory=deque)
    """Reads that have chunks left, each with the next of them; whose turn it is stands first."""
    bytes_ahead: int = 0
    """Bytes sent and not yet taken."""
    chunks_ahead: int = 0
    queued: bool = False
    """Whether it stands in the server's queue."""

    @property
    def may_be_served(self) -> bool:
        """Whether there is something to send and room in the window."""
        return (
            bool(self.turns)
            and self.bytes_ahead < self.window_bytes
            and self.chunks_ahead < MAX_CHUNKS_AHEAD
        )


class _Buffers:
    """Send buffers, used again once ZeroMQ is done with them."""

    def __init__(self, nbytes: int, keep: int) -> None:
        self._nbytes = nbytes
        self._keep = keep
        self._free: list[ByteArray] = []
        self._away: list[tuple[ByteArray, zmq.MessageTracker]] = []

    def take(self, nbytes: int) -> ByteArray:
        """A buffer of at least ``nbytes``; the one used last, which the caches still hold."""
        if nbytes > self._nbytes:
            return np.empty(nbytes, dtype=np.uint8)
        if not self._free:
            away, self._away = self._away, []
            for buffer, tracker in away:
                if tracker.done:
                    self._free.append(buffer)
                else:
                    self._away.append((buffer, tracker))
            del self._free[self._keep :]
        return self._free.pop() if self._free else np.empty(self._nbytes, dtype=np.uint8)

    def give(self, buffer: ByteArray, tracker: zmq.MessageTracker) -> None:
        """The buffer is on its way."""
        if buffer.nbytes == self._nbytes:
            self._away.append((buffer, tracker))


class TcpServer(WireServer):
    """Serves regions to readers from a thread of its own."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        regions: Regions,
        *,
        host: str,
        port: int,
        token: bytes,
        chunk_bytes: int,
        window_bytes: int,
        max_readers: int,
    ) -> None:
        """Binds and starts.

        Raises:
            PortInUseError: ``port`` is taken.
            HostError: ``host`` is no address of this machine.
        """
        super().__init__(regions, token, max_readers)
        self._window_bytes = window_bytes
        self._readers: dict[bytes, _Reader] = {}
        self._queue: deque[_Reader] = deque()
        self._next_look = 0.0
        self._buffers = _Buffers(chunk_bytes, keep=2 * window_bytes // chunk_bytes + 1)
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = MAX_REQUEST_BYTES
        # A reader that was stopped takes nothing for a while, and is not gone.
        keep_alive(self._socket, SILENCE_S)
        try:
            self.port = listen(self._socket, host, port, "port")
            """The TCP port it listens on."""
        except KVFerryError:
            self._socket.close()
            raise
        self._mailbox = Mailbox("tcp-server", self._serve_one, poller=zmq.Poller())
        self._mailbox.watch(self._socket, self._receive)
        self._mailbox.start()

    def close(self) -> None:
        """Ends the thread and frees the port. Idempotent."""
        self._mailbox.close()
        self._socket.close()  # its thread has ended

    # What follows runs in the server's thread.

    def _receive(self) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                self._handle(identity, frames)
            except ProtocolError as error:
                self._refuse(identity, None, error)

    def _handle(self, identity: bytes, frames: list[bytes]) -> None:
        if len(frames) != 1:
            raise DecodeError(f"a request is one frame, got {len(frames)}")
        message = decode(TCP_REQUESTS, frames[0], "request")
        if isinstance(message, Hello):
            self._welcome(identity, message)
            return
        reader = self._readers.get(identity)
        if reader is None:
            raise ProtocolError(f"{type(message).__name__} came before Hello; connect again")
        reader.heard = time.monotonic()
        if isinstance(message, Read):
            try:
                self._start(reader, message)
            except (ProtocolError, TransferError) as error:
                self._refuse(identity, message.transfer, error)
        elif isinstance(message, Cancel):
            reader.reads.pop(message.transfer, None)
        else:
            self._taken(reader, message)

    def _welcome(self, identity: bytes, hello: Hello) -> None:
        self._check_hello(hello)
        if hello.window_bytes < 1:
            raise BoundsError(f"window_bytes: {hello.window_bytes} is less than 1")
        if identity not in self._readers and len(self._readers) >= self._max_readers:
            # ZeroMQ does not tell us of readers that are gone, so the one silent longest goes.
            self._forget(self._silent_longest(self._readers.values()))
        window = min(hello.window_bytes, self._window_bytes)
        self._readers[identity] = _Reader(identity, window)
        self._send(identity, encode(Welcome(min(hello.version_max, VERSION_MAX), window)))

    def _start(self, reader: _Reader, message: Read) -> None:
        plan = self._plan(reader, self._readers.values(), message)
        reader.reads[message.transfer] = plan
        reader.turns.append((message.transfer, plan, 0))
        self._enqueue(reader)

    def _taken(self, reader: _Reader, message: Taken) -> None:
        bytes_ahead = reader.bytes_ahead - message.nbytes
        chunks_ahead = reader.chunks_ahead - message.chunks
        if message.nbytes < 0 or message.chunks < 0 or bytes_ahead < 0 or chunks_ahead < 0:
            raise BoundsError(
                f"taken: {message.nbytes} bytes in {message.chunks} chunks, but "
                f"{reader.bytes_ahead} in {reader.chunks_ahead} were on their way"
            )
        reader.bytes_ahead, reader.chunks_ahead = bytes_ahead, chunks_ahead
        self._enqueue(reader)

    def _enqueue(self, reader: _Reader) -> None:
        if not reader.queued and reader.may_be_served:
            reader.queued = True
            self._queue.append(reader)

    def _serve_one(self) -> float | None:
        """Sends the next chunk of the reader whose turn it is; 0 if there are more."""
        if not self._queue:
            return self._drop_silent()
        reader = self._queue.popleft()
        reader.queued = False
        while reader.may_be_served:
            transfer, plan, index = reader.turns.popleft()
            if reader.reads.get(transfer) is not plan:  # cancelled
                continue
            sent = self._send_chunk(reader, transfer, plan, index)
            if index + 1 < len(plan.chunks):
                reader.turns.append((transfer, plan, index + 1))
            else:
                del reader.reads[transfer]
            if sent:
                self._enqueue(reader)
            else:
                self._forget(reader)
            break
        return 0.0 if self._queue else None

    def _drop_silent(self) -> float | None:
        """Drops readers that are gone: of those whose window is full, nothing else would tell.

        Returns:
            Seconds until somebody may be gone; ``None`` if nobody reads.
        """
        now = time.monotonic()
        if now >= self._next_look:
            self._next_look = now + SILENCE_S / 4
            for reader in list(self._readers.values()):
                heard = max(reader.heard, self._mailbox.awake_since)
                if reader.reads and now - heard >= SILENCE_S:
                    lost = TransferError(f"this reader was silent for {SILENCE_S:g} s")
                    self._refuse(reader.identity, None, lost)
                    self._forget(reader)
        return self._next_look - now if self._readers else None

    def _send_chunk(self, reader: _Reader, transfer: int, plan: ChunkPlan, index: int) -> bool:
        nbytes = int(plan.nbytes[index])
        buffer = self._buffers.take(nbytes)
        copy_tiles(self._regions.addresses, [buffer.ctypes.data], *plan.pack(index))
        reader.bytes_ahead += nbytes
        reader.chunks_ahead += 1
        if not self._send(reader.identity, encode(Chunk(transfer, index)), more=True):
            return False
        tracker = self._socket.send(buffer[:nbytes].data, copy=False, track=True)
        assert tracker is not None
        self._buffers.give(buffer, tracker)
        return True

    def _send(self, identity: bytes, frame: bytes, *, more: bool = False) -> bool:
        """Sends one frame; false if the reader is gone or reads nothing any more."""
        try:
            self._socket.send(identity, zmq.SNDMORE | zmq.NOBLOCK)
            self._socket.send(frame, zmq.SNDMORE if more else 0)
        except zmq.ZMQError as error:
            logger.debug("a reader is gone: %s", error)
            return False
        return True

    def _refuse(self, identity: bytes, transfer: int | None, error: KVFerryError) -> None:
        self._send(identity, self._refusal(transfer, error))

    def _forget(self, reader: _Reader) -> None:
        reader.reads.clear()
        reader.turns.clear()
        self._readers.pop(reader.identity, None)
