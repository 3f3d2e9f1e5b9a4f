"""What a router itself costs: CPU per request, requests per second, and what it adds to an answer.

``python -m benchmarks.router_cost`` puts `kvferry router` before a prefill and a decode server that
answer at once, and beside it what else people put there. The contender has one core for itself;
servers and clients share another one. Each request goes to the prefill server, then to the decode
server; ``direct`` does that without a router, and ``echo`` is uvicorn with an application that
reads the request and answers: what a server in Python costs that does nothing.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
import numpy as np

from benchmarks import report
from benchmarks.programs import Program
from benchmarks.remote import ROOT
from benchmarks.vllm_servers.ports import free_ports
from kvferry.engine.weights import prepare_model

ROUTERS = ROOT / ".venv-routers" / "bin" / "python"
"""The environment of ``vllm-router``; `make test-vllm` sets it up."""
ANSWER_TOKENS = 16
SECONDS, QUICK_SECONDS = 4.0, 1.0
"""Length of a sample, and of one that is only a test; a quarter of it warms up."""
CLIENTS = (1, 32)
PROMPTS = {"short": 100, "long": 4000}
"""Name → words of a prompt, each of about four characters."""

Address: TypeAlias = tuple[str, int]


class Case(msgspec.Struct, frozen=True):
    """What the clients ask."""

    prompt: str
    """Its name in :data:`PROMPTS`."""
    streams: bool
    clients: int
    """Requests at a time."""

    def __str__(self) -> str:
        how = "streamed" if self.streams else "whole"
        return f"{self.prompt}, {how}, {self.clients} at a time"

    @property
    def body(self) -> bytes:
        """One request."""
        fields: dict[str, Any] = {
            "model": "model",
            "prompt": "the " * PROMPTS[self.prompt],
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
        }
        if self.streams:
            fields["stream"] = True
        return msgspec.json.encode(fields)


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One contender for some seconds."""

    case: Case
    contender: str
    requests: int
    seconds: float
    cpu_s: float
    """Of the contender's processes."""
    latencies_s: tuple[float, float]
    """Median and 99th percentile of a request."""


class RouterCostResults(report.Results, frozen=True, kw_only=True):
    """All that one call measured."""

    absent: dict[str, str]
    """Contenders that were not there, and why."""
    samples: tuple[Sample, ...]


# ---- servers that answer at once -----------------------------------------------------------------


def _events(tokens: int) -> bytes:
    """A streamed answer, each token an event."""
    lines = []
    for index in range(tokens):
        reason = "length" if index == tokens - 1 else None
        choice = {"index": 0, "text": "a", "token_ids": [70], "finish_reason": reason}
        event = {"id": "cmpl-1", "object": "text_completion", "model": "model", "choices": [choice]}
        lines.append(b"data: %b\n\n" % msgspec.json.encode(event))
    return b"".join(lines) + b"data: [DONE]\n\n"


def _whole(tokens: int, **more: Any) -> bytes:
    choice = {"index": 0, "text": "a" * tokens, "token_ids": [70] * tokens}
    return msgspec.json.encode(
        {
            "id": "cmpl-1",
            "object": "text_completion",
            "created": 1,
            "model": "model",
            "choices": [{**choice, "finish_reason": "length"}],
            "usage": {"prompt_tokens": 100, "completion_tokens": tokens, "total_tokens": 116},
            **more,
        }
    )


_LENT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p0",
    "remote_request_id": "r",
    "remote_block_ids": [list(range(32))],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 100,
    "tp_size": 1,
}
_MODELS = msgspec.json.encode(
    {"object": "list", "data": [{"id": "model", "object": "model", "max_model_len": 32768}]}
)


def _answered(content: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(content)) + content


_PREFILLED = _answered(_whole(1, kv_transfer_params=_LENT))
_DECODED = _answered(_whole(ANSWER_TOKENS))
_STREAMED = _answered(_events(ANSWER_TOKENS), b"text/event-stream")
_OTHERS = {b"/v1/models": _answered(_MODELS)}


