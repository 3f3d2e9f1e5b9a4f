"""The reading side of the tcp transport: one thread that owns the sockets, movers that unpack.

Only the movers write the target memory, each chunk inside its transfer's fence
(:class:`~kvferry.transports.movers.Landing`). A chunk of a transfer that has ended, or that we
never asked for, is dropped: what a peer sends late cannot land.
"""

import contextlib
import functools
import logging
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.errors import (
    DecodeError,
    KVFerryError,
    PeerLostError,
    ProtocolError,
    StalledError,
    TransferError,
)
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import Peer, TransferState
from kvferry.transports.movers import Landing, MoverPool
from kvferry.transports.regions import Regions
from kvferry.transports.tcp_chunks import ChunkPlan, plan_chunks
from kvferry.transports.tcp_server import MAX_READS
from kvferry.transports.tcp_wire import (
    CHUNK_DTYPE,
    MAX_CHUNK_BYTES,
    MAX_REQUEST_BYTES,
    SOURCE_RUN_DTYPE,
    SOURCE_TILE_DTYPE,
    STEPS_VERSION,
    VERSION_MAX,
    VERSION_MIN,
    Cancel,
    Chunk,
    Endpoint,
    Hello,
    Read,
    Refused,
    Taken,
    ToServer,
    Welcome,
    decode_reply,
    encode,
    encode_steps,
    encode_table,
    refused_error,
)
from kvferry.transports.zmq_seam import tcp_address, zmq_errors

