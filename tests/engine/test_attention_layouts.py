"""Paged attention against attention over plain lists, for any layout and any batch."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.engine.attention import attend, build_batch, write_kv
from kvferry.engine.messages import SamplingParams, ScheduledRequest
from kvferry.engine.shard import PagedKVCache
from kvferry.errors import BlockTableError
from kvferry.layouts.layout import Layout
from kvferry.topology import EngineGeometry, ParallelShape

HEAD = 4
NUM_BLOCKS = 40

OUTER = st.permutations("KBNHD").map("".join) | st.permutations("LKBNHD").map("".join)
PACKED = st.permutations("BNHC").map("".join) | st.permutations("LBNHC").map("".join)
INNER = st.tuples(
    st.permutations("KBH").map("".join) | st.permutations("LKBH").map("".join),
    st.sampled_from(["DN", "ND"]),
    st.sampled_from(["DN", "ND"]),
).map(lambda it: Layout(it[0], {"k": it[1], "v": it[2]}))
LAYOUTS = OUTER.map(Layout) | PACKED.map(Layout) | INNER


@st.composite
def batches(draw):
    """Requests of one step: how many tokens each had before, and how many it computes now."""
    block_size = draw(st.integers(1, 5))
    lengths = draw(
        st.lists(
            st.tuples(st.integers(0, 14), st.sampled_from([1, 1, 1, 2, 3, 7])),
            min_size=1,
            max_size=5,
        )
    )
    blocks = draw(st.permutations(range(1, 1 + sum(-(-sum(it) // block_size) for it in lengths))))
    return block_size, lengths, list(blocks)


def one_layer(**values):
    defaults: dict[str, Any] = {
        "num_layers": 1,
        "num_kv_heads": 1,
        "head_size": HEAD,
        "dtype": "float32",
    }
    return EngineGeometry(**defaults, **values, layout="NHD", parallel=ParallelShape())


def plain_attention(q_HD, k_LHD, v_LHD):
    """One token's attention, head by head."""
    group = len(q_HD) // k_LHD.shape[1]
    rows = []
    for index, query in enumerate(q_HD):
        scores = k_LHD[:, index // group] @ query / HEAD**0.5
        rows.append(scores.softmax(0) @ v_LHD[:, index // group])
    return torch.stack(rows)


@settings(max_examples=150, deadline=None)
@given(
    layout=LAYOUTS,
    batch=batches(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    seed=st.integers(0, 2**32),
)
def test_every_token_attends_to_its_own_sequence_only(layout, batch, kv_heads, group, seed):
    block_size, lengths, free = batch
    num_blocks = 1 + len(free)
    geometry = EngineGeometry(
        num_layers=2,
        num_kv_heads=kv_heads,
        head_size=HEAD,
        dtype="float64",
        block_size=block_size,
        layout=layout,
        parallel=ParallelShape(),
    )
    # All ones is a NaN: whatever is read without having been written shows.
    memory = np.full(geometry.nbytes(0, num_blocks), 0xFF, dtype=np.uint8)
    cache = PagedKVCache((geometry,), 0, num_blocks, memory)
    random = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=random, dtype=torch.float64)

    requests, earlier, sequences = [], [], []
    for number, (before, now) in enumerate(lengths):
        needed = -(-(before + now) // block_size)
        table, free = free[:needed], free[needed:]
        options: dict[str, Any] = {"sample": SamplingParams()} if number % 2 else {}
        requests.append(
            ScheduledRequest(
                request_id=str(number),
                token_ids=[number] * now,
                first_position=before,
                block_ids=(table,),
                **options,
            )
        )
        keys, values = draw(before + now, kv_heads, HEAD), draw(before + now, kv_heads, HEAD)
        sequences.append((keys, values))
        if before:
            earlier.append((requests[-1], keys[:before], values[:before]))
    k, v = cache.layer(1)
    for request, keys, values in earlier:  # written cell by cell
        for position in range(len(keys)):
            block = request.block_ids[0][position // block_size]
            k[block, position % block_size] = keys[position]
            v[block, position % block_size] = values[position]

    step = build_batch(requests, (geometry,), torch.float64)
    new_keys = [keys[-now:] for (keys, _), (_, now) in zip(sequences, lengths, strict=True)]
    new_values = [values[-now:] for (_, values), (_, now) in zip(sequences, lengths, strict=True)]
    q_THD = draw(len(step.tokens), kv_heads * group, HEAD)
    write_kv((k, v), step.layers[1], torch.cat(new_keys), torch.cat(new_values))
    found = attend(q_THD, (k, v), step.layers[1])

    row = 0
    for (keys, values), (before, now) in zip(sequences, lengths, strict=True):
        for position in range(before, before + now):
            expected = plain_attention(q_THD[row], keys[: position + 1], values[: position + 1])
            torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-12)
            row += 1
    assert torch.isnan(torch.stack(cache.layer(0))).all()  # the other layer's cells: untouched
    ends = np.cumsum([now for _, now in lengths]) - 1
    assert step.sampled.tolist() == [int(end) for number, end in enumerate(ends) if number % 2]


def test_views_and_registered_tensors_are_one_memory():
    geometry = EngineGeometry(
        num_layers=3,
        num_kv_heads=2,
        head_size=HEAD,
        dtype="bfloat16",
        block_size=3,
        layout="HND",
        parallel=ParallelShape(pp=2),
    )
    memory = np.zeros(geometry.nbytes(0, NUM_BLOCKS) + 100, dtype=np.uint8)
    cache = PagedKVCache((geometry,), 0, NUM_BLOCKS, memory)
    assert tuple(cache.tensors) == geometry.tensor_names(0)
    k, v = cache.layer(1)
    k[7, 2, 1] = torch.tensor([1.0, 2.0, 3.0, 4.0])
    v[7, 2, 0] = torch.tensor([5.0, 6.0, 7.0, 8.0])
    tensor = cache.tensors["layer.1"]  # [part, block, head, token, element]
    assert tensor.shape == geometry.cache_shape(0, NUM_BLOCKS)
    assert tensor[0, 7, 1, 2].tolist() == [1, 2, 3, 4]
    assert tensor[1, 7, 0, 2].tolist() == [5, 6, 7, 8]
    assert np.count_nonzero(memory) > 0
    assert not memory[-100:].any()


def test_decodes_of_similar_length_share_a_call_and_a_long_one_stands_alone():
    def request(name, length):
        return ScheduledRequest(
            request_id=name,
            token_ids=[1],
            first_position=length - 1,
            block_ids=(list(range(1, length + 1)),),
        )

    step = build_batch(
        [request("a", 30), request("b", 1000), request("c", 40), request("d", 3)],
        (one_layer(block_size=1),),
        torch.float32,
    )
    calls: list[Any] = list(step.layers[0].calls)
    members = sorted(tuple(call.rows.tolist()) for call in calls)
    assert members == [(1,), (2, 0), (3,)]
    padded = next(call for call in calls if call.num_requests == 2)
    assert (padded.tokens, len(padded.padding)) == (slice(0, 40), 10)


def test_a_short_block_table_is_named():
    request = ScheduledRequest(
        request_id="r9", token_ids=[1, 2, 3], first_position=6, block_ids=([4, 5],)
    )
    with pytest.raises(BlockTableError, match="'r9': 9 tokens need 3 blocks of 4, its"):
        build_batch([request], (one_layer(block_size=4),), torch.float32)
