"""The example passes the conformance suite, and serves the reference engine."""

from pathlib import Path

import pytest

from kvferry.config import KVTransferConfig
from kvferry.testing.connector_conformance import ConnectorConformance

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(HERE)


class TestConformance(ConnectorConformance):
    @pytest.fixture
    def configs(self, tmp_path):
        return tuple(
            KVTransferConfig(
                kv_connector="FolderConnector",
                kv_connector_module_path="folder_connector",
                kv_role=role,
                kv_connector_extra_config={
                    "folder": str(tmp_path / "kv"),
                    "chunk_tokens": 5,
                    "wait_s": 1,
                },
            )
            for role in ("kv_producer", "kv_consumer")
        )

    def lose_source(self, pair):
        for file in Path(pair.consumer.scheduler._extra.folder).iterdir():
            file.unlink()
