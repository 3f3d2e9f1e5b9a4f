"""vLLM's servers on hosts: two that prefill and two that decode, with one connector."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from benchmarks.faults.load import Prompts
from benchmarks.faults.system import CONTROL_PORT, KEY, Member, Role, Step, System
from benchmarks.programs import ServerError
from benchmarks.vllm_servers.connectors import Connector, KVFerry, Nixl
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.server import PYTHON, ServerOptions
from kvferry.testing.hosts import Host

_PROMPTS = 120
_TOKENS = 16
_LEASE_S = 10.0
_NAMES = ("p0", "p1", "d0", "d1")


class VLLMMember(Member):
    """A server. Nobody starts it again but the benchmark."""

    def __init__(
        self, role: Role, host: Host, client: Host, system: "VLLMSystem", options: ServerOptions
    ) -> None:
        super().__init__(role, host, client, system.folder)
        self._options = options
        self._environment = system.environment()

    def command(self) -> tuple[list[str], Mapping[str, str]]:
        """See :class:`Member`."""
        chosen = self._options.variables(self.folder)
        # Each host has its own loopback interface, and no way out by which to find its address.
        own = {"VLLM_HOST_IP": self.host.ipv4, "GLOO_SOCKET_IFNAME": "lo"}
        return self._options.command(self.http.port), {**self._environment, **chosen, **own}

    def step_counts(self) -> Mapping[Step, float]:
        """Of a server's metrics two are told apart by none: a lent prompt is no request of it."""
        metrics = self.metrics()
        running = metrics.get("vllm:num_requests_running", 0.0)
        waiting = metrics.get("vllm:num_requests_waiting", 0.0)
        return {
            "waiting": waiting,
            "prefilling": running,
            "lent": 0.0,
            "loading": waiting,
            "decoding": running,
        }

    def used_blocks(self) -> float:
        """See :class:`Member`. vLLM tells the fraction of its blocks that are held."""
        blocks = self._options.kv_cache_bytes // self._block_bytes
        return round(blocks * self.metrics()["vllm:kv_cache_usage_perc"])

    @property
    def _block_bytes(self) -> int:
        """The tiny model has 4 layers and 4 KV heads of size 32, K and V, in float32."""
        return self._options.block_size * 4 * 4 * 32 * 2 * 4


class VLLMSystem(System):
    """Two and two of them."""

    clients = 8
    requests = 60
    lease_s = 3 * _LEASE_S + 40.0

    def __init__(self, folder: Path, name: str, transport: str | None) -> None:
        """Servers with our connector over a transport, or with NixlConnector for none.

        Raises:
            ServerError: vLLM's environment is not there.
        """
        if not PYTHON.exists():
            raise ServerError(f"{PYTHON} is not there; `make test-vllm` sets it up")
        super().__init__(folder)
        self.name = name
        self._transport = transport
        self._model = tiny_model()

    def make_members(self) -> list[Member]:
        """See :class:`System`."""
        return [self._make_member(name) for name in _NAMES]

    def _make_member(self, name: str) -> Member:
        role: Role = "prefill" if name.startswith("p") else "decode"
        host = self.network.add_host(name)
        options = ServerOptions(
            name=name,
            model=self._model,
            address=host.ipv4,
            **self._transfer(role, host),
            arguments=("--shutdown-timeout", "5"),
        )
        return VLLMMember(role, host, self.client, self, options)

    def _transfer(self, role: Role, host: Host) -> dict[str, Any]:
        """How a server is told of its connector; leases are as long for both."""
        kv_role: Literal["kv_producer", "kv_consumer"] = (
            "kv_producer" if role == "prefill" else "kv_consumer"
        )
        connector: Connector
        if self._transport is None:
            connector = Nixl(ucx_tls="tcp")
            changed: dict[str, Any] = {
                "kv_connector_extra_config": {"kv_lease_duration": int(_LEASE_S)}
            }
            environment = {
                "VLLM_NIXL_SIDE_CHANNEL_HOST": host.ipv4,
                "VLLM_NIXL_SIDE_CHANNEL_PORT": str(CONTROL_PORT),
            }
        else:
            keys = {"host": host.ipv4, "cluster_key": KEY, "lease_duration_s": _LEASE_S}
            connector = KVFerry(extra={**keys, "transport": self._transport})
            changed = {"kv_port": CONTROL_PORT}
            environment = {"UCX_TLS": "tcp"}
        config = {**connector.config(kv_role, host.name), **changed}
        return {
            "transfer": {**config, "kv_load_failure_policy": "recompute"},
            "environment": {**connector.environment(), **environment},
        }

    def router_arguments(self) -> list[str]:
        """NixlConnector's decode server takes prompts without a first token only."""
        return [] if self._transport is None else ["--tokenizer", str(self._model.folder)]

    def environment(self) -> dict[str, str]:
        """See :class:`System`. The two environments have different releases of Numba, each of which
        would throw away what the other one has compiled from our sources.
        """
        return {**super().environment(), "NUMBA_CACHE_DIR": str(self.folder / "numba")}

    def enter(self, member: Member) -> None:
        """See :class:`System`."""
        place = {"url": member.http.url}
        path = f"/kvferry/engines/{member.role}/{member.name}"
        self.router.ask("PUT", path, place)

    def scale_in(self, member: Member) -> None:
        """See :class:`System`."""
        self.drain(member)
        member.end()

    def unshared(self, salt: str) -> dict[str, str]:
        """See :class:`System`."""
        return {"cache_salt": salt}

    def make_prompts(self) -> Prompts:
        """Answers of a prefill server alone; its prefix cache does not keep them."""
        chance = random.Random(12)
        prompts = [
            [chance.randrange(8, self._model.vocab_size) for _ in range(chance.randrange(40, 700))]
            for _ in range(_PROMPTS)
        ]
        asked = Prompts(prompts, [[0] * _TOKENS])
        alone = self.of("prefill")[0].http
        expected = []
        for index in range(_PROMPTS):
            body = {**asked.body(index), "cache_salt": "alone"}
            _, content = alone.ask("POST", "/v1/completions", body)
            expected.append(msgspec.json.decode(content)["choices"][0]["token_ids"])
        return Prompts(prompts, expected)
