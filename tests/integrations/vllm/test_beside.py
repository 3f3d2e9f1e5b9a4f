"""kvferry beside another connector, under vLLM's MultiConnector, in either order."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.errors import ConfigError
from kvferry.integrations.vllm import KVFerryConnector, compat
from kvferry.integrations.vllm.compat import release
from kvferry.integrations.vllm.config import transfer_config

if release.lacks:
    pytest.skip("shown with the newest release only", allow_module_level=True)

EXTERNAL = "external_kv_transfer"
KEPT = {"cluster_key": "a key of the whole cluster", "lease_duration_s": 3600.0}
"""Leases that do not end by themselves while a test runs: who wants blocks back must say so."""
TIER = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostOffloadingSpec",
        "spec_module_path": "host_offloading",
        "cpu_bytes_to_use": 64 << 20,
    },
}
BLOCK = 2 * 3 * 4 * 64 * 32 * 4
"""Bytes: parts, layers, heads, tokens, elements."""


def tier(**extra):
    found: Any = copy.deepcopy(TIER)
    found["kv_connector_extra_config"] |= extra
    return found


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    folder = Path(__file__).parents[2] / "vllm_servers" / "plugin"
    monkeypatch.syspath_prepend(folder)


@pytest.fixture(params=["after", "before"], ids=["kvferry first", "tier first"])
def order(request):
    return request.param


def generated(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_at_rest(*engines):
    for engine in engines:
        engine.drain()
        assert engine.used_blocks == 0


def through(prefill, decode, prompts):
    return generated(decode.generate(prompts, prefill.prefill(prompts)))


def forget_prefixes(*engines):
    """Empties vLLM's own prefix cache; what is in the tier stays."""
    for engine in engines:
        engine.drain()
        assert engine.llm.reset_prefix_cache()


def test_decode_loads_from_prefill(start_pair, reference, random_prompt, order):
    prefill, decode = start_pair(extra=KEPT, p_block_size=32, **{order: [tier()]})
    prompts = [random_prompt(length) for length in (5, 64, 65, 300, 1100)]
    assert through(prefill, decode, prompts) == reference(prompts)
    external = sum(len(prompt) - 1 for prompt in prompts)
    assert decode.prompt_tokens_from(EXTERNAL) == external
    assert_at_rest(prefill, decode)


def test_prefill_lends_what_its_tier_had(start_pair, reference, random_prompt, order):
    prefill, decode = start_pair(extra=KEPT, **{f"p_{order}": [tier()]})
    prompts = [random_prompt(length) for length in (130, 300)]
    assert generated(prefill.generate(prompts)) == reference(prompts)
    forget_prefixes(prefill)
    assert through(prefill, decode, prompts) == reference(prompts)
    assert prefill.prompt_tokens_from(EXTERNAL) == 128 + 256
    assert decode.prompt_tokens_from(EXTERNAL) == 129 + 299
    assert_at_rest(prefill, decode)


def test_a_prompt_that_both_have_is_loaded_by_the_first_of_them(
    start_pair, reference, random_prompt, order
):
    prefill, decode = start_pair(extra=KEPT, **{f"d_{order}": [tier()]})
    prompt = random_prompt(300)
    assert through(prefill, decode, [prompt]) == reference([prompt])
    forget_prefixes(decode)
    before = decode.prompt_tokens_from(EXTERNAL)
    assert through(prefill, decode, [prompt]) == reference([prompt])
    loaded = decode.prompt_tokens_from(EXTERNAL) - before
    assert loaded == (299 if order == "after" else 256)
    # Whoever was not chosen has let go of what it held for the request.
    assert_at_rest(prefill, decode)


def test_what_was_loaded_from_prefill_is_right_in_the_tier(
    start_pair, reference, random_prompt, order
):
    prefill, decode = start_pair(extra=KEPT, p_block_size=32, **{f"d_{order}": [tier()]})
    prompts = [random_prompt(300) for _ in range(4)]
    assert through(prefill, decode, prompts) == reference(prompts)
    forget_prefixes(decode)
    before = decode.prompt_tokens_from(EXTERNAL)
    assert generated(decode.generate(prompts)) == reference(prompts)
    assert decode.prompt_tokens_from(EXTERNAL) - before == 4 * 256
    assert_at_rest(prefill, decode)


