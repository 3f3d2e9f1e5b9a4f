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


OFF = "tracing off"
ON = "tracing on"
"""Spans are made of every request, and sent to a collector."""
BEFORE = "before"
"""Another checkout, with tracing off."""


class AdapterResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that was measured."""

    command: str
    machine: Machine
    load_after: float
    quick: bool
    """Whether this was only a test of the benchmark."""
    order: Order
    runs: int
    """In each of which every side had engines of its own, one side after the other."""
    measured: dict[str, Measured]
    """By side; all runs together."""
    num_spans: int
    """That the collector got."""


def joined(runs: Sequence[Measured]) -> Measured:
    """What one side measured in all runs."""
    return Measured(
        layer_calls=statistics.median(run.layer_calls for run in runs),
        cases=tuple(
            msgspec.structs.replace(
                cases[0],
                steps={
                    clock: tuple(step for case in cases for step in case.steps[clock])
                    for clock in cases[0].steps
                },
            )
            for cases in zip(*(run.cases for run in runs), strict=True)
        ),
        per_request={
            method: tuple(span for run in runs for span in run.per_request[method])
            for method in runs[0].per_request
        },
    )


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
        f"{case.name}, {side}: {median_us(case, 'wall'):.0f} µs per step, the goal is "
        f"{goal_us(case):g} µs"
        for side in (OFF, ON)
        for case in results.measured[side].cases
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
    (folder / "vllm_step.json").write_bytes(msgspec.json.encode(results) + b"\n")
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
    order, now = results.order, results.measured[OFF]
    sides = [side for side in (BEFORE, OFF, ON) if side in results.measured]
    yield (
        "Microseconds per engine step that the main thread spends in the connector's methods, the "
        "scheduler's and the worker's together: median (95th percentile) of the wall time, of "
        f"{order.steps} steps in each of {results.runs} runs. In a run each column has engines of "
        f"its own, one after the other. The engines are vLLM's own, with {order.layers} layers; in "
        "each step one request without a transfer generates a token. Wall time includes what other "
        "threads and processes took; the goals are for its median. The processor time of as many "
        "other steps is beside it: its clock, a system call, takes more than most of the methods. "
        "Subtracted per call is what the clock says in the same steps of the connector's "
        f"`wait_for_save`, which does nothing; included are {now.layer_calls:.1f} µs of calls for "
        f"every layer, timed in a row. With {ON} every request has a `traceparent`, and "
        f"{results.num_spans} spans came to a collector."
    )
    if BEFORE in results.measured:
        yield f"The column {BEFORE} is of the checkout that `--before` names."
    yield ""
    titles = ["case", "in flight", "goal", *sides, "processor, tracing off", "calls", ""]
    yield "| " + " | ".join(titles) + " |"
    yield "| --- |" + " ---: |" * (len(titles) - 2) + " --- |"
    for index, case in enumerate(now.cases):
        found = {side: results.measured[side].cases[index] for side in sides}
        walls = (_shown(one, "wall") for one in found.values())
        is_met = all(median_us(found[side], "wall") <= goal_us(case) for side in (OFF, ON))
        calls = statistics.median(step.calls for step in case.steps["cpu"])
        cells = [case.name, str(case.in_flight), f"{goal_us(case):g}", *walls, _shown(case, "cpu")]
        yield f"| {' | '.join(cells)} | {calls:.0f} | {'met' if is_met else '**missed**'} |"
    yield ""
    yield (
        f"Beside that, once per request of {order.prompt_tokens} tokens, microseconds of the "
        "processor, median (highest):"
    )
    yield ""
    yield "| method | " + " | ".join(sides) + " |"
    yield "| --- |" + " ---: |" * len(sides)
    for method in now.per_request:
        spans = (_middle_and_top(results.measured[side].per_request.get(method)) for side in sides)
        yield f"| {method} | {' | '.join(spans)} |"


def _shown(case: Case, clock: Clock) -> str:
    return f"{median_us(case, clock):.0f} ({percentile_us(case, clock):.0f})"


def _middle_and_top(spans: Sequence[float] | None) -> str:
    if not spans:
        return "not measured"  # by the benchmark of another checkout
    return f"{statistics.median(spans):.0f} ({max(spans):.0f})"
