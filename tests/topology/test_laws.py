"""Laws 1 and 2: exact cover, and plan equals oracle; each with defects that they must catch."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.topology import (
    ParallelShape,
    binding,
    lowering,
    memory_of,
    plan,
    plan_transfer,
    run_copies,
)
from kvferry.topology.lowering import lower_pieces
from kvferry.topology.tensors import TensorKind
from tests.topology.defects import (
    WRONG_BYTES,
    WRONG_COVER,
    assert_bytes,
    assert_cover,
    count_writes,
    must_be_caught,
)

LAW = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def snapshot(engine):
    return {
        rank: [storage.copy() for storage in storages] for rank, storages in engine.storages.items()
    }


def bind(case):
    made = plan_transfer(
        source=case.source.geometry,
        target=case.target.geometry,
        target_rank=case.target_rank,
        target_engine_id=case.engine_id,
    )
    return made.bind(case.source_blocks, case.target_blocks, case.num_tokens, case.first_token)


def check_plan_equals_oracle(worlds, data):
    """Law 2, and of law 1 that nothing else changes: every byte of every storage is compared."""
    case = worlds.case(data)
    copies = bind(case)
    sources_before, target_before = snapshot(case.source), snapshot(case.target)
    worlds.expect(case)
    expected = snapshot(case.target)
    for rank, storages in target_before.items():
        for storage, before in zip(case.target.storages[rank], storages, strict=True):
            storage[:] = before
    run_copies(copies, case.source.tensors, case.target.tensors[case.target_rank])
    for engine, wanted in ((case.source, sources_before), (case.target, expected)):
        for rank, storages in wanted.items():
            for found, want in zip(engine.storages[rank], storages, strict=True):
                assert_bytes(found, want)
    assert copies.num_tokens == len(worlds.moved(case))


def check_exact_cover(worlds, data):
    """Law 1: count how often every byte of the target's regions is written, and by whom."""
    case = worlds.case(data)
    copies = bind(case)
    tensors = case.target.tensors[case.target_rank]
    target_memory, regions = memory_of(case.target.geometry, case.target_rank, tensors)
    memories = {
        rank: memory_of(case.source.geometry, rank, given_)[0]
        for rank, given_ in case.source.tensors.items()
    }
    writes = count_writes(copies.segments(memories, target_memory), regions)
    for region in regions:
        region[:] = 0
    # The oracle writes a 1 into every byte that the span covers.
    for cells in case.logical.values():
        cells[...] = np.iinfo(cells.dtype).max
    worlds.expect(case)
    for region, count in zip(regions, writes, strict=True):
        assert_cover(count, region == 255)


def test_law_2_plan_equals_oracle_and_touches_nothing_else(worlds):
    @LAW
    @given(st.data())
    def law(data):
        check_plan_equals_oracle(worlds, data)

    law()


def test_law_1_every_cell_of_the_span_is_written_exactly_once(worlds):
    @LAW
    @given(st.data())
    def law(data):
        check_exact_cover(worlds, data)

    law()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", [check_plan_equals_oracle, check_exact_cover])
def test_the_laws_hold_for_many_more_pairs(worlds, check):
    @settings(LAW, max_examples=300, database=None)
    @given(st.data())
    def law(data):
        check(worlds, data)

    law()


# ---- defects that the laws must catch ----------------------------------------------------------


def off_by_one_head(monkeypatch):
    right = lowering.Places.place
    monkeypatch.setattr(
        lowering.Places,
        "place",
        lambda self, layer, head, part: right(
            self,
            layer,
            min(head + (len(self._heads[part]) > 1), self._heads[part].stop - 1),
            part,
        ),
    )


def replica_chosen_twice(monkeypatch):
    right = plan._layer_pieces

    def twice(source, layer, share, context, choice):
        yield from right(source, layer, share, context, choice)
        if len(source.ranks_with(layer, share.heads.start, context)) > 1:
            yield from right(source, layer, share, context, choice + 1)

    monkeypatch.setattr(plan, "_layer_pieces", twice)


def token_offset_ignored(monkeypatch):
    right = binding.shared_spans
    monkeypatch.setattr(
        binding, "shared_spans", lambda one, two, sizes, span: right(one, two, sizes, (0, span[1]))
    )


