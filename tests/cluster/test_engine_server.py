"""The HTTP server of an engine, over the simulated engine: no model, real scheduler and loop."""

import json
import threading
import time

import httpx
import pytest

from kvferry.cluster.engine_server import EngineServer
from kvferry.engine.admission import SchedulerOptions
from kvferry.engine.loop import EngineLoop
from kvferry.engine.simulated import open_simulated
from kvferry.testing.toy_cache import reference_tokens

PROMPT = [1, 2, 3, 4, 5]


class Served:
    """An engine behind HTTP."""

    def __init__(self, servers, **options):
        scheduler = SchedulerOptions(vocab_size=64, **{"max_model_len": 128, **options})
        engine, self.executor, self.connector = open_simulated(scheduler, scripted=True)
        self.failed = threading.Event()
        self.loop = EngineLoop.open(engine, lambda _error: self.failed.set())
        server = EngineServer(self.loop, name="e0", model_name="toy", max_model_len=128)
        self.client = httpx.Client(
            base_url=servers.start(server.app()), timeout=20, trust_env=False
        )

    def complete(self, request_id="r", **body):
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, **body}
        headers = {"x-request-id": request_id}
        return self.client.post("/v1/completions", json=body, headers=headers)

    def stream(self, **body):
        body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0.0, "stream": True, **body}
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            lines = [line[6:] for line in response.iter_lines() if line.startswith("data: ")]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    def wait_idle(self):
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            metrics = self.client.get("/metrics").text
            if 'live_requests{state="running"} 0.0' in metrics:
                return metrics
            time.sleep(0.02)
        raise AssertionError("the engine is still busy")

    def close(self):
        self.client.close()
        self.loop.close()


@pytest.fixture
def make_served(servers):
    made = []

    def make(**options):
        made.append(Served(servers, **options))
        return made[-1]

    yield make
    for served in made:
        served.close()


@pytest.fixture
def served(make_served):
    return make_served()


def test_tokens_usage_and_reason_come_back(served):
    body = served.complete().json()

    assert body["id"] == "r"
    assert body["choices"][0]["token_ids"] == reference_tokens(PROMPT, 6, 64)
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 6,
        "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert body["kv_transfer_params"] is None


def test_a_stream_has_a_chunk_per_token_then_usage_then_done(served):
    *chunks, usage, done = served.stream()

    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [
        [token] for token in reference_tokens(PROMPT, 6, 64)
    ]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * 5 + ["length"]
    assert usage["usage"]["completion_tokens"] == 6
    assert done == "[DONE]"


def test_stop_tokens_end_an_answer(served):
    tokens = reference_tokens(PROMPT, 6, 64)

    choice = served.complete(stop_token_ids=[tokens[2]]).json()["choices"][0]

    first = tokens.index(tokens[2])
    assert choice["token_ids"] == tokens[: first + 1]
    assert choice["finish_reason"] == "stop"


def test_requests_with_external_tokens_are_loaded_and_told_apart(served):
    served.complete(kv_transfer_params={"external": 4})

    metrics = served.wait_idle()
    assert 'kvferry_engine_prompt_tokens_total{source="peer"} 4.0' in metrics
    (summary,) = served.client.get("/kvferry/records").json()["requests"]
    assert summary["num_external_tokens"] == 4
    assert summary["timings"]["load_started"] is not None
    assert len(summary["gaps"]) == 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_failed_load_is_a_500_and_never_tokens(served, stream):
    params = {"external": 4, "valid": 0, "report_failed": True}

    response = served.complete(kv_transfer_params=params, stream=stream)

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "TransferError"
    assert "could not be loaded" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"prompt": [1] * 200}, "the prompt has 200 tokens, max_model_len is 128"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [64]}, "token id 64"),
        ({"prompt": "text"}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"top_p": 0.0}, "top_p"),
        ({"max_token": 3}, "did you mean 'max_tokens'"),
        ({"kv_transfer_params": {"refuse": True}}, ""),
    ],
)
def test_bad_requests_are_a_400(served, body, message):
    response = served.complete(**body)

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_a_live_id_cannot_be_used_twice(served):
    # Its blocks are lent out for many steps after its end, and so is its id.
    served.complete("twin", kv_transfer_params={"lend_steps": 100_000})

    response = served.complete("twin")

    assert response.status_code == 400
    assert "'twin' is in use" in response.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_request(served):
    body = {"prompt": PROMPT, "max_tokens": 120, "kv_transfer_params": {"ask_later": 10**9}}

    with pytest.raises(httpx.ReadTimeout):
        served.client.post("/v1/completions", json=body, timeout=0.2)

    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        if 'live_requests{state="waiting"} 0.0' in served.client.get("/metrics").text:
            break
        time.sleep(0.02)
    (summary,) = served.client.get("/kvferry/records").json()["requests"]
    assert summary["finish_reason"] == "abort"


def test_a_dead_rank_is_a_503_everywhere(served):
    served.executor.kill(0)

    response = served.complete()

    assert response.status_code == 503
    assert "was killed" in response.json()["error"]["message"]
    assert served.failed.wait(5)
    assert served.client.get("/health").status_code == 503
    assert served.complete("again").status_code == 503
    assert served.client.get("/metrics").status_code == 503


def test_the_model_and_its_longest_sequence_are_named(served):
    (model,) = served.client.get("/v1/models").json()["data"]

    assert (model["id"], model["max_model_len"]) == ("toy", 128)
    assert served.client.get("/health").json() == {"status": "ok", "engine": "e0"}
