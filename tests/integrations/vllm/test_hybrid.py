"""Models of which some layers keep a window of tokens only, in a group of their own."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

LENGTHS = (5, 99, 101, 163, 164, 165, 228, 229, 400, 900)


def pair_of(start_pair, model, **settings):
    return start_pair(p_model=model, d_model=model, **settings)


def generated(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_windows_are_groups_of_their_own(start, tiny_hybrid):
    engine = start("kv_producer", tiny_hybrid)
    windows = [group.description.sliding_window for group in engine.connector._scheduler._groups]
    assert sorted(windows, key=str) == [100, None]


def test_tokens_are_those_of_a_single_engine(start, start_pair, tiny_hybrid, random_prompt):
    # Lengths at which the window begins at the first token of a block, and beside it.
    prompts = [random_prompt(length) for length in LENGTHS]
    expected = generated(start(None, tiny_hybrid).generate(prompts))
    prefill, decode = pair_of(start_pair, tiny_hybrid)
    params = prefill.prefill(prompts)
    assert [p["remote_num_tokens"] for p in params] == [length - 1 for length in LENGTHS]
    assert generated(decode.generate(prompts, params)) == expected
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(LENGTHS) - len(LENGTHS)
    decode.drain()
    prefill.drain()
    assert (prefill.used_blocks, decode.used_blocks) == (0, 0)


def test_the_first_token_may_come_from_prefill(start, start_pair, tiny_hybrid, random_prompt):
    prompt = random_prompt(164)
    expected = generated(start(None, tiny_hybrid).generate([prompt]))
    prefill, decode = pair_of(start_pair, tiny_hybrid)
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "keep_first_token": True}
    (output,) = prefill.generate([prompt], [asked], max_tokens=1)
    first = list(output.outputs[0].token_ids)
    rest = decode.generate([prompt + first], [output.kv_transfer_params], max_tokens=11)
    assert [first + generated(rest)[0]] == expected


def test_loaded_windows_serve_as_prefix_hits(start, start_pair, tiny_hybrid, random_prompt):
    shared = random_prompt(320)
    prompts = [shared + random_prompt(90), shared + random_prompt(40)]
    expected = generated(start(None, tiny_hybrid).generate(prompts))
    prefill, decode = pair_of(start_pair, tiny_hybrid)
    found = []
    for prompt in prompts:
        found += generated(decode.generate([prompt], prefill.prefill([prompt])))
    assert found == expected


def test_a_window_that_cannot_fill_whole_blocks_is_refused(
    start_pair, tiny_hybrid, random_prompt, caplog
):
    # Prefill keeps the window in one block of 64 of the two that a block of 128 of decode holds.
    prefill, decode = pair_of(start_pair, tiny_hybrid, d_block_size=128)
    prompt = random_prompt(64 * 5 + 101)
    with caplog.at_level("ERROR", logger="kvferry"):
        (output,) = decode.generate([prompt], prefill.prefill([prompt]))
    assert output.outputs[0].finish_reason == "error"
    assert "would fill a part of what this engine keeps" in caplog.text
