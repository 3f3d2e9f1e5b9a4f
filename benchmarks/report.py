"""What a run leaves behind: a table on the terminal, JSON, Markdown."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import tables
from benchmarks.binding import BindResult
from benchmarks.cases import CacheShape, Case
from benchmarks.confirm import ConfirmResult
from benchmarks.figures import COMPARISONS, CaseResult, Ratio
from benchmarks.machine import Machine

_FAMILIES = (
    ("memcpy", "memcpy"),
    ("shm", "kvferry shm"),
    ("process_vm_readv", "bare process_vm_readv"),
    ("process_vm_readv, blocks", "the same by blocks"),
    ("vm", "kvferry vm"),
    ("nixl shm", "NIXL shm"),
    ("socket", "bare socket"),
    ("tcp", "kvferry tcp"),
    ("nixl tcp", "NIXL TCP"),
    ("tls", "bare TLS"),
    ("tcp encrypted", "kvferry tcp encrypted"),
    ("nixl (placed) shm", "kvferry nixl (placed), shm"),
    ("nixl (staged) shm", "kvferry nixl (staged), shm"),
    ("nixl (placed) tcp", "kvferry nixl (placed), TCP"),
    ("nixl (staged) tcp", "kvferry nixl (staged), TCP"),
)
_COMPARED = {
    ("shm", "memcpy"): "shm / memcpy",
    ("shm", "nixl shm"): "shm / NIXL",
    ("vm", "process_vm_readv"): "vm / process_vm_readv",
    ("vm", "process_vm_readv, blocks"): "vm / the same by blocks",
    ("vm", "nixl shm"): "vm / NIXL",
    ("tcp", "socket"): "tcp / socket",
    ("tcp", "nixl tcp"): "tcp / NIXL",
    ("tcp encrypted", "tls"): "encrypted / TLS",
    ("nixl (placed) shm", "nixl shm"): "nixl (placed) / NIXL, shm",
    ("nixl (placed) tcp", "nixl tcp"): "nixl (placed) / NIXL, TCP",
}


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    rounds: int
    machine: Machine
    shape: CacheShape
    """Of the transports' cache."""
    nixl_skipped: str | None
    """Why NIXL did not take part."""
    load_after: float
    """Load average at the end; the run itself makes about 1 to 2 of it."""
    quick: bool
    """Whether this was only a test of the benchmark."""
    stores: tuple[float, float] | None = None
    """What :func:`kvferry.layouts.copier.measure_stores` found; ``None`` in older results."""
    transports: tuple[CaseResult, ...] = ()
    bind: tuple[BindResult, ...] = ()
    confirm: tuple[ConfirmResult, ...] = ()


def show(results: Results, console: Console) -> None:
    """Prints tables, and what was missed."""
    if results.transports:
        table = Table(title=_transport_title(results))
        for header in _transport_header():
            table.add_column(header, justify="left" if header == "case" else "right")
        for case in results.transports:
            colours = ["white", *_colours(case)]
            cells = _transport_cells(results.shape, case)
            plain = len(cells) - len(COMPARISONS)
            table.add_row(
                *cells[:plain],
                *(
                    f"[{colour}]{cell}[/]"
                    for cell, colour in zip(cells[plain:], colours[1:], strict=True)
                ),
            )
        console.print(table)
    for line in _control_lines(results):
        console.print(line, highlight=False, markup=False)
    for line in (*_caveats(results), *missed(results)):
        console.print(f"[yellow]![/] {line}", highlight=False)


def write(results: Results, folder: Path) -> None:
    """Writes ``transport.json`` and ``RESULTS.md`` into ``folder``."""
    tables.write(folder, "transport", results, markdown(results), "RESULTS")


def missed(results: Results) -> list[str]:
    """A sentence for each goal that was missed: by how much, and where the time went."""
    if results.quick:
        return []
    sentences = [
        _missed_ratio(results, case, ratio)
        for case in results.transports
        for ratio in case.ratios
        if not ratio.met
    ]
    sentences += [
        f"bind of {bind.tokens:,} tokens: {_ms(bind.median_seconds)} ms, the goal is "
        f"{_ms(bind.goal_seconds)} ms; it makes {bind.runs} runs."
        for bind in results.bind
        if bind.goal_seconds is not None and bind.median_seconds > bind.goal_seconds
    ]
    return sentences


