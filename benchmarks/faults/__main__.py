"""Measures, prints, and writes the results, cell by cell."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.faults.matrix import Cell, faults_named, run
from benchmarks.faults.reference import ReferenceSystem
from benchmarks.faults.report import NAME, FaultResults, plot, read, show, write
from benchmarks.faults.system import System
from benchmarks.faults.vllm import VLLMSystem
from benchmarks.machine import command_of, describe_machine

SYSTEMS: Mapping[str, Callable[[Path], System]] = {
    "reference-tcp": lambda folder: ReferenceSystem(folder, "tcp"),
    "reference-nixl": lambda folder: ReferenceSystem(folder, "nixl"),
    "vllm-tcp": lambda folder: VLLMSystem(folder, "vLLM, kvferry tcp", "tcp"),
    "vllm-nixl": lambda folder: VLLMSystem(folder, "vLLM, kvferry nixl", "nixl"),
    "vllm-nixlconnector": lambda folder: VLLMSystem(folder, "vLLM, NixlConnector", None),
}


def main(
    system: Annotated[
        list[str] | None, typer.Option(help=f"One of {', '.join(SYSTEMS)}; repeat it.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A fault, or 'kill' for both.")] = None,
    resume: Annotated[bool, typer.Option(help="Leave out the cells that are known.")] = False,
    brief: Annotated[bool, typer.Option(help="One cell for each fault, at any step.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
    logs: Annotated[Path | None, typer.Option(help="Folder that keeps the logs.")] = None,
) -> None:
    """Hurts clusters under load in every way of a list, and counts what their clients lose."""
    console = Console()
    if not console.is_terminal:
        console.width = 180
    faults = faults_named(only or ())
    results = FaultResults(
        command=command_of("benchmarks.faults"),
        machine=describe_machine(),
        cells=read(out),
    )

    def store(cell: Cell) -> None:
        nonlocal results
        results = results.with_cell(cell)
        write(results, out)
        show([cell], console)
        for error in cell.counts.errors:
            console.print(error, highlight=False, markup=False, style="yellow")

    for name in system or SYSTEMS:
        with ExitStack() as stack:
            if logs is None:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="faults-")))
            else:
                folder = logs.absolute() / name
                folder.mkdir(parents=True)
            running = stack.enter_context(SYSTEMS[name](folder))
            running.open()
            known = {cell.key for cell in results.cells} if resume else set()
            at_every_step = not brief and name.startswith("reference")
            run(running, faults, known, store, at_every_step=at_every_step)
    plot(results, out / f"{NAME}.png")
    show(results.cells, console)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
