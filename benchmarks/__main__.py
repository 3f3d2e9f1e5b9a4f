"""``python -m benchmarks``: measures, prints, and writes the results."""

import contextlib
import enum
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import managers, paged, planning, postprocess, prefixes
from benchmarks.binding import BindResult, measure_bind
from benchmarks.cases import CacheShape, WrongDataError, all_cases
from benchmarks.confirm import ConfirmResult, measure
from benchmarks.figures import CaseResult
from benchmarks.loads import measure as loads_measure
from benchmarks.loads import report as loads_report
from benchmarks.machine import Machine, command_of, describe_machine, load_average
from benchmarks.peers.process import PeerError
from benchmarks.plot import write_plot
from benchmarks.report import Results, show, write
from benchmarks.transports import TransportBenchmark, why_no_nixl
from kvferry.layouts.copier import measure_stores

_QUICK = CacheShape(layers=2, kv_heads=2, head_size=32, block_size=16, tokens=320)


class Part(enum.StrEnum):
    """What can be measured."""

    TRANSPORTS = "transports"
    BIND = "bind"
    CONFIRM = "confirm"
    MANAGERS = "managers"
    POSTPROCESS = "postprocess"
    PLANNING = "planning"
    PREFIXES = "prefixes"
    LOADS = "loads"
    PAGED = "paged"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each measures everybody once.")] = 10,
    only: Annotated[list[Part] | None, typer.Option(help="Measure this alone; repeatable.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
    quick: Annotated[bool, typer.Option(help="Tiny cache, two rounds: a test of it all.")] = False,
    nixl: Annotated[bool, typer.Option(help="Whether NIXL takes part.")] = True,
    base: Annotated[
        Path | None, typer.Option(help="Checkout of an older commit, to compare loads with.")
    ] = None,
) -> None:
    """Compares the transports with NIXL and memcpy, the cache manager with vLLM's, the
    postprocessor with the known three passes, and short loads with NIXL and an older commit; times
    planning, bind, the confirm and the router's choices.
    """
    console = Console()
    if not console.is_terminal:
        console.width = 180  # the table's; nothing else could say how wide a log file is
    parts = set(only or Part)
    machine = describe_machine()
    command = command_of("benchmarks")
    skipped = why_no_nixl() if nixl else "it was left out with --no-nixl"
    shape = _QUICK if quick else CacheShape()
    rounds = 2 if quick else rounds
    alone = _ALONE | {
        Part.LOADS: partial(_measure_loads, base=base, nixl=not skipped),
        Part.PAGED: partial(_measure_paged, skipped=skipped),
    }
    for part, run in alone.items():
        if part in parts:
            run(console, command, machine, rounds, quick, out)
    if parts <= alone.keys():
        return
    transports: list[CaseResult] = []
    bind: list[BindResult] = []
    confirm: list[ConfirmResult] = []
    # First what takes microseconds, on a machine that has not been warmed up by the rest.
    if Part.BIND in parts:
        bind = [measure_bind(tokens, 20 if quick else 200) for tokens in (4096, 32768)]
    if Part.CONFIRM in parts:
        confirm = measure(2 if quick else 100)
    if Part.TRANSPORTS in parts:
        nixl_threads = () if skipped else (0,) if quick else (0, 2)
        with _saying(console) as say:
            try:
                with TransportBenchmark(
                    shape, all_cases(), say=say, nixl_threads=nixl_threads
                ) as benchmark:
                    transports = benchmark.run(rounds)
            except WrongDataError as error:
                console.print(f"[red]wrong data[/]: {error}", highlight=False)
                raise typer.Exit(1) from error
    results = Results(
        command=command,
        rounds=rounds,
        machine=machine,
        shape=shape,
        nixl_skipped=skipped if transports else None,
        load_after=load_average(),
        quick=quick,
        stores=measure_stores() if transports else None,
        transports=tuple(transports),
        bind=tuple(bind),
        confirm=tuple(confirm),
    )
    show(results, console)
    write(results, out)
    if transports:
        write_plot(results, out / "transport.png")
    console.print(f"written to {out}")


def _measure_planning(
    console: Console, command: str, machine: Machine, _rounds: int, quick: bool, out: Path
) -> None:
    results = planning.measure(command, machine, quick=quick)
    planning.show(results, console)
    planning.write(results, out)
    console.print(f"written to {out}")


def _compare_managers(
    console: Console, command: str, machine: Machine, rounds: int, quick: bool, out: Path
) -> None:
    """The part that stands alone; without vLLM's environment it says so and leaves it out."""
    try:
        with _saying(console) as say:
            results = managers.measure(command, machine, rounds, quick, say)
    except PeerError as error:
        console.print(f"[yellow]![/] cache managers are left out: {error}", highlight=False)
        return
    managers.show(results, console)
    managers.write(results, out)
    console.print(f"written to {out}")


def _compare_postprocessors(
    console: Console, command: str, machine: Machine, rounds: int, quick: bool, out: Path
) -> None:
    with _saying(console) as say:
        cases = postprocess.cpu_cases(quick)
        results = postprocess.measure(command, machine, rounds, quick, say, cases=cases)
    postprocess.show(results, console)
    postprocess.write(results, out)


def _measure_prefixes(
    console: Console, command: str, machine: Machine, rounds: int, quick: bool, out: Path
) -> None:
    with _saying(console) as say:
        results = prefixes.measure(command, machine, rounds, quick, say)
    prefixes.show(results, console)
    prefixes.write(results, out)
    console.print(f"written to {out}")


def _measure_loads(
    console: Console,
    command: str,
    machine: Machine,
    rounds: int,
    quick: bool,
    out: Path,
    *,
    base: Path | None,
    nixl: bool,
) -> None:
    with _saying(console) as say:
        results = loads_measure.measure(command, machine, rounds, quick, say, base=base, nixl=nixl)
    loads_report.show(results, console)
    loads_report.write(results, out)
    console.print(f"written to {out}")


def _measure_paged(
    console: Console,
    command: str,
    machine: Machine,
    rounds: int,
    quick: bool,
    out: Path,
    *,
    skipped: str | None,
) -> None:
    try:
        with _saying(console) as say:
            results = paged.measure(command, machine, rounds, quick, say, skipped)
    except WrongDataError as error:
        console.print(f"[red]wrong data[/]: {error}", highlight=False)
        raise typer.Exit(1) from error
    paged.show(results, console)
    paged.write(results, out)
    console.print(f"written to {out}")


#: Parts with results of their own, in the order in which they run.
_ALONE = {
    Part.MANAGERS: _compare_managers,
    Part.POSTPROCESS: _compare_postprocessors,
    Part.PLANNING: _measure_planning,
    Part.PREFIXES: _measure_prefixes,
}


@contextlib.contextmanager
def _saying(console: Console) -> Iterator[Callable[[str], object]]:
    """Shows what is going on: one changing line on a terminal, elsewhere a line each."""
    if not console.is_terminal:
        said = ""

        def say(text: str) -> None:
            nonlocal said
            # Without the case, which a log need not tell twelve times a round.
            doing = text.partition(":")[0]
            if doing != said:
                said = doing
                console.print(doing, highlight=False, markup=False)

        yield say
        return
    with console.status("") as status:
        yield status.update


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
