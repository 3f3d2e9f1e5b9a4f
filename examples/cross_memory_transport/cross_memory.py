"""An example transport: the reader copies out of the source's process with process_vm_readv(2).

The transport connects processes of one user on one Linux host. The source takes no part in a read,
so no thread serves. The source only has to keep its memory and a token in place; the token proves
that the memory is still valid. The built-in transport ``vm`` does the same at full speed.
"""

import ctypes
import errno
import os
import secrets
from functools import partial
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np
import numpy.typing as npt

from kvferry.config import parse_struct
from kvferry.errors import (
    DecodeError,
    KVFerryError,
    PeerLostError,
    SharedMemoryError,
    TransferError,
)
from kvferry.layouts import check_bounds, num_bytes
from kvferry.layouts.copier import expand, warm
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports import (
    Addressing,
    ByteArray,
    Peer,
    Transfer,
    Transfers,
    TransferState,
    Transport,
    TransportOptions,
    Waitable,
)
from kvferry.transports.movers import MoverPool, start_after
from kvferry.transports.regions import Regions

SPANS_PER_CALL = 1024  # the kernel's limit; a read can be cancelled between calls
SPAN_DTYPE = np.dtype([("address", np.uint64), ("nbytes", np.uint64)])  # struct iovec

_readv = ctypes.CDLL(None, use_errno=True).process_vm_readv
_readv.restype = ctypes.c_ssize_t
_readv.argtypes = (
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
)


class CrossMemoryConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The keys of this transport: none."""


class Endpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's data for readers. The endpoint comes from a peer, so it is decoded and then
    checked.
    """

    host: str
    pid: int
    token: bytes
    """Random token of this start. A later process with the same id has other bytes at the
    address."""
    addresses: tuple[int, ...]
    """Address of the token, then address of each region."""
    nbytes: tuple[int, ...]
    """Number of bytes in each region; 0 if the region is not served."""


class CrossMemoryPeer(Peer):
    """A rank to read from."""

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint
        self.reads: set[Transfer] = set()
        self.closed = False

    def error(self) -> KVFerryError | None:
        """Error that forbids reads from the peer, or None. Checked before a read and after its last
        byte.
        """
        token = np.zeros(len(self.endpoint.token), dtype=np.uint8)
        zero = np.zeros(1, dtype=np.int64)
        try:
            if self.closed:
                raise PeerLostError("the connection was closed")
            self.copy(zero, zero, np.array([token.ctypes.data]), np.array([token.nbytes]))
            if token.tobytes() != self.endpoint.token:
                raise PeerLostError(f"process {self.endpoint.pid} has given up its memory")
        except KVFerryError as error:
            return error
        return None

    def copy(
        self,
        index: npt.NDArray[Any],
        offset: npt.NDArray[Any],
        target: npt.NDArray[Any],
        nbytes: npt.NDArray[Any],
    ) -> None:
        """Copies spans of ``nbytes`` from ``offset`` of the memory ``index`` (0: the token).

        Raises:
            TransferError: this process may not read the other process.
            PeerLostError: the other process is gone, or has unmapped the memory.
        """
        bases = np.array(self.endpoint.addresses, dtype=np.uint64)
        source = bases[index] + offset.astype(np.uint64)
        local, remote = (np.empty(len(source), dtype=SPAN_DTYPE) for _ in range(2))
        for table, addresses in ((local, target), (remote, source)):
            table["address"], table["nbytes"] = addresses, nbytes
        pid, count = self.endpoint.pid, len(source)
        done = _readv(pid, local.ctypes.data, count, remote.ctypes.data, count, 0)
        if done == int(local["nbytes"].sum()):
            return
        number = ctypes.get_errno() if done < 0 else 0
        if number == errno.EPERM:
            raise TransferError(f"process {pid} may not be read: another user's?")
        raise PeerLostError(f"process {pid} is gone: {os.strerror(number)}")

    def close(self) -> None:
        """Fails the reads under way from the peer."""
        self.closed = True
        for read in list(self.reads):
            read.fail(PeerLostError("the connection was closed"))


class CrossMemoryRead(Transfer):
    """A read, which ends when no thread writes for the read any more."""

    def __init__(self, nbytes: int, transfers: Transfers, peer: CrossMemoryPeer) -> None:
        super().__init__(nbytes, transfers)
        self.peer = peer

    def verify(self) -> KVFerryError | None:
        """Checks, when all bytes have arrived, that the bytes belong to the peer."""
        return self.peer.error()

    def ended(self, state: TransferState) -> None:
        """Removes the read from the reads that the peer would fail."""
        self.peer.reads.discard(self)


