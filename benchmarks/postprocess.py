"""Our postprocessor beside the published three passes and its ceiling, on the host or a GPU.

The ceiling is one pass over the memory: each byte of the blocks is read once and written once
where it lies, which is the least that any permutation in place does. On a GPU a copy of as many
bytes stands for it.
"""

import ctypes
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np
from rich.console import Console

from benchmarks import tables
from benchmarks.machine import Machine
from kvferry.layouts import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
)

CONTENDERS = {
    "cpu": ("three passes", "copy", "streamed copy", "one pass", "kvferry"),
    "cuda": ("three passes", "copy", "kvferry"),
}
"""Device → who takes part."""
CEILINGS = {"cpu": "one pass", "cuda": "copy"}
GOAL = 0.85
"""Share of the ceiling."""
_LINE = 64
"""Bytes of a cache line, of which the parts of threads are multiples."""
Caches: TypeAlias = list[Any]
"""torch tensors viewed as ``[blocks, tokens, heads, elements]``: K and V of each layer."""


class PostprocessCase(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of a cache that were filled head by head."""

    model: str
    layers: int
    heads: int
    head_size: int
    block_size: int
    ratio: int
    """Local over remote tokens per block."""
    to_layout: str
    """How the local blocks are stored."""
    tokens: int
    """Of all requests together."""
    requests: int = 1
    threads: int = 1
    parts: int = 2
    """Caches per layer: K and V, or one latent."""

    @property
    def nbytes(self) -> int:
        """Bytes that are to be permuted, bfloat16."""
        per_token = self.layers * self.parts * self.heads * self.head_size * 2
        return self.tokens * per_token

    @property
    def label(self) -> str:
        """The first cell of a row."""
        ratio = f" from {self.block_size // self.ratio}" if self.ratio > 1 else ""
        tokens = f"{self.tokens // self.requests:,} tokens"
        return f"{self.model}, {tokens}, HND→{self.to_layout}, block {self.block_size}{ratio}"


class PostprocessRow(msgspec.Struct, frozen=True, kw_only=True):
    """One case: seconds by round of each contender."""

    case: PostprocessCase
    seconds: dict[str, tuple[float, ...]]

    def gbps(self, contender: str) -> float:
        """Bytes of the case over the median time, in GB/s."""
        return self.case.nbytes / statistics.median(self.seconds[contender]) / 1e9

    def ratios(self, other: str, contender: str = "kvferry") -> list[float]:
        """How many times faster than the other a contender is, by round."""
        pairs = zip(self.seconds[other], self.seconds[contender], strict=True)
        return [theirs / ours for theirs, ours in pairs]


class PostprocessResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    rounds: int
    machine: Machine
    device: str
    device_name: str
    quick: bool
    """Whether this was only a test of the benchmark."""
    rows: tuple[PostprocessRow, ...]


def cpu_cases(quick: bool) -> list[PostprocessCase]:
    """Layouts, block sizes and lengths of a prompt, on one thread and on two."""
    lengths = ((2, 128),) if quick else ((16, 2048), (1, 32768))  # 134 MB each
    return [
        PostprocessCase(
            model="8 heads of 128",
            layers=layers,
            heads=8,
            head_size=128,
            block_size=block_size,
            ratio=ratio,
            to_layout=layout,
            tokens=tokens,
            threads=threads,
        )
        for threads in (1, 2)
        for layers, tokens in lengths
        for block_size in (16, 128)
        for layout, ratio in (("NHD", 1), ("HND", 4), ("NHD", 4))
    ]


def measure(
    command: str,
    machine: Machine,
    rounds: int,
    quick: bool,
    say: Callable[[str], object],
    *,
    cases: Sequence[PostprocessCase],
    device: str = "cpu",
) -> PostprocessResults:
    """Runs every case: all contenders in turns, a round each, after one that is checked.

    Raises:
        AssertionError: ours and the three passes leave different bits.
    """
    import torch

    rows = []
    threads = torch.get_num_threads()
    try:
        for case in cases:
            say(f"postprocessor: {case.label}, {case.requests} requests, {case.threads} threads")
            torch.set_num_threads(case.threads)
            rows.append(_measure_case(case, rounds, device))
    finally:
        torch.set_num_threads(threads)
    name = "host memory" if device == "cpu" else torch.cuda.get_device_name(device)
    return PostprocessResults(
        command=command,
        rounds=rounds,
        machine=machine,
        device=device,
        device_name=name,
        quick=quick,
        rows=tuple(rows),
    )


def _measure_case(case: PostprocessCase, rounds: int, device: str) -> PostprocessRow:
    import torch

    blocks = case.tokens // case.block_size
    caches = [_cache(case, blocks + 1, device) for _ in range(case.layers * case.parts)]
    ids = 1 + np.random.default_rng(7).permutation(blocks)
    indices = torch.from_numpy(ids).to(device)
    block_ids = ids.tolist()
    source, target = (torch.zeros(case.nbytes, dtype=torch.uint8, device=device) for _ in "st")

    def three_passes() -> None:
        for cache in caches:
            published(case, cache, indices)

    def kvferry() -> None:
        ours(case, caches, block_ids)

    with ThreadPoolExecutor(case.threads) as pool:
        contenders: dict[str, Callable[[], object]] = {
            "three passes": three_passes,
            "copy": lambda: target.copy_(source),
            "kvferry": kvferry,
        }
        if device == "cpu":
            contenders |= _over_memory(case, target.numpy(), source.numpy(), pool)
        _check(case, caches[0], indices, block_ids)
        seconds = _in_turns(
            [(name, contenders[name]) for name in CONTENDERS[device]], rounds, device
        )
    return PostprocessRow(case=case, seconds=seconds)


def _in_turns(
    contenders: Sequence[tuple[str, Callable[[], object]]], rounds: int, device: str
) -> dict[str, tuple[float, ...]]:
    """Seconds by round of each; who begins goes round."""
    seconds: dict[str, list[float]] = {name: [] for name, _ in contenders}
    for number in range(rounds + 1):
        turn = number % len(contenders)
        for name, work in (*contenders[turn:], *contenders[:turn]):
            took = _time(work, device)
            if number > 0:  # the first round warms up
                seconds[name].append(took)
    return {name: tuple(each) for name, each in seconds.items()}


def _over_memory(
    case: PostprocessCase, target: Any, source: Any, pool: ThreadPoolExecutor
) -> dict[str, Callable[[], object]]:
    """Plain work on as many bytes of host memory, in as many threads."""
    from benchmarks.one_pass import rewrite, stream

    lines = case.nbytes // _LINE
    edges = [lines * number // case.threads * _LINE for number in range(case.threads + 1)]
    parts = [slice(*edge) for edge in itertools.pairwise(edges)]
    target_at, source_at = target.ctypes.data, source.ctypes.data

    def divided(work: Callable[[slice], object]) -> Callable[[], object]:
        return lambda: list(pool.map(work, parts))  # torch's threads wait for cores that are busy

    return {
        "copy": divided(
            lambda part: ctypes.memmove(
                target_at + part.start, source_at + part.start, part.stop - part.start
            )
        ),
        "streamed copy": divided(
            lambda part: stream(
                target_at + part.start, source_at + part.start, part.stop - part.start
            )
        ),
        "one pass": divided(lambda part: rewrite(target[part].view(np.int64))),
    }


def _cache(case: PostprocessCase, blocks: int, device: str) -> Any:
    import torch

    inner = (case.block_size, case.heads)
    if case.to_layout == "HND":
        inner = inner[::-1]
    shape = (blocks, *inner, case.head_size)
    cache = torch.randint(-99, 99, shape, dtype=torch.int16, device=device).view(torch.bfloat16)
    return cache if case.to_layout == "NHD" else cache.transpose(1, 2)


def ours(case: PostprocessCase, caches: Caches, block_ids: list[int]) -> None:
    """All layers and all requests in one call."""
    options: dict[str, Any] = {"threads": case.threads}
    if case.to_layout == "NHD":
        kv_postprocess_blksize_and_layout_on_receive(caches, block_ids, case.ratio, **options)
    else:
        kv_postprocess_blksize_on_receive(caches, block_ids, case.ratio, **options)


def published(case: PostprocessCase, cache: Any, indices: Any) -> None:
    """The known way, for one cache: select the blocks, permute a copy, put it back."""
    taken = cache.index_select(0, indices)
    memory = taken if case.to_layout == "NHD" else taken.transpose(1, 2)
    filled = memory.reshape(
        -1, case.ratio, case.heads, case.block_size // case.ratio, case.head_size
    )
    by_token = filled.transpose(2, 3).reshape(taken.shape)
    cache.index_copy_(0, indices, by_token)


def _check(case: PostprocessCase, cache: Any, indices: Any, block_ids: list[int]) -> None:
    import torch

    mine, other = (cache.clone(memory_format=torch.preserve_format) for _ in "ab")
    ours(case, [mine], block_ids)
    published(case, other, indices)
    assert torch.equal(mine.view(torch.int16), other.view(torch.int16)), case


def _time(work: Callable[[], object], device: str) -> float:
    """Seconds of one call; on a GPU from the first kernel to the end of the last."""
    if device == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


def show(results: PostprocessResults, console: Console) -> None:
    """Prints a table, and what was missed."""
    title = f"Postprocessor, {results.device_name}, GB/s"
    tables.show(console, title, cells(results), missed(results))


def write(results: PostprocessResults, folder: Path, name: str = "postprocess") -> None:
    """Writes ``<name>.json`` and ``<NAME>.md`` into ``folder``."""
    tables.write(folder, name, results, markdown(results))


def cells(results: PostprocessResults) -> Iterator[tuple[str, ...]]:
    """The table, its header first."""
    workers = "threads" if results.device == "cpu" else "requests"
    contenders, ceiling = CONTENDERS[results.device], CEILINGS[results.device]
    yield ("case", workers, "MB", *contenders, f"of {ceiling}", "times three passes", "at most")
    for row in results.rows:
        count = row.case.threads if results.device == "cpu" else row.case.requests
        yield (
            row.case.label,
            str(count),
            f"{row.case.nbytes / 1e6:,.0f}",
            *(f"{row.gbps(name):.3g}" for name in contenders),
            tables.ratio_cell(row.ratios(ceiling), GOAL),
            f"{statistics.median(row.ratios('three passes')):.2f}",
            f"{statistics.median(row.ratios('three passes', ceiling)):.2f}",
        )


def missed(results: PostprocessResults) -> list[str]:
    """A sentence for each goal that was missed."""
    if results.quick:
        return []
    ceiling = CEILINGS[results.device]
    sentences = []
    for row in results.rows:
        workers = f"{row.case.threads} threads" if results.device == "cpu" else "one launch"
        ratio = statistics.median(row.ratios(ceiling))
        if ratio < GOAL:
            sentences.append(
                f"{row.case.label}, {row.case.requests} requests, {workers}: {ratio:.2f} of "
                f"{ceiling}, the goal is {GOAL:g}"
            )
    return sentences


def markdown(results: PostprocessResults) -> str:
    """The page for people."""
    machine = results.machine
    return tables.page(
        f"The postprocessor on {results.device_name}",
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores, "
        f"Linux {machine.kernel}, Python {machine.python}, torch {machine.versions['torch']}. "
        f"{results.rounds} rounds. Load average {machine.load_before} before.",
        _caveats(results),
        cells(results),
        tables.bullets(_method(results)),
        missed(results),
        quick=results.quick,
    )


def _caveats(results: PostprocessResults) -> Iterator[str]:
    if results.quick:
        yield "A quick run: its figures mean nothing."
    if results.device == "cpu" and results.machine.load_before > 0.5 * results.machine.cores:
        yield (
            f"Other work was running (load average {results.machine.load_before} before the "
            "benchmark began): the figures are noisy, and torch's threads, which wait for each "
            "other, suffer most from it. The rows with one thread say more."
        )


def _method(results: PostprocessResults) -> Iterator[str]:
    yield (
        "GB/s count each byte of the blocks once. Ratios are medians over the rounds of each "
        "round's ratio, then the lowest and the highest, and the goal."
    )
    yield (
        "`three passes` is `index_select`, a permuted copy and `index_copy_` in torch, for one "
        "cache after the other; `kvferry` is one call for K and V of all layers. Both have the "
        "same shuffled blocks, and all contenders as many threads."
    )
    if results.device == "cpu":
        yield (
            "`one pass` is the ceiling: it reads and writes each byte of as much memory once, "
            "where it lies, as any permutation in place must at least. `copy` is `memmove` to "
            "other memory, `streamed copy` the same with stores past the cache, so that no line of "
            "the target is read before it is written."
        )
    else:
        yield "`copy` is the ceiling: torch's `copy_` of as many bytes."
    yield (
        "`at most` is the ceiling beside the three passes: how many times as fast as they a "
        "permutation could be. Five times, the older goal, lies above it in "
        f"{_num_below(results, 5)} of {len(results.rows)} rows."
    )
    yield (
        "Before the rounds the results of both are compared bit by bit. All take turns, and "
        "who begins goes round."
    )


def _num_below(results: PostprocessResults, times: float) -> int:
    """Rows in which even the ceiling is not so many times as fast as the three passes."""
    ceiling = CEILINGS[results.device]
    return sum(
        statistics.median(row.ratios("three passes", ceiling)) < times for row in results.rows
    )
