"""The proxies that people put in front of a pair of vLLM servers, each as it is.

vLLM's own counters tell whether the decode server got its prompts from the prefill server.
"""

import uuid
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from benchmarks.vllm_servers.client import complete, stream
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import Shape
from benchmarks.vllm_servers.server import PYTHON
from tests.vllm_servers.conftest import vllm_router

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
EXAMPLES = PYTHON.parents[1] / "examples"
OURS = KVFerry(extra={"cluster_key": "of one test run alone"})


def of_vllm(script, health):
    """One of vLLM's examples."""

    def command(prefill, decode, port):
        p, d = httpx.URL(prefill), httpx.URL(decode)
        ends = ["--prefiller-hosts", p.host, "--prefiller-ports", str(p.port)]
        ends += ["--decoder-hosts", d.host, "--decoder-ports", str(d.port)]
        own = ["--host", "127.0.0.1", "--port", str(port)]
        return [str(PYTHON), str(EXAMPLES / script), *own, *ends], health

    return command


@pytest.fixture(scope="module")
def pair(start_pair):
    with start_pair(tiny_model(), Shape(64), Shape(128), OURS) as pair:
        yield pair


def at_once(ask, prompts):
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(ask, prompts))


def whole(url):
    return lambda prompt: complete(url, prompt, 16).tokens


def streamed(url):
    return lambda prompt: stream(url, prompt, 16)[1]


@pytest.mark.parametrize(
    ("proxy", "ask"),
    [
        pytest.param(of_vllm("toy_proxy_server.py", "/healthcheck"), whole, id="toy proxy"),
        # It writes whole answers anew, without token ids.
        pytest.param(of_vllm("disagg_proxy_multiturn.py", "/health"), streamed, id="multi-turn"),
        pytest.param(vllm_router, whole, id="vllm-router"),
        pytest.param(vllm_router, streamed, id="vllm-router, streams"),
    ],
)
def test_two_dozen_requests(pair, through, prompts, expected, proxy, ask):
    before = pair.external_tokens()
    with through(proxy, pair) as url:
        assert at_once(ask(url), prompts) == expected
    assert pair.external_tokens() - before >= sum(map(len, prompts)) - 24
    assert pair.idle()


def test_requests_as_the_sidecar_of_llm_d_sends_them(pair, prompts, expected):
    asked = {
        **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
        "do_remote_decode": True,
        "do_remote_prefill": False,
    }

    def ask(prompt):
        body = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": 16,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": False,
        }
        headers = {"x-request-id": str(uuid.uuid4())}
        first = {**body, "max_tokens": 1, "kv_transfer_params": asked}
        with httpx.Client(headers=headers, timeout=120) as client:
            answer = client.post(f"{pair.prefill.url}/v1/completions", json=first)
            params = answer.raise_for_status().json()["kv_transfer_params"]
            second = {**body, "kv_transfer_params": params}
            answer = client.post(f"{pair.decode.url}/v1/completions", json=second)
        return answer.raise_for_status().json()["choices"][0]["token_ids"]

    before = pair.external_tokens()
    assert at_once(ask, prompts) == expected
    assert pair.external_tokens() - before >= sum(map(len, prompts)) - 24
    assert pair.idle()
