"""What a run leaves behind: a table on the terminal, JSON, Markdown and a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks import tables
from benchmarks.machine import Machine
from benchmarks.vllm_pair.cases import LOW_GOAL, REQUESTS, REST_GOAL_S
from benchmarks.vllm_pair.rounds import AT_ONCE, MEASURES, Row
from benchmarks.vllm_pair.shapes import Verdict, shapes_table


class PairResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    machine: Machine
    rounds: int
    load_after: float
    """Load average at the end; the run itself makes about 1 to 2 of it."""
    quick: bool
    """Whether this was only a test of the benchmark."""
    rows: tuple[Row, ...]
    verdicts: tuple[Verdict, ...]


def missed(results: PairResults) -> list[str]:
    """A sentence for each goal that was missed."""
    if results.quick:
        return []
    slow = [
        f"{row.name}, {MEASURES[measure]}: {ratio.median:.2f} "
        f"({ratio.low:.2f} to {ratio.high:.2f}), the goal is {ratio.goal:g}"
        for row in results.rows
        for measure, ratio in row.ratios.items()
        if not ratio.met
    ]
    slow += [
        f"{row.name}, hand-over: {1e3 * row.ours.rest:.1f} ms of it are neither the "
        f"transfer nor D's step, the goal is {1e3 * REST_GOAL_S:g}"
        for row in results.rows
        if row.case.concurrency == 1 and not row.case.beside
        if row.ours.rest is not None and row.ours.rest > REST_GOAL_S
    ]
    wrong = [
        f"{row.name}: {row.ours.wrong} answers of {row.ours.name} are wrong"
        for row in results.rows
        if row.ours.wrong
    ]
    refused = [
        f"{verdict.shape}: {verdict.contender}: {verdict}"
        for verdict in results.verdicts
        if verdict.contender.startswith("kvferry") and (verdict.wrong or verdict.refused)
    ]
    return slow + wrong + refused


def show(results: PairResults, console: Console) -> None:
    """Prints the tables."""
    for line in _tables(results):
        console.print(line, highlight=False, markup=False)
    for line in missed(results):
        console.print(f"[yellow]![/] {line}", highlight=False)


def write(results: PairResults, folder: Path) -> None:
    """Writes ``vllm.json``, ``VLLM.md`` and ``vllm.png`` into ``folder``."""
    tables.write(folder, "vllm", results, markdown(results))
    if results.rows:
        _plot(results, folder / "vllm.png")


def markdown(results: PairResults) -> str:
    """The page for people."""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    made = (
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores, "
        f"{machine.memory_gib} GiB, Linux {machine.kernel}, vLLM 0.32.0 for CPUs, {versions}. "
        f"Load average {machine.load_before} before, {results.load_after} after."
    )
    lines = [
        "# Beside NIXL inside vLLM",
        "",
        made,
        "",
        *(["**A quick run: its figures say nothing.**", ""] if results.quick else []),
        *_tables(results),
        *(["", "![vLLM pairs](vllm.png)"] if results.rows else []),
        "",
        "## Goals",
        "",
        *([f"- {line}" for line in missed(results)] or ["All that were measured are met."]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _tables(results: PairResults) -> Iterator[str]:
    if results.rows:
        yield from _speed(results)
        yield from _handover(results.rows)
    if results.verdicts:
        yield ""
        yield "Servers of unequal shapes, greedy tokens compared with a single server's:"
        yield ""
        yield from shapes_table(results.verdicts)


def _speed(results: PairResults) -> Iterator[str]:
    yield (
        f"Medians in milliseconds over {results.rounds} interleaved rounds of {REQUESTS} requests, "
        "kvferry / NIXL; then how many times less ours takes: of each round's ratio the median "
        f"(lowest to highest). Bold: below its goal, or wholly below {LOW_GOAL:g}. Both pairs have "
        "the same model, prompts and settings and are stopped while the other one is measured. "
        "Prompts are computed once by each prefill server; the decode server keeps no prefixes. "
        "The transfer is what each connector's own metric says, from its start to the data in "
        'place; the CPU time is that of all processes of both servers per request. "beside 4 '
        'answers": a decode server that draws those meanwhile, as it always does in service, has '
        "steps of some 10 ms, and each that a hand-over waits for shows. "
        f'"{AT_ONCE.removeprefix(", ")}": kvferry\'s servers get each request at the same time, as '
        "`kvferry router --at-once` sends it, and NIXL's in turn, as they must. Then the decode "
        "server's first token may come before the prefill server's answer, in less than no time."
    )
    yield ""
    yield "| case | " + " | ".join(MEASURES.values()) + " | wrong answers |"
    yield "| --- |" + " ---: |" * (len(MEASURES) + 1)
    for row in results.rows:
        cells = [_cell(row, measure) for measure in MEASURES]
        wrong = f"{row.ours.wrong} / {row.theirs.wrong}"
        yield f"| {row.name} | " + " | ".join([*cells, wrong]) + " |"


def _handover(rows: Sequence[Row]) -> Iterator[str]:
    """What our hand-overs went to: a line per stretch, a column per case."""
    told = {row.name: row.ours for row in rows if row.ours.rest is not None}
    found = {case: {each.name: each for each in ours.stretches()} for case, ours in told.items()}
    owners = {each.name: each.owner for stretches in found.values() for each in stretches.values()}
    if not owners:
        return
    yield ""
    yield (
        "What kvferry's went to, in milliseconds, as `kvferry trace` tells it: from the end of "
        "prefill on P to the step that has drawn D's first token. Of a round's requests the mean, "
        "of the rounds the median, so a column adds up only about. The last line is what is "
        "neither `read` nor `first token`; one at a time, with nothing beside, its goal is "
        f"{1e3 * REST_GOAL_S:g}."
    )
    yield ""
    yield from tables.markdown(
        (
            ("stretch", "whose", *told),
            *(
                (
                    name,
                    owner,
                    *(
                        _milliseconds(each[name].seconds if name in each else 0)
                        for each in found.values()
                    ),
                )
                for name, owner in owners.items()
            ),
            ("the rest", "", *(_milliseconds(ours.rest or 0.0) for ours in told.values())),
        ),
        left=2,
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def _cell(row: Row, measure: str) -> str:
    ours, theirs = (1e3 * each.median(measure) for each in (row.ours, row.theirs))
    ratio = row.ratios[measure]
    shown = f"{ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
    return f"{ours:.1f} / {theirs:.1f}: " + (shown if ratio.met else f"**{shown}**")


def _plot(results: PairResults, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    groups = list(dict.fromkeys(row.group for row in results.rows))
    figure, grid = plt.subplots(
        len(groups), len(MEASURES), figsize=(16, 4.4 * len(groups)), squeeze=False
    )
    for line, group in zip(grid, groups, strict=True):
        rows = [row for row in results.rows if row.group == group]
        for axes, (measure, title) in zip(line, MEASURES.items(), strict=True):
            _draw(axes, rows, measure)
            axes.set_title(f"{group}: {title}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axes: Any, rows: list[Row], measure: str) -> None:
    for offset, colour, pick in ((-0.2, "#1a73e8", "ours"), (0.2, "#e8710a", "theirs")):
        each = [getattr(row, pick) for row in rows]
        axes.bar(
            [index + offset for index in range(len(rows))],
            [1e3 * contender.median(measure) for contender in each],
            0.4,
            label=each[0].name,
            color=colour,
        )
    labels = [
        f"{row.case.tokens} × {row.case.concurrency}"
        + (" busy" if row.case.beside else "")
        + (AT_ONCE if row.ours.name.endswith(AT_ONCE) else "")
        for row in rows
    ]
    axes.set_xticks(range(len(rows)), labels, fontsize=7, rotation=90)
    axes.set_ylabel("ms")
    axes.set_yscale("log")
    axes.legend(fontsize=7, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
