"""A prefill and a decode engine on two hosts: the link between them breaks, and a host dies."""

import itertools
import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.config import EngineConfig
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig
from kvferry.testing import HostEngine, HostPair

pytestmark = [pytest.mark.slow, pytest.mark.processes]

MAX_TOKENS = 6


def engine_config(role, host, **shape):
    """The engine's section of a cluster file; name your own connector here."""
    transfer = {
        "kv_connector": "PullConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",  # no fault then costs an answer
        "kv_connector_extra_config": {
            "transport": "tcp",
            "host": host.ipv4,
            "cluster_key": "a secret of the whole cluster, 32 bytes or more",
            "handshake_timeout_s": 5,
            "control_config": {"heartbeat_s": 1},  # a dead host is noticed sooner
        },
    }
    return EngineConfig(name=host.name, kv_transfer_config=transfer, **shape)


@pytest.fixture
def pair(network, tmp_path):
    prefill, decode, client = map(network.add_host, ("prefill", "decode", "client"))
    configs = (
        engine_config("kv_producer", prefill, tp=2, block_size=8, layout="HND"),
        engine_config("kv_consumer", decode, block_size=12, layout="NHD"),
    )
    model = prepare_model("tiny", tiny=TinyConfig(), cache=tmp_path)
    first, second = (
        HostEngine(host, client, config, model=model, log=tmp_path / f"{host.name}.log")
        for host, config in zip((prefill, decode), configs, strict=True)
    )
    pair = HostPair(network, first, second, max_tokens=MAX_TOKENS)
    pair.start()
    return pair  # everything ends with the network


def test_no_answer_is_lost_or_wrong(pair):
    chance = random.Random(1)
    prompts = [[chance.randrange(3, 300) for _ in range(length)] for length in (20, 45, 90)]
    alone = [pair.prefill.complete(prompt, MAX_TOKENS, {}).token_ids for prompt in prompts]

    # The link breaks when the KV has been lent, and is repaired during the load.
    lent = [pair.lend(prompt) for prompt in prompts]
    pair.network.cut(pair.prefill.host, pair.decode.host)
    with ThreadPoolExecutor() as pool:
        loading = pool.map(pair.load, prompts, lent)
        time.sleep(1)
        pair.network.restore(pair.prefill.host, pair.decode.host)
        assert [answer.token_ids for answer in loading] == alone

    # The prefill host dies with all lent KV, and returns.
    lent = [pair.lend([7, *prompt]) for prompt in prompts]
    pair.prefill.host.kill()
    answers = [pair.load([7, *prompt], first) for prompt, first in zip(prompts, lent, strict=True)]
    assert [answer.error for answer in answers] == ["", "", ""]
    pair.prefill.start()
    pair.prefill.wait_until_ready()
    for first in itertools.count(8):  # until the engines have found each other again
        answer = pair.serve([first, *prompts[2]])
        if pair.summary(answer).num_external_tokens > 0:
            break
    pair.settle()
