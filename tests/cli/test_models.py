"""Shapes of models: the table, and config.json files of many architectures."""

import json

import pytest

from kvferry.cache.cache_shape import CacheShape, LayerHeads
from kvferry.cli.specs import find_model
from kvferry.errors import ConfigError, ModelError
from kvferry.explain.models import KNOWN_MODELS, parse_model

LLAMA = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}
WINDOWED = LLAMA | {"sliding_window": 16}


def shape_of(values):
    return parse_model(values, "here").shape


def defaults_of(name):
    """What the config class of transformers says of the model that it was written for."""
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, name)().to_dict()


# ---- the table ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("GptOssConfig", "gpt-oss-120b"),
        ("DeepseekV3Config", "deepseek-v3"),
        ("MixtralConfig", "mixtral-8x7b"),
    ],
)
def test_the_table_agrees_with_the_defaults_of_transformers(kind, name):
    assert shape_of(defaults_of(kind)) == KNOWN_MODELS[name].shape


def test_gemma_3_has_a_full_layer_after_every_five_windows():
    values = defaults_of("Gemma3TextConfig") | {
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "sliding_window": 1024,
    }
    values["layer_types"] = None
    values["sliding_window_pattern"] = 6
    assert shape_of({"text_config": values}) == KNOWN_MODELS["gemma-3-27b"].shape


def test_bytes_per_token_are_those_that_are_published():
    # Elements per token of all layers; Llama-3 70B: 80 × 8 × 128 × 2, DeepSeek-V3: 61 × 576.
    published = {"llama-3-70b": 163840, "llama-3-8b": 65536, "deepseek-v3": 35136}
    for name, elements in published.items():
        shape = KNOWN_MODELS[name].shape
        heads = shape.heads
        parts = 1 if heads.use_mla else 2
        assert len(shape.layers) * heads.num_kv_heads * heads.head_size * parts == elements


def test_a_model_is_found_by_its_name_or_its_repository_in_any_case():
    wanted = KNOWN_MODELS["qwen3-235b-a22b"]
    for name in ("qwen3-235b-a22b", "Qwen/Qwen3-235B-A22B", "Qwen3_235B_A22B", "QWEN3-235B-A22B"):
        assert find_model(name) is wanted


@pytest.mark.parametrize(
    ("name", "near"), [("lama3-70b", "llama-3-70b"), ("deepseek-v4", "deepseek-v3")]
)
def test_an_unknown_model_is_answered_with_the_nearest_and_all_known_ones(name, near):
    with pytest.raises(ConfigError, match=f"did you mean '{near}'") as raised:
        find_model(name)
    for known in KNOWN_MODELS:
        assert known in str(raised.value)


# ---- config.json --------------------------------------------------------------------------------


def test_a_config_is_read_from_its_file_or_its_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA | {"torch_dtype": "float16"}))
    for path in (folder, folder / "config.json"):
        model = find_model(str(path))
        assert model.shape == CacheShape.uniform(4, LayerHeads(8, 8))
        assert (model.name, model.dtype) == ("my-model", "float16")


