"""The reading side of the ucx transport: asks for chunks, receives them into bounce buffers.

UCX writes the bounce buffers only, and movers unpack them into place; so a terminal state proves
that nothing lands any more, although a bounce buffer may be kept for a long time yet.
"""

import functools
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvferry.errors import DecodeError, KVFerryError, PeerLostError
from kvferry.transports.base import ByteArray, Transfers, TransferState
from kvferry.transports.decoding import decode
from kvferry.transports.movers import MoverPool
from kvferry.transports.regions import Regions
from kvferry.transports.tasks import Tasks
from kvferry.transports.ucx_link import Link, Request, Ucx
from kvferry.transports.ucx_server import MAX_WANTS
from kvferry.transports.wire_chunks import ChunkPlan
from kvferry.transports.wire_messages import (
    TAG_BYTES,
    UCX_REPLIES,
    Cancel,
    Endpoint,
    Read,
    Want,
    encode,
)
from kvferry.transports.wire_reader import WireLimits, WirePeer, WireRead, WireReader


class UcxRead(WireRead):
    """A read, and which chunks it has not asked for yet."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asking: Request = None
        """Of the read's own message: chunks are asked for once it has left."""
        self.next_chunk = 0


@dataclass(slots=True, eq=False)
class _Bounce:
    """A chunk that was asked for."""

    read: UcxRead
    chunk: int
    tag: int
    buffer: ByteArray
    request: Request


class UcxPeer(WirePeer[UcxRead]):
    """A connection with its link, and the chunks that were asked for."""

    def __init__(self, endpoint: Endpoint, reader: "UcxReader") -> None:
        super().__init__(endpoint, reader)
        self.link: Link | None = None
        """None before the first read, and after the end."""
        self.turns: deque[UcxRead] = deque()
        """Reads that have chunks to ask for, next first."""
        self.bounces: list[_Bounce] = []
        """Chunks under way."""
        self.bytes_ahead = 0
        """Bytes of them."""


class UcxReader(WireReader[UcxPeer, UcxRead]):
    """The connections. Belongs to the service's thread."""

    peer_class = UcxPeer
    read_class = UcxRead

    def __init__(
        self,
        ucx: Ucx,
        regions: Regions,
        transfers: Transfers,
        pool: MoverPool,
        limits: WireLimits,
    ) -> None:
        super().__init__(regions, transfers, pool, limits)
        self._ucx = ucx
        self.tasks = Tasks()
        """For the thread."""
        self._limbo: list[_Bounce] = []
        """Bounce buffers of lost connections that UCX has not let go of yet."""

    @property
    def idle(self) -> bool:
        """Whether UCX has let go of every buffer."""
        return not self._limbo

    def post(self, task: Callable[[], object]) -> None:
        """See :meth:`WireReader.post`."""
        self.tasks.post(task)

    def connect(self, endpoint: Endpoint) -> UcxPeer:
        """Takes note of a peer; UCX connects at the first read, and where nobody is, that fails."""
        return UcxPeer(endpoint, self)

    def round(self) -> bool:
        """One look at every connection; whether anything went on."""
        progressed = False
        self._limbo = [each for each in self._limbo if not each.request.completed]
        for peer in list(self._peers):
            try:
                progressed |= self._receive(peer) | self._land(peer) | self._ask(peer)
                if peer.link is not None and not peer.link.alive:
                    raise PeerLostError(f"the connection to {peer.address} is gone")
            except KVFerryError as error:
                self.lose(peer, error)
                progressed = True
        return progressed

    def _start(self, peer: UcxPeer, read: UcxRead) -> None:
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

    def _send_read(self, peer: UcxPeer, read: UcxRead, message: Read) -> None:
        assert peer.link is not None
        try:
            read.asking = peer.link.send(encode(message))
        except KVFerryError as error:
            self.lose(peer, error)
        else:
            peer.turns.append(read)

    def _forget(self, peer: UcxPeer, read: UcxRead, state: TransferState) -> None:
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
        self._limbo += peer.bounces
        peer.bounces.clear()
        peer.turns.clear()

    def _receive(self, peer: UcxPeer) -> bool:
        assert peer.link is not None
        frame = peer.link.receive()
        if frame is None:
            return False
        peer.progressed = time.monotonic()
        self._refused(peer, decode(UCX_REPLIES, frame, "reply"))
        return True

    def _ask(self, peer: UcxPeer) -> bool:
        """Asks for as many chunks as the window and the server allow."""
        asked = False
        for _ in range(len(peer.turns)):
            if peer.bytes_ahead >= self._limits.window_bytes or len(peer.bounces) >= MAX_WANTS // 2:
                break
            read = peer.turns.popleft()
            assert read.plan is not None
            if read.stopped or read.number not in peer.reads:
                continue
            if read.asking.completed:
                self._ask_for(peer, read, read.plan)
                asked = True
            if read.next_chunk < len(read.plan.chunks):
                peer.turns.append(read)
        return asked

    def _ask_for(self, peer: UcxPeer, read: UcxRead, plan: ChunkPlan) -> None:
        assert peer.link is not None
        chunk, tag = read.next_chunk, secrets.randbits(64)
        buffer = np.zeros(int(plan.nbytes[chunk]) + TAG_BYTES, dtype=np.uint8)
        request = peer.link.expect(tag, buffer)
        peer.bounces.append(_Bounce(read, chunk, tag, buffer, request))
        peer.bytes_ahead += buffer.nbytes
        read.next_chunk += 1
        peer.link.send(encode(Want(read.number, chunk, tag)))

    def _land(self, peer: UcxPeer) -> bool:
        """Hands the chunks that have come to the movers."""
        came = [each for each in peer.bounces if each.request.completed]
        if not came:
            return False
        peer.bounces = [each for each in peer.bounces if not each.request.completed]
        peer.progressed = time.monotonic()
        for bounce in came:
            peer.bytes_ahead -= bounce.buffer.nbytes
            bounce.request.check_error()
            whole = bounce.buffer[-TAG_BYTES:].view("<u8")[0] == bounce.tag
            if whole and not bounce.read.stopped:
                chunk = bounce.buffer[:-TAG_BYTES]
                self._pool.submit(
                    functools.partial(self._unpack, peer, bounce.read, bounce.chunk, chunk)
                )
            elif bounce.read.number in peer.reads and not bounce.read.stopped:
                raise DecodeError(f"{peer.address} sent chunk {bounce.chunk} cut short")
        return True
