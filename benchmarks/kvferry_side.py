"""Our side: the source's memory served over shm, vm and tcp, their reader, and one memcpy."""

import ctypes
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import numpy.typing as npt

from benchmarks.cases import LAYOUTS, CacheShape, Case, WrongDataError, check_target, lowered
from benchmarks.samples import Sample
from kvferry.layouts.tiles import Tiles
from kvferry.topology import TransferPlan
from kvferry.transports.base import Peer, TransferState, Transport, TransportOptions
from kvferry.transports.registry import open_transport
from kvferry.transports.shm import ShmEndpoint
from kvferry.transports.shm_segment import PeerSegment

_TRANSPORTS = ("shm", "vm", "tcp")

_POLL_S = 1e-4
"""Seconds between two looks at a transfer. Looking all the time would take a core from it."""


class Offer(msgspec.Struct, frozen=True):
    """How the source's memory can be reached. Region ``i`` holds the cache in ``LAYOUTS[i]``."""

    shm: bytes
    """Endpoint."""
    vm: bytes
    """Endpoint of copies in private memory, as an engine would have allocated it."""
    tcp: dict[int, bytes]
    """Threads → endpoint."""

    def attach(self) -> list[PeerSegment]:
        """Maps the source's regions."""
        described = msgspec.msgpack.decode(self.shm, type=ShmEndpoint)
        segments = [PeerSegment.attach(each.segment, each.nbytes) for each in described.regions]
        for segment in segments:
            segment.populate(0, segment.array.nbytes)
        return segments


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
        self._tcp = {
            count: open_transport("tcp", TransportOptions(threads=count)) for count in threads
        }
        for transport in self._tcp.values():
            for region in regions:
                transport.register(region)

    def offer(self) -> Offer:
        """How to reach it."""
        return Offer(
            self._shm.endpoint(),
            self._vm.endpoint(),
            {count: transport.endpoint() for count, transport in self._tcp.items()},
        )

    def close(self) -> None:
        """Closes the transports."""
        for transport in (*self._tcp.values(), self._vm, self._shm):
            transport.close()


class KvferryReader:
    """Reads into private memory, by each transport, and with a plain memcpy."""

    def __init__(self, shape: CacheShape, offer: Offer, threads: tuple[int, ...]) -> None:
        self._shape = shape
        self._known = shape.known_cells()
        self._target = np.zeros(shape.region_bytes, dtype=np.uint8)
        self._target[:] = 0
        self._segments = offer.attach()
        self._open: dict[tuple[str, int], tuple[Transport, Peer]] = {}
        for name in _TRANSPORTS:
            for count in threads:
                transport = open_transport(name, TransportOptions(threads=count))
                transport.register(self._target, serve=False)
                endpoint = {"shm": offer.shm, "vm": offer.vm, "tcp": offer.tcp[count]}[name]
                self._open[name, count] = (transport, transport.connect(endpoint))
        self._pools = {count: ThreadPoolExecutor(count) for count in threads}
        self._plans: dict[tuple[str, str], tuple[TransferPlan, Tiles]] = {}
        # Connections are made now: both processes may be suspended from here on.
        for name, count in self._open:
            self._read(name, Case(LAYOUTS[0], LAYOUTS[0], shuffled=False, threads=count))

    def measure(self, contender: str, case: Case) -> Sample:
        """One transfer."""
        if contender in _TRANSPORTS:
            return self._read(contender, case)
        copy = {"memmove": self._memmove, "torch copy": self._torch_copy}[contender]
        return Sample(copy(case.threads))

    def clear(self) -> None:
        """Zeroes the target."""
        self._target[:] = 0

    def check(self, contender: str, case: Case) -> None:
        """Checks the target after a transfer.

        Raises:
            WrongDataError: it holds something else than it should.
        """
        if contender in _TRANSPORTS:
            check_target(self._shape, case, self._target, self._known)
            return
        nbytes = self._shape.transfer_bytes
        if not np.array_equal(self._target[:nbytes], self._segments[0].array[:nbytes]):
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
        began = time.perf_counter()
        copies = plan.bind(source_blocks, target_blocks, self._shape.tokens)
        transfer = transport.read(peer, tiles, copies.runs_of(0))
        while not transfer.is_terminal:
            time.sleep(_POLL_S)
        seconds = time.perf_counter() - began
        transport.poll()
        if transfer.state is not TransferState.DONE:
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
        cuts = [nbytes * index // threads for index in range(threads + 1)]

        def copy(index: int) -> None:
            first, last = cuts[index], cuts[index + 1]
            ctypes.memmove(target + first, source + first, last - first)

        return _timed(lambda: list(self._pools[threads].map(copy, range(threads))))

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
