"""Plans and binding: replicas, views, lowering of hostile memories, block tables, speed."""

import collections
from functools import partial

import msgspec
import pytest

from kvferry.errors import (
    BlockIdError,
    BlockTableError,
    BoundsError,
    NullBlockError,
    ProtocolError,
)
from kvferry.topology import (
    ParallelShape,
    check_block_ids,
    plan_transfer,
)
from tests import geometries

geometry = partial(geometries.geometry, num_layers=8)


def plan(**source):
    return plan_transfer(source=geometry(**source), target=geometry())


# ---- who gives ---------------------------------------------------------------------------------


def test_replicas_share_the_work_over_layers_and_target_ranks():
    source = geometry(parallel=ParallelShape(tp=8))  # 4 replicas of each head
    target = geometry(parallel=ParallelShape(tp=4))
    given = collections.Counter(
        piece.source_rank
        for rank in range(4)
        for piece in plan_transfer(source=source, target=target, target_rank=rank).pieces
    )
    assert given == dict.fromkeys(range(8), 4)


def test_the_choice_of_replicas_is_the_same_every_time_and_depends_on_the_target_engine():
    source, target = geometry(parallel=ParallelShape(tp=8)), geometry()

    def chosen(engine_id):
        return plan_transfer(source=source, target=target, target_engine_id=engine_id).pieces

    assert chosen("a") == chosen("a")
    assert len({chosen(f"engine-{i}") for i in range(20)}) > 1


def test_only_the_stage_and_ranks_that_hold_the_cells_are_asked():
    source = geometry(parallel=ParallelShape(tp=2, pp=4))
    target = geometry(parallel=ParallelShape(tp=2, pp=2))
    made = plan_transfer(source=source, target=target, target_rank=3)
    assert made.source_ranks == (5, 7)


def test_views_of_a_plan_split_it():
    made = plan_transfer(source=geometry(parallel=ParallelShape(tp=2, pp=2)), target=geometry())
    by_layer = [piece for layer in range(8) for piece in made.for_layers([layer]).pieces]
    by_source = [piece for rank in made.source_ranks for piece in made.for_source(rank).pieces]
    assert tuple(by_layer) == made.pieces
    assert sorted(by_source, key=lambda p: (p.layer, p.heads.start)) == list(made.pieces)
    assert made.for_source(99).pieces == ()
    assert made.bytes_per_token == 8 * 2 * 2 * 4 * 4


def test_geometries_that_can_never_match_are_refused_with_every_mismatch():
    other = geometry(num_layers=6, num_kv_heads=3, head_size=5, dtype="float64", head_size_v=2)
    says = (
        "num_kv_heads: source has 3, target has 2; .*; head_size: source has 5.*; head_size_v: "
        "source has 2, target has 4; .*; dtype: source has .*; layers: 6-7 not in the source, "
        "which has 0-5; name layers that both groups have"
    )
    with pytest.raises(ValueError, match=says):
        plan_transfer(source=other, target=geometry())


def test_shapes_block_sizes_and_layouts_may_differ():
    plan(block_size=3, layout="BHLNC", parallel=ParallelShape(tp=3, pp=2), layer_split=(1, 7))


def test_only_the_layers_that_are_asked_for_are_planned():
    source = geometry(num_layers=3, layer_indices=(1, 2, 7))
    target = geometry(parallel=ParallelShape(pp=2))
    made = [
        plan_transfer(source=source, target=target, target_rank=rank, layers=(2, 7)).pieces
        for rank in (0, 1)
    ]
    assert [[piece.layer for piece in pieces] for pieces in made] == [[2], [7]]
    with pytest.raises(ValueError, match=r"layers: 0, 3-6 not in the source, which has 1-2, 7; "):
        plan_transfer(source=source, target=target)
    with pytest.raises(ValueError, match=r"layers: 9 not in the source.*layers: 9 not in the targ"):
        plan_transfer(source=source, target=target, layers=[2, 9])


