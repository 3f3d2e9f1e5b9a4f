"""The example passes the conformance suite, and serves the reference engine."""

import contextlib
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.config import EngineConfig, KVTransferConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import EngineOutput, SamplingParams
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig
from kvferry.testing.connector_conformance import GEOMETRIES, ConnectorConformance, open_pair
from kvferry.testing.fake_engine import run
from kvferry.testing.multi_host_conformance import MultiHostConnectorConformance
from kvferry.testing.waiting import until

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(HERE)
    monkeypatch.setenv("PYTHONPATH", str(HERE))  # for ranks that are processes
    yield
    sys.modules.pop("folder_connector", None)


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "kv"


def configs_of(folder, chunk_tokens, wait_s, **keys):
    """The configurations of a producer and of a consumer that share the folder."""
    extra = {"folder": str(folder), "chunk_tokens": chunk_tokens, "wait_s": wait_s}
    producer, consumer = (
        KVTransferConfig(
            kv_connector="FolderConnector",
            kv_connector_module_path="folder_connector",
            kv_role=role,
            kv_connector_extra_config=extra,
            **keys,
        )
        for role in ("kv_producer", "kv_consumer")
    )
    return producer, consumer


class TestConformance(ConnectorConformance):
    @pytest.fixture
    def configs(self, folder):
        self._folder = folder
        return configs_of(folder, chunk_tokens=5, wait_s=3)

    def lose_source(self, pair):
        for file in self._folder.iterdir():
            file.unlink()


def fake_pair(folder, chunk_tokens):
    """A producer and a consumer without a model, which check each cell."""
    return open_pair(configs_of(folder, chunk_tokens, wait_s=0), GEOMETRIES["equal"])


def test_a_prompt_that_was_saved_whole_is_loaded_but_for_its_last_token(folder):
    with fake_pair(folder, chunk_tokens=1) as pair:
        source = pair.prefill("r", 20)
        pair.settle()
        request = pair.consumer.add("again", source.prompt_token_ids)
        pair.finish(request)
        assert request.external_tokens == 19
        pair.settle()


def test_a_longer_prompt_that_is_published_meanwhile_changes_nothing(folder, monkeypatch):
    with fake_pair(folder, chunk_tokens=5) as pair:
        tokens = range(10, 31)
        pair.producer.add("short", tokens[:10])
        pair.settle()
        request = pair.consumer.add("whole", tokens)
        alloc = pair.consumer.scheduler.update_state_after_alloc

        def publish_first(*arguments):
            if pair.producer.requests.keys() == {"short"}:
                longer = pair.producer.add("long", tokens[:20])
                run([pair.producer], lambda: pair.producer.is_idle, what=longer.request_id)
            alloc(*arguments)

        monkeypatch.setattr(pair.consumer.scheduler, "update_state_after_alloc", publish_first)
        pair.finish(request)
        assert request.external_tokens == 10
        pair.settle()


@pytest.mark.processes
@pytest.mark.slow
class TestBetweenHosts(MultiHostConnectorConformance):
    """Hosts share the file system, as machines of a cluster may share one over the network."""

    @pytest.fixture(scope="class")
    @classmethod
    def configs(cls, tmp_path_factory):
        folder = tmp_path_factory.mktemp("kv")
        policy = "recompute"
        return configs_of(folder, chunk_tokens=5, wait_s=20, kv_load_failure_policy=policy)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return prepare_model("tiny", tiny=TinyConfig(), cache=tmp_path_factory.mktemp("models"))


