"""How planning and binding grow: with the ranks of two engines, with the tokens of a request."""

import statistics
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console

from benchmarks import tables
from benchmarks.binding import shuffled_table
from benchmarks.machine import Machine
from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer

PLAN_GOAL_SECONDS = 10.0
"""For all target ranks of the largest engine, on one core."""
BIND_GOAL_SECONDS = 3e-3
"""For one target rank and 32,768 tokens."""
_GOAL_TOKENS = 32768

_RANKS = (64, 128, 256, 512, 1024)
_TOKENS = (1024, 4096, 16384, 32768, 131072)


class PlanSample(msgspec.Struct, frozen=True, kw_only=True):
    """All plans of one pair of engines."""

    case: str
    ranks: int
    """Of the source, and of the target."""
    pairs: int
    """Pairs of ranks of which one reads from the other."""
    pieces: int
    """Of all plans."""
    seconds: float
    """For the plans of all target ranks; the fastest round."""


class BindSample(msgspec.Struct, frozen=True, kw_only=True):
    """One request bound to one plan."""

    case: str
    tokens: int
    runs: int
    """Rows that the bind makes, of all source ranks that hold different tokens."""
    seconds: float
    """The median round."""


class PlanningResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    machine: Machine
    quick: bool
    """Whether this was only a test of the benchmark."""
    plans: tuple[PlanSample, ...]
    binds: tuple[BindSample, ...]


def measure(command: str, machine: Machine, *, quick: bool) -> PlanningResults:
    """Plans and binds in this thread."""
    ranks, tokens = (_RANKS[:2], _TOKENS[:2]) if quick else (_RANKS, _TOKENS)
    rounds = 1 if quick else 3
    return PlanningResults(
        command=command,
        machine=machine,
        quick=quick,
        plans=tuple(
            _plan(name, count, source, target, rounds)
            for count in ranks
            for name, source, target in _engines(count)
        ),
        binds=tuple(
            _bind(name, count, source, target, 5 if quick else 50)
            for count in tokens
            for name, source, target in _request_pairs()
        ),
    )


def missed(results: PlanningResults) -> list[str]:
    """A sentence for each goal that was missed."""
    if results.quick:
        return []
    return [
        f"plans of {plan.case}, {plan.ranks} ranks: {plan.seconds:.1f} s, the goal is "
        f"{PLAN_GOAL_SECONDS:g} s for {max(_RANKS)}"
        for plan in results.plans
        if plan.seconds > PLAN_GOAL_SECONDS
    ] + [
        f"bind of {bind.case}, {bind.tokens:,} tokens: {bind.seconds * 1e3:.2f} ms, the goal is "
        f"{BIND_GOAL_SECONDS * 1e3:g} ms"
        for bind in results.binds
        if bind.tokens == _GOAL_TOKENS and bind.seconds > BIND_GOAL_SECONDS
    ]


def show(results: PlanningResults, console: Console) -> None:
    """Prints the tables."""
    for line in _tables(results):
        console.print(line, highlight=False, markup=False)
    for line in missed(results):
        console.print(f"[yellow]![/] {line}", highlight=False)


def write(results: PlanningResults, folder: Path) -> None:
    """Writes ``planning.json``, ``PLANNING.md`` and ``planning.png`` into ``folder``."""
    machine = results.machine
    made = (
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, one thread, Python "
        f"{machine.python}. Load average {machine.load_before} before."
    )
    lines = [
        "# Planning and binding",
        "",
        made,
        "",
        *(["**A quick run: its figures say nothing.**", ""] if results.quick else []),
        *_tables(results),
        "",
        "![planning](planning.png)",
        "",
        "## Goals",
        "",
        *([f"- {line}" for line in missed(results)] or ["All that were measured are met."]),
    ]
    tables.write(folder, "planning", results, "\n".join(lines) + "\n")
    _draw(results, folder / "planning.png")