logger = logging.getLogger(__name__)

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_MESSAGES_PER_TURN = 32
_LONGEST_MS = 2**31 - 1
"""The longest timeout that a ZeroMQ socket takes."""
_LOST_EVENTS = (
    zmq.EVENT_CLOSED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


@dataclass(slots=True, eq=False)
class TcpRead:
    """One read: its fence, its tables, and which chunks have come."""

    tiles: Tiles
    runs: Runs
    landing: Landing
    number: int = -1
    """The id under which the server knows it; -1 until it was sent."""
    plan: ChunkPlan | None = None
    missing: set[int] = field(default_factory=set)
    """Chunks that have not come yet."""


class TcpPeer(Peer):
    """A connection to one serving rank. All but ``close`` belongs to the reader's thread."""

    def __init__(self, endpoint: Endpoint, reader: "TcpReader", socket: Socket) -> None:
        self.endpoint = endpoint
        self.region_bytes = endpoint.regions
        """By region id; 0 where nothing is served."""
        self.socket = socket
        self.monitor: Socket = socket.get_monitor_socket(_LOST_EVENTS)
        self.reads: dict[int, TcpRead] = {}
        """Reads that the server knows."""
        self.waiting: deque[TcpRead] = deque()
        """Reads kept back: the server takes :data:`MAX_READS` at a time."""
        self.next_number = 0
        self.window_bytes = 0
        """The server's window; 0 until it has welcomed us."""
        self.progressed = time.monotonic()
        """When anything last came from it."""
        self.lost: KVFerryError | None = None
        """Why it is gone, once it is."""
        self._reader = reader
        self._lock = threading.Lock()
        self._taken_bytes = 0
        self._taken_chunks = 0

    @property
    def address(self) -> str:
        """For messages."""
        return f"{self.endpoint.host}:{self.endpoint.port}"

    def close(self) -> None:
        """See :meth:`Peer.close`. Returns at once; the reads end in ``poll``."""
        error = PeerLostError(f"the connection to {self.address} was closed on this side")
        self._reader.post(lambda: self._reader.lose(self, error))

    def take(self, nbytes: int) -> None:
        """A chunk was unpacked or dropped; any thread."""
        with self._lock:
            self._taken_bytes += nbytes
            self._taken_chunks += 1
            due = self._taken_bytes * 4 >= self.window_bytes or self._taken_chunks >= 16
        if due:
            self._reader.post(lambda: self._reader.send_taken(self))

    def drain_taken(self) -> tuple[int, int]:
        """Bytes and chunks taken since the last call."""
        with self._lock:
            drained = (self._taken_bytes, self._taken_chunks)
            self._taken_bytes = self._taken_chunks = 0
        return drained


class TcpReader:
    """Owns the connections to serving ranks, in a thread of its own."""

    def __init__(
        self,
        context: Context,
        regions: Regions,
        pool: MoverPool,
        *,
        chunk_bytes: int,
        window_bytes: int,
        stall_timeout_s: float,
    ) -> None:
        self._context = context
        self._regions = regions
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._window_bytes = window_bytes
        self._stall_timeout_s = stall_timeout_s
        self._peers: list[TcpPeer] = []
        self._poller = zmq.Poller()
        self._handlers: dict[object, Callable[[], object]] = {}
        self._posted: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._wake_lock = threading.Lock()
        self._closing = False
        self._poller.register(self._wake, zmq.POLLIN)
        self._handlers[self._wake] = self._run_posted
        self._thread = threading.Thread(target=self._run, name="kvferry-tcp-reader", daemon=True)
        self._thread.start()

    # Called from any thread.

    def post(self, task: Callable[[], object]) -> None:
        """Has the reader's thread call ``task``. After ``close`` nothing happens."""
        self._posted.put(task)
        with self._wake_lock:  # once closed, the descriptor may be somebody else's
            if self._wake >= 0:
                os.eventfd_write(self._wake, 1)

    def connect(self, endpoint: Endpoint) -> TcpPeer:
        """Begins a connection; returns at once.

        Raises:
            PeerLostError, HostError: see the message.
        """
        address = tcp_address(endpoint.host, endpoint.port)
        with zmq_errors(f"cannot connect to {address}"):
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.ipv6 = ":" in endpoint.host
            socket.maxmsgsize = MAX_CHUNK_BYTES
            socket.rcvhwm = 0  # the window bounds what is under way
            socket.reconnect_ivl = -1  # a lost rank is lost: another start has other memory
            socket.connect_timeout = min(max(1, int(self._stall_timeout_s * 1000)), _LONGEST_MS)
            socket.tcp_keepalive = 1
            peer = TcpPeer(endpoint, self, socket)
            try:
                socket.connect(address)
            except zmq.ZMQError:
                peer.monitor.close()
                socket.close()
                raise
        self.post(lambda: self._add(peer))
        return peer

    def start(self, peer: TcpPeer, read: TcpRead) -> None:
        """Begins a read."""
        self.post(lambda: self._start(peer, read))

    def end(self, peer: TcpPeer, read: TcpRead, state: TransferState) -> None:
        """A read has ended; its place at the server is free."""
        self.post(lambda: self._end(peer, read, state))

    def close(self) -> None:
        """Ends the thread and the connections. Idempotent."""
        if self._closing:
            return
        self._closing = True
        self.post(lambda: None)
        self._thread.join()
        with self._wake_lock:
            os.close(self._wake)
            self._wake = -1

    # What follows runs in the reader's thread.

    def send_taken(self, peer: TcpPeer) -> None:
        """Opens the server's window again by what was taken."""
        nbytes, chunks = peer.drain_taken()
        if chunks and peer.lost is None:
            self._send(peer, Taken(nbytes, chunks))

    def lose(self, peer: TcpPeer, error: KVFerryError) -> None:
        """Fails everything that runs on the connection, and ends it."""
        if peer.lost is not None:
            return
        peer.lost = error
        self._peers.remove(peer)
        for socket in (peer.socket, peer.monitor):
            self._poller.unregister(socket)
            del self._handlers[socket]
        with zmq_errors(f"cannot close the connection to {peer.address}"):
            peer.socket.disable_monitor()
            peer.monitor.close()
            peer.socket.close()
        reads = [*peer.reads.values(), *peer.waiting]
        peer.reads.clear()
        peer.waiting.clear()
        for read in reads:
            read.landing.fail(error)

    def _run(self) -> None:
        tick_s = min(1.0, max(0.02, self._stall_timeout_s / 8))
        checked = time.monotonic()
        while not self._closing:
            try:
                for socket, _ in self._poller.poll(int(tick_s * 1000)):
                    handler = self._handlers.get(socket)
                    if handler is not None:
                        handler()
                if time.monotonic() - checked >= tick_s:
                    checked = time.monotonic()
                    self._fail_stalled(checked)
            except Exception:  # a bug must not end the thread that every read needs
                logger.exception("the tcp reader failed at a message; it goes on")
        self._run_posted()
        for peer in list(self._peers):
            self.lose(peer, PeerLostError("the transport was closed"))

    def _run_posted(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)
        while not self._posted.empty():  # nobody else takes from it
            self._posted.get()()

    def _add(self, peer: TcpPeer) -> None:
        self._peers.append(peer)
        self._handlers[peer.socket] = functools.partial(self._receive, peer)
        self._handlers[peer.monitor] = functools.partial(self._watch, peer)
        for socket in (peer.socket, peer.monitor):
            self._poller.register(socket, zmq.POLLIN)
        self._send(peer, Hello(peer.endpoint.token, VERSION_MIN, VERSION_MAX, self._window_bytes))

    def _start(self, peer: TcpPeer, read: TcpRead) -> None:
        if peer.lost is not None:
            read.landing.fail(PeerLostError(f"the peer was lost before: {peer.lost}"))
        elif len(peer.reads) >= MAX_READS:
            peer.waiting.append(read)
        elif not read.landing.stopped:
            self._request(peer, read)

    def _request(self, peer: TcpPeer, read: TcpRead) -> None:
        try:
            plan = plan_chunks(read.tiles, read.runs, self._chunk_bytes)
            message = Read(
                peer.next_number,
                encode_table(plan.tiles, SOURCE_TILE_DTYPE),
                encode_table(plan.runs, SOURCE_RUN_DTYPE),
                encode_table(plan.chunks, CHUNK_DTYPE),
                encode_steps(plan.runs),
            )
            if message.steps and peer.endpoint.version_max < STEPS_VERSION:
                raise TransferError(
                    f"{peer.address} speaks up to version {peer.endpoint.version_max} of the tcp "
                    f"protocol, but interleaved tokens need version {STEPS_VERSION}; upgrade it"
                )
            size = len(message.tiles) + len(message.runs) + len(message.chunks)
            size += len(message.steps)
            if size > MAX_REQUEST_BYTES - 1024:
                raise TransferError(
                    f"the tables of this read take {size} bytes, one request {MAX_REQUEST_BYTES}; "
                    "read in several parts"
                )
        except Exception as error:  # of ours or a bug of ours: this read ends, the others go on
            if not isinstance(error, KVFerryError):
                logger.exception("a read cannot be planned")
                error = TransferError(f"the read cannot be planned: {error!r}")
            read.landing.fail(error)
            return
        read.plan, read.number = plan, peer.next_number
        read.missing = set(range(len(plan.chunks)))
        read.landing.transfer.progressed = time.monotonic()
        peer.reads[read.number] = read
        peer.next_number += 1
        self._send(peer, message)

    def _end(self, peer: TcpPeer, read: TcpRead, state: TransferState) -> None:
        if peer.lost is not None:
            return
        if peer.reads.pop(read.number, None) is not None and state is not TransferState.DONE:
            self._send(peer, Cancel(read.number))
        self.send_taken(peer)
        while peer.waiting and len(peer.reads) < MAX_READS and peer.lost is None:
            self._start(peer, peer.waiting.popleft())

    def _send(self, peer: TcpPeer, message: ToServer) -> None:
        try:
            peer.socket.send(encode(message), zmq.NOBLOCK)
        except zmq.ZMQError as error:
            self.lose(peer, PeerLostError(f"{peer.address} takes no messages: {error.strerror}"))

    def _receive(self, peer: TcpPeer) -> None:
        for _ in range(_MESSAGES_PER_TURN):
            if peer.lost is not None:
                return
            try:
                header, *frames = peer.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer.progressed = time.monotonic()
            try:
                self._handle(peer, header.buffer, frames)
            except ProtocolError as error:
                # We cannot know which read it was for, nor what else it says wrongly.
                self.lose(peer, error)

    def _handle(self, peer: TcpPeer, header: memoryview, frames: list[zmq.Frame]) -> None:
        message = decode_reply(header)
        if isinstance(message, Chunk):
            if len(frames) != 1:
                raise DecodeError(f"a chunk from {peer.address} has {len(frames)} frames, not 1")
            self._chunk(peer, message, frames[0])
        elif isinstance(message, Welcome):
            peer.window_bytes = message.window_bytes
        else:
            self._refused(peer, message)

    def _chunk(self, peer: TcpPeer, message: Chunk, frame: zmq.Frame) -> None:
        nbytes = len(frame.buffer)
        read = peer.reads.get(message.transfer)
        if read is None:
            if message.transfer >= peer.next_number or message.transfer < 0:
                raise DecodeError(f"{peer.address} sent a chunk of a read that we never asked for")
            peer.take(nbytes)  # of a read that has ended
            return
        assert read.plan is not None
        if message.chunk not in read.missing:
            raise DecodeError(f"{peer.address} sent chunk {message.chunk}, which is not missing")
        if nbytes != read.plan.nbytes[message.chunk]:
            raise DecodeError(
                f"{peer.address} sent {nbytes} bytes for a chunk of "
                f"{read.plan.nbytes[message.chunk]}"
            )
        read.missing.discard(message.chunk)
        self._pool.submit(functools.partial(self._land, peer, read, message.chunk, frame))

    def _land(self, peer: TcpPeer, read: TcpRead, index: int, frame: zmq.Frame) -> None:
        """Unpacks one chunk, on a mover."""
        data = np.frombuffer(frame.buffer, dtype=np.uint8)
        assert read.plan is not None
        if not read.landing.enter():
            peer.take(data.nbytes)
            return
        nbytes, segments = 0, 0
        try:
            segments = copy_tiles(
                [data.ctypes.data], self._regions.addresses, *read.plan.unpack(index)
            )
            nbytes = data.nbytes
        except Exception as error:  # a bug of ours: this read fails, the mover goes on
            logger.exception("unpacking failed")
            read.landing.fail(TransferError(f"unpacking failed: {error!r}"))
        finally:
            peer.take(data.nbytes)  # first, so that the end of the read reports all of it
            read.landing.leave(nbytes, segments)

    def _refused(self, peer: TcpPeer, message: Refused) -> None:
        error = refused_error(message, peer.address)
        if message.transfer is None:
            self.lose(peer, PeerLostError(f"{peer.address} ended the connection: {message.reason}"))
        elif message.transfer in peer.reads:
            peer.reads.pop(message.transfer).landing.fail(error)

    def _watch(self, peer: TcpPeer) -> None:
        try:
            recv_monitor_message(peer.monitor, zmq.NOBLOCK)
        except zmq.Again:
            return
        # Any event that we asked for means that the connection is no more.
        self.lose(peer, PeerLostError(f"the connection to {peer.address} is gone"))

    def _fail_stalled(self, now: float) -> None:
        for peer in list(self._peers):
            for read in [*peer.reads.values(), *peer.waiting]:
                # A read that waits for its turn behind others of this peer is not stalled.
                since = now - max(peer.progressed, read.landing.transfer.progressed)
                if since > self._stall_timeout_s:
                    read.landing.fail(
                        StalledError(
                            f"{peer.address} has sent nothing for {since:.1f} s "
                            f"(stall_timeout_s: {self._stall_timeout_s})"
                        )
                    )
