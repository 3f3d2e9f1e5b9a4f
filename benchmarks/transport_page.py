"""What is made of the transports' times: ratios and goals, the page, the picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.cases import CacheShape, Case


class _Family(NamedTuple):
    """Contenders that are ways to do the same thing: the fastest counts."""

    title: str
    members: tuple[str, ...]
    panel: str = ""
    """Of the picture; empty where it is not drawn."""
    colour: str = ""


_HOST, _TCP = "one host", "TCP"
_FAMILIES = {
    "memcpy": _Family("memcpy", ("memmove", "torch copy"), _HOST, "#9aa0a6"),
    "shm": _Family("kvferry shm", ("shm",), _HOST, "#1a73e8"),
    "process_vm_readv": _Family(
        "bare process_vm_readv",
        ("process_vm_readv", "process_vm_readv, shared out"),
        _HOST,
        "#bdc1c6",
    ),
    "vm": _Family("kvferry vm", ("vm",), _HOST, "#34a853"),
    "nixl shm": _Family("NIXL shm", ("nixl shm", "nixl shm, num_threads=2"), _HOST, "#e8710a"),
    "socket": _Family("bare socket", ("socket",)),
    "tcp": _Family("kvferry tcp", ("tcp",), _TCP, "#1a73e8"),
    "nixl tcp": _Family("NIXL TCP", ("nixl tcp", "nixl tcp, num_threads=2"), _TCP, "#e8710a"),
    "tls": _Family("bare TLS", ("tls",)),
    "tcp encrypted": _Family("kvferry tcp encrypted", ("tcp encrypted",)),
}
_COMPARED = {
    ("shm", "memcpy"): "shm / memcpy",
    ("shm", "nixl shm"): "shm / NIXL",
    ("vm", "process_vm_readv"): "vm / process_vm_readv",
    ("vm", "nixl shm"): "vm / NIXL",
    ("tcp", "socket"): "tcp / socket",
    ("tcp", "nixl tcp"): "tcp / NIXL",
    ("tcp encrypted", "tls"): "encrypted / TLS",
}


class TransportRow(report.TimedRow, frozen=True, kw_only=True):
    """One case."""

    case: Case

    def best(self, family: str) -> str | None:
        """The fastest contender of a family, by its median; ``None`` if none took part."""
        there = [name for name in _FAMILIES[family].members if name in self.seconds]
        return min(there, key=self.median, default=None)


class TransportResults(report.Results, frozen=True, kw_only=True):
    """All that one run measured."""

    shape: CacheShape
    """Of the transports' cache."""
    nixl_skipped: str | None
    """Why NIXL did not take part."""
    stores: tuple[float, float]
    """What :func:`kvferry.layouts.copier.measure_stores` found."""
    rows: tuple[TransportRow, ...]


def goal_of(case: Case, ours: str, theirs: str) -> float:
    """How many times faster ours is meant to be.

    >>> goal_of(Case("NHD", "NHD", shuffled=True, threads=2), "shm", "nixl shm")
    3.0
    """
    if theirs == "tls":
        return 0.8
    if theirs == "socket":
        return 0.6 if case.mismatched else 0.85
    if theirs == "memcpy":
        return 0.85 if case.threads == 1 else 0.9
    if theirs == "process_vm_readv":
        return 0.7 if case.mismatched else 0.9
    if ours == "tcp":
        return 2.0
    if ours == "vm" and not case.mismatched:
        return 1.5
    if case.mismatched:
        return 4.0
    if case.threads == 1:
        return 2.5 if case.shuffled else 1.5
    return 3.0 if case.shuffled else 2.5


def page(results: TransportResults) -> str:
    """The page for people."""
    skipped = results.nixl_skipped
    return report.page(
        "The transports beside NIXL",
        results,
        f"{_mb(results.shape)} per transfer. GB/s are medians. A ratio is the median over the "
        "rounds of each round's ratio, then the lowest and the highest, and the goal; bold ones "
        "miss it.",
        [
            *report.table(_cells(results)),
            "",
            "![transports](transports.png)",
            "",
            "How it was measured:",
            "",
            *report.bullets(_method(results)),
        ],
        [] if skipped is None else [f"NIXL did not take part: {skipped}."],
    )


def _cells(results: TransportResults) -> Iterator[tuple[str, ...]]:
    titles = (family.title for family in _FAMILIES.values())
    yield ("case", *titles, *_COMPARED.values())
    for row in results.rows:
        best = {family: row.best(family) for family in _FAMILIES}
        rates = (f"{row.gbps(name):.1f}" if name else "–" for name in best.values())
        ratios = (_ratio_cell(row, *pair) for pair in _COMPARED)
        yield (str(row.case), *rates, *ratios)


def _ratio_cell(row: TransportRow, ours: str, theirs: str) -> str:
    mine, other = row.best(ours), row.best(theirs)
    if mine is None or other is None:
        return "–"
    return report.ratio_cell(row.ratios(other, mine), goal_of(row.case, ours, theirs))


