"""Block tables on a worker: slots of tokens against a loop over them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import BlockTable
from kvferry.errors import BlockTableError

TABLES = st.lists(st.lists(st.integers(0, 99), max_size=6), min_size=1, max_size=5)


@given(TABLES, st.integers(1, 5), st.data())
def test_slots_are_those_that_a_loop_over_tokens_finds(tables, block_size, data):
    firsts, counts, expected = [], [], []
    for row, blocks in enumerate(tables):
        room = len(blocks) * block_size
        first = data.draw(st.integers(0, room))
        count = data.draw(st.integers(0, room - first))
        firsts.append(first)
        counts.append(count)
        expected += [
            (row, position, blocks[position // block_size], position % block_size)
            for position in range(first, first + count)
        ]
    table = BlockTable.from_lists(block_size, tables)
    rows, positions = BlockTable.expand_spans(firsts, counts)
    block_ids, offsets = table.locate(rows, positions)
    found = zip(rows, positions, block_ids, offsets, strict=True)
    assert [tuple(map(int, cell)) for cell in found] == expected
    slots = table.slot_mapping(rows, positions)
    assert slots.tolist() == [block * block_size + offset for _, _, block, offset in expected]
    assert slots.dtype == np.int64


def test_short_rows_end_in_the_null_block():
    table = BlockTable.from_lists(4, [[7, 3], [], [5]])
    assert table.block_ids.tolist() == [[7, 3], [0, 0], [5, 0]]
    assert table.num_blocks.tolist() == [2, 0, 1]


def test_empty_batch_has_no_slots():
    table = BlockTable.from_lists(4, [])
    assert table.slot_mapping(*BlockTable.expand_spans([], [])).shape == (0,)


def test_one_row_broadcasts_over_its_positions():
    table = BlockTable.from_lists(2, [[9], [4, 6]])
    assert table.slot_mapping(1, np.arange(4)).tolist() == [8, 9, 12, 13]


@pytest.mark.parametrize(
    ("row", "position", "message"),
    [
        (0, 8, "position 8 of row 0, which has 2 blocks of 4"),
        (1, 4, "position 4 of row 1, which has 1 blocks"),
        (0, -1, "position -1 of row 0"),
        (2, 0, "row 2 of a table with 2 rows"),
        (-1, 0, "row -1 of a table"),
    ],
)
def test_slot_outside_the_table_is_an_error_and_never_another_rows_block(row, position, message):
    table = BlockTable.from_lists(4, [[7, 3], [5]])
    with pytest.raises(BlockTableError, match=message):
        table.locate([0, row], [0, position])


def test_bad_arguments_are_refused():
    with pytest.raises(ValueError, match="block_size: 0"):
        BlockTable.from_lists(0, [[1]])
    with pytest.raises(ValueError, match="one number per row in both"):
        BlockTable.expand_spans([0, 1], [1])
    with pytest.raises(ValueError, match="negative"):
        BlockTable.expand_spans([0], [-1])


@given(
    st.lists(st.lists(st.integers(1, 99), max_size=6), min_size=1, max_size=5),
    st.integers(1, 4),
    st.integers(1, 4),
)
def test_split_blocks_have_the_same_slots(tables, kernel_block_size, kernel_blocks):
    table = BlockTable.from_lists(kernel_block_size * kernel_blocks, tables)
    rows, positions = BlockTable.expand_spans(
        np.zeros(len(tables), np.int64), table.num_blocks * table.block_size
    )
    split = table.split(kernel_block_size)
    assert (
        split.slot_mapping(rows, positions).tolist() == table.slot_mapping(rows, positions).tolist()
    )
    assert split.block_size == kernel_block_size
    padding = np.arange(split.block_ids.shape[1]) >= split.num_blocks[:, None]
    assert not split.block_ids[padding].any()


def test_null_blocks_stay_null_when_split():
    split = BlockTable.from_lists(8, [[0, 3]]).split(2)
    assert split.block_ids.tolist() == [[0, 0, 0, 0, 12, 13, 14, 15]]


@pytest.mark.parametrize("kernel_block_size", [0, 3, 16])
def test_block_cannot_be_split_into_what_does_not_divide_it(kernel_block_size):
    table = BlockTable.from_lists(8, [[1]])
    with pytest.raises(ValueError, match=f"block_size: {kernel_block_size} .* 8"):
        table.split(kernel_block_size)


@given(TABLES, st.data())
def test_runs_of_blocks_are_slices_of_the_rows_padded_with_the_null_block(tables, data):
    rows, firsts, counts = [], [], []
    for _ in range(data.draw(st.integers(0, 4))):
        rows.append(data.draw(st.integers(0, len(tables) - 1)))
        firsts.append(data.draw(st.integers(0, len(tables[rows[-1]]))))
        counts.append(data.draw(st.integers(0, len(tables[rows[-1]]) - firsts[-1])))
    found = BlockTable.from_lists(4, tables).between(rows, firsts, counts)
    width = max(counts, default=0)
    assert found.shape == (len(rows), width)
    for run, row, first, count in zip(found.tolist(), rows, firsts, counts, strict=True):
        assert run == tables[row][first : first + count] + [0] * (width - count)


@pytest.mark.parametrize(
    ("row", "first", "count", "message"),
    [
        (0, 1, 2, "blocks 1 to 3 of row 0, which has 2 blocks"),
        (0, -1, 1, "blocks -1 to 0 of row 0"),
        (1, 0, -1, "blocks 0 to -1 of row 1"),
        (2, 0, 0, "row 2 of a table with 2 rows"),
    ],
)
def test_a_run_that_leaves_its_row_is_an_error(row, first, count, message):
    table = BlockTable.from_lists(4, [[7, 3], [5, 8, 9]])
    with pytest.raises(BlockTableError, match=message):
        table.between([1, row], [1, first], [2, count])
