"""Configs of every kind: what is read, what is refused, and the KV cache that follows."""

import json
from typing import Any

import msgspec
import pytest

from kvferry.cache import (
    FullAttentionSpec,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from kvferry.cache.config_builder import group_layers
from kvferry.engine.model_config import DeepseekConfig, LlamaConfig, MinistralConfig, parse_config
from kvferry.engine.weights import fingerprint, load_model_config, prepare_model
from kvferry.engine.weights_folder import TINY_MODELS, TinyConfig, TinyLatent
from kvferry.errors import ModelError
from kvferry.topology import EngineGeometry, ParallelShape

COMMON = {
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
}
MISTRAL = COMMON | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2}
MINISTRAL = MISTRAL | {
    "architectures": ["MinistralForCausalLM"],
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
DEEPSEEK = COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": 4,
    "head_dim": 2,
    "kv_lora_rank": 10,
    "q_lora_rank": None,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 2,
    "v_head_dim": 5,
    "first_k_dense_replace": 4,
}


@pytest.mark.parametrize(
    ("values", "kind", "windows"),
    [
        (MISTRAL, LlamaConfig, {}),
        (MISTRAL | {"sliding_window": None}, LlamaConfig, {}),
        (MISTRAL | {"sliding_window": 8}, MinistralConfig, {0: 8, 1: 8, 2: 8, 3: 8}),
        (MINISTRAL, MinistralConfig, {0: 8, 2: 8}),
        (MINISTRAL | {"layer_types": None}, MinistralConfig, {0: 8, 1: 8, 2: 8, 3: 8}),
        (MINISTRAL | {"layer_types": ["full_attention"] * 4}, LlamaConfig, {}),
        (
            MINISTRAL | {"architectures": None, "model_type": "ministral"},
            MinistralConfig,
            {0: 8, 2: 8},
        ),
        (DEEPSEEK, DeepseekConfig, {}),
        (DEEPSEEK | {"architectures": None, "model_type": "deepseek_v2"}, DeepseekConfig, {}),
    ],
)
def test_each_kind_is_told_by_what_it_computes(values, kind, windows):
    config = parse_config(values, "here")
    assert type(config) is kind
    assert config.cache_shape.layer_windows == windows
    written = json.loads(msgspec.json.encode(config))
    assert parse_config(written, "there") == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (MISTRAL | {"architectures": ["LlamaForCausalLM"], "sliding_window": 8}, "sliding_window"),
        (MINISTRAL | {"sliding_window": 0}, "sliding_window"),
        (MINISTRAL | {"layer_types": ["sliding_attention"]}, "layer_types: 1 for 4 layers"),
        (MINISTRAL | {"layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        (MISTRAL | {"num_key_value_heads": 0}, "num_key_value_heads"),
        (DEEPSEEK | {"first_k_dense_replace": 1}, "first_k_dense_replace: 1 of 4 layers"),
        (DEEPSEEK | {"qk_rope_head_dim": 3}, "qk_rope_head_dim: 3 is odd"),
        (DEEPSEEK | {"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        (
            DEEPSEEK
            | {
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            "'llama3' would also scale",
        ),
        ({k: v for k, v in DEEPSEEK.items() if k != "kv_lora_rank"}, "kv_lora_rank"),
        # transformers' default is a number: a file without it does not mean none.
        ({k: v for k, v in DEEPSEEK.items() if k != "q_lora_rank"}, "q_lora_rank"),
    ],
)
def test_what_is_not_computed_is_refused(values, message):
    with pytest.raises(ModelError, match=message):
        parse_config(values, "here")


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("rope_theta", "big", "float"),
        ("rope_theta", True, "float"),
        pytest.param("rope_theta", 10**400, "out of range", id="rope_theta-huge"),
        ("rope_scaling", "linear", "object"),
        ("rope_parameters", ["default"], "object"),
        ("rope_parameters", {"rope_theta": "big"}, "float"),
        ("architectures", 5, "array"),
        ("architectures", [5], "str"),
        ("architectures", "MinistralForCausalLM", "array"),
        ("layer_types", [["x"]], "str"),
        ("layer_types", 4, "array"),
        ("sliding_window", [8], "int"),
        ("num_attention_heads", "4", "int"),
        ("eos_token_id", True, "int"),
    ],
)
def test_a_value_of_another_type_is_named_with_its_field(field, value, expected):
    with pytest.raises(ModelError) as refused:
        parse_config(MINISTRAL | {field: value}, "here")
    text = str(refused.value)
    assert text.startswith(f"here: {field} is ")
    assert expected in text
    assert text.endswith("; correct this field")


def test_the_length_of_a_scaled_rope_may_be_written_with_a_point():
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500,
        "factor": 8,
        "low_freq_factor": 1,
        "high_freq_factor": 4,
        "original_max_position_embeddings": 32.0,
    }
    whole = rope | {"factor": 8.0, "original_max_position_embeddings": 32}
    configs = [parse_config(MISTRAL | {"rope_parameters": each}, "here") for each in (rope, whole)]
    assert configs[0].digest() == configs[1].digest()


