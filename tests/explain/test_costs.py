"""What a transfer costs, how evenly, and what would lower it: against sums that are done slowly."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connectors.pull.groups import SourceGroups
from kvferry.control.tickets import Ticket
from kvferry.explain import Balance, SideChange, explain_transfer, find_savings
from kvferry.explain.costs import (
    balance_over,
    count_segments,
    read_parts,
    segment_lengths,
)
from kvferry.explain.savings import WORTH
from kvferry.layouts import Layout, copier
from kvferry.topology import ParallelShape, pair_groups, plan_transfer, run_copies
from kvferry.topology.typical import typical_copies
from tests import geometries

LAW = settings(max_examples=60, deadline=None)

geometry = partial(geometries.geometry, num_layers=4, num_kv_heads=4)


@st.composite
def engines(draw, num_kv_heads, dtype="float32"):
    return geometry(
        num_kv_heads=num_kv_heads,
        dtype=dtype,
        block_size=draw(st.sampled_from([1, 2, 3, 4, 8])),
        layout=draw(st.sampled_from(["NHD", "HND", "BNHKD", "BLKNHD", "BLHNC"])),
        parallel=ParallelShape(tp=draw(st.integers(1, 5)), pp=draw(st.integers(1, 3))),
    )


@st.composite
def pairs(draw):
    num_kv_heads = draw(st.integers(1, 4))
    target = engines(num_kv_heads, draw(st.sampled_from(["float32", "float64"])))
    return draw(engines(num_kv_heads)), draw(target), draw(st.integers(1, 30))


def test_a_pair_costs_what_its_groups_cost_together():
    whole = geometry()
    parts = [geometry(num_layers=2, layer_indices=indices) for indices in ((0, 3), (1, 2))]
    (one,) = explain_transfer(source=whole, target=whole, num_tokens=10)
    (two,) = explain_transfer(source=whole, target=parts, num_tokens=10)
    assert two == one


@LAW
@given(pair=pairs())
def test_the_short_count_is_the_sum_of_the_long_one(pair):
    source, target, num_tokens = pair
    costs = explain_transfer(source=source, target=target, num_tokens=num_tokens)
    assert count_segments(read_parts(source, target, num_tokens)) == (
        sum(cost.nbytes for cost in costs),
        sum(cost.segments_shuffled for cost in costs),
    )


def test_the_memory_that_engines_describe_decides_how_much_merges():
    source = geometry(num_kv_heads=1)
    memories = [[source.memory(0, 9)]]
    (dense,) = explain_transfer(
        source=source, target=source, num_tokens=32, source_memory=memories, target_memory=memories
    )
    assert dense == explain_transfer(source=source, target=source, num_tokens=32)[0]
    # The same engine with every token padded to twice its bytes: nothing merges beyond a token.
    padded = replace(source, head_size=8)
    (spaced,) = explain_transfer(
        source=source, target=source, num_tokens=32, source_memory=[[padded.memory(0, 9)]]
    )
    assert (spaced.segments_ordered, spaced.nbytes) == (4 * 2 * 32, dense.nbytes)


@LAW
@given(pair=pairs())
def test_a_pair_of_ranks_costs_the_copies_that_are_made_also_where_the_dtype_changes(pair):
    source, target, num_tokens = pair
    room = num_tokens + 1  # blocks of any size, and the null block
    given = {rank: caches(source, rank, room) for rank in range(source.world_size)}
    for cost in explain_transfer(source=source, target=target, num_tokens=num_tokens):
        plan = plan_transfer(source=source, target=target, target_rank=cost.target_rank)
        plan = plan.for_source(cost.source_rank)
        made: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copier, "copy_tiles", noted(copier.copy_tiles, made))
            copies = typical_copies(plan, num_tokens, seed=0)
            run_copies(copies, sources=given, target=caches(target, cost.target_rank, room))
        # With a conversion, copies into chunks and copies out of chunks take turns.
        passes = [made] if plan.conversion is None else [made[::2], made[1::2]]
        assert cost.segments_shuffled == max(map(sum, passes))
        assert cost.segments_shuffled <= cost.rows


def caches(engine, rank, num_blocks):
    shape = engine.cache_shape(rank, num_blocks)
    return {name: np.zeros(shape, engine.dtype) for name in engine.tensor_names(rank)}


def noted(copy_tiles, made):
    def copy(*arguments):
        made.append(copy_tiles(*arguments))
        return made[-1]

    return copy


def test_a_change_of_the_dtype_costs_no_more_copies_and_hides_no_saving():
    source = geometry(num_kv_heads=8, block_size=16, layout="HND", dtype="bfloat16")
    same = replace(source, layout=Layout.named("NHD"))
    wider = replace(same, dtype="float32")

    assert explain_transfer(source=source, target=wider, num_tokens=640) == explain_transfer(
        source=source, target=same, num_tokens=640
    )
    savings = find_savings([source], [wider], 640)
    assert savings == find_savings([source], [same], 640)
    assert savings[0].factor == 16 * 8


# ---- balance -----------------------------------------------------------------------------------


def given_by(costs):
    return [(cost.source_rank, cost.nbytes) for cost in costs]


def taken_by(costs):
    return [(cost.target_rank, cost.nbytes) for cost in costs]


def test_balance_counts_idle_ranks_and_every_link_once():
    source = geometry(num_kv_heads=2, parallel=ParallelShape(tp=4))
    target = geometry(num_kv_heads=2, num_layers=4, parallel=ParallelShape(tp=2, pp=4))
    costs = explain_transfer(source=source, target=target, num_tokens=8)
    each = 2 * 4 * 4 * 8  # bytes of k and v of a layer and a head
    assert [cost.nbytes for cost in costs] == [each] * len(costs)
    assert balance_over(taken_by(costs), 8) == Balance((each,) * 8)
    sources = balance_over(given_by(costs), 4)
    assert sum(sources.nbytes) == 8 * each
    assert all(nbytes == 2 * each for nbytes in sources.nbytes)  # replicas share the work
    assert sources.idle == ()
    lonely = balance_over(given_by([cost for cost in costs if cost.source_rank != 2]), 4)
    assert lonely.idle == (2,)
    assert lonely.peak == pytest.approx(4 / 3)


# ---- advice ------------------------------------------------------------------------------------


def segments(source, target, num_tokens):
    costs = explain_transfer(source=source, target=target, num_tokens=num_tokens)
    return sum(cost.segments_shuffled for cost in costs)


@LAW
@given(pair=pairs())
def test_a_saving_is_what_the_changed_engines_really_cost(pair):
    source, target, num_tokens = pair
    nbytes = sum(c.nbytes for c in explain_transfer(source=source, target=target, num_tokens=9))
    best = 1.0
    for saving in find_savings([source], [target], num_tokens):
        one, two = saving.source.apply([source]), saving.target.apply([target])
        assert saving.segments_now == segments(source, target, num_tokens)
        assert saving.segments == segments(one, two, num_tokens)
        assert saving.factor >= WORTH * best  # more work must pay
        best = saving.factor
        moved = sum(c.nbytes for c in explain_transfer(source=one, target=two, num_tokens=9))
        assert moved == nbytes


def test_the_least_change_comes_first_and_more_work_only_where_it_pays():
    prefill = geometry(num_kv_heads=8, block_size=16, layout="HND")
    decode = geometry(num_kv_heads=8, block_size=64, layout="NHD")
    one, two, *_ = find_savings([prefill], [decode], 640)
    # In NHD the 16 tokens that share a block are one run of all heads: 16 × 8 rows.
    assert (one.source, one.target) == (SideChange(layout=Layout.named("NHD")), SideChange())
    assert one.factor == pytest.approx(16 * 8, rel=0.1)  # a few shuffled blocks are neighbours
    # With equal blocks, a block is one run: 64 × 8 rows.
    assert (two.source, two.target) == (
        SideChange(layout=Layout.named("NHD"), block_size=64),
        SideChange(),
    )
    assert two.factor == pytest.approx(64 * 8, rel=0.1)


def test_engines_that_are_alike_are_advised_to_change_nothing_they_have_in_common():
    one = geometry(layout="BNHKD")
    assert find_savings([one], [one], 64) == ()


def test_a_change_that_makes_other_engines_is_no_saving():
    # With tp=1 on decode fewer copies of the one head would move: other engines, not a saving.
    source = geometry(num_kv_heads=1)
    target = geometry(num_kv_heads=1, parallel=ParallelShape(tp=4))
    for saving in find_savings([source], [target], 64):
        assert saving.source.tp is saving.target.tp is None


def test_a_change_of_blocks_keeps_the_proportions_of_groups():
    groups = [
        geometry(num_layers=2, layer_indices=(0, 1), block_size=16),
        geometry(num_layers=2, layer_indices=(2, 3), block_size=32, sliding_window=8),
    ]
    changed = SideChange(block_size=8).apply(groups)
    assert [group.block_size for group in changed] == [8, 16]
    assert [group.sliding_window for group in changed] == [None, 8]


@LAW
@given(pairs())
def test_the_length_of_segments_is_that_of_the_rank_with_the_shortest(pair):
    source, target, num_tokens = pair
    (found,) = segment_lengths(read_parts(source, target, num_tokens))
    means = []
    for rank in range(target.world_size):
        parts = read_parts(source, target, num_tokens, target_ranks=[rank])
        nbytes, segments = count_segments(parts)
        means += [nbytes / segments] if segments else []
    assert found.mean_bytes == pytest.approx(min(means))
    dtypes = source.dtype, target.dtype
    conversion = None if len(set(dtypes)) == 1 else dtypes
    assert (found.layers, found.conversion) == (tuple(range(4)), conversion)


# ---- sums by hand --------------------------------------------------------------------------------


def test_what_a_transfer_costs_adds_up():
    source = geometry(num_kv_heads=6, num_layers=9, layout="HND", parallel=ParallelShape(tp=3))
    target = geometry(
        num_kv_heads=6, num_layers=9, block_size=6, parallel=ParallelShape(tp=2, pp=2)
    )
    costs = explain_transfer(source=source, target=target, num_tokens=50)
    assert [(cost.target_rank, cost.source_rank) for cost in costs] == [
        (0, 0),
        (0, 1),
        (1, 1),
        (1, 2),
        (2, 0),
        (2, 1),
        (3, 1),
        (3, 2),
    ]
    assert sum(cost.nbytes for cost in costs) == 9 * 2 * 6 * 4 * 4 * 50
    assert sum(cost.rows for cost in costs) == 9 * 2 * 6 * 50
    assert costs[0].layers == (0, 1, 2, 3, 4)
    assert costs[1].heads == (2,)
    for cost in costs:
        assert 0 < cost.segments_ordered <= cost.segments_shuffled <= cost.rows


def test_a_transfer_of_no_tokens_has_no_cost_to_explain():
    with pytest.raises(ValueError, match="num_tokens: 0"):
        explain_transfer(source=geometry(), target=geometry(), num_tokens=0)


def test_what_a_transfer_costs_is_summed_over_groups_and_stops_at_windows():
    def half(indices, **kept):
        return geometry(num_layers=2, num_kv_heads=2, layer_indices=indices, **kept)

    whole = geometry(num_layers=4, num_kv_heads=2, parallel=ParallelShape(tp=2))
    hybrid = [half((1, 3)), half((0, 2), sliding_window=11, block_size=3)]
    one, two = explain_transfer(source=whole, target=hybrid, num_tokens=50)
    per_token = 2 * 4 * 4  # bytes of k and v of one layer and head
    for cost, head in ((one, 0), (two, 1)):
        assert (cost.target_rank, cost.source_rank, cost.heads) == (0, head, (head,))
        assert cost.layers == (0, 1, 2, 3)
        # The window begins within a block, which is filled.
        assert cost.nbytes == 2 * per_token * (50 + 11)
        assert cost.rows == 2 * 2 * (50 + 11)
    # To a target that keeps all tokens, the window alone moves; a chunk that just began moves
    # nothing.
    back = explain_transfer(source=hybrid, target=whole, num_tokens=50)
    assert sum(cost.nbytes for cost in back) == 2 * 2 * per_token * (50 + 10)
    chunks = [half((1, 3)), half((0, 2), attention_chunk_size=25)]
    (cost,) = explain_transfer(source=chunks, target=chunks, num_tokens=50)
    assert (cost.layers, cost.nbytes) == ((1, 3), 2 * 2 * per_token * 50)


@given(st.data())
def test_the_tokens_of_a_window_are_those_that_a_load_moves(data):
    size, kept = st.integers(1, 40), st.sampled_from(("sliding_window", "attention_chunk_size"))
    limits = {data.draw(kept): data.draw(size)}
    source = geometry(block_size=data.draw(size), **limits)
    target = geometry(block_size=data.draw(size), **(limits if data.draw(st.booleans()) else {}))
    num_tokens = data.draw(st.integers(1, 100))
    blocks = -(-num_tokens // source.block_size)
    ticket = Ticket(
        lease_id="l", engine_id="p", incarnation="i", secret=b"", host="h", port=1,
        request_id="r", num_tokens=num_tokens, block_ids=(tuple(range(1, blocks + 1)),),
        prompt_digest="", lease_duration_s=30.0, tp=1, pp=1,
    )  # fmt: skip
    groups = SourceGroups("p", (source,), (target,), pair_groups([source], [target]))
    moved = groups.starts(ticket, 0, num_tokens)
    assert [part.first_token for part in read_parts(source, target, num_tokens)] == [
        first for first in moved if first < num_tokens
    ]
