"""Our side: the source's memory served over shm, vm and tcp, their reader, and their ceilings: one
memcpy, bare ``process_vm_readv``, and bare loops over sockets, plain and encrypted.
"""

import ctypes
import functools
import importlib.util
import secrets
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.cases import (
    LAYOUTS,
    CacheShape,
    Case,
    WrongDataError,
    blank_target,
    check_target,
    lowered,
    merged_blocks,
)
from benchmarks.samples import Sample
from kvferry.explain.limits import (
    TOKEN_BYTES,
    BareSource,
    dial,
    part_of,
    read_process,
    receive_part,
)
from kvferry.layouts.tiles import Tiles
from kvferry.topology import TransferPlan
from kvferry.transports.base import Peer, Transport, TransportOptions
from kvferry.transports.registry import open_transport
from kvferry.transports.shm import ShmEndpoint
from kvferry.transports.shm_segment import PeerSegment
from kvferry.transports.tcp_tls import new_identity
from kvferry.transports.vm import VmEndpoint
from kvferry.transports.vm_bounce import MAX_SPANS

ENCRYPTED = "tcp encrypted"
TRANSPORTS = ("shm", "vm", "tcp", ENCRYPTED)

BARE_VM = ("process_vm_readv", "process_vm_readv, shared out", "process_vm_readv, blocks")
"""What the transport ``vm`` reads, by bare calls: one long span for each thread, pieces of
``_PIECE_BYTES`` that the threads take as they come, and the blocks of the case."""
_PIECE_BYTES = 8 << 20

Calls: TypeAlias = list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]
"""For each call of ``process_vm_readv`` the spans here and there: rows of address and bytes."""


class Offer(msgspec.Struct, frozen=True):
    """How the source's memory can be reached. Region ``i`` holds the cache in ``LAYOUTS[i]``."""

    shm: bytes
    """Endpoint."""
    vm: bytes
    """Endpoint of copies in private memory, as an engine would have allocated it."""
    tcp: dict[int, bytes]
    """Threads → endpoint."""
    encrypted: dict[int, bytes]
    """The same for a transport that encrypts; empty where it lacks a package."""
    socket: tuple[int, bytes]
    """Port and token of the bare loop."""
    tls: tuple[int, bytes] | None
    """The same of one through TLS, if there is one."""

    def endpoint(self, transport: str, threads: int) -> bytes | None:
        """Of a transport of so many threads, if it is there."""
        if transport in ("shm", "vm"):
            return self.shm if transport == "shm" else self.vm
        return (self.encrypted if transport == ENCRYPTED else self.tcp).get(threads)

    def attach(self) -> list[PeerSegment]:
        """Maps the source's regions."""
        described = msgspec.msgpack.decode(self.shm, type=ShmEndpoint)
        segments = [PeerSegment.attach(each.segment, each.nbytes) for each in described.regions]
        for segment in segments:
            segment.populate(0, segment.array.nbytes)
        return segments


def open_tcp(threads: int, *, encrypted: bool = False) -> Transport:
    """The transport ``tcp``."""
    extra = {"encrypt_data": encrypted}
    return open_transport("tcp", TransportOptions(threads=threads, extra=extra))


