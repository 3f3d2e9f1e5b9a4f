"""SGLang servers on CPUs: lone ones, pairs, and SGLang's own mini load balancer before a pair."""

import contextlib
import dataclasses
import json
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.programs import Program
from benchmarks.remote import ROOT
from benchmarks.vllm_servers.models import Model, tiny_model
from benchmarks.vllm_servers.ports import free_port
from kvferry.control.client import fetch_status
from kvferry.control.messages import LeaseStatus

SGLANG = ROOT / os.environ.get("KVFERRY_TEST_SGLANG", ".venv-sglang")
"""The environment of SGLang; `make test-sglang` sets it up."""
PYTHON = SGLANG / "bin" / "python"
ABSENT = Path(__file__).parent / "absent"
HOST = "127.0.0.1"
CORES = os.cpu_count() or 1
BYTES_PER_TOKEN = 4 * 2 * 4 * 32 * 4
"""Bytes of K and V of a token of the tiny model: 4 layers, 4 KV heads of 32 float32."""
ON_CPUS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--sampling-backend=pytorch",
    "--grammar-backend=none",
    "--disable-cuda-graph",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
    "--dtype=float32",
    "--mem-fraction-static=0.3",
    "--max-total-tokens=8192",
    "--max-running-requests=16",
    "--context-length=4096",
)
"""What SGLang needs on a machine without GPUs, and a small cache."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A running server."""

    program: Program
    url: str
    control: int
    """Port of kvferry's control channel."""

    def loaded_bytes(self) -> int:
        """Number of bytes that the server has loaded from others."""
        report = fetch_status(HOST, self.control)
        return sum(peer.loaded_bytes for peer in report.peers)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = httpx.get(f"{self.url}/metrics", timeout=60).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    def leases(self) -> tuple[LeaseStatus, ...]:
        """The open leases."""
        return tuple(fetch_status(HOST, self.control).leases)

    def open_leases(self) -> int:
        return len(self.leases())


def launched(
    log: Path,
    *arguments: str,
    ranks: int = 1,
    stages: int = 1,
    model: Model | None = None,
    speaks_openai: bool = False,
    failures: float = 0.0,
    keys: Mapping[str, Any] | None = None,
) -> Server:
    """A server that was just started; its program is to be waited for.

    Args:
        log: file for its log.
        arguments: options of the server.
        ranks: number of TP ranks of each stage.
        stages: number of pipeline stages.
        model: its model; by default the tiny one.
        speaks_openai: whether it has OpenAI's API, for which it needs the tokenizer.
        failures: probability with which SGLang takes a poll of a rank for a failure.
        keys: further keys of kvferry.
    """
    port, control = free_port(), free_port()
    folder = (model or tiny_model()).folder
    command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(folder)]
    command += [*ON_CPUS, "--host", HOST, "--port", str(port), *arguments]
    command += ["--served-model-name=model"] if speaks_openai else ["--skip-tokenizer-init"]
    command += ["--tp-size", str(ranks), "--pp-size", str(stages)]
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "KVFERRY_SGLANG_CONFIG": json.dumps({"kv_port": control, **(keys or {})}),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ABSENT}{os.pathsep}{ROOT}",
        # Without it, SGLang starts one rank per NUMA node at most.
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(str(n % CORES) for n in range(ranks * stages)),
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        "SGLANG_TEST_DISAGG_FAILURE_PROB": str(failures),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    program = Program(command, f"http://{HOST}:{port}/health", log, environment)
    return Server(program, f"http://{HOST}:{port}", control)


@contextlib.contextmanager
def running(*servers: Server) -> Iterator[None]:
    """Waits until servers serve, and stops them at the end."""
    with contextlib.ExitStack() as stack:
        for each in servers:
            stack.enter_context(each.program)
        for each in servers:
            each.program.wait()
        yield


@dataclasses.dataclass(frozen=True)
class Pair:
    """A prefill server and a decode server."""

    prefill: Server
    decode: Server
    bootstrap: int
    """Port of the bootstrap server of the prefill server."""

    def body(self, prompt: Sequence[int], max_tokens: int = 16) -> dict[str, Any]:
        """What a router sends to both servers at once."""
        room = {"bootstrap_host": HOST, "bootstrap_port": self.bootstrap}
        return asked(prompt, max_tokens) | room | {"bootstrap_room": random.getrandbits(62)}


