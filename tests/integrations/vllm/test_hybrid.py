"""Models of which some layers keep a window of tokens only, in a group of their own."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.control.tickets import verify
from kvferry.errors import ConfigError
from kvferry.integrations.vllm.compat import release

finds_prefixes = pytest.mark.skipif(
    not release.takes_failed_requests,
    reason="before 0.30 decode takes such models without its prefix cache",
)
LENGTHS = (5, 99, 101, 163, 164, 165, 228, 229, 400, 900)


@pytest.fixture
def pair_of(start_pair, decodes_windows):
    return lambda model, **settings: start_pair(
        p_model=model, d_model=model, **(decodes_windows | settings)
    )


def generated(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_windows_are_groups_of_their_own(start, tiny_hybrid):
    engine = start("kv_producer", tiny_hybrid)
    windows = [
        group.geometry.sliding_window for group in engine.connector.connector_scheduler.groups
    ]
    assert sorted(windows, key=str) == [100, None]


def test_tokens_are_those_of_a_single_engine(start, pair_of, tiny_hybrid, random_prompt):
    # Lengths at which the window begins at the first token of a block, and beside it.
    prompts = [random_prompt(length) for length in LENGTHS]
    expected = generated(start(None, tiny_hybrid).generate(prompts))
    prefill, decode = pair_of(tiny_hybrid)
    params = prefill.prefill(prompts)
    assert [p["remote_num_tokens"] for p in params] == [length - 1 for length in LENGTHS]
    assert generated(decode.generate(prompts, params)) == expected
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(LENGTHS) - len(LENGTHS)
    decode.drain()
    prefill.drain()
    assert (prefill.used_blocks, decode.used_blocks) == (0, 0)


def test_the_first_token_may_come_from_prefill(start, pair_of, tiny_hybrid, random_prompt):
    prompt = random_prompt(164)
    expected = generated(start(None, tiny_hybrid).generate([prompt]))
    prefill, decode = pair_of(tiny_hybrid)
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "keep_first_token": True}
    (output,) = prefill.generate([prompt], [asked], max_tokens=1)
    first = list(output.outputs[0].token_ids)
    rest = decode.generate([prompt + first], [output.kv_transfer_params], max_tokens=11)
    assert [first + generated(rest)[0]] == expected


def test_a_decode_engine_that_computes_no_prompt_gets_all_its_tokens(
    pair_of, tiny_hybrid, random_prompt
):
    prefill, _ = pair_of(tiny_hybrid)
    prompt = random_prompt(164)
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "note_first_token": True}
    (output,) = prefill.generate([prompt], [asked], max_tokens=1)
    assert verify(output.kv_transfer_params["ticket"], None).num_tokens == len(prompt)


@finds_prefixes
def test_loaded_windows_serve_as_prefix_hits(start, pair_of, tiny_hybrid, random_prompt):
    shared = random_prompt(320)
    prompts = [shared + random_prompt(90), shared + random_prompt(40)]
    expected = generated(start(None, tiny_hybrid).generate(prompts))
    prefill, decode = pair_of(tiny_hybrid)
    found = []
    for prompt in prompts:
        found += generated(decode.generate([prompt], prefill.prefill([prompt])))
    assert found == expected


@finds_prefixes
@pytest.mark.parametrize(
    "settings",
    [
        # Prefill keeps the window in one block of the two that a block of decode holds.
        {"d_block_size": 128},
        # Decode keeps all tokens of all layers, and prefill has those before the window no more.
        {"d_disable_hybrid_kv_cache_manager": True},
    ],
    ids=["larger blocks", "no windows"],
)
def test_blocks_that_a_load_fills_in_part_are_no_prefix_hits(
    start, pair_of, tiny_hybrid, random_prompt, settings
):
    prompt = random_prompt(64 * 5 + 101)
    follower = prompt[: 128 * 3 + 6] + random_prompt(30)
    expected = generated(start(None, tiny_hybrid).generate([prompt, follower]))
    prefill, decode = pair_of(tiny_hybrid, **settings)
    found = generated(decode.generate([prompt], prefill.prefill([prompt])))
    assert decode.prompt_tokens_from("external_kv_transfer") == len(prompt) - 1
    found += generated(decode.generate([follower]))
    assert decode.prompt_tokens_from("local_cache_hit") == 0
    assert found == expected


def test_several_groups_are_refused_where_vllm_cannot_be_told_that_a_load_failed(
    start, tiny_hybrid, monkeypatch
):
    monkeypatch.setattr(release, "takes_failed_requests", False)
    start("kv_producer", tiny_hybrid)  # it loads nothing
    with pytest.raises(ConfigError, match=r"2 KV cache groups; before 0\.30.*--disable-hybrid-kv"):
        start("kv_consumer", tiny_hybrid)


def test_so_are_windows_alone_if_a_prompt_would_have_to_be_computed_anew(
    start, tiny_windows, monkeypatch
):
    monkeypatch.setattr(release, "takes_failed_requests", False)
    start("kv_consumer", tiny_windows, policy="fail")
    with pytest.raises(ConfigError, match=r"kv_load_failure_policy: recompute; before 0\.30"):
        start("kv_consumer", tiny_windows, policy="recompute")
