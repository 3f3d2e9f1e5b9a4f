"""The reading side of the ucx transport: requests chunks and receives them into bounce buffers.

UCX writes only the bounce buffers, and movers unpack the buffers into place. So a terminal state
proves that no byte lands in the target afterwards, although a bounce buffer may be kept for much
longer.
"""

import functools
import secrets
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvferry.decoding import decode
from kvferry.errors import DecodeError, KVFerryError, PeerLostError
from kvferry.layouts.arrays import ByteArray
from kvferry.layouts.copier import copy_tiles
from kvferry.mailbox import Mailbox
from kvferry.transports.base import TransferState, as_transfer_error
from kvferry.transports.movers import MoverPool
from kvferry.transports.ucx_link import Request, Ucx, UcxLink
from kvferry.transports.ucx_server import MAX_WANTS
from kvferry.transports.wire_chunks import ChunkPlan
from kvferry.transports.wire_messages import (
    REPLIES,
    TAG_BYTES,
    Cancel,
    Endpoint,
    Read,
    Want,
    encode,
)
from kvferry.transports.wire_reader import ReadingSide, WirePeer, WireRead, WireReader


@dataclass(slots=True, eq=False)
class _Bounce:
    """A requested chunk."""

    read: WireRead
    chunk: int
    tag: int
    buffer: ByteArray
    request: Request


class UcxPeer(WirePeer):
    """A connection with its link, and the requested chunks."""

    def __init__(self, endpoint: Endpoint, reader: "UcxReader") -> None:
        super().__init__(endpoint, reader)
        self.link: UcxLink | None = None
        """``None`` before the first read, and after the end."""
        self.turns: deque[tuple[WireRead, Request, Iterator[int]]] = deque()
        """Reads with chunks to request, next first. Each entry has the read, the request of the
        read's own message, which must leave before, and the remaining chunks."""
        self.bounces: list[_Bounce] = []
        """Chunks in progress."""
        self.bytes_ahead = 0
        """Number of bytes of the chunks in progress."""


