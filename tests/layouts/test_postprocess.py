"""The known postprocessors: any shape, dtype, strides and ratio, by every implementation."""

import dataclasses
import gc
import math
import weakref
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kvferry.errors import BlockIdError
from kvferry.layouts import (
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    postprocess,
    repack,
    repack_run,
    zero_tail,
)
from kvferry.layouts.repack import make_repack

LAW = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Name → function of (cache, indices, ratio), and the order in which blocks are stored.
FUNCTIONS: dict[str, Any] = {
    "layout": (lambda c, i, r, **o: kv_postprocess_layout_on_receive(c, i, **o), "NHD"),
    "blksize": (kv_postprocess_blksize_on_receive, "HND"),
    "blksize_and_layout": (kv_postprocess_blksize_and_layout_on_receive, "NHD"),
}


def bits(tensor):
    return tensor.view(BITS[tensor.element_size()]).cpu().numpy()


def stored(cache, order):
    """A view of a cache ``[blocks, tokens, heads, elements]`` in the order of its memory."""
    return cache.swapaxes(1, 2) if order == "HND" else cache


def slow_truth(cache, indices, held_tokens, order):
    """What a cache must hold afterwards: written from the definition, frame by frame."""
    result = cache.copy()
    block_size, heads, elements = cache.shape[1:]
    frame = math.lcm(block_size, held_tokens) // block_size
    for first in range(0, len(indices), frame):
        ids = indices[first : first + frame]
        filled = np.concatenate([stored(cache, order)[block].ravel() for block in ids])
        tokens = [
            head_major[:, token]
            for head_major in filled.reshape(-1, heads, held_tokens, elements)
            for token in range(held_tokens)
        ]
        for place, block in enumerate(ids):
            result[block] = tokens[place * block_size : (place + 1) * block_size]
    return result


def published(name, cache, indices, ratio):
    """The known definitions in three passes: select, permute, put back. Whole ratios only."""
    taken = cache.index_select(0, indices)
    count, block_size, heads, elements = taken.shape
    memory = stored(taken, FUNCTIONS[name][1]).reshape(
        count, ratio, heads, block_size // ratio, elements
    )
    tokens = memory.permute(0, 1, 3, 2, 4).reshape(taken.shape)
    cache.index_copy_(0, indices, tokens)


def make_cache(rng, blocks, tokens, heads, elements, dtype, order="NHD", device="cpu"):
    inner = (tokens, heads) if order == "NHD" else (heads, tokens)
    shape = (blocks, *inner, elements)
    nbytes = math.prod(shape) * dtype.itemsize
    raw = torch.from_numpy(rng.integers(0, 256, nbytes, dtype=np.uint8)).to(device)
    return stored(raw.view(dtype).reshape(shape), order)


def check(name, cache, indices, held_tokens, **options):
    function, order = FUNCTIONS[name]
    wanted = slow_truth(bits(cache), indices, held_tokens, order)
    function(cache, indices, Fraction(cache.shape[1], held_tokens), **options)
    np.testing.assert_array_equal(bits(cache), wanted)


# ---- any shape ---------------------------------------------------------------------------------


def check_any_view(**options):
    @settings(LAW, **options)
    @given(st.data())
    def law(data):
        draw = data.draw
        name = draw(st.sampled_from(sorted(FUNCTIONS)))
        tokens, heads, elements = (draw(st.integers(1, 7)) for _ in range(3))
        held = tokens if name == "layout" else draw(st.integers(1, 9))
        frame = math.lcm(tokens, held) // tokens
        frames = draw(st.integers(0, 5))
        rng = np.random.default_rng(draw(st.integers(0, 99)))
        # Any order of dims in memory and any gaps: only the view says what is where.
        order = draw(st.permutations(range(4)))
        gap = draw(st.integers(0, 2))
        shape = (frames * frame + draw(st.integers(1, 3)), tokens, heads, elements)
        dtype = draw(st.sampled_from([np.uint8, np.uint16, np.uint32, np.uint64]))
        memory = rng.integers(
            0, np.iinfo(dtype).max, [shape[dim] + gap for dim in order], dtype=dtype
        )
        inside = memory[tuple(slice(shape[dim]) for dim in order)]
        cache = inside.transpose(np.argsort(order))
        indices = rng.permutation(shape[0])[: frames * frame].tolist()
        wanted = memory.copy()
        wanted[tuple(slice(shape[dim]) for dim in order)] = slow_truth(
            cache, indices, held, FUNCTIONS[name][1]
        ).transpose(order)
        function = FUNCTIONS[name][0]
        function(cache, indices, Fraction(tokens, held), threads=draw(st.integers(1, 3)))
        np.testing.assert_array_equal(memory, wanted)

    law()


