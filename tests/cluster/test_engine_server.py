"""The HTTP server of an engine, over the simulated engine: no model, real scheduler and loop."""

import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.cluster import engine_server
from kvferry.engine import loop as loops
from kvferry.engine.engine import Engine
from kvferry.errors import WorkerDiedError
from kvferry.observe.records import TransferRecord
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import PROMPT, leave
from tests.engine.toy_cache import reference_tokens


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


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
def test_a_stream_has_a_chunk_per_token_then_usage_then_done(served, options):
    *chunks, usage, done = served.stream(**options)

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
    ],
)
def test_bad_requests_are_a_400(served, body, message):
    response = served.complete(**body)

    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


def test_a_refused_ticket_is_not_the_clients_fault(served):
    # The router drops what clients send as tickets: this one came from another engine.
    response = served.complete(kv_transfer_params={"refuse": True})

    assert response.status_code == 500
    assert response.json()["error"]["code"] == "TicketError"


def test_a_live_id_cannot_be_used_twice(served):
    # Its blocks are lent out for many steps after its end, and so is its id.
    served.complete("twin", kv_transfer_params={"lend_steps": 100_000})

    response = served.complete("twin")

    assert response.status_code == 400
    assert "'twin' is in use" in response.json()["error"]["message"]


def test_a_client_that_leaves_ends_its_request(served):
    body = {"prompt": PROMPT, "max_tokens": 120, "kv_transfer_params": {"ask_later": 10**9}}

    def waiting(count):
        return f'live_requests{{state="waiting"}} {count}' in served.client.get("/metrics").text

    leave(served.client, lambda: waiting(1.0), **body)

    until(lambda: waiting(0.0))
    (summary,) = served.client.get("/kvferry/records").json()["requests"]
    assert summary["finish_reason"] == "abort"


def test_prompts_that_were_refused_or_left_are_not_counted_as_computed(served):
    def waits():
        return 'live_requests{state="waiting"} 1.0' in served.client.get("/metrics").text

    assert served.complete("refused", prompt=[1] * 5000).status_code == 400
    leave(served.client, waits, prompt=PROMPT, kv_transfer_params={"ask_later": 10**9})
    until(lambda: len(served.client.get("/kvferry/records").json()["requests"]) == 2)
    served.complete("computed")

    assert 'prompt_tokens_total{source="computed"} 5.0' in served.wait_idle()


def test_what_will_be_fetched_by_nobody_is_handed_to_the_connector(served):
    params = {"ticket": "from e0"}

    assert served.client.post("/kvferry/take_back", json={"kv_transfer_params": params}).is_success
    assert served.client.post("/kvferry/take_back", json={"ticket": "x"}).status_code == 400

    assert [call for call in served.connector.calls if call[0] == "take_back"] == [
        ("take_back", str(params))
    ]


def test_what_a_request_lends_is_taken_back_by_its_id(served):
    def give_back(*ids):
        assert served.client.post("/kvferry/take_back", json={"request_ids": ids}).is_success

    def taken_back():
        return [call for call in served.connector.calls if call[0] == "take_back"]

    give_back("r")  # a request that comes later is served
    assert served.complete("r", kv_transfer_params={"lend_steps": 100_000}).is_success
    assert not taken_back()
    give_back("another", "r")
    until(taken_back)

    with ThreadPoolExecutor(1) as clients:
        later = {"ask_later": 10**9}
        answer = clients.submit(served.complete, "late", kv_transfer_params=later)
        until(lambda: 'live_requests{state="waiting"} 1.0' in served.client.get("/metrics").text)
        give_back("late")
        assert answer.result(WAIT_S).json()["error"]["code"] == "aborted"


def test_a_request_with_an_id_in_use_takes_nothing_back(served):
    served.complete("twin", kv_transfer_params={"lend_steps": 100_000})

    assert served.complete("twin").status_code == 400

    assert not [call for call in served.connector.calls if call[0] == "take_back"]


def test_a_client_that_leaves_with_an_id_in_use_ends_its_own_request_alone(served, monkeypatch):
    submit, submitted = served.loop.submit, []

    def noted(*args, **kwargs):
        submitted.append(submit(*args, **kwargs))
        return submitted[-1]

    monkeypatch.setattr(served.loop, "submit", noted)
    served.client.headers["x-request-id"] = "twin"
    served.loop.pause()
    with ThreadPoolExecutor(1) as clients:
        stays = clients.submit(served.complete, "twin")
        until(lambda: len(submitted) == 1)
        leave(served.client, lambda: len(submitted) == 2, prompt=PROMPT)
        until(lambda: served.client.get("/kvferry/records").json()["requests"])
        served.loop.resume()

        choice = stays.result(WAIT_S).json()["choices"][0]

    assert choice["token_ids"] == reference_tokens(PROMPT, 6, 64)