def last_layer_of_a_stage_lost(monkeypatch):
    right = plan.plan_transfer

    def lossy(**arguments):
        made = right(**arguments)
        layers = made.target.layers(made.target_rank)
        return dataclasses.replace(made.for_layers(layers[:-1])) if len(layers) > 1 else made

    monkeypatch.setitem(globals(), "plan_transfer", lossy)


def source_block_size_taken_for_the_target(monkeypatch):
    right = binding.shared_spans
    monkeypatch.setattr(
        binding,
        "shared_spans",
        lambda one, two, sizes, span: right(one, two, (sizes[0], sizes[0]), span),
    )


def ranks_of_context_parallelism_in_blocks(monkeypatch):
    def in_blocks(self, rank):
        at = self.coordinates(rank)
        return at.pcp * self.dcp + at.tp // max(self.tp // self.dcp, 1)

    monkeypatch.setattr(ParallelShape, "context_rank", in_blocks)


def turns_of_one_token_each(monkeypatch):
    right = ParallelShape.shard_of_context
    monkeypatch.setattr(
        ParallelShape,
        "shard_of_context",
        lambda self, context: dataclasses.replace(right(self, context), interleave_size=1),
    )


def steps_ignored(monkeypatch):
    right = binding.shared_spans
    monkeypatch.setattr(
        binding, "shared_spans", lambda *given: right(*given)._replace(steps=(1, 1))
    )


def blocks_begin_where_the_other_side_begins_them(monkeypatch):
    right = binding._by_progressions
    monkeypatch.setattr(
        binding,
        "_by_progressions",
        lambda one, two, sizes, steps, span: right(one, two, sizes[::-1], steps, span),
    )


def a_context_rank_overlooked(monkeypatch):
    right = plan._giving_contexts
    monkeypatch.setattr(plan, "_giving_contexts", lambda *given: right(*given)[:2])


def scales_left_behind(monkeypatch):
    right = lower_pieces
    monkeypatch.setattr(
        plan,
        "lower_pieces",
        lambda pieces, parts, *places: right(
            pieces, [part for part in parts if not part.name.endswith("_scale")], *places
        ),
    )


def padding_counted_as_cells(monkeypatch):
    right = TensorKind.part_strides

    def packed(self, box, strides=None):
        found = right(self, box, strides)
        if self.page_size_padded is None:
            return found
        one = dataclasses.replace(self, page_size_padded=None)
        return right(one, box, one.strides(self.layout.shape(box)))

    monkeypatch.setattr(TensorKind, "part_strides", packed)


def packed_parts_never_told_apart(monkeypatch):
    monkeypatch.setattr(
        lowering,
        "_follow",
        lambda tiles, target_itemsizes: tiles["itemsize"][1:] == tiles["itemsize"][:-1],
    )


BOTH_LAWS = pytest.mark.parametrize(
    ("check", "says"),
    [(check_plan_equals_oracle, WRONG_BYTES), (check_exact_cover, WRONG_COVER)],
    ids=["plan equals oracle", "exact cover"],
)


@BOTH_LAWS
@pytest.mark.parametrize(
    "defect",
    [
        off_by_one_head,
        token_offset_ignored,
        last_layer_of_a_stage_lost,
        source_block_size_taken_for_the_target,
        packed_parts_never_told_apart,
        scales_left_behind,
        padding_counted_as_cells,
    ],
)
def test_a_defect_of_the_planner_is_caught(worlds, monkeypatch, defect, check, says):
    monkeypatch.setattr(worlds, "several_heads_per_rank", defect is off_by_one_head)
    defect(monkeypatch)
    must_be_caught(functools.partial(check, worlds), says)


@BOTH_LAWS
@pytest.mark.parametrize(
    "defect",
    [
        ranks_of_context_parallelism_in_blocks,
        turns_of_one_token_each,
        steps_ignored,
        blocks_begin_where_the_other_side_begins_them,
        a_context_rank_overlooked,
    ],
)
def test_a_defect_in_context_parallelism_is_caught(worlds, monkeypatch, defect, check, says):
    monkeypatch.setattr(worlds, "often_context_parallel", True)
    defect(monkeypatch)
    must_be_caught(functools.partial(check, worlds), says)


def test_a_replica_that_is_read_twice_is_caught_by_exact_cover(worlds, monkeypatch):
    # Replicas hold the same bytes, so the oracle of law 2 cannot see it.
    replica_chosen_twice(monkeypatch)
    must_be_caught(functools.partial(check_exact_cover, worlds), WRONG_COVER)
