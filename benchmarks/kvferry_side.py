"""Our side: the source's memory served over shm, vm and tcp, their reader, and their ceilings: one
memcpy, bare ``process_vm_readv``, and bare loops over sockets, plain and encrypted.
"""

import ctypes
import importlib.util
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.cases import LAYOUTS, CacheShape, Case, Reader, lowered
from benchmarks.remote import WrongDataError
from kvferry.cli.bench import load_blocks, seconds_of
from kvferry.explain.limits import (
    TOKEN_BYTES,
    BareSource,
    Copy,
    copy_from,
    copy_pieces,
    dial,
    receive_all,
)
from kvferry.transports.base import Peer, Transport, TransportOptions
from kvferry.transports.registry import open_transport
from kvferry.transports.shm import ShmEndpoint
from kvferry.transports.shm_segment import PeerSegment
from kvferry.transports.tcp_tls import new_identity
from kvferry.transports.vm import VmEndpoint

ENCRYPTED = "tcp encrypted"
TRANSPORTS = ("shm", "vm", "tcp", ENCRYPTED)

BARE_VM = ("process_vm_readv", "process_vm_readv, shared out")
"""What the transport ``vm`` reads, by bare calls: one long span for each thread, and pieces of
``_PIECE_BYTES`` that the threads take as they come."""
_PIECE_BYTES = 8 << 20


class Offer(msgspec.Struct, frozen=True):
    """How the source's memory can be reached. Region ``i`` holds the cache in ``LAYOUTS[i]``."""

    shm: bytes
    """Endpoint."""
    endpoints: dict[tuple[str, int], bytes]
    """Transport and its threads → endpoint. That of ``vm`` is of copies in private memory, as an
    engine would have allocated it; one that encrypts is left out where it lacks a package."""
    bare: dict[str, tuple[int, bytes]]
    """``socket``, and ``tls`` where it is there → port and token of the bare loop."""

    def attach(self) -> list[PeerSegment]:
        """Maps the source's regions."""
        described = msgspec.msgpack.decode(self.shm, type=ShmEndpoint)
        segments = [PeerSegment.attach(each.segment, each.nbytes) for each in described.regions]
        for segment in segments:
            segment.populate(0, segment.array.nbytes)
        return segments


def _open(name: str, threads: int) -> Transport:
    extra = {"encrypt_data": True} if name == ENCRYPTED else {}
    options = TransportOptions(threads=threads, extra=extra)
    return open_transport("tcp" if name == ENCRYPTED else name, options)


class KvferrySource:
    """The cache, once in each layout, in shared memory, and once more in private memory."""

    def __init__(self, shape: CacheShape, threads: tuple[int, ...]) -> None:
        self._stack = ExitStack()
        self._shm, self._vm = (
            self._stack.enter_context(open_transport(name)) for name in ("shm", "vm")
        )
        known = shape.known_cells()
        regions = []
        for layout in LAYOUTS:
            _, region = self._shm.allocate(shape.region_bytes)
            shape.cells(region, layout)[:] = known
            self._vm.register(region.copy())
            regions.append(region)
        encrypts = importlib.util.find_spec("cryptography") is not None
        self._wires: dict[tuple[str, int], Transport] = {}
        for name in ("tcp", ENCRYPTED) if encrypts else ("tcp",):
            for count in threads:
                transport = self._stack.enter_context(_open(name, count))
                self._wires[name, count] = transport
                for region in regions:
                    transport.register(region)
        sent = regions[0][: shape.transfer_bytes]
        self._bare = {"socket": self._stack.enter_context(BareSource(sent))}
        if encrypts:
            context, _ = new_identity()
            self._bare["tls"] = self._stack.enter_context(BareSource(sent, context=context))
        self._threads = threads

    def offer(self) -> Offer:
        """How to reach it."""
        local = {"shm": self._shm.endpoint(), "vm": self._vm.endpoint()}
        endpoints = {(name, n): each for name, each in local.items() for n in self._threads}
        endpoints |= {key: wire.endpoint() for key, wire in self._wires.items()}
        bare = {name: (each.port, each.token) for name, each in self._bare.items()}
        return Offer(local["shm"], endpoints, bare)

    def close(self) -> None:
        """Closes the transports and the bare loops."""
        self._stack.close()


