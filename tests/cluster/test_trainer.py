"""A trainer changes the weights of a cluster of reference engines that clients keep asking."""

from functools import partial

import httpx
import msgspec
import pytest
import torch

from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig, EngineConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import SamplingParams
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TINY_MODELS
from kvferry.testing.waiting import WAIT_S, until
from tests.trainer import Day, draw_prompts, post

pytestmark = pytest.mark.processes

CHANGES = 50
SEEDS = (0, 1, 2)
"""Three weights: those of two changes ago are not those of now."""
TOKENS = 12
PROMPTS = draw_prompts(TINY_MODELS["tiny"].vocab_size, 200)


def engine(name, role, **values):
    transfer = {"kv_connector": "PullConnector", "kv_role": role, "kv_port": 0}
    transfer["kv_load_failure_policy"] = "fail"
    return {
        "name": name,
        "num_blocks": 128,
        "max_model_len": 512,
        "kv_transfer_config": transfer,
        **values,
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    cache, tiny = tmp_path_factory.mktemp("models"), TINY_MODELS["tiny"]
    return [
        prepare_model("tiny", tiny=msgspec.structs.replace(tiny, seed=seed), cache=cache)
        for seed in SEEDS
    ]


@pytest.fixture(scope="module")
def cluster(folders, tmp_path_factory):
    config = ClusterConfig.from_mapping(
        {
            "model": {"source": str(folders[0]), "dtype": "float64"},
            "prefill": [engine("p0", "kv_producer", block_size=16, tp=2)],
            "decode": [engine("d0", "kv_consumer", block_size=24, layout="HND")],
            "router": {"port": 0, "decode_only": "never"},
        }
    )
    with Cluster.open(config, logs=tmp_path_factory.mktemp("logs"), timeout_s=WAIT_S) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def expected(folders):
    """The answers of each weight to all prompts, by an engine that shares nothing with anybody."""
    torch.set_num_threads(1)
    config = EngineConfig(name="one", kv_transfer_config={}, num_blocks=256)
    answers = []
    for folder in folders:
        with build_engine(
            config, folder, dtype="float64", executor="inprocess", connect=False
        ) as one:
            outputs = one.generate(PROMPTS, SamplingParams(max_tokens=TOKENS))
        answers.append([output.token_ids for output in outputs])
    return answers


@pytest.fixture
def ask(cluster):
    """The tokens of an answer of the router."""
    with httpx.Client(base_url=cluster.url, timeout=WAIT_S, trust_env=False) as client:

        def ask(prompt):
            body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
            response = client.post("/v1/completions", json={**body, "return_token_ids": True})
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]["token_ids"]

        yield ask


def state_of(engine):
    told = httpx.get(f"{engine.url}/metrics", timeout=WAIT_S, trust_env=False)
    lines = told.text.splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in values.items()}


def has_no_blocks_in_use(engine):
    return not state_of(engine)['kvferry_engine_kv_blocks{state="used"}']


def pause(engine):
    """Pauses an engine; the error of an engine whose work does not end says what is left."""
    try:
        post(f"{engine.url}/pause", params={"mode": "wait"})
    except httpx.ReadTimeout as late:
        state = state_of(engine)
        live = {name: count for name, count in state.items() if "live_requests" in name}
        raise AssertionError(f"{engine.name} does not get done with its work: {live}") from late


@pytest.mark.slow
@pytest.mark.timeout(900)  # a minute, or four beside eight spinning processes per core
def test_no_answer_of_fifty_changes_mixes_weights(cluster, folders, expected, ask):
    prefill, decode = cluster.engines

    def change(number):
        try:
            for each in (prefill, decode):  # D fetches what P has lent, so P is paused first
                pause(each)
            for each in (prefill, decode):
                source = str(folders[number % len(folders)])
                post(f"{each.url}/kvferry/weights", json={"source": source})
        finally:  # after an error too: the test ends once the clients have their answers
            for each in (decode, prefill):
                post(f"{each.url}/resume")

    with Day(ask, PROMPTS) as day:
        for _ in range(CHANGES):
            day.change(change)
    assert day.errors == []
    assert day.wrong(expected) == []
    assert day.certain() == set(range(CHANGES))
    told = state_of(decode)
    assert told['kvferry_engine_prompt_tokens_total{source="peer"}'] > 50 * CHANGES
    assert told["kvferry_engine_failed_loads_total"] == 0
    for each in (prefill, decode):
        until(partial(has_no_blocks_in_use, each))