class _Connection(asyncio.Protocol):
    """Cuts what comes into messages. Only what these servers and routers say is understood."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        while (end := self._message_end()) is not None:
            message, self._data = self._data[:end], self._data[end:]
            self.heard(message)

    def _message_end(self) -> int | None:
        head, found, _ = self._data.partition(b"\r\n\r\n")
        if not found:
            return None
        begin, head = len(head) + 4, head.lower()
        if b"transfer-encoding: chunked" in head:
            last = self._data.find(b"0\r\n\r\n", begin - 2)
            while last > begin and self._data[last - 2 : last] != b"\r\n":
                last = self._data.find(b"0\r\n\r\n", last + 1)
            return last + 5 if last >= 0 else None
        _, _, length = head.partition(b"content-length: ")
        end = begin + int(length.partition(b"\r\n")[0] or 0)
        return end if len(self._data) >= end else None

    def heard(self, message: bytes) -> None:
        """A message is whole."""
        raise NotImplementedError


class _Server(_Connection):
    """Answers requests as soon as they are read."""

    def __init__(self, *, prefills: bool) -> None:
        super().__init__()
        self._prefills = prefills

    def heard(self, message: bytes) -> None:
        """See :class:`_Connection`."""
        url = message.split(b" ", 2)[1]
        if url != b"/v1/completions":
            answer = _OTHERS.get(url, _answered(b"{}"))
        elif self._prefills:
            answer = _PREFILLED
        else:
            streams = b'"stream":true' in message.replace(b" ", b"")
            answer = _STREAMED if streams else _DECODED
        self._transport.write(answer)


# ---- clients -------------------------------------------------------------------------------------


class _Client(_Connection):
    """One connection, with one request at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._done: asyncio.Future[None] | None = None

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(error or ConnectionResetError("closed"))

    def heard(self, message: bytes) -> None:
        """See :class:`_Connection`."""
        assert self._done is not None
        if message.startswith(b"HTTP/1.1 200"):
            self._done.set_result(None)
        else:
            self._done.set_exception(RuntimeError(message.decode(errors="replace")))

    async def ask(self, request: bytes) -> None:
        """Sends one, and waits for the whole answer."""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        self._transport.close()


def _request(address: Address, body: bytes) -> bytes:
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {address[0]}:{address[1]}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


async def _ask_for(
    seconds: float, addresses: Sequence[Address], case: Case
) -> tuple[float, list[float]]:
    """Clients that ask one after the other each of the addresses; how long they asked, and how long
    each of their rounds took.
    """
    loop = asyncio.get_running_loop()
    requests = [_request(address, case.body) for address in addresses]
    took: list[float] = []
    began = time.perf_counter()

    async def one_client() -> None:
        clients = [(await loop.create_connection(_Client, *each))[1] for each in addresses]
        try:
            while time.perf_counter() - began < seconds:
                asked = time.perf_counter()
                for client, request in zip(clients, requests, strict=True):
                    await client.ask(request)
                took.append(time.perf_counter() - asked)
        finally:
            for client in clients:
                client.close()

    await asyncio.gather(*(one_client() for _ in range(case.clients)))
    return time.perf_counter() - began, took


# ---- contenders ----------------------------------------------------------------------------------

_ECHO = """
import asyncio, sys, uvicorn

async def app(scope, receive, send):
    more = True
    while more:
        more = (await receive()).get("more_body", False)
    headers = [(b"content-type", b"application/json"), (b"content-length", b"2")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b"{}"})

uvicorn.run(app, port=int(sys.argv[1]), lifespan="off", access_log=False, log_level="error")
"""


def _kvferry(*more: str) -> list[str]:
    command = [sys.executable, "-m", "kvferry.cli", "router", "--prefill", "{prefill}"]
    return [*command, "--decode", "{decode}", "--port", "{port}", *more]


_NGINX = """
daemon off; master_process off; pid {folder}/pid; error_log stderr;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  keepalive_requests 1000000000;
  upstream decode {{ server {host}; keepalive 64; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port};
    client_max_body_size 16m; client_body_buffer_size 16m;
    location / {{
      proxy_pass http://decode; proxy_http_version 1.1; proxy_set_header Connection "";
    }}
  }}
}}
"""


