"""Measures, prints, and writes the results."""

import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.machine import command_of, describe_machine, load_average
from benchmarks.vllm_pair.cases import CASES, GROUPS, QUICK_CASES, fat_model
from benchmarks.vllm_pair.report import PairResults, show, write
from benchmarks.vllm_pair.rounds import Prompts, Row, measure_group
from benchmarks.vllm_pair.shapes import LENGTHS, SHAPES, Verdict, judge_shapes
from benchmarks.vllm_servers.models import tiny_model


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each measures both once.")] = 10,
    group: Annotated[list[str] | None, typer.Option(help="'one host' or 'TCP'; both.")] = None,
    at_a_time: Annotated[
        list[int] | None, typer.Option(help="Requests under way at once: 1 or 8; both.")
    ] = None,
    speed: Annotated[bool, typer.Option(help="Whether times are measured.")] = True,
    shapes: Annotated[bool, typer.Option(help="Whether unequal servers are tried.")] = True,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
    quick: Annotated[bool, typer.Option(help="Short prompts, two rounds: a test of it.")] = False,
) -> None:
    """Compares KVFerryConnector with NixlConnector inside real vLLM servers on this CPU."""
    console = Console()
    if not console.is_terminal:
        console.width = 180  # the table's; nothing else could say how wide a log file is
    machine = describe_machine()
    rounds = 2 if quick else rounds
    rows: list[Row] = []
    verdicts: list[Verdict] = []

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    with tempfile.TemporaryDirectory(prefix="vllm-pair-") as folder:
        logs = Path(folder)
        if speed:
            model = fat_model()
            cases = [
                case
                for case in (QUICK_CASES if quick else CASES)
                if not at_a_time or case.concurrency in at_a_time
            ]
            prompts = Prompts(model, cases, logs)
            for name in group or GROUPS:
                rows += measure_group(name, GROUPS[name], model, prompts, rounds, logs, say)
        if shapes:
            verdicts = judge_shapes(GROUPS["one host"], tiny_model(), SHAPES, LENGTHS, logs, say)
    results = PairResults(
        command=command_of("benchmarks.vllm_pair"),
        machine=machine,
        rounds=rounds,
        load_after=load_average(),
        quick=quick,
        rows=tuple(rows),
        verdicts=tuple(verdicts),
    )
    show(results, console)
    write(results, out)
    console.print(f"written to {out}")


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
