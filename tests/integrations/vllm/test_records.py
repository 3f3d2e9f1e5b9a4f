"""What real vLLM engines remember of a request, as ``kvferry trace`` asks for it."""

from functools import partial

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.control.client import ControlClient
from kvferry.observe.timeline import gather, handover

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def told(engine, request_id):
    """What an engine answers over its control channel."""
    port = engine.connector.connector_scheduler.pull.port
    with ControlClient(engine_id="test", incarnation="test") as client:
        (answer,) = gather(client, [f"127.0.0.1:{port}"], request_id)
    assert not answer.error
    return answer


def test_both_engines_tell_of_a_request(start_pair, random_prompt, monkeypatch):
    prefill, decode = start_pair()
    for engine in (prefill, decode):  # as with --otlp-traces-endpoint
        core = engine.llm.llm_engine
        add = partial(core.add_request, trace_headers={"traceparent": TRACEPARENT})
        monkeypatch.setattr(core, "add_request", add)
    prompt = random_prompt(200)
    (params,) = prefill.prefill([prompt])
    decode.generate([prompt], [params])
    decode.drain()
    prefill.drain()

    # At the target it is found by the id that it has at the source.
    answers = [told(engine, params["remote_request_id"]) for engine in (prefill, decode)]
    (lent,), (loaded,) = (answer.requests for answer in answers)

    assert [part.name for part in lent.parts] == ["front", "queue", "prefill", "untaken", "held"]
    assert lent.outcome == "lease done"
    names = {part.name for part in loaded.parts}
    assert names >= {"front", "lease", "wait", "load", "read", "confirm", "first token", "answer"}
    assert (loaded.peer_request_id, loaded.outcome) == (lent.request_id, "length")
    assert not any(part.is_open or part.error for part in lent.parts + loaded.parts)
    stretches = {stretch.name: stretch.seconds for stretch in handover(answers)}
    assert stretches.keys() >= {"answer and router", "front", "read", "report", "first token"}
    (prefilled,) = [part for part in lent.parts if part.name == "prefill"]
    (drawn,) = [part for part in loaded.parts if part.name == "answer"]
    whole = drawn.started - prefilled.started - prefilled.seconds
    assert sum(stretches.values()) == pytest.approx(whole, abs=0.01)
    assert (lent.traceparent, loaded.traceparent) == (TRACEPARENT, TRACEPARENT)
