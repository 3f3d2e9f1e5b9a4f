"""KV that no engine will fetch goes back to its lender at once: leases last for 600 s here."""

import http.client
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig
from kvferry.testing.waiting import WAIT_S, until

pytestmark = pytest.mark.processes

LEASE_S = 600.0
CLIENTS = 120
LIVE = "kvferry_engine_live_requests"
USED = 'kvferry_engine_kv_blocks{state="used"}'
LONGEST_S = 0.8
"""Seconds after which the last of the clients has left."""


def engine(name, role):
    return {
        "name": name,
        "num_blocks": 256,
        "max_model_len": 512,
        "kv_transfer_config": {
            "kv_connector": "PullConnector",
            "kv_role": role,
            "kv_port": 0,
            "kv_connector_extra_config": {"transport": "tcp", "lease_duration_s": LEASE_S},
        },
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    config = ClusterConfig.from_mapping(
        {
            "model": {"source": "tiny", "dtype": "float64"},
            "prefill": [engine("p0", "kv_producer"), engine("p1", "kv_producer")],
            "decode": [engine("d0", "kv_consumer")],
            "router": {"port": 0},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE", str(tmp_path_factory.mktemp("cache")))
        logs = tmp_path_factory.mktemp("logs")
        with Cluster.open(config, logs=logs, timeout_s=WAIT_S) as cluster:
            yield cluster


def leave_early(url, seed):
    """Asks for the answer to some 300 tokens, and leaves within :data:`LONGEST_S` seconds."""
    draw = random.Random(seed)
    prompt = [draw.randrange(256) for _ in range(draw.randint(280, 320))]
    body = {"prompt": prompt, "max_tokens": 64, "ignore_eos": True, "stream": True}
    client = http.client.HTTPConnection(urlsplit(url).netloc, timeout=WAIT_S)
    try:
        client.request("POST", "/v1/completions", msgspec.json.encode(body))
        time.sleep(draw.uniform(0.0, LONGEST_S))
    finally:
        client.close()


def is_idle(one):
    """Whether an engine has no request and no loan, and all its blocks are free."""
    told = httpx.get(f"{one.url}/metrics", timeout=WAIT_S, trust_env=False).text
    figures = dict(line.rsplit(" ", 1) for line in told.splitlines() if not line.startswith("#"))
    live = [value for name, value in figures.items() if name.startswith(LIVE)]
    return len(live) == 4 and not any(map(float, (*live, figures[USED])))


@pytest.mark.parametrize(
    "rounds", [pytest.param(1, id="once"), pytest.param(10, marks=pytest.mark.slow, id="ten times")]
)
def test_clients_that_leave_before_their_answer_leave_no_kv_behind(cluster, rounds):
    for number in range(rounds):
        with ThreadPoolExecutor(CLIENTS) as clients:
            seeds = [f"{number}-{client}-{rounds}" for client in range(CLIENTS)]
            list(clients.map(lambda seed: leave_early(cluster.url, seed), seeds))
        for one in cluster.engines:
            until(partial(is_idle, one), what=f"{one.name} without lent KV")
