"""Paged attention of groups that share memory, with windows, against attention over plain lists."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.attention import attend, build_batch, write_kv
from kvferry.engine.messages import ScheduledRequest
from kvferry.engine.shard import PagedKVCache
from kvferry.errors import BlockTableError
from kvferry.layouts.layout import LAYOUT_NAMES, Layout
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.memory import memory_of

HEAD = 4
QUERIES_PER_HEAD = 2
ORDERS = st.permutations("KBNHD").map("".join) | st.permutations("LKBNHD").map("".join)


def geometry(layers, **values):
    defaults: dict[str, Any] = {
        "num_kv_heads": 2,
        "head_size": HEAD,
        "dtype": "float64",
        "block_size": 4,
        "layout": "NHD",
        "parallel": ParallelShape(),
    }
    return EngineGeometry(num_layers=len(layers), layer_indices=layers, **(defaults | values))


@dataclass
class Case:
    groups: list[EngineGeometry]
    layer_windows: dict[int, int]
    """What a layer computes within, where that is less than its group keeps."""
    lengths: list[tuple[int, int]]
    """Of each request: tokens before the step, and tokens of the step."""
    tables: list[list[list[int]]]
    """By request, then by group; what the group no longer keeps is null."""
    num_blocks: int

    def window(self, group, layer):
        return self.layer_windows.get(layer, group.sliding_window)


@st.composite
def cases(draw):
    kinds = draw(st.lists(st.sampled_from([None, 1, 2, 5, 9]), min_size=1, max_size=3))
    group_of = [*range(len(kinds)), *draw(st.lists(st.sampled_from(range(len(kinds))), max_size=4))]
    group_of = draw(st.permutations(group_of))
    shape = {"block_size": draw(st.integers(1, 5)), "layout": Layout(draw(ORDERS))}
    layers = [[n for n, group in enumerate(group_of) if group == g] for g in range(len(kinds))]
    groups = [
        geometry(held, sliding_window=kept, **shape)
        for held, kept in zip(layers, kinds, strict=True)
    ]
    narrower = {
        layer: draw(st.integers(1, group.sliding_window or 12))
        for group in groups
        for layer in group.model_layers
        if draw(st.booleans())
    }
    count = st.sampled_from([1, 1, 1, 2, 3, 7])
    lengths = draw(st.lists(st.tuples(st.integers(0, 14), count), min_size=1, max_size=4))
    size = shape["block_size"]
    needed = [-(-sum(it) // size) for it in lengths for _ in groups]
    free = iter(draw(st.permutations(range(1, 1 + sum(needed)))))
    tables = [
        [
            [
                0 if (block + 1) * size <= group.first_kept_token(before) else next(free)
                for block in range(-(-(before + now) // size))
            ]
            for group in groups
        ]
        for before, now in lengths
    ]
    return Case(groups, narrower, lengths, tables, 1 + sum(needed))


def plain_attention(q_HD, k_LHD, v_LHD):
    """One token's attention, head by head."""
    rows = []
    for index, query in enumerate(q_HD):
        head = index // QUERIES_PER_HEAD
        rows.append((k_LHD[:, head] @ query / HEAD**0.5).softmax(0) @ v_LHD[:, head])
    return torch.stack(rows)