class KvferrySource:
    """The cache, once in each layout, in shared memory, and once more in private memory."""

    def __init__(self, shape: CacheShape, threads: tuple[int, ...]) -> None:
        self._shm = open_transport("shm")
        known = shape.known_cells()
        regions = []
        for layout in LAYOUTS:
            _, region = self._shm.allocate(shape.region_bytes)
            shape.cells(region, layout)[:] = known
            regions.append(region)
        self._vm = open_transport("vm")
        for region in regions:
            self._vm.register(region.copy())
        self._tcp = {count: open_tcp(count) for count in threads}
        self._encrypted: dict[int, Transport] = {}
        sent = regions[0][: shape.transfer_bytes]
        self._bare = BareSource(sent)
        self._bare_tls: BareSource | None = None
        if importlib.util.find_spec("cryptography") is not None:
            self._encrypted = {count: open_tcp(count, encrypted=True) for count in threads}
            context, _ = new_identity()
            self._bare_tls = BareSource(sent, context=context)
        for transport in (*self._tcp.values(), *self._encrypted.values()):
            for region in regions:
                transport.register(region)

    def offer(self) -> Offer:
        """How to reach it."""
        return Offer(
            self._shm.endpoint(),
            self._vm.endpoint(),
            {count: transport.endpoint() for count, transport in self._tcp.items()},
            {count: transport.endpoint() for count, transport in self._encrypted.items()},
            (self._bare.port, self._bare.token),
            (self._bare_tls.port, self._bare_tls.token) if self._bare_tls is not None else None,
        )

    def close(self) -> None:
        """Closes the transports and the bare loops."""
        self._bare.close()
        if self._bare_tls is not None:
            self._bare_tls.close()
        for transport in (
            *self._tcp.values(),
            *self._encrypted.values(),
            self._vm,
            self._shm,
        ):
            transport.close()


