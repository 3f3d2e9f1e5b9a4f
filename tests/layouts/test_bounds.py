"""Bounds: exactly the copies that leave their memory are refused, whatever the numbers."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.errors import BoundsError
from kvferry.layouts import RUN_DTYPE, TILE_DTYPE, check_bounds

PROPERTY = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
EXTREMES = [0, 1, -1, 2**31, 2**62, 2**63 - 1, -(2**63), -(2**62)]


def names_of(dtype):
    """The fields of the rows of a table."""
    assert dtype.names is not None
    return dtype.names


def one(**changes):
    """A tile of 2 heads of 4 one-byte elements in blocks of 2 tokens, and a run of block 1."""
    tile = {
        **{
            f"{side}_{field}": value
            for side in ("source", "target")
            for field, value in {
                "region": 0,
                "offset": 0,
                "block_stride": 16,
                "token_stride": 8,
                "head_stride": 4,
                "element_stride": 1,
            }.items()
        },
        "heads": 2,
        "elements": 4,
        "itemsize": 1,
    }
    run = {"source_block": 1, "source_token": 0, "target_block": 1, "target_token": 0, "tokens": 2}
    run |= {"source_step": 1, "target_step": 1}
    for field, value in changes.items():
        (tile if field in tile else run)[field] = value
    return (
        np.array([tuple(tile[name] for name in names_of(TILE_DTYPE))], dtype=TILE_DTYPE),
        np.array([tuple(run[name] for name in names_of(RUN_DTYPE))], dtype=RUN_DTYPE),
    )


def check(source_bytes, target_bytes, **changes):
    """The bounds of such a copy between regions of these sizes."""
    tiles, runs = one(**changes)
    check_bounds(tiles, runs, source_bytes, target_bytes)


def test_a_copy_that_ends_with_its_region_is_accepted():
    check([32], [32])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"source_region": 1}, "source region 1 is not one of the 1"),
        ({"target_region": -1}, "target region -1"),
        ({"source_offset": 1}, "bytes 17 to 33 of source region 0, which has 32"),
        ({"target_offset": -17}, "bytes -1 to 15 of target region 0"),
        ({"source_block": 2}, "bytes 32 to 48 of source"),
        ({"target_block": -1}, "target_block is -1"),
        ({"source_token": 1}, "bytes 24 to 40 of source"),
        ({"source_token": -1}, "source_token is -1"),
        ({"tokens": 3}, "bytes 16 to 40"),
        ({"tokens": 0}, "tokens is 0"),
        ({"source_step": 2}, "bytes 16 to 40 of source"),
        ({"target_step": 2}, "bytes 16 to 40 of target"),
        ({"target_step": 0}, "target_step is 0"),
        ({"source_step": 2**63 - 1}, "reach"),
        ({"heads": 0}, "heads is 0"),
        ({"elements": -4}, "elements is -4"),
        ({"itemsize": 0}, "itemsize is 0"),
        ({"itemsize": 2}, "bytes 16 to 33"),
        ({"source_head_stride": -20}, "bytes -4 to"),
        ({"target_block_stride": 2**62}, "reach"),
        ({"source_block": 2**60}, "reach"),
        ({"source_offset": -(2**63)}, "reach"),
        ({"tokens": 2**63 - 1, "source_token": 2**63 - 1}, "reach"),
    ],
)
def test_a_copy_that_leaves_its_region_is_refused_with_both_values(changes, says):
    with pytest.raises(BoundsError, match=says):
        check([32], [32], **changes)


@pytest.mark.parametrize("stride", [2**62, -(2**63)])
def test_a_stride_along_a_dim_of_one_cell_does_not_matter(stride):
    check([32], [32], source_head_stride=stride, heads=1)
    with pytest.raises(BoundsError, match="target region"):
        check([32], [32], source_head_stride=stride, heads=1, target_offset=999)


def test_a_side_without_sizes_is_its_owners_to_check():
    check(None, [32], source_region=9)
    with pytest.raises(BoundsError):
        check([32], None, source_region=9)
    check(None, None)
    with pytest.raises(BoundsError, match="heads is 0"):
        check(None, None, heads=0)


def test_tables_of_other_dtypes_are_refused():
    tiles, runs = one()
    with pytest.raises(BoundsError, match="TILE_DTYPE"):
        check_bounds(runs, runs, [32], [32])
    with pytest.raises(BoundsError, match="2 dims"):
        check_bounds(tiles[None], runs, [32], [32])


def test_refuses_exactly_what_would_leave_the_memory(copy_cases):
    @PROPERTY
    @given(st.data())
    def law(data):
        copies = copy_cases.draw(data)
        tile = data.draw(st.integers(0, len(copies.tiles) - 1))
        field = data.draw(st.sampled_from([n for n in names_of(TILE_DTYPE) if "region" not in n]))
        copies.tiles[tile][field] += data.draw(st.integers(-8, 8))
        regions = [[region.nbytes for region in side] for side in (copies.sources, copies.targets)]
        wanted = all(
            inside(tile, run, side, sizes)
            for tile in copies.tiles
            for run in copies.runs
            for side, sizes in zip(("source", "target"), regions, strict=True)
        ) and (min(copies.tiles[name].min() for name in ("heads", "elements", "itemsize")) > 0)
        try:
            check_bounds(copies.tiles, copies.runs, *regions)
        except BoundsError:
            assert not wanted
        else:
            assert wanted

    law()


def inside(tile, run, side, sizes):
    """The corners of the box, in Python's own integers."""
    corners = [
        int(tile[f"{side}_offset"])
        + int(run[f"{side}_block"]) * int(tile[f"{side}_block_stride"])
        + (int(run[f"{side}_token"]) + i * int(run[f"{side}_step"]))
        * int(tile[f"{side}_token_stride"])
        + h * int(tile[f"{side}_head_stride"])
        + e * int(tile[f"{side}_element_stride"])
        for i in (0, int(run["tokens"]) - 1)
        for h in (0, int(tile["heads"]) - 1)
        for e in (0, int(tile["elements"]) - 1)
    ]
    last = max(corners) + int(tile["itemsize"])
    return min(corners) >= 0 and last <= sizes[tile[f"{side}_region"]]


