"""Models with recurrent layers: a state per request beside the tokens' keys and values."""

from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

import torch
from vllm.distributed import parallel_state

from benchmarks.vllm_servers.checkpoints import write_falcon_h1, write_qwen3_next
from kvferry.errors import TransferError
from kvferry.integrations.vllm.compat import release
from tests.integrations.vllm.conftest import assert_all_arrived
from tests.integrations.vllm.test_weights import write_to_norms

if not release.serves_states:
    pytest.skip("older releases do not zero what a load leaves", allow_module_level=True)

LENGTHS = (2, 5, 100, 639, 640, 641, 642, 1281, 1500)
"""Tokens: on and beside the borders of blocks, and more than a step computes."""
MODELS: dict[str, Any] = {
    "gdn": (write_qwen3_next, {"dtype": "bfloat16"}),
    # Where vLLM 0.32 looks for prefixes, its Mamba2 of CPUs fails at prompts of several blocks: it
    # asks for states in their midst, which that kernel does not give.
    "mamba2": (write_falcon_h1, {"dtype": "float32", "enable_prefix_caching": False}),
}
HITS = {"enable_prefix_caching": True}
"""Of a decode engine that computes no prompt."""


@pytest.fixture(scope="session", params=list(MODELS))
def model(request, tmp_path_factory, _first_engine):
    """The settings of an engine that serves one of the models."""
    write, settings = MODELS[request.param]
    # Only a process whose first engine has experts makes the group of ranks that share them.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parallel_state, "_EP", parallel_state.get_tp_group())
        folder = write(tmp_path_factory.mktemp("states") / request.param)
        yield settings | {"model": folder, "kv_cache_memory_bytes": 64 << 20}


@pytest.fixture(scope="session")
def alone(model, _first_engine):
    """``alone(prompts)``: the tokens of an engine without a connector, one request at a time.

    It computes a prompt's last token in a step of its own, as decode does behind a load: kernels
    for prompts round bfloat16 otherwise than those for single tokens. With ``at_once`` it does not,
    as decode where it computes the prompt itself.
    """
    engine = type(_first_engine)(**(model | {"role": None, "enable_prefix_caching": False}))
    scheduler = engine.scheduler
    most = scheduler.max_num_scheduled_tokens

    def tokens_of(prompt, at_once):
        request_id = engine.add(prompt)
        ended: dict[str, Any] = {}
        while request_id not in ended:
            computed = max(each.num_computed_tokens for each in scheduler.requests.values())
            left = len(prompt) - 1 - computed
            scheduler.max_num_scheduled_tokens = most if at_once or left <= 0 else left
            ended |= {output.request_id: output for output in engine.step()}
        return list(ended[request_id].outputs[0].token_ids)

    return lambda prompts, at_once=False: [tokens_of(prompt, at_once) for prompt in prompts]


@pytest.fixture
def start_model(start, model):
    """``start_model(role, **settings)`` starts an engine with that model."""

    def starting(role, **settings):
        return start(role, **(model | {"extra": {"record_digests": True}} | settings))

    return starting


