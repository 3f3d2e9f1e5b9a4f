"""Real servers with vLLM's OffloadingConnector beside ours, under MultiConnector, in either order.

vLLM's own counters tell where the KV came from: from the other server, or from the tier.
"""

import contextlib
import dataclasses
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.vllm_servers.client import complete
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import Shape
from benchmarks.vllm_servers.server import NEWEST_VLLM, VLLM

pytestmark = pytest.mark.skipif(VLLM != NEWEST_VLLM, reason="shown with the newest release only")
PLUGIN = Path(__file__).parent / "plugin"
BLOCK = 64
"""Tokens; the tier keeps whole blocks."""
TIER = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "host_offloading",
        "cpu_bytes_to_use": 256 << 20,
    },
}
TIER_BYTES = "vllm:kv_offload_load_bytes_total"
OUR_LOADS = "vllm:kvferry_load_seconds_count"


@dataclasses.dataclass(frozen=True)
class Beside:
    """Ours and a tier, in some order."""

    ours_first: bool
    name: str = "kvferry beside a tier"

    def config(self, role, engine):
        ours = KVFerry(extra={"cluster_key": "of one test run alone"}).config(role, engine)
        outer = {key: ours.pop(key) for key in ("engine_id", "kv_load_failure_policy")}
        connectors = [ours, TIER] if self.ours_first else [TIER, ours]
        return {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": connectors},
            **outer,
        }

    def environment(self):
        return {"VLLM_SERVER_DEV_MODE": "1"}  # for /reset_prefix_cache


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(True, id="kvferry first"),
        pytest.param(False, id="tier first", marks=pytest.mark.slow),
    ],
)
def pair(request, start_pair):
    beside = Beside(request.param)
    with start_pair(tiny_model(), Shape(BLOCK), Shape(BLOCK), beside, path=(PLUGIN,)) as pair:
        yield pair


@pytest.fixture
def prompt_of(request):
    draw = random.Random(request.node.name)
    return lambda length: [draw.randrange(8, tiny_model().vocab_size) for _ in range(length)]


def total(server, name):
    """Of all samples of one name, whatever their labels."""
    return sum(value for key, value in server.metrics().items() if key.partition("{")[0] == name)


def forget_prefixes(server):
    assert httpx.post(f"{server.url}/reset_prefix_cache", timeout=60).status_code == 200


def test_two_dozen_requests_from_the_other_server_then_from_the_tier(pair, reference, prompt_of):
    prompts = [prompt_of(random.Random(index).randrange(3, 700)) for index in range(24)]
    expected = [reference.tokens(tiny_model(), prompt) for prompt in prompts]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda prompt: pair.ask(prompt).tokens, prompts)) == expected
    assert pair.external_tokens() >= sum(len(prompt) - 1 for prompt in prompts)
    assert total(pair.decode, OUR_LOADS) == 24
    assert total(pair.decode, TIER_BYTES) == 0
    assert pair.idle()
    forget_prefixes(pair.decode)
    before = pair.external_tokens()
    with ThreadPoolExecutor(8) as threads:
        alone = list(threads.map(lambda p: complete(pair.decode.url, p, 16).tokens, prompts))
    assert alone == expected
    # Whole blocks of each, but for the last token, which is computed.
    kept = sum((len(prompt) - 1) // BLOCK * BLOCK for prompt in prompts)
    assert pair.external_tokens() - before >= kept
    assert total(pair.decode, OUR_LOADS) == 24
    assert total(pair.decode, TIER_BYTES) > 0
    assert pair.idle()


@pytest.mark.slow
def test_clients_that_go_away_leave_no_blocks_behind(pair, reference, prompt_of):
    prompts = [prompt_of(1400) for _ in range(12)]
    for round_ in range(2):
        for index, prompt in enumerate(prompts):
            with contextlib.suppress(httpx.TimeoutException):
                pair.ask(prompt, 400, timeout_s=0.02 + 0.05 * index)
        other = prompt_of(200)
        assert pair.ask(other).tokens == reference.tokens(tiny_model(), other), round_
    assert pair.ask(prompts[0]).tokens == reference.tokens(tiny_model(), prompts[0])
    assert pair.idle(within_s=300)