class CrossMemoryTransport(Transport):
    """The plugin."""

    name = "cross_memory"
    addressing = Addressing.MOVERS
    fences = True  # only local copy threads write here, and they are counted
    ExtraConfig = CrossMemoryConfig

    def __init__(self, options: TransportOptions) -> None:
        self._regions, self._transfers = Regions(), Transfers()
        self._token = np.frombuffer(bytearray(secrets.token_bytes(16)), dtype=np.uint8)
        self._token_bytes = self._token.tobytes()
        self._pool = MoverPool("cross-memory", options.threads)
        self._peers: list[CrossMemoryPeer] = []

    @classmethod
    def open(cls, options: TransportOptions) -> Self:
        parse_struct(CrossMemoryConfig, options.extra, cls.name)  # ConfigError for an unknown key
        warm()  # compiles the code for the first read
        return cls(options)

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        try:
            memory = np.zeros(nbytes, dtype=np.uint8)
        except MemoryError as error:
            raise SharedMemoryError(f"cannot allocate {nbytes} bytes: {error}") from error
        return self.register(memory), memory

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        return self._regions.add(memory, serve=serve)

    def endpoint(self) -> bytes:
        endpoint = Endpoint(
            host=host_id(),
            pid=os.getpid(),
            token=self._token_bytes,
            addresses=(self._token.ctypes.data, *self._regions.addresses.tolist()),
            nbytes=self._regions.served_nbytes,
        )
        return msgspec.msgpack.encode(endpoint)

    def connect(self, endpoint: bytes) -> CrossMemoryPeer:
        try:
            found = msgspec.msgpack.decode(endpoint, type=Endpoint)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DecodeError(f"endpoint of {len(endpoint)} bytes: {error}") from error
        fits = len(found.token) == 16 and len(found.addresses) == len(found.nbytes) + 1
        if not fits or not all(0 <= n < 1 << 63 for n in (*found.addresses, *found.nbytes)):
            raise DecodeError("endpoint: its numbers make no sense")
        if found.host != host_id():
            raise PeerLostError("the peer runs on another host or in another PID namespace")
        peer = CrossMemoryPeer(found)
        self._peers = [known for known in self._peers if not known.closed]
        self._peers.append(peer)
        return peer

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        assert isinstance(peer, CrossMemoryPeer)
        check_bounds(tiles, runs, peer.endpoint.nbytes, self._regions.nbytes)  # BoundsError
        read = CrossMemoryRead(num_bytes(tiles, runs), self._transfers, peer)
        peer.reads.add(read)
        if not self._transfers.add(read):
            return read  # the transport is closed, and the read has failed
        error = peer.error()
        if error is not None:
            read.fail(error)
        else:
            begin = partial(self._begin, read, tiles, runs)
            start_after(after, read, lambda: self._pool.submit(begin))
        return read

    def _begin(self, read: CrossMemoryRead, tiles: Tiles, runs: Runs) -> None:
        spans = expand(tiles, runs)  # single contiguous copies, after merging
        spans["source_region"] += 1  # the first entry of the peer's endpoint is the token
        self._step(read, spans)

    def _step(self, read: CrossMemoryRead, spans: npt.NDArray[Any]) -> None:
        """Copies the spans of one call, then queues the rest, so that reads share the copy
        threads.
        """
        if not read.enter():
            return  # the read was cancelled or has failed: no writes from now on
        now, later = spans[:SPANS_PER_CALL], spans[SPANS_PER_CALL:]
        nbytes = 0
        try:
            target = self._regions.addresses[now["target_region"]] + now["target_offset"]
            read.peer.copy(now["source_region"], now["source_offset"], target, now["nbytes"])
            nbytes = int(now["nbytes"].sum())
        except KVFerryError as error:
            read.fail(error)
        finally:
            read.leave(nbytes, len(now))
        if len(later):
            self._pool.submit(partial(self._step, read, later))

    def poll(self) -> list[Transfer]:
        return self._transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        self._transfers.cancel(transfer)

    def close(self) -> None:
        self._token[:] = 0  # tells readers that the memory may have a new owner
        self._transfers.close()
        for peer in self._peers:
            peer.close()
        self._pool.close()


def host_id() -> str:
    """Identifies a boot of a host and a PID namespace, the scope in which a process id is
    unique.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
