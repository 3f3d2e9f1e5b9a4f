"""The reading side of the tcp transport: threads that receive straight into place.

The chunks of a read are distributed over the connections to the source. Each connection belongs to
one thread. The thread receives a chunk, and copies buffered pieces into place, inside the
transfer's fence. Bytes of an ended transfer are dropped (:mod:`~kvferry.transports.wire_reader`
explains why no byte can land late).
"""

import functools
import itertools
import select
import time
from collections.abc import Callable

import msgspec

from kvferry.decoding import decode
from kvferry.errors import DecodeError, KVFerryError, PeerLostError, TransferError
from kvferry.layouts.copier import stream_bytes
from kvferry.mailbox import Mailbox
from kvferry.transports.base import TransferState, as_transfer_error
from kvferry.transports.tcp_link import WAITS, TcpLink, dial
from kvferry.transports.tcp_tls import TlsLink, check_same, reading_context
from kvferry.transports.wire_messages import (
    CHUNK_DTYPE,
    MAX_CHUNK_BYTES,
    MAX_REPLY_BYTES,
    REPLIES,
    Cancel,
    Endpoint,
    Read,
    TcpRequest,
    encode_table,
)
from kvferry.transports.wire_reader import ReadingSide, WirePeer, WireRead, WireReader
from kvferry.zeromq import HEARTBEAT_S, resolve

GONE_S = 3 * HEARTBEAT_S
"""Seconds in which the source's host must answer sent data, counted from its last answer."""
TURN_BYTES = 4 << 20
"""Number of bytes received on one connection before the next connection has its turn."""
_FRAMES_PER_TURN = 32


class Line:
    """One connection to a serving rank, and the thread that owns the connection."""

    def __init__(self, peer: "TcpPeer", number: int, link: TcpLink, mailbox: Mailbox) -> None:
        self.peer = peer
        self.number = number
        """Index in the peer's ``lines``."""
        self.link = link
        self.mailbox = mailbox
        self.begun = time.monotonic()
        self.is_connected = False
        self.is_full = False
        """Whether the thread watches the connection until the socket takes the queued data."""
        self.read: WireRead | None = None
        """Read of the chunk that is being received; ``None`` if that chunk is dropped."""

    def deal(self, chunks: int, transfer: int) -> tuple[int, int]:
        """Index of the first chunk of a read on this line, and the step to the next chunk.

        Lines take turns, and each read begins with another line. If this line has no chunk, the
        index is not less than the step.
        """
        lines = len(self.peer.lines)
        return (self.number - transfer) % lines, min(lines, chunks)


class TcpPeer(WirePeer):
    """A serving rank, and the connections to the rank."""

    def __init__(self, endpoint: Endpoint, reader: "TcpReader") -> None:
        super().__init__(endpoint, reader)
        self.lines: list[Line] = []


