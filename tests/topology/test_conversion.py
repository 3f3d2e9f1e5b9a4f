"""Cells whose dtype changes on the way are those that torch makes, and nothing else changes.

The truth is the worlds' own slow code, on memory with guards.
"""

import contextlib
import dataclasses
import functools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from kvferry.layouts import staging
from kvferry.layouts.convert import is_lossless
from kvferry.topology import (
    EngineGeometry,
    ParallelShape,
    plan_transfer,
    run_copies,
)
from tests.topology.defects import WRONG_BYTES, assert_bytes, must_be_caught

LAW = settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
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


def assert_holds(engine, wanted) -> None:
    for rank, storages in wanted.items():
        for index, want in enumerate(storages):
            assert_bytes(engine.storages[rank][index], want)


@contextlib.contextmanager
def small_chunks():
    """Staging in chunks of a few cells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(staging, "stage", functools.partial(staging.stage, chunk_bytes=40))
        yield


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
    given_, wanted = snapshot(case.source), expected(worlds, case)
    if not is_lossless(*names):
        with pytest.raises(ValueError, match=f"dtype: source has {names[0]}, target has"):
            plan_of(case)
    copies = bind(case, plan_of(case, convert=not is_lossless(*names)))
    assert copies.plan.conversion == tuple(names)
    with small_chunks():
        run_copies(copies, case.source.tensors, case.target.tensors[case.target_rank])
    assert_holds(case.target, wanted)
    assert_holds(case.source, given_)


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


def test_scales_forbid_any_conversion():
    source = EngineGeometry(
        num_layers=1, num_kv_heads=1, head_size=4, dtype="bfloat16", block_size=2, layout="NHD",
        parallel=ParallelShape(), scale_dtype="float32",
    )  # fmt: skip
    with pytest.raises(ValueError, match="dtype: source has bfloat16, target has float32"):
        plan_transfer(
            source=source, target=dataclasses.replace(source, dtype="float32"), convert=True
        )


# ---- defects that must be caught ---------------------------------------------------------------


def converted_bytes_taken_for_the_sources(monkeypatch):
    right = staging.stage
    monkeypatch.setattr(
        staging, "stage", lambda tiles, runs, chunk_bytes, **_: right(tiles, runs, chunk_bytes)
    )


def heads_taken_for_the_first(monkeypatch):
    """Every chunk is unpacked to where the first cells belong."""
    right = staging.stage

    def first(*args, **options):
        for chunk in right(*args, **options):
            tiles = chunk.unpack_tiles.copy()
            tiles["target_offset"] = tiles["target_offset"].min(initial=0)
            yield dataclasses.replace(chunk, unpack_tiles=tiles)

    monkeypatch.setattr(staging, "stage", first)


@pytest.mark.parametrize(
    ("defect", "error", "says"),
    [
        (converted_bytes_taken_for_the_sources, ValueError, "give as many elements"),
        (heads_taken_for_the_first, AssertionError, WRONG_BYTES),
    ],
)
def test_a_defect_is_caught(worlds, monkeypatch, defect, error, says):
    defect(monkeypatch)
    must_be_caught(functools.partial(check_conversion, worlds), says, error)
