"""Measures, prints, and writes the results."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.report import RESULTS, Out, Quick, Rounds, Run, start
from benchmarks.vllm_pair.cases import ON_A_GPU, ON_CPUS, QUICK_CASES, Place, fat_model
from benchmarks.vllm_pair.report import PairResults, draw, page
from benchmarks.vllm_pair.rounds import Prompts, Row, measure_group


def main(
    rounds: Rounds = 10,
    group: Annotated[
        list[str] | None, typer.Option(help="'one host' or 'TCP', or one with --gpu; all.")
    ] = None,
    at_a_time: Annotated[
        list[int] | None, typer.Option(help="Requests under way at once: 1 or 8; both.")
    ] = None,
    gpu: Annotated[bool, typer.Option(help="With caches on a GPU.")] = False,
    out: Out = RESULTS,
    quick: Quick = False,
) -> None:
    """Compares KVFerryConnector with NixlConnector inside real vLLM servers."""
    run = Run("benchmarks.vllm_pair", out, rounds=2 if quick else rounds, quick=quick)
    measure(run, ON_A_GPU if gpu else ON_CPUS, group, at_a_time)


def measure(
    run: Run,
    place: Place,
    groups: Sequence[str] | None = None,
    at_a_time: Sequence[int] | None = None,
) -> None:
    """Measures all groups and cases of a place, or those that are named, and publishes them."""
    cases = [
        case
        for case in (QUICK_CASES if run.quick else place.cases)
        if not at_a_time or case.concurrency in at_a_time
    ]
    rows: list[Row] = []
    model = fat_model()
    with tempfile.TemporaryDirectory(prefix="vllm-pair-") as folder:
        logs = Path(folder)
        prompts = Prompts(model, place, cases, logs)
        for name in groups or place.groups:
            rows += measure_group(name, place, model, prompts, run.rounds, logs, run.say)
    results = run.results(PairResults, rows=tuple(rows), place=place.name, files=place.results)
    run.publish(place.results, results, page, draw)


if __name__ == "__main__":
    start(main)
