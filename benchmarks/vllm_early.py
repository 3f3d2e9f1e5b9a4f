"""Loads that begin while the prompt is computed, between real vLLM servers, beside NixlConnector.

``python -m benchmarks.vllm_early`` starts servers on hosts made of network namespaces: one that
prefills for ours and one that decodes for each ``early_load``, and a pair with NixlConnector. They
take turns, prompt by prompt, over links of several speeds, with no router between: the benchmark
does what one would. Every answer is compared with that of a server of its own.
"""

import contextlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec
import typer
from rich.console import Console

from benchmarks import tables
from benchmarks.early.report import GOAL_SOONER, HALF
from benchmarks.faults.load import Endpoint
from benchmarks.faults.system import until
from benchmarks.machine import Machine, command_of, describe_machine, load_average
from benchmarks.vllm_servers.client import complete
from benchmarks.vllm_servers.connectors import Connector, KVFerry, Nixl, Role
from benchmarks.vllm_servers.models import Model, demo_model
from benchmarks.vllm_servers.pair import REMOTE_DECODE, running
from benchmarks.vllm_servers.server import ROOT, ServerOptions
from kvferry.control.tickets import Transfer
from kvferry.lifetimes import Closing
from kvferry.testing.hosts import Host, HostProcess, Network

PROMPTS = {256: 6, 1000: 4, 4000: 2}
"""Tokens of a prompt → requests of each contender in a round."""
LINKS: dict[str, float | None] = {"full": None, "200 MB/s": 200e6, "50 MB/s": 50e6}
"""Name → bytes per second."""
LONGEST = max(PROMPTS)
ANSWER_TOKENS = 4
CHUNK = 512
"""Tokens of a prompt that are computed in a step."""
BLOCK_SIZES = {"prefill": 32, "decode": 64}
"""Of ours; NixlConnector gets the prefill server's everywhere."""
WARM_UP = 2
_HTTP_PORT = 8000
_CONTROL_PORT = 14600
_KEY = "a key of the hosts of one benchmark, and of nobody else"
_START_S = 900.0
_ANSWER_S = 300.0


class Contender(NamedTuple):
    """A way from the prompt to the answer."""

    prefill: str
    """The server's name."""
    decode: str
    at_once: bool
    """Whether both servers get the request at once."""


CONTENDERS = {
    "nixl": Contender("nixl-prefill", "nixl-decode", at_once=False),
    "in turn": Contender("prefill", "decode-off", at_once=False),
    "off": Contender("prefill", "decode-off", at_once=True),
    "late": Contender("prefill", "decode-late", at_once=True),
    "now": Contender("prefill", "decode-now", at_once=True),
}

Prompt = tuple[int, ...]


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are seconds, at the client."""

    link: str
    bytes_per_s: float | None
    """Of the link; ``None`` for what the relay carries."""
    tokens: int
    """Of the prompt."""
    contender: str
    turn: int
    """Samples of one turn were taken one after the other, one of each contender."""
    prefill_s: float
    """Until the prefill server's answer."""
    first_token_s: float
    """Until the decode server's first token."""
    is_right: bool

    @property
    def after_prefill_s(self) -> float:
        """From the prefill server's answer to the decode server's first token."""
        return self.first_token_s - self.prefill_s


class VLLMEarlyResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one call measured."""

    command: str
    machine: Machine
    load_after: float
    """Load average at the end."""
    rounds: int
    samples: tuple[Sample, ...]


class Served(NamedTuple):
    """One request, as its client saw it. Seconds."""

    prefill_s: float
    first_token_s: float
    tokens: list[int]


class Servers(Closing):
    """vLLM's servers, each on a host of its own. A context manager."""

    def __init__(self, model: Model, folder: Path) -> None:
        """Starts them, and waits until all serve.

        Raises:
            HostError: this machine allows no hosts.
        """
        self._network = Network.open()
        self._clients = ThreadPoolExecutor(1)
        try:
            self._client = self._network.add_host("client")
            names = dict.fromkeys(
                name for one in CONTENDERS.values() for name in (one.prefill, one.decode)
            )
            self._hosts = {name: self._network.add_host(name) for name in names}
            self._processes = {name: self._start(name, model, folder) for name in names}
            for name in names:
                until(partial(self._is_up, name), _START_S, f"{name} serves")
        except BaseException:
            self.close()
            raise

    def _start(self, name: str, model: Model, folder: Path) -> HostProcess:
        options = server_options(name, self._hosts[name], model)
        own = folder / name
        own.mkdir()
        chosen = options.variables(own)
        # Each host has its own loopback interface, and no way out by which to find its address.
        mine = {"VLLM_HOST_IP": options.address, "GLOO_SOCKET_IFNAME": "lo", "TMPDIR": str(own)}
        with (own / "log").open("wb") as log:
            return self._hosts[name].run(
                options.command(_HTTP_PORT),
                env={**os.environ, **chosen, **mine},
                cwd=ROOT,
                stdout=log,
                stderr=log,
            )

    def _http(self, name: str) -> Endpoint:
        return Endpoint(self._client, self._hosts[name].ipv4, _HTTP_PORT)

    def _is_up(self, name: str) -> bool:
        status = self._processes[name].poll()
        if status is not None:
            raise RuntimeError(f"{name} has ended with {status}; see its log")
        try:
            return self._http(name).ask("GET", "/health", timeout_s=5.0)[0] == 200
        except OSError:
            return False

    def slow(self, bytes_per_s: float | None) -> None:
        """From now on so many bytes pass between the two servers of each contender."""
        for pair in {(one.prefill, one.decode) for one in CONTENDERS.values()}:
            self._network.slow(*(self._hosts[name] for name in pair), bytes_per_s=bytes_per_s)

    def serve(self, contender: str, prompt: Prompt) -> Served:
        """Has one prompt answered by idle servers.

        Raises:
            RequestFailedError, RuntimeError: a server refused it.
        """
        way = CONTENDERS[contender]
        began = time.perf_counter()
        if way.at_once:
            address = f"{self._hosts[way.prefill].ipv4}:{_CONTROL_PORT}"
            transfer = Transfer.begin(address, _KEY.encode()).text
            lent = {**REMOTE_DECODE, "transfer": transfer}
            prefill = self._clients.submit(self._prefill, way, prompt, lent, began)
            loaded: Mapping[str, Any] = {"do_remote_prefill": True, "transfer": transfer}
            first_s, tokens = self._decode(way, prompt, loaded, began)
            return Served(prefill.result(_ANSWER_S)[0], first_s, tokens)
        prefill_s, loaded = self._prefill(way, prompt, REMOTE_DECODE, began)
        return Served(prefill_s, *self._decode(way, prompt, loaded, began))

    def _prefill(
        self, way: Contender, prompt: Prompt, params: Mapping[str, Any], began: float
    ) -> tuple[float, Mapping[str, Any]]:
        body = {**_body(prompt, params), "max_tokens": 1}
        status, content = self._http(way.prefill).ask("POST", "/v1/completions", body, _ANSWER_S)
        took = time.perf_counter() - began
        if status != 200:
            raise RuntimeError(f"{way.prefill}: HTTP {status}: {content.decode()}")
        return took, msgspec.json.decode(content)["kv_transfer_params"]

    def _decode(
        self, way: Contender, prompt: Prompt, params: Mapping[str, Any], began: float
    ) -> tuple[float, list[int]]:
        first = 0.0
        tokens: list[int] = []
        for news in self._http(way.decode).stream(_body(prompt, params)):
            first = first or time.perf_counter() - began
            tokens += news
        return first, tokens

    def close(self) -> None:
        """Kills everything."""
        self._clients.shutdown(cancel_futures=True)
        self._network.close()


def server_options(name: str, host: Host, model: Model) -> ServerOptions:
    """How a server is started. None finds a prompt in its prefix cache: no two are alike."""
    stage = "prefill" if "prefill" in name else "decode"
    role: Role = "kv_producer" if stage == "prefill" else "kv_consumer"
    if name.startswith("nixl"):
        connector: Connector = Nixl(ucx_tls="tcp")
        changed: dict[str, Any] = {}
        environment = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host.ipv4,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(_CONTROL_PORT),
        }
        block_size = BLOCK_SIZES["prefill"]
    else:
        keys = {"host": host.ipv4, "cluster_key": _KEY, "transport": "tcp"}
        early = {} if stage == "prefill" else {"early_load": name.removeprefix("decode-")}
        connector = KVFerry(extra={**keys, **early})
        changed, environment = {"kv_port": _CONTROL_PORT}, {}
        block_size = BLOCK_SIZES[stage]
    return ServerOptions(
        name=name,
        model=model,
        address=host.ipv4,
        block_size=block_size,
        max_model_len=2 * LONGEST,
        transfer={**connector.config(role, name), **changed},
        environment={**connector.environment(), **environment},
        arguments=("--max-num-batched-tokens", str(CHUNK)),
    )


def _body(prompt: Prompt, params: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": ANSWER_TOKENS,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
        "kv_transfer_params": dict(params),
    }


class Measured(NamedTuple):
    """One request of a cell."""

    link: str
    bytes_per_s: float | None
    contender: str
    turn: int
    prompt: Prompt
    served: Served


