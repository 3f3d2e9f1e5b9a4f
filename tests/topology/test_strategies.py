"""Every strategy that can serve a pair gives the same cells, and changes nothing that it must not.

The truth is the worlds' own slow code, on memory with guards; conversions are torch's.
"""

import contextlib
import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st

from kvferry.errors import KVFerryError
from kvferry.layouts import staging
from kvferry.layouts.convert import is_lossless
from kvferry.topology import (
    EngineGeometry,
    ParallelShape,
    Strategy,
    memory_of,
    plan_transfer,
    run,
    run_copies,
    whole_block_copies,
    whole_blocks,
)

LAW = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
MUTANT = settings(
    LAW,
    phases=[Phase.generate],
    database=None,
    derandomize=True,
    max_examples=300,
    report_multiple_bugs=False,
)
DTYPES = ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn")


def plan_of(case, **options):
    return plan_transfer(
        source=case.source.geometry,
        target=case.target.geometry,
        target_rank=case.target_rank,
        target_engine_id=case.engine_id,
        **options,
    )


def bind(case, plan):
    return plan.bind(case.source_blocks, case.target_blocks, case.num_tokens, case.first_token)


def snapshot(engine):
    return {
        rank: [storage.copy() for storage in storages] for rank, storages in engine.storages.items()
    }


def restore(engine, before) -> None:
    for rank, storages in before.items():
        for storage, bytes_ in zip(engine.storages[rank], storages, strict=True):
            storage[:] = bytes_


def expected(worlds, case):
    """What every byte of the target must be in the end, found slowly."""
    before = snapshot(case.target)
    worlds.expect(case)
    wanted = snapshot(case.target)
    restore(case.target, before)
    return wanted


def uncovered(worlds, case, last):
    """True where a byte belongs to a token of ``[num_tokens, last)`` in the request's blocks."""
    before = snapshot(case.target)
    for storages in case.target.storages.values():
        for storage in storages:
            storage[:] = 0
    tokens = range(case.num_tokens, last)
    geometry, rank = case.target.geometry, case.target_rank
    heads = len(geometry.heads(rank))
    for layer, part in itertools.product(geometry.layers(rank), case.logical):
        size = case.logical[part].shape[-1]
        ones = np.full((len(tokens), heads, size), -1).astype(case.logical[part].dtype)
        worlds.write(case.target, rank, layer, part, case.target_blocks, tokens, ones)
    mask = {
        rank: [storage == 255 for storage in storages]
        for rank, storages in case.target.storages.items()
    }
    restore(case.target, before)
    return mask


def assert_holds(engine, wanted, free=None) -> None:
    for rank, storages in wanted.items():
        for index, want in enumerate(storages):
            found = engine.storages[rank][index]
            if free is not None:
                want = np.where(free[rank][index], found, want)
            np.testing.assert_array_equal(found, want)


def transfer(case, copies, strategy) -> None:
    run_copies(
        copies, case.source.tensors, case.target.tensors[case.target_rank], strategy=strategy
    )


