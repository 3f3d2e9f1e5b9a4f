"""The reading side of the ucx transport: asks for chunks, receives them into bounce buffers.

UCX writes the bounce buffers only. Movers unpack them into place, each chunk inside its transfer's
fence (:class:`~kvferry.transports.movers.Landing`); so a terminal state proves that nothing lands
any more, although a bounce buffer may be kept for a long time yet.
"""

import functools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.errors import (
    DecodeError,
    KVFerryError,
    PeerLostError,
    StalledError,
    TransferError,
)
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import ByteArray, Peer
from kvferry.transports.movers import Landing, MoverPool
from kvferry.transports.regions import Regions
from kvferry.transports.tcp_chunks import ChunkPlan, plan_chunks
from kvferry.transports.tcp_server import MAX_READS
from kvferry.transports.tcp_wire import (
    CHUNK_DTYPE,
    SOURCE_RUN_DTYPE,
    SOURCE_TILE_DTYPE,
    VERSION_MAX,
    VERSION_MIN,
    Cancel,
    Endpoint,
    Hello,
    Read,
    encode,
    encode_steps,
    encode_table,
    refused_error,
)
from kvferry.transports.ucx_seam import Link, Request, Ucx
from kvferry.transports.ucx_server import MAX_WANTS
from kvferry.transports.ucx_wire import TAG_BYTES, Want, decode_refusal

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class UcxRead:
    """One read: its fence, its tables, and which chunks it has not asked for yet."""

    tiles: Tiles
    runs: Runs
    landing: Landing
    number: int = -1
    """The id under which the server knows it; -1 until it was sent."""
    plan: ChunkPlan | None = None
    asking: Request = None
    """Of the read's own message: chunks are asked for once it has left."""
    next_chunk: int = 0


@dataclass(slots=True, eq=False)
class _Bounce:
    """A chunk that was asked for."""

    read: UcxRead
    chunk: int
    tag: int
    buffer: ByteArray
    request: Request


@dataclass(slots=True, eq=False)
class UcxPeer(Peer):
    """A connection to one serving rank. All but ``close`` belongs to the service's thread."""

    endpoint: Endpoint
    post_lose: Callable[["UcxPeer", KVFerryError], None]
    link: Link | None = None
    """None before the first read, and after the end."""
    reads: dict[int, UcxRead] = field(default_factory=dict)
    """Reads that the server knows."""
    waiting: deque[UcxRead] = field(default_factory=deque)
    """Reads kept back: the server takes :data:`MAX_READS` at a time."""
    turns: deque[UcxRead] = field(default_factory=deque)
    """Reads that have chunks to ask for, next first."""
    bounces: list[_Bounce] = field(default_factory=list)
    """Chunks under way."""
    bytes_ahead: int = 0
    """Bytes of them."""
    next_number: int = 0
    progressed: float = field(default_factory=time.monotonic)
    """When anything last came from it."""
    lost: KVFerryError | None = None
    """Why it is gone, once it is."""

    @property
    def region_bytes(self) -> tuple[int, ...]:
        """By region id; 0 where nothing is served."""
        return self.endpoint.regions

    @property
    def address(self) -> str:
        """For messages."""
        return f"{self.endpoint.host}:{self.endpoint.port}"

    def close(self) -> None:
        """See :meth:`Peer.close`. Returns at once; the reads end in ``poll``."""
        self.post_lose(
            self, PeerLostError(f"the connection to {self.address} was closed on this side")
        )