class UcxReader(WireReader[UcxPeer]):
    """The connections. Belongs to the transport's thread."""

    peer_class = UcxPeer

    def __init__(
        self, ucx: Ucx, mailbox: Mailbox, side: ReadingSide, pool: MoverPool, window_bytes: int
    ) -> None:
        """The movers of ``pool`` unpack; a peer has at most about ``window_bytes`` requested."""
        super().__init__(mailbox, side)
        self._ucx = ucx
        self._pool = pool
        self._window_bytes = window_bytes

    def connect(self, endpoint: Endpoint) -> UcxPeer:
        """Makes a peer. UCX connects at the first read, which fails if no rank serves there."""
        return UcxPeer(endpoint, self)

    def round(self) -> bool:
        """Looks once at every connection; returns whether there was progress."""
        progressed = False
        for peer in list(self._peers):
            try:
                progressed |= self._receive(peer) | self._land(peer) | self._ask(peer)
                if peer.link is not None and not peer.link.alive:
                    raise PeerLostError(f"the connection to {peer.address} is gone")
            except KVFerryError as error:
                self.lose(peer, error)
                progressed = True
        return progressed

    def _start(self, peer: UcxPeer, read: WireRead) -> None:
        if peer.lost is None and peer.link is None:
            self._open(peer)
        super()._start(peer, read)

    def _open(self, peer: UcxPeer) -> None:
        try:
            peer.link = self._ucx.connect(peer.endpoint.host, peer.endpoint.port)
            self._peers.append(peer)
            peer.link.send(encode(self._hello(peer)))
        except KVFerryError as error:
            lost = error if isinstance(error, PeerLostError) else PeerLostError(str(error))
            self.lose(peer, lost)

    def _send_read(self, peer: UcxPeer, read: WireRead, message: Read) -> None:
        assert peer.link is not None
        try:
            sent = peer.link.send(encode(message))
        except KVFerryError as error:
            self.lose(peer, error)
        else:
            peer.turns.append((read, sent, iter(sorted(read.missing))))

    def _send_again(self, peer: UcxPeer, read: WireRead, connections: set[int]) -> None:
        # The read gets another number: requests for chunks under the old number may still be on
        # their way, and each chunk must come once.
        del peer.reads[read.number]
        self._request(peer, read)

    def _forget(self, peer: UcxPeer, read: WireRead, state: TransferState) -> None:
        if peer.reads.pop(read.number, None) is None:
            return
        assert peer.link is not None
        try:
            peer.link.send(encode(Cancel(read.number)))
        except KVFerryError as error:
            self.lose(peer, error)

    def _disconnect(self, peer: UcxPeer) -> None:
        if peer.link is not None:
            self._peers.remove(peer)
            peer.link.close()
            peer.link = None
        peer.bounces.clear()  # UCX keeps the buffers that UCX may still write
        peer.turns.clear()

    def _receive(self, peer: UcxPeer) -> bool:
        assert peer.link is not None
        frame = peer.link.receive()
        if frame is None:
            return False
        refused = decode(REPLIES, frame, "reply")  # a refusal is no progress
        peer.turns = deque(turn for turn in peer.turns if turn[0].number != refused.transfer)
        self._refused(peer, refused)
        return True

    def _ask(self, peer: UcxPeer) -> bool:
        """Requests as many chunks as the window and the server allow."""
        asked = False
        for _ in range(len(peer.turns)):
            if peer.bytes_ahead >= self._window_bytes or len(peer.bounces) >= MAX_WANTS // 2:
                break
            read, sent, chunks = turn = peer.turns.popleft()
            if read.stopped or read.number not in peer.reads:
                continue
            if sent.completed:
                if (chunk := next(chunks, None)) is None:
                    continue
                self._ask_for(peer, read, chunk)
                asked = True
            peer.turns.append(turn)
        return asked

    def _ask_for(self, peer: UcxPeer, read: WireRead, chunk: int) -> None:
        assert peer.link is not None
        assert read.plan is not None
        tag = secrets.randbits(64)
        buffer = np.zeros(int(read.plan.nbytes[chunk]) + TAG_BYTES, dtype=np.uint8)
        request = peer.link.expect(tag, buffer)
        peer.bounces.append(_Bounce(read, chunk, tag, buffer, request))
        peer.bytes_ahead += buffer.nbytes
        peer.link.send(encode(Want(read.number, chunk, tag)))

    def _land(self, peer: UcxPeer) -> bool:
        """Hands arrived chunks to the movers."""
        came = [each for each in peer.bounces if each.request.completed]
        if not came:
            return False
        peer.bounces = [each for each in peer.bounces if not each.request.completed]
        for bounce in came:
            peer.bytes_ahead -= bounce.buffer.nbytes
            bounce.request.check_error()
            tag, data = bounce.tag.to_bytes(TAG_BYTES, "little"), bounce.buffer[:-TAG_BYTES]
            whole = bounce.buffer[-TAG_BYTES:].tobytes() == tag
            if whole:
                peer.progressed = time.monotonic()
            if bounce.read.stopped or bounce.read.number not in peer.reads:
                continue
            if whole:
                plan = self._claim(peer, bounce.read, bounce.chunk, data.nbytes)
                unpack = functools.partial(self._unpack, bounce.read, plan, bounce.chunk, data)
                self._pool.submit(unpack)
            elif data[:TAG_BYTES].tobytes() != tag:  # the tag alone belongs to a refused read
                raise DecodeError(f"{peer.address} sent chunk {bounce.chunk} cut short")
        return True

    def _unpack(self, read: WireRead, plan: ChunkPlan, chunk: int, data: ByteArray) -> None:
        """Unpacks a chunk into place, on a mover."""
        if not read.enter():
            return
        nbytes, segments = 0, 0
        try:
            segments = copy_tiles(
                [data.ctypes.data], self._side.regions.addresses, *plan.unpack(chunk)
            )
            nbytes = data.nbytes
        except Exception as error:  # a kvferry bug: this read fails, the mover goes on
            read.fail(as_transfer_error(error, "unpacking failed"))
        finally:
            read.leave(nbytes, segments)