def test_what_a_config_leaves_out_is_derived_as_transformers_does():
    assert shape_of(LLAMA) == CacheShape.uniform(4, LayerHeads(8, 8))
    given = {"num_key_value_heads": 2, "head_dim": 32}
    assert shape_of(LLAMA | given) == CacheShape.uniform(4, LayerHeads(2, 32))
    latent = {"kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 9}
    assert shape_of(LLAMA | latent) == CacheShape.uniform(4, LayerHeads(1, 20, use_mla=True))


@pytest.mark.parametrize(
    ("values", "windowed"),
    [
        (LLAMA, []),
        (LLAMA | {"sliding_window": None}, []),
        (WINDOWED | {"use_sliding_window": False}, []),
        (WINDOWED | {"use_sliding_window": True, "max_window_layers": 3}, [3]),
        (WINDOWED | {"model_type": "mistral"}, [0, 1, 2, 3]),
        (WINDOWED | {"model_type": "gemma2"}, [0, 2]),
        (WINDOWED | {"sliding_window_pattern": 3}, [0, 1, 3]),
        (WINDOWED | {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, [3]),
        (LLAMA | {"layer_types": ["full_attention"] * 4}, []),
    ],
)
def test_windows_are_read_however_they_are_written(values, windowed):
    assert dict(shape_of(values).layer_windows) == dict.fromkeys(windowed, 16)


def test_layers_of_their_own_are_read_however_they_are_written():
    eight, two = LayerHeads(8, 8), LayerHeads(2, 8)
    for values in (
        {"num_key_value_heads": [8, 8, 2, 8]},
        {"model_type": "llama", "per_layer_config": {"02": {"num_key_value_heads": 2}}},
    ):
        assert shape_of(LLAMA | values).layers == (eight, eight, two, eight)
    none = {"layer_types": ["full_attention", "none", "full_attention", "full_attention"]}
    assert shape_of(LLAMA | none).layers == (eight, None, eight, eight)
    chunks = {"layer_types": ["chunked_attention"] * 4, "attention_chunk_size": 64}
    assert shape_of(LLAMA | chunks).layers == (LayerHeads(8, 8, attention_chunk_size=64),) * 4


@pytest.mark.parametrize(
    ("values", "kv_heads"),
    [
        # falcon-7b names 71 KV heads that its code does not make; falcon-40b's newer code does.
        ({"num_attention_heads": 71, "num_kv_heads": 71, "multi_query": True}, 1),
        ({"num_attention_heads": 128, "num_kv_heads": 8, "new_decoder_architecture": True}, 8),
        ({"num_attention_heads": 71, "multi_query": False}, 71),
        ({"num_attention_heads": 71}, 1),
    ],
)
def test_the_kv_heads_of_falcon_follow_its_flags(values, kv_heads):
    values = {"model_type": "falcon", "num_hidden_layers": 2, "hidden_size": 9088, **values}
    assert shape_of(values).heads.num_kv_heads == kv_heads


def test_the_dtype_is_that_in_which_the_cache_is_served():
    for values, dtype in (
        ({}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({"dtype": "float32"}, "bfloat16"),
        ({"quantization_config": {"quant_method": "fp8"}}, "bfloat16"),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "float8_e4m3fn"),
        ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}},
         "float8_e4m3fn"),
    ):  # fmt: skip
        assert parse_model(LLAMA | values, "here").dtype == dtype


def modelopt(*, producer="modelopt", **quantization):
    """A ``hf_quant_config.json``, as ModelOpt up to 0.29 writes it."""
    return {"producer": {"name": producer, "version": "0.29.0"}, "quantization": quantization}


def written(folder, config, beside, name="config.json"):
    """The path of a config, beside a ``hf_quant_config.json``."""
    (folder / name).write_text(json.dumps(config))
    (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return str(folder / name)


@pytest.mark.parametrize("algo", ["FP8", "fp8"])
def test_the_dtype_of_the_cache_is_read_beside_a_config_that_says_nothing(tmp_path, algo):
    beside = modelopt(quant_algo="NVFP4", kv_cache_quant_algo=algo, exclude_modules=["lm_head"])
    path = written(tmp_path, LLAMA | {"torch_dtype": "float16"}, beside)
    for each in (path, str(tmp_path)):
        assert find_model(each).dtype == "float8_e4m3fn"
    written(tmp_path, {"text_config": LLAMA, "quantization_config": None}, beside)
    assert find_model(path).dtype == "float8_e4m3fn"


@pytest.mark.parametrize(
    ("says", "dtype"),
    [
        ({"quantization_config": {"quant_method": "modelopt"}}, "bfloat16"),
        ({"quantization_config": {}}, "bfloat16"),
        ({"quantization_config": {"kv_cache_quant_algo": "FP8"}}, "float8_e4m3fn"),
    ],
)
def test_a_config_that_says_how_it_is_quantised_stands_alone(tmp_path, says, dtype):
    beside = modelopt(quant_algo="FP8", kv_cache_quant_algo="NVFP4")
    assert find_model(written(tmp_path, LLAMA | says, beside)).dtype == dtype


@pytest.mark.parametrize(
    "beside",
    [
        modelopt(quant_algo="FP8", kv_cache_quant_algo=None),
        modelopt(quant_algo="FP8"),
        modelopt(quant_algo=None, kv_cache_quant_algo="FP8"),
        modelopt(quant_algo="FP8", kv_cache_quant_algo="FP8", producer="another"),
    ],
)
def test_what_vllm_does_not_take_for_the_cache_changes_nothing(tmp_path, beside):
    assert find_model(written(tmp_path, LLAMA, beside)).dtype == "bfloat16"


@pytest.mark.parametrize(
    "values",
    [
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
        {
            "quant_method": "modelopt_fp4",
            "quantization": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        },
        modelopt(quant_algo="FP8", kv_cache_quant_algo="FP8"),
        {
            "quantization": {"modelopt_quant_config": {}, "quant_algo": "FP8"},
            "kv_cache_scheme": "FP8",
        },
    ],
)
def test_keys_of_modelopt_are_read_in_either_file(tmp_path, values):
    assert parse_model(LLAMA | {"quantization_config": values}, "here").dtype == "float8_e4m3fn"
    assert find_model(written(tmp_path, LLAMA, values)).dtype == "float8_e4m3fn"


def test_a_copy_under_another_name_has_nothing_beside_it(tmp_path):
    beside = modelopt(quant_algo="NVFP4", kv_cache_quant_algo="NVFP4")
    assert find_model(written(tmp_path, LLAMA, beside, "copy.json")).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("beside", "message"),
    [
        (modelopt(quant_algo="NVFP4", kv_cache_quant_algo="NVFP4"),
         "kv_cache_quant_algo is 'NVFP4'; only 8-bit floats can be planned"),
        ([], "Expected `object`, got `array`"),
    ],
)  # fmt: skip
def test_what_makes_no_plan_beside_a_config_is_said_of_its_own_file(tmp_path, beside, message):
    path = written(tmp_path, LLAMA, beside)
    with pytest.raises(ModelError, match=r"hf_quant_config\.json: ") as raised:
        find_model(path)
    assert message in str(raised.value)


