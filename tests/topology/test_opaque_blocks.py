"""Blocks in an order that no layout says move whole, or not at all."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from kvferry.topology import (
    EngineGeometry,
    ParallelShape,
    group_mismatches,
    plan_transfer,
    run_copies,
)

PACKED = EngineGeometry(
    num_layers=2,
    num_kv_heads=2,
    head_size=4,
    dtype="float32",
    block_size=8,
    layout="BH(k=DN,v=ND)",
    parallel=ParallelShape(),
    packing="tiles of 16",
)


def caches(geometry, rank=0, num_blocks=6, seed=0):
    generator = np.random.default_rng(seed)
    shape = geometry.cache_shape(rank, num_blocks)
    return {name: generator.random(shape, dtype=np.float32) for name in geometry.tensor_names(rank)}


@pytest.mark.parametrize("num_tokens", [1, 7, 8, 9, 15, 16])
def test_every_block_that_the_span_touches_moves_whole(num_tokens):
    source, target = caches(PACKED), caches(PACKED, seed=1)
    before = {name: cache.copy() for name, cache in target.items()}
    copies = plan_transfer(source=PACKED, target=PACKED).bind([3, 5], [4, 2], num_tokens)
    run_copies(copies, sources={0: source}, target=target)
    moved = {4: 3, 2: 5} if num_tokens > 8 else {4: 3}
    for name in target:
        for block in range(6):
            expected = source[name][moved[block]] if block in moved else before[name][block]
            assert np.array_equal(target[name][block], expected)


def test_blocks_of_a_local_hit_are_left_alone():
    source, target = caches(PACKED), caches(PACKED, seed=1)
    hit = target["layer.0"][4].copy()
    plan = plan_transfer(source=PACKED, target=PACKED)
    run_copies(plan.bind([3, 5], [4, 2], 12, 8), sources={0: source}, target=target)
    assert np.array_equal(target["layer.0"][4], hit)
    assert np.array_equal(target["layer.0"][2], source["layer.0"][5])


def test_nothing_moves_of_an_empty_span():
    assert plan_transfer(source=PACKED, target=PACKED).bind([3], [4], 5, 5).num_tokens == 0


def test_heads_are_divided_as_ever():
    two = replace(PACKED, parallel=ParallelShape(tp=2))
    source, target = caches(PACKED), caches(two, rank=1, seed=1)
    copies = plan_transfer(source=PACKED, target=two, target_rank=1).bind([3], [4], 5)
    run_copies(copies, sources={0: source}, target=target)
    assert np.array_equal(target["layer.0"][4, 0], source["layer.0"][3, 1])


@pytest.mark.parametrize(
    "other",
    [{"packing": "other tiles"}, {"packing": ""}, {"block_size": 16}],
    ids=["another packing", "none", "another block size"],
)
def test_unequal_blocks_are_a_mismatch_that_names_both(other):
    (mismatch,) = group_mismatches([PACKED], [replace(PACKED, **other)])
    assert "opaque_blocks of layers 0-1: source has tiles of 16 in blocks of 8 tokens" in mismatch
    with pytest.raises(ValueError, match="opaque_blocks"):
        plan_transfer(source=PACKED, target=replace(PACKED, **other))


def test_the_packing_survives_the_wire():
    sent = msgspec.msgpack.encode(PACKED)
    assert msgspec.msgpack.decode(sent, type=EngineGeometry) == PACKED


def test_blocks_whose_tokens_are_spread_cannot_be_opaque():
    with pytest.raises(ValueError, match="dcp=1 and pcp=1"):
        replace(PACKED, parallel=ParallelShape(pcp=2))