class Run:
    """Measures round by round."""

    def __init__(
        self,
        servers: Servers,
        vocab_size: int,
        links: Sequence[str],
        lengths: Sequence[int],
        say: Callable[[str], object],
    ) -> None:
        self._servers = servers
        self._vocab_size = vocab_size
        self._links = links
        self._lengths = lengths
        self._say = say
        self._chance = random.Random(29)
        self._turns = 0
        self.measured: list[Measured] = []

    def round(self, number: int) -> None:
        """All contenders over all links. They take turns, in every turn another one first."""
        for name in self._links:
            if name != HALF:
                self._begin(number, name, LINKS[name])
                for length in self._lengths:
                    self._measure(name, LINKS[name], length)
        if HALF in self._links:
            rate = self._half_rate(max(self._lengths))
            self._begin(number, HALF, rate)
            self._measure(HALF, rate, max(self._lengths))

    def _begin(self, number: int, name: str, bytes_per_s: float | None) -> None:
        self._say(f"round {number + 1}: {name}")
        self._servers.slow(bytes_per_s)
        for contender in CONTENDERS:  # the paces of loads are learned from them
            for _ in range(WARM_UP):
                self._servers.serve(contender, self._draw(1000))

    def _measure(self, name: str, bytes_per_s: float | None, length: int) -> None:
        for _ in range(PROMPTS[length]):
            self._turns += 1
            first = self._turns % len(CONTENDERS)
            for contender in [*CONTENDERS][first:] + [*CONTENDERS][:first]:
                prompt = self._draw(length)
                served = self._servers.serve(contender, prompt)
                self.measured.append(
                    Measured(name, bytes_per_s, contender, self._turns, prompt, served)
                )

    def _half_rate(self, tokens: int) -> float:
        """Bytes per second at which the KV of a prompt takes half as long as its prefill."""
        took = [
            one.served.prefill_s
            for one in self.measured
            if one.contender == "in turn" and len(one.prompt) == tokens
        ]
        return 2 * tokens * TOKEN_BYTES / statistics.median(took)

    def _draw(self, tokens: int) -> Prompt:
        return tuple(self._chance.randrange(8, self._vocab_size) for _ in range(tokens))


TOKEN_BYTES = 30 * 3 * 64 * 2 * 4
"""SmolLM2-135M: 30 layers with 3 KV heads of size 64, K and V, in float32."""


def judge(measured: Sequence[Measured], model: Model, folder: Path) -> tuple[Sample, ...]:
    """What is kept of what was measured, once one server has answered all prompts alone."""
    options = ServerOptions(
        name="single",
        model=model,
        max_model_len=2 * LONGEST,
        arguments=("--max-num-batched-tokens", str(CHUNK)),
    )
    with running([options], folder) as (single,):
        return tuple(
            Sample(
                link=one.link,
                bytes_per_s=one.bytes_per_s,
                tokens=len(one.prompt),
                contender=one.contender,
                turn=one.turn,
                prefill_s=one.served.prefill_s,
                first_token_s=one.served.first_token_s,
                is_right=one.served.tokens
                == complete(single.url, one.prompt, ANSWER_TOKENS).tokens,
            )
            for one in measured
        )


