"""What a run leaves behind: a table on the terminal, JSON, Markdown and a picture."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console

from benchmarks import tables
from benchmarks.faults.faults import FAULTS
from benchmarks.faults.matrix import Cell
from benchmarks.machine import Machine

NAME = "faults"
_TITLES = {fault.name: fault.title for fault in FAULTS}
_ORDER = {name: index for index, name in enumerate(_TITLES)}


class FaultResults(msgspec.Struct, frozen=True, kw_only=True):
    """All cells that were measured, by whatever runs."""

    command: str
    """Of the last run."""
    machine: Machine
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


def write(results: FaultResults, folder: Path) -> None:
    """Writes ``faults.json`` and ``FAULTS.md`` into ``folder``."""
    tables.write(folder, NAME, results, markdown(results))


def show(cells: Iterable[Cell], console: Console) -> None:
    """Prints a line for each cell."""
    tables.show(console, "Faults", _cells(cells), (), left=3)


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


def markdown(results: FaultResults) -> str:
    """The page for people."""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    total: dict[str, int] = {}
    for cell in results.cells:
        total[cell.system] = total.get(cell.system, 0) + cell.counts.requests + cell.hostile
    return tables.page(
        "What faults do to requests",
        f"Made by `python -m benchmarks.faults`, in parts; the last one was `{results.command}` on "
        f"{machine.date}: {machine.cpu}, {machine.cores} cores, Linux {machine.kernel}, "
        f"{versions}. How to read it: [docs/faults.md](../../docs/faults.md).",
        [],
        _cells(results.cells),
        [
            f"Requests: {', '.join(f'{count:,} {system}' for system, count in total.items())}.",
            "",
            "![faults](faults.png)",
        ],
        missed(results.cells),
        quick=False,
        left=3,
    )


def _cells(cells: Iterable[Cell]) -> Iterator[tuple[str, ...]]:
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


def plot(results: FaultResults, path: Path) -> None:
    """Draws per system, for each fault, the longest stall, and how long throughput needed."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    systems = list(dict.fromkeys(cell.system for cell in results.cells))
    names = [name for name in _TITLES if any(cell.fault == name for cell in results.cells)]
    figure, axes = plt.subplots(1, 2, figsize=(13, 1.5 + 0.3 * len(names)), sharey=True)
    for place, (title, pick) in zip(axes, _MEASURES.items(), strict=True):
        for number, system in enumerate(systems):
            worst = [_worst(results.cells, system, name, pick) for name in names]
            height = 0.8 / len(systems)
            lines = [index + (number + 0.5) * height - 0.4 for index in range(len(names))]
            place.barh(lines, worst, height, label=system)
        place.set_title(title, fontsize=10)
        place.set_xscale("symlog")
        place.spines[["top", "right"]].set_visible(False)
    axes[0].set_yticks(range(len(names)), [_TITLES[name] for name in names], fontsize=8)
    axes[0].invert_yaxis()
    axes[1].legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


_MEASURES: dict[str, Any] = {
    "longest stall of a client, s": lambda cell: cell.counts.stall_s,
    "until throughput was back, s": lambda cell: cell.counts.back_s or 0.0,
}


def _worst(cells: Iterable[Cell], system: str, fault: str, pick: Any) -> float:
    """Of all steps."""
    return max(
        (pick(cell) for cell in cells if (cell.system, cell.fault) == (system, fault)), default=0.0
    )
