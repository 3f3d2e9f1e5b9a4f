"""Without ``transport``, what serves a cache follows from where it lies, and the log says why."""

import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.config import KVTransferConfig, parse_struct
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.worker import PullWorker
from kvferry.errors import ConfigError, PortInUseError, TransferError
from kvferry.layouts.arrays import MemorySpan
from kvferry.testing.connector_conformance import GEOMETRIES, Pair, open_pair
from kvferry.testing.host_device import HostDevice, HostIpcMemory
from tests.connectors.engines import pull_config, served
from tests.connectors.test_pull_devices import ways_of

Open = Callable[..., Pair]


@pytest.fixture
def not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of devices is such that CUDA IPC has no handles for it."""

    def export(_: HostIpcMemory, memory: MemorySpan) -> tuple[bytes, int]:
        raise TransferError(f"{memory.nbytes} bytes of virtual memory have no handle")

    monkeypatch.setattr(HostIpcMemory, "export", export)


@pytest.fixture
def opened() -> Iterator[Open]:
    """Opens a pair with keys of each side; it is closed at the end."""
    with ExitStack() as stack:

        def pair(
            source: dict[str, Any],
            target: dict[str, Any],
            device: HostDevice | None = None,
            buffer_device: str | None = None,
        ) -> Pair:
            configs = [
                msgspec.structs.replace(
                    pull_config(role, role, **keys), kv_buffer_device=buffer_device
                )
                for role, keys in (("kv_producer", source), ("kv_consumer", target))
            ]
            both = configs[0], configs[1]
            return stack.enter_context(open_pair(both, GEOMETRIES["tp2-pp2"], device=device))

        yield pair


def offered(pair: Pair) -> set[tuple[str, ...]]:
    return {
        tuple(worker._transports)  # type: ignore[attr-defined]
        for engine in (pair.producer, pair.consumer)
        for worker in engine.workers
    }


def lines(caplog: pytest.LogCaptureFixture, begin: str) -> list[str]:
    """What was said of it, each once: every rank says it."""
    found = [record.getMessage() for record in caplog.records]
    return sorted({line for line in found if line.startswith(begin)})


# ---- on a device ---------------------------------------------------------------------------------


def test_a_cache_on_a_device_is_read_over_cuda_ipc_and_offered_over_tcp(
    host_device: HostDevice, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    pair = opened({}, {}, host_device)
    served(pair, "r")
    assert offered(pair) == {("cuda_ipc", "tcp")}  # there is no NIXL that knows this device
    assert ways_of(pair) == {("cuda_ipc", "placed")}
    told = lines(caplog, "nixl is left out: ")
    assert told
    assert all(line.endswith("the package nixl, and RDMA for the memory of GPUs") for line in told)
    assert all(": cuda_ipc, layers" in line for line in lines(caplog, "reading from engine"))


def test_memory_that_cuda_ipc_cannot_export_is_read_over_tcp_and_the_log_says_what_would_help(
    host_device: HostDevice, not_exported: None, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kvferry")
    pair = opened({}, {}, host_device)
    served(pair, "r")
    assert offered(pair) == {("tcp",)}
    told = lines(caplog, "cuda_ipc is left out: ")
    assert all("have no handle. It needs memory of cudaMalloc" in line for line in told)
    assert all("no expandable_segments" in line and "no sleep mode" in line for line in told)
    assert told


def test_a_named_transport_that_cannot_export_the_memory_is_an_error(
    host_device: HostDevice, not_exported: None, opened: Open
) -> None:
    with pytest.raises(TransferError, match="virtual memory have no handle"):
        opened({"transport": ["cuda_ipc", "tcp"]}, {}, host_device)


def test_a_port_that_is_taken_is_an_error_although_no_transport_is_named(
    host_device: HostDevice, opened: Open
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError):
            opened({"transport_config": {"tcp": {"port": port}}}, {}, host_device)


def test_the_log_says_why_a_better_transport_does_not_serve_a_pair(
    host_device: HostDevice, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kvferry")
    pair = opened({"transport": "tcp"}, {}, host_device)
    served(pair, "r")
    told = lines(caplog, "reading from engine")
    assert told
    assert all(
        ": tcp, not cuda_ipc (the source does not offer it), layers" in line for line in told
    )


def test_a_buffer_in_host_memory_keeps_a_cache_on_a_device_to_a_wire(
    host_device: HostDevice, opened: Open
) -> None:
    pair = opened({}, {}, host_device, "cpu")
    served(pair, "r")
    assert offered(pair) == {("tcp",)}


# ---- in host memory ------------------------------------------------------------------------------


def test_memory_of_an_engine_is_read_by_vm_and_offered_over_tcp(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PullWorker, "allocate", lambda _, nbytes: np.zeros(nbytes, np.uint8))
    pair = opened({}, {})
    served(pair, "r")
    assert offered(pair) == {("vm", "tcp")}


def test_a_cache_that_the_connector_allocates_lies_in_shared_memory(opened: Open) -> None:
    pair = opened({}, {})
    served(pair, "r")
    assert offered(pair) == {("shm",)}


# ---- keys ----------------------------------------------------------------------------------------


def test_keys_of_transports_that_may_serve_count_although_none_is_named() -> None:
    extra = {"tcp": {"connections": 3}, "cuda_ipc": {"chunk_bytes": 1 << 20}}
    config = pull_config("kv_both", "e", transport_config=extra)
    assert connector_extra(config).transport_config == extra


def test_keys_of_a_transport_that_never_serves_unnamed_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"has keys for 'ucx'.*\(shm, vm, tcp, cuda_ipc, nixl"):
        connector_extra(pull_config("kv_both", "e", transport_config={"ucx": {}}))


def test_a_list_of_no_transports_is_refused() -> None:
    with pytest.raises(ConfigError, match="transport: name at least one"):
        connector_extra(pull_config("kv_both", "e", transport=[]))


def connector_extra(config: KVTransferConfig) -> PullConfig:
    return parse_struct(PullConfig, config.kv_connector_extra_config, "kv_connector_extra_config")
