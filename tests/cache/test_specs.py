"""Specs and configs: their arithmetic, and what they refuse."""

import dataclasses

import pytest

from kvferry.cache import (
    CacheLimits,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)

# (block size, KV heads, head size, dtype) → bytes per page, by hand:
# block size * heads * (key + value) elements * bytes per element.
PAGES = [
    ((16, 8, 128, "bfloat16"), 16 * 8 * 256 * 2),  # Llama-3 8B and 70B
    ((24, 3, 64, "float32"), 24 * 3 * 128 * 4),  # SmolLM2-135M
    ((1, 1, 1, "float8_e4m3fn"), 2),
    ((16, 16, 128, "float64"), 16 * 16 * 256 * 8),
]


@pytest.mark.parametrize(("fields", "nbytes"), PAGES)
def test_page_holds_keys_and_values_of_every_head_and_token(fields, nbytes):
    assert FullAttentionSpec(*fields).page_size_bytes == nbytes


def test_values_may_be_smaller_than_keys():
    spec = FullAttentionSpec(16, 8, 192, "bfloat16", head_size_v=128)
    assert spec.page_size_bytes == 16 * 8 * (192 + 128) * 2


def test_spelling_out_the_default_makes_no_difference():
    assert FullAttentionSpec(16, 8, 128, "float32") == FullAttentionSpec(
        16, 8, 128, "float32", head_size_v=128
    )


def test_mla_page_holds_one_latent():
    spec = FullAttentionSpec(64, 1, 576, "bfloat16", use_mla=True)
    assert spec.page_size_bytes == 64 * 576 * 2


def test_padding_replaces_the_page_size_but_never_shrinks_it():
    assert FullAttentionSpec(4, 1, 8, "float32", page_size_padded=512).page_size_bytes == 512
    with pytest.raises(ValueError, match="give 256 or more"):
        FullAttentionSpec(4, 1, 8, "float32", page_size_padded=255)


@pytest.mark.parametrize(("max_model_len", "num_blocks"), [(1, 1), (16, 1), (17, 2), (8192, 512)])
def test_longest_request_holds_blocks_for_all_its_tokens(max_model_len, num_blocks):
    spec = FullAttentionSpec(16, 8, 128, "bfloat16")
    usage = spec.max_memory_usage_bytes(CacheLimits(max_model_len))
    assert usage == num_blocks * spec.page_size_bytes


def test_torch_dtypes_and_their_names_are_the_same():
    torch = pytest.importorskip("torch")
    by_name = FullAttentionSpec(16, 8, 128, "bfloat16")
    assert FullAttentionSpec(16, 8, 128, torch.bfloat16) == by_name
    assert hash(FullAttentionSpec(16, 8, 128, torch.bfloat16)) == hash(by_name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_size": 0}, "block_size: 0"),
        ({"block_size": 1.5}, "block_size: 1.5"),
        ({"num_kv_heads": -1}, "num_kv_heads: -1"),
        ({"head_size": 0}, "head_size: 0"),
        ({"head_size_v": 0}, "head_size_v: 0"),
        ({"dtype": "bfloat17"}, "bfloat17"),
        ({"use_mla": True, "head_size_v": 128}, "leave it out"),
    ],
)
def test_bad_field_is_refused_by_name(change, message):
    fields = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}
    with pytest.raises(ValueError, match=message):
        FullAttentionSpec(**{**fields, **change})


def test_spec_is_frozen_and_can_be_replaced():
    spec = FullAttentionSpec(16, 8, 128, "bfloat16")
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.block_size = 32
    assert dataclasses.replace(spec, block_size=32).page_size_bytes == 2 * spec.page_size_bytes


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="max_model_len: 0"):
        CacheLimits(0)


SPEC = FullAttentionSpec(4, 1, 8, "float32")  # 256 bytes per page


def test_config_without_tensors_is_legal():
    config = KVCacheConfig(8, [], [KVCacheGroupSpec(["a", "b"], SPEC)])
    assert config.kv_cache_tensors == ()
    assert config.kv_cache_groups[0].layer_names == ("a", "b")


def test_config_with_a_tensor_per_layer():
    tensors = [KVCacheTensor(8 * 256, [name]) for name in ("a", "b")]
    config = KVCacheConfig(8, tensors, [KVCacheGroupSpec(["a", "b"], SPEC)])
    assert [tensor.shared_by for tensor in config.kv_cache_tensors] == [("a",), ("b",)]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((1, [], [KVCacheGroupSpec(["a"], SPEC)]), "num_blocks: 1"),
        ((8, [], []), "kv_cache_groups: is empty"),
        ((8, [], [KVCacheGroupSpec(["a"], SPEC)] * 2), "'a' is in two groups"),
        ((8, [KVCacheTensor(2048, ["c"])], [KVCacheGroupSpec(["a"], SPEC)]), "'c' is in no group"),
        ((8, [KVCacheTensor(2047, ["a"])], [KVCacheGroupSpec(["a"], SPEC)]), "8 blocks take 2048"),
    ],
)
def test_config_that_cannot_work_is_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        KVCacheConfig(*fields)


def test_group_and_tensor_refuse_nonsense():
    with pytest.raises(ValueError, match="repeats a name"):
        KVCacheGroupSpec(["a", "a"], SPEC)
    with pytest.raises(ValueError, match="0 bytes"):
        KVCacheTensor(0, ["a"])
    with pytest.raises(ValueError, match="is empty"):
        KVCacheTensor(8, [])