def pair_arguments(role: str, bootstrap: int, page_size: int) -> list[str]:
    """The options of a server of a pair."""
    found = ["--disaggregation-mode", role, "--disaggregation-transfer-backend", "kvferry"]
    found += ["--disaggregation-bootstrap-port", str(bootstrap), "--page-size", str(page_size)]
    if role == "prefill":
        return [*found, "--chunked-prefill-size", "256"]
    return [*found, "--disaggregation-decode-retraction-backup", "none", "--enable-metrics"]


@contextlib.contextmanager
def pair(
    logs: Path,
    prefill: int,
    decode: int,
    *more: str,
    ranks: tuple[int, int] = (1, 1),
    stages: tuple[int, int] = (1, 1),
    model: Model | None = None,
    both: Sequence[str] = (),
    failures: float = 0.0,
) -> Iterator[Pair]:
    """A pair with these page sizes, numbers of ranks and of stages, started together; ``more`` are
    options of the decode server, ``both`` those of both. For the rest see :func:`launched`.
    """
    bootstrap = free_port()
    servers = []
    shapes = zip(("prefill", "decode"), (prefill, decode), ranks, stages, strict=True)
    for role, pages, *shape in shapes:
        arguments = [*pair_arguments(role, bootstrap, pages), *both]
        arguments += more if role == "decode" else ()
        log = logs / f"{role}.log"
        servers.append(
            launched(
                log, *arguments, ranks=shape[0], stages=shape[1], model=model, failures=failures
            )
        )
    with running(*servers):
        yield Pair(servers[0], servers[1], bootstrap)


@contextlib.contextmanager
def mini_lb(log: Path, pair: Pair) -> Iterator[str]:
    """The URL of SGLang's mini load balancer before a pair."""
    port = free_port()
    command = [str(PYTHON), "-m", "sglang_router.launch_router", "--pd-disaggregation"]
    command += ["--mini-lb", "--host", HOST, "--port", str(port)]
    command += ["--prefill", pair.prefill.url, str(pair.bootstrap), "--decode", pair.decode.url]
    url = f"http://{HOST}:{port}"
    with Program(command, f"{url}/health", log) as program:
        program.wait()
        yield url


def asked(prompt: Sequence[int], max_tokens: int = 16) -> dict[str, Any]:
    """A request for greedy tokens."""
    sampling = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    return {"input_ids": list(prompt), "sampling_params": sampling}


def streamed(url: str, body: dict[str, Any]) -> list[int]:
    """The tokens of an answer that comes as a stream; each event has all tokens so far."""
    found: list[int] = []
    with httpx.stream("POST", f"{url}/generate", json=body | {"stream": True}, timeout=300) as told:
        told.raise_for_status()
        for line in told.iter_lines():
            data = line.removeprefix("data: ")
            if data not in ("", "[DONE]"):
                found = json.loads(data)["output_ids"]
    return found


def lead(url: str, prompt: Sequence[int]) -> float:
    """By how many nats the likeliest token after a prompt is likelier than the next one."""
    body = asked(prompt, 1) | {"return_logprob": True, "top_logprobs_num": 2}
    answer = httpx.post(f"{url}/generate", json=body, timeout=300)
    (first, second), *_ = answer.raise_for_status().json()["meta_info"]["output_top_logprobs"]
    gap: float = first[0] - second[0]
    return gap


def tokens(url: str, body: dict[str, Any]) -> list[int]:
    """The tokens of an answer."""
    answer = httpx.post(f"{url}/generate", json=body, timeout=300)
    answer.raise_for_status()
    found: list[int] = answer.json()["output_ids"]
    return found


def prompts(seed: object, number: int = 24) -> list[list[int]]:
    """Random prompts of 3 to 1,500 tokens, some of them at the borders of pages and chunks."""
    draw = random.Random(str(seed))
    lengths = [3, 16, 17, 24, 255, 256, 257, 1500]
    lengths += [draw.randrange(3, 1500) for _ in range(number - len(lengths))]
    return [[draw.randrange(8, tiny_model().vocab_size) for _ in range(each)] for each in lengths]
