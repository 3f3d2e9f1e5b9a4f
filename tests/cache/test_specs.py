"""Specs and configs: their arithmetic, and what they refuse."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import (
    CacheLimits,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
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
        spec.block_size = 32  # type: ignore[misc]
    assert dataclasses.replace(spec, block_size=32).page_size_bytes == 2 * spec.page_size_bytes


@pytest.mark.parametrize(
    "field",
    [
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_encoder_tokens",
        "dcp_world_size",
        "pcp_world_size",
    ],
)
def test_limits_must_be_positive(field):
    with pytest.raises(ValueError, match=f"{field}: 0"):
        CacheLimits(**{"max_model_len": 8, field: 0})


BASE: dict[str, Any] = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": "bfloat16"}


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 5), st.booleans())
def test_page_is_as_large_as_all_its_cells(block_size, heads, head_size, head_size_v, mla):
    spec = FullAttentionSpec(
        block_size, heads, head_size, "float16", mla, head_size_v=None if mla else head_size_v
    )
    cells = [
        (token, head, part, element)
        for token in range(block_size)
        for head in range(heads)
        for part, size in enumerate([head_size] if mla else [head_size, head_size_v])
        for element in range(size)
    ]
    assert spec.page_size_bytes == 2 * len(cells)


def test_every_kind_of_attention_has_the_same_page():
    page = 16 * 8 * 256 * 2
    for spec in [
        FullAttentionSpec(**BASE, sliding_window=64),
        FullAttentionSpec(**BASE, attention_chunk_size=64),
        SlidingWindowSpec(**BASE, sliding_window=64),
        ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=64),
        SinkFullAttentionSpec(**BASE, sink_len=128),
        CrossAttentionSpec(**BASE),
        EncoderOnlyAttentionSpec(**BASE),
    ]:
        assert spec.page_size_bytes == page, spec
        assert dataclasses.replace(spec, page_size_padded=page + 1).page_size_bytes == page + 1


def test_windowed_layers_may_have_values_smaller_than_keys():
    spec = SlidingWindowSpec(16, 4, 192, "bfloat16", head_size_v=128, sliding_window=128)
    assert spec.page_size_bytes == 16 * 4 * (192 + 128) * 2


def test_mla_keeps_one_latent_and_is_full_attention():
    spec = MLAAttentionSpec(64, 1, 576, "bfloat16")
    assert spec.use_mla
    assert isinstance(spec, FullAttentionSpec)
    assert spec.page_size_bytes == 64 * 576 * 2


def test_mla_in_the_packed_fp8_format_has_its_own_size():
    spec = MLAAttentionSpec(64, 1, 576, "uint8", cache_dtype_str="fp8_ds_mla")
    assert spec.page_size_bytes == 64 * 656
    with pytest.raises(ValueError, match="1 head of 576"):
        MLAAttentionSpec(64, 1, 512, "uint8", cache_dtype_str="fp8_ds_mla")


def test_state_page_holds_all_tensors_whatever_the_block_size():
    spec = MambaSpec(16, [(8192, 3), (32, 128, 128)], ["bfloat16", "float32"])
    page = 8192 * 3 * 2 + 32 * 128 * 128 * 4
    assert spec.page_size_bytes == page
    assert spec.copy_with_new_block_size(64).page_size_bytes == page
    assert dataclasses.replace(spec, page_size_padded=page + 8).page_size_bytes == page + 8
    assert spec.shapes == ((8192, 3), (32, 128, 128))
    assert len({spec, MambaSpec(16, ((8192, 3), (32, 128, 128)), ("bfloat16", "float32"))}) == 1


def test_sinks_are_blocks_that_no_request_owns():
    spec = SinkFullAttentionSpec(**BASE, sink_len=128)
    assert isinstance(spec, FullAttentionSpec)
    assert spec.num_reserved_blocks == 8
    assert FullAttentionSpec(**BASE).num_reserved_blocks == 0


def blocks_of(spec, **limits):
    bound = spec.max_memory_usage_bytes(CacheLimits(**limits))
    assert bound % spec.page_size_bytes == 0
    return bound // spec.page_size_bytes


def most_blocks_held(spec, block_tokens, max_model_len, step, is_needed):
    """Walks all prefixes: blocks with a token that a later one needs, and those of a step."""
    return max(
        len(
            {
                token // block_tokens
                for token in range(min(computed + step, max_model_len))
                if token >= computed or is_needed(token, computed)
            }
        )
        for computed in range(max_model_len)
    )


@given(
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 12),
)
def test_window_bound_is_what_a_request_may_hold(block_size, dcp, length, window, step):
    spec = SlidingWindowSpec(block_size, 1, 1, "int8", sliding_window=window)
    bound = blocks_of(spec, max_model_len=length, max_num_batched_tokens=step, dcp_world_size=dcp)
    held = most_blocks_held(
        spec, block_size * dcp, length, step, lambda token, n: token > n - window
    )
    assert held <= bound <= held + 1


@given(
    st.integers(1, 5),
    st.integers(1, 2),
    st.integers(1, 40),
    st.integers(1, 20),
    st.integers(1, 12),
)
def test_chunk_bound_is_what_a_request_may_hold(block_size, pcp, length, chunk, step):
    spec = ChunkedLocalAttentionSpec(block_size, 1, 1, "int8", attention_chunk_size=chunk)
    bound = blocks_of(spec, max_model_len=length, max_num_batched_tokens=step, pcp_world_size=pcp)
    held = most_blocks_held(
        spec, block_size * pcp, length, step, lambda token, n: token // chunk >= n // chunk
    )
    assert held <= bound <= held + 2


def test_bounds_equal_the_published_ones():
    length, step = 32768, 2048
    sizes = {"max_model_len": length, "max_num_batched_tokens": step}
    window = SlidingWindowSpec(**BASE, sliding_window=4096)
    assert blocks_of(window, **sizes) == -(-(4096 - 1 + step) // 16) + 1
    chunk = ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=8192)
    assert blocks_of(chunk, **sizes) == (8192 + step) // 16
    assert blocks_of(FullAttentionSpec(**BASE, sliding_window=4096), **sizes) == length // 16


def test_short_model_caps_window_and_chunk():
    assert blocks_of(SlidingWindowSpec(**BASE, sliding_window=4096), max_model_len=100) == 8
    chunk = ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=8192)
    assert blocks_of(chunk, max_model_len=100) == 7


def test_token_shards_divide_the_blocks_of_full_attention():
    spec = FullAttentionSpec(**BASE)
    assert blocks_of(spec, max_model_len=1000, dcp_world_size=2) == 32  # ⌈⌈1000/2⌉/16⌉
    assert blocks_of(spec, max_model_len=1000, dcp_world_size=2, pcp_world_size=2) == 16


def test_one_state_serves_a_request_of_any_length():
    spec = MambaSpec(64, [(4, 4)], ["float32"], num_speculative_blocks=3)
    assert blocks_of(spec, max_model_len=10) == 1 + 3
    assert blocks_of(spec, max_model_len=10**6, dcp_world_size=4) == 1 + 3


@given(st.integers(1, 5), st.integers(1, 40), st.integers(1, 12), st.integers(0, 2))
def test_bound_of_states_at_block_ends_is_what_a_request_may_hold(block_size, length, step, drafts):
    spec = MambaSpec(
        block_size, [(1,)], ["int8"], num_speculative_blocks=drafts, mamba_cache_mode="all"
    )
    bound = blocks_of(spec, max_model_len=length, max_num_batched_tokens=step, dcp_world_size=2)
    held = most_blocks_held(spec, block_size, length, step, lambda token, n: token == n - 1)
    assert held <= bound - drafts <= held + 1


def test_cross_attention_keeps_what_the_encoder_made():
    spec = CrossAttentionSpec(**BASE)
    assert blocks_of(spec, max_model_len=448, max_num_encoder_tokens=1500) == 94
    with pytest.raises(ValueError, match="max_num_encoder_tokens: is not set"):
        spec.max_memory_usage_bytes(CacheLimits(448))


def test_encoder_only_attention_keeps_nothing():
    assert EncoderOnlyAttentionSpec(**BASE).max_memory_usage_bytes(CacheLimits(512)) == 0


def test_new_block_size_scales_page_and_padding():
    spec = SlidingWindowSpec(4, 1, 8, "float32", page_size_padded=300, sliding_window=7)
    larger = spec.copy_with_new_block_size(12)
    assert larger == SlidingWindowSpec(12, 1, 8, "float32", page_size_padded=900, sliding_window=7)
    assert FullAttentionSpec(**BASE).copy_with_new_block_size(32) == FullAttentionSpec(
        **{**BASE, "block_size": 32}
    )


def test_merge_of_equal_specs_is_that_spec():
    for spec in [
        MLAAttentionSpec(64, 1, 576, "bfloat16"),
        SlidingWindowSpec(**BASE, sliding_window=64),
        MambaSpec(64, [(4, 4)], ["float32"]),
        SinkFullAttentionSpec(**BASE, sink_len=16),
    ]:
        assert type(spec).merge([spec, copy.deepcopy(spec)]) == spec


@pytest.mark.parametrize("name", ["sliding_window", "attention_chunk_size"])
def test_merge_of_full_attention_takes_the_window_that_some_layers_have(name):
    plain, windowed = FullAttentionSpec(**BASE), FullAttentionSpec(**(BASE | {name: 64}))
    assert FullAttentionSpec.merge([plain, windowed, plain]) == windowed
    assert FullAttentionSpec.merge([plain, plain]) == plain


@pytest.mark.parametrize(
    ("kind", "specs", "message"),
    [
        (FullAttentionSpec, [], "no specs"),
        (
            FullAttentionSpec,
            [FullAttentionSpec(**BASE), FullAttentionSpec(**{**BASE, "num_kv_heads": 4})],
            "num_kv_heads: spec 1 has 4, spec 0 has 8",
        ),
        (
            FullAttentionSpec,
            [FullAttentionSpec(**BASE), SlidingWindowSpec(**BASE, sliding_window=8)],
            "spec 1 is a SlidingWindowSpec",
        ),
        (FullAttentionSpec, [MLAAttentionSpec(**BASE)], "spec 0 is a MLAAttentionSpec"),
        (
            FullAttentionSpec,
            [FullAttentionSpec(**BASE, sliding_window=size) for size in (8, 64)],
            r"sliding_window: layers have \[8, 64\]",
        ),
        (
            FullAttentionSpec,
            [
                FullAttentionSpec(**BASE, sliding_window=8),
                FullAttentionSpec(**BASE, attention_chunk_size=8),
            ],
            "exclude each other",
        ),
        (
            SlidingWindowSpec,
            [SlidingWindowSpec(**BASE, sliding_window=size) for size in (8, 64)],
            "sliding_window: spec 1 has 64, spec 0 has 8",
        ),
        (
            MLAAttentionSpec,
            [MLAAttentionSpec(64, 1, 576, "uint8", cache_dtype_str=s) for s in (None, "fp8")],
            "cache_dtype_str: spec 1 has 'fp8', spec 0 has None",
        ),
    ],
)
def test_merge_of_unlike_layers_says_what_differs(kind, specs, message):
    with pytest.raises(ValueError, match=message):
        kind.merge(specs)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SlidingWindowSpec(**BASE, sliding_window=0), "sliding_window: 0"),
        (lambda: ChunkedLocalAttentionSpec(**BASE, attention_chunk_size=-1), "chunk_size: -1"),
        (lambda: FullAttentionSpec(**BASE, sliding_window=0), "sliding_window: 0"),
        (lambda: SinkFullAttentionSpec(**BASE, sink_len=0), "sink_len: 0"),
        (lambda: SinkFullAttentionSpec(**BASE, sink_len=20), "do not fill blocks of 16"),
        (lambda: MLAAttentionSpec(**BASE, use_mla=False), "take a FullAttentionSpec"),
        (lambda: MLAAttentionSpec(**BASE, head_size_v=128), "leave it out"),
        (lambda: MambaSpec(16, [], []), "0 shapes and 0 dtypes"),
        (lambda: MambaSpec(16, [(4,)], []), "1 shapes and 0 dtypes"),
        (lambda: MambaSpec(16, [(4, 0)], ["float32"]), "not 1 or more"),
        (lambda: MambaSpec(16, [()], ["float32"]), "not 1 or more"),
        (lambda: MambaSpec(16, [(4,)], ["float31"]), "float31"),
        (lambda: MambaSpec(16, [(4,)], ["float32"], page_size_padded=15), "give 16 or more"),
        (lambda: MambaSpec(16, [(4,)], ["float32"], num_speculative_blocks=-1), "blocks: -1"),
        (lambda: MambaSpec(16, [(4,)], ["float32"], mamba_cache_mode="al"), "none, all"),
    ],
)
def test_bad_field_of_other_kinds_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


SMALL, LARGE = FullAttentionSpec(4, 1, 8, "float32"), FullAttentionSpec(4, 3, 8, "float32")


def test_uniform_group_has_the_pages_of_all_its_layers():
    spec = UniformTypeKVCacheSpecs.from_specs({"a": SMALL, "b": LARGE, "c": SMALL})
    assert spec is not None
    assert spec.block_size == 4
    assert spec.page_size_bytes == 256 + 768 + 256
    assert spec.max_memory_usage_bytes(CacheLimits(9)) == 3 * 1280
    assert spec.copy_with_new_block_size(8).page_size_bytes == 2 * 1280


@pytest.mark.parametrize(
    ("specs", "is_uniform"),
    [
        ([SMALL, LARGE], True),
        ([SMALL, dataclasses.replace(LARGE, sliding_window=8)], True),
        ([SMALL, MLAAttentionSpec(4, 1, 8, "float32")], True),
        ([SMALL, FullAttentionSpec(8, 1, 8, "float32")], False),
        ([SMALL, SlidingWindowSpec(4, 1, 8, "float32", sliding_window=8)], False),
        ([SMALL, SinkFullAttentionSpec(4, 1, 8, "float32", sink_len=4)], False),
        ([SMALL, CrossAttentionSpec(4, 1, 8, "float32")], False),
        ([SlidingWindowSpec(4, n, 8, "float32", sliding_window=8) for n in (1, 2)], True),
        ([SlidingWindowSpec(4, 1, 8, "float32", sliding_window=n) for n in (8, 9)], False),
        (
            [ChunkedLocalAttentionSpec(4, n, 8, "int8", attention_chunk_size=8) for n in (1, 2)],
            True,
        ),
        (
            [ChunkedLocalAttentionSpec(4, 1, 8, "int8", attention_chunk_size=n) for n in (8, 4)],
            False,
        ),
        ([CrossAttentionSpec(4, n, 8, "float32") for n in (1, 2)], True),
        ([MambaSpec(4, [(n,)], ["int8"]) for n in (1, 2)], True),
        ([MambaSpec(4, [(1,)], ["int8"], num_speculative_blocks=n) for n in (1, 2)], False),
    ],
)
def test_layers_are_of_one_type_if_a_request_holds_the_same_blocks_in_each(specs, is_uniform):
    named = dict(zip("ab", specs, strict=True))
    assert UniformTypeKVCacheSpecs.is_uniform_type(named) is is_uniform
    made = UniformTypeKVCacheSpecs.from_specs(named)
    assert (made is not None) is is_uniform
    if made is None:
        with pytest.raises(ValueError, match="do not hold the same slots"):
            UniformTypeKVCacheSpecs(4, named)
    else:
        assert dict(made.kv_cache_specs) == named


def test_uniform_group_is_a_value():
    layers = {"a": SMALL, "b": LARGE}
    spec = UniformTypeKVCacheSpecs(4, layers)
    layers["c"] = SMALL
    assert set(spec.kv_cache_specs) == {"a", "b"}
    with pytest.raises(TypeError):
        spec.kv_cache_specs["c"] = SMALL  # type: ignore[index]
    for twin in (pickle.loads(pickle.dumps(spec)), copy.deepcopy(spec)):
        assert twin == spec
        assert hash(twin) == hash(spec)
    assert spec != UniformTypeKVCacheSpecs(4, {"a": LARGE, "b": SMALL})
    with pytest.raises(ValueError, match="is empty"):
        UniformTypeKVCacheSpecs(4, {})
    with pytest.raises(ValueError, match="blocks of 8 tokens"):
        UniformTypeKVCacheSpecs(8, {"a": SMALL})


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
    with pytest.raises(ValueError, match="offset: 8 lies outside the 8 bytes"):
        KVCacheTensor(8, ["a"], 8)
    with pytest.raises(ValueError, match="block_stride: 0"):
        KVCacheTensor(8, ["a"], block_stride=0)


def test_pages_of_a_block_may_lie_side_by_side():
    spec = UniformTypeKVCacheSpecs(4, {"a": SMALL, "b": LARGE})
    group = KVCacheGroupSpec(["a", "b"], spec)
    tensors = [KVCacheTensor(8 * 1024, ["a"], 0, 1024), KVCacheTensor(8 * 1024, ["b"], 256, 1024)]
    assert KVCacheConfig(8, tensors, [group]).kv_cache_tensors == tuple(tensors)
    with pytest.raises(ValueError, match="8191 bytes for 'b', whose 8 blocks take 8192"):
        KVCacheConfig(8, [KVCacheTensor(8191, ["b"], 256, 1024)], [group])
    with pytest.raises(ValueError, match="block_stride 767 is less than the 768"):
        KVCacheConfig(8, [KVCacheTensor(8192, ["b"], 256, 767)], [group])


def test_layers_of_one_group_cannot_share_a_tensor_but_those_of_two_can():
    window = SlidingWindowSpec(4, 1, 8, "float32", sliding_window=8)
    groups = [KVCacheGroupSpec(["a", "b"], SMALL), KVCacheGroupSpec(["c"], window)]
    KVCacheConfig(8, [KVCacheTensor(2048, ["a", "c"]), KVCacheTensor(2048, ["b"])], groups)
    with pytest.raises(ValueError, match="'a' and 'b' share a tensor and a group"):
        KVCacheConfig(8, [KVCacheTensor(2048, ["a", "c", "b"])], groups)


def test_group_knows_what_each_layer_keeps():
    group = KVCacheGroupSpec(["b", "a"], UniformTypeKVCacheSpecs(4, {"a": SMALL, "b": LARGE}))
    assert [group.layer_spec(name) for name in "ab"] == [SMALL, LARGE]
    assert KVCacheGroupSpec(["a"], SMALL).layer_spec("a") == SMALL
    with pytest.raises(ValueError, match="'c' is not in the group of b, a"):
        group.layer_spec("c")
    with pytest.raises(ValueError, match="are not the layers of the spec"):
        KVCacheGroupSpec(["a"], UniformTypeKVCacheSpecs(4, {"a": SMALL, "b": LARGE}))


def test_kernel_blocks_divide_dense_pages():
    assert KVCacheGroupSpec(["a"], SMALL, kernel_block_size=2).kernel_block_size == 2
    padded = dataclasses.replace(SMALL, page_size_padded=512)
    assert KVCacheGroupSpec(["a"], padded, kernel_block_size=4).kernel_block_size == 4
    with pytest.raises(ValueError, match="kernel_block_size: 3 does not divide the block_size, 4"):
        KVCacheGroupSpec(["a"], SMALL, kernel_block_size=3)
    for spec in (padded, MambaSpec(4, [(1,)], ["int8"])):
        with pytest.raises(ValueError, match="pages of 'a' are padded or hold a state"):
            KVCacheGroupSpec(["a"], spec, kernel_block_size=2)


def test_a_state_without_a_shape_of_its_own_is_refused():
    with pytest.raises(ValueError, match=r"MambaSpec.shapes: \(3, 4\) is not one shape per state"):
        MambaSpec(16, shapes=(3, 4), dtypes=("float32", "float32"))  # type: ignore[arg-type]
