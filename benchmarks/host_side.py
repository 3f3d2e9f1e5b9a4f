"""What the process of :mod:`benchmarks.host_part` holds.

The transport, its copy stream, the postprocessor and Triton's launcher are the real ones; what they
ask of the device is answered at once and not carried out.
"""

import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver

from benchmarks.cases import CacheShape
from benchmarks.cuda_ipc import READS, IpcCase
from benchmarks.device_wires import DeviceWire
from kvferry.cli.bench import seconds_of
from kvferry.layouts import (
    copier_triton,
    cuda_stream,
    kv_postprocess_layout_on_receive,
    repack_triton,
)
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.cuda_driver import CudaDriver
from kvferry.topology import check_block_ids, plan_transfer
from kvferry.transports.base import TransportOptions
from kvferry.transports.cuda_ipc import CudaIpcTransport
from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES, IpcMemory

REPEATS = 8
"""Reads of a pair, one after the other, in a round."""
PARTS = {
    "tables": (copier_triton, "write_boxes"),
    "uploads": (CudaDriver, "upload"),
    "launches": (copier_triton.DeviceTiles, "copy"),
}
"""What is timed: part → where its function is, and its name."""


class _Nothing:
    """A stream and an event of CUDA, of a device that has always done everything."""

    device = torch.device("cpu")
    cuda_stream = 0
    recorded: float = 0.0

    def __init__(self, *_: object, **__: object) -> None: ...
    def record(self, _: object) -> None:
        _Nothing.recorded = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...


class _Driver:
    """Triton's driver of a GPU: the launcher runs up to the call of its compiled part."""

    launcher_cls = nvidia.CudaLauncher
    launched = 0

    def __init__(self) -> None:
        self.utils = self
        nvidia.PyKernelArg = dict

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def allocate_default_profile_scratch(self, *_: object) -> None: ...
    def launch(self, *_: object) -> None:
        _Driver.launched += 1

    def unload_module(self, _: object) -> None: ...
    def build_signature_metadata(self, _: object) -> bytes:
        return b""

    def get_device_properties(self, _: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 20}

    def load_binary(self, *_: object) -> tuple[int, ...]:
        return 0, 0, 32, 0, 1024


