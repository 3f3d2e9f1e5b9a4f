"""The transport on one host for existing memory, for example an engine's own tensors.

The reader copies out of the serving process with ``process_vm_readv(2)``, on the reader's mover
threads; the source takes no part in the copy. So a stopped source stalls nothing. A read is one
pass over the bytes, or two passes if pieces are short (:mod:`kvferry.transports.vm_kernels`).
Making a connection checks that the system permits such reads.
"""

import threading
from typing import Literal

import msgspec
import numpy as np

from kvferry.config import parse_struct
from kvferry.decoding import decode_as
from kvferry.errors import DecodeError, KVFerryError
from kvferry.layouts.arrays import ByteArray, Int64s
from kvferry.layouts.chunks import CHUNK_DTYPE, PROGRESS_DTYPE, ChunkedCopy
from kvferry.layouts.copier import stream_bytes
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, num_bytes
from kvferry.transports.base import TransportOptions
from kvferry.transports.local import VERSION, LocalConfig, LocalPeer, LocalTransfer, LocalTransport
from kvferry.transports.regions import make_huge, private_memory
from kvferry.transports.vm_bounce import Bounce, new_bounce
from kvferry.transports.vm_kernels import read_chunks
from kvferry.transports.vm_process import (
    TOKEN_BYTES,
    Identity,
    RemoteProcess,
    Token,
    check_host,
    let_anybody_trace,
)

MIN_CHUNK_BYTES = 256 << 10
"""Least bytes of a chunk when a read is divided among threads."""


_ADDRESS_LIMIT = 1 << 62
_bounces = threading.local()


class VmEndpoint(msgspec.Struct, frozen=True, kw_only=True):
    """Endpoint that leads a reader to a rank's memory."""

    transport: str = "vm"
    version: int = VERSION
    process: Identity
    addresses: tuple[int, ...]
    """Address of each region, in the serving process."""
    nbytes: tuple[int, ...]
    """Number of bytes of each region; 0 for a region that is not served."""


class VmExtraConfig(LocalConfig, frozen=True, kw_only=True):
    """Keys of the ``vm`` transport."""

    huge_pages: bool = True
    """Whether served memory is put in huge pages, if the system has huge pages on request."""
    ptracer: Literal["any", "none"] = "any"
    """Whether all processes of the user may read this process even if Yama would forbid such
    reads."""


class VmPeer(LocalPeer):
    """The memory of one rank, in the rank's process."""

    def __init__(self, endpoint: VmEndpoint) -> None:
        super().__init__(endpoint.nbytes)
        self.addresses[:] = endpoint.addresses
        self.process = RemoteProcess(endpoint.process)

    def lost(self) -> KVFerryError | None:
        """See :meth:`LocalPeer.lost`."""
        return self.process.lost()

    def release(self) -> None:
        """Closes the handle of the process."""
        self.process.close()


