"""Pairs of a vLLM server and an SGLang server behind `kvferry router`."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.programs import Program
from benchmarks.vllm_servers.connectors import KVFerry, Role
from benchmarks.vllm_servers.front import router
from benchmarks.vllm_servers.models import Model, tiny_model
from benchmarks.vllm_servers.pair import CACHE_USED
from benchmarks.vllm_servers.ports import free_port
from benchmarks.vllm_servers.server import Server as VllmServer
from benchmarks.vllm_servers.server import ServerOptions
from kvferry.control.client import fetch_status
from kvferry.control.messages import StatusReport
from tests.sglang_servers.servers import HOST, Server, launched, pair_arguments, running

_IN_USE = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens")
"""Counts of SGLang that are 0 on an idle server."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How the two servers of a pair are started."""

    first: str
    """The server that computes the prompts: ``vllm`` or ``sglang``."""
    block_size: int
    """Tokens per block of vLLM."""
    page_size: int
    """Tokens per page of SGLang."""
    number: int = 24
    """Number of prompts of each test."""
    ranks: tuple[int, int] = (1, 1)
    """Numbers of TP ranks of vLLM and of SGLang."""
    model: Callable[[], Model] = tiny_model
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys of kvferry for both servers."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the decode server that differ."""

    @property
    def is_vllm_first(self) -> bool:
        return self.first == "vllm"

    @property
    def computed_here(self) -> int:
        """Number of tokens of each prompt that the decode server computes."""
        return 0 if self.is_vllm_first else 1


@dataclass(frozen=True)
class Unlike:
    """A running pair behind a router."""

    url: str
    shape: Shape
    vllm: VllmServer
    sglang: Server
    logs: Path

    def router(self, *arguments: str) -> contextlib.AbstractContextManager[str]:
        """The URL of another router before both servers."""
        engines = ("--engines", str(self.logs / "engines.toml"))
        return router(self.logs / "other-router.log", *engines, *arguments)

    @property
    def programs(self) -> tuple[Program, Program]:
        """The prefill server and the decode server."""
        programs = (self.vllm, self.sglang.program)
        return programs if self.shape.is_vllm_first else (programs[1], programs[0])

    @property
    def reports(self) -> tuple[StatusReport, StatusReport]:
        """What the prefill server and the decode server tell of themselves."""
        return self._report(0), self._report(1)

    def _report(self, side: int) -> StatusReport:
        transfer = self.vllm.options.transfer
        assert transfer is not None
        ports = transfer["kv_port"], self.sglang.control
        return fetch_status(HOST, ports[side if self.shape.is_vllm_first else 1 - side], 60.0)

    @property
    def loaded_bytes(self) -> int:
        """Number of bytes that the decode server has loaded."""
        return sum(peer.loaded_bytes for peer in self._report(1).peers)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is lent, loaded or computed, and nobody holds blocks."""
        source, target = self.reports
        engines = httpx.get(f"{self.url}/health", timeout=60).json()["engines"]
        return not (
            source.leases
            or target.transfers
            or any(engine["outstanding"] or engine["lent"] for engine in engines)
            or self.vllm.metrics()[CACHE_USED]
            or self._sglang_requests()
        )

    @property
    def decode_is_idle(self) -> bool:
        """The same of the decode server alone; the prefill server may be dead."""
        is_free = (
            not self._sglang_requests()
            if self.shape.is_vllm_first
            else not self.vllm.metrics()[CACHE_USED]
        )
        return is_free and not self._report(1).transfers

    def _sglang_requests(self) -> int:
        """0 if the SGLang server has no request in any queue, and no tokens of one."""
        loads = httpx.get(f"{self.sglang.url}/v1/loads", timeout=60).json()["loads"]
        counts = [load[name] for load in loads for name in _IN_USE]
        queues = [load["disaggregation"].items() for load in loads]
        return sum(counts) + sum(n for each in queues for name, n in each if name.endswith("_reqs"))


@contextlib.contextmanager
def unlike_pair(logs: Path, shape: Shape, *router_arguments: str) -> Iterator[Unlike]:
    """A pair whose servers are started together; the arguments are the router's."""
    sides = [dict(shape.extra), {**shape.extra, **shape.others}]
    of_vllm, of_sglang = sides if shape.is_vllm_first else reversed(sides)
    role: Role = "kv_producer" if shape.is_vllm_first else "kv_consumer"
    transfer = KVFerry(extra=of_vllm).config(role, "v0")
    options = ServerOptions(
        name="v0",
        model=shape.model(),
        block_size=shape.block_size,
        tp=shape.ranks[0],
        transfer=transfer,
        arguments=("--max-num-batched-tokens", "256"),
    )
    roles = ("prefill", "decode") if shape.is_vllm_first else ("decode", "prefill")
    sglang = launched(
        logs / "sglang.log",
        *pair_arguments(roles[1], free_port(), shape.page_size),
        ranks=shape.ranks[1],
        model=shape.model(),
        speaks_openai=True,
        keys=of_sglang,
    )
    with VllmServer(options, logs) as vllm, running(sglang):
        vllm.wait()
        listed = f'[[{roles[0]}]]\nurl = "{vllm.url}"\n'
        listed += f'control = "{HOST}:{transfer["kv_port"]}"\n'
        listed += f'[[{roles[1]}]]\nurl = "{sglang.url}"\n'
        (logs / "engines.toml").write_text(listed)
        arguments = ("--engines", str(logs / "engines.toml"), *router_arguments)
        with router(logs / "router.log", *arguments) as url:
            yield Unlike(url, shape, vllm, sglang, logs)
