"""Tokens interleaved over ranks: who holds which, what two ranks share, and that runs stay few."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.errors import NullBlockError
from kvferry.explain import explain_transfer
from kvferry.topology import ParallelShape, plan_transfer
from kvferry.topology.binding import shared_spans
from kvferry.topology.sharding import TokenShard
from tests import geometries

PROPERTY = settings(max_examples=300, deadline=None)

geometry = partial(geometries.geometry, block_size=16)


@st.composite
def shards(draw):
    count = draw(st.integers(1, 5))
    turn = draw(st.integers(1, 4)) if count > 1 else 1
    return TokenShard(count, draw(st.integers(0, count - 1)), turn)


def tokens_of(shard, first, last):
    """By definition: every token goes to the rank whose turn it is."""
    return [
        token
        for token in range(first, last)
        if token // shard.interleave_size % shard.num_ranks == shard.rank
    ]


@PROPERTY
@given(shards(), st.integers(0, 60))
def test_slots_number_the_tokens_of_a_shard(shard, last):
    tokens = tokens_of(shard, 0, last)
    np.testing.assert_array_equal(shard.slots(np.array(tokens, dtype=int)), range(len(tokens)))
    np.testing.assert_array_equal(shard.tokens(np.arange(len(tokens))), tokens)
    assert int(shard.slots(np.array([last]))[0]) == len(tokens)


@PROPERTY
@given(shards(), shards())
def test_two_shards_meet_if_any_token_is_in_both(one, two):
    tokens = [set(tokens_of(shard, 0, one.period * two.period)) for shard in (one, two)]
    assert one.meets(two) == two.meets(one) == bool(tokens[0] & tokens[1])


@PROPERTY
@given(shards(), shards(), st.data())
def test_spans_hold_every_shared_token_once_and_stay_in_blocks(one, two, data):
    sizes = tuple(
        shard.interleave_size * data.draw(st.integers(1, 5), label="turns per block")
        for shard in (one, two)
    )
    last = data.draw(st.integers(0, 200), label="last")
    first = data.draw(st.integers(0, last), label="first")
    spans = shared_spans(one, two, sizes, (first, last))
    found = []
    for token, source, target, count in zip(*spans[:4], strict=True):
        assert count > 0
        for i in range(count):
            slots = source + i * spans.steps[0], target + i * spans.steps[1]
            for slot, start, size in zip(slots, (source, target), sizes, strict=True):
                assert slot // size == start // size
            both = one.tokens(np.array(slots[:1])), two.tokens(np.array(slots[1:]))
            assert both[0] == both[1]
            assert i or both[0] == token
            found.append(int(both[0][0]))
    wanted = set(tokens_of(one, first, last)) & set(tokens_of(two, first, last))
    assert sorted(found) == sorted(wanted)
    assert (np.diff(spans.tokens) > 0).all()


@pytest.mark.parametrize(
    ("turn", "runs_per_entry"),
    [(1, 1), (2, 2), (4, 4), (8, 2), (16, 1)],  # never more than the square root of a block
)
def test_interleaved_tokens_stay_factored(turn, runs_per_entry):
    shape = ParallelShape(tp=8, dcp=4, interleave_size=turn)
    source, target = geometry(parallel=shape), geometry(block_size=64)
    copies = plan_transfer(source=source, target=target).bind(range(1, 9), range(1, 9), 512)
    assert {len(runs) for runs in copies.context_runs.values()} == {8 * runs_per_entry}
    assert copies.num_tokens == 512
    assert copies.nbytes == 512 * 2 * 2 * 2 * 4 * 4


def test_equal_interleaving_on_both_sides_copies_whole_blocks():
    one = geometry(parallel=ParallelShape(tp=8, dcp=4))
    made = plan_transfer(source=one, target=one, target_rank=6)
    copies = made.bind([4, 5], [7, 8], 128)
    assert made.source_contexts == (2,)
    assert copies.context_runs[2].tolist() == [(4, 0, 7, 0, 16, 1, 1), (5, 0, 8, 0, 16, 1, 1)]


def test_a_rank_reads_only_from_ranks_that_hold_its_tokens():
    source = geometry(parallel=ParallelShape(tp=8, dcp=4, interleave_size=2))
    target = geometry(parallel=ParallelShape(tp=4, dcp=2, interleave_size=2))
    made = plan_transfer(source=source, target=target, target_rank=1)  # dcp rank 1 of head 0
    assert made.source_contexts == (1, 3)
    assert set(made.source_ranks) == {1, 3}


def test_replicas_of_a_context_rank_share_the_work():
    source = geometry(num_kv_heads=1, parallel=ParallelShape(tp=8, dcp=2))
    given_ = {
        rank
        for target_rank in range(4)
        for rank in plan_transfer(
            source=source,
            target=geometry(num_kv_heads=1, parallel=ParallelShape(tp=4)),
            target_rank=target_rank,
        ).source_ranks
    }
    assert given_ == set(range(8))


def test_prefill_context_ranks_lie_between_stages_and_tensor_parallelism():
    shape = ParallelShape(tp=2, pp=2, pcp=3)
    one = geometry(parallel=shape)
    assert [shape.context_rank(rank) for rank in range(12)] == [0, 0, 1, 1, 2, 2] * 2
    assert one.virtual_block_size == 48
    assert list(one.ranks_with(layer=1, head=1, context=2)) == [11]


def test_a_null_source_block_is_an_error_only_for_ranks_that_need_it():
    one = geometry(block_size=4, parallel=ParallelShape(pcp=2, interleave_size=4))
    target = geometry(block_size=4)
    target = dataclasses.replace(target, parallel=ParallelShape(pcp=2, interleave_size=2))
    made = plan_transfer(source=one, target=target)
    with pytest.raises(NullBlockError, match="source block of token 8 is the null block"):
        made.bind([1, 0], [1, 2], 16)
    assert made.bind([1, 0], [1, 0], 16).num_tokens == 4


def test_bytes_of_a_token_are_counted_once_whatever_the_context_ranks():
    target = geometry()
    whole = plan_transfer(source=target, target=target)
    spread = plan_transfer(source=geometry(parallel=ParallelShape(pcp=3)), target=target)
    assert spread.bytes_per_token == whole.bytes_per_token == 2 * 2 * 2 * 4 * 4
    assert len(spread.pieces) == 3 * len(whole.pieces)


def test_what_an_interleaved_transfer_costs_adds_up():
    source = geometry(parallel=ParallelShape(tp=4, dcp=2))
    costs = explain_transfer(source=source, target=geometry(), num_tokens=35)
    assert [cost.source_rank for cost in costs] == [0, 1, 2, 3]
    assert sum(cost.nbytes for cost in costs) == 35 * 2 * 2 * 2 * 4 * 4
    assert costs[0].nbytes == 18 * 2 * 2 * 4 * 4  # tokens 0, 2, ... 34 of head 0
    # A request that is too short for a rank leaves it out.
    short = explain_transfer(source=source, target=geometry(), num_tokens=1)
    assert [cost.source_rank for cost in short] == [0, 2]


def test_binding_interleaved_tokens_needs_no_memory_of_the_pattern(monkeypatch):
    """A peer chooses its interleave size: the common pattern may be longer than any request."""
    source = geometry(block_size=1 << 19, parallel=ParallelShape(pcp=3, interleave_size=1 << 19))
    target = geometry(block_size=3 * 5 * 7 * 11, parallel=ParallelShape(pcp=2, interleave_size=77))
    copies = plan_transfer(source=source, target=target).bind([1], range(1, 30), 3000)
    assert copies.num_tokens == len(tokens_of(TokenShard(2, 0, 77), 0, 3000))