def test_any_view_is_made_what_the_definition_says_and_nothing_else_is_touched():
    check_any_view()


@pytest.mark.parametrize("nbytes", [1, 100, 1000])
def test_frames_that_take_several_buffers_are_done_the_same(monkeypatch, nbytes):
    monkeypatch.setattr(repack_run, "BUFFER_BYTES", nbytes)
    check_any_view()


def test_a_defect_of_the_batches_is_caught(monkeypatch):
    right = repack.Repack.bind

    def as_if_all_fitted(self, block_ids, batch_frames=0):
        gather, scatter = right(self, block_ids, batch_frames)
        if batch_frames:
            scatter["source_block"] = scatter["source_block"][::-1]
        return gather, scatter

    monkeypatch.setattr(repack_run, "BUFFER_BYTES", 100)
    monkeypatch.setattr(repack.Repack, "bind", as_if_all_fitted)
    with pytest.raises(AssertionError, match="Arrays are not equal"):
        check_any_view(phases=[Phase.generate], database=None, derandomize=True)


def test_a_defect_of_the_repack_is_caught(monkeypatch):
    right = make_repack

    def heads_taken_for_tokens(units, **options):
        made = right(units, **options)
        scatter = made.scatter.copy()
        if options["held_block_size"] != options["block_size"]:
            scatter["source_token_stride"] = scatter["source_head_stride"]
        return dataclasses.replace(made, scatter=scatter)

    monkeypatch.setattr(postprocess, "make_repack", heads_taken_for_tokens)
    postprocess.repack_of.cache_clear()
    try:
        with pytest.raises(AssertionError, match="Arrays are not equal"):
            check_any_view(phases=[Phase.generate], database=None, derandomize=True)
    finally:
        postprocess.repack_of.cache_clear()


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "heads", "elements", "ratio"),
    [
        (1, 3, 64, 1),
        (16, 1, 128, 4),
        (16, 3, 64, 2),
        (8, 9, 80, 4),
        (4, 3, 576, 2),
        (2, 9, 128, Fraction(1, 2)),
        (6, 3, 80, Fraction(3, 2)),
    ],
    ids=str,
)
def test_odd_shapes_in_every_dtype(method, device, name, dtype, tokens, heads, elements, ratio):
    rng = np.random.default_rng(5)
    held = tokens if name == "layout" else int(tokens / ratio)
    frame = math.lcm(tokens, held) // tokens
    cache = make_cache(rng, 3 * frame, tokens, heads, elements, dtype, FUNCTIONS[name][1], device)
    indices = rng.permutation(3 * frame)[: 2 * frame].tolist()
    check(name, cache, indices, held, method=method)


@pytest.mark.parametrize(("tokens", "heads", "elements"), [(256, 3, 64), (64, 9, 128)])
def test_large_blocks(method, device, tokens, heads, elements):
    rng = np.random.default_rng(6)
    for name, held in (("layout", tokens), ("blksize", 32), ("blksize_and_layout", 16)):
        order = FUNCTIONS[name][1]
        cache = make_cache(rng, 3, tokens, heads, elements, torch.float16, order, device)
        check(name, cache, [2], held, method=method)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("elements", [64, 80, 128, 576])