class KvferryReader(Reader):
    """Reads into private memory, by each transport, and with a plain memcpy."""

    def __init__(self, shape: CacheShape, offer: Offer, threads: tuple[int, ...]) -> None:
        super().__init__(shape)
        (self._source, *_) = (segment.array for segment in offer.attach())
        self._open: dict[tuple[str, int], tuple[Transport, Peer]] = {}
        for (name, count), endpoint in offer.endpoints.items():
            transport = _open(name, count)
            transport.register(self.target, serve=False)
            self._open[name, count] = transport, transport.connect(endpoint)
        vm = msgspec.msgpack.decode(offer.endpoints["vm", threads[0]], type=VmEndpoint)
        read_vm, self._pools = (
            copy_from(vm.process.pid),
            {n: ThreadPoolExecutor(n) for n in threads},
        )
        reader = secrets.token_bytes(TOKEN_BYTES)
        self._sockets = {
            name: [
                dial("127.0.0.1", *at, reader, encrypted=name == "tls") for _ in range(max(threads))
            ]
            for name, at in offer.bare.items()
        }
        self._loops: dict[str, Callable[[int], object]] = {
            "memmove": partial(self._copy, ctypes.memmove, self._source.ctypes.data),
            "process_vm_readv": partial(self._copy, read_vm, vm.addresses[0]),
            "process_vm_readv, shared out": partial(
                self._copy, read_vm, vm.addresses[0], piece_bytes=_PIECE_BYTES
            ),
            "torch copy": self._torch_copy,
            "socket": partial(self._receive, "socket"),
            "tls": partial(self._receive, "tls"),
        }
        # Connections are made now: both processes may be suspended from here on.
        for name, count in self._open:
            self.measure(name, Case(LAYOUTS[0], LAYOUTS[0], shuffled=False, threads=count))

    def measure(self, contender: str, case: Case) -> float:
        """One transfer, from the block tables to the data in place; seconds."""
        if contender in self._loops:
            return seconds_of(partial(self._loops[contender], case.threads))
        ends = self._open[contender, case.threads]
        plan, tiles = lowered(self.shape, case.source_layout, case.target_layout)
        tables = case.block_tables(self.shape)
        return seconds_of(partial(load_blocks, *ends, plan, tiles, tables, self.shape.tokens))

    def check(self, contender: str, case: Case) -> None:
        """See :class:`~benchmarks.cases.Reader`."""
        nbytes = self.shape.transfer_bytes
        if contender not in self._loops:
            super().check(contender, case)
        elif not np.array_equal(self._source[:nbytes], self.target[:nbytes]):
            raise WrongDataError(f"{contender}: source and target differ")

    def close(self) -> None:
        """Closes the transports."""
        for transport, _ in self._open.values():
            transport.close()

    def _copy(
        self, copy: Copy, source: int, threads: int, *, piece_bytes: int | None = None
    ) -> None:
        """As many bytes that lie together, in equal parts unless their size is given."""
        nbytes = self.shape.transfer_bytes
        piece = piece_bytes or -(-nbytes // threads)
        ends = self.target.ctypes.data, source
        copy_pieces(self._pools[threads], copy, ends, nbytes, piece)

    def _receive(self, loop: str, threads: int) -> None:
        """By one connection per thread."""
        target = self.target[: self.shape.transfer_bytes]
        receive_all(self._pools[threads], self._sockets[loop][:threads], target)

    def _torch_copy(self, threads: int) -> None:
        import torch

        torch.set_num_threads(threads)
        nbytes = self.shape.transfer_bytes
        target = torch.from_numpy(self.target[:nbytes])
        target.copy_(torch.frombuffer(writable(self._source[:nbytes]), dtype=torch.uint8))


def writable(array: npt.NDArray[np.uint8]) -> ctypes.Array[ctypes.c_ubyte]:
    """The same memory, marked as writable: torch asks for that even of a source."""
    return (ctypes.c_ubyte * array.nbytes).from_address(array.ctypes.data)
