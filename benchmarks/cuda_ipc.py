"""CUDA IPC between two processes, beside a plain copy of the bytes, the three passes that change a
layout after a READ, and NIXL's READ as it comes and as it is tuned.

The transport is given as a class, so that the benchmark itself is tested where no GPU is.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from benchmarks import nixl_side, report
from benchmarks.cases import CacheShape
from benchmarks.remote import Remote, WrongDataError
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.testing.transport_peer import contents, fill, pattern
from kvferry.topology import plan_transfer
from kvferry.transports.base import DeviceTransport, TransferState, TransportOptions

READS = ("same layout", "mismatched")
NIXL: dict[str, dict[str, str]] = {
    "NIXL": {},
    "NIXL tuned": {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"},
}
"""NIXL's READ of the same layout → UCX's settings for it."""
NIXL_MOST_BYTES = 200_000_000
"""As it comes, UCX may move half a gigabyte in a second."""
CONTENDERS = ("copy", *READS, "three passes", *NIXL)
GOAL = 0.8
"""Share of the copy's rate."""

_TIMEOUT_S = 60.0


class IpcCase(msgspec.Struct, frozen=True, kw_only=True):
    """A request of one model, as one rank holds it."""

    model: str
    shape: CacheShape

    @property
    def label(self) -> str:
        """The first cell of a row."""
        return f"{self.model}, {self.shape.tokens:,} tokens, block {self.shape.block_size}"

    def tables(self, contender: str) -> tuple[Tiles, Runs]:
        """What a read copies: shuffled blocks to shuffled blocks."""
        shape = self.shape
        source = shape.geometry("HND" if contender == "mismatched" else "NHD")
        target = shape.geometry("NHD")
        plan = plan_transfer(source=source, target=target)
        rng = np.random.default_rng(shape.blocks)
        there, here = ((1 + rng.permutation(shape.blocks - 1)).tolist() for _ in "st")
        runs = plan.bind(there, here, shape.tokens).runs_of(0)
        memories = [side.memory(0, shape.blocks) for side in (source, target)]
        return plan.lower({0: memories[0]}, memories[1])[0], runs


class IpcRow(report.TimedRow, frozen=True, kw_only=True):
    """One case. NIXL's times are left out where it is not installed, and of large cases."""

    case: IpcCase


class IpcResults(report.Results, frozen=True, kw_only=True):
    """All that one run measured."""

    device_name: str
    rows: tuple[IpcRow, ...]


def nixl_memory(name: str, memory: MemorySpan) -> nixl_side.NixlMemory:
    """NIXL over the same memory, as vLLM's NixlConnector uses it."""
    kind = "DRAM" if memory.is_host else "VRAM"
    span = (memory.address, memory.nbytes)
    return nixl_side.NixlMemory(name, [span], kind=kind, progress_thread=True)


class IpcSource:
    """The process whose memory is read; the first bytes, which are checked, have a pattern."""

    def __init__(self, kind: type[DeviceTransport], nbytes: int, checked: int) -> None:
        self._transport = kind.open(TransportOptions())
        assert isinstance(self._transport, DeviceTransport)
        _, self._memory = self._transport.allocate_device(nbytes)
        fill(_first(self._memory, checked), pattern(checked, 0))

    def offer(self) -> tuple[bytes, int]:
        """For a reader over NIXL."""
        self._nixl = nixl_memory("source", self._memory)
        return self._nixl.metadata, self._memory.address

    def endpoint(self) -> bytes:
        """For the reader."""
        return self._transport.endpoint()

    def close(self) -> None:
        """Ends it."""
        self._transport.close()


