"""Opens a transport by name, and lists the default transports of a cache."""

from collections.abc import Mapping
from typing import Any

from kvferry.plugins import TRANSPORTS, load_plugin
from kvferry.transports.base import Transport, TransportOptions

ALLOCATED = ("shm",)
"""Default transports for a KV cache that the first of these transports allocates."""
IN_HOST_MEMORY = ("vm", "tcp")
"""Default transports for an existing KV cache in host memory, best first."""
ON_A_DEVICE: Mapping[str, str] = {
    "cuda_ipc": "memory of cudaMalloc: no expandable_segments in PYTORCH_CUDA_ALLOC_CONF, no sleep "
    "mode in vLLM",
    "nixl": "the package nixl, and RDMA for the memory of GPUs",
    "tcp": "",
}
"""Default transports for a KV cache on a GPU, best first, each with its special requirements."""


def device_keys(device: str) -> dict[str, dict[str, Any]]:
    """Name of a default transport → keys with which it is opened for a KV cache on ``device``
    (``cuda:0`` say), unless the user has written others.
    """
    return {
        "cuda_ipc": {"device": int(device.removeprefix("cuda:"))},
        # If CUDA IPC reaches the peer, cuda_ipc serves. If not, UCX without RDMA would take TCP.
        "nixl": {"device_memory": True, "only_rdma": True},
    }


def transport_class(name: str) -> type[Transport]:
    """The class of the transport registered as ``name``; the call imports the module.

    Raises:
        PluginError: ``name`` is unknown or does not load; the message lists installed transports.
    """
    return load_plugin(TRANSPORTS, name, Transport)


def open_transport(name: str, options: TransportOptions | None = None) -> Transport:
    """Opens the transport registered as ``name``.

    Raises:
        PluginError: ``name`` is unknown or does not load.
        ConfigError: unknown or wrong keys in ``options.extra``.
        HostError: the machine lacks a requirement of the transport.
    """
    return transport_class(name).open(options or TransportOptions())
