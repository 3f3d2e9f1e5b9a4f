"""Measures, prints, and writes the results, cell by cell."""

import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.faults.matrix import Cell, faults_named, run_cells
from benchmarks.faults.reference import ReferenceSystem
from benchmarks.faults.report import NAME, FaultResults, draw, page, read, rows
from benchmarks.faults.system import System
from benchmarks.faults.vllm import VLLMSystem
from benchmarks.report import RESULTS, Out, Run, start, table

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
    out: Out = RESULTS,
    logs: Annotated[Path | None, typer.Option(help="Folder that keeps the logs.")] = None,
) -> None:
    """Hurts clusters under load in every way of a list, and counts what their clients lose."""
    run = Run("benchmarks.faults", out)
    faults = faults_named(only or ())
    results = run.results(FaultResults, cells=read(out))

    def store(cell: Cell) -> None:
        nonlocal results
        results = results.with_cell(cell)
        run.write(NAME, results, page)
        for line in (*table(rows([cell]), left=3)[2:], *cell.counts.errors):
            run.say(line)

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
            run_cells(running, faults, known, store, at_every_step=at_every_step)
    run.publish(NAME, results, page, draw)


if __name__ == "__main__":
    start(main)
