"""The picture of the transport benchmark."""

from pathlib import Path
from typing import Any

from benchmarks.cases import CacheShape
from benchmarks.figures import CaseResult
from benchmarks.report import Results, case_label, family_gbps

_PANELS = (
    (
        "one host",
        (
            ("memcpy", "memcpy"),
            ("shm", "kvferry shm"),
            ("process_vm_readv", "bare process_vm_readv"),
            ("process_vm_readv, blocks", "the same by blocks"),
            ("vm", "kvferry vm"),
            ("nixl shm", "NIXL shm (+ permute)"),
            ("nixl (placed) shm", "kvferry nixl (placed)"),
            ("nixl (staged) shm", "kvferry nixl (staged)"),
        ),
    ),
    (
        "TCP",
        (
            ("tcp", "kvferry tcp"),
            ("nixl tcp", "NIXL over UCX TCP (+ permute)"),
            ("nixl (placed) tcp", "kvferry nixl (placed)"),
            ("nixl (staged) tcp", "kvferry nixl (staged)"),
        ),
    ),
)
_COLOURS = {
    "memcpy": "#9aa0a6",
    "shm": "#1a73e8",
    "vm": "#34a853",
    "process_vm_readv": "#bdc1c6",
    "process_vm_readv, blocks": "#dadce0",
    "tcp": "#1a73e8",
    "nixl shm": "#e8710a",
    "nixl tcp": "#e8710a",
    "nixl (placed) shm": "#0b8043",
    "nixl (placed) tcp": "#0b8043",
    "nixl (staged) shm": "#fbbc04",
    "nixl (staged) tcp": "#fbbc04",
}


def write_plot(results: Results, path: Path) -> None:
    """Draws GB/s per case: one row of panels per number of threads. Whiskers: slowest, fastest."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    threads = sorted({result.case.threads for result in results.transports})
    figure, grid = plt.subplots(
        len(threads), len(_PANELS), figsize=(13, 3.6 * len(threads)), squeeze=False
    )
    for row, count in zip(grid, threads, strict=True):
        cases = [result for result in results.transports if result.case.threads == count]
        for axes, (title, families) in zip(row, _PANELS, strict=True):
            _draw(axes, results.shape, cases, families)
            axes.set_title(f"{title}, {count} thread{'s' if count > 1 else ''} on both sides")
    shape = results.shape
    figure.suptitle(
        f"{shape.transfer_bytes / 1e6:.0f} MB of KV cache between two processes "
        f"({results.machine.cpu}, {results.machine.cores} cores, {results.rounds} rounds)"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(
    axes: Any,
    shape: CacheShape,
    cases: list[CaseResult],
    families: tuple[tuple[str, str], ...],
) -> None:
    width = 0.8 / len(families)
    for index, (family, label) in enumerate(families):
        heights = family_gbps(shape, cases, family)
        places = [
            number + (index - (len(families) - 1) / 2) * width for number in range(len(cases))
        ]
        whiskers = [_whisker(shape, case, family) for case in cases]
        axes.bar(
            places,
            heights,
            width,
            label=label,
            color=_COLOURS[family],
            yerr=list(zip(*whiskers, strict=True)),
            error_kw={"elinewidth": 0.8, "ecolor": "#3c4043"},
        )
    axes.set_xticks(range(len(cases)), [case_label(case.case) for case in cases], fontsize=7)
    axes.set_ylabel("GB/s")
    axes.margins(y=0.15)  # room for the legend above the bars
    axes.legend(
        fontsize=7, loc="upper center", ncols=len(families), frameon=False, columnspacing=0.8
    )
    axes.spines[["top", "right"]].set_visible(False)


def _whisker(shape: CacheShape, case: CaseResult, family: str) -> tuple[float, float]:
    """How far the slowest and the fastest round lie from the median, in GB/s."""
    row = case.best(family)
    if row is None:
        return 0.0, 0.0
    seconds = [sample.seconds for sample in row.samples]
    middle, slowest, fastest = (
        shape.transfer_bytes / each / 1e9 for each in (row.seconds, max(seconds), min(seconds))
    )
    return middle - slowest, fastest - middle


def write_scale_plot(points: list[tuple[str, str, int, float]], path: Path) -> None:
    """Draws figures over the number of engines, a panel per side; both axes logarithmic.

    Args:
        points: side, figure, engines, value.
        path: of the picture.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    sides = list(dict.fromkeys(side for side, *_ in points))
    figure, panels = plt.subplots(1, len(sides), figsize=(6.5 * len(sides), 4.6), squeeze=False)
    for axes, side in zip(panels[0], sides, strict=True):
        for name in dict.fromkeys(name for one, name, *_ in points if one == side):
            line = [(x, y) for one, label, x, y in points if (one, label) == (side, name)]
            axes.loglog(*zip(*sorted(line), strict=True), marker="o", label=name)
        axes.set_title(f"{side}, by the number of engines")
        axes.legend(fontsize=7, frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
