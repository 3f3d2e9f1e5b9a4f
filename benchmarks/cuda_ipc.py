"""CUDA IPC between two processes: same and mismatched layout beside a plain copy of the bytes.

The transport is given as a class, so that the benchmark itself is tested where no GPU is.
"""

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from benchmarks import tables
from benchmarks.cases import WrongDataError
from benchmarks.machine import Machine
from benchmarks.remote import Remote
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.testing.transport_peer import contents, fill, pattern
from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer
from kvferry.transports.base import DeviceTransport, TransferState, TransportOptions

CONTENDERS = ("copy", "same layout", "mismatched")
GOAL = 0.8
"""Share of the copy's rate."""
SOURCE_LAYOUTS = {"same layout": "NHD", "mismatched": "HND"}
"""The target's is NHD."""

_TIMEOUT_S = 60.0


class IpcCase(msgspec.Struct, frozen=True, kw_only=True):
    """Requests of one model, as one rank holds them. bfloat16."""

    model: str
    layers: int
    heads: int
    head_size: int
    block_size: int
    tokens: int
    """Of each request."""
    requests: int

    @property
    def blocks(self) -> int:
        """Of all requests together."""
        return self.requests * -(-self.tokens // self.block_size)

    @property
    def nbytes(self) -> int:
        """Bytes that move."""
        return self.blocks * self.block_size * self.layers * 2 * self.heads * self.head_size * 2

    @property
    def region_bytes(self) -> int:
        """Bytes of either side's cache."""
        return self.geometry("NHD").memory(0, self.blocks + 1).region_bytes[0]

    @property
    def label(self) -> str:
        """The first cell of a row."""
        return f"{self.model}, {self.tokens:,} tokens, block {self.block_size}"

    def geometry(self, layout: str) -> EngineGeometry:
        """What the rank holds."""
        return EngineGeometry(
            num_layers=self.layers,
            num_kv_heads=self.heads,
            head_size=self.head_size,
            dtype="bfloat16",
            block_size=self.block_size,
            layout=layout,
            parallel=ParallelShape(),
        )

    def tables(self, contender: str) -> tuple[Tiles, Runs]:
        """What a read copies: shuffled blocks to shuffled blocks."""
        source, target = self.geometry(SOURCE_LAYOUTS[contender]), self.geometry("NHD")
        plan = plan_transfer(source=source, target=target)
        rng = np.random.default_rng(self.blocks)
        there, here = ((1 + rng.permutation(self.blocks)).tolist() for _ in "st")
        runs = plan.bind(there, here, self.blocks * self.block_size).runs_of(0)
        memories = [side.memory(0, self.blocks + 1) for side in (source, target)]
        return plan.lower({0: memories[0]}, memories[1])[0], runs


class IpcRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case: seconds by round of each contender."""

    case: IpcCase
    seconds: dict[str, tuple[float, ...]]

    def gbps(self, contender: str) -> float:
        """Bytes of the case over the median time, in GB/s."""
        return self.case.nbytes / statistics.median(self.seconds[contender]) / 1e9

    def ratios(self, contender: str) -> list[float]:
        """Share of the copy's rate, by round."""
        pairs = zip(self.seconds["copy"], self.seconds[contender], strict=True)
        return [copy / ours for copy, ours in pairs]


class IpcResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    rounds: int
    machine: Machine
    device_name: str
    quick: bool
    """Whether this was only a test of the benchmark."""
    rows: tuple[IpcRow, ...]


class IpcSource:
    """The process whose memory is read."""

    def __init__(self, kind: type[DeviceTransport], nbytes: int) -> None:
        self._transport = kind.open(TransportOptions())
        assert isinstance(self._transport, DeviceTransport)
        _, memory = self._transport.allocate_device(nbytes)
        fill(memory, pattern(nbytes, 0))

    def endpoint(self) -> bytes:
        """For the reader."""
        return self._transport.endpoint()

    def close(self) -> None:
        """Ends it."""
        self._transport.close()


class IpcReader:
    """The process that reads."""

    def __init__(self, kind: type[DeviceTransport], endpoint: bytes, nbytes: int) -> None:
        transport = kind.open(TransportOptions())
        assert isinstance(transport, DeviceTransport)
        self._transport = transport
        _, self._memory = transport.allocate_device(nbytes)
        self._peer: Any = transport.connect(endpoint)
        self._tables = functools.cache(IpcCase.tables)

    def check(self, case: IpcCase, contender: str) -> None:
        """Reads once and compares every byte.

        Raises:
            WrongDataError: it is not what the copier on the host makes of the same source.
        """
        tiles, runs = self._tables(case, contender)
        fill(self._memory, np.zeros(self._memory.nbytes, dtype=np.uint8))
        self._read(tiles, runs)
        wanted = np.zeros(self._memory.nbytes, dtype=np.uint8)
        source = pattern(self._memory.nbytes, 0)
        copy_tiles([source.ctypes.data], [wanted.ctypes.data], tiles, runs)
        if not np.array_equal(contents(self._memory), wanted):
            raise WrongDataError(f"{case.label}: {contender}")

    def measure(self, case: IpcCase, contender: str) -> float:
        """Seconds from the call until the host knows that the bytes are there."""
        if contender == "copy":
            return self._copy(case.nbytes)
        tiles, runs = self._tables(case, contender)
        return self._read(tiles, runs)

    def close(self) -> None:
        """Ends it."""
        self._transport.close()

    def _read(self, tiles: Tiles, runs: Runs) -> float:
        began = time.monotonic()
        transfer = self._transport.read(self._peer, tiles, runs)
        while not transfer.is_terminal:
            if time.monotonic() - began > _TIMEOUT_S:
                raise WrongDataError(f"not done after {_TIMEOUT_S} s")
            time.sleep(1e-4)  # the threads that launch need the interpreter; they note the time
        self._transport.poll()
        if transfer.state is not TransferState.DONE or transfer.finished is None:
            raise WrongDataError(f"the read failed: {transfer.error!r}")
        return transfer.finished - began

    def _copy(self, nbytes: int) -> float:
        """A plain copy of as many bytes, of the same peer's memory, on the same device."""
        source = MemorySpan(int(self._peer.addresses[0]), nbytes, self._memory.device)
        target = MemorySpan(self._memory.address, nbytes, self._memory.device)
        if target.is_host:
            began = time.perf_counter()
            np.copyto(target.as_array(), source.as_array())
            return time.perf_counter() - began
        import torch

        arrays = torch.as_tensor(source), torch.as_tensor(target)
        torch.cuda.synchronize()
        began = time.perf_counter()
        arrays[1].copy_(arrays[0])
        torch.cuda.synchronize()
        return time.perf_counter() - began


def gpu_cases(free_bytes: int, quick: bool) -> list[IpcCase]:
    """Llama-3-70B and DeepSeek-V3 (expanded) as one rank holds them; those that fit in memory."""
    cases = [
        IpcCase(
            model=model,
            layers=layers,
            heads=heads,
            head_size=head_size,
            block_size=block_size,
            tokens=512 if quick else tokens,
            requests=requests,
        )
        for model, layers, heads, head_size in (
            ("Llama-3-70B, TP 1", 80, 8, 128),
            ("Llama-3-70B, TP 8", 80, 1, 128),
            ("DeepSeek-V3, expanded, TP 8", 61, 16, 192),
        )
        for block_size in ((16,) if quick else (16, 64))
        for tokens, requests in (((512, 1),) if quick else ((512, 1), (8192, 1), (2048, 8)))
    ]
    return [case for case in cases if 3 * case.region_bytes < free_bytes]


def measure(
    kind: type[DeviceTransport],
    cases: Sequence[IpcCase],
    rounds: int,
    say: Callable[[str], object],
) -> tuple[IpcRow, ...]:
    """Runs every case: all contenders in turns, a round each, after one that is checked.

    Raises:
        WrongDataError: other bytes arrived than should.
    """
    nbytes = max(case.region_bytes for case in cases)
    rows = []
    with (
        Remote("source", IpcSource, kind, nbytes, env={}) as source,
        Remote("reader", IpcReader, kind, source.call("endpoint"), nbytes, env={}) as reader,
    ):
        for contender in SOURCE_LAYOUTS:
            reader.call("check", min(cases, key=lambda case: case.nbytes), contender)
        for case in cases:
            say(f"CUDA IPC: {case.label}, {case.requests} requests")
            seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
            for number in range(rounds + 1):
                turn = number % len(CONTENDERS)
                for name in CONTENDERS[turn:] + CONTENDERS[:turn]:
                    took = reader.call("measure", case, name)
                    if number > 0:  # the first round warms up
                        seconds[name].append(took)
            taken = {name: tuple(each) for name, each in seconds.items()}
            rows.append(IpcRow(case=case, seconds=taken))
    return tuple(rows)


def cells(results: IpcResults) -> Iterator[tuple[str, ...]]:
    """The table, its header first."""
    shares = [f"{name}, of the copy" for name in CONTENDERS[1:]]
    yield ("case", "requests", "MB", *(f"{name}, GB/s" for name in CONTENDERS), *shares)
    for row in results.rows:
        yield (
            row.case.label,
            str(row.case.requests),
            f"{row.case.nbytes / 1e6:,.0f}",
            *(f"{row.gbps(name):.3g}" for name in CONTENDERS),
            *(tables.ratio_cell(row.ratios(name), GOAL) for name in CONTENDERS[1:]),
        )


def missed(results: IpcResults) -> list[str]:
    """A sentence for each goal that was missed."""
    return [
        f"{row.case.label}, {row.case.requests} requests, {name}: {ratio:.2f} of the copy's rate, "
        f"the goal is {GOAL:g}"
        for row in results.rows
        for name in CONTENDERS[1:]
        if (ratio := statistics.median(row.ratios(name))) < GOAL and not results.quick
    ]


def show(results: IpcResults, console: Console) -> None:
    """Prints a table, and what was missed."""
    tables.show(console, f"CUDA IPC, {results.device_name}", cells(results), missed(results))


def write(results: IpcResults, folder: Path) -> None:
    """Writes ``cuda_ipc.json`` and ``CUDA_IPC.md`` into ``folder``."""
    tables.write(folder, "cuda_ipc", results, markdown(results))


def markdown(results: IpcResults) -> str:
    """The page for people."""
    machine = results.machine
    return tables.page(
        f"CUDA IPC on {results.device_name}",
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, Linux {machine.kernel}, "
        f"torch {machine.versions['torch']}. {results.rounds} rounds.",
        ["A quick run: its figures mean nothing."] if results.quick else [],
        cells(results),
        tables.bullets(_method()),
        missed(results),
        quick=results.quick,
    )


def _method() -> Iterator[str]:
    yield (
        "Two processes; both caches are on the device. `same layout` is NHD to NHD, `mismatched` "
        "HND to NHD, between shuffled blocks; `copy` is torch's `copy_` of as many bytes out of "
        "the same mapped memory."
    )
    yield (
        "Times are the host's, from the call until it knows that the bytes are there. GB/s count "
        "each byte once. Ratios are medians over the rounds of each round's ratio, then the lowest "
        "and the highest, and the goal."
    )
    yield (
        "Before the rounds one read of either kind is compared byte by byte with the copier on "
        "the host."
    )
