"""A cluster that grows and shrinks under load: nobody notices."""

import itertools
import os
from functools import partial

import httpx
import pytest

from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig
from kvferry.router.answer import TextCodec
from kvferry.router.router import Router
from kvferry.router.router_client import RouterClient
from kvferry.serving.messages import EngineAddress, RouterSettings
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.test_starved import REQUESTS, ask, undivided
from tests.load import Load

pytestmark = [pytest.mark.processes, pytest.mark.timed("Four clusters serve at once under load.")]

ROUNDS = int(os.environ.get("SCALE_ROUNDS", "1"))
CLIENTS = 4


def engine(role, number):
    """No two of a role that live at the same time have one shape."""
    transfer = {
        "kv_connector": "PullConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_port": 0,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"cluster_key": "k" * 32, "transport": "tcp"},
    }
    return {
        "name": f"{role}-{number}",
        "tp": 1 + number % 2,
        "block_size": (16, 24, 8)[number % 3],
        "num_blocks": 256,
        "max_model_len": 512,
        "kv_transfer_config": transfer,
    }


CONFIG = ClusterConfig.from_mapping(
    {
        "model": {"source": "tiny", "dtype": "float64"},
        "prefill": [engine("prefill", number) for number in range(ROUNDS + 2)],
        "decode": [engine("decode", number) for number in range(ROUNDS + 2)],
    }
)


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    running = {}

    def begin(name):
        running[name] = Cluster.open(CONFIG, only=name, logs=tmp_path / "logs", timeout_s=WAIT_S)
        return running[name].engines[0]

    yield begin, running
    for cluster in running.values():
        cluster.close()


def live_requests(engine):
    """State → requests of an engine, the ended ones that lend among them."""
    text = httpx.get(f"{engine.url}/metrics", timeout=WAIT_S, trust_env=False).text
    lines = [line for line in text.splitlines() if "live_requests{" in line]
    return {line.split('"')[1]: float(line.split()[-1]) for line in lines}


@pytest.mark.slow
@pytest.mark.timeout(600 * (ROUNDS + 1))
def test_engines_come_and_go_under_load_and_every_answer_is_right(start, servers):
    begin, running = start
    first = [begin(f"{role}-{number}") for role in ("prefill", "decode") for number in (0, 1)]
    folder = next(iter(running.values())).model_folder
    settings = RouterSettings(
        engines=tuple(EngineAddress.of(one.role, one.url, one.name) for one in first),
        model_folder=folder,
        decode_only="never",
        operator_key="operator",
    )
    url = servers.start(Router(settings, TextCodec.open(folder)).app())
    router = RouterClient(url, "operator")

    def is_in_state(role, name, state):
        return (role, name, state) in {
            (one["role"], one["name"], one["state"]) for one in router.engines()
        }

    def has_no_requests(cluster):
        return not any(live_requests(cluster.engines[0]).values())

    until(lambda: all(one["state"] == "ready" for one in router.engines()))
    numbers = itertools.cycle(range(REQUESTS))
    with (
        httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False) as client,
        Load(partial(ask, client), numbers, clients=CLIENTS) as load,
    ):
        for number in range(ROUNDS):
            for role in ("prefill", "decode"):
                come = begin(f"{role}-{number + 2}")
                router.put(role, come.name, come.url)
                until(partial(is_in_state, role, come.name, "ready"))
                go = f"{role}-{number}"
                router.drain(role, go)
                until(partial(is_in_state, role, go, "drained"))
                router.delete(role, go)
                running.pop(go).close()
            load.goes_on()
    wrong = load.wrong(undivided(folder).__getitem__)
    print(f"{ROUNDS} rounds of two changes, {len(load.answers)} answers, {load.errors=}, {wrong=}")
    assert (load.errors, wrong) == ([], [])
    for cluster in running.values():  # nothing is stranded
        until(partial(has_no_requests, cluster))
