"""A package outside the tree that offers a connector, as an installed plugin would."""

import socket
import sys
from pathlib import Path

import pytest

from kvferry.config import KVTransferConfig

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
def outside_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@pytest.fixture
def producer_and_consumer() -> tuple[KVTransferConfig, KVTransferConfig]:
    """Two engines' PullConnectors; a lease that nobody takes ends within the suite's patience."""
    extra = {
        "cluster_key": "k" * 32,
        "lease_duration_s": 3.0,
        "handshake_timeout_s": 2.0,
        "record_digests": True,
    }
    producer, consumer = (
        KVTransferConfig(
            kv_connector="PullConnector",
            kv_role=role,
            kv_port=0,
            kv_connector_extra_config=extra,
        )
        for role in ("kv_producer", "kv_consumer")
    )
    return producer, consumer