class Cell:
    """All samples of one link and one length."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.link = samples[0].link
        self.tokens = samples[0].tokens
        self.of = {name: [one for one in samples if one.contender == name] for name in CONTENDERS}

    def median(self, contender: str, figure: Callable[[Sample], float]) -> float:
        """Of one figure."""
        return statistics.median(map(figure, self.of[contender]))

    def times(self, figure: Callable[[Sample], float], contender: str, base: str) -> float:
        """How many times less it is than of another contender: the median over the turns."""
        of = {one.turn: figure(one) for one in self.of[base]}
        return statistics.median(of[one.turn] / figure(one) for one in self.of[contender])


def _prefill_s(one: Sample) -> float:
    return one.prefill_s


def _after_s(one: Sample) -> float:
    return one.after_prefill_s


def _first_s(one: Sample) -> float:
    return one.first_token_s


def cells(samples: Sequence[Sample]) -> list[Cell]:
    """In the order in which they were measured."""
    keys = dict.fromkeys((one.link, one.tokens) for one in samples)
    return [Cell([one for one in samples if (one.link, one.tokens) == key]) for key in keys]


def rows(samples: Sequence[Sample]) -> Iterator[tuple[str, ...]]:
    """The table, its header first."""
    yield (
        "link",
        "prompt",
        "contender",
        "prefill ms",
        "after prefill ms",
        "times less than nixl",
        "than in turn",
        "first token ms",
        "times less than nixl",
        "wrong",
    )
    for cell in cells(samples):
        for name, found in cell.of.items():
            yield (
                cell.link,
                f"{cell.tokens:,}",
                name,
                f"{1e3 * cell.median(name, _prefill_s):,.0f}",
                f"{1e3 * cell.median(name, _after_s):,.0f}",
                f"{cell.times(_after_s, name, 'nixl'):.2f}",
                f"{cell.times(_after_s, name, 'in turn'):.2f}",
                f"{1e3 * cell.median(name, _first_s):,.0f}",
                f"{cell.times(_first_s, name, 'nixl'):.2f}",
                f"{sum(not one.is_right for one in found)} of {len(found)}",
            )


def goals(samples: Sequence[Sample]) -> Iterator[str]:
    """What can be judged."""
    for cell in cells(samples):
        if cell.link == HALF:
            for base in ("in turn", "off"):
                times = cell.times(_after_s, "late", base)
                met = "met" if times >= GOAL_SOONER else "**missed**"
                yield (
                    f"{met}: {HALF}, {cell.tokens:,} tokens: `late` takes {times:.1f} times less "
                    f"after prefill than `{base}` (goal: {GOAL_SOONER:g})"
                )


def markdown(results: VLLMEarlyResults) -> str:
    """The page for people."""
    machine = results.machine
    made = (
        f"Made by `{results.command}` on {machine.date}: {machine.cpu}, {machine.cores} cores. "
        f"Load average {machine.load_before} before, {results.load_after} after. Servers of vLLM "
        f"0.32.0 for CPUs, SmolLM2-135M in float32, each on a host made of a network namespace; "
        f"a relay in user space is the links between them; each request alone, no router. Prompts "
        f"are computed in chunks of {CHUNK} tokens, answers have {ANSWER_TOKENS}. Ours over tcp, "
        f"blocks of {BLOCK_SIZES['prefill']} and {BLOCK_SIZES['decode']} tokens; NixlConnector "
        f"over UCX's tcp, blocks of {BLOCK_SIZES['prefill']}. Contenders take turns, request by "
        f"request; medians, and medians of each turn's ratio. Rounds: {results.rounds}."
    )
    told = [
        (
            "`nixl`, `in turn`: the prefill server, then the decode server. The others: both at "
            "once, with that `early_load` of the decode server."
        ),
        (
            "`after prefill`: from the prefill server's answer to the decode server's first token, "
            "at the client. It is less than nothing where the decode server was sooner."
        ),
        (
            "All servers share the cores: what loads while a prompt is computed also slows its "
            "computation here, which it does not between machines."
        ),
        (
            f"Of the link `{HALF}` the rate is such that the KV of the prompt takes half as long "
            "as its prefill. Link `full`: as fast as the relay is."
        ),
    ]
    lines = [
        "# Loads that begin while vLLM computes the prompt",
        "",
        made,
        "",
        *tables.bullets(told),
        "",
        *tables.markdown(rows(results.samples), 3),
        "",
        *tables.bullets(goals(results.samples)),
    ]
    return "\n".join(lines) + "\n"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Times that each cell is measured.")] = 2,
    only: Annotated[
        list[str] | None,
        typer.Option(help="A link or a number of tokens; several times for more."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("benchmarks/results"),
) -> None:
    """Compares ways to begin a load between real vLLM servers, over links of several speeds."""
    console = Console()
    machine = describe_machine()
    wanted = only or []
    unknown = [one for one in wanted if one not in (*LINKS, HALF, *map(str, PROMPTS))]
    if unknown:
        raise typer.BadParameter(
            f"--only: {unknown[0]} is none of {', '.join((*LINKS, HALF, *map(str, PROMPTS)))}"
        )
    links = [name for name in (*LINKS, HALF) if name in wanted] or [*LINKS, HALF]
    lengths = [length for length in PROMPTS if str(length) in wanted] or [*PROMPTS]

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    model = demo_model()
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vllm-early-")))
        say("servers start")
        with Servers(model, folder) as servers:
            run = Run(servers, model.vocab_size, links, lengths, say)
            for number in range(rounds):
                run.round(number)
        load_after = load_average()
        say("one server answers all prompts alone")
        samples = judge(run.measured, model, folder)
    results = VLLMEarlyResults(
        command=command_of("benchmarks.vllm_early"),
        machine=machine,
        load_after=load_after,
        rounds=rounds,
        samples=samples,
    )
    page = markdown(results)
    say(page)
    tables.write(out, "vllm_early", results, page)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False, add_completion=False)
    app.command()(main)
    app()