def test_what_is_lent_by_an_answer_that_nobody_waits_for_any_more_is_taken_back(served):
    """The client goes away in the step in which the engine ends its request."""
    ended, aborted = threading.Event(), threading.Event()
    deliver, abort = served.loop._deliver, served.loop.abort

    def deliver_late(output):
        ended.set()
        assert aborted.wait(WAIT_S)
        deliver(output)

    served.loop._deliver = deliver_late
    served.loop.abort = lambda request: (abort(request), aborted.set())
    lent = {"lend_steps": 1}
    leave(served.client, ended.is_set, prompt=PROMPT, max_tokens=1, kv_transfer_params=lent)
    until(lambda: any(call[0] == "take_back" for call in served.connector.calls))


def test_a_dead_rank_is_a_503_everywhere(served):
    served.executor.kill(0)

    response = served.complete()

    assert response.status_code == 503
    assert "was killed" in response.json()["error"]["message"]
    assert served.failed.wait(WAIT_S)
    assert served.client.get("/health").status_code == 503
    assert served.complete("again").status_code == 503
    assert served.client.get("/metrics").status_code == 503


def test_the_model_and_its_longest_sequence_are_named(served):
    (model,) = served.client.get("/v1/models").json()["data"]

    assert (model["id"], model["max_model_len"]) == ("toy", 128)
    health = served.client.get("/health").json()
    assert health == {
        "status": "ok",
        "engine": "e0",
        "step_age_s": 0.0,
        "waiting_for_ranks": [],
        "kv_role": "kv_both",
        "control": None,
        "kv_events": None,
        "drain": None,
        "silent_peers": [],
        "at_once": False,
    }


def test_health_and_metrics_name_peers_that_do_not_answer(served, monkeypatch):
    line = 'kvferry_engine_silent_peer{peer="p0 (10.0.0.1:14579)"} 1.0'
    assert served.client.get("/health").json()["silent_peers"] == []
    silent = ("p0 (10.0.0.1:14579)",)
    monkeypatch.setattr(served.connector, "silent_peers", lambda: silent, raising=False)
    assert served.client.get("/health").json()["silent_peers"] == list(silent)
    assert line in served.client.get("/metrics").text
    monkeypatch.undo()
    assert line not in served.client.get("/metrics").text


@pytest.fixture
def frozen(served, monkeypatch):
    """A request whose step does not end before the event is set; one request ended before it."""
    assert served.complete("before").status_code == 200
    served.wait_idle()
    monkeypatch.setattr(engine_server, "SNAPSHOT_WAIT_S", 0.1)
    thaw = threading.Event()
    execute = served.executor.execute
    monkeypatch.setattr(served.executor, "waiting_for", lambda: (0,))
    monkeypatch.setattr(served.executor, "execute", lambda step: thaw.wait() and execute(step))
    answers = []
    client = threading.Thread(target=lambda: answers.append(served.complete("frozen")))
    client.start()
    yield thaw, answers
    thaw.set()
    client.join(WAIT_S)


def step_age(served):
    line = re.search(
        r"^kvferry_engine_step_age_seconds (.*)$", served.client.get("/metrics").text, re.M
    )
    assert line is not None
    return float(line[1])


def test_metrics_and_records_do_not_wait_for_a_step(served, frozen):
    thaw, answers = frozen
    until(lambda: step_age(served) > 0.3)
    for _ in range(5):
        metrics = served.client.get("/metrics").text
        assert 'kvferry_engine_requests_total{finish_reason="length"} 1.0' in metrics
        assert "kvferry_engine_kv_blocks" in metrics  # of the last snapshot
        records = served.client.get("/kvferry/records").json()
        assert [one["request_id"] for one in records["requests"]] == ["before"]
    assert not answers

    thaw.set()
    until(lambda: answers)
    assert answers[0].status_code == 200
    until(lambda: step_age(served) == 0)


def test_records_that_come_late_are_taken_in_once(served, frozen, monkeypatch):
    thaw, answers = frozen
    record = TransferRecord(
        request_id="r",
        lease_id="l",
        rank=0,
        peer="p",
        direction="recv",
        first_token=0,
        tokens=1,
        nbytes=8,
        copies=1,
        started=1.0,
        finished=2.0,
        ok=True,
    )
    told = [[record]]
    until(lambda: step_age(served) > 0.3)
    monkeypatch.setattr(Engine, "records", lambda _engine: told.pop() if told else [])
    for _ in range(3):
        assert served.client.get("/kvferry/records").json()["transfers"] == []
    thaw.set()
    until(lambda: answers)
    until(lambda: len(served.client.get("/kvferry/records").json()["transfers"]) == 1)
    assert len(served.client.get("/kvferry/records").json()["transfers"]) == 1