def test_a_rank_without_layers_of_the_plan_moves_nothing_and_needs_no_blocks():
    target = geometry(parallel=ParallelShape(pp=2))
    made = plan_transfer(source=geometry(), target=target, target_rank=1, layers=[0])
    assert (made.pieces, made.source_ranks, made.bytes_per_token) == ((), (), 0)
    copies = made.bind([7, 8], [7, 8], num_tokens=8)
    check_block_ids(copies, {}, 1)
    assert copies.nbytes == 0


def test_a_target_rank_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="rank: 1 is not one of 0 to 0"):
        plan_transfer(source=geometry(), target=geometry(), target_rank=1)


# ---- lowering what a peer described ------------------------------------------------------------


def test_packed_k_and_v_become_one_tile_where_both_sides_pack_them():
    packed, apart = geometry(layout="BHNKD"), geometry()
    for source, tiles in ((packed, 8), (apart, 16)):
        made = plan_transfer(source=source, target=packed)
        assert len(made.lower({0: source.memory(0, 5)}, packed.memory(0, 5))[0]) == tiles


def test_a_missing_source_rank_is_the_callers_error():
    made = plan(parallel=ParallelShape(tp=2))
    with pytest.raises(ValueError, match=r"ranks \[1\] are missing"):
        made.lower({0: made.source.memory(0, 5)}, made.target.memory(0, 5))


def test_a_peers_memory_without_a_tensor_or_a_part_is_refused():
    made = plan()
    memory = made.source.memory(0, 5)
    tensors = memory.tensors
    lacking = changed(memory, tensors=tensors[:3] + tensors[4:])
    with pytest.raises(ProtocolError, match=r"rank 0: has no tensor 'layer.3'"):
        made.lower({0: lacking}, made.target.memory(0, 5))
    only_k = changed(tensors[0], parts={"k": tensors[0].parts["k"]})
    with pytest.raises(ProtocolError, match=r"'layer.0' has no part 'v'"):
        made.lower(
            {0: changed(memory, tensors=(only_k, *tensors[1:]))},
            made.target.memory(0, 5),
        )


def test_a_peers_numbers_beyond_64_bits_are_refused():
    made = plan()
    memory = made.source.memory(0, 5)
    far = changed(memory.tensors[0], offset=2**64 - 1)
    with pytest.raises(BoundsError, match="64 bits"):
        made.lower(
            {0: changed(memory, tensors=(far, *memory.tensors[1:]))},
            made.target.memory(0, 5),
        )


def changed(struct, **changes):
    return msgspec.structs.replace(struct, **changes)


# ---- block tables ------------------------------------------------------------------------------


def test_runs_are_cut_where_either_side_begins_a_block():
    made = plan_transfer(source=geometry(block_size=6), target=geometry())
    runs = made.bind([7, 8], [1, 2, 3], num_tokens=12, first_token=1).runs_of(0)
    assert [row[:5] for row in runs.tolist()] == [
        (7, 1, 1, 1, 3),
        (7, 4, 2, 0, 2),
        (8, 0, 2, 2, 2),
        (8, 2, 3, 0, 4),
    ]
    assert {row[5:] for row in runs.tolist()} == {(1, 1)}


def test_blocks_beyond_the_span_are_never_looked_at():
    copies = plan().bind([-5, 0, 3, -1], [9, 9, 2, 2], num_tokens=12, first_token=8)
    assert copies.runs_of(0).tolist() == [(3, 0, 2, 0, 4, 1, 1)]


def test_an_empty_span_moves_nothing():
    assert plan().bind([], [], num_tokens=0).nbytes == 0
    assert len(plan().bind([1], [1], num_tokens=3, first_token=3).runs_of(0)) == 0


def test_null_target_blocks_are_skipped_and_may_be_null_at_the_source_too():
    copies = plan().bind([0, 5, 0], [0, 6, 0], num_tokens=12)
    assert copies.runs_of(0).tolist() == [(5, 0, 6, 0, 4, 1, 1)]
    assert copies.num_tokens == 4


