"""What SGLang's own backends do with the shapes that kvferry serves: their real code is asked."""

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

import torch
from sglang.srt.disaggregation.common.conn import CommonKVManager
from sglang.srt.disaggregation.utils import compute_mamba_state_slice_byte_blocks
from sglang.srt.layers.attention.mamba import mamba

from tests.integrations.sglang import recurrent
from tests.integrations.sglang.conftest import HOST, until
from tests.integrations.sglang.engines import engines

__all__ = ["engines"]


def sources(prefill, decode):
    """Ranks of the prefill server from which each rank of the decode server takes its heads."""
    address = f"{HOST}:{prefill.ranks[0].port}"
    found = []
    for rank in decode.ranks:
        with rank.active():
            known = rank.manager.prefill_info_table
            until(
                lambda manager=rank.manager: CommonKVManager.try_ensure_parallel_info(
                    manager, address
                ),
                "the bootstrap server",
            )
            found.append(known.pop(address).target_tp_ranks)
    return found


@pytest.mark.parametrize(
    ("shapes", "heads", "found"),
    [
        ((1, 2), 4, [[0], [0]]),
        ((2, 1), 4, [[0, 1]]),
        ((2, 2), 4, [[0], [1]]),
        # Of three ranks for two, no rank takes the heads of the last; of two for three, the last
        # looks for a rank that does not exist. kvferry serves both.
        ((3, 2), 6, [[0], [1]]),
        ((2, 3), 6, [[0], [1], [2]]),
    ],
    ids=str,
)
def test_numbers_of_ranks_that_divide_each_other_are_served(engines, shapes, heads, found):
    assert sources(*engines(*((tp, 8) for tp in shapes), heads=heads)) == found


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 2)], ids=str)
def test_page_sizes_that_differ_are_refused(engines, ranks):
    prefill, decode = engines((ranks[0], 8), (ranks[1], 12))
    with pytest.raises(RuntimeError, match="Page size mismatch"):
        sources(prefill, decode)


def move_by_sglang(sources, targets, ranks):
    """Moves the states of slot 3 into slot 5 of each rank, as SGLang's backends do."""
    for rank, source in enumerate(sources):
        for at, target in enumerate(targets):
            if rank * ranks[1] // ranks[0] == at or at * ranks[0] // ranks[1] == rank:
                _move(source, target, ranks, rank, at)


def _move(source, target, ranks, rank, at):
    described = zip(
        *([*pool.mamba_cache.conv[0], *pool.mamba_cache.temporal] for pool in (source, target)),
        source.get_state_dim_per_tensor(),
        target.get_state_dim_per_tensor(),
        source.get_state_slice_outer_counts(),
        source.get_state_conv_shard_groups(),
        strict=True,
    )
    for theirs, ours, dim, our_dim, outer, groups in described:
        sizes = [each[0].nbytes for each in (theirs, ours)]
        one, other = (each.view(-1).view(torch.uint8) for each in (theirs, ours))
        for start, our_start, size in compute_mamba_state_slice_byte_blocks(
            src_item_len=sizes[0],
            dst_item_len=sizes[1],
            src_dim=dim,
            dst_dim=our_dim,
            outer_count=outer,
            src_attn_tp_size=ranks[0],
            dst_attn_tp_size=ranks[1],
            dst_tp_rank_in_group=at,
            local_tp_rank_in_group=rank,
            conv_shard_groups=groups,
        ):
            first, our_first = 3 * sizes[0] + start, 5 * sizes[1] + our_start
            other[our_first : our_first + size] = one[first : first + size]


@pytest.mark.parametrize("ranks", [(1, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("kind", recurrent.KINDS)
def test_convolutions_of_mamba2_arrive_wrong_on_another_number_of_ranks(monkeypatch, kind, ranks):
    """SGLang takes a convolution of Mamba2 for one piece. If ranks share a group, the pieces are
    too long, and the last one ends in the slot of another request. kvferry serves all of these.
    """
    monkeypatch.setattr(mamba, "is_cpu", lambda: False)
    whole = recurrent.whole_states(kind)
    sources, targets = ([recurrent.pool_of(kind, tp).mamba_pool for _ in range(tp)] for tp in ranks)
    for rank, pool in enumerate(sources):
        recurrent.write(pool, 3, recurrent.shard_of(kind, whole, ranks[0], rank))
    move_by_sglang(sources, targets, ranks)
    is_right = [True, True]
    for at, pool in enumerate(targets):
        right = recurrent.shard_of(kind, whole, ranks[1], at)
        for number, (found, wanted) in enumerate(zip(recurrent.read(pool, 5), right, strict=True)):
            is_right[number] &= torch.equal(found, wanted)
    assert is_right == [kind not in recurrent.GROUPS, True]
    is_beyond = any(recurrent.read(pool, 6)[0].any() for pool in targets)
    assert is_beyond == ((kind, ranks) == ("mamba2, one group", (2, 1)))
