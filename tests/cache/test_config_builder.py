"""From specs and memory to a config: budgets, tensors, and the longest request that fits."""

import dataclasses
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvferry.cache import (
    CacheLimits,
    ChunkedLocalAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheManager,
    KVCacheTensor,
    MambaSpec,
    Request,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    build_kv_cache_config,
    largest_model_len,
)

FULL = FullAttentionSpec(4, 1, 8, "float32")  # 256 bytes per page
WINDOW = SlidingWindowSpec(4, 1, 8, "float32", sliding_window=8)
WIDE = dataclasses.replace(FULL, num_kv_heads=3)
STATE = MambaSpec(400, [(50,)], ["int8"])
STATES = MambaSpec(4, [(50,)], ["int8"], mamba_cache_mode="all")
CHUNK = ChunkedLocalAttentionSpec(4, 1, 8, "float32", attention_chunk_size=6)
LIMITS = CacheLimits(40, max_num_batched_tokens=8)


def named(*specs):
    return {f"layer.{index}": spec for index, spec in enumerate(specs)}


def test_alike_layers_have_a_tensor_each():
    config = build_kv_cache_config(named(FULL, FULL), 100 * 512 + 511, LIMITS)
    assert config.num_blocks == 100
    assert config.kv_cache_tensors == (
        KVCacheTensor(100 * 256, ["layer.0"]),
        KVCacheTensor(100 * 256, ["layer.1"]),
    )


def test_layers_of_a_uniform_group_have_tensors_of_their_own_size():
    config = build_kv_cache_config(named(FULL, WIDE), 100 * 1024, LIMITS)
    assert config.num_blocks == 100
    assert [tensor.size for tensor in config.kv_cache_tensors] == [25600, 76800]


def test_layers_of_different_groups_share_tensors():
    specs = named(WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL, WINDOW)
    config = build_kv_cache_config(specs, 100 * 512, LIMITS)
    groups = [group.layer_names for group in config.kv_cache_groups]
    assert groups == [
        ("layer.0", "layer.4"),
        ("layer.1", "layer.6"),
        ("layer.3",),
        ("layer.2", "layer.5"),
    ]
    assert config.num_blocks == 100
    assert config.kv_cache_tensors == (
        KVCacheTensor(25600, ["layer.0", "layer.1", "layer.3", "layer.2"]),
        KVCacheTensor(25600, ["layer.4", "layer.6", "layer.5"]),
    )


def test_pages_of_a_block_may_lie_in_one_allocation():
    config = build_kv_cache_config(named(FULL, WIDE), 100 * 1024, LIMITS, one_allocation=True)
    assert config.kv_cache_tensors == (
        KVCacheTensor(102400, ["layer.0"], 0, 1024),
        KVCacheTensor(102400, ["layer.1"], 256, 1024),
    )


def test_number_of_blocks_may_be_given():
    config = build_kv_cache_config(named(FULL), 0, LIMITS, num_blocks=5)
    assert config.num_blocks == 5
    assert config.kv_cache_tensors == (KVCacheTensor(5 * 256, ["layer.0"]),)
    for num_blocks in (-1, 0, 1):
        with pytest.raises(ValueError, match=rf"^num_blocks: {num_blocks} leaves nothing"):
            build_kv_cache_config(named(FULL), 10**6, LIMITS, num_blocks=num_blocks)


def test_without_hybrid_groups_there_is_one():
    config = build_kv_cache_config(named(FULL, WINDOW), 10**5, LIMITS, hybrid=False)
    (group,) = config.kv_cache_groups
    assert group.kv_cache_spec == dataclasses.replace(FULL, sliding_window=8)


# One request of 40 tokens in steps of 8. Full: 10 blocks. Window: ⌈(8 - 1 + 8) / 4⌉ + 1 = 5.
# State: 1. One block more is the null block.
@pytest.mark.parametrize(
    ("specs", "num_blocks", "block_bytes"),
    [
        ([FULL, FULL], 1 + 10, 512),
        ([FULL, WIDE], 1 + 10, 1024),
        ([WINDOW], 1 + 5, 256),
        ([WINDOW, FULL], 1 + 5 + 10, 256),
        ([WINDOW, FULL, WINDOW], 1 + 5 + 5 + 10, 256),
        ([STATE, FULL], 1 + 1 + 10, 256),
        ([SinkFullAttentionSpec(4, 1, 8, "float32", sink_len=8)], 1 + 2 + 10, 256),
    ],
)
def test_one_longest_request_must_fit(specs, num_blocks, block_bytes):
    needed = num_blocks * block_bytes
    assert build_kv_cache_config(named(*specs), needed, LIMITS).num_blocks == num_blocks
    with pytest.raises(
        ValueError,
        match=f"available_bytes: {needed - 1}, .*max_model_len=40 needs {needed} "
        rf"\({num_blocks} blocks of {block_bytes}, ",
    ):
        build_kv_cache_config(named(*specs), needed - 1, LIMITS)