def contenders() -> tuple[dict[str, list[str]], dict[str, str]]:
    """Name → command, with places for its port and the servers' URLs; and who is not there."""
    tokenizer = str(prepare_model("smollm2"))
    found = {
        "echo": [sys.executable, "-c", _ECHO, "{port}"],
        "kvferry": _kvferry(),
        "kvferry, 2 workers": _kvferry("--workers", "2"),
        "kvferry, tokens": _kvferry("--tokenizer", tokenizer),
    }
    absent = {}
    if ROUTERS.exists():
        found["vllm-router"] = [
            *(str(ROUTERS), "-m", "vllm_router.launch_router", "--port", "{port}"),
            *("--prometheus-port", "{next_port}", "--vllm-pd-disaggregation", "--prefill"),
            *("{prefill}", "--decode", "{decode}", "--policy", "round_robin"),
        ]
    else:
        absent["vllm-router"] = "`make test-vllm` sets it up"
    if shutil.which("nginx"):
        found["nginx"] = ["nginx", "-c", "{nginx}"]
    else:
        absent["nginx"] = "it is not installed here"
    return found, absent


@dataclass(frozen=True)
class _Contender:
    """A program that serves, and where."""

    address: Address
    program: Program


class Bench:
    """Servers in a thread, and contenders one at a time."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self._seconds = seconds
        cores = sorted(os.sched_getaffinity(0))
        self._cores = cores[:-1] or cores
        os.sched_setaffinity(0, {cores[-1]})
        self._folder = folder
        port = free_ports(2)
        self._prefill, self._decode = ("127.0.0.1", port), ("127.0.0.1", port + 1)
        ready = threading.Event()
        threading.Thread(target=lambda: asyncio.run(self._serve(ready)), daemon=True).start()
        ready.wait()

    async def _serve(self, ready: threading.Event) -> None:
        loop = asyncio.get_running_loop()
        for address, prefills in ((self._prefill, True), (self._decode, False)):
            await loop.create_server(partial(_Server, prefills=prefills), *address)
        ready.set()
        await asyncio.Event().wait()

    def direct(self, case: Case) -> Sample:
        """The two servers without a router."""
        return self._sample("direct", case, [self._prefill, self._decode], None)

    @contextlib.contextmanager
    def running(self, name: str, command: Sequence[str]) -> Iterator[_Contender]:
        """A contender that serves."""
        port = free_ports(2)
        config = self._folder / "nginx.conf"
        config.write_text(
            _NGINX.format(folder=self._folder, port=port, host=f"127.0.0.1:{self._decode[1]}")
        )
        places: Mapping[str, object] = {
            "prefill": f"http://127.0.0.1:{self._prefill[1]}",
            "decode": f"http://127.0.0.1:{self._decode[1]}",
            "port": port,
            "next_port": port + 1,
            "nginx": config,
        }
        filled = [part.format_map(places) if part.startswith("{") else part for part in command]
        log = self._folder / f"{name}.log"
        with Program(filled, f"http://127.0.0.1:{port}/v1/models", log) as program:
            program.wait()
            few = 2 if "--workers" in command else 1
            for process in program.processes():
                for thread in process.threads():
                    os.sched_setaffinity(thread.id, self._cores[:few])
            yield _Contender(("127.0.0.1", port), program)

    def measure(self, name: str, contender: _Contender, case: Case) -> Sample:
        """One sample of a contender."""
        return self._sample(name, case, [contender.address], contender)

    def _sample(
        self, name: str, case: Case, addresses: Sequence[Address], contender: _Contender | None
    ) -> Sample:
        asyncio.run(_ask_for(self._seconds / 4, addresses, case))
        before = contender.program.cpu_seconds() if contender else 0.0
        seconds, took = asyncio.run(_ask_for(self._seconds, addresses, case))
        after = contender.program.cpu_seconds() if contender else 0.0
        return Sample(
            case=case,
            contender=name,
            requests=len(took),
            seconds=seconds,
            cpu_s=after - before,
            latencies_s=(statistics.median(took), float(np.percentile(took, 99))),
        )


# ---- the page ------------------------------------------------------------------------------------


def rows(samples: Sequence[Sample]) -> Iterator[tuple[str, ...]]:
    """The table, its header first: medians over the rounds."""
    yield (
        "case",
        "contender",
        "requests/s",
        "CPU µs per request",
        "of the echo's",
        "p50 ms",
        "p99 ms",
        "adds to p50 ms",
        "adds to p99 ms",
    )
    for case in dict.fromkeys(one.case for one in samples):
        of = [one for one in samples if one.case == case]
        direct = [_latency_ms([one for one in of if one.contender == "direct"], i) for i in (0, 1)]
        for name in dict.fromkeys(one.contender for one in of):
            mine = [one for one in of if one.contender == name]
            cpu_us = statistics.median(map(_cpu_us, mine))
            beside = zip(mine, (one for one in of if one.contender == "echo"), strict=True)
            of_echo = statistics.median(_cpu_us(one) / _cpu_us(echo) for one, echo in beside)
            latencies = [_latency_ms(mine, index) for index in (0, 1)]
            # An echo asks nobody, and nginx only one of the servers.
            adds = [latency - at for latency, at in zip(latencies, direct, strict=True)]
            is_whole = name not in ("direct", "echo", "nginx")
            yield (
                str(case),
                name,
                f"{statistics.median(one.requests / one.seconds for one in mine):,.0f}",
                f"{cpu_us:,.0f}" if cpu_us else "",
                f"{of_echo:.1f}" if cpu_us else "",
                *(f"{latency:.2f}" for latency in latencies),
                *((f"{add:.2f}" if is_whole else "") for add in adds),
            )


def _cpu_us(one: Sample) -> float:
    return 1e6 * one.cpu_s / one.requests


def _latency_ms(samples: Sequence[Sample], index: int) -> float:
    return 1e3 * statistics.median(one.latencies_s[index] for one in samples)


def page(results: RouterCostResults) -> str:
    """The page for people."""
    told = [
        "`direct`: clients ask the prefill server, then the decode server; there is no router.",
        "`echo`: uvicorn with an application that reads the request and answers `{}`.",
        (
            "`of the echo's`: CPU per request beside the echo's of the same round. Other work on "
            "the machine makes all of them cost more."
        ),
        "`kvferry`: what it does with servers such as vLLM's: the body is not taken apart.",
        (
            "`kvferry, 2 workers`: with `--workers 2`. They have a core each where the machine has "
            "three or more, else one for both, which shows what the second worker costs."
        ),
        "`kvferry, tokens`: with `--tokenizer`, which sends tokens and answers with text.",
        "`vllm-router` 0.1.17 in its mode for pairs; `nginx` passes on to the decode server only.",
        (
            "What a router adds is against `direct`. With 32 at a time all wait for whoever is "
            "slowest: requests per second and CPU per request tell more than the latency."
        ),
        *(f"`{name}` is not in the table: {why}." for name, why in results.absent.items()),
    ]
    return report.page(
        "What a router costs",
        results,
        f"A prefill and a decode server that answer at once, {ANSWER_TOKENS} tokens; the contender "
        f"has a core for itself, servers and clients share another one. {SECONDS:g} s per sample, "
        "medians over the rounds.",
        [*report.bullets(told), "", *report.table(rows(results.samples), 2)],
    )


def main(
    rounds: report.Rounds = 3, out: report.Out = report.RESULTS, quick: report.Quick = False
) -> None:
    """Measures what routers cost before servers that answer at once."""
    run = report.Run("benchmarks.router_cost", out, rounds=1 if quick else rounds, quick=quick)
    commands, absent = contenders()
    cases = [Case(*each) for each in itertools.product(PROMPTS, (False, True), CLIENTS)]
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory(prefix="router-cost-") as created:
        bench = Bench(Path(created), QUICK_SECONDS if quick else SECONDS)
        for number in range(run.rounds):
            run.say(f"round {number + 1} of {run.rounds}: direct")
            samples += [bench.direct(case) for case in cases]
            for name, command in commands.items():
                run.say(f"round {number + 1} of {run.rounds}: {name}")
                with bench.running(name, command) as contender:
                    samples += [bench.measure(name, contender, case) for case in cases]
    results = run.results(RouterCostResults, absent=absent, samples=tuple(samples))
    run.publish("router_cost", results, page)


if __name__ == "__main__":
    report.start(main)