def _engines(ranks: int) -> list[tuple[str, EngineGeometry, EngineGeometry]]:
    """Pairs of engines with as many ranks each."""
    shapes = [
        (
            "8 heads, 16 stages → 8",
            8,
            ParallelShape(tp=ranks // 16, pp=16),
            ParallelShape(tp=ranks // 8, pp=8),
        ),
        (
            "128 heads, TP → half the TP, 2 stages",
            128,
            ParallelShape(tp=ranks),
            ParallelShape(tp=ranks // 2, pp=2),
        ),
        (
            "1 head, DCP 16 → DCP 4",
            1,
            ParallelShape(tp=ranks, dcp=16),
            ParallelShape(tp=ranks, dcp=4),
        ),
    ]
    return [
        (
            name,
            _geometry(num_kv_heads=heads, parallel=source),
            _geometry(num_kv_heads=heads, parallel=target),
        )
        for name, heads, source, target in shapes
    ]


def _request_pairs() -> list[tuple[str, EngineGeometry, EngineGeometry]]:
    target = _geometry(num_kv_heads=8, block_size=24, parallel=ParallelShape(tp=3))
    shapes = [
        ("TP 8 → 3, block 16 → 24", ParallelShape(tp=8)),
        ("the same from DCP 2", ParallelShape(tp=16, dcp=2)),
        ("from DCP 4, turns of 4 tokens", ParallelShape(tp=32, dcp=4, interleave_size=4)),
    ]
    return [(name, _geometry(num_kv_heads=8, parallel=source), target) for name, source in shapes]


def _geometry(
    *, num_kv_heads: int, parallel: ParallelShape, block_size: int = 16
) -> EngineGeometry:
    return EngineGeometry(
        num_layers=80,
        num_kv_heads=num_kv_heads,
        head_size=128,
        dtype="bfloat16",
        block_size=block_size,
        layout="NHD",
        parallel=parallel,
    )


def _plan(
    case: str, ranks: int, source: EngineGeometry, target: EngineGeometry, rounds: int
) -> PlanSample:
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        plans = [
            plan_transfer(source=source, target=target, target_rank=rank, target_engine_id="d0")
            for rank in range(target.world_size)
        ]
        seconds.append(time.perf_counter() - began)
    return PlanSample(
        case=case,
        ranks=ranks,
        pairs=sum(len(plan.source_ranks) for plan in plans),
        pieces=sum(len(plan.pieces) for plan in plans),
        seconds=min(seconds),
    )


def _bind(
    case: str, tokens: int, source: EngineGeometry, target: EngineGeometry, rounds: int
) -> BindSample:
    plan = plan_transfer(source=source, target=target)
    tables = [
        np.array(shuffled_table(tokens, one.virtual_block_size, seed=seed))
        for seed, one in enumerate((source, target))
    ]
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        copies = plan.bind(tables[0], tables[1], tokens)
        seconds.append(time.perf_counter() - began)
    return BindSample(
        case=case,
        tokens=tokens,
        runs=sum(map(len, copies.context_runs.values())),
        seconds=statistics.median(seconds[1:]),  # the first one loads the module
    )


def _tables(results: PlanningResults) -> list[str]:
    lines = [
        "All plans of two engines of 80 layers and as many ranks each:",
        "",
        "| case | ranks | pairs that share cells | pieces | seconds | µs per pair |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {plan.case} | {plan.ranks:,} | {plan.pairs:,} | {plan.pieces:,} | {plan.seconds:.3f} "
        f"| {plan.seconds / plan.pairs * 1e6:.0f} |"
        for plan in results.plans
    ]
    lines += [
        "",
        "One request bound to one target rank's plan, 80 layers and 8 heads:",
        "",
        "| case | tokens | runs | ms |",
        "| --- | ---: | ---: | ---: |",
    ]
    lines += [
        f"| {bind.case} | {bind.tokens:,} | {bind.runs:,} | {bind.seconds * 1e3:.3f} |"
        for bind in results.binds
    ]
    return lines


def _draw(results: PlanningResults, path: Path) -> None:
    """Seconds over pairs of ranks, and milliseconds over tokens; both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2))
    plans = [(plan.case, plan.pairs, plan.seconds) for plan in results.plans]
    binds = [(bind.case, bind.tokens, bind.seconds * 1e3) for bind in results.binds]
    _lines(left, plans, "pairs of ranks that share cells", "s", PLAN_GOAL_SECONDS)
    _lines(right, binds, "tokens", "ms", BIND_GOAL_SECONDS * 1e3)
    left.set_title("plans of all target ranks")
    right.set_title("bind of one request")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _lines(
    axes: Any, points: list[tuple[str, int, float]], x_label: str, y_label: str, goal: float
) -> None:
    for case in dict.fromkeys(case for case, _, _ in points):
        xs = [x for name, x, _ in points if name == case]
        ys = [y for name, _, y in points if name == case]
        axes.loglog(xs, ys, marker="o", label=case)
    axes.axhline(goal, color="#9aa0a6", linestyle="--", linewidth=0.8, label="goal")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