def _method(results: TransportResults) -> Iterator[str]:
    shape = results.shape
    yield (
        f"{shape.layers} layers, {shape.kv_heads} KV heads, head size {shape.head_size}, "
        f"bfloat16, blocks of {shape.block_size}, {shape.tokens:,} tokens: "
        f"{_mb(shape)}. All sources serve the same shared memory; all "
        "readers read into private memory, from one process into another."
    )
    yield (
        "Before the rounds every contender moved every case once, and every cell was compared. "
        "Processes of contenders whose turn it is not are suspended, since NIXL's poll when idle."
    )
    yield (
        "Ours is timed from the block tables to the data in place, `bind` included. NIXL's "
        "descriptors are merged and its request is made before the clock starts, and nothing of it "
        "polls where that would take a core from the copy. Where the layouts differ its figure is "
        "the READ and then `index_select`, permute and `index_copy_` in torch with as many threads."
    )
    yield (
        "`memcpy` is one copy of as many bytes from the mapped shared memory: `memmove` in as "
        "many threads or torch's `copy_`, whichever is faster in that case."
    )
    plain, around = results.stores
    yield (
        f"Half a MiB that is not in the cache takes one thread {plain * 1e6:.0f} µs with "
        f"plain stores and {around * 1e6:.0f} µs with stores around the cache: by this each "
        "process chooses at start how copies of 4 MiB and more store."
    )
    yield (
        "`bare process_vm_readv` reads as many bytes from the private memory that `vm` reads, in "
        "as many threads: one span for each, or pieces of 8 MiB that they take as they come, "
        "whichever is faster. Shuffled blocks cannot be read so."
    )
    yield (
        "`bare socket` is a loop of `sendall` from that memory and `recv_into` one piece of "
        "memory over loopback; connections, and threads on either side, as many as the case has. "
        "`bare TLS` is the same through Python's `ssl`."
    )
    chosen = {
        f"{row.case}: {best}"
        for row in results.rows
        for family in ("memcpy", "nixl shm", "nixl tcp")
        if row.case.threads > 1 and (best := row.best(family)) and best != family
    }
    yield (
        "With two threads on both sides, kvferry has two movers in the reader (over `tcp` two "
        "threads on either side), torch two threads, and NIXL runs as it is and with "
        "`num_threads=2`; the faster counts. What won where it is not the first choice: "
        + ("; ".join(sorted(chosen)) or "nothing")
        + "."
    )


def _mb(shape: CacheShape) -> str:
    return f"{shape.transfer_bytes / 1e6:.3g} MB"


def draw(results: TransportResults, path: Path) -> None:
    """Draws GB/s per case: one row of panels per number of threads. Whiskers: slowest, fastest."""
    threads = sorted({row.case.threads for row in results.rows})
    with report.picture(path, len(threads), 2, (13, 3.6 * len(threads))) as grid:
        for line, count in zip(grid, threads, strict=True):
            rows = [row for row in results.rows if row.case.threads == count]
            for axes, panel in zip(line, (_HOST, _TCP), strict=True):
                shown = [name for name, family in _FAMILIES.items() if family.panel == panel]
                _bars(axes, rows, shown)
                axes.set_title(f"{panel}, {count} thread{'s' if count > 1 else ''} on both sides")


def _bars(axes: Any, rows: list[TransportRow], families: list[str]) -> None:
    width = 0.8 / len(families)
    for index, family in enumerate(families):
        rates = [_rates(row, family) for row in rows]
        axes.bar(
            [number + (index - (len(families) - 1) / 2) * width for number in range(len(rows))],
            [middle for _, middle, _ in rates],
            width,
            label=_FAMILIES[family].title,
            color=_FAMILIES[family].colour,
            yerr=[
                [middle - slowest for slowest, middle, _ in rates],
                [fastest - middle for _, middle, fastest in rates],
            ],
            error_kw={"elinewidth": 0.8, "ecolor": "#3c4043"},
        )
    axes.set_xticks(
        range(len(rows)),
        [f"{row.case.layouts}\n{row.case.tables}" for row in rows],
        fontsize=7,
    )
    axes.set_ylabel("GB/s")
    axes.margins(y=0.25)  # room for the legend above the bars
    axes.legend(fontsize=7, loc="upper center", ncols=4, frameon=False, columnspacing=0.8)


def _rates(row: TransportRow, family: str) -> tuple[float, float, float]:
    """GB/s of a family in its slowest, its median and its fastest round; 0 if it did not run."""
    best = row.best(family)
    if best is None:
        return 0.0, 0.0, 0.0
    taken = (max(row.seconds[best]), row.median(best), min(row.seconds[best]))
    slowest, middle, fastest = (row.nbytes / seconds / 1e9 for seconds in taken)
    return slowest, middle, fastest
