"""A package outside the tree that offers a connector, as an installed plugin would."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks.vllm_servers import ports
from kvferry.config import KVTransferConfig
from kvferry.connectors.pull import worker as pull_worker
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.testing.fake_engine import FakeEngine, Groups
from kvferry.testing.host_device import HostDevice
from tests.clock import Clock
from tests.connectors.engines import pull_config

PLUGIN = """
import msgspec

from kvferry.connectors import KVConnector, KVConnectorMetadata


class Extra(msgspec.Struct):
    folder: str
    depth: int = 1


class Metadata(KVConnectorMetadata):
    pass


class Outside(KVConnector):
    ExtraConfig = Extra
    Metadata = Metadata

    @classmethod
    def scheduler(cls, context):
        raise NotImplementedError

    @classmethod
    def worker(cls, context, rank):
        raise NotImplementedError


class Undeclared(Outside):
    ExtraConfig = None


class WrongMetadata(Outside):
    Metadata = Extra


class NoConnector:
    pass
"""


@pytest.fixture
def outside_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A module ``outside_plugin`` on the path, its entry points registered; returns its name."""
    (tmp_path / "outside_plugin.py").write_text(PLUGIN)
    metadata = tmp_path / "outside_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: outside-plugin\nVersion: 1.0\n"
    )
    (metadata / "entry_points.txt").write_text(
        "[kvferry.connectors]\n"
        "Outside = outside_plugin:Outside\n"
        "Misfit = outside_plugin:NoConnector\n"
        "Gone = outside_plugin_gone:Outside\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield "outside_plugin"
    sys.modules.pop("outside_plugin", None)


@pytest.fixture
def free_port() -> int:
    """A TCP port that nothing listened on a moment ago."""
    return ports.free_port()


@pytest.fixture
def clock() -> Iterator[Clock]:
    """The clock of all engines of the test; name the fixture before what opens them."""
    with pytest.MonkeyPatch.context() as patch:
        yield Clock.install(patch)


@pytest.fixture
def pull_configs() -> Callable[..., tuple[KVTransferConfig, KVTransferConfig]]:
    """Makes the configs of two engines' PullConnectors; takes further extra keys. The leases
    outlast a busy machine: a test that waits for the end of a lease gives ``lease_duration_s``.
    """

    def make(**extra: Any) -> tuple[KVTransferConfig, KVTransferConfig]:
        keys = {"lease_duration_s": 30.0} | extra
        return pull_config("kv_producer", "p", **keys), pull_config("kv_consumer", "d", **keys)

    return make


@pytest.fixture
def open_engine() -> Iterator[Callable[..., FakeEngine]]:
    """Opens engines that are closed at the end of the test.

    Takes the engine's id, its geometry, and what :func:`pull_config` and :meth:`FakeEngine.open`
    take. Those whose id begins with a ``p`` produce, if nothing else is said.
    """
    with ExitStack() as stack:

        def open_one(
            engine_id: str,
            groups: Groups,
            *,
            role: str = "",
            num_blocks: int = 64,
            layer_windows: Mapping[int, int] | None = None,
            **options: Any,
        ) -> FakeEngine:
            role = role or ("kv_producer" if engine_id.startswith("p") else "kv_consumer")
            config = pull_config(role, engine_id, **options)
            engine = FakeEngine.open(
                config, groups, num_blocks=num_blocks, layer_windows=layer_windows
            )
            stack.callback(engine.close)
            return engine

        yield open_one


@pytest.fixture
def host_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[HostDevice]:
    """A device on which caches may lie; the transport ``cuda_ipc`` is that of this device."""
    with (
        HostDevice() as device,
        temporary_plugin(TRANSPORTS, "cuda_ipc", device.ipc_transport()),
    ):
        monkeypatch.setattr(pull_worker, "open_stream", lambda _: device.open_stream())
        yield device
    assert [stream.pinned for stream in device.streams] == [[]] * len(device.streams)


@pytest.fixture
def producer_and_consumer(
    pull_configs: Callable[..., tuple[KVTransferConfig, KVTransferConfig]],
) -> tuple[KVTransferConfig, KVTransferConfig]:
    """Two engines' PullConnectors that keep digests in their records."""
    return pull_configs(record_digests=True)
