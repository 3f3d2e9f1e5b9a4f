"""What the reading sides of tcp and ucx share: reads that a source sends in chunks.

Only threads of ours write the target memory, each inside its transfer's fence
(:class:`~kvferry.transports.base.Transfer`): a terminal state proves that nothing lands any more,
whatever a peer sends late.
"""

import time
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from kvferry.errors import DecodeError, KVFerryError, PeerLostError, StalledError
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
from kvferry.transports.wire_chunks import ChunkPlan, plan_chunks
from kvferry.transports.wire_messages import (
    CHUNK_DTYPE,
    MAX_READS,
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
    """What the reading side of a transport works with."""

    regions: Regions
    transfers: Transfers
    chunk_bytes: int
    """Bytes per chunk of a read."""
    stall_timeout_s: float
    """Seconds without progress after which a read fails as stalled."""

    @property
    def tick_s(self) -> float:
        """Seconds between two looks for reads that have stalled."""
        return min(1.0, max(0.02, self.stall_timeout_s / 8))


class WireRead(Transfer):
    """One read, with its tables."""

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
        """The id under which the server knows it; -1 until it was sent."""
        self.plan: ChunkPlan | None = None
        self.missing: set[int] = set()
        """Chunks that were asked for and have not come yet."""
        self._reader = reader
        self._peer = peer

    def ended(self, state: TransferState) -> None:
        """See :meth:`Transfer.ended`."""
        self._reader.post(lambda: self._reader.end(self._peer, self, state))


class WirePeer(Peer):
    """A connection to one serving rank. All but ``close`` belongs to one thread."""

    def __init__(self, endpoint: Endpoint, reader: "WireReader[Any]") -> None:
        self.endpoint = endpoint
        self.region_bytes = endpoint.regions
        """By region id; 0 where nothing is served."""
        self.reads: dict[int, WireRead] = {}
        """Reads that the server knows."""
        self.waiting: deque[WireRead] = deque()
        """Reads kept back: the server takes :data:`MAX_READS` at a time."""
        self.next_number = 0
        self.progressed = time.monotonic()
        """When anything last came from it."""
        self.lost: KVFerryError | None = None
        """Why it is gone, once it is."""
        self._reader = reader

    @property
    def address(self) -> str:
        """For messages."""
        return f"{self.endpoint.host}:{self.endpoint.port}"

    def close(self) -> None:
        """See :meth:`Peer.close`. Returns at once; the reads end in ``poll``."""
        error = PeerLostError(f"the connection to {self.address} was closed on this side")
        self._reader.post(lambda: self._reader.lose(self, error))


class WireReader(ABC, Generic[PeerT]):
    """Owns the connections to serving ranks. All but ``read`` belongs to one thread."""

    peer_class: type[PeerT]

    def __init__(self, mailbox: Mailbox, side: ReadingSide) -> None:
        self.post = mailbox.post
        """Has the thread that owns the connections call a task; any thread."""
        self._mailbox = mailbox
        self._side = side
        self._peers: list[PeerT] = []
        self._looked = time.monotonic()

    @abstractmethod
    def connect(self, endpoint: Endpoint) -> PeerT:
        """A connection to a serving rank; returns at once, and may be called by any thread.

        Raises:
            PeerLostError, HostError: it cannot be begun.
        """

    @abstractmethod
    def _send_read(self, peer: PeerT, read: WireRead, message: Read) -> None:
        """Asks for a read that has its plan and its number; loses the peer if that fails."""

    @abstractmethod
    def _forget(self, peer: PeerT, read: WireRead, state: TransferState) -> None:
        """Drops a read that has ended and tells the server; loses the peer if that fails."""

    @abstractmethod
    def _disconnect(self, peer: PeerT) -> None:
        """Lets go of the connection of a peer that is lost; its reads fail afterwards."""

    def read(self, peer: Peer, tiles: Tiles, runs: Runs, after: Waitable | None) -> Transfer:
        """See :meth:`Transport.read`; any thread."""
        ours = own_peer(peer, self.peer_class)
        check_bounds(tiles, runs, ours.region_bytes, self._side.regions.nbytes)
        read = WireRead(self, ours, tiles, runs, self._side.transfers)
        if not self._side.transfers.add(read):
            return read
        start_after(after, read, lambda: self.post(lambda: self._start(ours, read)))
        return read

    def lose(self, peer: PeerT, error: KVFerryError) -> None:
        """Fails everything that runs on the connection, and ends it."""
        if peer.lost is not None:
            return
        peer.lost = error
        self._disconnect(peer)
        reads = [*peer.reads.values(), *peer.waiting]
        peer.reads.clear()
        peer.waiting.clear()
        for read in reads:
            read.fail(error)

    def lose_all(self) -> None:
        """Ends the connections."""
        for peer in list(self._peers):
            self.lose(peer, PeerLostError("the transport was closed"))

    def fail_stalled(self) -> float:
        """Fails the reads of peers that have sent nothing for too long; looks now and then.

        Returns the seconds after which it wants to be called again.
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
        """Fails the reads of one peer."""
        for read in [*peer.reads.values(), *peer.waiting]:
            # A read that waits for its turn behind others of this peer is not stalled, nor one
            # whose chunks have come while we did not run.
            since = time.monotonic() - max(peer.progressed, read.progressed, awake_since)
            if since > self._side.stall_timeout_s:
                read.fail(
                    StalledError(
                        f"{peer.address} has sent nothing for {since:.1f} s "
                        f"(stall_timeout_s: {self._side.stall_timeout_s})"
                    )
                )

    def _awake_since(self) -> float:
        """Since when whoever receives has come to run in time."""
        return self._mailbox.awake_since

    def _start(self, peer: PeerT, read: WireRead) -> None:
        if peer.lost is not None:
            read.fail(PeerLostError(f"the peer was lost before: {peer.lost}"))
        elif len(peer.reads) >= MAX_READS:
            peer.waiting.append(read)
        elif not read.stopped:
            self._request(peer, read)

    def _request(self, peer: PeerT, read: WireRead) -> None:
        try:
            plan = plan_chunks(read.tiles, read.runs, self._side.chunk_bytes)
            message = self._message(peer, plan)
        except Exception as error:  # of ours or a bug of ours: this read ends, the others go on
            read.fail(as_transfer_error(error, "the read cannot be planned"))
            return
        read.plan, read.number = plan, peer.next_number
        read.missing = set(range(len(plan.chunks)))
        read.progressed = time.monotonic()
        peer.reads[read.number] = read
        peer.next_number += 1
        self._send_read(peer, read, message)

    def _message(self, peer: PeerT, plan: ChunkPlan) -> Read:
        """What asks for the peer's next read."""
        return Read(
            peer.next_number,
            encode_table(plan.tiles, SOURCE_TILE_DTYPE),
            encode_table(plan.runs, SOURCE_RUN_DTYPE),
            encode_table(plan.chunks, CHUNK_DTYPE),
            encode_steps(plan.runs),
        )

    def end(self, peer: PeerT, read: WireRead, state: TransferState) -> None:
        """A read has ended; its place at the server is free."""
        if peer.lost is not None:
            return
        self._forget(peer, read, state)
        while peer.waiting and len(peer.reads) < MAX_READS and peer.lost is None:
            self._start(peer, peer.waiting.popleft())

    def _hello(self, peer: PeerT) -> Hello:
        return Hello(peer.endpoint.token, VERSION_MIN, VERSION_MAX)

    def _refused(self, peer: PeerT, message: Refused) -> None:
        if message.transfer is None:
            self.lose(peer, PeerLostError(f"{peer.address} ended the connection: {message.reason}"))
        elif message.transfer in peer.reads:
            # It is dropped, and cancelled where it was not refused, when it has ended.
            peer.reads[message.transfer].fail(refused_error(message, peer.address))

    def _claim(self, peer: PeerT, read: WireRead, chunk: int, nbytes: int) -> ChunkPlan:
        """The plan of a read of which a chunk comes, which counts as come from now on.

        Raises:
            DecodeError: it is none that was asked for, or has come before, or has another size.
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