@contextlib.contextmanager
def small_chunks():
    """Staging in chunks of a few cells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "stage", functools.partial(staging.stage, chunk_bytes=40))
        yield


# ---- strategies that serve every pair ----------------------------------------------------------


def check_serves_every_pair(worlds, data, strategy):
    case = worlds.case(data)
    given_, wanted = snapshot(case.source), expected(worlds, case)
    with small_chunks():
        transfer(case, bind(case, plan_of(case)), strategy)
    assert_holds(case.target, wanted)
    assert_holds(case.source, given_)


@pytest.mark.parametrize("strategy", [Strategy.STRIDED, Strategy.DIRECT, Strategy.STAGED])
def test_cells_are_the_same_and_nothing_else_changes(worlds, strategy):
    @LAW
    @given(st.data())
    def law(data):
        check_serves_every_pair(worlds, data, strategy)

    law()


# ---- whole blocks ------------------------------------------------------------------------------


def whole_case(worlds, data):
    """A case whose blocks can be moved whole as a rule: dense, without scales and contexts."""
    draw = data.draw
    model = {**worlds._model(draw), "scale_dtype": None}
    one, two = (
        dataclasses.replace(
            worlds.geometry(draw, model),
            parallel=ParallelShape(tp=draw(st.integers(1, 4)), pp=1),
            layer_split=None,
            page_size_padded=None,
        )
        for _ in range(2)
    )
    frame = math.lcm(one.block_size, two.block_size)
    first = frame * draw(st.integers(0, 1), label="frames before the span")
    num_tokens = first + draw(st.integers(1, 2 * frame), label="tokens of the span")
    last = -(-num_tokens // frame) * frame
    rng = np.random.default_rng(draw(st.integers(0, 99), label="seed"))
    source_blocks, target_blocks = (
        (rng.permutation(count) + 1).tolist()
        for count in (-(-num_tokens // one.block_size), last // two.block_size)
    )
    source, target = (
        worlds.engine(draw, rng, geometry, max(blocks) + 1)
        for geometry, blocks in ((one, source_blocks), (two, target_blocks))
    )
    logical = worlds.logical(rng, one, len(source_blocks))
    worlds.fill(source, source_blocks, logical)
    case = worlds.Case(
        source,
        target,
        draw(st.integers(0, two.world_size - 1), label="target_rank"),
        source_blocks,
        target_blocks,
        first,
        num_tokens,
        logical,
        "d",
    )
    return case, last


def check_in_place(worlds, data):
    """Returns whether whole blocks could be moved."""
    case, last = whole_case(worlds, data)
    given_, wanted = snapshot(case.source), expected(worlds, case)
    free = uncovered(worlds, case, last)
    before = snapshot(case.target)
    try:
        transfer(case, bind(case, plan_of(case)), Strategy.IN_PLACE)
    except ValueError as error:
        reason = str(error)
    else:
        reason = ""
    if reason:
        assert_holds(case.target, before)
        assert reason.endswith("copy strided or through staging instead"), reason
        return False
    assert_holds(case.target, wanted, free)
    assert_holds(case.source, given_)
    return True


def test_in_place_cells_are_the_same_and_only_the_uncovered_tail_changes(worlds):
    served = []

    @settings(LAW, max_examples=80)
    @given(st.data())
    def law(data):
        served.append(check_in_place(worlds, data))

    law()
    assert sum(served) > len(served) / 8  # not only refusals


def test_blocks_of_whatever_case_are_moved_whole_or_refused_before_anything_moves(worlds):
    @LAW
    @given(st.data())
    def law(data):
        case = worlds.case(data)
        before = snapshot(case.target)
        plan = plan_of(case)
        copies = bind(case, plan)
        try:
            memories = {
                rank: memory_of(case.source.geometry, rank, case.source.tensors[rank])[0]
                for rank in plan.source_ranks
            }
            target_memory, _ = memory_of(
                case.target.geometry, case.target_rank, case.target.tensors[case.target_rank]
            )
            assume(whole_block_copies(plan, memories, target_memory).obstacle(copies) is not None)
        except ValueError:
            pass
        if plan.pieces:
            with pytest.raises(ValueError, match=r".{20}"):
                transfer(case, copies, Strategy.IN_PLACE)
        assert_holds(case.target, before)

    law()


# ---- conversion --------------------------------------------------------------------------------


def check_conversion(worlds, data):
    """A source of one dtype, a target of another; converted cells are those that torch makes."""
    names = data.draw(st.permutations(DTYPES), label="dtypes")[:2]
    case = worlds.case(data)
    assume(case.source.geometry.scale_dtype is None)
    source, target = (
        dataclasses.replace(side.geometry, dtype=name, page_size_padded=None)
        for side, name in zip((case.source, case.target), names, strict=True)
    )
    rng = np.random.default_rng(data.draw(st.integers(0, 99), label="values"))
    case.source, case.target = (
        worlds.engine(data.draw, rng, geometry, side.num_blocks)
        for geometry, side in ((source, case.source), (target, case.target))
    )
    filled = case.source_blocks  # null ones are not read; what lies in block 0 is nobody's
    logical = worlds.logical(rng, source, len(filled))
    for codes in logical.values():  # no infinity, no NaN: of those only the kind is said
        codes &= np.array(~(1 << (codes.itemsize * 8 - 2)), dtype=np.int64).astype(codes.dtype)
    worlds.fill(case.source, filled, logical)
    case.logical = {part: as_torch_converts(codes, *names) for part, codes in logical.items()}
    wanted = expected(worlds, case)
    if not is_lossless(*names):
        with pytest.raises(ValueError, match=f"dtype: source has {names[0]}, target has"):
            plan_of(case)
    copies = bind(case, plan_of(case, convert=not is_lossless(*names)))
    assert copies.plan.conversion == tuple(names)
    with small_chunks():
        transfer(case, copies, None)
    assert_holds(case.target, wanted)


def as_torch_converts(codes, source, target):
    stored = np.dtype(f"u{getattr(torch, target).itemsize}")
    made = np.zeros(codes.shape, dtype=stored)
    if codes.size:
        values = torch.from_numpy(codes.reshape(-1).view(np.uint8)).view(getattr(torch, source))
        bits = values.to(getattr(torch, target)).view(torch.uint8).numpy()
        made[...] = bits.view(stored).reshape(codes.shape)
    return made


def test_converted_cells_are_torchs_and_nothing_else_changes(worlds):
    @LAW
    @given(st.data())
    def law(data):
        check_conversion(worlds, data)

    law()


def test_scales_forbid_any_conversion_and_staging_alone_converts():
    source = EngineGeometry(
        num_layers=1, num_kv_heads=1, head_size=4, dtype="bfloat16", block_size=2, layout="NHD",
        parallel=ParallelShape(),
    )  # fmt: skip
    target = dataclasses.replace(source, dtype="float32")
    copies = plan_transfer(source=source, target=target).bind([1], [1], 2)
    tensors = {"layer.0": np.zeros(source.cache_shape(0, 2), np.uint16)}
    found = {"layer.0": np.zeros(target.cache_shape(0, 2), np.float32)}
    for strategy in (Strategy.STRIDED, Strategy.DIRECT, Strategy.IN_PLACE):
        with pytest.raises(ValueError, match="cannot make float32 of bfloat16; write staged"):
            run_copies(copies, {0: tensors}, found, strategy=strategy)
    with pytest.raises(ValueError, match="dtype: source has bfloat16, target has float32"):
        plan_transfer(
            source=dataclasses.replace(source, scale_dtype="float32"),
            target=dataclasses.replace(target, scale_dtype="float32"),
            convert=True,
        )


# ---- defects that must be caught ---------------------------------------------------------------


def converted_bytes_taken_for_the_sources(monkeypatch):
    right = staging.stage
    monkeypatch.setattr(staging, "stage", lambda *args, chunk_bytes, **_: right(*args, chunk_bytes))


def heads_of_every_source_put_first(monkeypatch):
    right = whole_blocks._Frame.of.__func__

    def first(cls, plan, parts, heads):
        made = right(cls, plan, parts, heads)
        return made._replace(source=made.source._replace(start=0))

    monkeypatch.setattr(whole_blocks._Frame, "of", classmethod(first))


def blocks_not_permuted(monkeypatch):
    monkeypatch.setattr(run, "run_repack", lambda *args: None)


def frames_not_told_apart(monkeypatch):
    right = whole_blocks.WholeBlocks.bind

    def first_only(self, copies):
        made = right(self, copies)
        runs = {rank: rows[: len(self.templates[rank])] for rank, rows in made.runs.items()}
        return dataclasses.replace(made, runs=runs)

    monkeypatch.setattr(whole_blocks.WholeBlocks, "bind", first_only)


def tail_taken_from_anywhere(monkeypatch):
    """The first block of the span again, in the place of every other."""
    right = whole_blocks.WholeBlocks.bind

    def again(self, copies):
        made = right(self, copies)
        for rows in made.runs.values():
            rows["source_block"] = rows["source_block"][:1]
        return made

    monkeypatch.setattr(whole_blocks.WholeBlocks, "bind", again)


def earlier_tokens_overwritten(monkeypatch):
    monkeypatch.setattr(whole_blocks.WholeBlocks, "obstacle", lambda self, copies: None)
    right = whole_blocks.WholeBlocks.bind

    def early(self, copies):
        first, last = copies.span
        return right(self, dataclasses.replace(copies, span=(max(first - 1, 0), last)))

    monkeypatch.setattr(whole_blocks.WholeBlocks, "bind", early)


@pytest.mark.parametrize(
    ("defect", "check"),
    [
        (converted_bytes_taken_for_the_sources, check_conversion),
        (heads_of_every_source_put_first, check_in_place),
        (blocks_not_permuted, check_in_place),
        (frames_not_told_apart, check_in_place),
        (tail_taken_from_anywhere, check_in_place),
        (earlier_tokens_overwritten, check_in_place),
    ],
)
def test_a_defect_is_caught(worlds, monkeypatch, defect, check):
    defect(monkeypatch)

    @MUTANT
    @given(st.data())
    def law(data):
        check(worlds, data)

    with pytest.raises((AssertionError, KVFerryError, ValueError)):
        law()