def test_windows_shape_the_fingerprint(tmp_path):
    made = [
        prepare_model("tiny", tiny=TinyConfig(sliding_window=window), cache=tmp_path)
        for window in (None, 8, 9)
    ]
    found = [fingerprint(folder, "float32") for folder in made]
    assert len({each.config_digest for each in found}) == 3
    assert len({each.weights_digest for each in found}) == 1


def test_named_random_models_are_of_every_kind(tmp_path):
    folders = {name: prepare_model(name, cache=tmp_path) for name in TINY_MODELS}
    kinds = {name: type(load_model_config(folder)) for name, folder in folders.items()}
    assert kinds == {
        "tiny": LlamaConfig,
        "tiny-hybrid": MinistralConfig,
        "tiny-mla": DeepseekConfig,
    }
    assert all(folder.name.startswith(f"{name}-0-") for name, folder in folders.items())
    seeded = prepare_model("tiny-mla", tiny=TinyConfig(seed=3, latent=TinyLatent()), cache=tmp_path)
    assert load_model_config(seeded) == load_model_config(folders["tiny-mla"])
    assert fingerprint(seeded, "float32") != fingerprint(folders["tiny-mla"], "float32")
    both = TinyConfig(latent=TinyLatent(), sliding_window=8)
    with pytest.raises(ModelError, match="sliding_window is 8"):
        prepare_model("tiny", tiny=both, cache=tmp_path)


def test_specs_say_what_each_layer_keeps():
    full = FullAttentionSpec(16, num_kv_heads=2, head_size=4, dtype="float32")
    window = SlidingWindowSpec(16, 2, 4, "float32", sliding_window=8)
    latent = MLAAttentionSpec(16, num_kv_heads=1, head_size=12, dtype="float32")
    for values, specs in (
        (MISTRAL, [full] * 4),
        (MINISTRAL, [window, full, window, full]),
        (DEEPSEEK, [latent] * 4),
    ):
        found = parse_config(values, "here").cache_shape.kv_cache_specs(16, "float32")
        assert found == {f"layer.{layer}": spec for layer, spec in enumerate(specs)}


def test_geometries_follow_the_groups_and_the_models_stages():
    config = parse_config(
        MINISTRAL
        | {
            "num_hidden_layers": 5,
            "layer_types": [*["sliding_attention"] * 3, *["full_attention"] * 2],
        },
        "here",
    )
    groups = [
        KVCacheGroupSpec(names, spec)
        for names, spec in (
            (
                ["layer.0", "layer.1", "layer.2"],
                SlidingWindowSpec(8, 2, 4, "float32", page_size_padded=640, sliding_window=8),
            ),
            (["layer.4", "layer.3"], FullAttentionSpec(8, 2, 4, "float32")),
        )
    ]
    sliding, full = config.cache_shape.geometries(
        groups, layout="HND", parallel=ParallelShape(tp=2, pp=2)
    )
    # The model's stages are 0-2 and 3-4: neither group is on both.
    assert [list(sliding.layers(rank)) for rank in (0, 2)] == [[0, 1, 2], []]
    assert [list(full.layers(rank)) for rank in (0, 2)] == [[], [3, 4]]
    assert (sliding.sliding_window, full.sliding_window) == (8, None)
    assert (sliding.page_size_padded, full.page_size_padded) == (640, None)
    assert {geometry.block_size for geometry in (sliding, full)} == {8}
    for group in (
        KVCacheGroupSpec(["layer.5"], groups[1].kv_cache_spec),
        KVCacheGroupSpec(["layer.1"], MambaSpec(8, ((4, 4),), ("float32",))),
    ):
        with pytest.raises(ValueError, match=r"layer\.0 to layer\.4, recurrent of them: none"):
            config.cache_shape.geometries([group], layout="HND", parallel=ParallelShape())


@pytest.mark.parametrize(
    ("values", "heads", "size"), [(MISTRAL, 2, 4), (MINISTRAL, 2, 4), (DEEPSEEK, 1, 12)]
)
@pytest.mark.parametrize("pp", [1, 3])
def test_one_group_of_all_layers_is_the_plain_geometry(values, heads, size, pp):
    config = parse_config(values, "here")
    shape: dict[str, Any] = {"layout": "NHD", "parallel": ParallelShape(tp=2, pp=pp)}
    specs = config.cache_shape.kv_cache_specs(16, "float32")
    (whole,) = config.cache_shape.geometries(group_layers(specs, hybrid=False), **shape)
    assert whole == EngineGeometry(
        num_layers=4,
        num_kv_heads=heads,
        head_size=size,
        dtype="float32",
        block_size=16,
        use_mla=values is DEEPSEEK,
        **shape,
    )
