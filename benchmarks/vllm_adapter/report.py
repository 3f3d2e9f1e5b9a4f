"""What a run leaves behind: a table on the terminal, JSON and Markdown."""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from benchmarks.machine import Machine
from benchmarks.vllm_adapter.engines import Case, Measured, Order
from benchmarks.vllm_adapter.meter import Clock

BUSY_GOAL_US = 200.0
"""For a step with 64 requests in flight."""
IDLE_GOAL_US = 20.0
"""For a step without transfers."""


class AdapterResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    machine: Machine
    load_after: float
    quick: bool
    """Whether this was only a test of the benchmark."""
    order: Order
    measured: Measured


def goal_us(case: Case) -> float:
    """Microseconds that the median step may take."""
    return BUSY_GOAL_US if case.in_flight else IDLE_GOAL_US


def empty_us(case: Case, clock: Clock) -> float:
    """What the clock says of a method that does nothing; its own time, above all."""
    return statistics.median(step.empty for step in case.steps[clock])


def step_us(case: Case, clock: Clock) -> list[float]:
    """Of the connector's calls of each step, in ascending order, without what the clock takes."""
    empty = empty_us(case, clock)
    return sorted(step.total - step.calls * empty for step in case.steps[clock])


def median_us(case: Case, clock: Clock) -> float:
    """Of the steps."""
    return statistics.median(step_us(case, clock))


def percentile_us(case: Case, clock: Clock) -> float:
    """Below which 95 of 100 steps stay."""
    totals = step_us(case, clock)
    return totals[int(0.95 * len(totals))]


def missed(results: AdapterResults) -> list[str]:
    """A sentence for each goal that was missed; the median wall time is judged."""
    if results.quick:
        return []
    return [
        f"{case.name}: {median_us(case, 'wall'):.0f} µs per step, the goal is {goal_us(case):g} µs"
        for case in results.measured.cases
        if median_us(case, "wall") > goal_us(case)
    ]


def show(results: AdapterResults, console: Console) -> None:
    """Prints the tables."""
    for line in _tables(results):
        console.print(line, highlight=False, markup=False)
    for line in missed(results):
        console.print(f"[yellow]![/] {line}", highlight=False)


def write(results: AdapterResults, folder: Path) -> None:
    """Writes ``vllm_step.json`` and ``VLLM_STEP.md`` into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = msgspec.json.format(msgspec.json.encode(results), indent=1)
    (folder / "vllm_step.json").write_bytes(encoded + b"\n")
    (folder / "VLLM_STEP.md").write_text(markdown(results))


def markdown(results: AdapterResults) -> str:
    """The page for people."""
    machine = results.machine
    made = (
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores, "
        f"Linux {machine.kernel}, Python {machine.python}, vLLM 0.32.0 for CPUs. Load average "
        f"{machine.load_before} before, {results.load_after} after."
    )
    lines = [
        "# What the connector costs a step of vLLM's engine",
        "",
        made,
        "",
        *(["**A quick run: its figures say nothing.**", ""] if results.quick else []),
        *_tables(results),
        "",
        "## Goals",
        "",
        *([f"- {line}" for line in missed(results)] or ["All that were measured are met."]),
    ]
    return "\n".join(lines) + "\n"


def _tables(results: AdapterResults) -> Iterator[str]:
    order, measured = results.order, results.measured
    yield (
        "Microseconds per engine step that the main thread spends in the connector's methods, the "
        "scheduler's and the worker's together: median (95th percentile) over "
        f"{order.steps} steps by each clock. The engines are vLLM's own, with {order.layers} "
        "layers; in each step one request without a transfer generates a token. Wall time includes "
        "what other threads and processes took; the goals are for its median, as the CPU clock "
        "itself, a system call, takes more than most of the methods. Subtracted "
        "per call what the clock says in the same steps of the connector's `wait_for_save`, which "
        f"does nothing; included are {measured.layer_calls:.1f} µs of calls for every layer, timed "
        "in a row."
    )
    yield ""
    yield "| case | in flight | CPU | wall | calls | subtracted per call, CPU, wall | goal | |"
    yield "| --- |" + " ---: |" * 6 + " --- |"
    for case in measured.cases:
        steps = case.steps["cpu"]
        yield (
            f"| {case.name} | {case.in_flight} | {_shown(case, 'cpu')} | {_shown(case, 'wall')} | "
            f"{statistics.median(step.calls for step in steps):.0f} | "
            f"{empty_us(case, 'cpu'):.1f}, {empty_us(case, 'wall'):.1f} | {goal_us(case):g} | "
            f"{'met' if median_us(case, 'wall') <= goal_us(case) else '**missed**'} |"
        )
    yield ""
    yield (
        f"Beside that, once per request of {order.prompt_tokens} tokens, CPU microseconds, median "
        "(highest):"
    )
    yield ""
    yield "| method | µs |"
    yield "| --- | ---: |"
    for method, spans in measured.per_request.items():
        yield f"| {method} | {_middle_and_top(spans)} |"


def _shown(case: Case, clock: Clock) -> str:
    return f"{median_us(case, clock):.0f} ({percentile_us(case, clock):.0f})"


def _middle_and_top(spans: Sequence[float]) -> str:
    return f"{statistics.median(spans):.0f} ({max(spans):.0f})"