class ProcessCopy(ChunkedCopy):
    """Copies tiles × runs from a process into local regions; several threads may step."""

    def __init__(
        self,
        process: RemoteProcess,
        source_addresses: Int64s,
        target_addresses: Int64s,
        tiles: Tiles,
        runs: Runs,
        *,
        chunk_bytes: int,
        threads: int,
    ) -> None:
        """Args:
        process: process whose memory is read.
        source_addresses: int64, address of each region of the process.
        target_addresses: int64, address of each local region.
        tiles: a 1-d array of ``TILE_DTYPE``; bounds are checked already.
        runs: a 1-d array of ``RUN_DTYPE``.
        chunk_bytes: largest number of bytes per chunk (but one run of one tile is never cut).
        threads: number of threads among which a short read is divided.
        """
        each = max(MIN_CHUNK_BYTES, -(-num_bytes(tiles, runs) // threads))
        super().__init__(tiles, runs, min(chunk_bytes, each))
        self._process = process
        self._addresses = source_addresses, target_addresses
        self._stream = self.nbytes >= stream_bytes()

    def step(self, nbytes: int) -> bool:
        """See :meth:`ChunkedCopy.step`.

        Raises:
            PeerLostError: the process has ended, closed its transport, or may not be read.
            TransferError: the process has unmapped served memory.
        """
        source, target = self._addresses
        failed, left = read_chunks(
            self._process.pid,
            self._tiles,
            self._runs,
            self._chunks,
            self._progress,
            _bounce()._replace(sources=source, targets=target),
            nbytes,
            self._stream,
        )
        if failed:
            raise self._process.reading_error(failed)
        return left


class VmTransport(LocalTransport[VmPeer]):
    """Reads between the processes of one host, out of any memory of the remote process."""

    name = "vm"
    may_sleep = True
    peer_class = VmPeer
    ExtraConfig = VmExtraConfig

    def __init__(self, options: TransportOptions, extra: VmExtraConfig) -> None:
        super().__init__(options.threads, extra.chunk_bytes)
        self._extra = extra
        self._token = Token()

    @classmethod
    def open(cls, options: TransportOptions) -> "VmTransport":
        """Loads the copier and starts the movers.

        Raises:
            ConfigError: unknown or wrong keys in ``options.extra``.
            HostError: the system has no ``process_vm_readv``.
        """
        extra = parse_struct(VmExtraConfig, options.extra, "vm")
        check_host()
        warm()
        return cls(options, extra)

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """See :meth:`Transport.allocate`; allocates ordinary memory."""
        memory = private_memory(nbytes, huge_pages=self._extra.huge_pages)
        return self._add(memory, serve=True), memory

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`; the memory may lie anywhere and need not be aligned.

        Raises:
            ValueError: not a contiguous, writable 1-d array of ``uint8``.
        """
        region = self._add(memory, serve=serve)
        if serve and self._extra.huge_pages:
            make_huge(memory)
        return region

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`."""
        with self._lock:
            addresses, nbytes = self._regions.addresses, self._regions.served_nbytes
        endpoint = VmEndpoint(
            process=self._token.identity,
            addresses=tuple(
                address if served else 0
                for address, served in zip(addresses.tolist(), nbytes, strict=True)
            ),
            nbytes=nbytes,
        )
        return msgspec.msgpack.encode(endpoint)

    def connect(self, endpoint: bytes) -> VmPeer:
        """Finds the process and reads its token, so that missing permission shows in this call.

        Raises:
            DecodeError: the endpoint does not decode.
            PeerLostError: the peer is gone, out of reach, or may not be read.
        """
        return self._add_peer(VmPeer(_decode(endpoint)))

    def _read(self, peer: VmPeer, tiles: Tiles, runs: Runs) -> LocalTransfer:
        copy = ProcessCopy(
            peer.process,
            peer.addresses,
            self._regions.addresses,
            tiles,
            runs,
            chunk_bytes=self._chunk_bytes,
            threads=self._movers.size,
        )
        return LocalTransfer(copy, self._transfers, self._movers, peer)

    def close(self) -> None:
        """See :meth:`Transport.close`. Peers can then see that this process serves nothing now."""
        self._token.wipe()
        super().close()

    def _add(self, memory: ByteArray, *, serve: bool) -> int:
        if serve and self._extra.ptracer == "any":
            let_anybody_trace()
        with self._lock:
            return self._regions.add(memory, serve=serve)


def _decode(endpoint: bytes) -> VmEndpoint:
    described = decode_as(VmEndpoint, endpoint, "vm", VERSION)
    process = described.process
    numbers = (process.token_address, *described.addresses, *described.nbytes)
    sound = (
        0 < process.pid < 1 << 31
        and len(process.token) == TOKEN_BYTES
        and len(described.addresses) == len(described.nbytes)
        and all(0 <= number < _ADDRESS_LIMIT for number in numbers)
    )
    if not sound:
        raise DecodeError("vm endpoint: its numbers make no sense")
    return described


def warm() -> None:
    """Compiles the kernels or loads them from disk, and measures stores; spares the first read."""
    tiles, runs = np.empty(0, dtype=TILE_DTYPE), np.empty(0, dtype=RUN_DTYPE)
    chunks, progress = np.empty(0, dtype=CHUNK_DTYPE), np.zeros(1, dtype=PROGRESS_DTYPE)
    read_chunks(0, tiles, runs, chunks, progress, _bounce(), 1, False)
    stream_bytes()


def _bounce() -> Bounce:
    """The bounce buffer of the calling thread."""
    bounce = getattr(_bounces, "bounce", None)
    if bounce is None:
        bounce = _bounces.bounce = new_bounce()
    return bounce
