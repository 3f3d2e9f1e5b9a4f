"""Conversations over real vLLM servers: what is computed, and when a turn's first token comes.

``python -m benchmarks.vllm_turns`` has the conversations of :mod:`benchmarks.turns` held with two
prefill and two decode servers, in turn: behind a router of ours without and with lending, and with
NixlConnector in its own bidirectional mode, where each prompt of a conversation goes to the same
two servers, with what the decode server told of its blocks after the turn before. Every answer is
compared with those of one server that forgets nothing.
"""

import contextlib
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.turns import (
    ANSWER_TOKENS,
    AT_A_TIME,
    Ask,
    Conversations,
    Script,
    TurnResults,
    answer_all,
    ask_router,
    draw_questions,
    hold,
    page,
    summary,
)
from benchmarks.vllm_servers.client import complete
from benchmarks.vllm_servers.connectors import KVFerry, Nixl, Role
from benchmarks.vllm_servers.front import engines_file, router
from benchmarks.vllm_servers.models import Model, demo_model
from benchmarks.vllm_servers.pair import REMOTE_DECODE, running
from benchmarks.vllm_servers.ports import free_ports
from benchmarks.vllm_servers.server import Server, ServerOptions

BLOCKS = {"p0": 32, "p1": 64, "d0": 64, "d1": 32}
"""Tokens per block; NixlConnector gets 32 everywhere."""
CACHE_BYTES = 1 << 30
"""Of each server: what all conversations need, twice."""
_PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
_SOURCES = {
    "cache": "local_cache_hit",
    "peer": "external_kv_transfer",
    "computed": "local_compute",
}
_FIRST_TOKENS_S = "vllm:time_to_first_token_seconds_sum"


def servers_of(contender: str, model: Model) -> list[ServerOptions]:
    """Two prefill servers, then two decode servers."""
    return [_SERVERS[contender](name, model) for name in BLOCKS]


def _plain(name: str, model: Model) -> ServerOptions:
    role: Role = "kv_producer" if name.startswith("p") else "kv_consumer"
    transfer = KVFerry(policy="recompute").config(role, name)
    return _options(name, model, BLOCKS[name], transfer=transfer)


def _lending(name: str, model: Model) -> ServerOptions:
    transfer = KVFerry(policy="recompute").config("kv_both", name)
    first = free_ports(2)
    return _options(name, model, BLOCKS[name], transfer=transfer, kv_events=(first, first + 1))


def _nixl(name: str, model: Model) -> ServerOptions:
    nixl = Nixl(extra={"bidirectional_kv_xfer": True})
    transfer = nixl.config("kv_both", name)
    block_size = min(BLOCKS.values())
    return _options(name, model, block_size, transfer=transfer, environment=nixl.environment())


_SERVERS = {"plain": _plain, "lending": _lending, "nixl": _nixl}


def _options(name: str, model: Model, block_size: int, **more: Any) -> ServerOptions:
    cache = ("--kv-cache-memory-bytes", str(CACHE_BYTES))
    return ServerOptions(name=name, model=model, block_size=block_size, arguments=cache, **more)


def prompt_tokens(servers: Sequence[Server]) -> dict[str, float]:
    """Of all servers: where the KV of prompts came from → tokens."""
    found = [server.metrics() for server in servers]
    return {
        name: sum(each.get(f'{_PROMPT_TOKENS}{{source="{source}"}}', 0.0) for each in found)
        for name, source in _SOURCES.items()
    }


def write_script(model: Model, logs: Path) -> Script:
    """Draws the questions, and has one server of its own answer them."""
    questions = draw_questions(model.vocab_size)
    with running([_options("alone", model, min(BLOCKS.values()))], logs) as servers:
        (server,) = servers
        before = prompt_tokens(servers)["computed"]
        answers = answer_all(
            questions, lambda prompt: complete(server.url, prompt, ANSWER_TOKENS).tokens
        )
        computed = prompt_tokens(servers)["computed"] - before
    return Script(questions, answers, round(computed))


def ask_in_turn(prefill: Sequence[Server], decode: Sequence[Server]) -> Ask:
    """Asks a prefill server, then a decode server, as a proxy for NixlConnector's mode would.

    A stream does not tell what the decode server says of its blocks. So the answer comes whole,
    and its first token's time is the server's own word. It has one request at a time.
    """
    told: dict[int, Mapping[str, Any]] = {}

    def ask(conversation: int, prompt: Sequence[int]) -> tuple[float, Sequence[int]]:
        p, d = (servers[conversation % AT_A_TIME] for servers in (prefill, decode))
        began = time.perf_counter()
        params = told.get(conversation, REMOTE_DECODE)
        first = complete(p.url, prompt, 1, kv_transfer_params=params)
        computed_s = time.perf_counter() - began
        before = d.metrics()[_FIRST_TOKENS_S]
        answer = complete(d.url, prompt, ANSWER_TOKENS, kv_transfer_params=first.kv_transfer_params)
        assert answer.kv_transfer_params is not None, "the server does not let its blocks be read"
        told[conversation] = answer.kv_transfer_params
        return computed_s + d.metrics()[_FIRST_TOKENS_S] - before, answer.tokens

    return ask


@contextlib.contextmanager
def asking(contender: str, servers: Sequence[Server], folder: Path) -> Iterator[Ask]:
    """How the clients of a contender ask."""
    prefill, decode = servers[:2], servers[2:]
    if contender == "nixl":
        yield ask_in_turn(prefill, decode)
        return
    file = folder / "engines.toml"
    file.write_text(engines_file(prefill, decode))
    tokenizer = str(servers[0].options.model.folder)
    arguments = ("--engines", str(file), "--tokenizer", tokenizer)
    with router(folder / "router.log", *arguments) as url:
        yield ask_router(url)


def main(rounds: report.Rounds = 1, out: report.Out = report.RESULTS) -> None:
    """Compares ways to hold whole conversations over real vLLM servers."""
    run = report.Run("benchmarks.vllm_turns", out, rounds=rounds)
    model = demo_model()
    runs: list[Conversations] = []
    with tempfile.TemporaryDirectory(prefix="vllm-turns-") as created:
        folder = Path(created)
        run.say("one server answers")
        script = write_script(model, folder)
        for number in range(rounds):
            for contender in _SERVERS:
                run.say(f"round {number + 1} of {rounds}: {contender}")
                with (
                    running(servers_of(contender, model), folder) as servers,
                    asking(contender, servers, folder) as ask,
                ):
                    runs.append(hold(contender, script, ask, partial(prompt_tokens, servers)))
                run.say(summary(runs[-1], script.computed))
    results = run.results(TurnResults, undivided_tokens=script.computed, runs=tuple(runs))
    about = (
        "Two prefill and two decode servers of vLLM 0.32.0 for CPUs, SmolLM2-135M in float32; "
        f"plain and lending with blocks of {', '.join(map(str, BLOCKS.values()))} tokens behind "
        f"`kvferry router`, nixl (bidirectional) with blocks of {min(BLOCKS.values())} and each "
        "conversation at the same two servers"
    )
    shown = partial(page, title="Conversations with vLLM", about=about)
    run.publish("vllm_turns", results, shown)


if __name__ == "__main__":
    report.start(main)
