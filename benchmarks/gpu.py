"""``python -m benchmarks.gpu``: all that needs a GPU, in one go: tests first, then benchmarks.

Without a GPU it says so, and runs the kernels' tests under Triton's interpreter: they show that the
kernels are right, and nothing about their speed.
"""

import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console

from benchmarks import cuda_ipc, postprocess
from benchmarks.machine import command_of, describe_machine
from benchmarks.postprocess import PostprocessCase

ROOT = Path(__file__).parents[1]
_GPU_TESTS = ("-m", "gpu")
_KERNEL_TESTS = ("tests/layouts", "-k", "triton")
"""They run on a GPU where there is one, and else under the interpreter."""

_TOKENS_PER_REQUEST = 512


def gpu_cases(free_bytes: int, quick: bool) -> list[PostprocessCase]:
    """Llama-3-70B and DeepSeek-V3 shapes, as one rank holds them; those that fit in memory.

    DeepSeek-V3's latent has one head, which no layout can permute: there is nothing to do, and the
    three passes do it all the same. Its expanded form has 16 heads of 192 on each of 8 ranks.
    """

    def shape(model: str, layers: int, heads: int, head_size: int, parts: int) -> PostprocessCase:
        return PostprocessCase(
            model=model,
            layers=layers,
            heads=heads,
            head_size=head_size,
            parts=parts,
            block_size=16,
            ratio=1,
            to_layout="NHD",
            tokens=0,
        )

    shapes = [
        shape("Llama-3-70B, TP 1", 80, 8, 128, 2),
        shape("Llama-3-70B, TP 4", 80, 2, 128, 2),
        shape("DeepSeek-V3, expanded, TP 8", 61, 16, 192, 2),
        shape("DeepSeek-V3, latent", 61, 1, 576, 1),
    ]
    cases = [
        msgspec.structs.replace(
            each,
            block_size=block_size,
            ratio=ratio,
            to_layout=layout,
            tokens=requests * _TOKENS_PER_REQUEST,
            requests=requests,
        )
        for each in shapes
        for block_size, ratio, layout in ((16, 1, "NHD"), (64, 1, "NHD"), (64, 4, "HND"))
        for requests in ((1,) if quick else (1, 8, 64))
    ]
    # The cache, and source and target of the plain copy.
    return [case for case in cases if 4 * case.nbytes < free_bytes]


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each case.")] = 20,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
    quick: Annotated[bool, typer.Option(help="One request, two rounds: a test of it all.")] = False,
) -> None:
    """Runs the tests marked gpu and the GPU benchmarks; without a GPU only Triton's interpreter."""
    import torch

    console = Console()
    if not torch.cuda.is_available():
        console.print("no GPU here: the kernels run under Triton's interpreter, nothing is timed")
        raise typer.Exit(_run_tests(_KERNEL_TESTS, interpret=True))
    failed = max(_run_tests(tests, interpret=False) for tests in (_GPU_TESTS, _KERNEL_TESTS))
    results = postprocess.measure(
        command_of("benchmarks.gpu"),
        describe_machine(),
        2 if quick else rounds,
        quick,
        console.print,
        cases=gpu_cases(torch.cuda.mem_get_info()[0], quick),
        device="cuda",
    )
    postprocess.show(results, console)
    postprocess.write(results, out, "postprocess_gpu")
    ipc = _measure_ipc(2 if quick else rounds, quick, console)
    cuda_ipc.show(ipc, console)
    cuda_ipc.write(ipc, out)
    console.print(f"written to {out}")
    raise typer.Exit(failed)


def _measure_ipc(rounds: int, quick: bool, console: Console) -> cuda_ipc.IpcResults:
    import torch

    from kvferry.transports.cuda_ipc import CudaIpcTransport

    torch.cuda.empty_cache()  # the two processes need it
    cases = cuda_ipc.gpu_cases(torch.cuda.mem_get_info()[0], quick)
    return cuda_ipc.IpcResults(
        command=command_of("benchmarks.gpu"),
        rounds=rounds,
        machine=describe_machine(),
        device_name=torch.cuda.get_device_name(),
        quick=quick,
        rows=cuda_ipc.measure(CudaIpcTransport, cases, rounds, console.print),
    )


def _run_tests(selection: tuple[str, ...], *, interpret: bool) -> int:
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "pytest", "-q", *selection]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
