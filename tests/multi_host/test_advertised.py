"""Engines that are reached at other addresses than those on which they listen."""

import random
import sys
from pathlib import Path

import pytest

from kvferry.config import EngineConfig
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig
from kvferry.testing import HostEngine, HostPair

pytestmark = [pytest.mark.processes, pytest.mark.smoke]

MAX_TOKENS = 6
MAPPING = Path(__file__).with_name("mapping.py")


def engine_config(role, name, extra, **shape):
    transfer = {
        "kv_connector": "PullConnector",
        "kv_role": role,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "transport": "tcp",
            "cluster_key": "a secret of the whole cluster, 32 bytes or more",
            "record_digests": True,
            **extra,
        },
    }
    return EngineConfig(name=name, kv_transfer_config=transfer, **shape)


@pytest.fixture
def pair(network, tmp_path):
    """The prefill engine listens on every address of its host and is reached through the ports of
    a gate alone: packets between the two engines' hosts are dropped.
    """
    prefill, decode, gate, client = map(network.add_host, ("prefill", "decode", "gate", "client"))
    network.cut(prefill, decode)
    lends = {
        "host": "0.0.0.0",
        "advertise_host": gate.ipv4,
        "advertise_port": 30579,
        "transport_config": {"tcp": {"port": 14600, "advertise_port": 30600}},
    }
    loads = {"host": decode.ipv4, "peers": [f"{gate.ipv4}:30579"]}
    configs = (
        engine_config("kv_producer", "prefill", lends, tp=2, block_size=8, layout="HND"),
        engine_config("kv_consumer", "decode", loads, block_size=12, layout="NHD"),
    )
    ports = {30579: 14579, 30600: 14600, 30601: 14601}  # the control channel, and two ranks
    gate.run([sys.executable, MAPPING, *(f"{a}:{prefill.ipv4}:{b}" for a, b in ports.items())])
    model = prepare_model("tiny", tiny=TinyConfig(), cache=tmp_path)
    engines = [
        HostEngine(host, client, config, model=model, log=tmp_path / f"{host.name}.log")
        for host, config in zip((prefill, decode), configs, strict=True)
    ]
    for engine in engines:
        engine.start()
    for engine in engines:
        engine.wait_until_ready()
    source, target = engines
    return HostPair(
        network, source, target, max_tokens=MAX_TOKENS
    )  # everything ends with the network


def test_engines_load_through_mapped_ports(pair):
    chance = random.Random(1)
    prompts = [[chance.randrange(3, 300) for _ in range(length)] for length in (20, 45, 90)]
    for prompt in prompts:
        alone = pair.prefill.complete(prompt, MAX_TOKENS, {}).token_ids
        answer = pair.serve(prompt)
        assert (answer.error, answer.token_ids) == ("", alone)
        assert pair.summary(answer).num_external_tokens > 0
    assert pair.check_digests() == len(prompts)
    pair.settle()