class KvferryReader:
    """Reads into private memory, by each transport, and with a plain memcpy."""

    def __init__(self, shape: CacheShape, offer: Offer, threads: tuple[int, ...]) -> None:
        self._shape = shape
        self._known = shape.known_cells()
        self._target = blank_target(shape)
        self._segments = offer.attach()
        self._vm = msgspec.msgpack.decode(offer.vm, type=VmEndpoint)
        self._open: dict[tuple[str, int], tuple[Transport, Peer]] = {}
        for name in TRANSPORTS:
            for count in threads:
                if (endpoint := offer.endpoint(name, count)) is None:
                    continue
                if name.startswith("tcp"):
                    transport = open_tcp(count, encrypted=name == ENCRYPTED)
                else:
                    transport = open_transport(name, TransportOptions(threads=count))
                transport.register(self._target, serve=False)
                self._open[name, count] = (transport, transport.connect(endpoint))
        self._pools = {count: ThreadPoolExecutor(count) for count in threads}
        count, reader = max(threads), secrets.token_bytes(TOKEN_BYTES)
        self._sockets = [dial("127.0.0.1", *offer.socket, reader) for _ in range(count)]
        self._tls: list[socket.socket] = []
        if offer.tls is not None:
            port, token = offer.tls
            self._tls = [
                dial("127.0.0.1", port, token, reader, encrypted=True) for _ in range(count)
            ]
        self._plans: dict[tuple[str, str], tuple[TransferPlan, Tiles]] = {}
        self._calls: dict[tuple[str, Case], Calls] = {}
        # Connections are made now: both processes may be suspended from here on.
        for name, count in self._open:
            self._read(name, Case(LAYOUTS[0], LAYOUTS[0], shuffled=False, threads=count))

    def measure(self, contender: str, case: Case) -> Sample:
        """One transfer."""
        if contender in TRANSPORTS:
            return self._read(contender, case)
        if contender in BARE_VM:
            return Sample(self._read_bare(contender, case))
        loops: dict[str, Callable[[int], float]] = {
            "memmove": self._memmove,
            "torch copy": self._torch_copy,
            "socket": functools.partial(self._socket_loop, self._sockets),
            "tls": functools.partial(self._socket_loop, self._tls),
        }
        return Sample(loops[contender](case.threads))

    def clear(self) -> None:
        """Zeroes the target."""
        self._target[:] = 0

    def check(self, contender: str, case: Case) -> None:
        """Checks the target after a transfer.

        Raises:
            WrongDataError: it holds something else than it should.
        """
        if contender in TRANSPORTS:
            check_target(self._shape, case, self._target, self._known)
            return
        source, target = self._segments[0].array, self._target
        if "blocks" in contender:
            source = self._segments[LAYOUTS.index(case.source_layout)].array
            rows = (-1, self._shape.blocks, self._shape.block_bytes)
            source_table, target_table = case.block_tables(self._shape)
            source = source[: self._shape.region_bytes].reshape(rows)[:, source_table]
            target = target.reshape(rows)[:, target_table]
        else:
            source, target = (memory[: self._shape.transfer_bytes] for memory in (source, target))
        if not np.array_equal(source, target):
            raise WrongDataError(f"{contender}: source and target differ")

    def close(self) -> None:
        """Closes the transports."""
        for transport, _ in self._open.values():
            transport.close()

    def _read(self, name: str, case: Case) -> Sample:
        """Binds the request's tables to the plan, reads, waits."""
        transport, peer = self._open[name, case.threads]
        plan, tiles = self._plan(case)
        source_blocks, target_blocks = case.block_tables(self._shape)
        over = threading.Event()
        began = time.perf_counter()
        copies = plan.bind(source_blocks, target_blocks, self._shape.tokens)
        transfer = transport.read(peer, tiles, copies.runs_of(0))
        transfer.on_end(lambda _: over.set())
        over.wait()  # looking every 0.1 ms took a fifth of a core from the copy
        seconds = time.perf_counter() - began
        transport.poll()
        if transfer.error is not None:
            raise RuntimeError(f"{name}, {case}: {transfer.error}")
        return Sample(seconds, segments=transfer.segments)

    def _plan(self, case: Case) -> tuple[TransferPlan, Tiles]:
        layouts = (case.source_layout, case.target_layout)
        if layouts not in self._plans:
            self._plans[layouts] = lowered(self._shape, *layouts)
        return self._plans[layouts]

    def _memmove(self, threads: int) -> float:
        nbytes = self._shape.transfer_bytes
        target, source = self._target.ctypes.data, self._segments[0].array.ctypes.data

        def copy(index: int) -> None:
            first, last = part_of(nbytes, index, threads)
            ctypes.memmove(target + first, source + first, last - first)

        return _timed(lambda: list(self._pools[threads].map(copy, range(threads))))

    def _read_bare(self, contender: str, case: Case) -> float:
        """The calls of one of ``BARE_VM``, each by the thread that comes first."""
        if (contender, case) not in self._calls:
            self._calls[contender, case] = self._list_calls(contender, case)
        left = iter(self._calls[contender, case])

        def work(_: int) -> None:
            for local, remote in left:
                read_process(self._vm.process.pid, local, remote)

        return _timed(lambda: list(self._pools[case.threads].map(work, range(case.threads))))

    def _list_calls(self, contender: str, case: Case) -> Calls:
        nbytes, each = self._shape.transfer_bytes, 1
        source = self._vm.addresses[0]
        if "blocks" in contender:
            source = self._vm.addresses[LAYOUTS.index(case.source_layout)]
            from_, to, sizes = merged_blocks(self._shape, case)
            each = min(MAX_SPANS, _PIECE_BYTES // self._shape.block_bytes)
        else:
            parts = case.threads if contender == "process_vm_readv" else -(-nbytes // _PIECE_BYTES)
            bounds = np.arange(parts + 1, dtype=np.int64) * nbytes // parts
            from_, to, sizes = bounds[:-1], bounds[:-1], np.diff(bounds)
        local = np.stack([to + self._target.ctypes.data, sizes], axis=1)
        remote = np.stack([from_ + source, sizes], axis=1)
        return [
            (local[first : first + each], remote[first : first + each])
            for first in range(0, len(sizes), each)
        ]

    def _socket_loop(self, sockets: list[socket.socket], threads: int) -> float:
        """One connection per thread, and ``recv_into`` until all of its part is there."""
        target = self._target[: self._shape.transfer_bytes]

        def receive(index: int) -> None:
            receive_part(sockets[index], target, index, threads)

        return _timed(lambda: list(self._pools[threads].map(receive, range(threads))))

    def _torch_copy(self, threads: int) -> float:
        import torch

        torch.set_num_threads(threads)
        nbytes = self._shape.transfer_bytes
        target = torch.from_numpy(self._target[:nbytes])
        source = torch.frombuffer(writable(self._segments[0].array[:nbytes]), dtype=torch.uint8)
        return _timed(lambda: target.copy_(source))


def writable(array: npt.NDArray[np.uint8]) -> ctypes.Array[ctypes.c_ubyte]:
    """The same memory, marked as writable: torch and transports ask for that even of a source."""
    return (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
