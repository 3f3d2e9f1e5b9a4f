"""Measures, prints, and writes the results."""

import gzip
import os
import subprocess
import sysconfig
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Self

import msgspec
import typer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from rich.console import Console

from benchmarks.machine import command_of, describe_machine, load_average
from benchmarks.vllm_adapter.engines import Measured, Order
from benchmarks.vllm_adapter.report import BEFORE, OFF, ON, AdapterResults, joined, show, write
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
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
_WITHIN_S = 600.0


def main(
    steps: Annotated[int, typer.Option(min=1, help="Steps by each clock, of each case.")] = 50,
    runs: Annotated[int, typer.Option(min=1, help="Engines started, one pair after another.")] = 3,
    before: Annotated[
        Path | None, typer.Option(help="Another checkout, to be measured in turns with this one.")
    ] = None,
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
    sides = {OFF: (ROOT, False), ON: (ROOT, True)}
    if before is not None:
        sides = {BEFORE: (before, False), **sides}
    found: dict[str, list[Measured]] = {side: [] for side in sides}
    with _Collector() as collector:
        for run in range(1 if quick else runs):
            for side, (root, is_traced) in sides.items():
                console.print(f"run {run + 1}: {side}")
                found[side].append(
                    _measure(order, root.resolve(), collector if is_traced else None)
                )
    results = AdapterResults(
        command=command_of("benchmarks.vllm_adapter"),
        machine=machine,
        runs=1 if quick else runs,
        measured={side: joined(measured) for side, measured in found.items()},
        num_spans=collector.num_spans,
        load_after=load_average(),
        quick=quick,
        order=msgspec.structs.replace(order, model=Path(order.model).name),
    )
    show(results, console)
    write(results, out)
    console.print(f"written to {out}")


class _Collector:
    """Counts the spans that engines send."""

    def __init__(self) -> None:
        self.num_spans = 0
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers["Content-Encoding"] == "gzip":
                    body = gzip.decompress(body)
                request = ExportTraceServiceRequest.FromString(body)
                collector.num_spans += sum(
                    len(scope.spans)
                    for resource in request.resource_spans
                    for scope in resource.scope_spans
                )
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)

    @property
    def environment(self) -> dict[str, str]:
        """With which an engine sends its spans here."""
        port = self._server.server_port
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}",
            "OTEL_BSP_SCHEDULE_DELAY": "500",
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


def _measure(order: Order, root: Path, collector: _Collector | None) -> Measured:
    """Has it done by a process of vLLM's environment, with what is checked out in ``root``."""
    environment = {**os.environ, **_ENVIRONMENT, "PYTHONPATH": str(root)}
    if collector is not None:
        environment |= collector.environment
        order = msgspec.structs.replace(order, packages=sysconfig.get_path("purelib"))
    with tempfile.TemporaryDirectory(prefix="vllm-adapter-") as folder:
        source, target = Path(folder, "order.json"), Path(folder, "measured.json")
        source.write_bytes(msgspec.json.encode(order))
        subprocess.run(
            [PYTHON, "-m", "benchmarks.vllm_adapter.engines", source, target],
            cwd=root,
            env=environment,
            stdin=subprocess.DEVNULL,
            timeout=_WITHIN_S,
            check=True,
        )
        return msgspec.json.decode(target.read_bytes(), type=Measured)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
