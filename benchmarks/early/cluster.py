"""One prefill engine, three decode engines and their routers, each on a host of its own."""

import functools
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from benchmarks.faults.load import Endpoint
from benchmarks.faults.system import SystemFailedError, until
from kvferry.config import EngineConfig
from kvferry.engine.weights_folder import TinyConfig
from kvferry.lifetimes import Closing
from kvferry.serving.messages import EngineAddress, Role, RouterSettings
from kvferry.serving.metrics import Records, RequestSummary
from kvferry.testing.host_engines import HTTP_PORT, HostEngine
from kvferry.testing.hosts import Host, HostProcess, Network

MODEL = TinyConfig(
    num_layers=4,
    num_heads=4,
    num_kv_heads=4,
    head_size=32,
    hidden_size=256,
    intermediate_size=512,
    vocab_size=1024,
    max_position_embeddings=1 << 15,
)
"""4 KiB of KV for each token. On one core a prompt of 4,000 tokens takes about twice as long as its
KV takes at 50 MB/s."""
DTYPE = "float32"
CHUNK = 256
"""Tokens of a prompt that are computed in a step."""
ANSWER_TOKENS = 4
BLOCK_SIZES = {"prefill": 16, "decode": 24}
_LAYOUTS = {"prefill": "NHD", "decode": "HND"}
_KEY = "a key of the hosts of one benchmark, and of nobody else"
_WAIT_S = 300.0
"""Seconds for whatever is waited for."""

MODES: Mapping[str, tuple[str, bool]] = {
    "in turn": ("off", False),
    "off": ("off", True),
    "late": ("late", True),
    "now": ("now", True),
}
"""Name → ``early_load`` of the decode engine, and whether both engines get a request at once."""


@dataclass(frozen=True, slots=True)
class Served:
    """One request, as the client and both engines saw it. Times are seconds."""

    tokens: Sequence[int]
    """Of the answer."""
    first_token_s: float
    """From the request to the client's first token."""
    second_token_s: float
    prefill: RequestSummary
    decode: RequestSummary
    nbytes: int
    """That the decode engine loaded."""


