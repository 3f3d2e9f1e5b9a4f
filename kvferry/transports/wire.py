"""The common part of the tcp and ucx transports: served memory, access checks and refusals."""

import hmac
import logging
import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec

from kvferry.errors import ConfigError, KVFerryError, NotReadyError, ProtocolError, TransferError
from kvferry.layouts.arrays import ByteArray, MemorySpan
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import (
    Addressing,
    Peer,
    Transfer,
    Transfers,
    Waitable,
)
from kvferry.transports.packing import Packer, PackingTransport
from kvferry.transports.regions import Regions, private_memory
from kvferry.transports.wire_chunks import ChunkPlan, check_chunks, has_room
from kvferry.transports.wire_messages import (
    MAX_CHUNK_BYTES,
    MAX_READS,
    MAX_TABLE_BYTES,
    MAX_TRANSFER,
    VERSION_MAX,
    VERSION_MIN,
    Endpoint,
    Hello,
    Read,
    Refused,
    decode_endpoint,
    decode_read,
    encode,
)
from kvferry.transports.wire_reader import ReadingSide, WirePeer, WireReader
from kvferry.zeromq import is_everywhere

logger = logging.getLogger(__name__)


class WireConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration keys that the wire transports share."""

    port: int = 0
    """Port of the data endpoint of rank 0; rank ``n`` uses the port plus ``n``. 0 takes a free
    port."""
    chunk_bytes: int = 4 << 20
    """Number of bytes per chunk of a read."""
    max_readers: int = 512
    """Largest number of served connections; above it, the connection silent longest is dropped."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port: {self.port} is not a TCP port (0 to 65535)")
        if not 4096 <= self.chunk_bytes <= MAX_CHUNK_BYTES:
            raise ValueError(f"chunk_bytes: {self.chunk_bytes} is not in 4096 to {MAX_CHUNK_BYTES}")
        if self.max_readers < 1:
            raise ValueError(f"max_readers: {self.max_readers} is less than 1")


def port_of(port: int, rank: int) -> int:
    """The port of a rank, given the port of rank 0; 0 stays 0.

    Raises:
        ConfigError: there is no such port.
    """
    if port and port + rank > 65535:
        raise ConfigError(f"port: {port} leaves none for rank {rank}; give a smaller one")
    return port and port + rank


def check_host(host: str) -> None:
    """Checks that peers can use a host.

    Raises:
        ConfigError: the host stands for every address of this machine.
    """
    if is_everywhere(host):
        raise ConfigError(
            f"host: {host} is every address of this machine, and other engines must be told one; "
            "set host or advertise_host to the address at which they reach this machine"
        )


class WireTransport(PackingTransport):
    """A transport whose source packs chunks that the reader unpacks."""

    addressing = Addressing.PACKED
    fences = True
    may_sleep = True

    _port: int
    """Port of the data endpoint."""
    _certificate = b""
    """Certificate of this rank if the rank encrypts; else empty."""
    reader: WireReader[Any]
    """The side that reads what peers serve."""

    def __init__(self, host: str) -> None:
        self._host = host
        self._token = secrets.token_bytes(16)
        self._regions = Regions()
        self._transfers = Transfers()

    def _reading_side(self, extra: WireConfig, stall_timeout_s: float) -> ReadingSide:
        return ReadingSide(self._regions, self._transfers, extra.chunk_bytes, stall_timeout_s)

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """See :meth:`Transport.allocate`."""
        memory = private_memory(nbytes)
        return self.register(memory), memory

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`."""
        return self._regions.add(memory, serve=serve)

    def register_packed(self, memory: MemorySpan, packer: Packer) -> int:
        """See :meth:`PackingTransport.register_packed`."""
        self._regions.packer = packer
        return self._regions.add_device(memory, serve=True)

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`."""
        return encode(
            Endpoint(
                transport=self.name,
                host=self._host,
                port=self._port,
                token=self._token,
                regions=self._regions.served_nbytes,
                certificate=self._certificate,
            )
        )

    def connect(self, endpoint: bytes) -> WirePeer:
        """Begins a connection and returns at once; if no rank serves there, the reads fail.

        Raises:
            DecodeError: the endpoint does not decode.
        """
        peer: WirePeer = self.reader.connect(decode_endpoint(endpoint, self.name))
        return peer

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """See :meth:`Transport.read`."""
        return self.reader.read(peer, tiles, runs, after)

    def poll(self) -> list[Transfer]:
        """See :meth:`Transport.poll`."""
        return self._transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transport.cancel`; terminal once no thread writes for the transfer."""
        self._transfers.cancel(transfer)


