"""The serving side of the tcp transport: one thread, one ROUTER socket, readers in turns.

A reader's window bounds what is on its way to it, so that one that stops reading holds a few
megabytes of ours and nobody else's turn. Chunks are packed into pooled buffers and handed to
ZeroMQ without a copy; a buffer is used again once ZeroMQ has let go of it.
"""

import hmac
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np
import zmq

from kvferry.errors import BoundsError, DecodeError, KVFerryError, ProtocolError, TransferError
from kvferry.layouts.copier import copy_tiles
from kvferry.transports.base import ByteArray
from kvferry.transports.regions import Regions
from kvferry.transports.tcp_chunks import ChunkPlan, check_chunks
from kvferry.transports.tcp_wire import (
    MAX_REQUEST_BYTES,
    VERSION_MAX,
    VERSION_MIN,
    Cancel,
    Chunk,
    Hello,
    Read,
    Refused,
    Taken,
    Welcome,
    decode_read,
    decode_request,
    encode,
)
from kvferry.zeromq import listen

logger = logging.getLogger(__name__)

MAX_READS = 64
"""Reads under way per reader; a reader keeps back what is more."""
MAX_CHUNKS_AHEAD = 64
"""Chunks on their way to one reader, whatever their size."""
_MESSAGES_PER_TURN = 64
"""Requests handled before the next chunk is served."""
_IDLE_MS = 1000


@dataclass(slots=True, eq=False)
class _ServedRead:
    """A read under way."""

    plan: ChunkPlan
    next_chunk: int = 0


@dataclass(slots=True, eq=False)
class _Reader:
    """One connection of a reader."""

    identity: bytes
    window_bytes: int
    reads: dict[int, _ServedRead] = field(default_factory=dict)
    turns: deque[int] = field(default_factory=deque)
    """Reads that have chunks left, next first."""
    bytes_ahead: int = 0
    """Bytes sent and not yet taken."""
    chunks_ahead: int = 0
    queued: bool = False
    """Whether it stands in the server's queue."""
    heard: float = field(default_factory=time.monotonic)

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


class TcpServer:
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
        self.refused = 0
        """Messages that were refused."""
        self._regions = regions
        self._token = token
        self._window_bytes = window_bytes
        self._max_readers = max_readers
        self._readers: dict[bytes, _Reader] = {}
        self._queue: deque[_Reader] = deque()
        self._buffers = _Buffers(chunk_bytes, keep=2 * window_bytes // chunk_bytes + 1)
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._socket = context.socket(zmq.ROUTER)
        self._socket.linger = 0
        self._socket.router_mandatory = True
        self._socket.maxmsgsize = MAX_REQUEST_BYTES
        self._socket.tcp_keepalive = 1
        try:
            self.port = listen(self._socket, host, port, "port")
            """The TCP port it listens on."""
        except KVFerryError:
            self._socket.close()
            os.close(self._wake)
            raise
        self._thread = threading.Thread(target=self._run, name="kvferry-tcp-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and frees the port. Idempotent."""
        if self._closing:
            return
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        try:
            while not self._closing:
                try:
                    if poller.poll(0 if self._queue else _IDLE_MS):
                        self._receive()
                    self._serve_one()
                except Exception:  # a bug must not end the thread that every reader needs
                    logger.exception("the tcp server failed at a message; it goes on")
        finally:
            self._socket.close()

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
        message = decode_request(frames[0])
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
        if not hmac.compare_digest(hello.token, self._token):
            raise ProtocolError(
                "the endpoint is of another rank, or of an earlier start of this one"
            )
        if hello.version_min > VERSION_MAX or hello.version_max < VERSION_MIN:
            raise ProtocolError(
                f"the reader speaks versions {hello.version_min} to {hello.version_max}, "
                f"this server {VERSION_MIN} to {VERSION_MAX}; upgrade the older side"
            )
        if hello.window_bytes < 1:
            raise BoundsError(f"window_bytes: {hello.window_bytes} is less than 1")
        if identity not in self._readers and len(self._readers) >= self._max_readers:
            # ZeroMQ does not tell us of readers that are gone, so the one silent longest goes.
            idle = min(self._readers.values(), key=lambda known: (bool(known.reads), known.heard))
            self._forget(idle)
        window = min(hello.window_bytes, self._window_bytes)
        self._readers[identity] = _Reader(identity, window)
        self._send(identity, encode(Welcome(min(hello.version_max, VERSION_MAX), window)))

    def _start(self, reader: _Reader, message: Read) -> None:
        if message.transfer in reader.reads:
            raise ProtocolError(f"transfer {message.transfer} is under way already")
        if len(reader.reads) >= MAX_READS:
            raise TransferError(f"{MAX_READS} reads of this reader are under way already")
        tiles, runs, chunks = decode_read(message)
        plan = check_chunks(tiles, runs, chunks, self._regions.served_nbytes)
        reader.reads[message.transfer] = _ServedRead(plan)
        reader.turns.append(message.transfer)
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

    def _serve_one(self) -> None:
        """Sends the next chunk of the reader whose turn it is."""
        if not self._queue:
            return
        reader = self._queue.popleft()
        reader.queued = False
        while reader.may_be_served:
            transfer = reader.turns.popleft()
            read = reader.reads.get(transfer)
            if read is None:  # cancelled
                continue
            sent = self._send_chunk(reader, transfer, read)
            if read.next_chunk < len(read.plan.chunks):
                reader.turns.append(transfer)
            else:
                del reader.reads[transfer]
            if sent:
                self._enqueue(reader)
            else:
                self._forget(reader)
            return

    def _send_chunk(self, reader: _Reader, transfer: int, read: _ServedRead) -> bool:
        index = read.next_chunk
        read.next_chunk += 1
        nbytes = int(read.plan.nbytes[index])
        buffer = self._buffers.take(nbytes)
        copy_tiles(self._regions.addresses, [buffer.ctypes.data], *read.plan.pack(index))
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
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th …: no flood of log lines
            logger.warning("refused message number %d: %s", self.refused, error)
        self._send(identity, encode(Refused(transfer, type(error).__name__, str(error)[:2000])))

    def _forget(self, reader: _Reader) -> None:
        reader.reads.clear()
        reader.turns.clear()
        self._readers.pop(reader.identity, None)
