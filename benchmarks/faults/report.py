"""What a run leaves behind: a table on the terminal, JSON, Markdown and a picture."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.faults.faults import FAULTS
from benchmarks.faults.matrix import Cell

NAME = "faults"
_TITLES = {fault.name: fault.title for fault in FAULTS}
_ORDER = {name: index for index, name in enumerate(_TITLES)}


class FaultResults(report.Results, frozen=True, kw_only=True):
    """All cells that were measured, by whatever runs; the rest is of the last one."""

    cells: tuple[Cell, ...] = ()

    def with_cell(self, cell: Cell) -> "FaultResults":
        """The same with a cell; an older one of its key goes."""
        others = (one for one in self.cells if one.key != cell.key)
        cells = sorted((*others, cell), key=lambda one: (one.system, _ORDER[one.fault]))
        return msgspec.structs.replace(self, cells=tuple(cells))


def read(folder: Path) -> tuple[Cell, ...]:
    """The cells of earlier runs."""
    path = folder / f"{NAME}.json"
    if not path.exists():
        return ()
    return msgspec.json.decode(path.read_bytes(), type=FaultResults).cells


def missed(cells: Iterable[Cell]) -> list[str]:
    """A sentence for each cell in which somebody lost more than time."""
    sentences = []
    for cell in cells:
        if cell.is_good:
            continue
        counts = cell.counts
        what = [
            f"{number} {name}"
            for number, name in (
                (counts.wrong, "wrong"),
                (counts.failed, "failed"),
                (cell.stranded, "blocks stranded"),
            )
            if number
        ]
        what += [f"{name} ended" for name in cell.died]
        what += ["throughput never back"] if counts.back_s is None else []
        why = f" ({counts.errors[0]})" if counts.errors else ""
        sentences.append(
            f"{cell.system}: {_TITLES[cell.fault]}, {cell.step}: {', '.join(what)}{why}"
        )
    return sentences


def page(results: FaultResults) -> str:
    """The page for people."""
    total: dict[str, int] = {}
    for cell in results.cells:
        total[cell.system] = total.get(cell.system, 0) + cell.counts.requests + cell.hostile
    return report.page(
        "What faults do to requests",
        results,
        "That was the last of several runs. How to read it: "
        "[docs/performance/faults.md](../../docs/performance/faults.md).",
        [
            *report.table(rows(results.cells), left=3),
            "",
            f"Requests: {', '.join(f'{count:,} {system}' for system, count in total.items())}.",
            "",
            "![faults](faults.png)",
            "",
            "## Goals",
            "",
            *report.bullets(missed(results.cells) or ["All that were measured are met."]),
        ],
    )


def rows(cells: Iterable[Cell]) -> Iterator[tuple[str, ...]]:
    """The table, its header first."""
    yield (
        *("system", "fault", "at step", "requests", "wrong", "failed", "longest stall, s"),
        *("back after, s", "blocks stranded"),
    )
    for cell in cells:
        counts = cell.counts
        asked = f"{counts.requests}"
        if cell.hostile:
            asked += f" + {cell.hostile} hostile, {cell.refused} refused"
        yield (
            cell.system,
            _TITLES[cell.fault],
            cell.step,
            asked,
            str(counts.wrong),
            str(counts.failed),
            f"{counts.stall_s:.1f}",
            "never" if counts.back_s is None else f"{counts.back_s:.1f}",
            str(cell.stranded),
        )


def draw(results: FaultResults, path: Path) -> None:
    """Draws per system, for each fault, the longest stall, and how long throughput needed."""
    systems = list(dict.fromkeys(cell.system for cell in results.cells))
    names = [name for name in _TITLES if any(cell.fault == name for cell in results.cells)]
    size = (13, 1.5 + 0.3 * len(names))
    with report.picture(path, 1, 2, size, sharey=True) as grid:
        for place, (title, pick) in zip(grid[0], _MEASURES.items(), strict=True):
            for number, system in enumerate(systems):
                worst = [_worst(results.cells, system, name, pick) for name in names]
                height = 0.8 / len(systems)
                lines = [index + (number + 0.5) * height - 0.4 for index in range(len(names))]
                place.barh(lines, worst, height, label=system)
            place.set_title(title, fontsize=10)
            place.set_xscale("symlog")
        left, right = grid[0]
        left.set_yticks(range(len(names)), [_TITLES[name] for name in names], fontsize=8)
        left.invert_yaxis()
        right.legend(fontsize=8, frameon=False)


_MEASURES: dict[str, Any] = {
    "longest stall of a client, s": lambda cell: cell.counts.stall_s,
    "until throughput was back, s": lambda cell: cell.counts.back_s or 0.0,
}


def _worst(cells: Iterable[Cell], system: str, fault: str, pick: Any) -> float:
    """Of all steps."""
    return max(
        (pick(cell) for cell in cells if (cell.system, cell.fault) == (system, fault)), default=0.0
    )