def engine_config(name: str, host: Host, early_load: str, longest: int) -> EngineConfig:
    """An engine whose blocks are just enough for one prompt, so that none finds an earlier one."""
    role = "prefill" if name == "prefill" else "decode"
    blocks = -(-(longest + ANSWER_TOKENS) // BLOCK_SIZES[role])
    extra = {
        "transport": "tcp",
        "host": host.ipv4,
        "cluster_key": _KEY,
        "early_load": early_load,
        "max_leased_blocks": blocks,
    }
    return EngineConfig(
        name=name,
        block_size=BLOCK_SIZES[role],
        layout=_LAYOUTS[role],
        num_blocks=blocks + 1,
        max_model_len=longest + ANSWER_TOKENS,
        max_num_batched_tokens=CHUNK,
        kv_transfer_config={
            "kv_connector": "PullConnector",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "kv_port": 0,
            "kv_connector_extra_config": extra,
        },
    )


class EarlyCluster(Closing):
    """A decode engine for each way to load, and a router for each mode. A context manager."""

    def __init__(self, model: Path, longest: int, logs: Path) -> None:
        """Starts everything, and waits until it serves.

        Args:
            model: a converted folder.
            longest: tokens of the longest prompt.
            logs: folder for what the processes write.

        Raises:
            HostError: this machine allows no hosts.
        """
        self._network = Network.open()
        try:
            self._client = self._network.add_host("client")
            ways = dict.fromkeys(way for way, _ in MODES.values())
            names = {"prefill": "off", **{f"decode-{way}": way for way in ways}}
            self._engines = {
                name: self._engine(name, way, model, longest, logs) for name, way in names.items()
            }
            self.prefill = self._engines["prefill"]
            for engine in self._engines.values():
                engine.start()
            for engine in self._engines.values():
                engine.wait_until_ready()
            self._routers = [self._router(mode, model, logs) for mode in MODES]
            for mode in MODES:
                serves = functools.partial(self._serves, mode)
                until(serves, _WAIT_S, f"the router of {mode!r} serves")
        except BaseException:
            self.close()
            raise

    def _engine(self, name: str, way: str, model: Path, longest: int, logs: Path) -> HostEngine:
        host = self._network.add_host(name)
        return HostEngine(
            host,
            self._client,
            engine_config(name, host, way, longest),
            model=model,
            log=logs / f"{name}.log",
            dtype=DTYPE,
            timeout_s=_WAIT_S,
        )

    def _router(self, mode: str, model: Path, logs: Path) -> HostProcess:
        way, at_once = MODES[mode]
        host = self._network.add_host(_router_name(mode))
        named: tuple[tuple[Role, HostEngine], ...] = (
            ("prefill", self.prefill),
            ("decode", self._engines[f"decode-{way}"]),
        )
        settings = RouterSettings(
            host=host.ipv4,
            port=HTTP_PORT,
            at_once="always" if at_once else "never",
            engines=tuple(
                EngineAddress.of(role, f"http://{engine.host.ipv4}:{HTTP_PORT}", role)
                for role, engine in named
            ),
            model_folder=str(model),
            model_name="early",
            cluster_key=_KEY.encode(),
        )
        with (logs / f"{host.name}.log").open("wb") as log:
            process = host.run(
                [sys.executable, "-m", "kvferry.cluster.main", "router", "1", host.name],
                stdin=subprocess.PIPE,  # it ends when this ends
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ,
            )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()
        return process

    def _endpoint(self, mode: str) -> Endpoint:
        (host,) = (host for host in self._network.hosts if host.name == _router_name(mode))
        return Endpoint(self._client, host.ipv4, HTTP_PORT)

    def _serves(self, mode: str) -> bool:
        try:
            _, content = self._endpoint(mode).ask("GET", "/health", timeout_s=_WAIT_S)
        except OSError:
            return False
        return bool(msgspec.json.decode(content)["status"] == "ok")

    def slow(self, bytes_per_s: float | None) -> None:
        """From now on so many bytes pass between the prefill engine and each decode engine."""
        for engine in self._engines.values():
            if engine is not self.prefill:
                self._network.slow(self.prefill.host, engine.host, bytes_per_s=bytes_per_s)

    def decode(self, mode: str) -> HostEngine:
        """The decode engine of a mode."""
        return self._engines[f"decode-{MODES[mode][0]}"]

    def serve(self, mode: str, prompt: Sequence[int]) -> Served:
        """Has one prompt answered by idle engines.

        Raises:
            SystemFailedError: another way was gone than that of the mode.
        """
        engines = (self.prefill, self.decode(mode))
        until(
            lambda: not any(engine.used_blocks() for engine in engines),
            _WAIT_S,
            "all blocks are free",
        )
        before = len(self.decode(mode).records().requests)
        body = {
            "prompt": list(prompt),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        tokens: list[int] = []
        came: list[float] = []
        began = time.perf_counter()
        for news in self._endpoint(mode).stream(body):
            came += [time.perf_counter() - began] * len(news)
            tokens += news
        return self._served(mode, before, tokens, came)

    def _served(self, mode: str, before: int, tokens: list[int], came: list[float]) -> Served:
        """What both engines tell of the newest request."""
        engine = self.decode(mode)
        told = until(
            lambda: engine.records().requests[before:],
            _WAIT_S,
            "the decode engine tells of the request",
        )
        decode = told[-1]
        prefill = until(
            lambda: _named(self.prefill.records(), decode.request_id),
            _WAIT_S,
            "the prefill engine tells of the request",
        )
        drawn = ANSWER_TOKENS if MODES[mode][1] else ANSWER_TOKENS - 1
        if len(told) != 1 or len(decode.token_ids) != drawn:
            raise SystemFailedError(f"{mode}: {decode.request_id} was not served so: {decode}")
        loaded = [one for one in engine.records().transfers if one.request_id == decode.request_id]
        return Served(
            tokens, came[0], came[1], prefill, decode, sum(one.nbytes for one in loaded if one.ok)
        )

    def close(self) -> None:
        """Kills everything."""
        self._network.close()


def _router_name(mode: str) -> str:
    return f"router-{mode.replace(' ', '-')}"


def _named(records: Records, request_id: str) -> RequestSummary | None:
    return next((one for one in records.requests if one.request_id == request_id), None)
