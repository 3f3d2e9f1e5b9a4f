"""The bursts of pages: what they count is what moves, and no two requests share a page."""

import numpy as np
import pytest

from benchmarks.cases import LAYOUTS, lowered
from benchmarks.paged import PAGES, Burst, _pieces, all_bursts, region_bytes
from kvferry.layouts.copier import expand

SMALL = [burst for burst in all_bursts(8192, 64) if burst.requests * burst.tokens <= 8192]


@pytest.mark.parametrize("burst", SMALL, ids=lambda burst: f"{burst} in pages of {burst.page}")
def test_the_pieces_of_a_burst_are_those_that_our_copier_would_copy(burst):
    plan, tiles = lowered(burst.shape, LAYOUTS[0], LAYOUTS[0])
    copied = 0
    for (source, target), (froms, tos, size) in zip(burst.tables(), _pieces(burst), strict=True):
        segments = expand(tiles, plan.bind(source, target, burst.tokens).runs_of(0))
        assert segments["nbytes"].sum() == len(froms) * size
        if len(segments) == len(froms):  # no two pages happened to be neighbours
            ours = sorted(zip(segments["source_offset"], segments["target_offset"], strict=True))
            assert ours == sorted(zip(froms, tos, strict=True))
        copied += len(froms)
    assert copied == burst.pieces
    assert burst.nbytes == burst.requests * burst.tokens * 4 * 2 * 128 * 2


@pytest.mark.parametrize("page", PAGES)
def test_no_two_requests_of_a_burst_share_a_page(page):
    tables = Burst(page, 64, 128, 8192).tables()
    assert len(tables) == 64
    for side in zip(*tables, strict=True):
        assert sorted(np.concatenate(side)) == list(range(1, 8192 // page + 1))


def test_a_cache_has_room_for_pages_of_any_size():
    for page in PAGES:
        assert Burst(page, 1, page, 8192).shape.region_bytes <= region_bytes(8192)
