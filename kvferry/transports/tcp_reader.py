"""The reading side of the tcp transport: one thread that owns the sockets, movers that unpack.

A chunk of a transfer that has ended, or that we never asked for, is dropped
(:mod:`~kvferry.transports.wire_reader` says why nothing can land late).
"""

import functools
import logging
import threading
import time

import zmq
from zmq.utils.monitor import recv_monitor_message

from kvferry.decoding import decode
from kvferry.errors import DecodeError, PeerLostError, ProtocolError, TransferError
from kvferry.mailbox import Mailbox
from kvferry.transports.base import TransferState
from kvferry.transports.wire_chunks import ChunkPlan
from kvferry.transports.wire_messages import (
    MAX_CHUNK_BYTES,
    MAX_REQUEST_BYTES,
    STEPS_VERSION,
    TCP_REPLIES,
    Cancel,
    Chunk,
    Endpoint,
    Read,
    Taken,
    TcpRequest,
    Welcome,
    encode,
)
from kvferry.transports.wire_reader import ReadingSide, WirePeer, WireRead, WireReader
from kvferry.zeromq import (
    CONNECTION_LOST,
    HEARTBEAT_S,
    Context,
    Socket,
    connect,
    keep_alive,
    resolve,
    tcp_address,
    zmq_errors,
)

logger = logging.getLogger(__name__)

GONE_S = 3 * HEARTBEAT_S
"""Seconds without a sign of the source's host after which its connection is lost."""
_MESSAGES_PER_TURN = 32


class TcpPeer(WirePeer):
    """A connection with the sockets that it takes, and the window of its server."""

    def __init__(self, endpoint: Endpoint, reader: "TcpReader", socket: Socket) -> None:
        super().__init__(endpoint, reader)
        self.socket = socket
        self.monitor: Socket = socket.get_monitor_socket(sum(CONNECTION_LOST))
        self.window_bytes = 0
        """The server's window; 0 until it has welcomed us."""
        self._reader: TcpReader = reader
        self._lock = threading.Lock()
        self._taken_bytes = 0
        self._taken_chunks = 0

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


class TcpReader(WireReader[TcpPeer]):
    """The connections, and the thread that they belong to."""

    peer_class = TcpPeer

    def __init__(self, context: Context, side: ReadingSide) -> None:
        mailbox = Mailbox("tcp-reader", self.fail_stalled, poller=zmq.Poller())
        super().__init__(mailbox, side)
        self._context = context
        mailbox.start()

    # Called from any thread.

    def connect(self, endpoint: Endpoint) -> TcpPeer:
        """Begins a connection; returns at once, or when the endpoint's name is resolved.

        Raises:
            PeerLostError, HostError: see the message.
        """
        host = resolve(endpoint.host)
        address = tcp_address(endpoint.host, endpoint.port)
        with zmq_errors(f"cannot connect to {address}"):
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.maxmsgsize = MAX_CHUNK_BYTES
            socket.rcvhwm = 0  # the window bounds what is under way
            socket.reconnect_ivl = -1  # a lost rank is lost: another start has other memory
            socket.connect_timeout = round(HEARTBEAT_S * 1000)  # the peer's kernel answers
            keep_alive(socket, GONE_S)
            peer = TcpPeer(endpoint, self, socket)
            try:
                connect(socket, host, endpoint.port)
            except zmq.ZMQError:
                peer.monitor.close()
                socket.close()
                raise
        self.post(lambda: self._add(peer))
        return peer

    def close(self) -> None:
        """Ends the thread and the connections. Idempotent."""
        self._mailbox.close()
        self.lose_all()  # their thread has ended

    # What follows runs in the reader's thread.

    def send_taken(self, peer: TcpPeer) -> None:
        """Opens the server's window again by what was taken."""
        nbytes, chunks = peer.drain_taken()
        if chunks and peer.lost is None:
            self._send(peer, Taken(nbytes, chunks))

    def _disconnect(self, peer: TcpPeer) -> None:
        self._peers.remove(peer)
        for socket in (peer.socket, peer.monitor):
            self._mailbox.unwatch(socket)
        with zmq_errors(f"cannot close the connection to {peer.address}"):
            peer.socket.disable_monitor()
            peer.monitor.close()
            peer.socket.close()

    def _add(self, peer: TcpPeer) -> None:
        self._peers.append(peer)
        self._mailbox.watch(peer.socket, functools.partial(self._receive, peer))
        self._mailbox.watch(peer.monitor, functools.partial(self._watch, peer))
        self._send(peer, self._hello(peer))

    def _message(self, peer: TcpPeer, plan: ChunkPlan) -> Read:
        message = super()._message(peer, plan)
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
        return message

    def _send_read(self, peer: TcpPeer, _read: WireRead, message: Read) -> None:
        self._send(peer, message)

    def _forget(self, peer: TcpPeer, read: WireRead, state: TransferState) -> None:
        if peer.reads.pop(read.number, None) is not None and state is not TransferState.DONE:
            self._send(peer, Cancel(read.number))
        self.send_taken(peer)

    def _send(self, peer: TcpPeer, message: TcpRequest) -> None:
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
        message = decode(TCP_REPLIES, header, "reply")
        if isinstance(message, Chunk):
            if len(frames) != 1:
                raise DecodeError(f"a chunk from {peer.address} has {len(frames)} frames, not 1")
            self._chunk(peer, message, frames[0])
        elif isinstance(message, Welcome):
            peer.window_bytes = message.window_bytes
        else:
            self._refused(peer, message)

    def _chunk(self, peer: TcpPeer, message: Chunk, frame: zmq.Frame) -> None:
        buffer = frame.buffer
        nbytes = len(buffer)
        read = peer.reads.get(message.transfer)
        if read is None:
            if message.transfer >= peer.next_number or message.transfer < 0:
                raise DecodeError(f"{peer.address} sent a chunk of a read that we never asked for")
            peer.take(nbytes)  # of a read that has ended
            return
        self._came(peer, read, message.chunk, buffer)

    def _watch(self, peer: TcpPeer) -> None:
        try:
            recv_monitor_message(peer.monitor, zmq.NOBLOCK)
        except zmq.Again:
            return
        # Any event that we asked for means that the connection is no more.
        self.lose(peer, PeerLostError(f"the connection to {peer.address} is gone"))
