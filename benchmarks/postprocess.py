"""Our postprocessor beside the published three passes and its ceiling, on the host or a GPU.

The ceiling is one pass over the memory: each byte of the blocks is read once and written once
where it lies, which is the least that any permutation in place does. On a GPU a copy of as many
bytes stands for it.
"""

import ctypes
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeAlias

import msgspec
import numpy as np

from benchmarks import report
from benchmarks.cases import CacheShape
from kvferry.cli.bench import seconds_of
from kvferry.layouts import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
)

CONTENDERS = {
    "cpu": ("three passes", "copy", "one pass", "kvferry"),
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
    shape: CacheShape
    """Its tokens are those of all requests together."""
    ratio: int
    """Local over remote tokens per block."""
    to_layout: str
    """How the local blocks are stored."""
    requests: int = 1
    threads: int = 1
    parts: int = 2
    """Caches per layer: K and V, or one latent."""

    @property
    def nbytes(self) -> int:
        """Bytes that are to be permuted, bfloat16."""
        return self.shape.transfer_bytes // 2 * self.parts

    @property
    def label(self) -> str:
        """The first cell of a row."""
        size = self.shape.block_size
        ratio = f" from {size // self.ratio}" if self.ratio > 1 else ""
        tokens = f"{self.shape.tokens // self.requests:,} tokens"
        return f"{self.model}, {tokens}, HND→{self.to_layout}, block {size}{ratio}"


class PostprocessRow(report.TimedRow, frozen=True, kw_only=True):
    """One case."""

    case: PostprocessCase


class PostprocessResults(report.Results, frozen=True, kw_only=True):
    """All that one run measured."""

    device: str
    device_name: str
    rows: tuple[PostprocessRow, ...]


def cpu_cases(quick: bool) -> list[PostprocessCase]:
    """Layouts, block sizes and lengths of a prompt, on one thread and on two."""
    lengths = ((2, 128),) if quick else ((16, 2048), (1, 32768))  # 134 MB each
    return [
        PostprocessCase(
            model="8 heads of 128",
            shape=CacheShape(layers, 8, 128, block_size, tokens),
            ratio=ratio,
            to_layout=layout,
            threads=threads,
        )
        for threads in (1, 2)
        for layers, tokens in lengths
        for block_size in (16, 128)
        for layout, ratio in (("NHD", 1), ("HND", 4), ("NHD", 4))
    ]


def measure(
    run: report.Run, cases: Sequence[PostprocessCase] = (), device: str = "cpu"
) -> PostprocessResults:
    """Runs every case: all contenders in turns, a round each, after one that is checked.

    Raises:
        AssertionError: ours and the three passes leave different bits.
    """
    import torch

    rows = []
    threads = torch.get_num_threads()
    run.say("postprocessor")
    try:
        for case in cases or cpu_cases(run.quick):
            torch.set_num_threads(case.threads)
            rows.append(_measure_case(case, run.rounds, device))
    finally:
        torch.set_num_threads(threads)
    name = "host memory" if device == "cpu" else torch.cuda.get_device_name(device)
    return run.results(PostprocessResults, device=device, device_name=name, rows=tuple(rows))


def _measure_case(case: PostprocessCase, rounds: int, device: str) -> PostprocessRow:
    import torch

    caches = [_cache(case, device) for _ in range(case.shape.layers * case.parts)]
    ids = 1 + np.random.default_rng(7).permutation(case.shape.blocks - 1)
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
        timed = {name: partial(_time, contenders[name], device) for name in CONTENDERS[device]}
        seconds = report.take_turns(timed, rounds)
    return PostprocessRow(case=case, seconds=seconds, nbytes=case.nbytes)


def _over_memory(
    case: PostprocessCase, target: Any, source: Any, pool: ThreadPoolExecutor
) -> dict[str, Callable[[], object]]:
    """Plain work on as many bytes of host memory, in as many threads."""
    from benchmarks.one_pass import rewrite

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
        "one pass": divided(lambda part: rewrite(target[part].view(np.int64))),
    }


def _cache(case: PostprocessCase, device: str) -> Any:
    import torch

    shape = case.shape
    inner = (shape.block_size, shape.kv_heads)
    if case.to_layout == "HND":
        inner = inner[::-1]
    sizes = (shape.blocks, *inner, shape.head_size)
    cache = torch.randint(-99, 99, sizes, dtype=torch.int16, device=device).view(torch.bfloat16)
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
    shape = case.shape
    taken = cache.index_select(0, indices)
    memory = taken if case.to_layout == "NHD" else taken.transpose(1, 2)
    remote = (shape.kv_heads, shape.block_size // case.ratio, shape.head_size)
    filled = memory.reshape(-1, case.ratio, *remote)
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
        return seconds_of(work)
    import torch

    first, last = (torch.cuda.Event(enable_timing=True) for _ in "ab")  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    first.record()
    work()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last)) / 1e3


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
            f"{row.nbytes / 1e6:,.0f}",
            *(f"{row.gbps(name):.3g}" for name in contenders),
            report.ratio_cell(row.ratios(ceiling), GOAL),
            f"{statistics.median(row.ratios('three passes')):.2f}",
            f"{statistics.median(row.ratios('three passes', ceiling)):.2f}",
        )


def page(results: PostprocessResults) -> str:
    """The page for people."""
    return report.page(
        f"The postprocessor on {results.device_name}",
        results,
        "GB/s.",
        [*report.table(cells(results)), "", *report.bullets(_method(results))],
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
            "other memory."
        )
    else:
        yield "`copy` is the ceiling: torch's `copy_` of as many bytes."
    yield (
        "`at most` is the ceiling beside the three passes: how many times as fast as they a "
        "permutation could be."
    )
    yield (
        "Before the rounds the results of both are compared bit by bit. All take turns, and "
        "who begins goes round. Where other work runs, torch's threads suffer most, which wait for "
        "each other: the rows with one thread say more then."
    )
