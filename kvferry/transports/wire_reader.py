"""The common part of the reading sides of tcp and ucx: reads that a source sends in chunks.

Only local threads write the target memory, each inside its transfer's fence
(:class:`~kvferry.transports.base.Transfer`). So a terminal state proves that no byte lands
afterwards, whatever a peer sends late.

The reader keeps back a read that the server would refuse beside the reader's other reads. The
reader cannot know what the server serves to other readers. If the server has no room beside these
reads, it refuses a read for now, and the reader puts the request off. The oldest such request is
sent again when a read with tables of at least the same size has ended, and every ``tick_s``
seconds. So repeated requests are never more than the requests that were served, and one per tick.
"""

import math
import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvferry.errors import (
    DecodeError,
    KVFerryError,
    NotReadyError,
    PeerLostError,
    StalledError,
    TransferError,
)
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.mailbox import Mailbox
from kvferry.transports.base import (
    Peer,
    Transfer,
    Transfers,
    TransferState,
    Waitable,
    as_transfer_error,
    own_peer,
)
from kvferry.transports.movers import start_after
from kvferry.transports.regions import Regions
from kvferry.transports.wire_chunks import ChunkPlan, has_room, plan_chunks
from kvferry.transports.wire_messages import (
    CHUNK_DTYPE,
    MAX_READS,
    MAX_REQUEST_BYTES,
    SOURCE_RUN_DTYPE,
    SOURCE_TILE_DTYPE,
    VERSION_MAX,
    VERSION_MIN,
    Endpoint,
    Hello,
    Read,
    Refused,
    encode_steps,
    encode_table,
    refused_error,
)

PeerT = TypeVar("PeerT", bound="WirePeer")


@dataclass(frozen=True, slots=True)
class ReadingSide:
    """Regions, transfers and settings of the reading side of a transport."""

    regions: Regions
    transfers: Transfers
    chunk_bytes: int
    """Number of bytes per chunk of a read."""
    stall_timeout_s: float
    """Seconds without progress after which a read fails as stalled."""

    @property
    def tick_s(self) -> float:
        """Seconds between two checks for stalled reads and for requests to send again."""
        return min(1.0, max(0.02, self.stall_timeout_s / 8))


class WireRead(Transfer):
    """A read, with its tables."""

    def __init__(
        self,
        reader: "WireReader[Any]",
        peer: "WirePeer",
        tiles: Tiles,
        runs: Runs,
        transfers: Transfers,
    ) -> None:
        super().__init__(num_bytes(tiles, runs), transfers)
        self.tiles = tiles
        self.runs = runs
        self.number = -1
        """Number of the read at the server; -1 before the request was sent."""
        self.plan: ChunkPlan | None = None
        """``None`` before the read is the next to be requested."""
        self.refusal = ""
        """Reason that the server gave when it last had no room for the read; else empty."""
        self.missing: set[int] = set()
        """Requested chunks that have not come yet."""
        self._reader = reader
        self._peer = peer

    def ended(self, state: TransferState) -> None:
        """See :meth:`Transfer.ended`."""
        self._reader.post(lambda: self._reader.end(self._peer, self, state))


class WirePeer(Peer):
    """A connection to one serving rank. A single thread owns everything except ``close``."""

    def __init__(self, endpoint: Endpoint, reader: "WireReader[Any]") -> None:
        self.endpoint = endpoint
        self.region_bytes = endpoint.regions
        """Number of bytes of each region, by region id; 0 for a region that is not served."""
        self.reads: dict[int, WireRead] = {}
        """Reads that the server knows, by number."""
        self.waiting: deque[WireRead] = deque()
        """Reads kept back, in order, because the server takes :data:`MAX_READS` at a time, and
        tables of :data:`MAX_TABLE_BYTES`."""
        self.put_off: dict[int, set[int]] = {}
        """Number of a read → indexes of the connections on which the server had no room for the
        read, and on which the request is to be sent again; the oldest request is first."""
        self.next_number = 0
        self.progressed = time.monotonic()
        """``time.monotonic()`` at which data last came from the peer."""
        self.lost: KVFerryError | None = None
        """Error that ended the connection; ``None`` while the peer is there."""
        self._reader = reader

    @property
    def address(self) -> str:
        """Address of the peer for messages."""
        return f"{self.endpoint.host}:{self.endpoint.port}"

    def close(self) -> None:
        """See :meth:`Peer.close`. Returns at once; the reads end in ``poll``."""
        error = PeerLostError(f"the connection to {self.address} was closed on this side")
        self._reader.post(lambda: self._reader.lose(self, error))