MAX_TABLE_BYTES_IN_ALL = 512 << 20
"""Largest number of bytes in the tables of all readers' reads, for up to eight threads. With more
threads, each thread still has room for the reads of one reader."""


@dataclass(slots=True, eq=False, kw_only=True)
class ServedReader:
    """One connection of a reader."""

    reads: dict[int, ChunkPlan] = field(default_factory=dict)
    """Reads in progress, by the number that the reader gave to each read."""
    heard: float = field(default_factory=time.monotonic)
    """``time.monotonic()`` of the reader's last message, or of the last byte that the reader
    took."""

    @property
    def table_bytes(self) -> int:
        """Number of bytes in the tables of the reader's reads."""
        return sum(plan.table_bytes for plan in self.reads.values())


ReaderT = TypeVar("ReaderT", bound=ServedReader)


class WireServer:
    """Serves regions to some of the readers. One thread owns the whole object."""

    def __init__(self, regions: Regions, token: bytes, max_readers: int, threads: int = 1) -> None:
        """Makes one of ``threads`` servers that serve ``max_readers`` together."""
        self.refused = 0
        """Number of refused messages."""
        self._regions = regions
        self._token = token
        self._max_readers = -(-max_readers // threads)
        self._max_table_bytes = max(MAX_TABLE_BYTES, MAX_TABLE_BYTES_IN_ALL // threads)

    def _check_hello(self, hello: Hello) -> None:
        """Raises ProtocolError for the token of another rank or start, or an unknown version."""
        if not hmac.compare_digest(hello.token, self._token):
            raise ProtocolError(
                "the endpoint is of another rank, or of an earlier start of this one"
            )
        if hello.version_min > VERSION_MAX or hello.version_max < VERSION_MIN:
            raise ProtocolError(
                f"the reader speaks versions {hello.version_min} to {hello.version_max}, "
                f"this server {VERSION_MIN} to {VERSION_MAX}; upgrade the older side"
            )

    def _plan(
        self, reader: ServedReader, readers: Iterable[ServedReader], message: Read
    ) -> ChunkPlan:
        """The checked plan of a requested read; ``readers`` are all readers of this thread.

        Raises:
            ProtocolError, TransferError: the read may not be served.
            NotReadyError: there is no room for the read beside the reads of other readers.
        """
        if not 0 <= message.transfer <= MAX_TRANSFER:
            raise ProtocolError(
                f"transfer: {message.transfer} is not in 0 to {MAX_TRANSFER}; count reads from 0 on"
            )
        if message.transfer in reader.reads:
            raise ProtocolError(f"transfer {message.transfer} is under way already")
        if len(reader.reads) >= MAX_READS:
            raise TransferError(f"{MAX_READS} reads of this reader are under way already")
        plan = check_chunks(*decode_read(message), self._regions.served_nbytes)
        if self._regions.packer is not None:
            self._regions.packer.check(plan.tiles, plan.runs)
        if not has_room(plan, reader.reads.values()):
            raise TransferError(
                f"the tables of this reader's reads take {reader.table_bytes} bytes, those of this "
                f"read {plan.table_bytes} more, allowed are {MAX_TABLE_BYTES}; read less at a time"
            )
        if plan.table_bytes > self._max_table_bytes:
            raise TransferError(
                f"the tables of this read take {plan.table_bytes} bytes, allowed are "
                f"{self._max_table_bytes}; read less at a time"
            )
        if plan.table_bytes > MAX_TABLE_BYTES // MAX_READS:  # small tables need not be added up
            held = sum(other.table_bytes for other in readers)
            if held + plan.table_bytes > self._max_table_bytes:
                raise NotReadyError(
                    f"the tables of all reads under way take {held} bytes, those of this read "
                    f"{plan.table_bytes} more, allowed are {self._max_table_bytes}; try again"
                )
        return plan

    def _silent_longest(self, readers: Iterable[ReaderT]) -> ReaderT:
        """Reader to drop for a new reader: without reads if possible, then the longest silent."""
        return min(readers, key=lambda known: (bool(known.reads), known.heard))

    def _refusal(self, transfer: int | None, error: KVFerryError) -> Refused:
        """Counts a refusal; returns the message for the reader."""
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th …: no flood of log lines
            logger.warning("refused message number %d: %s", self.refused, error)
        return Refused(transfer, type(error).__name__, str(error)[:2000])