@given(
    side=st.sampled_from(["source", "target"]),
    place=st.sampled_from(["block", "token"]),
    exponent=st.integers(53, 60),
    beyond=st.integers(-(2**9), 2**9),
)
def test_the_check_is_exact_where_large_numbers_cancel_out(side, place, exponent, beyond):
    """Floats would round such a block or token to another one, which may lie in the region."""
    far = 2**exponent
    changes = {
        f"{side}_block_stride": 0,
        f"{side}_token_stride": 0,
        f"{side}_{place}_stride": 1,
        f"{side}_{place}": far + beyond,
        f"{side}_offset": -far,
        "heads": 1,
        "elements": 1,
        "tokens": 1,
    }
    try:
        check([32], [32], **changes)
    except BoundsError:
        assert not 0 <= beyond < 32
    else:
        assert 0 <= beyond < 32


@PROPERTY
@given(st.data())
def test_no_numbers_of_a_peer_wrap_around_the_check(data):
    fields = [*names_of(TILE_DTYPE), *names_of(RUN_DTYPE)]
    changes = {
        name: data.draw(st.one_of(st.sampled_from(EXTREMES), st.integers(-(2**63), 2**63 - 1)))
        for name in data.draw(st.lists(st.sampled_from(fields), min_size=1, max_size=4))
    }
    tiles, runs = one(**changes)
    good = all(
        int(table[0][n]) > 0
        for table, n in (
            (tiles, "heads"),
            (tiles, "elements"),
            (tiles, "itemsize"),
            (runs, "tokens"),
            (runs, "source_step"),
            (runs, "target_step"),
        )
    )
    for side in ("source", "target"):
        good = good and tiles[0][f"{side}_region"] == 0 and inside(tiles[0], runs[0], side, [32])
        good = good and min(runs[0][f"{side}_block"], runs[0][f"{side}_token"]) >= 0
    try:
        check_bounds(tiles, runs, [32], [32])
    except BoundsError:
        assert not good
    else:
        assert good
