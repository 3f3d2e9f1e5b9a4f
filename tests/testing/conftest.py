"""The example connector, which passes the conformance suite as it is."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from kvferry.config import KVTransferConfig

EXAMPLE = Path(__file__).parents[2] / "examples" / "folder_connector"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(EXAMPLE)
    folder_connector = importlib.import_module("folder_connector")
    yield folder_connector
    del sys.modules["folder_connector"]


@pytest.fixture
def configs(example: ModuleType, tmp_path: Path) -> tuple[KVTransferConfig, KVTransferConfig]:
    """The configurations of a producer and of a consumer that share a folder."""
    producer, consumer = (
        KVTransferConfig(
            kv_connector="FolderConnector",
            kv_connector_module_path="folder_connector",
            kv_role=role,
            kv_connector_extra_config={"folder": str(tmp_path), "chunk_tokens": 4, "wait_s": 5},
        )
        for role in ("kv_producer", "kv_consumer")
    )
    return producer, consumer