@pytest.mark.parametrize("steps", range(5))
def test_requests_may_be_aborted_at_any_step(start_pair, reference, random_prompt, order, steps):
    prefill, decode = start_pair(extra=KEPT, **{order: [tier()]})
    known, fresh, other = random_prompt(700), random_prompt(700), random_prompt(80)
    assert through(prefill, decode, [known]) == reference([known])
    forget_prefixes(prefill, decode)
    params = prefill.prefill([known, fresh])
    requests = [decode.add(prompt, p) for prompt, p in zip([known, fresh], params, strict=True)]
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    requests_of_prefill = [prefill.add(prompt, asked, max_tokens=5) for prompt in (known, fresh)]
    for _ in range(steps):
        prefill.step()
        decode.step()
    decode.abort(*requests)
    prefill.abort(*requests_of_prefill)
    assert through(prefill, decode, [other]) == reference([other])
    assert_at_rest(prefill, decode)


def test_a_store_ends_before_a_load_writes_to_its_blocks(
    start_pair, reference, random_prompt, order
):
    # The tier copies so late that only somebody who waits for it lets it end in time, and there
    # is room for one prompt of the two.
    prefill, decode = start_pair(
        extra=KEPT,
        d_kv_cache_memory_bytes=7 * BLOCK,
        d_max_model_len=384,
        **{f"d_{order}": [tier(copy_steps=2000)]},
    )
    first, second = random_prompt(320), random_prompt(320)
    assert generated(decode.generate([first], max_tokens=1)) == reference([first], max_tokens=1)
    assert through(prefill, decode, [second]) == reference([second])
    decode.drain()
    before = decode.prompt_tokens_from(EXTERNAL)
    assert generated(decode.generate([first])) == reference([first])
    assert decode.prompt_tokens_from(EXTERNAL) - before >= 64
    assert_at_rest(prefill, decode)


def forged(params):
    return params | {"ticket": params["ticket"][:-4] + "AAAA"}


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_the_policy_of_multi_connector_is_the_one_that_counts(
    start_pair, reference, random_prompt, order, policy
):
    prefill, decode = start_pair(extra=KEPT, policy=policy, **{f"d_{order}": [tier()]})
    prompt, other = random_prompt(200), random_prompt(90)
    (params,) = prefill.prefill([prompt])
    (output,) = decode.generate([prompt], [forged(params)])
    if policy == "fail":
        assert output.outputs[0].finish_reason == "error"
    else:
        assert generated([output]) == reference([prompt])
    assert through(prefill, decode, [other]) == reference([other])
    assert_at_rest(decode)


def test_figures_of_both_are_reported(start_pair, random_prompt, order):
    prefill, decode = start_pair(extra=KEPT, **{order: [tier()]})
    through(prefill, decode, [random_prompt(200)])
    decode.drain()
    from prometheus_client import REGISTRY

    assert REGISTRY.get_sample_value(
        "vllm:kvferry_load_seconds_count",
        {"model_name": decode.llm.llm_engine.model_config.served_model_name, "engine": "0"},
    )


@pytest.fixture
def other_model(make_model):
    return make_model(seed=99)


@pytest.fixture
def answer_of(start):
    """Greedy answers of an engine without a connector and prefix cache."""

    @functools.cache
    def answers(model, prompt):
        engine = start(None, model, enable_prefix_caching=False)
        return generated(engine.generate([list(prompt)]))

    return lambda model, prompt: answers(model, tuple(prompt))