def generated(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def poison(engine):
    """Fills every block with bytes that are no numbers, as other requests' states may be."""
    layers = engine.llm.llm_engine.vllm_config.compilation_config.static_forward_context
    for layer in layers.values():
        cache = getattr(layer, "kv_cache", ())
        for tensor in (cache,) if isinstance(cache, torch.Tensor) else cache:
            tensor[1:].fill_(float("nan"))  # the null block stays as vLLM made it


def test_tokens_are_those_of_a_single_engine_and_every_cell_arrives(
    start_model, alone, records, random_prompt
):
    prompts = [random_prompt(length) for length in LENGTHS]
    expected = alone(prompts)
    prefill, decode = start_model("kv_producer"), start_model("kv_consumer", **HITS)
    poison(decode)
    sent, received = records(prefill), records(decode)
    found = []
    for prompt in prompts:
        params = prefill.prefill([prompt])
        assert params[0]["remote_num_tokens"] == len(prompt) - 1
        found += generated(decode.generate([prompt], params))
        decode.drain()
        prefill.drain()
    assert_all_arrived(sent, received, len(prompts))
    assert found == expected
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(LENGTHS) - len(LENGTHS)
    assert (prefill.used_blocks, decode.used_blocks) == (0, 0)


def test_every_cell_arrives_of_requests_that_run_together(start_model, records, random_prompt):
    prompts = [random_prompt(length) for length in (7, 650, 1290, 30, 641, 1100)]
    prefill, decode = start_model("kv_producer"), start_model("kv_consumer", **HITS)
    sent, received = records(prefill), records(decode)
    decode.generate(prompts, prefill.prefill(prompts))
    decode.drain()
    prefill.drain()
    assert_all_arrived(sent, received, len(prompts))
    assert (prefill.used_blocks, decode.used_blocks) == (0, 0)


def test_what_was_loaded_is_a_prefix_hit_and_the_rest_is_loaded_behind_it(
    start_model, alone, records, random_prompt
):
    shared = random_prompt(1300)
    prompts = [shared + random_prompt(40), shared + random_prompt(60)]
    expected = alone(prompts)
    prefill, decode = start_model("kv_producer"), start_model("kv_consumer", **HITS)
    sent, received = records(prefill), records(decode)
    # The first prompt ends where a block does, so that its state is one to go on from.
    block = decode.scheduler.block_size
    beginning = shared[: block + 1]
    decode.generate([beginning], prefill.prefill([beginning]))
    before = decode.prompt_tokens_from("external_kv_transfer")
    found = []
    for prompt in prompts:
        found += generated(decode.generate([prompt], prefill.prefill([prompt])))
    decode.drain()
    prefill.drain()
    assert_all_arrived(sent, received, 3)
    assert found == expected
    loaded = decode.prompt_tokens_from("external_kv_transfer") - before
    assert loaded == sum(len(prompt) - 1 - block for prompt in prompts)


def test_a_load_that_fails_half_way_leaves_no_state_behind(
    start_model, alone, random_prompt, monkeypatch
):
    from kvferry.connectors.pull.peer import SourcePeer  # loads Numba; see conftest.py

    prompts = [random_prompt(length) for length in (200, 700)]
    expected = alone(prompts, at_once=True)
    prefill = start_model("kv_producer")
    decode = start_model("kv_consumer", policy="recompute")
    params = [prefill.prefill([prompt])[0] for prompt in prompts]
    poison(decode)
    read, reads = SourcePeer.read, []

    def broken(self, *arguments):
        reads.append(arguments)
        if len(reads) % 2 == 0:
            raise TransferError("the wire broke")
        return read(self, *arguments)

    monkeypatch.setattr(SourcePeer, "read", broken)
    found = []
    for prompt, each in zip(prompts, params, strict=True):
        found += generated(decode.generate([prompt], [each]))
    assert found == expected
    assert decode.prompt_tokens_from("external_kv_transfer") == 0
    decode.drain()
    assert decode.used_blocks == 0


def test_prefill_without_a_prefix_cache_and_decode_with_one(
    start_model, alone, records, random_prompt
):
    prompts = [random_prompt(length) for length in (5, 640, 1300)]
    expected = alone(prompts)
    prefill = start_model("kv_producer", enable_prefix_caching=False)
    decode = start_model("kv_consumer", **HITS)
    sent, received = records(prefill), records(decode)
    found = []
    for prompt in prompts:
        found += generated(decode.generate([prompt], prefill.prefill([prompt])))
    decode.drain()
    prefill.drain()
    assert_all_arrived(sent, received, len(prompts))
    assert found == expected


def test_what_was_half_computed_with_older_weights_is_no_hit(start_model, model, random_prompt):
    if not model.get("enable_prefix_caching", True):
        pytest.skip("vLLM's Mamba2 of CPUs has no prefix cache")
    # Hits may end inside a block.
    engine = start_model("kv_both", prefix_match_unit=64, max_num_batched_tokens=128, **HITS)
    prompt = random_prompt(300)
    request = engine.add(prompt)
    engine.step()
    engine.llm.collective_rpc(write_to_norms)
    engine.finish(request)
    engine.generate([prompt], max_tokens=1)
    assert engine.prompt_tokens_from("local_cache_hit") == 0
    engine.generate([prompt], max_tokens=1)
    assert engine.prompt_tokens_from("local_cache_hit") == 256, "of what was computed since"
