"""KVTopology: the known numbers where they exist, an answer or a way out where they do not."""

from fractions import Fraction
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.topology import EngineGeometry, KVTopology, ParallelShape, plan_transfer


def topology(**fields):
    return KVTopology(**{"tp_rank": 0, "tp_size": 1, "num_kv_heads": 8, "block_size": 16} | fields)


@pytest.mark.parametrize(
    ("here", "there", "ratio"), [(8, 2, 4), (2, 8, -4), (4, 4, 1), (6, 3, 2), (1, 1, 1)]
)
def test_ratios_are_local_per_remote_and_negative_when_the_remote_is_larger(here, there, ratio):
    assert topology(tp_size=here).tp_ratio(there) == ratio
    assert topology(pp_size=here).pp_ratio(there) == ratio


def test_a_ratio_that_is_not_whole_is_refused_with_the_way_out():
    with pytest.raises(
        ValueError, match=r"tp_ratio: 3 here and 2 there .* get_target_remote_ranks"
    ):
        topology(tp_size=3).tp_ratio(2)
    with pytest.raises(ValueError, match="pp_ratio: 2 here and 3 there"):
        topology(pp_size=2).pp_ratio(3)
    assert topology(tp_size=3, num_kv_heads=3).get_target_remote_ranks(2) == [(0, 0, 0)]


@pytest.mark.parametrize(
    ("there", "ratio"), [(16, 1), (4, 4), (32, Fraction(1, 2)), (24, Fraction(2, 3))]
)
def test_block_size_ratios_are_exact(there, ratio):
    found = topology().block_size_ratio(there)
    assert found == ratio
    assert isinstance(found, int) == (Fraction(ratio).denominator == 1)


@pytest.mark.parametrize(
    ("fields", "remote_tp", "tp_ranks"),
    [
        ({"tp_rank": 3, "tp_size": 8}, 2, [0]),  # we are more: one rank, a slice of it
        ({"tp_rank": 1, "tp_size": 2}, 8, [4, 5, 6, 7]),  # they are more: all that we hold
        ({"tp_rank": 5, "tp_size": 8}, 8, [5]),
        # Replicas there are read once per head, and ours spread over them.
        ({"tp_rank": 1, "tp_size": 4, "num_kv_heads": 2}, 8, [2]),
        ({"tp_rank": 0, "tp_size": 1, "num_kv_heads": 2}, 8, [0, 4]),
        ({"tp_rank": 5, "tp_size": 8, "num_kv_heads": 2}, 4, [2]),
        # A latent lies on every rank.
        ({"tp_rank": 3, "tp_size": 4, "is_mla": True}, 8, [6]),
        ({"tp_rank": 3, "tp_size": 4, "is_mla": True}, 2, [1]),
    ],
)
def test_targets_are_those_that_the_field_knows(fields, remote_tp, tp_ranks):
    assert topology(**fields).get_target_remote_ranks(remote_tp) == [
        (tp_rank, 0, tp_rank) for tp_rank in tp_ranks
    ]


def test_every_stage_that_holds_our_layers_is_a_target():
    assert topology(pp_rank=1, pp_size=2).get_target_remote_ranks(1, 4) == [(2, 2, 0), (3, 3, 0)]
    assert topology(pp_rank=3, pp_size=4).get_target_remote_ranks(2, 2) == [(2, 1, 0), (3, 1, 1)]
    # Nine layers: 5 and 4 here, 2, 2, 3 and 2 there.
    uneven = topology(pp_rank=0, pp_size=2, num_layers=9)
    assert uneven.get_target_remote_ranks(1, 4) == [(0, 0, 0), (1, 1, 0), (2, 2, 0)]


@given(st.data())
def test_targets_hold_every_cell_that_a_plan_moves(data):
    count = lambda name, most: data.draw(st.integers(1, most), label=name)  # noqa: E731
    heads, layers = count("heads", 6), count("layers", 12)
    here = ParallelShape(tp=count("tp", 8), pp=count("pp", min(layers, 4)))
    there = ParallelShape(tp=count("remote tp", 8), pp=count("remote pp", min(layers, 4)))
    source, target = (
        EngineGeometry(
            num_layers=layers,
            num_kv_heads=heads,
            head_size=1,
            dtype="uint8",
            block_size=16,
            layout="NHD",
            parallel=parallel,
        )
        for parallel in (there, here)
    )
    rank = data.draw(st.integers(0, here.world_size - 1), label="rank")
    at = here.coordinates(rank)
    found = topology(
        tp_rank=at.tp,
        tp_size=here.tp,
        pp_rank=at.pp,
        pp_size=here.pp,
        num_kv_heads=heads,
        num_layers=layers,
    ).get_target_remote_ranks(there.tp, there.pp)
    assert [source.rank_coordinates(r).tp for r, _, _ in found] == [tp for _, _, tp in found]
    assert [source.rank_coordinates(r).pp for r, _, _ in found] == [pp for _, pp, _ in found]
    assert found == sorted(set(found))
    plan = plan_transfer(source=source, target=target, target_rank=rank)
    pieces = {(piece.layer, head) for piece in plan.pieces for head in piece.heads}
    held = [set(product(source.layers(r), source.heads(r))) for r, _, _ in found]
    # All that is needed, nobody in vain, and no head from two replicas.
    assert pieces <= set().union(*held)
    assert all(cells & pieces for cells in held)
    assert sum(len(cells & pieces) for cells in held) == len(pieces)


def test_replication_is_more_ranks_than_heads_or_a_latent():
    eight = topology(tp_size=16)
    assert [eight.is_kv_replicated(size) for size in (4, 8, 9)] == [False, False, True]
    assert eight.is_kv_replicated()
    assert [eight.replicates_kv_cache(size) for size in (8, 9)] == [False, True]
    latent = topology(is_mla=True)
    assert latent.replicates_kv_cache(1)


@pytest.mark.parametrize(
    ("layout", "is_mla", "apart"),
    [
        (None, False, True),
        ("NHD", False, True),
        ("HND", False, True),
        ("BKNHD", False, False),
        ("BNHKD", False, False),
        ("LBHNC", False, False),
        ("NHD", True, False),
    ],
)
def test_k_and_v_lie_apart_where_parts_stand_before_blocks(layout, is_mla, apart):
    assert topology(layout=layout, is_mla=is_mla).split_k_and_v is apart


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank: 2 is not one of 0 to 1"),
        ({"pp_rank": -1}, "pp_rank: -1"),
        ({"block_size": 0}, "block_size: 0"),
        ({"num_kv_heads": 0}, "num_kv_heads: 0"),
        ({"layout": "NDH"}, "layout"),
    ],
)
def test_wrong_arguments_are_named(fields, message):
    with pytest.raises(ValueError, match=message):
        topology(**fields)