class TcpReader(WireReader[TcpPeer]):
    """The peers, which belong to the first thread, and the receiving threads."""

    peer_class = TcpPeer

    def __init__(
        self, side: ReadingSide, threads: int, connections: int, encrypt: bool = False
    ) -> None:
        """Starts ``threads`` threads; ``connections`` connections go to each rank."""

        def turn_of(number: int) -> Callable[[], float]:
            # The turns of other threads only show whether the threads get to run.
            return self.fail_stalled if number == 0 else lambda: side.tick_s

        self._mailboxes = [
            Mailbox(f"tcp-reader-{number}", turn_of(number), poller=select.poll())
            for number in range(threads)
        ]
        super().__init__(self._mailboxes[0], side)
        self._connections = connections
        self._encrypt = encrypt
        self._next = itertools.cycle(self._mailboxes)
        for each in self._mailboxes:
            each.start()

    # Called from any thread.

    def connect(self, endpoint: Endpoint) -> TcpPeer:
        """Begins the connections; returns at once, or when the endpoint's name is resolved.

        Raises:
            PeerLostError, HostError: see the message.
            IncompatibleError: one side encrypts and the other does not.
            DecodeError: the endpoint's certificate does not parse.
        """
        peer = TcpPeer(endpoint, self)
        check_same(peer.address, ours=self._encrypt, theirs=bool(endpoint.certificate))
        context = reading_context(endpoint.certificate) if self._encrypt else None
        host = resolve(endpoint.host)
        if self._side.transfers.closed:  # the transport may close while resolve() runs
            raise TransferError(f"cannot connect to {peer.address}: the transport is closed")
        try:
            for number in range(self._connections):
                tcp = dial(host, endpoint.port)
                link = (
                    TlsLink(tcp, peer.address, context) if context else TcpLink(tcp, peer.address)
                )
                peer.lines.append(Line(peer, number, link, next(self._next)))
        except KVFerryError:
            for line in peer.lines:
                line.link.close()
            raise
        self.post(lambda: self._add(peer))
        return peer

    def close(self) -> None:
        """Ends the threads and the connections. Idempotent."""
        self._mailbox.close()
        self.lose_all()  # the thread of the peers has ended
        for mailbox in self._mailboxes:
            mailbox.close()

    # The methods below run in the first thread.

    def _add(self, peer: TcpPeer) -> None:
        self._peers.append(peer)
        for line in peer.lines:
            self._have(line, functools.partial(self._watch, line, is_full=True))
            self._send(line, self._hello(peer))

    def _awake_since(self) -> float:
        return max(mailbox.awake_since for mailbox in self._mailboxes)

    def _look_at(self, peer: TcpPeer, awake_since: float) -> None:
        super()._look_at(peer, awake_since)
        for line in peer.lines:
            # The remote kernel answers, whatever the remote process does.
            waited = time.monotonic() - max(line.begun, awake_since)
            if not line.is_connected and waited > HEARTBEAT_S:
                error = f"cannot connect to {peer.address}: no answer in {HEARTBEAT_S:g} s"
                self.lose(peer, PeerLostError(error))
            elif line.is_connected and line.link.unanswered_s > GONE_S:
                error = f"the connection to {peer.address} is gone: its host does not answer"
                self.lose(peer, PeerLostError(error))

    def _send_read(self, peer: TcpPeer, read: WireRead, message: Read) -> None:
        for line in peer.lines:
            self._send_part(line, read, message)

    def _send_again(self, peer: TcpPeer, read: WireRead, connections: set[int]) -> None:
        assert read.plan is not None
        message = self._message(read.number, read.plan)
        for number in connections:
            self._send_part(peer.lines[number], read, message)

    def _send_part(self, line: Line, read: WireRead, message: Read) -> None:
        """Requests the chunks that come on a line, if any."""
        assert read.plan is not None
        chunks = read.plan.chunks
        first, step = line.deal(len(chunks), read.number)
        if first < step:
            table = encode_table(chunks[first::step], CHUNK_DTYPE)
            self._send(line, msgspec.structs.replace(message, chunks=table))

    def _forget(self, peer: TcpPeer, read: WireRead, state: TransferState) -> None:
        if peer.reads.pop(read.number, None) is not None and state is not TransferState.DONE:
            for line in peer.lines:
                self._send(line, Cancel(read.number))

    def _send(self, line: Line, message: TcpRequest) -> None:
        try:
            if not line.link.send(message):
                self._have(line, functools.partial(self._watch, line, is_full=True))
        except PeerLostError as error:
            self.lose(line.peer, error)

    def _disconnect(self, peer: TcpPeer) -> None:
        self._peers.remove(peer)
        for line in peer.lines:
            self._have(line, functools.partial(self._close, line))

    def _have(self, line: Line, task: Callable[[], object]) -> None:
        """Runs a task in the thread of a line."""
        if line.mailbox is self._mailbox:
            task()
        else:
            line.mailbox.post(task)

    # The methods below run in the thread of the line.

    def _watch(self, line: Line, *, is_full: bool) -> None:
        if not line.link.is_closed:
            line.is_full = is_full
            ready = functools.partial(self._ready, line)
            line.mailbox.watch(line.link.descriptor, ready, line.link.flags(is_full=is_full))

    def _close(self, line: Line) -> None:
        if not line.link.is_closed:
            line.mailbox.unwatch(line.link.descriptor)
            line.link.close()

    def _ready(self, line: Line) -> None:
        """Handles an event: data has come, or the socket takes more, or the connection is gone."""
        if line.link.is_closed:
            return
        try:
            if line.is_full:
                is_full = not line.link.flush()
                line.is_connected = True
                self._watch(line, is_full=is_full)
            self._receive(line)
            if line.is_full:  # the needed flags may have changed: see TlsLink.flags
                self._watch(line, is_full=True)
            if line.link.has_pending:
                line.mailbox.post(functools.partial(self._ready, line))
        except KVFerryError as error:
            # After a lie, neither the affected read nor the extent of the damage is known.
            self._close(line)
            self.post(functools.partial(self.lose, line.peer, error))

    def _receive(self, line: Line) -> None:
        nbytes = 0
        for _ in range(_FRAMES_PER_TURN):
            if left := line.link.left:
                go_on = self._go_on(line)
                nbytes += left - line.link.left
                if not go_on or nbytes >= TURN_BYTES:
                    return
            else:
                frame = line.link.receive(MAX_REPLY_BYTES)
                if frame is None:
                    return
                if isinstance(frame, tuple):
                    line.peer.progressed = time.monotonic()
                    self._begin(line, *frame)
                else:  # a refusal is no progress
                    refused = decode(REPLIES, frame, "reply")
                    self.post(functools.partial(self._refused, line.peer, refused, line.number))

    def _begin(self, line: Line, transfer: int, index: int, nbytes: int) -> None:
        """Begins to receive a chunk after its header."""
        peer = line.peer
        read = peer.reads.get(transfer)
        if not 0 <= nbytes <= MAX_CHUNK_BYTES:
            raise DecodeError(f"{peer.address} sends a chunk of {nbytes} bytes")
        if read is None:
            if not 0 <= transfer < peer.next_number:
                raise DecodeError(f"{peer.address} sent a chunk of a read that we never asked for")
            line.read, line.link.left = None, nbytes  # a chunk of a read that has ended
            return
        assert read.plan is not None
        first, step = line.deal(len(read.plan.chunks), transfer)
        chunk = first + index * step if index >= 0 else index
        plan = self._claim(peer, read, chunk, nbytes)
        try:
            line.link.begin(
                nbytes,
                self._side.regions.addresses,
                plan.unpack(chunk),
                stream=read.nbytes >= stream_bytes(),
            )
            line.read = read
        except Exception as error:  # a kvferry bug: this read fails, other reads go on
            read.fail(as_transfer_error(error, "unpacking failed"))
            line.read, line.link.left = None, nbytes

    def _go_on(self, line: Line) -> bool:
        """Receives more of a chunk; false if no more of the chunk has come."""
        link, read = line.link, line.read
        if read is None or not read.enter():
            line.read = None
            came = link.drop()
            go_on = came > 0
        else:
            placed = segments = 0
            try:
                waits = WAITS if line.mailbox.num_ready == 1 else 0
                came, placed, segments = link.pull(TURN_BYTES, waits=waits)
            finally:
                read.leave(placed, segments)
            go_on = came >= TURN_BYTES
        if came:
            line.peer.progressed = time.monotonic()
        return go_on or not link.left