def test_the_decoder_of_a_model_that_also_sees_is_read():
    text = LLAMA | {"model_type": "llama"}
    for key in ("text_config", "llm_config", "language_config"):
        whole = {"model_type": "seer", "torch_dtype": "float16", key: text, "hidden_size": 9}
        model = parse_model(whole, "here")
        assert (model.shape, model.dtype) == (shape_of(LLAMA), "float16")
    thinker = {"thinker_config": {"text_config": text}, "model_type": "talker"}
    assert shape_of(thinker) == shape_of(LLAMA)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "num_hidden_layers is missing"),
        (LLAMA | {"num_hidden_layers": "4"}, "num_hidden_layers is '4'"),
        (LLAMA | {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, at most 4096"),
        (LLAMA | {"num_attention_heads": 0}, "num_attention_heads is 0"),
        (WINDOWED, "nothing says which layers have it"),
        (
            LLAMA | {"layer_types": ["linear_attention"] * 4},
            "layer_types says that layer 0 is linear_attention",
        ),
        (LLAMA | {"layer_types": ["full_attention"] * 3}, "layer_types names 3 for 4 layers"),
        (LLAMA | {"layer_types": 7}, "layer_types"),
        (LLAMA | {"mamba_d_state": 16}, "mamba_d_state is 16 (recurrent state)"),
        (
            LLAMA | {"attention_chunk_size": 8192},
            "attention_chunk_size is 8192 (attention in chunks)",
        ),
        (LLAMA | {"is_encoder_decoder": True}, "only decoders"),
        (LLAMA | {"model_type": "new"}, "model_type 'new' is not known"),
        (LLAMA | {"model_type": ["llama"]}, "model_type ['llama'] is not known"),
        (LLAMA | {"n_head": 9}, "num_attention_heads is 8, but n_head is 9"),
        (LLAMA | {"num_key_value_heads": [8, 8]}, "num_key_value_heads is [8, 8]"),
        (LLAMA | {"layer_types": ["none"] * 4}, "no layer attends"),
        (LLAMA | {"hidden_size": 7}, "hidden_size is less than the attention heads"),
        (LLAMA | {"some_kv_thing": 3}, "some_kv_thing is 3, which may change what layers keep"),
        ({"cross_kv": 1, "text_config": LLAMA | {"model_type": "llama"}}, "cross_kv is 1"),
        (
            WINDOWED | {"layer_types": ["full_attention"] * 4, "sliding_window_pattern": 2},
            "layer_types and sliding_window_pattern name different kinds",
        ),
        (LLAMA | {"per_layer_config": {"1": {"skip": ["attention"]}}}, "has skip for layer 1"),
        (LLAMA | {"per_layer_config": [1]}, "per_layer_config has None for layer all"),
        (
            LLAMA | {"model_type": "gemma3n_text", "num_kv_shared_layers": 4},
            "num_kv_shared_layers leaves none of 4 layers a cache",
        ),
        (
            LLAMA | {"quantization_config": {"kv_cache_quant_algo": "NVFP4"}},
            "kv_cache_quant_algo is 'NVFP4'; only 8-bit floats can be planned",
        ),
        (LLAMA | {"v_head_dim": 0}, "v_head_dim is 0"),
        (LLAMA | {"torch_dtype": "int4"}, "dtype: 'int4' is unknown"),
    ],
)
def test_a_config_that_makes_no_plan_says_which_key_and_why(values, message):
    with pytest.raises(ModelError, match=r"^here: ") as raised:
        parse_model(values, "here")
    assert message in str(raised.value)