def markdown(results: Results) -> str:
    """The page for people."""
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    made = (
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores, "
        f"{machine.memory_gib} GiB, Linux {machine.kernel}, Python {machine.python}, {versions}. "
        f"Load average {machine.load_before} before, {results.load_after} after."
    )
    lines = ["# Benchmark results", "", made, ""]
    lines += [f"**{caveat}**\n" for caveat in _caveats(results)]
    if results.transports:
        lines += [*_transport_markdown(results), ""]
    if results.bind or results.confirm:
        lines += ["## Bind and confirm", "", *[f"- {line}" for line in _control_lines(results)], ""]
    lines += ["## Goals", ""]
    lines += [f"- {sentence}" for sentence in missed(results)] or [_all_met(results)]
    return "\n".join(lines).rstrip() + "\n"


def _all_met(results: Results) -> str:
    if results.quick:
        return "Not judged: this was a quick run."
    return "All that were measured are met."


def _transport_markdown(results: Results) -> Iterator[str]:
    header = _transport_header()
    yield "## Transports"
    yield ""
    yield f"{_transport_title(results)}. GB/s are medians. A ratio is the median over the rounds "
    yield "of each round's ratio, then the lowest and the highest, and the goal; bold ones miss it."
    yield ""
    yield "| " + " | ".join(header) + " |"
    yield "| --- |" + " ---: |" * (len(header) - 1)
    for case in results.transports:
        cells = _transport_cells(results.shape, case)
        plain = len(cells) - len(COMPARISONS)
        judged = [
            f"**{cell}**" if colour == "red" else cell
            for cell, colour in zip(cells[plain:], _colours(case), strict=True)
        ]
        yield "| " + " | ".join([*cells[:plain], *judged]) + " |"
    yield ""
    yield "![transports](transport.png)"
    yield ""
    yield from _method(results)


def _method(results: Results) -> Iterator[str]:
    shape = results.shape
    yield "How it was measured:"
    yield ""
    yield (
        f"- {shape.layers} layers, {shape.kv_heads} KV heads, head size {shape.head_size}, "
        f"bfloat16, blocks of {shape.block_size}, {shape.tokens:,} tokens: "
        f"{_mb(shape)}. All sources serve the same shared memory; all "
        "readers read into private memory, from one process into another."
    )
    yield (
        "- Before the rounds every contender moved every case once, and every cell was compared. "
        "Processes of contenders whose turn it is not are suspended, since NIXL's poll when idle."
    )
    yield (
        "- Ours is timed from the block tables to the data in place, `bind` included. NIXL's "
        "descriptors are merged and its request is made before the clock starts, and nothing of it "
        "polls where that would take a core from the copy. Where the layouts differ its figure is "
        "the READ and then `index_select`, permute and `index_copy_` in torch with as many threads."
    )
    yield (
        "- `memcpy` is one copy of as many bytes from the mapped shared memory: `memmove` in as "
        "many threads or torch's `copy_`, whichever is faster in that case."
    )
    if results.stores is not None:
        plain, around = results.stores
        yield (
            f"- Half a MiB that is not in the cache takes one thread {plain * 1e6:.0f} µs with "
            f"plain stores and {around * 1e6:.0f} µs with stores around the cache: by this each "
            "process chooses at start how copies of 4 MiB and more store."
        )
    yield (
        "- `bare process_vm_readv` reads as many bytes from the private memory that `vm` reads, in "
        "as many threads: one span for each, or pieces of 8 MiB that they take as they come, "
        "whichever is faster. Shuffled blocks cannot be read so. `The same by blocks` reads each "
        "of them whole to where it belongs, from spans that were listed before the clock starts, "
        "256 to a call: what is between the two is the kernel's cost of a span, not ours."
    )
    yield (
        "- `bare socket` is a loop of `sendall` from that memory and `recv_into` one piece of "
        "memory over loopback; connections, and threads on either side, as many as the case has. "
        "`bare TLS` is the same through Python's `ssl`."
    )
    yield (
        "- `nixl (placed)` and `nixl (staged)` are our transport `nixl` over the same paths: "
        "straight into the cache where the layouts are equal, or in chunks into staging memory, "
        "from where they are put in place, with any change of layout."
    )
    chosen = {
        f"{case.case}: {best.contender}"
        for case in results.transports
        for family in ("memcpy", "nixl shm", "nixl tcp")
        if case.case.threads > 1 and (best := case.best(family)) and best.contender != family
    }
    yield (
        "- With two threads on both sides, kvferry has two movers in the reader (over `tcp` two "
        "threads on either side), torch two threads, and NIXL runs as it is and with "
        "`num_threads=2`; the faster counts. What won where it is not the first choice: "
        + ("; ".join(sorted(chosen)) or "nothing")
        + "."
    )


