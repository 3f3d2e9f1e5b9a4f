"""Real vLLM engines lend what their prefix cache has; they compute one token for it."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.integrations.vllm.compat import release

finds_prefixes = pytest.mark.skipif(
    not release.takes_failed_requests,
    reason="before 0.30 decode takes such models without its prefix cache",
)
ONLY_CACHED = {"do_remote_decode": True, "do_remote_prefill": False, "only_cached": True}
NOTHING = {"do_remote_prefill": False, "do_remote_decode": False, "remote_num_tokens": 0}


def generated(engine, prompt, params=None, max_tokens=12):
    (output,) = engine.generate([prompt], [params], max_tokens=max_tokens)
    return list(output.outputs[0].token_ids), output.kv_transfer_params


def lent(engine, prompt):
    """What is answered to a request for what is cached, for which one token is computed."""
    before = engine.prompt_tokens_from("local_compute")
    _, params = generated(engine, prompt, ONLY_CACHED, max_tokens=1)
    assert engine.prompt_tokens_from("local_compute") == before + 1
    return params


def drained(*engines):
    for engine in engines:
        engine.drain()
    assert [engine.used_blocks for engine in engines] == [0] * len(engines)


def test_an_engine_lends_what_it_has_cached_generated_tokens_included(
    start, reference, random_prompt
):
    decode = start("kv_both", block_size=64)
    prefill = start("kv_both", block_size=128)
    history = random_prompt(150)
    answer, _ = generated(decode, history, max_tokens=60)
    question = history + answer + random_prompt(40)
    params = lent(decode, question)
    assert params["remote_num_tokens"] == 192, "of 209 tokens that were computed"
    found, params = generated(prefill, question, params | {"do_remote_decode": True})
    assert [found] == reference([question])
    assert prefill.prompt_tokens_from("external_kv_transfer") == 192
    # The other engine lends on what it has borrowed and computed.
    assert params["remote_num_tokens"] == len(question)
    third = start("kv_both", block_size=32)
    found, _ = generated(third, question, params)
    assert [found] == reference([question])
    assert third.prompt_tokens_from("external_kv_transfer") == len(question) - 1
    drained(decode, prefill, third)


def test_a_prompt_of_which_nothing_is_cached_is_answered(start, reference, random_prompt):
    engine = start("kv_both")
    prompt = random_prompt(300)
    assert lent(engine, prompt) == NOTHING
    found, _ = generated(engine, prompt, NOTHING)
    assert [found] == reference([prompt])
    # The one token that was computed of the prompt is no prefix of anything wrong.
    assert lent(engine, prompt)["remote_num_tokens"] == 256


@finds_prefixes
def test_windows_are_lent(start, tiny_hybrid, random_prompt):
    lender = start("kv_both", tiny_hybrid)
    borrower = start("kv_both", tiny_hybrid, block_size=32)
    prompt = random_prompt(300)
    generated(lender, prompt, max_tokens=1)
    longer = prompt + random_prompt(50)
    params = lent(lender, longer)
    assert params["remote_num_tokens"] == 256
    expected, _ = generated(start(None, tiny_hybrid), longer)
    found, _ = generated(borrower, longer, params)
    assert found == expected
    assert borrower.prompt_tokens_from("external_kv_transfer") == 256
    drained(lender, borrower)


@finds_prefixes
def test_untaken_prefixes_are_withdrawn_when_blocks_are_lacking(start, reference, random_prompt):
    engine = start("kv_both", extra={"lease_duration_s": 600.0})
    blocks = engine.scheduler.kv_cache_manager.block_pool.num_gpu_blocks - 1
    prompt = random_prompt(64 * (blocks // 3))
    generated(engine, prompt, max_tokens=1)
    assert lent(engine, [*prompt, 1])["remote_num_tokens"] == len(prompt)
    assert engine.used_blocks == blocks // 3 + 1, "and that of the token that was computed"
    prompts = [random_prompt(64 * (blocks // 3)) for _ in range(3)]
    outputs = engine.generate(prompts, max_tokens=3)
    assert [list(o.outputs[0].token_ids) for o in outputs] == reference(prompts, 3)
    assert engine.connector.connector_scheduler.pull.counters()["prefixes_withdrawn"] == 1
    drained(engine)