class IpcReader:
    """The process that reads."""

    def __init__(
        self,
        kind: type[DeviceTransport],
        endpoint: bytes,
        nbytes: int,
        offer: tuple[bytes, int] | None = None,
    ) -> None:
        transport = kind.open(TransportOptions())
        assert isinstance(transport, DeviceTransport)
        self._transport = transport
        _, self._memory = transport.allocate_device(nbytes)
        self._peer: Any = transport.connect(endpoint)
        self._nixl: nixl_side.NixlMemory | None = None
        if offer is not None:
            self._nixl = nixl_memory("reader", self._memory)
            self._nixl.meet(offer[0])
            self._there = offer[1]
        self._tables = functools.cache(self._meet)

    def check(self, case: IpcCase, contender: str) -> None:
        """Reads once and compares every byte.

        Raises:
            WrongDataError: it is not what the copier on the host makes of the same source.
        """
        tiles, runs = self._tables(case, contender)
        checked = _first(self._memory, case.shape.region_bytes)
        fill(checked, np.zeros(checked.nbytes, dtype=np.uint8))
        self._read(tiles, runs)
        wanted = np.zeros(checked.nbytes, dtype=np.uint8)
        source = pattern(checked.nbytes, 0)
        copy_tiles([source.ctypes.data], [wanted.ctypes.data], tiles, runs)
        if not np.array_equal(contents(checked), wanted):
            raise WrongDataError(f"{case.label}: {contender}")

    def measure(self, case: IpcCase, contender: str) -> float:
        """Seconds from the call until the host knows that the bytes are there."""
        if contender == "copy":
            return self._copy(case.shape.transfer_bytes)
        if contender == "three passes":
            return self._permute(case)
        tiles, runs = self._tables(case, contender)
        return self._read(tiles, runs)

    def close(self) -> None:
        """Ends it."""
        self._transport.close()

    def _meet(self, case: IpcCase, contender: str) -> tuple[Tiles, Runs]:
        """The tables of a case, prepared as when engines meet."""
        tiles, runs = case.tables(contender)
        self._transport.prepare(self._peer, tiles, case.shape.block_size)
        return tiles, runs

    def _permute(self, case: IpcCase) -> float:
        """The known way to change the layout of blocks that have been read."""
        import torch

        shape = case.shape
        part = _first(self._memory, shape.region_bytes)
        array: Any = part.as_array() if part.is_host else part
        inner = shape.blocks, shape.block_size, shape.kv_heads, shape.head_size
        caches = torch.as_tensor(array).view(torch.int16).view(2 * shape.layers, *inner)
        indices = torch.arange(1, shape.blocks, device=caches.device)

        def permute() -> None:
            for cache in caches.unbind(0):
                nixl_side.permute(cache, indices)

        return _timed(permute, part)

    def _read(self, tiles: Tiles, runs: Runs) -> float:
        if self._nixl is not None:
            return self._read_nixl(self._nixl, tiles, runs)
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

    def _read_nixl(self, nixl: nixl_side.NixlMemory, tiles: Tiles, runs: Runs) -> float:
        """A READ of blocks that are dense on both sides."""
        nbytes = np.outer(tiles["source_token_stride"], runs["tokens"]).ravel()
        source, target = (
            (
                base
                + tiles[f"{side}_offset"][:, None]
                + np.outer(tiles[f"{side}_block_stride"], runs[f"{side}_block"])
            ).ravel()
            for side, base in (("source", self._there), ("target", self._memory.address))
        )
        request = nixl.request(source, target, nbytes)
        try:
            return nixl.read(request)
        finally:
            nixl.release(request)

    def _copy(self, nbytes: int) -> float:
        """A plain copy of as many bytes, of the same peer's memory, on the same device."""
        source = MemorySpan(int(self._peer.addresses[0]), nbytes, self._memory.device)
        target = _first(self._memory, nbytes)
        if target.is_host:
            return _timed(lambda: np.copyto(target.as_array(), source.as_array()), target)
        import torch

        arrays = torch.as_tensor(source), torch.as_tensor(target)
        return _timed(lambda: arrays[1].copy_(arrays[0]), target)


def _first(memory: MemorySpan, nbytes: int) -> MemorySpan:
    return MemorySpan(memory.address, nbytes, memory.device)