@pytest.mark.parametrize("available", [-1, 0, 256, 511])
def test_memory_for_no_request_at_all_is_said(available):
    assert largest_model_len(named(FULL), available, LIMITS) == 0
    with pytest.raises(ValueError, match="no request fits, however short"):
        build_kv_cache_config(named(FULL), available, LIMITS)


def test_longest_length_is_that_of_the_limits_if_memory_is_plenty():
    assert largest_model_len(named(FULL), 10**9, LIMITS) == 40


def test_windows_alone_allow_any_length():
    assert largest_model_len(named(WINDOW), 6 * 256, CacheLimits(10**9, 8)) == 10**9


@given(
    st.lists(st.sampled_from([FULL, WINDOW, STATE, WIDE]), min_size=1, max_size=6),
    st.integers(0, 40_000),
    st.integers(1, 400),
    st.none() | st.integers(1, 50),
)
def test_length_that_an_error_names_fits_and_one_more_does_not(specs, available, length, step):
    specs = named(*specs)
    limits = CacheLimits(length, step)
    longest = largest_model_len(specs, available, limits)
    assert 0 <= longest <= length
    for fitting in {1, longest // 2, longest} - {0} if longest else ():
        config = build_kv_cache_config(
            specs, available, dataclasses.replace(limits, max_model_len=fitting)
        )
        sizes = [tensor.size for tensor in config.kv_cache_tensors]
        assert sum(sizes) <= available
        assert sum(sizes) // config.num_blocks * (config.num_blocks + 1) > available
    assume(longest < length)
    with pytest.raises(ValueError, match="available_bytes") as e:
        build_kv_cache_config(specs, available, limits)
    named_lengths = re.findall(r"set max_model_len to (\d+)", str(e.value))
    assert named_lengths == ([str(longest)] if longest else [])
    with pytest.raises(ValueError, match="available_bytes"):
        build_kv_cache_config(
            specs, available, dataclasses.replace(limits, max_model_len=longest + 1)
        )


@given(
    st.lists(st.sampled_from([FULL, WIDE, WINDOW, CHUNK, STATE, STATES]), min_size=1, max_size=6),
    st.integers(1, 60),
    st.integers(1, 20),
    st.booleans(),
)
def test_manager_takes_the_longest_request_from_the_smallest_pool(specs, length, step, caching):
    specs = named(*specs)
    limits = CacheLimits(length, step)
    with pytest.raises(ValueError, match="needs") as e:
        build_kv_cache_config(specs, 0, limits)
    (needed,) = map(int, re.findall(r"needs (\d+)", str(e.value)))
    config = build_kv_cache_config(specs, needed, limits)
    manager = KVCacheManager(config, length, enable_caching=caching)
    request = Request("r", list(range(length)))
    while request.num_computed_tokens < length:
        num_new = min(step, length - request.num_computed_tokens)
        assert manager.allocate_slots(request, num_new) is not None
        request.num_computed_tokens += num_new


def test_token_shards_let_longer_requests_fit():
    limits = CacheLimits(1000)
    assert largest_model_len(named(FULL), 11 * 256, limits) == 40
    limits = CacheLimits(1000, dcp_world_size=2, pcp_world_size=3)
    assert largest_model_len(named(FULL), 11 * 256, limits) == 240


@pytest.mark.parametrize("specs", [{}, {"a": EncoderOnlyAttentionSpec(4, 1, 8, "float32")}])
def test_model_that_keeps_nothing_has_no_config(specs):
    for build in (build_kv_cache_config, largest_model_len):
        with pytest.raises(ValueError, match=f"none of {len(specs)} layers keeps anything"):
            build(specs, 1000, LIMITS)


def test_one_state_needs_a_block_as_long_as_a_request():
    short = dataclasses.replace(STATE, block_size=39)
    with pytest.raises(ValueError, match=r"block_size: 39 tokens of layer 'layer\.1'") as e:
        build_kv_cache_config(named(FULL, short), 10**6, LIMITS)
    assert "mamba_cache_mode='all'" in str(e.value)
    # 40 tokens in steps of 8 and blocks of 4 tokens: the last state, and two of the step.
    every = dataclasses.replace(STATE, block_size=4, mamba_cache_mode="all")
    config = build_kv_cache_config(named(FULL, every), (1 + 10 + 3) * 256, LIMITS)
    assert config.num_blocks == 14


def test_layers_that_make_no_groups_are_refused_here_too():
    odd = dataclasses.replace(WINDOW, num_kv_heads=2)
    with pytest.raises(ValueError, match="no multiple"):
        build_kv_cache_config(named(odd, WIDE), 10**6, LIMITS)


@pytest.mark.parametrize("wrong", [1.5e9, "8GiB", None])
def test_memory_is_a_whole_number_of_bytes(wrong):
    spec = FullAttentionSpec(16, num_kv_heads=1, head_size=8, dtype="float32")
    for call in (build_kv_cache_config, largest_model_len):
        with pytest.raises(ValueError, match=r"available_bytes: .* is not a whole number"):
            call({"a": spec}, wrong, CacheLimits(64))