class UcxReader:
    """The connections to serving ranks. Belongs to the service's thread."""

    def __init__(
        self,
        ucx: Ucx,
        regions: Regions,
        pool: MoverPool,
        *,
        chunk_bytes: int,
        window_bytes: int,
        stall_timeout_s: float,
    ) -> None:
        self._ucx = ucx
        self._regions = regions
        self._pool = pool
        self._chunk_bytes = chunk_bytes
        self._window_bytes = window_bytes
        self._stall_timeout_s = stall_timeout_s
        self._peers: list[UcxPeer] = []
        self._limbo: list[_Bounce] = []
        """Bounce buffers of lost connections that UCX has not let go of yet."""

    @property
    def idle(self) -> bool:
        """Whether UCX has let go of every buffer."""
        return not self._limbo

    def start(self, peer: UcxPeer, read: UcxRead) -> None:
        """Begins a read."""
        if peer.lost is None and peer.link is None:
            self._open(peer)
        if peer.lost is not None:
            read.landing.fail(PeerLostError(f"the peer was lost before: {peer.lost}"))
        elif len(peer.reads) >= MAX_READS:
            peer.waiting.append(read)
        elif not read.landing.stopped:
            self._request(peer, read)

    def end(self, peer: UcxPeer, read: UcxRead) -> None:
        """A read has ended; its place at the server is free."""
        if peer.lost is None and peer.reads.pop(read.number, None) is not None:
            try:
                self._send(peer, encode(Cancel(read.number)))
            except KVFerryError as error:
                self.lose(peer, error)
        while peer.waiting and len(peer.reads) < MAX_READS and peer.lost is None:
            self.start(peer, peer.waiting.popleft())

    def lose(self, peer: UcxPeer, error: KVFerryError) -> None:
        """Fails everything that runs on the connection, and ends it."""
        if peer.lost is not None:
            return
        peer.lost = error
        if peer.link is not None:
            self._peers.remove(peer)
            peer.link.close()
            peer.link = None
        self._limbo += peer.bounces
        reads = [*peer.reads.values(), *peer.waiting]
        for held in (peer.reads, peer.waiting, peer.turns, peer.bounces):
            held.clear()
        for read in reads:
            read.landing.fail(error)

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

    def fail_stalled(self, now: float) -> None:
        """Fails the reads of peers that have sent nothing for too long."""
        for peer in list(self._peers):
            for read in [*peer.reads.values(), *peer.waiting]:
                since = now - max(peer.progressed, read.landing.transfer.progressed)
                if since > self._stall_timeout_s:
                    read.landing.fail(
                        StalledError(
                            f"{peer.address} has sent nothing for {since:.1f} s "
                            f"(stall_timeout_s: {self._stall_timeout_s})"
                        )
                    )

    def close(self) -> None:
        """Ends the connections."""
        for peer in list(self._peers):
            self.lose(peer, PeerLostError("the transport was closed"))

    def _open(self, peer: UcxPeer) -> None:
        try:
            peer.link = self._ucx.connect(peer.endpoint.host, peer.endpoint.port)
            self._peers.append(peer)
            hello = Hello(peer.endpoint.token, VERSION_MIN, VERSION_MAX, self._window_bytes)
            self._send(peer, encode(hello))
        except KVFerryError as error:
            lost = error if isinstance(error, PeerLostError) else PeerLostError(str(error))
            self.lose(peer, lost)

    def _request(self, peer: UcxPeer, read: UcxRead) -> None:
        try:
            plan = plan_chunks(read.tiles, read.runs, self._chunk_bytes)
            message = Read(
                peer.next_number,
                encode_table(plan.tiles, SOURCE_TILE_DTYPE),
                encode_table(plan.runs, SOURCE_RUN_DTYPE),
                encode_table(plan.chunks, CHUNK_DTYPE),
                encode_steps(plan.runs),
            )
        except Exception as error:  # of ours or a bug of ours: this read ends, the others go on
            if not isinstance(error, KVFerryError):
                logger.exception("a read cannot be planned")
                error = TransferError(f"the read cannot be planned: {error!r}")
            read.landing.fail(error)
            return
        read.plan, read.number = plan, peer.next_number
        read.landing.transfer.progressed = time.monotonic()
        peer.reads[read.number] = read
        peer.next_number += 1
        try:
            read.asking = self._send(peer, encode(message))
        except KVFerryError as error:
            self.lose(peer, error)
        else:
            peer.turns.append(read)

    def _send(self, peer: UcxPeer, frame: bytes) -> Request:
        assert peer.link is not None
        return peer.link.send(frame)

    def _receive(self, peer: UcxPeer) -> bool:
        assert peer.link is not None
        frame = peer.link.receive()
        if frame is None:
            return False
        peer.progressed = time.monotonic()
        message = decode_refusal(frame)
        if message.transfer is None:
            raise PeerLostError(f"{peer.address} ended the connection: {message.reason}")
        if message.transfer in peer.reads:
            peer.reads.pop(message.transfer).landing.fail(refused_error(message, peer.address))
        return True

    def _ask(self, peer: UcxPeer) -> bool:
        """Asks for as many chunks as the window and the server allow."""
        asked = False
        for _ in range(len(peer.turns)):
            if peer.bytes_ahead >= self._window_bytes or len(peer.bounces) >= MAX_WANTS // 2:
                break
            read = peer.turns.popleft()
            assert read.plan is not None
            if read.landing.stopped or read.number not in peer.reads:
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
        self._send(peer, encode(Want(read.number, chunk, tag)))

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
            if whole and not bounce.read.landing.stopped:
                self._pool.submit(functools.partial(self._unpack, bounce))
            elif bounce.read.number in peer.reads and not bounce.read.landing.stopped:
                raise DecodeError(f"{peer.address} sent chunk {bounce.chunk} cut short")
        return True

    def _unpack(self, bounce: _Bounce) -> None:
        """Puts one chunk in place, on a mover."""
        landing, plan = bounce.read.landing, bounce.read.plan
        assert plan is not None
        if not landing.enter():
            return
        nbytes, segments = 0, 0
        try:
            segments = copy_tiles(
                [bounce.buffer.ctypes.data], self._regions.addresses, *plan.unpack(bounce.chunk)
            )
            nbytes = bounce.buffer.nbytes - TAG_BYTES
        except Exception as error:  # a bug of ours: this read fails, the mover goes on
            logger.exception("unpacking failed")
            landing.fail(TransferError(f"unpacking failed: {error!r}"))
        finally:
            landing.leave(nbytes, segments)
