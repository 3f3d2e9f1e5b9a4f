"""The toy cache tells a sequence's own cells from any others, in whole tables and in windows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.testing.known_cache import prefix_states
from tests.engine.toy_cache import (
    append_tokens,
    read_groups,
    read_window,
    spoil_tokens,
    state_of,
    toy_geometry,
    toy_groups,
    write_tokens,
)

BLOCK = 4
TOKENS = list(range(30, 50))
TABLE = [5, 2, 7, 1, 4]
WINDOW_TABLE = [0, 0, 7, 1, 4]
FIRST = 8


def empty_cache():
    return np.zeros(toy_geometry(BLOCK).cache_shape(0, 9), dtype=np.int64)


def written(table=TABLE, tokens=TOKENS, first=0):
    cache = empty_cache()
    write_tokens(cache, table, tokens, first, len(tokens))
    return cache


def test_a_window_is_read_from_a_table_with_null_blocks():
    window = read_window(written(WINDOW_TABLE), WINDOW_TABLE, FIRST, len(TOKENS))
    assert window is not None
    assert list(window.token_ids) == TOKENS[FIRST:]
    assert list(window.hashes) == prefix_states(TOKENS)[FIRST:]
    assert window.state == state_of(TOKENS)


def test_nothing_is_written_to_the_null_block():
    cache = written(WINDOW_TABLE)
    spoil_tokens(cache, WINDOW_TABLE, 0, 10)
    assert not cache[:, 0].any()


def test_a_window_that_reaches_into_the_null_block_is_none():
    assert read_window(written(WINDOW_TABLE), WINDOW_TABLE, FIRST - 1, len(TOKENS)) is None


@given(
    token=st.integers(0, len(TOKENS) - 1),
    part=st.integers(0, 1),
    first=st.integers(0, len(TOKENS) - 2),
)
def test_one_changed_cell_within_the_window_shows_and_none_outside(token, part, first):
    cache = written()
    cache[part, TABLE[token // BLOCK], token % BLOCK] += 1
    window = read_window(cache, TABLE, first, len(TOKENS))
    if token < first:
        assert window is not None
    elif token > first or part == 1 or first == 0:
        assert window is None
    else:  # the first token of a window: its hash is believed, so only other groups can tell
        assert window is not None


@given(cut=st.integers(0, len(TOKENS)))
def test_appending_needs_no_more_than_the_state(cut):
    cache = written(tokens=TOKENS[:cut])
    state = state_of(TOKENS[:cut])
    assert append_tokens(cache, TABLE, TOKENS[cut:], cut, state) == state_of(TOKENS)
    np.testing.assert_array_equal(cache, written())


def test_cells_of_another_sequence_at_the_same_tokens_are_no_sequence():
    cache = written()
    other = [999, *TOKENS[1:]]
    write_tokens(cache, TABLE, other, 12, 16)
    assert read_window(cache, TABLE, FIRST, len(TOKENS)) is None


@pytest.mark.parametrize("tokens", [TOKENS, [999, *TOKENS[1:]]])
def test_groups_agree_only_on_one_sequence(tokens):
    full, windowed = written(), written(WINDOW_TABLE, tokens)
    read = read_groups([windowed, full], [WINDOW_TABLE, TABLE], [FIRST, 0], len(TOKENS))
    if tokens is TOKENS:
        assert read is not None
        assert list(read.token_ids) == TOKENS
    else:
        assert read is None


def test_a_group_that_needs_nothing_any_more_does_not_count():
    caches = [written(), empty_cache()]
    read = read_groups(caches, [TABLE, [0] * 5], [0, len(TOKENS)], len(TOKENS))
    assert read is not None
    assert list(read.token_ids) == TOKENS


def test_every_group_has_a_layer_of_its_own_and_keeps_its_window():
    full, windowed = toy_groups(BLOCK, windows=(None, 6))
    assert (full.tensor_names(0), windowed.tensor_names(0)) == (("layer.0",), ("layer.1",))
    assert (full.first_kept_token(20), windowed.first_kept_token(20)) == (0, 15)
    assert full.cache_shape(0, 9) == windowed.cache_shape(0, 9)
