"""Measures, prints, and writes the results."""

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks.machine import command_of, describe_machine, load_average
from benchmarks.vllm_adapter.engines import Measured, Order
from benchmarks.vllm_adapter.report import AdapterResults, show, write
from benchmarks.vllm_servers.server import PYTHON, ROOT
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig

_MODEL = TinyConfig(
    num_layers=16,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,  # the smallest that vLLM's CPU attention knows
    hidden_size=128,
    intermediate_size=256,
    vocab_size=1024,
)
_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_WITHIN_S = 600.0


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps by each clock, of each case.")] = 150,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
    quick: Annotated[bool, typer.Option(help="Few requests and steps: a test of it.")] = False,
) -> None:
    """Times what KVFerryConnector adds to the steps of real vLLM engines on this CPU."""
    if not PYTHON.exists():
        raise typer.BadParameter(f"{PYTHON} is not there; `make test-vllm` sets it up")
    console = Console()
    if not console.is_terminal:
        console.width = 180  # the table's; nothing else could say how wide a log file is
    machine = describe_machine()
    order = Order(
        model=str(prepare_model("tiny", tiny=_MODEL)),
        vocab_size=_MODEL.vocab_size,
        layers=_MODEL.num_layers,
        requests=4 if quick else 64,
        prompt_tokens=256,
        steps=3 if quick else steps,
    )
    results = AdapterResults(
        command=command_of("benchmarks.vllm_adapter"),
        machine=machine,
        measured=_measure(order),
        load_after=load_average(),
        quick=quick,
        order=msgspec.structs.replace(order, model=Path(order.model).name),
    )
    show(results, console)
    write(results, out)
    console.print(f"written to {out}")


def _measure(order: Order) -> Measured:
    """Has it done by a process of vLLM's environment."""
    with tempfile.TemporaryDirectory(prefix="vllm-adapter-") as folder:
        source, target = Path(folder, "order.json"), Path(folder, "measured.json")
        source.write_bytes(msgspec.json.encode(order))
        subprocess.run(
            [PYTHON, "-m", "benchmarks.vllm_adapter.engines", source, target],
            cwd=ROOT,
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            timeout=_WITHIN_S,
            check=True,
        )
        return msgspec.json.decode(target.read_bytes(), type=Measured)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
