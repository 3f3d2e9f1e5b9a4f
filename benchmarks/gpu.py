"""``python -m benchmarks.gpu``: all that needs a GPU, in one go: benchmarks first, then tests.

The benchmarks are cut for three minutes and the tests for four, which no GPU has shown yet.
Pairs of vLLM servers come last, and take some minutes; ``KVFERRY_TEST_VLLM`` names the environment
of a vLLM for GPUs. ``--only reads`` runs a part; the results of each are written as soon as it is
done, and ``--go-on`` leaves those parts out.

Without a GPU it says so, and runs the kernels' tests under Triton's interpreter: they show that the
kernels are right, and nothing about their speed. With ``--host`` it times the host's part of reads
and postprocessors, for which no GPU is needed.
"""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks import cuda_ipc, device_wires, host_part, postprocess
from benchmarks.cases import CacheShape
from benchmarks.postprocess import PostprocessCase
from benchmarks.remote import ROOT
from benchmarks.report import RESULTS, Out, Quick, Rounds, Run, start, table
from benchmarks.vllm_pair.__main__ import measure as measure_pairs
from benchmarks.vllm_pair.cases import ON_A_GPU

PARTS = {
    "postprocess": "postprocess_gpu.json",
    "reads": "cuda_ipc.json",
    "wires": "device_wires.json",
    "kernels": "",
    "tests": "",
    "vllm": "vllm_gpu.json",
}
"""Part → the file of its results."""
KERNEL_TESTS = ("tests/layouts", "-k", "triton")
"""They run on a GPU where there is one, and else under the interpreter."""
PAIR_ROUNDS = 3
"""Largest number of rounds of pairs of vLLM servers; a round takes about a minute."""
_TESTS = {"kernels": KERNEL_TESTS, "tests": ("-m", "gpu")}

_TOKENS_PER_REQUEST = 512


def gpu_cases(free_bytes: int, quick: bool) -> list[PostprocessCase]:
    """Llama-3-70B and DeepSeek-V3 shapes, as one rank holds them; those that fit in memory.

    DeepSeek-V3's latent has one head, which no layout can permute: there is nothing to do, and the
    three passes do it all the same. Its expanded form has 16 heads of 192 on each of 8 ranks.
    """
    models = {
        "Llama-3-70B, TP 1": (80, 8, 128, 2),
        "Llama-3-70B, TP 4": (80, 2, 128, 2),
        "DeepSeek-V3, expanded, TP 8": (61, 16, 192, 2),
        "DeepSeek-V3, latent": (61, 1, 576, 1),
    }
    cases = [
        PostprocessCase(
            model=model,
            shape=CacheShape(layers, heads, head_size, block_size, requests * _TOKENS_PER_REQUEST),
            ratio=ratio,
            to_layout=layout,
            requests=requests,
            parts=parts,
        )
        for model, (layers, heads, head_size, parts) in models.items()
        for block_size, ratio, layout in ((16, 1, "NHD"), (64, 1, "NHD"), (64, 4, "HND"))
        for requests in ((1,) if quick else (1, 8, 64))
    ]
    # The cache, and source and target of the plain copy.
    return [case for case in cases if 4 * case.nbytes < free_bytes]


def main(
    rounds: Rounds = 10,
    out: Out = RESULTS,
    quick: Quick = False,
    host: Annotated[bool, typer.Option(help="Only the host's part, on any CPU.")] = False,
    only: Annotated[list[str] | None, typer.Option(help=f"Of {', '.join(PARTS)}.")] = None,
    go_on: Annotated[bool, typer.Option(help="Only what has no results in the folder.")] = False,
) -> None:
    """Runs the GPU benchmarks, then the tests for GPUs; without a GPU only the interpreter."""
    import torch

    run = Run("benchmarks.gpu", out, rounds=2 if quick else rounds, quick=quick)
    if host:
        tables = host_part.measure, host_part.measure_wires, host_part.measure_postprocess
        for measured in tables:
            run.say("\n".join([*table(measured(run.rounds), left=2), ""]))
        run.say(host_part.NOT_COUNTED)
        return
    if not torch.cuda.is_available():
        run.say("no GPU here: the kernels run under Triton's interpreter, nothing is timed")
        raise typer.Exit(_run_tests(KERNEL_TESTS, interpret=True))
    parts = chosen_parts(only, out if go_on else None)
    failed = 0
    for part in parts:
        if part in _TESTS:
            failed = max(failed, _run_tests(_TESTS[part], interpret=False))
            continue
        torch.cuda.empty_cache()  # the processes of the part before need it no more
        if part == "postprocess":
            cases = gpu_cases(torch.cuda.mem_get_info()[0], quick)
            permuted = postprocess.measure(run, cases, "cuda")
            run.publish("postprocess_gpu", permuted, postprocess.page)
        elif part == "wires":
            wires = run.results(device_wires.WireResults, rows=_measure_wires(run.rounds))
            run.publish("device_wires", wires, device_wires.page)
        elif part == "vllm":
            pair = Run("benchmarks.gpu", out, rounds=min(run.rounds, PAIR_ROUNDS), quick=quick)
            measure_pairs(pair, ON_A_GPU)
        else:
            run.publish("cuda_ipc", _measure_ipc(run), cuda_ipc.page)
    raise typer.Exit(failed)


def chosen_parts(only: list[str] | None, out: Path | None) -> list[str]:
    """The parts that were asked for, but for those whose results are in a folder.

    Raises:
        BadParameter: there is no such part.
    """
    for name in only or ():
        if name not in PARTS:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(PARTS)}")
    return [
        part
        for part, result in PARTS.items()
        if (not only or part in only) and not (out and result and (out / result).exists())
    ]


def _measure_ipc(run: Run) -> cuda_ipc.IpcResults:
    import torch

    from kvferry.transports.cuda_ipc import CudaIpcTransport

    cases = cuda_ipc.gpu_cases(torch.cuda.mem_get_info()[0], run.quick)
    rows = cuda_ipc.measure(CudaIpcTransport, cases, run.rounds, run.say)
    return run.results(cuda_ipc.IpcResults, device_name=torch.cuda.get_device_name(), rows=rows)


def _measure_wires(rounds: int) -> tuple[device_wires.WireRow, ...]:
    import torch

    from kvferry.layouts.cuda_stream import CudaCopyStream

    case = cuda_ipc.gpu_cases(torch.cuda.mem_get_info()[0], True)[0]
    shape = dataclasses.replace(case.shape, tokens=8 * _TOKENS_PER_REQUEST)
    case = msgspec.structs.replace(case, shape=shape)
    return device_wires.measure(CudaCopyStream.open, case, rounds)


def _run_tests(selection: tuple[str, ...], *, interpret: bool) -> int:
    environment = {name: os.environ[name] for name in os.environ if name != "TRITON_INTERPRET"}
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    processes = str(min(14, max(1, (os.cpu_count() or 1) - 2)))
    # pytest-benchmark, which a GPU's image may have, warns beside xdist, and warnings are errors.
    options = "-q", "-n", processes, "-p", "no:benchmark"
    command = [sys.executable, "-m", "pytest", *options, *selection]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    start(main)