@pytest.mark.parametrize("heads", [1, 3, 9])
def test_every_odd_shape(method, device, heads, elements, dtype):
    rng = np.random.default_rng(7)
    # The interpreter takes seconds for large blocks, which are the same words in every dtype.
    interpreted = method == "triton" and device == "cpu"
    brief = interpreted and (dtype != torch.float8_e4m3fn or elements == 576)
    for tokens in (1, 2, 16, 48) if brief else (1, 2, 16, 48, 128, 256):
        for name in FUNCTIONS:
            for held in {tokens, max(1, tokens // 2), min(2 * tokens, 256)}:
                held = tokens if name == "layout" else held
                frame = math.lcm(tokens, held) // tokens
                order = FUNCTIONS[name][1]
                cache = make_cache(rng, frame + 1, tokens, heads, elements, dtype, order, device)
                check(name, cache, [*range(1, frame + 1)], held, method=method)


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
@pytest.mark.parametrize("ratio", [1, 2, 8])
def test_the_results_are_those_of_the_published_definitions(method, device, name, ratio):
    rng = np.random.default_rng(8)
    ratio = 1 if name == "layout" else ratio
    cache = make_cache(rng, 9, 16, 3, 64, torch.bfloat16, FUNCTIONS[name][1], device)
    wanted = cache.clone(memory_format=torch.preserve_format)
    indices = torch.tensor([7, 2, 3, 8], device=device)
    published(name, wanted, indices, ratio)
    FUNCTIONS[name][0](cache, indices, ratio, method=method)
    np.testing.assert_array_equal(bits(cache), bits(wanted))


def test_all_layers_go_together(method, device):
    rng = np.random.default_rng(9)
    caches = [make_cache(rng, 6, 4, 3, 80, torch.float16, device=device) for _ in range(5)]
    wanted = [slow_truth(bits(cache), [4, 1], 4, "NHD") for cache in caches]
    kv_postprocess_layout_on_receive(caches, [4, 1], method=method)
    for cache, truth in zip(caches, wanted, strict=True):
        np.testing.assert_array_equal(bits(cache), truth)


# ---- the same caches again ---------------------------------------------------------------------


def test_a_new_view_is_not_taken_for_one_that_is_gone(method, device):
    memory = make_cache(np.random.default_rng(11), 6, 4, 4, 8, torch.float16, device=device)
    identities = set()
    for number in range(8):
        view = memory[:, :2] if number % 2 else memory[:, :, :2]
        identities.add(id(view))
        truth = slow_truth(bits(view), [4, 1], view.shape[1], "NHD")
        kv_postprocess_layout_on_receive(view, [4, 1], method=method)
        np.testing.assert_array_equal(bits(view), truth)
        del view
    assert len(identities) < 8  # new views took the places of others, at the same address


def test_tensors_that_got_other_memory_are_found_there(method, device):
    rng = np.random.default_rng(12)
    caches = [make_cache(rng, 6, 4, 3, 8, torch.float16, device=device) for _ in range(3)]
    before = [cache.clone() for cache in caches]
    kv_postprocess_layout_on_receive(caches, [2], method=method)
    kept = caches[1].data
    caches[1].data = before[1].clone()
    untouched = bits(kept).copy()
    kv_postprocess_layout_on_receive(caches, [2], method=method)
    np.testing.assert_array_equal(bits(kept), untouched)
    truth = slow_truth(bits(before[1]), [2], 4, "NHD")
    np.testing.assert_array_equal(bits(caches[1]), truth)
    others = [0, 1, 3, 4, 5]
    np.testing.assert_array_equal(bits(caches[0])[others], bits(before[0])[others])


def test_tensors_that_were_given_are_not_kept_alive():
    caches = [torch.zeros(2, 2, 2, 1) for _ in range(3)]
    kv_postprocess_layout_on_receive(caches, [1])
    references = [weakref.ref(cache) for cache in caches]
    del caches
    gc.collect()
    assert [reference() for reference in references] == [None] * 3


# ---- packed K and V ----------------------------------------------------------------------------


def test_packed_k_and_v_are_one_cache_with_longer_elements_or_two_views(method, device):
    rng = np.random.default_rng(10)
    packed = make_cache(rng, 5, 8, 3, 32, torch.bfloat16, "HND", device)
    apart = packed.clone(memory_format=torch.preserve_format)
    kv_postprocess_blksize_on_receive(packed, [3, 1], 2, method=method)
    for half in (apart[..., :16], apart[..., 16:]):
        check("blksize", half, [3, 1], 4, method=method)
    wanted = slow_truth(bits(packed), [], 4, "HND")
    assert wanted.shape == bits(apart).shape


# ---- what is refused ---------------------------------------------------------------------------


def small_cache():
    return np.arange(6 * 4 * 2 * 3).reshape(6, 4, 2, 3)


def test_indices_that_make_no_whole_remote_block_are_refused():
    cache = small_cache()
    before = cache.copy()
    with pytest.raises(ValueError, match="3 blocks, but 2 consecutive ones"):
        kv_postprocess_blksize_on_receive(cache, [1, 2, 3], 0.5)
    np.testing.assert_array_equal(cache, before)


@pytest.mark.parametrize("ratio", [0, -1, 3, 8, 0.7, math.nan, math.inf])
def test_a_ratio_that_makes_no_whole_tokens_is_refused(ratio):
    with pytest.raises(ValueError, match="block_size_ratio"):
        kv_postprocess_blksize_on_receive(small_cache(), [1], ratio)


def test_a_ratio_may_be_written_as_a_float():
    one, two = small_cache(), small_cache()
    kv_postprocess_blksize_and_layout_on_receive(one, [1, 2, 3], 1 / 3)
    kv_postprocess_blksize_and_layout_on_receive(two, [1, 2, 3], Fraction(1, 3))
    np.testing.assert_array_equal(one, two)
    assert (one != small_cache()).any()


@pytest.mark.parametrize("block", [-1, 6])
def test_a_block_outside_the_cache_is_refused_before_anything_moves(block):
    cache = small_cache()
    with pytest.raises(BlockIdError, match=f"block {block} does not exist; there are 6"):
        kv_postprocess_layout_on_receive(cache, [1, block])
    np.testing.assert_array_equal(cache, small_cache())


@pytest.mark.parametrize(
    "ids", [[1.7], ["1"], [2**64], np.array([False, True]), torch.tensor([True]), torch.ones(1)]
)
def test_ids_that_are_no_whole_numbers_are_refused_before_anything_moves(ids):
    cache = small_cache()
    for operation in (kv_postprocess_layout_on_receive, partial(zero_tail, num_tokens=0)):
        with pytest.raises(BlockIdError, match=r"ids are .*, not 64-bit whole numbers"):
            operation(cache, ids)
    np.testing.assert_array_equal(cache, small_cache())


def test_ids_may_be_a_list_an_array_or_a_tensor(method, device):
    rng = np.random.default_rng(13)
    cache = make_cache(rng, 6, 4, 3, 8, torch.float16, device=device)
    truth = slow_truth(bits(cache), [4, 1, 2], 4, "NHD")
    kv_postprocess_layout_on_receive(cache, [4], method=method)
    kv_postprocess_layout_on_receive(cache, np.array([1], dtype=np.int32), method=method)
    kv_postprocess_layout_on_receive(cache, torch.tensor([2], device=device), method=method)
    np.testing.assert_array_equal(bits(cache), truth)


def test_a_block_that_stands_twice_is_done_once():
    one, two = small_cache(), small_cache()
    kv_postprocess_layout_on_receive(one, [3, 1, 3])
    kv_postprocess_layout_on_receive(two, [1, 3])
    np.testing.assert_array_equal(one, two)


def test_a_block_that_stands_in_two_remote_blocks_is_refused():
    with pytest.raises(ValueError, match="3 stands twice"):
        kv_postprocess_blksize_on_receive(small_cache(), [3, 1, 2, 3], 0.5)


@pytest.mark.parametrize("number", [2, 64, 66, 300])  # the ids of up to 64 are checked otherwise
def test_few_ids_and_many_ids_are_checked_alike(number):
    cache = np.arange((number + 2) * 8).reshape(-1, 4, 2, 1)
    before, ids = cache.copy(), list(range(number))[::-1]
    for wrong in (-1, number + 2):
        with pytest.raises(BlockIdError, match=f"block {wrong} does not exist"):
            kv_postprocess_layout_on_receive(cache, [*ids[1:], wrong])
    with pytest.raises(ValueError, match="block ids: 1 stands twice"):
        kv_postprocess_blksize_on_receive(cache, [*ids[2:], 1, 1], 0.5)
    np.testing.assert_array_equal(cache, before)
    kv_postprocess_layout_on_receive(cache, [*ids[1:], ids[1]])
    moved = (cache != before).any(axis=(1, 2, 3))
    assert moved.tolist() == [True] * (number - 1) + [False] * 3


def test_caches_that_are_not_alike_are_refused():
    with pytest.raises(ValueError, match="call once per kind"):
        kv_postprocess_layout_on_receive([small_cache(), small_cache()[:, :2]], [1])
    with pytest.raises(ValueError, match="no caches"):
        kv_postprocess_layout_on_receive([], [1])
    with pytest.raises(ValueError, match=r"view it as \[blocks, tokens, heads, elements\]"):
        kv_postprocess_layout_on_receive(small_cache()[0], [1])
    cache = small_cache()
    cache.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        kv_postprocess_layout_on_receive(cache, [1])


@pytest.mark.parametrize("method", ["torch", "triton"])
def test_arrays_are_for_numba(method):
    with pytest.raises(ValueError, match="write numba"):
        kv_postprocess_layout_on_receive(small_cache(), [1], method=method)


def test_the_default_method_follows_the_memory(monkeypatch):
    assert postprocess.default_method("cpu") == "numba"
    assert postprocess.default_method("xpu") == "torch"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert postprocess.default_method("cuda") == "torch"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert postprocess.default_method("cuda") == "triton"


# ---- the tail ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_only_what_no_token_covers_is_zeroed(dtype):
    @LAW
    @given(st.integers(1, 5), st.integers(0, 4), st.data())
    def law(block_size, blocks, data):
        num_tokens = data.draw(st.integers(0, blocks * block_size + 2))
        rng = np.random.default_rng(num_tokens)
        caches = [make_cache(rng, 6, block_size, 2, 3, dtype) for _ in range(2)]
        blocks_used = (rng.permutation(5)[:blocks] + 1).tolist()
        table = [0 if data.draw(st.booleans()) else block for block in blocks_used]
        wanted = [bits(cache).copy() for cache in caches]
        for token in range(num_tokens, blocks * block_size):
            block = table[token // block_size]
            if block != 0:
                for truth in wanted:
                    truth[block, token % block_size] = 0
        zero_tail(caches, table, num_tokens)
        for cache, truth in zip(caches, wanted, strict=True):
            np.testing.assert_array_equal(bits(cache), truth)

    law()


def test_a_negative_number_of_tokens_has_no_tail():
    with pytest.raises(ValueError, match="num_tokens: -1"):
        zero_tail(small_cache(), [1], -1)


@pytest.mark.parametrize("block", [-1, 6])
def test_a_table_with_a_block_outside_the_cache_has_no_tail(block):
    cache = small_cache()
    with pytest.raises(BlockIdError, match=f"block {block} does not exist; there are 6"):
        zero_tail(cache, [1, block], 0)
    np.testing.assert_array_equal(cache, small_cache())


def test_warm_compiles_the_hosts_kernel():
    postprocess.warm()
    kernel: Any = repack_run.repack_table
    assert kernel.signatures