def test_a_stuck_step_makes_the_engine_unhealthy_until_it_ends(served, frozen, monkeypatch):
    thaw, answers = frozen
    until(lambda: step_age(served) > 0.3)
    early = served.client.get("/health")
    assert early.status_code == 200
    assert early.json()["step_age_s"] > 0.3
    assert early.json()["waiting_for_ranks"] == [0]

    with monkeypatch.context() as patch:
        patch.setattr(loops, "STUCK_STEP_S", 0.2)
        late = served.client.get("/health")
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "StuckStepError"
        assert re.fullmatch(
            r"the step has run for \d+ s and waits for rank 0", late.json()["error"]["message"]
        )
        assert late.json()["waiting_for_ranks"] == [0]

        until(lambda: answers)
        assert answers[0].status_code == served.complete("new").status_code == 503
    assert answers[0].json()["error"]["code"] == "StuckStepError"
    assert "waits for rank 0; the request is given up" in answers[0].json()["error"]["message"]
    thaw.set()
    until(lambda: served.client.get("/health").status_code == 200)
    assert served.complete("next").status_code == 200


def test_an_engine_that_drains_ends_what_it_has_and_takes_nothing_new(served, frozen):
    """One request is in its step, and the KV of another one is lent for some steps more."""
    thaw, answers = frozen
    until(lambda: step_age(served) > 0)
    asked = threading.Thread(target=lambda: served.client.post("/kvferry/drain"))
    asked.start()  # it is answered when the step has ended
    until(lambda: served.loop.admission.is_draining)

    refused = served.complete("late")

    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "DrainingError"
    assert served.client.get("/health").status_code == 200
    thaw.set()
    asked.join(WAIT_S)
    until(lambda: answers)
    assert answers[0].status_code == 200
    until(lambda: (served.client.get("/health").json()["drain"] or {}).get("is_over"))
    assert served.client.get("/health").json()["status"] == "draining"
    not_ready = served.client.get("/ready")
    assert not_ready.status_code == 503
    assert "takes no new requests" in not_ready.json()["error"]["message"]


def test_a_paused_engine_lets_requests_wait_until_it_resumes(served):
    assert served.client.post("/pause?mode=wait").json()["is_over"]
    assert served.client.get("/health").json()["status"] == "paused"
    answers = []
    asked = threading.Thread(target=lambda: answers.append(served.complete("late")))
    asked.start()
    time.sleep(0.3)
    assert not answers
    assert served.client.post("/resume").status_code == 200
    asked.join(WAIT_S)
    assert [each.status_code for each in answers] == [200]
    assert served.client.get("/health").json()["status"] == "ok"


def test_a_pause_in_another_mode_is_refused(served):
    refused = served.client.post("/pause")
    assert refused.status_code == 400
    assert "cannot 'abort'; give mode=wait" in refused.json()["error"]["message"]


def test_weights_that_an_engine_cannot_take_are_refused_by_name(served, tmp_path):
    refused = served.client.post("/kvferry/weights", json={"source": str(tmp_path)})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "ModelError")
    refused = served.client.post("/kvferry/weights", json={})
    assert refused.status_code == 400
    lent = served.complete("lender", max_tokens=1, kv_transfer_params={"lend_steps": 10**9})
    assert lent.status_code == 200
    refused = served.client.post("/kvferry/weights", json={"source": "tiny"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "EngineError")


@pytest.mark.parametrize(
    ("source", "cache", "status", "code"),
    [
        ("a" * 5000, "", 400, "ModelError"),
        ("a\0b", "", 400, "ModelError"),
        ("tiny", "/dev/null", 503, "HostError"),
    ],
)
def test_weights_that_cannot_be_read_or_kept_are_no_internal_error(
    served, monkeypatch, source, cache, status, code
):
    monkeypatch.setenv("KVFERRY_CACHE", cache)
    refused = served.client.post("/kvferry/weights", json={"source": source})
    assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)


def test_an_engine_that_loses_a_rank_while_it_takes_weights_is_unavailable(served, monkeypatch):
    def load_weights(engine, folder):
        raise WorkerDiedError("rank 1 of engine 'e' ended with exit code 1")

    monkeypatch.setattr(Engine, "load_weights", load_weights)
    refused = served.client.post("/kvferry/weights", json={"source": "tiny"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "WorkerDiedError")


def test_an_engine_has_not_drained_while_its_kv_is_lent(served):
    lent = served.complete("lender", max_tokens=1, kv_transfer_params={"lend_steps": 10**9})
    assert lent.status_code == 200
    assert served.client.get("/ready").status_code == 200

    drain = served.client.post("/kvferry/drain").json()

    assert drain == {"requests": 0, "loads": 0, "leases": 1, "is_over": False}
    (worker,) = served.executor.workers
    served.loop.call(lambda _: worker._lent.update(lender=1)).result(WAIT_S)
    until(lambda: served.client.get("/health").json()["drain"]["is_over"])
