"""From an engine's configuration to an engine that answers."""

import re
import socket
from typing import Any

import msgspec
import pytest

from kvferry.cache import Request
from kvferry.cache.events import AllBlocksCleared
from kvferry.config import EngineConfig, KVEventsConfig
from kvferry.control.cache_events import CacheEventSubscriber
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import SamplingParams
from kvferry.errors import ConfigError, ModelError, PortInUseError


def config(**values):
    pull = {
        "kv_connector": "PullConnector",
        "kv_role": "kv_both",
        "kv_port": values.pop("kv_port", 0),
        "kv_connector_extra_config": {"cluster_key": "k" * 32},
    }
    defaults: dict[str, Any] = {"name": "e", "num_blocks": 48, "block_size": 4}
    return EngineConfig(**defaults | {"kv_transfer_config": pull} | values)


@pytest.fixture
def folder(tiny_folder):
    return tiny_folder(num_layers=3)


@pytest.mark.parametrize(
    "executor",
    ["inprocess", pytest.param("process", marks=[pytest.mark.slow, pytest.mark.processes])],
)
@pytest.mark.parametrize("connect", [True, False])
def test_any_shape_with_and_without_connector_gives_the_same_tokens(
    executor, connect, folder, prompts
):
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    answers = []
    for shape in ({}, {"tp": 2, "layout": "HND", "block_size": 6}, {"pp": 2, "layout": "BKHND"}):
        with build_engine(
            config(**shape), folder, dtype="float64", executor=executor, connect=connect
        ) as engine:
            done = engine.generate(prompts(5, 21), sampling)
            answers.append([c.token_ids for c in done])
    assert answers[0] == answers[1] == answers[2]
    assert all(len(tokens) == 6 for tokens in answers[0])


def test_limits_come_from_the_configuration_and_the_model(folder):
    with build_engine(
        config(max_model_len=50, max_num_seqs=3, max_num_batched_tokens=9),
        folder,
        dtype="float64",
        executor="inprocess",
        connect=False,
        eos_token_ids=[7],
        enable_prefix_caching=False,
    ) as engine:
        options = engine.options
    assert (options.max_model_len, options.max_num_seqs) == (50, 3)
    assert (options.max_num_batched_tokens, options.eos_token_ids) == (9, (7,))
    assert options.vocab_size == 320
    assert not options.enable_prefix_caching


def test_the_model_length_is_never_beyond_the_models_positions(folder):
    with build_engine(
        config(max_model_len=10**6), folder, dtype="float64", executor="inprocess", connect=False
    ) as engine:
        assert engine.options.max_model_len < 10**6


def test_the_policy_of_the_connector_reaches_the_scheduler(folder):
    values = config().kv_transfer_config | {"kv_load_failure_policy": "recompute"}
    with build_engine(
        config(kv_transfer_config=values), folder, dtype="float64", executor="inprocess"
    ) as engine:
        assert engine.options.load_failure_policy == "recompute"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"layout": "NOPE"}, "layout"),
        ({"pp": 9}, "pp"),
        (
            {"kv_transfer_config": {"kv_connector": "NoSuchConnector", "kv_role": "kv_both"}},
            "PullConnector",
        ),
    ],
)
def test_a_shape_or_connector_that_cannot_be_is_refused_before_anything_starts(
    values, words, folder
):
    with pytest.raises(ConfigError, match=words):
        build_engine(config(**values), folder, dtype="float64", executor="inprocess")


def test_a_port_that_is_taken_is_named(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=str(port)):
            build_engine(config(kv_port=port), folder, dtype="float64", executor="inprocess")


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(ModelError, match="cannot be read"):
        build_engine(config(), tmp_path, dtype="float64", executor="inprocess")


def test_engine_publishes_what_later_requests_will_hit(folder, prompts, caplog):
    free = "tcp://127.0.0.1:0"
    events = KVEventsConfig(endpoint=free, replay_endpoint=free, block_hashes="bytes")
    (prompt,) = prompts(21)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True)
    with (
        caplog.at_level("INFO", logger="kvferry.engine.builder"),
        build_engine(
            config(kv_events=events), folder, dtype="float64", executor="inprocess", connect=False
        ) as engine,
    ):
        addresses = re.findall(r"tcp://127\.0\.0\.1:\d+", caplog.text)
        with CacheEventSubscriber(addresses[0], replay_endpoint=addresses[1]) as subscriber:
            (done,) = engine.generate([prompt], sampling)
            hits, received = set(), None
            while received is None:  # until the subscription has arrived; the rest is replayed
                assert engine.reset_prefix_cache()
                received = subscriber.receive(0.02)
            while received is not None and received.batch.events != [AllBlocksCleared()]:
                for event in received.batch.events:
                    assert not isinstance(event, AllBlocksCleared)
                    hits |= set(event.block_hashes)
                assert received.is_gapless
                received = subscriber.receive(10.0)
    # The KV of the last token is never computed.
    computed = Request("r", [*prompt, *done.token_ids[:-1]], hash_block_size=4)
    assert received is not None
    assert hits == set(computed.block_hashes)


def test_events_port_that_is_taken_shows_before_anything_is_started(folder):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        events = KVEventsConfig(endpoint=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(PortInUseError, match=r"kv_events\.endpoint: "):
            build_engine(config(kv_events=events), folder, dtype="float64", executor="inprocess")
        off = msgspec.structs.replace(events, enable_kv_cache_events=False)
        build_engine(
            config(kv_events=off), folder, dtype="float64", executor="inprocess", connect=False
        ).close()