def _transport_title(results: Results) -> str:
    return f"{_mb(results.shape)} per transfer, {results.rounds} rounds, GB/s"


def _transport_header() -> list[str]:
    return [
        "case",
        *(title for _, title in _FAMILIES),
        *(_COMPARED[pair] for pair in COMPARISONS),
    ]


def _transport_cells(shape: CacheShape, result: CaseResult) -> list[str]:
    cells = [str(result.case)]
    for family, _ in _FAMILIES:
        best = result.best(family)
        cells.append(f"{shape.transfer_bytes / best.seconds / 1e9:.1f}" if best else "–")
    for ours, theirs in COMPARISONS:
        ratio = result.ratio(ours, theirs)
        cells.append(ratio_text(ratio) if ratio else "–")
    return cells


def ratio_text(ratio: Ratio) -> str:
    """Median, lowest and highest, goal."""
    return f"{ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f}) ≥ {ratio.goal:g}"


def _colours(result: CaseResult) -> list[str]:
    ratios = [result.ratio(*pair) for pair in COMPARISONS]
    return ["white" if not ratio else "green" if ratio.met else "red" for ratio in ratios]


def _control_lines(results: Results) -> list[str]:
    lines = [
        f"bind, 80 layers, 8 heads, TP 8 → TP 3, block 16 → 24, {bind.tokens:,} tokens: median "
        f"{_ms(bind.median_seconds)} ms, p99 {_ms(bind.p99_seconds)} ms"
        + (f" (goal {_ms(bind.goal_seconds)} ms)" if bind.goal_seconds else "")
        + f"; {bind.runs} runs × {bind.tiles} tiles; planned once per peer in "
        f"{_ms(bind.plan_seconds)} ms"
        for bind in results.bind
    ]
    lines += [
        f"confirm, {confirm.leases} leases in flight, {confirm.case}: median "
        f"{confirm.median_seconds * 1e6:.0f} µs, p99 {confirm.p99_seconds * 1e6:.0f} µs "
        f"({confirm.confirms:,} round trips between two processes)"
        for confirm in results.confirm
    ]
    return lines


def _caveats(results: Results) -> list[str]:
    caveats = []
    if results.quick:
        caveats.append("A quick run: its figures say nothing.")
    if results.nixl_skipped is not None:
        caveats.append(f"NIXL did not take part: {results.nixl_skipped}.")
    if results.machine.load_before > 0.5 * results.machine.cores:
        caveats.append(
            f"Other work was running (load average {results.machine.load_before} before the "
            "benchmark began): the figures are noisy."
        )
    return caveats


def _missed_ratio(results: Results, result: CaseResult, ratio: Ratio) -> str:
    shape, cores = results.shape, results.machine.cores
    ours, theirs = result.best(ratio.ours), result.best(ratio.theirs)
    assert ours is not None
    assert theirs is not None
    busy = ours.cpu_seconds / (ours.seconds * min(cores, 2 * result.case.threads))
    held = (
        "all the cores it may use were busy"
        if busy > 0.85
        else f"the cores it may use were busy {busy:.0%} of the time, so it waited for one thread"
    )
    return (
        f"{_COMPARED[ratio.ours, ratio.theirs]}, {result.case}: {ratio.median:.2f} of "
        f"{ratio.goal:g}, short by {1 - ratio.median / ratio.goal:.0%}. Ours moved "
        f"{shape.transfer_bytes / ours.seconds / 1e9:.1f} GB/s, theirs "
        f"{shape.transfer_bytes / theirs.seconds / 1e9:.1f}. Of our {_ms(ours.seconds)} ms, "
        f"source and reader computed {_ms(sum(ours.source_cpu))} and {_ms(sum(ours.reader_cpu))} "
        f"ms, {ours.kernel_seconds / max(ours.cpu_seconds, 1e-9):.0%} of it in the kernel: {held}."
    )


def _mb(shape: CacheShape) -> str:
    return f"{shape.transfer_bytes / 1e6:.3g} MB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g}"


def family_gbps(shape: CacheShape, results: Sequence[CaseResult], family: str) -> list[float]:
    """GB/s of a family in each case; 0 where it did not take part."""
    rows = [result.best(family) for result in results]
    return [shape.transfer_bytes / row.seconds / 1e9 if row else 0.0 for row in rows]


def case_label(case: Case) -> str:
    """Two short lines for a picture."""
    return f"{case.layouts}\n{case.tables}"
