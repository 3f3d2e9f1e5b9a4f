"""Loads that cannot be, end as the policy says; both engines go on and get their blocks back."""

import time

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

pytestmark = pytest.mark.timed("A lease of 2 s ends while a kernel is compiled.")

QUICK = {
    "lease_duration_s": 2.0,
    "request_timeout_s": 2.0,
    "handshake_timeout_s": 6.0,
    "cluster_key": "a key of the whole cluster",
}


def generated(output):
    return list(output.outputs[0].token_ids)


def assert_at_rest(*engines):
    for engine in engines:
        engine.drain()
        assert engine.used_blocks == 0


def forged(params, prefill, decode):
    return params | {"ticket": params["ticket"][:-4] + "AAAA"}


def of_a_dead_engine(params, prefill, decode):
    prefill.close()
    return params


def of_an_expired_lease(params, prefill, decode):
    prefill.drain()
    return params


def without_a_ticket(params, prefill, decode):
    return {key: value for key, value in params.items() if key != "ticket"}


TROUBLES = [forged, of_a_dead_engine, of_an_expired_lease, without_a_ticket]


@pytest.mark.parametrize("trouble", TROUBLES)
def test_with_fail_the_request_ends_with_an_error(
    start_pair, reference, random_prompt, trouble, caplog
):
    prefill, decode = start_pair(extra=QUICK, policy="fail")
    prompt, other = random_prompt(200), random_prompt(90)
    (params,) = prefill.prefill([prompt])
    (output,) = decode.generate([prompt], [trouble(params, prefill, decode)])
    assert output.outputs[0].finish_reason == "error"
    assert generated(output) == []
    # The engine serves on.
    assert [generated(o) for o in decode.generate([other])] == reference([other])
    assert_at_rest(decode)


@pytest.mark.parametrize("trouble", TROUBLES)
def test_with_recompute_the_tokens_are_right_anyway(start_pair, reference, random_prompt, trouble):
    prefill, decode = start_pair(extra=QUICK, policy="recompute")
    prompt = random_prompt(200)
    (params,) = prefill.prefill([prompt])
    outputs = decode.generate([prompt], [trouble(params, prefill, decode)])
    assert [generated(output) for output in outputs] == reference([prompt])
    assert decode.prompt_tokens_from("external_kv_transfer") == 0
    assert_at_rest(decode)


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_that_fails_under_way_ends_by_the_policy(
    start_pair, reference, random_prompt, policy, monkeypatch, caplog
):
    from kvferry.connectors.pull.peer import SourcePeer
    from kvferry.errors import TransferError

    def broken(self, pair, source_rank, copies, after):
        raise TransferError("the wire broke")

    prefill, decode = start_pair(extra=QUICK, policy=policy)
    prompt = random_prompt(200)
    (params,) = prefill.prefill([prompt])
    monkeypatch.setattr(SourcePeer, "read", broken)
    (output,) = decode.generate([prompt], [params])
    assert "rank 0: TransferError: the wire broke" in caplog.text
    if policy == "fail":
        assert output.outputs[0].finish_reason == "error"
    else:
        assert [generated(output)] == reference([prompt])
    assert_at_rest(prefill, decode)


def test_the_ticket_of_another_prompt_is_refused(start_pair, reference, random_prompt):
    prefill, decode = start_pair(extra=QUICK, policy="recompute")
    prompts = [random_prompt(200), random_prompt(200)]
    outputs = decode.generate(prompts, prefill.prefill(prompts)[::-1])
    assert [generated(output) for output in outputs] == reference(prompts)
    assert decode.prompt_tokens_from("external_kv_transfer") == 0
    assert_at_rest(prefill, decode)


def test_two_checkpoints_of_one_shape_do_not_pair(start_pair, make_model, random_prompt, caplog):
    prefill, decode = start_pair(d_model=make_model(seed=99), extra=QUICK)
    prompt = random_prompt(100)
    with caplog.at_level("ERROR", logger="kvferry"):
        (output,) = decode.generate([prompt], prefill.prefill([prompt]))
    assert output.outputs[0].finish_reason == "error"
    assert "weights: prefill had " in caplog.text
    assert_at_rest(prefill, decode)


@pytest.mark.parametrize("steps", range(5))
def test_a_decode_request_may_be_aborted_at_any_step(start_pair, reference, random_prompt, steps):
    prefill, decode = start_pair(extra=QUICK)
    prompt, other = random_prompt(1500), random_prompt(80)
    (params,) = prefill.prefill([prompt])
    request = decode.add(prompt, params)
    for _ in range(steps):
        decode.step()
    decode.abort(request)
    assert [generated(o) for o in decode.generate([other])] == reference([other])
    assert_at_rest(prefill, decode)


@pytest.mark.parametrize("steps", range(3))
def test_a_prefill_request_may_be_aborted_at_any_step(start_pair, reference, random_prompt, steps):
    prefill, _ = start_pair(extra=QUICK)
    other = random_prompt(80)
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    request = prefill.add(random_prompt(300), asked, max_tokens=5)
    for _ in range(steps):
        prefill.step()
    prefill.abort(request)
    assert [generated(o) for o in prefill.generate([other])] == reference([other])
    assert_at_rest(prefill)


def test_blocks_that_nobody_fetches_come_back_with_their_lease(start_pair, random_prompt):
    prefill, _ = start_pair(extra=QUICK)
    prefill.prefill([random_prompt(200)])
    prefill.step()
    assert prefill.used_blocks > 0
    began = time.monotonic()
    assert_at_rest(prefill)
    assert time.monotonic() - began > 0.5


def test_a_prompt_that_decode_has_already_needs_no_load(start_pair, reference, random_prompt):
    prefill, decode = start_pair(extra=QUICK)
    prompt = random_prompt(129)  # two blocks, and the token that is computed anyway
    for _ in range(2):
        outputs = decode.generate([prompt], prefill.prefill([prompt]))
        assert [generated(output) for output in outputs] == reference([prompt])
    assert decode.prompt_tokens_from("external_kv_transfer") == 128
    assert_at_rest(prefill, decode)


def test_preempted_requests_go_on_with_right_tokens(start_pair, reference, random_prompt):
    # Room for three prompts and little more: answers grow until somebody has to give way.
    block = 2 * 3 * 4 * 64 * 32 * 4  # parts, layers, heads, tokens, elements, bytes
    prefill, decode = start_pair(
        d_kv_cache_memory_bytes=8 * block, d_max_model_len=256, extra=QUICK
    )
    prompts = [random_prompt(120) for _ in range(3)]
    outputs = decode.generate(prompts, prefill.prefill(prompts), max_tokens=40)
    assert [generated(output) for output in outputs] == reference(prompts, max_tokens=40)
    assert_at_rest(prefill, decode)


def test_a_decode_engine_that_is_gone_costs_prefill_nothing(start_pair, random_prompt):
    prefill, decode = start_pair(extra=QUICK)
    prompt = random_prompt(400)
    (params,) = prefill.prefill([prompt])
    decode.add(prompt, params)
    for _ in range(20):
        decode.step()
    decode.close()
    assert_at_rest(prefill)


def test_prompt_logprobs_leave_the_prompt_to_decode(start_pair, reference, random_prompt):
    prefill, decode = start_pair(extra=QUICK)
    prompt = random_prompt(100)
    params = prefill.prefill([prompt])
    outputs = decode.generate([prompt], params, prompt_logprobs=1)
    assert [generated(output) for output in outputs] == reference([prompt])
    assert decode.prompt_tokens_from("external_kv_transfer") == 0
    assert_at_rest(prefill, decode)