@settings(max_examples=150, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**32))
def test_a_layer_sees_its_window_of_its_own_sequence_and_of_its_own_group_only(case, seed):
    # All ones is a NaN: whatever is read without having been written shows.
    memory = np.full(PagedKVCache.nbytes(case.groups, 0, case.num_blocks), 0xFF, np.uint8)
    cache = PagedKVCache(case.groups, 0, case.num_blocks, memory)
    random = torch.Generator().manual_seed(seed)
    requests = [
        ScheduledRequest(
            request_id=str(number),
            token_ids=[number] * now,
            first_position=before,
            block_ids=tuple(tables),
        )
        for number, ((before, now), tables) in enumerate(
            zip(case.lengths, case.tables, strict=True)
        )
    ]
    batch = build_batch(requests, case.groups, torch.float64, case.layer_windows)
    sequences = {}
    for index, group in enumerate(case.groups):
        for layer in group.model_layers:
            known = sequences[layer] = [
                torch.randn(2, before + now, 2, HEAD, generator=random, dtype=torch.float64)
                for before, now in case.lengths
            ]
            for request, cells in zip(requests, known, strict=True):  # written cell by cell
                before, table = request.first_position, request.block_ids[index]
                for position in range(group.first_kept_token(before), before):
                    block, offset = divmod(position, group.block_size)
                    for part, cells_LHD in zip(cache.layer(layer), cells, strict=True):
                        part[table[block], offset] = cells_LHD[position]
            new = [cells[:, -now:] for cells, (_, now) in zip(known, case.lengths, strict=True)]
            write_kv(cache.layer(layer), batch.layers[layer], *torch.cat(new, dim=1))
    for group in case.groups:
        for layer in group.model_layers:
            q_THD = torch.randn(
                len(batch.tokens), 2 * QUERIES_PER_HEAD, HEAD, generator=random, dtype=torch.float64
            )
            keys_and_values: Any = cache.layer(layer)
            found = iter(attend(q_THD, keys_and_values, batch.layers[layer]))
            queries = iter(q_THD)
            for (keys, values), (before, now) in zip(sequences[layer], case.lengths, strict=True):
                for position in range(before, before + now):
                    first = max(0, position + 1 - (case.window(group, layer) or position + 1))
                    seen = slice(first, position + 1)
                    expected = plain_attention(next(queries), keys[seen], values[seen])
                    torch.testing.assert_close(next(found), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_groups_take_the_memory_of_the_largest(layout):
    groups = [geometry([0, 1, 4], layout=layout), geometry([2, 3], layout=layout, sliding_window=8)]
    alone = groups[0].nbytes(0, 10)
    assert PagedKVCache.nbytes(groups, 0, 10) == alone
    assert PagedKVCache.nbytes(groups[::-1], 0, 10) == alone
    memory = np.zeros(alone + 100, np.uint8)
    cache = PagedKVCache(groups, 0, 10, memory)
    for layer in range(5):
        for cells_BNHD in cache.layer(layer):
            cells_BNHD[:] = 1.0
    assert not memory[alone:].any()
    assert memory[:alone].view(np.float64).all()


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_a_connector_finds_every_layer_of_every_group_in_one_region(layout):
    shape = {"layout": layout, "parallel": ParallelShape(tp=2, pp=2)}
    groups = [
        geometry([0, 1, 4], layer_split=(2, 1), **shape),
        geometry([2, 3], layer_split=(0, 2), sliding_window=8, **shape),
    ]
    for rank in range(4):
        memory = np.zeros(PagedKVCache.nbytes(groups, rank, 10), np.uint8)
        cache = PagedKVCache(groups, rank, 10, memory)
        held = [layer for group in groups for layer in group.layers(rank)]
        assert list(cache.tensors) == [f"layer.{layer}" for layer in held]
        for group in groups:
            tensors = {name: cache.tensors[f"layer.{name}"] for name in group.layers(rank)}
            if not tensors:
                continue
            named = {group.layer_name(layer): tensor for layer, tensor in tensors.items()}
            placed, regions = memory_of(group, rank, named)
            assert len(regions) == 1
            assert regions[0].ctypes.data == memory.ctypes.data
            assert placed.num_blocks == 10
            for layer, tensor in zip(tensors, placed.tensors, strict=True):
                for name, cells_BNHD in zip("kv", cache.layer(layer), strict=True):
                    part = tensor.parts[name]
                    assert memory.ctypes.data + tensor.offset + part.offset == cells_BNHD.data_ptr()
                    strides = (part.block, part.token, part.head, part.element)
                    assert strides == tuple(8 * stride for stride in cells_BNHD.stride())


def test_blocks_of_other_sizes_share_memory_where_their_bytes_agree():
    """Two heads in blocks of 4 tokens, and one head in blocks of 8."""
    groups = [geometry([0, 2]), geometry([1], num_kv_heads=1, block_size=8, sliding_window=8)]
    cache = PagedKVCache(groups, 0, 6, np.zeros(PagedKVCache.nbytes(groups, 0, 6), np.uint8))
    for cells_BNHD in cache.layer(0):
        cells_BNHD[3] = 3.0
    for found, other in ((1, 3.0), (2, 0.0)):
        for cells_BNHD in cache.layer(found):
            assert (cells_BNHD[3] == other).all()
            assert not cells_BNHD[[0, 1, 2, 4, 5]].any()


@pytest.mark.parametrize(
    ("first", "other"),
    [
        ({}, {"num_kv_heads": 1}),
        ({}, {"layout": "HND", "block_size": 2}),
        ({}, {"layout": "BKNHD"}),
        # Equal bytes per block, but not in equal places.
        ({"layout": "KHBND"}, {"layout": "KHBND", "num_kv_heads": 1, "block_size": 8}),
        # Equal bytes from one block to the next, but not in equal places.
        ({}, {"layout": "KHBND", "block_size": 8}),
    ],
)
def test_groups_whose_blocks_would_overlap_are_refused(first, other):
    groups = [geometry([0], **first), geometry([1], **other)]
    with pytest.raises(ValueError, match="give all groups the same bytes per block"):
        PagedKVCache(groups, 0, 6, np.zeros(1 << 16, np.uint8))


def test_values_may_be_a_part_of_the_keys():
    """As with MLA, whose latent is both."""
    group = geometry([0], use_mla=True, num_kv_heads=1, head_size=6)
    cache = PagedKVCache([group], 0, 5, np.zeros(group.nbytes(0, 5), np.uint8))
    (latent_BNHD,) = cache.layer(0)
    request = ScheduledRequest(
        request_id="r", token_ids=[1] * 5, first_position=0, block_ids=([3, 1],)
    )
    layer = build_batch([request], [group], torch.float64).layers[0]
    new_THD, q_THD = torch.randn(5, 1, 6).double(), torch.randn(5, 3, 6).double()
    write_kv((latent_BNHD,), layer, new_THD)
    found = attend(q_THD, (latent_BNHD, latent_BNHD[..., :4]), layer, scale=0.7)
    assert found.shape == (5, 3, 4)
    for token in range(5):
        seen = new_THD[: token + 1, 0]
        expected = (q_THD[token] @ seen.T * 0.7).softmax(-1) @ seen[:, :4]
        torch.testing.assert_close(found[token], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        (([1, 2, 3],), "request 'r': 1 block tables for 2 KV cache groups"),
        (([1, 2, 3], [0, 0]), "9 tokens need 3 blocks of 4, its table has 2"),
        (([1, 2, 3], [0, 0, 5]), "entry 1 of its table is the null block, but tokens from 5"),
        (([0, 2, 3], [0, 4, 5]), "entry 0 of its table is the null block, but tokens from 0"),
    ],
)
def test_tables_without_a_block_that_is_needed_are_refused(tables, message):
    groups = [geometry([0]), geometry([1], sliding_window=4)]
    request = ScheduledRequest(request_id="r", token_ids=[1], first_position=8, block_ids=tables)
    with pytest.raises(BlockTableError, match=message):
        build_batch([request], groups, torch.float64)
    whole = ScheduledRequest(
        request_id="r", token_ids=[1], first_position=8, block_ids=([1, 2, 3], [0, 4, 5])
    )
    assert build_batch([whole], groups, torch.float64).layers[1].calls[0].blocks.tolist() == [4, 5]
