"""How the figures of short loads are shown and written."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from benchmarks import tables
from benchmarks.loads.measure import SLICE_S, LoadsResults, LoadsRow, Timing
from benchmarks.loads.shared import LOOK_S

GOAL_BEFORE = 1.5
"""How many times faster than before every row is meant to be."""
GOAL_NIXL, GOAL_NIXL_SHORTEST = 1.0, 2.0
"""How many times faster than NIXL's READ; the latter for 16 tokens over ``shm`` and ``vm``."""
_SHORTEST = 16
_ABOUT_PHASES = (
    f"Loads of {_SHORTEST} tokens, microseconds from the call of `start_load_kv`, medians. The "
    "transfer record of a load says when its bytes were known to be in place; what follows is the "
    "confirm and the way of the result to the main thread."
)


def goal_beside_nixl(row: LoadsRow) -> float:
    """How many times faster than NIXL's READ a row is meant to be."""
    if row.tokens == _SHORTEST and row.transport in ("shm", "vm"):
        return GOAL_NIXL_SHORTEST
    return GOAL_NIXL


def show(results: LoadsResults, console: Console) -> None:
    """Prints both tables, and what was missed."""
    tables.show(console, "One load, µs: median (p99)", _cells(results), missed(results), left=4)
    title = f"Where the time of {_SHORTEST} tokens goes, µs from the call, medians"
    tables.show(console, title, _phases(results), [], left=4)


def write(results: LoadsResults, folder: Path) -> None:
    """Writes ``loads.json`` and ``LOADS.md`` into ``folder``."""
    tables.write(folder, "loads", results, markdown(results))


def missed(results: LoadsResults) -> list[str]:
    """A sentence for each goal that was missed."""
    if results.quick:
        return []
    sentences = []
    for row in results.rows:
        name = f"{row.transport}, {row.cache}, {row.tokens} tokens, {_thread(row)}"
        compared = (
            ("the commit before", row.before, GOAL_BEFORE),
            ("NIXL's READ", row.nixl, goal_beside_nixl(row)),
        )
        for what, other, goal in compared:
            ratio = other and row.ratio(other)
            if ratio and ratio < goal:
                sentences.append(f"{name}: {ratio:.2f} times {what}, the goal is {goal:g}")
    return sentences


def markdown(results: LoadsResults) -> str:
    """The page for people."""
    machine = results.machine
    versions = machine.versions
    compared = "" if results.base is None else f" The commit before is {results.base}."
    return tables.page(
        "Short loads",
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores, "
        f"Linux {machine.kernel}, Python {machine.python}, NIXL {versions['nixl']}. "
        f"{results.rounds} rounds. Load average {machine.load_before} before, "
        f"{results.load_after} after.{compared}",
        _caveats(results),
        _cells(results),
        [
            "## Where the time goes",
            "",
            _ABOUT_PHASES,
            "",
            *tables.markdown(_phases(results), left=4),
            "",
            "## How it was measured",
            "",
            *tables.bullets(_method(results)),
        ],
        missed(results),
        quick=results.quick,
        left=4,
    )


def _caveats(results: LoadsResults) -> Iterator[str]:
    if results.quick:
        yield "A quick run: its figures mean nothing."
    if results.machine.load_before > 0.5 * results.machine.cores:
        yield (
            f"Other work was running (load average {results.machine.load_before} before the "
            "benchmark began): the figures are noisy."
        )
    if not any(row.nixl for row in results.rows):
        yield "NIXL did not take part."


def _cells(results: LoadsResults) -> Iterator[tuple[str, ...]]:
    """The table, its header first."""
    yield (
        *("transport", "cache", "tokens", "main thread", "kvferry", "before", "NIXL"),
        *("times before", "times NIXL"),
    )
    for row in results.rows:
        yield (
            *_names(row),
            *(_spread(each) for each in (row.timings["kvferry"], row.before, row.nixl)),
            _ratio(row, row.before, GOAL_BEFORE),
            _ratio(row, row.nixl, goal_beside_nixl(row)),
        )


def _phases(results: LoadsResults) -> Iterator[tuple[str, ...]]:
    """Where the time of the shortest loads goes, the header first."""
    yield (
        *("transport", "cache", "tokens", "main thread", "commit"),
        *("call returned", "bytes in place", "result"),
    )
    for row in results.rows:
        for name in ("kvferry", "before"):
            each = row.timings.get(name)
            if each is not None and row.tokens == _SHORTEST:
                times = (each.called, each.in_place, each.median)
                commit = "this" if name == "kvferry" else "before"
                yield (*_names(row), commit, *(_us(seconds) for seconds in times))


def _names(row: LoadsRow) -> tuple[str, str, str, str]:
    return row.transport, row.cache, f"{row.tokens:,}", _thread(row)


def _thread(row: LoadsRow) -> str:
    return "busy" if row.busy else "idle"


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f}"


def _spread(timing: Timing | None) -> str:
    return "–" if timing is None else f"{_us(timing.median)} ({_us(timing.p99)})"


def _ratio(row: LoadsRow, other: Timing | None, goal: float) -> str:
    return "–" if other is None else tables.ratio_cell(row.ratios(other), goal)


def _method(results: LoadsResults) -> Iterator[str]:
    yield (
        "A PullConnector pair with one rank each, NHD layout, float16, blocks of 16 tokens in "
        "shuffled tables. The engine that lends is a process of its own, which waits; both halves "
        "of the one that loads are in another. Caches are layers × heads × head size."
    )
    yield (
        "The clock runs from the call of `start_load_kv` until `get_transfer_results` reports the "
        "load; the lease is had and the metadata is made before. Every load has a ticket of its "
        "own, and every byte is compared afterwards with what the source holds."
    )
    yield (
        "The main thread asks right after the call, as vLLM does in a step without a forward "
        f"pass, and then after every pause. Idle, a pause is a sleep of {LOOK_S * 1e6:.0f} "
        f"microseconds. Busy, it is {SLICE_S * 1e3:.0f} ms of Python that makes strings, looks "
        "them up in a dict and keeps small tuples, as vLLM's step does between two of its calls. "
        "It never lets go of the interpreter lock by itself, and the interpreter's switch interval "
        "stays at its default of 5 ms. The work is a fixed number of rounds, so a slice takes "
        "longer where others take the lock or the core."
    )
    yield (
        "NIXL's READ: descriptors are made as NumPy rows, one per block of K or V of a layer, the "
        "READ is initialised and posted, and its state is asked for where the connector is asked. "
        "The agents are connected and the memory is registered before. Over TCP the source has a "
        "progress thread and the reader runs with one and without one; the faster counts. It "
        "knows no leases: nobody confirms that what was read still counts."
    )
    loads = sorted({row.timings["kvferry"].loads for row in results.rows}, reverse=True)
    yield (
        "All contenders of a transport and a cache take turns in every round, and who begins goes "
        f"round. Loads per cell: {', '.join(map(str, loads))}, fewer where they are long; the p99 "
        "of few loads is about their slowest. Ratios are medians over the rounds of each round's "
        "ratio of medians, then the lowest and the highest, and the goal."
    )