@pytest.mark.parametrize("meanwhile", ["nothing", "a request runs", "a prompt is lent"])
def test_a_tier_forgets_kv_of_older_weights(
    start, tiny_llama, other_model, random_prompt, answer_of, order, meanwhile
):
    engine = start("kv_both", extra=KEPT, **{order: [tier(copy_steps=4)]})
    prompt = random_prompt(300)
    expected = answer_of(tiny_llama, prompt), answer_of(other_model, prompt)
    assert expected[0] != expected[1]
    running = meanwhile == "a request runs"
    if running:
        request = engine.add(prompt, max_tokens=20)
        for _ in range(2):
            engine.step()
    else:
        assert generated(engine.generate([prompt])) == expected[0]
    if meanwhile == "a prompt is lent":
        engine.prefill([prompt])
    path = {"weights_path": str(other_model)}
    engine.llm.collective_rpc("reload_weights", kwargs=path)
    if running:
        engine.finish(request)
    engine.drain()
    assert generated(engine.generate([prompt])) == expected[1]
    assert engine.prompt_tokens_from(EXTERNAL) == 0
    # What was computed since is kept again.
    forget_prefixes(engine)
    assert generated(engine.generate([prompt])) == expected[1]
    assert engine.prompt_tokens_from(EXTERNAL) == 256
    assert_at_rest(engine)


def test_windows_of_equal_blocks(start, start_pair, tiny_hybrid, random_prompt, order):
    prompts = [random_prompt(length) for length in (60, 300, 700)]
    expected = generated(start(None, tiny_hybrid).generate(prompts))
    settings = {"p_model": tiny_hybrid, "d_model": tiny_hybrid, order: [tier()]}
    prefill, decode = start_pair(extra=KEPT, **settings)
    assert through(prefill, decode, prompts) == expected
    forget_prefixes(prefill, decode)
    assert through(prefill, decode, prompts) == expected
    forget_prefixes(decode)
    assert generated(decode.generate(prompts)) == expected
    assert_at_rest(prefill, decode)


def test_blocks_that_a_load_would_fill_in_part_are_refused(
    start_pair, tiny_hybrid, random_prompt, order, caplog
):
    settings = {"p_model": tiny_hybrid, "d_model": tiny_hybrid, f"d_{order}": [tier()]}
    prefill, decode = start_pair(extra=KEPT, d_block_size=128, **settings)
    prompt = random_prompt(64 * 5 + 101)  # prefill keeps half of the block where a window begins
    (output,) = decode.generate([prompt], prefill.prefill([prompt]))
    assert output.outputs[0].finish_reason == "error"
    assert "give both engines the same block size" in caplog.text
    assert_at_rest(prefill, decode)


def test_a_second_connector_between_engines_is_refused(start, order):
    ours = {
        "kv_connector": "KVFerryConnector",
        "kv_connector_module_path": "kvferry.integrations.vllm",
        "kv_role": "kv_both",
    }
    with pytest.raises(ConfigError, match="KVFerryConnector stands beside KVFerryConnector"):
        start("kv_both", **{order: [ours]})


def test_another_connector_is_refused_where_vllm_gives_no_cache_manager(start, order, monkeypatch):
    monkeypatch.setattr(release, "gives_cache_manager", False)
    start("kv_both").close()
    with pytest.raises(
        ConfigError, match=r"MultiConnector: before 0\.30 .* KVFerryConnector alone"
    ):
        start("kv_both", **{order: [tier()]})


def test_the_example_in_the_docs_is_valid():
    from types import SimpleNamespace

    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

    page = (Path(__file__).parents[3] / "docs" / "vllm" / "requests.md").read_text()
    shown = page.partition("## Beside other connectors")[2].partition("```json")[2]
    config = KVTransferConfig(**json.loads(shown.partition("```")[0]))
    parallel = SimpleNamespace(
        data_parallel_index=0,
        prefill_context_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
    )
    engine = SimpleNamespace(kv_transfer_config=config, parallel_config=parallel)
    (ours, ours_config), (theirs, _) = MultiConnector._get_connector_classes_and_configs(engine)
    assert (ours, theirs.__name__) == (KVFerryConnector, "OffloadingConnector")
    found, extra = transfer_config(ours_config)
    assert (found.engine_id, found.kv_port, extra.peers) == (
        "decode-0",
        14579,
        ("10.0.0.1:14579",),
    )


def test_a_connector_that_is_alone_finds_nobody_beside_it(start):
    engine = start("kv_both")
    assert compat.connectors_beside(engine.connector) is None
