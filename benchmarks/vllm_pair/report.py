"""What a run leaves behind: a table on the terminal, JSON, Markdown and a picture."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.vllm_pair.cases import GOALS, ON_CPUS, REQUESTS, REST_GOAL_S
from benchmarks.vllm_pair.rounds import AT_ONCE, MEASURES, Row


class PairResults(report.Results, frozen=True, kw_only=True):
    """All that one run measured."""

    rows: tuple[Row, ...]
    place: str = ON_CPUS.name
    files: str = ON_CPUS.results
    """Name of the files with the results."""


def page(results: PairResults) -> str:
    """The page for people."""
    picture = f"![vLLM pairs]({results.files}.png)"
    lines = [*_speed(results), *_handover(results.rows), "", picture]
    facts = f"vLLM 0.32.0, caches on {results.place}."
    return report.page("Beside NIXL inside vLLM", results, facts, lines)


def _speed(results: PairResults) -> Iterator[str]:
    yield (
        f"Medians in milliseconds over {results.rounds} interleaved rounds of {REQUESTS} requests, "
        "kvferry / NIXL; then how many times less ours takes: of each round's ratio the median "
        "(lowest to highest) and the goal; bold ones miss it. Both pairs have "
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
    header = ("case", *MEASURES.values(), "wrong answers")
    rows = (
        (
            row.name,
            *(_cell(row, measure) for measure in MEASURES),
            f"{row.ours.wrong} / {row.theirs.wrong}",
        )
        for row in results.rows
    )
    yield from report.table((header, *rows))


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
    yield from report.table(
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
    ratio = report.ratio_cell(row.ratios(measure), GOALS.get(row.group, 1.0))
    return f"{ours:.1f} / {theirs:.1f}: {ratio}"


def draw(results: PairResults, path: Path) -> None:
    """Draws ours and theirs in milliseconds, a panel per group and measure."""
    groups = list(dict.fromkeys(row.group for row in results.rows))
    size = (16, 4.4 * len(groups))
    with report.picture(path, len(groups), len(MEASURES), size) as grid:
        for line, group in zip(grid, groups, strict=True):
            rows = [row for row in results.rows if row.group == group]
            for axes, (measure, title) in zip(line, MEASURES.items(), strict=True):
                _bars(axes, rows, measure)
                axes.set_title(f"{group}: {title}", fontsize=9)


def _bars(axes: Any, rows: list[Row], measure: str) -> None:
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