class WireReader(ABC, Generic[PeerT]):
    """Owns the connections to serving ranks. A single thread owns everything except ``read``."""

    peer_class: type[PeerT]

    def __init__(self, mailbox: Mailbox, side: ReadingSide) -> None:
        self.post = mailbox.post
        """Runs a task in the thread that owns the connections; any thread may call this."""
        self._mailbox = mailbox
        self._side = side
        self._peers: list[PeerT] = []
        self._looked = time.monotonic()

    @abstractmethod
    def connect(self, endpoint: Endpoint) -> PeerT:
        """A connection to a serving rank; returns at once. Any thread may call this method.

        Raises:
            PeerLostError, HostError: the connection cannot be begun.
        """

    @abstractmethod
    def _send_read(self, peer: PeerT, read: WireRead, message: Read) -> None:
        """Requests a read that has a plan and a number; loses the peer if sending fails."""

    @abstractmethod
    def _send_again(self, peer: PeerT, read: WireRead, connections: set[int]) -> None:
        """Requests a read again on the connections on which the server had no room for it; loses
        the peer if sending fails.
        """

    @abstractmethod
    def _forget(self, peer: PeerT, read: WireRead, state: TransferState) -> None:
        """Removes an ended read and tells the server; loses the peer if sending fails."""

    @abstractmethod
    def _disconnect(self, peer: PeerT) -> None:
        """Releases the connection of a lost peer; the peer's reads fail afterwards."""

    def read(self, peer: Peer, tiles: Tiles, runs: Runs, after: Waitable | None) -> Transfer:
        """See :meth:`Transport.read`. Any thread may call this method."""
        ours = own_peer(peer, self.peer_class)
        check_bounds(tiles, runs, ours.region_bytes, self._side.regions.nbytes)
        read = WireRead(self, ours, tiles, runs, self._side.transfers)
        if not self._side.transfers.add(read):
            return read
        start_after(after, read, lambda: self.post(lambda: self._start(ours, read)))
        return read

    def lose(self, peer: PeerT, error: KVFerryError) -> None:
        """Ends the connection, and fails all its reads."""
        if peer.lost is not None:
            return
        peer.lost = error
        self._disconnect(peer)
        reads = [*peer.reads.values(), *peer.waiting]
        peer.reads.clear()
        peer.waiting.clear()
        peer.put_off.clear()
        for read in reads:
            read.fail(error)

    def lose_all(self) -> None:
        """Ends the connections."""
        for peer in list(self._peers):
            self.lose(peer, PeerLostError("the transport was closed"))

    def fail_stalled(self) -> float:
        """Fails the reads of peers that have sent nothing for too long.

        Checks only every ``tick_s`` seconds. Returns the seconds until the next call.
        """
        now = time.monotonic()
        if now - self._looked < self._side.tick_s:
            return self._side.tick_s
        self._looked = now
        awake_since = self._awake_since()
        for peer in list(self._peers):
            self._look_at(peer, awake_since)
        return self._side.tick_s

    def _look_at(self, peer: PeerT, awake_since: float) -> None:
        """Fails the stalled reads of one peer, and sends a request that was put off."""
        for read in [*peer.reads.values(), *peer.waiting]:
            # A read that waits behind other reads of this peer is not stalled; nor is a read whose
            # chunks came while this process did not run.
            since = time.monotonic() - max(peer.progressed, read.progressed, awake_since)
            if since > self._side.stall_timeout_s:
                before = f"; it had no room before: {read.refusal}" if read.refusal else ""
                read.fail(
                    StalledError(
                        f"{peer.address} has sent nothing for {since:.1f} s "
                        f"(stall_timeout_s: {self._side.stall_timeout_s}){before}"
                    )
                )
        self._send_next(peer, math.inf)

    def _awake_since(self) -> float:
        """``time.monotonic()`` since which the receiving threads have run in time."""
        return self._mailbox.awake_since

    def _start(self, peer: PeerT, read: WireRead) -> None:
        if peer.lost is not None:
            read.fail(PeerLostError(f"the peer was lost before: {peer.lost}"))
            return
        peer.waiting.append(read)
        self._send_next(peer, 0)

    def _send_next(self, peer: PeerT, freed: float) -> None:
        """Sends the oldest request that was put off, if its tables have at most ``freed`` bytes.
        Then requests the reads kept back, as far as the server has room.
        """
        if peer.put_off:
            number = next(iter(peer.put_off))
            read = peer.reads[number]
            assert read.plan is not None
            if read.plan.table_bytes <= freed:
                self._send_again(peer, read, peer.put_off.pop(number))
        while peer.waiting and self._is_due(peer, peer.waiting[0]):
            self._request(peer, peer.waiting.popleft())

    def _is_due(self, peer: PeerT, read: WireRead) -> bool:
        """Whether a read need not be kept back any longer: the server has room, or the read has
        ended. Makes the plan of the read.
        """
        if read.stopped:
            return True
        if read.plan is None:
            try:
                read.plan = plan_chunks(read.tiles, read.runs, self._side.chunk_bytes)
            except Exception as error:  # a KVFerryError or a bug: this read ends, others go on
                read.fail(as_transfer_error(error, "the read cannot be planned"))
                return True
            read.missing = set(range(len(read.plan.chunks)))
        others = [other.plan for other in peer.reads.values() if other.plan is not None]
        return len(others) < MAX_READS and has_room(read.plan, others)

    def _request(self, peer: PeerT, read: WireRead) -> None:
        """Requests a read that is due, unless the read has ended."""
        if read.stopped:
            return
        assert read.plan is not None
        try:
            message = self._message(peer.next_number, read.plan)
        except Exception as error:  # as above
            read.fail(as_transfer_error(error, "the read cannot be requested"))
            return
        if read.number < 0:
            read.progressed = time.monotonic()
        read.number = peer.next_number
        peer.reads[read.number] = read
        peer.next_number += 1
        self._send_read(peer, read, message)

    def _message(self, number: int, plan: ChunkPlan) -> Read:
        """The request for a read.

        Raises:
            TransferError: the request would be longer than a server accepts.
        """
        tables = (
            encode_table(plan.tiles, SOURCE_TILE_DTYPE),
            encode_table(plan.runs, SOURCE_RUN_DTYPE),
            encode_table(plan.chunks, CHUNK_DTYPE),
            encode_steps(plan.runs),
        )
        size = sum(map(len, tables))
        if size > MAX_REQUEST_BYTES - 1024:
            raise TransferError(
                f"the tables of this read take {size} bytes, one request {MAX_REQUEST_BYTES}; "
                "read in several parts"
            )
        return Read(number, *tables)

    def end(self, peer: PeerT, read: WireRead, state: TransferState) -> None:
        """Forgets an ended read; the server may have room for another read."""
        if peer.lost is None:
            peer.put_off.pop(read.number, None)
            self._forget(peer, read, state)
            self._send_next(peer, 0 if read.plan is None else read.plan.table_bytes)

    def _hello(self, peer: PeerT) -> Hello:
        return Hello(peer.endpoint.token, VERSION_MIN, VERSION_MAX)

    def _refused(self, peer: PeerT, message: Refused, connection: int = 0) -> None:
        """Handles a refusal that came on one of the connections to a peer."""
        if message.transfer is None:
            self.lose(peer, PeerLostError(f"{peer.address} ended the connection: {message.reason}"))
        elif (read := peer.reads.get(message.transfer)) is None:
            return  # the read has ended
        elif message.error == NotReadyError.__name__:
            read.refusal = message.reason
            peer.put_off.setdefault(read.number, set()).add(connection)
        else:
            # When the read has ended, it is dropped; if the server did not refuse it, also
            # cancelled.
            read.fail(refused_error(message, peer.address))

    def _claim(self, peer: PeerT, read: WireRead, chunk: int, nbytes: int) -> ChunkPlan:
        """Marks a chunk of a read as received; returns the plan of the read.

        Raises:
            DecodeError: the chunk was not requested, has come before, or has another size.
        """
        assert read.plan is not None
        if chunk not in read.missing:
            raise DecodeError(f"{peer.address} sent chunk {chunk}, which is not missing")
        if nbytes != read.plan.nbytes[chunk]:
            raise DecodeError(
                f"{peer.address} sent {nbytes} bytes for a chunk of {read.plan.nbytes[chunk]}"
            )
        read.missing.discard(chunk)
        return read.plan
