"""A whole cluster whose processes hardly get to run: all of it is slow, and nothing is lost."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig, EngineConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import SamplingParams

pytestmark = pytest.mark.processes

SPINNERS_PER_CORE = 8
REQUESTS = 12


@contextlib.contextmanager
def starved() -> Iterator[None]:
    """Every core has processes that never sleep; they end with the block."""
    cores = len(os.sched_getaffinity(0))
    with contextlib.ExitStack() as stack:
        for _ in range(SPINNERS_PER_CORE * cores):
            spinner = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
            stack.callback(spinner.wait)
            stack.callback(spinner.kill)
        yield


def config() -> ClusterConfig:
    """TP 1 to TP 2 over tcp; a load that fails fails its request."""

    def engine(name: str, role: str, tp: int) -> dict[str, object]:
        transfer = {
            "kv_connector": "PullConnector",
            "kv_role": role,
            "kv_port": 0,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"transport": "tcp"},
        }
        return {
            "name": name,
            "tp": tp,
            "num_blocks": 256,  # no lease is refused for want of them
            "max_model_len": 512,
            "kv_transfer_config": transfer,
        }

    return ClusterConfig.from_mapping(
        {
            "model": {"source": "tiny", "dtype": "float64"},
            "prefill": [engine("p0", "kv_producer", 1)],
            "decode": [engine("d0", "kv_consumer", 2)],
            "router": {"port": 0, "decode_only": "never"},
        }
    )


def prompt(number: int) -> list[int]:
    """Token ids that begin like no other prompt, so that no prefix is found in a cache."""
    return [(17 * number + 31 * index) % 250 + 1 for index in range(60 + number)]


def ask(client: httpx.Client, number: int) -> list[int]:
    """The token ids of one answer."""
    asked = {"prompt": prompt(number), "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = client.post("/v1/completions", json={**asked, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


def undivided(model_folder: str) -> list[list[int]]:
    """The answers of one engine that lends nothing and loads nothing."""
    torch.set_num_threads(1)
    one = EngineConfig(name="one", kv_transfer_config={}, num_blocks=256)
    with build_engine(
        one, model_folder, dtype="float64", executor="inprocess", connect=False
    ) as engine:
        sampling = SamplingParams(max_tokens=16, ignore_eos=True)
        answers = engine.generate([prompt(number) for number in range(REQUESTS)], sampling)
    return [list(answer.token_ids) for answer in answers]


def loads(url: str) -> list[dict[str, object]]:
    """The loads of the decode engine's ranks; over new connections, as servers close idle ones."""
    health = httpx.get(f"{url}/health", timeout=None, trust_env=False).json()
    (decode,) = (one for one in health["engines"] if one["name"] == "d0")
    records = httpx.get(f"{decode['url']}/kvferry/records", timeout=None, trust_env=False).json()
    return [one for one in records["transfers"] if one["direction"] == "recv"]


@pytest.mark.slow
def test_a_starved_cluster_serves_every_request_with_the_tokens_of_an_undivided_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    with (
        Cluster.open(config(), logs=tmp_path / "logs", timeout_s=300) as cluster,
        httpx.Client(base_url=cluster.url, timeout=None, trust_env=False) as client,
        ThreadPoolExecutor(REQUESTS) as clients,
    ):
        with starved():
            answers = list(clients.map(lambda number: ask(client, number), range(REQUESTS)))
        assert answers == undivided(cluster.model_folder)
        read = loads(cluster.url)
        assert all(load["ok"] for load in read)
        assert len(read) == 2 * REQUESTS