@pytest.mark.parametrize(
    ("source", "target", "span", "error", "says"),
    [
        ([1, 2], [1, 2, 3], (0, 12), BlockTableError, "source block table: 2 blocks of 4 tokens"),
        ([1, 2, 3], [1, 2], (0, 12), BlockTableError, "target block table: 2 blocks of 4 tokens"),
        ([1, 2, 3], [5, 6, 5], (0, 12), BlockTableError, "target block 5 stands more than once"),
        ([1, 0, 3], [1, 2, 3], (0, 12), NullBlockError, "source block of token 4 is the null"),
        ([1, -2, 3], [1, 2, 3], (0, 12), BlockIdError, "source block of token 4 is -2"),
        ([1, 2, 3], [1, 2, -3], (0, 12), BlockIdError, "target block of token 8 is -3"),
        ([1, 2**70, 3], [1, 2, 3], (0, 12), BlockIdError, "not 64-bit whole numbers"),
        ([1, 2**63, 3], [1, 2, 3], (0, 12), BlockIdError, "not 64-bit whole numbers"),
        ([1.5, 2, 3], [1, 2, 3], (0, 12), BlockIdError, "float64"),
        ([1, None, 3], [1, 2, 3], (0, 12), BlockIdError, "object"),
        ([[1, 2, 3]], [1, 2, 3], (0, 4), BlockTableError, "2 dims"),
        ([1, 2, 3], [1, 2, 3], (5, 4), ValueError, "no span"),
        ([1, 2, 3], [1, 2, 3], (-1, 4), ValueError, "no span"),
    ],
)
def test_bad_block_tables_are_named(source, target, span, error, says):
    with pytest.raises(error, match=says):
        plan().bind(source, target, num_tokens=span[1], first_token=span[0])


def test_a_source_block_may_be_read_twice():
    assert len(plan().bind([3, 3], [1, 2], num_tokens=8).runs_of(0)) == 2


def test_block_ids_outside_the_memory_are_named():
    copies = plan().bind([1, 9], [1, 5], num_tokens=8)
    check_block_ids(copies, 10, 6)
    check_block_ids(copies, {0: 10}, 6)
    with pytest.raises(BlockIdError, match="source block 9 does not exist; there are 9 blocks"):
        check_block_ids(copies, {0: 9}, 6)
    with pytest.raises(BlockIdError, match="target block 5 does not exist; there are 5 blocks"):
        check_block_ids(copies, 10, 5)
    check_block_ids(plan().bind([], [], 0), 0, 0)


def test_two_engines_of_1024_ranks_have_all_their_plans():
    """DCP is the case with the most pairs; how long it takes, the benchmark `planning` says."""
    source, target = (
        geometry(
            num_layers=80, num_kv_heads=1, block_size=16, parallel=ParallelShape(tp=1024, dcp=dcp)
        )
        for dcp in (16, 4)
    )
    plans = [plan_transfer(source=source, target=target, target_rank=r) for r in range(1024)]
    assert sum(len(made.pieces) for made in plans) == 1024 * 80 * 4


@pytest.mark.parametrize("num_blocks", [3, 700])
@pytest.mark.parametrize("largest", [1000, 1 << 31])
@pytest.mark.parametrize("twice", [False, True])
def test_a_block_that_stands_twice_is_found_in_short_and_long_tables_and_null_blocks_may(
    num_blocks, largest, twice
):
    one = geometry(block_size=4)
    plan = plan_transfer(source=one, target=one)
    source = list(range(1, num_blocks + 3))
    target = [*source[:-2][::-1], 0, 0]
    target[1] = largest
    if twice:
        target[-3] = target[0]
    if not twice:
        copies = plan.bind(source, target, 4 * len(target))
        assert copies.num_tokens == 4 * num_blocks
        return
    with pytest.raises(BlockTableError, match=f"target block {target[0]} stands more than once"):
        plan.bind(source, target, 4 * len(target))