def _timed(work: Callable[[], object], memory: MemorySpan) -> float:
    """Seconds until the host knows that it is done."""
    import torch

    wait: Any = (lambda: None) if memory.is_host else torch.cuda.synchronize
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def gpu_cases(free_bytes: int, quick: bool) -> list[IpcCase]:
    """Models as one rank holds them, with short and long reads; those that fit in memory."""
    shapes = {
        "Llama-3-8B": (32, 8, 128, 16, (16, 512, 4096, 32768)),
        "Llama-3-70B, TP 8": (80, 1, 128, 16, (512, 8192)),
        "DeepSeek-V3, expanded, TP 8": (61, 16, 192, 64, (8192,)),
    }
    cases = [
        IpcCase(model=model, shape=CacheShape(layers, heads, head_size, block_size, count))
        for model, (layers, heads, head_size, block_size, tokens) in shapes.items()
        for count in ((512,) if quick else tokens)
    ]
    return [case for case in cases if 3 * case.shape.region_bytes < free_bytes]


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
    seconds: dict[IpcCase, dict[str, tuple[float, ...]]] = {case: {} for case in cases}
    _measure_one(kind, CONTENDERS[:4], {}, rounds, seconds, say)
    if nixl_side.why_missing() is None:
        short = {
            each: seconds[each] for each in cases if each.shape.transfer_bytes <= NIXL_MOST_BYTES
        }
        for name, env in NIXL.items() if short else ():
            _measure_one(kind, (name,), env, min(rounds, 3), short, say)
    return tuple(
        IpcRow(case=case, seconds=taken, nbytes=case.shape.transfer_bytes)
        for case, taken in seconds.items()
    )


def _measure_one(
    kind: type[DeviceTransport],
    names: tuple[str, ...],
    env: dict[str, str],
    rounds: int,
    seconds: dict[IpcCase, dict[str, tuple[float, ...]]],
    say: Callable[[str], object],
) -> None:
    """Measures contenders that share two processes."""
    nbytes = max(case.shape.region_bytes for case in seconds)
    smallest = min(seconds, key=lambda case: case.shape.region_bytes)
    checked = smallest.shape.region_bytes
    with Remote("source", IpcSource, kind, nbytes, checked, env=env) as source:
        offer = source.call("offer") if names[0] in NIXL else None
        arguments = kind, source.call("endpoint"), nbytes, offer
        with Remote("reader", IpcReader, *arguments, env=env) as reader:
            for name in (name for name in names if name in (*READS, *NIXL)):
                reader.call("check", smallest, name)
            for case, taken in seconds.items():
                say(f"{', '.join(names)}: {case.label}")
                timed = {name: partial(reader.call, "measure", case, name) for name in names}
                taken |= report.take_turns(timed, rounds)


def cells(results: IpcResults) -> Iterator[tuple[str, ...]]:
    """The table, its header first."""
    shares = [f"{name}, of the copy" for name in READS]
    yield ("case", "MB", *(f"{name}, GB/s" for name in CONTENDERS), *shares)
    for row in results.rows:
        yield (
            row.case.label,
            f"{row.nbytes / 1e6:,.0f}",
            *(f"{row.gbps(name):.3g}" if name in row.seconds else "–" for name in CONTENDERS),
            *(report.ratio_cell(row.ratios("copy", name), GOAL) for name in READS),
        )


def page(results: IpcResults) -> str:
    """The page for people."""
    return report.page(
        f"CUDA IPC on {results.device_name}",
        results,
        "",
        [*report.table(cells(results)), "", *report.bullets(_method())],
    )


def _method() -> Iterator[str]:
    yield (
        "Two processes; both caches are on the device. `same layout` is NHD to NHD, `mismatched` "
        "HND to NHD, between shuffled blocks; `copy` is torch's `copy_` of as many bytes out of "
        "the same mapped memory; `three passes` changes the layout of as many blocks after a READ, "
        "and has read nothing. `NIXL` is its READ of the same layout with a descriptor for each "
        "block of each tensor, made before the clock starts; `NIXL tuned` the same with "
        "`UCX_CUDA_IPC_ENABLE_GET_ZCOPY=on`."
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
