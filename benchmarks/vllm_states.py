"""Pairs of vLLM servers whose model has recurrent layers: whose answers are right.

``python -m benchmarks.vllm_states`` has kvferry and NixlConnector serve the same prompts, one at a
time, over the same pairs of shapes, and compares the tokens with a single server's.
"""

import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks import tables
from benchmarks.machine import Machine, command_of, describe_machine, load_average
from benchmarks.vllm_pair.shapes import Verdict, judge_shapes, shapes_table
from benchmarks.vllm_servers.connectors import KVFerry, Nixl
from benchmarks.vllm_servers.models import delta_net_model, mamba2_model
from benchmarks.vllm_servers.pair import Shape

LENGTHS = (5, 100, 639, 641, 642, 1300)
"""Tokens of the prompts; vLLM gives such models blocks of 640 or so."""
TIE_NATS = 0.5
"""By how much less likely another token may be to a single server: TP and decode round in another
order than prefill. Of these models the tokens in doubt were found to differ by up to 0.2."""
CONNECTORS = (KVFerry(), Nixl("nixl, both with conv DS", conv="DS"))
MODELS = {"gdn": delta_net_model, "mamba2": mamba2_model}
NO_PREFIXES = ("--no-enable-prefix-caching",)
"""vLLM's mode ``none`` for states; with prefix caching it is ``align``."""
SHAPES = {
    "equal": (Shape(), Shape()),
    "tp 1 to 2": (Shape(), Shape(tp=2)),
    "tp 2 to 1": (Shape(tp=2), Shape()),
    "tp 2 to 2, conv DS to SD": (Shape(tp=2, conv="DS"), Shape(tp=2)),
    "conv SD to DS, none to align": (Shape(arguments=NO_PREFIXES), Shape(conv="DS")),
    "tp 1 to 2, align to none": (Shape(), Shape(tp=2, arguments=NO_PREFIXES)),
}


class StateResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run found."""

    command: str
    machine: Machine
    load_after: float
    """Load average at the end."""
    verdicts: dict[str, tuple[Verdict, ...]]
    """Model → what came of its pairs."""


def main(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
) -> None:
    """Counts right answers of KVFerryConnector and NixlConnector for recurrent models."""
    console = Console()
    machine = describe_machine()

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    verdicts = {}
    with tempfile.TemporaryDirectory(prefix="vllm-states-") as logs:
        for name, model in MODELS.items():
            say(name)
            verdicts[name] = judge_shapes(
                CONNECTORS, model(), SHAPES, LENGTHS, Path(logs), say, tie_nats=TIE_NATS
            )
    results = StateResults(
        command=command_of("benchmarks.vllm_states"),
        machine=machine,
        load_after=load_average(),
        verdicts={name: tuple(each) for name, each in verdicts.items()},
    )
    say(markdown(results))
    tables.write(out, "vllm_states", results, markdown(results))


def markdown(results: StateResults) -> str:
    """The page for people."""
    machine = results.machine
    made = (
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores, "
        f"{machine.memory_gib} GiB, vLLM 0.32.0 for CPUs. Load average {machine.load_before} "
        f"before, {results.load_after} after."
    )
    told = (
        f"{len(LENGTHS)} prompts of {min(LENGTHS)} to {max(LENGTHS):,} tokens, one at a time. "
        "*Right* are greedy tokens of a single server; a *tie* is an answer whose first other "
        f"token that server finds less likely by {TIE_NATS:g} nats at most, since TP and decode "
        "round in another order. That every cell arrives is `tests/vllm_servers/test_states.py`'s "
        "to say."
    )
    lines = ["# Recurrent models beside NIXL inside vLLM", "", made, "", told]
    for name, verdicts in results.verdicts.items():
        lines += ["", f"## {name}", "", *shapes_table(verdicts)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