@pytest.fixture
def as_entry_point(tmp_path, monkeypatch):
    """Writes the entry point that an installation of the example would write, and adds it to the
    path.
    """
    metadata = tmp_path / "kvferry_folder_connector-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry-folder-connector\n")
    (metadata / "entry_points.txt").write_text(
        "[kvferry.connectors]\nFolderConnector = folder_connector:FolderConnector\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


SHAPES: dict[str, dict[str, Any]] = {
    "kv_producer": {"tp": 2, "block_size": 4, "layout": "HND"},
    "kv_consumer": {"pp": 2, "block_size": 6, "layout": "NHD"},
}
# No two prompts begin alike: a local prefix hit would leave less to load.
PROMPTS = [list(range(first, first + length)) for first, length in ((3, 7), (60, 33), (120, 50))]


def open_engine(model, folder, role, executor="inprocess", **keys):
    transfer = {
        "kv_connector": "FolderConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"folder": str(folder), "chunk_tokens": 5},
        **keys,
    }
    config = EngineConfig(name=role, kv_transfer_config=transfer, num_blocks=64, **SHAPES[role])
    return build_engine(config, model, dtype="float64", executor=executor)


def undivided(model: Path, max_tokens: int) -> list[list[int]]:
    config = EngineConfig(name="whole", kv_transfer_config={}, num_blocks=64)
    with build_engine(
        config, model, dtype="float64", executor="inprocess", connect=False
    ) as engine:
        answers = engine.generate(PROMPTS, SamplingParams(max_tokens=max_tokens))
        return [answer.token_ids for answer in answers]


def served(prefill, decode, max_tokens: int) -> list[EngineOutput]:
    """Prefills, then decodes while the prefill engine may still be saving."""
    firsts = prefill.generate(PROMPTS, SamplingParams(max_tokens=1))
    answers = {}
    for prompt, first in zip(PROMPTS, firsts, strict=True):
        id = first.request_id
        answers[id] = EngineOutput(request_id=id, token_ids=list(first.token_ids))
        decode.add_request(
            id,
            prompt + first.token_ids,
            SamplingParams(max_tokens=max_tokens - 1),
            kv_transfer_params=first.kv_transfer_params,
        )

    def have_ended():
        prefill.step()
        for output in decode.step():
            answers[output.request_id] += output
        return all(answer.finish_reason is not None for answer in answers.values())

    until(have_ended, every_s=0, what="all answers")
    return list(answers.values())


@pytest.mark.smoke
@pytest.mark.parametrize("found", ["by_module_path", "by_entry_point"])
def test_it_serves_the_tokens_of_one_undivided_engine(found, model, folder, request):
    keys = {"kv_connector_module_path": "folder_connector"}
    if found == "by_entry_point":
        request.getfixturevalue("as_entry_point")
        keys = {}
    with contextlib.ExitStack() as stack:
        prefill = stack.enter_context(open_engine(model, folder, "kv_producer", **keys))
        decode = stack.enter_context(open_engine(model, folder, "kv_consumer", **keys))
        answers = served(prefill, decode, max_tokens=6)
    assert [answer.token_ids for answer in answers] == undivided(model, 6)
    assert [answer.num_external_tokens for answer in answers] == [5, 30, 50]


@pytest.mark.smoke
def test_a_longer_prompt_finds_the_beginning_that_was_saved(model, folder):
    keys = {"kv_connector_module_path": "folder_connector"}
    with open_engine(model, folder, "kv_producer", **keys) as prefill:
        prefill.generate([PROMPTS[1]])
        while prefill.has_work():
            prefill.step()
    with open_engine(model, folder, "kv_consumer", **keys) as decode:
        (answer,) = decode.generate([[*PROMPTS[1], 7, 8, 9]])
    assert answer.num_external_tokens == 30


@pytest.mark.processes
@pytest.mark.slow
def test_it_serves_engines_whose_ranks_are_processes(model, folder):
    keys = {"kv_connector_module_path": "folder_connector", "executor": "process"}
    with (
        open_engine(model, folder, "kv_producer", **keys) as prefill,
        open_engine(model, folder, "kv_consumer", **keys) as decode,
    ):
        answers = served(prefill, decode, max_tokens=6)
    assert [answer.token_ids for answer in answers] == undivided(model, 6)
    assert [answer.num_external_tokens for answer in answers] == [5, 30, 50]
