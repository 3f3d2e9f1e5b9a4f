"""The example connector, which passes the conformance suite as it is."""

import importlib
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

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


class AtOnce:
    """Stands in for a pool of threads: carries out a job before it returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def submit(self, work: Callable[[Any], int], job: Any) -> Future[int]:
        future: Future[int] = Future()
        try:
            future.set_result(work(job))
        except OSError as error:
            future.set_exception(error)
        return future

    def shutdown(self, **_: Any) -> None:
        pass


@pytest.fixture
def in_step(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the example load within the step that computes a request."""
    ask = example.FolderScheduler.get_num_new_matched_tokens
    monkeypatch.setattr(example, "ThreadPoolExecutor", AtOnce)
    monkeypatch.setattr(
        example.FolderScheduler,
        "get_num_new_matched_tokens",
        lambda self, request, local: (ask(self, request, local)[0], False),
    )