class _Library:
    """The driver, which does nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_: 0


class _Memory(IpcMemory):
    """Allocations that nobody touches."""

    def export(self, memory: MemorySpan) -> tuple[bytes, int]:
        return bytes(HANDLE_BYTES - 1) + b"1", memory.address

    def open(self, handle: bytes) -> MemorySpan:
        return MemorySpan(0, 1 << 50, "cuda:0")

    def release(self, memory: MemorySpan) -> None: ...


class HostTransport(CudaIpcTransport):
    """The transport on a device that does nothing."""

    @classmethod
    def open_device(cls, _: Any) -> Any:
        """See :meth:`CudaIpcTransport.open_device`."""
        return cuda_stream.CudaCopyStream(0), _Memory()


class HostStream(cuda_stream.CudaCopyStream):
    """The stream of a device that does nothing, and whose memory nobody touches."""

    def allocate(self, nbytes: int) -> MemorySpan:
        """See :meth:`CopyStream.allocate`."""
        return MemorySpan(1 << 50, nbytes, self.device)


class Wires:
    """What places chunks and packs pieces, and is timed."""

    def __init__(self, tokens: int) -> None:
        """A read of so many tokens, of equal layouts and of others."""
        pretend()
        case = IpcCase(model="", shape=CacheShape(tokens=tokens))
        self._wires = [
            DeviceWire((HostStream(0), HostStream(0)), case, layouts) for layouts in READS
        ]

    def round(self) -> list[list[float]]:
        """A row per layout: microseconds of a chunk, and of a piece."""
        ways = [[wire.place, wire.pack] for wire in self._wires]
        chunk = 1e6 / self._wires[0].num_chunks
        return [[seconds_of(way) * chunk for way in row] for row in ways]


class Side:
    """Pairs of transports that have met, and what is timed of their reads."""

    def __init__(self, pairs: Sequence[tuple[str, int]]) -> None:
        """Connects a pair for each layout of a source and number of tokens."""
        pretend()
        self._spent = dict.fromkeys(PARTS, 0.0)
        self.pairs = [self._pair(*pair) for pair in pairs]

    def _pair(self, layout: str, tokens: int) -> Callable[[], Any]:
        shape = CacheShape()
        source, target = (shape.geometry(each) for each in (layout, "NHD"))
        blocks = tokens // shape.block_size
        plan = plan_transfer(source=source, target=target)
        memories = [side.memory(0, 2 * blocks + 1) for side in (source, target)]
        tiles = plan.lower({0: memories[0]}, memories[1])[0]
        rng = np.random.default_rng(blocks)
        there, here = (1 + rng.permutation(2 * blocks)[:blocks] for _ in "st")
        ends = [HostTransport.open(TransportOptions()) for _ in "st"]
        for end, memory, at in zip(ends, memories, (1 << 40, 1 << 44), strict=True):
            for number, nbytes in enumerate(memory.region_bytes):
                end.register_device(MemorySpan(at + (number << 36), nbytes, "cuda:0"))
        peer = ends[1].connect(ends[0].endpoint())
        ends[1].prepare(peer, tiles, shape.block_size)

        def read() -> tuple[float, ...]:
            began = time.perf_counter()
            copies = plan.bind(there, here, tokens)
            check_block_ids(copies, 2 * blocks + 1, 2 * blocks + 1)
            bound = time.perf_counter()
            known: list[float] = []
            transfer = ends[1].read(peer, tiles, copies.runs_of(0))
            transfer.on_end(lambda _: known.append(time.perf_counter()))
            while not known:
                time.sleep(0)  # the mover takes the interpreter lock
            assert transfer.error is None
            return bound - began, _Nothing.recorded - bound, known[0] - bound

        return read

    def round(self) -> list[list[float]]:
        """A row per pair: the whole is timed first, then the parts, whose timing takes time."""
        rows = []
        for read in self.pairs:
            wholes = [read() for _ in range(REPEATS)][1:]  # the first one finds cold caches
            self._spent = dict.fromkeys(PARTS, 0.0)
            before = _Driver.launched
            with self._timed():
                for _ in range(REPEATS):
                    read()
            bind, enqueued, known = (statistics.median(each) for each in zip(*wholes, strict=True))
            parts = [spent / REPEATS for spent in self._spent.values()]
            rows.append([each * 1e6 for each in (bind, *parts, enqueued, known)])
            rows[-1].append((_Driver.launched - before) / REPEATS)
        return rows

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        kept = {part: vars(owner)[name] for part, (owner, name) in PARTS.items()}
        for part, (owner, name) in PARTS.items():
            setattr(owner, name, self._timing(kept[part], part))
        try:
            yield
        finally:
            for part, (owner, name) in PARTS.items():
                setattr(owner, name, kept[part])

    def _timing(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **named)
            self._spent[part] += time.perf_counter() - began
            return result

        return timed


class PostprocessSide:
    """Caches of 80 layers, and calls that permute blocks of all of them."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """Makes block ids for each number of blocks of a call."""
        pretend()
        driver, device = CudaDriver(0, _Library()), torch.device("cpu")
        slots: cuda_stream.UploadSlots | None = cuda_stream.UploadSlots(driver, device)
        repack_triton.slots_of = lambda _: slots
        shape = (max(numbers) + 1, 2, 16, 2, 8)  # K and V side by side
        self._layers = [torch.empty(shape, dtype=torch.bfloat16) for _ in range(80)]
        rng = np.random.default_rng(5)
        self._ids = [(1 + rng.permutation(number)).tolist() for number in numbers]

    def round(self) -> list[list[float]]:
        """A row per number of blocks: µs of a call with the same views, and with new views."""
        same = self._views()
        return [
            [self._time(views, ids) for views in (lambda: same, self._views)] for ids in self._ids
        ]

    def _views(self) -> list[torch.Tensor]:
        return [view for layer in self._layers for view in layer.unbind(1)]

    def _time(self, views_of: Callable[[], list[torch.Tensor]], ids: list[int]) -> float:
        spent = []
        for _ in range(REPEATS):
            views = views_of()
            began = time.perf_counter()
            kv_postprocess_layout_on_receive(views, ids, method="triton")
            spent.append(time.perf_counter() - began)
        return statistics.median(spent[1:]) * 1e6  # the first one finds cold caches


def pretend() -> None:
    """Has torch and Triton see a GPU that does nothing."""
    named = {
        "Stream": _Nothing,
        "Event": _Nothing,
        "current_stream": _Nothing,
        "stream": contextlib.nullcontext,
    }
    for name, value in named.items():
        setattr(torch.cuda, name, value)
    driver.set_active(_Driver())
    vars(cuda_stream)["driver_of"] = partial(CudaDriver, library=_Library())
    os.environ["TRITON_INTERPRET"] = "1"  # host memory is let through; the kernels are compiled
