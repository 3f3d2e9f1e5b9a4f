"""What vLLM's servers are told about their KV connector."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, Protocol

from benchmarks.vllm_servers.ports import free_port, free_ports

Role = Literal["kv_producer", "kv_consumer", "kv_both"]


class Connector(Protocol):
    """A way to connect a prefill server with a decode server."""

    @property
    def name(self) -> str:
        """For people."""

    def config(self, role: Role, engine: str) -> dict[str, Any]:
        """The server's ``--kv-transfer-config``."""

    def environment(self) -> Mapping[str, str]:
        """What the server's processes need beside it."""


@dataclasses.dataclass(frozen=True, slots=True)
class KVFerry:
    """Our connector."""

    name: str = "kvferry"
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """``kv_connector_extra_config``."""
    policy: Literal["fail", "recompute"] = "fail"

    def config(self, role: Role, engine: str) -> dict[str, Any]:
        """See :class:`Connector`."""
        return {
            "kv_connector": "KVFerryConnector",
            "kv_connector_module_path": "kvferry.integrations.vllm",
            "kv_role": role,
            "engine_id": engine,
            "kv_port": free_ports(2),  # the second one is a second data-parallel engine's
            "kv_load_failure_policy": self.policy,
            "kv_connector_extra_config": dict(self.extra),
        }

    def environment(self) -> Mapping[str, str]:
        """See :class:`Connector`."""
        return {}


@dataclasses.dataclass(frozen=True, slots=True)
class Nixl:
    """vLLM's own connector over NIXL, which reads from the decode side as ours does."""

    name: str = "nixl"
    ucx_tls: str | None = None
    """UCX's transports; its own choice if left out."""
    conv: str | None = None
    """Layout of the states of convolutions, whatever a shape says: it starts with ``DS`` only."""
    extra: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """``kv_connector_extra_config``."""
    device: str = "cpu"
    """``kv_buffer_device``."""
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further environment of its servers."""

    def config(self, role: Role, engine: str) -> dict[str, Any]:
        """See :class:`Connector`."""
        return {
            "kv_connector": "NixlConnector",
            "kv_role": role,
            "kv_buffer_device": self.device,
            "engine_id": engine,
            "kv_connector_extra_config": dict(self.extra),
        }

    def environment(self) -> Mapping[str, str]:
        """See :class:`Connector`."""
        wanted = {"UCX_TLS": self.ucx_tls, "VLLM_SSM_CONV_STATE_LAYOUT": self.conv}
        given = {name: value for name, value in wanted.items() if value is not None}
        return {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), **given, **self.variables}
