"""A conversation over a cluster whose engines say what they have."""

import httpx
import pytest
import torch

from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig, EngineConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import SamplingParams
from tests.load import WAIT_S, until

ANSWER = 30
"""Tokens of each answer."""


def engine(name, role, **values):
    free = "tcp://127.0.0.1:0"
    return {
        "name": name,
        "num_blocks": 64,
        "max_model_len": 512,
        "kv_transfer_config": {"kv_connector": "PullConnector", "kv_role": role, "kv_port": 0},
        "kv_events": {"endpoint": free, "replay_endpoint": free},
        **values,
    }


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    config = ClusterConfig.from_mapping(
        {
            "model": {"source": "tiny", "dtype": "float64"},
            "prefill": [engine("p0", "kv_producer", block_size=16)],
            "decode": [engine("d0", "kv_consumer", block_size=24, layout="HND")],
            "router": {"port": 0, "explain": True},
        }
    )
    with Cluster.open(config, logs=tmp_path / "logs", timeout_s=WAIT_S) as cluster:
        yield cluster


def answers_of_one_engine(cluster, prompts):
    """Of an engine that shares nothing with anybody."""
    config = EngineConfig(name="one", kv_transfer_config={}, num_blocks=64)
    torch.set_num_threads(1)
    with build_engine(
        config, cluster.model_folder, dtype="float64", executor="inprocess", connect=False
    ) as one:
        outputs = one.generate(prompts, SamplingParams(max_tokens=ANSWER))
    return [output.token_ids for output in outputs]


@pytest.mark.slow
def test_next_turn_is_computed_where_the_last_one_was_answered(cluster):
    prompts, answers, routes = [], [], []
    with httpx.Client(base_url=cluster.url, timeout=WAIT_S, trust_env=False) as client:

        def turn(new):
            prompt = [*(prompts[-1] + answers[-1] if prompts else []), *new]
            body = {
                "prompt": prompt,
                "max_tokens": ANSWER,
                "temperature": 0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = client.post("/v1/completions", json=body)
            prompts.append(prompt)
            answers.append(response.json()["choices"][0]["token_ids"])
            routes.append(response.headers.get("x-kvferry-route", ""))
            return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        def knows(name, blocks):
            return f'prefix_blocks{{engine="{name}",' in (
                text := client.get("/metrics").text
            ) and any(
                line.startswith(f'kvferry_router_prefix_blocks{{engine="{name}"')
                and float(line.split()[-1]) >= blocks
                for line in text.splitlines()
            )

        until(lambda: knows("p0", 0) and knows("d0", 0))
        assert turn(range(1, 101)) == 0
        # What D has: the prompt, which it loaded, and its answer without the last token.
        until(lambda: knows("d0", (100 + ANSWER - 1) // 24) and knows("p0", 100 // 16))
        assert turn(range(101, 121)) == 120
        turn(range(121, 141))
        metrics = client.get("/metrics").text
    assert routes[0].startswith("prefill=p0; decode=d0; cached=0; computed=100; moved=100; ")
    assert routes[1].startswith("prefill=-; decode=d0; cached=120; computed=30; moved=0; ")
    assert 'kvferry_router_prefix_tokens_total{source="decode"}' in metrics
    # A prefill engine counts its prompt up to the last token, which is always computed.
    assert "kvferry_router_prefix_missed_tokens_total 0.0" in metrics
    assert answers == answers_of_one_engine(cluster, prompts)
