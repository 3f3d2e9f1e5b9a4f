"""Speculative decoding: the KV of the model that drafts moves beside that of the model itself.

Answers are the same whatever is drafted, so what tells right KV of a draft from wrong one is how
many of its tokens are accepted. Here the model drafts for itself, which is accepted always.
"""

import json

import pytest

vllm = pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from tests.integrations.vllm.conftest import assert_all_arrived

NUM_DRAFTS = 3
can_draft = pytest.mark.skipif(
    vllm.__version__.startswith("0.30."), reason="the build of vLLM 0.30 for CPUs cannot draft"
)
LENGTHS = (65, 129, 321)
"""Tokens: a prefix hit may cover all of them but the last."""


def drafts_of(model, method="draft_model"):
    """The settings of an engine whose tokens a model drafts."""
    settings = {"method": method, "model": str(model), "num_speculative_tokens": NUM_DRAFTS}
    return {"speculative_config": settings, "extra": {"record_digests": True}}


def drafts_in(engine):
    """vLLM's own counts, so far: of rounds of drafts, of draft tokens, and of those accepted.

    They are those of the engine that was started last: engines of one process share their names.
    """
    figures = engine.llm.get_metrics()
    return [
        sum(int(each.value) for each in figures if each.name == f"vllm:spec_decode_num_{count}")
        for count in ("drafts", "draft_tokens", "accepted_tokens")
    ]


def generated(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture
def after_hits(start, tiny_llama):
    """``after_hits(prompts)``: tokens and drafts of an engine without a connector.

    Of each prompt it has all tokens but the last one in its prefix cache, as decode has them after
    a load. (vLLM 0.32 on a CPU rejects the first drafts after a step with one token of a prompt.)
    """

    def ask(prompts):
        alone = start(None, speculative_config=drafts_of(tiny_llama)["speculative_config"])
        for prompt in prompts:
            alone.generate([prompt])
        before = drafts_in(alone)
        found = [generated(alone.generate([prompt]))[0] for prompt in prompts]
        return found, [now - then for now, then in zip(drafts_in(alone), before, strict=True)]

    return ask


def ask_one_by_one(prefill, decode, prompts, between=lambda: None):
    """Tokens and drafts of a decode engine that loads each prompt."""
    before, found = drafts_in(decode), []
    for prompt in prompts:
        params = prefill.prefill([prompt])
        between()
        found += generated(decode.generate([prompt], params))
        decode.drain()
        prefill.drain()
    return found, [now - then for now, then in zip(drafts_in(decode), before, strict=True)]


@can_draft
def test_drafts_are_accepted_as_after_a_prefix_hit(
    start_pair, tiny_llama, after_hits, random_prompt
):
    prompts = [random_prompt(length) for length in LENGTHS]
    expected, counts = after_hits(prompts)
    prefill, decode = start_pair(**drafts_of(tiny_llama))
    assert ask_one_by_one(prefill, decode, prompts) == (expected, counts)
    assert counts[2] > counts[1] // 2
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(LENGTHS) - len(LENGTHS)
    assert (prefill.used_blocks, decode.used_blocks) == (0, 0)


@pytest.mark.slow
@can_draft
def test_wrong_kv_of_the_draft_shows_in_what_is_accepted_and_not_in_the_answer(
    start_pair, tiny_llama, after_hits, random_prompt
):
    prompts = [random_prompt(length) for length in LENGTHS]
    expected, (_, drafted, accepted) = after_hits(prompts)
    prefill, decode = start_pair(**drafts_of(tiny_llama))

    def spoil():
        layers = prefill.llm.llm_engine.vllm_config.compilation_config.static_forward_context
        for name, layer in layers.items():
            if name.startswith("draft_model."):
                layer.kv_cache.normal_()

    found, counts = ask_one_by_one(prefill, decode, prompts, spoil)
    assert found == expected
    assert counts[2] * drafted < accepted * counts[1]


def write_tiny_eagle(folder, target):
    """A random EAGLE head of one layer, which shares the target's last one."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaModel

    torch.manual_seed(3)
    values = json.loads((target / "config.json").read_text()) | {"num_hidden_layers": 1}
    config = LlamaConfig(**values)
    tensors = {
        name: tensor.contiguous()
        for name, tensor in LlamaModel(config).state_dict().items()
        if name not in ("norm.weight", "layers.0.input_layernorm.weight")
    }
    tensors["fc.weight"] = torch.randn(config.hidden_size, 2 * config.hidden_size) * 0.1
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@can_draft
def test_every_cell_of_an_eagle_head_arrives(
    start_pair, tiny_llama, reference, records, random_prompt, tmp_path
):
    prompts = [random_prompt(length) for length in (2, 64, 65, 300)]
    expected = reference(prompts)
    head = write_tiny_eagle(tmp_path / "eagle", tiny_llama)
    prefill, decode = start_pair(**drafts_of(head, "eagle"), d_block_size=128)
    (group,) = decode.connector.connector_scheduler.groups
    assert group.geometry.layer_indices == (0, 1, 2, 3)
    sent, received = records(prefill), records(decode)
    assert generated(decode.generate(prompts, prefill.prefill(prompts))) == expected
    decode.drain()
    prefill.drain()
    assert_all_arrived(sent, received, len(prompts))
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(map(len, prompts)) - 4


def test_engines_with_and_without_drafts_do_not_pair(start, tiny_llama, random_prompt):
    prefill, decode = start("kv_producer"), start("kv_consumer", **drafts_of(tiny_llama))
    params = prefill.prefill([random_prompt(70)])
    (output,) = decode.generate([random_prompt(70)], params)
    assert output.outputs[0].finish_reason == "error"
