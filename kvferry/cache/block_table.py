"""Block tables on a worker: the place of a token's slot in the KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from kvferry.errors import BlockTableError

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """The block tables of a batch for a KV cache group, as a single array.

    Every lookup takes whole arrays of (row, position) pairs; nothing loops over tokens.

    >>> table = BlockTable.from_lists(4, [[7, 3], [5]])
    >>> rows, positions = BlockTable.expand_spans([2, 0], [3, 1])
    >>> rows.tolist(), positions.tolist()
    ([0, 0, 0, 1], [2, 3, 4, 0])
    >>> table.slot_mapping(rows, positions).tolist()
    [30, 31, 12, 20]
    """

    block_size: int
    """Number of tokens per block."""
    block_ids: IntArray
    """Block ids, int64 ``[rows, blocks of the longest row]``; shorter rows end in 0, the null
    block."""
    num_blocks: IntArray
    """Number of blocks of each row, int64 ``[rows]``."""

    @classmethod
    def from_lists(cls, block_size: int, tables: Sequence[Sequence[int]]) -> "BlockTable":
        """Builds the table of a batch.

        Args:
            block_size: number of tokens per block.
            tables: block ids in token order, in a list per row.

        Raises:
            ValueError: ``block_size`` is below 1.
        """
        if block_size < 1:
            raise ValueError(f"block_size: {block_size} is less than 1")
        num_blocks = np.fromiter(map(len, tables), np.int64, count=len(tables))
        width = int(num_blocks.max(initial=0))
        block_ids = np.zeros((len(tables), width), np.int64)
        is_used = np.arange(width) < num_blocks[:, None]
        block_ids[is_used] = np.fromiter(
            chain.from_iterable(tables), np.int64, count=int(num_blocks.sum())
        )
        return cls(block_size, block_ids, num_blocks)

    @staticmethod
    def expand_spans(
        first_positions: npt.ArrayLike, num_tokens: npt.ArrayLike
    ) -> tuple[IntArray, IntArray]:
        """The tokens of a batch, row after row; row ``i`` has ``num_tokens[i]`` tokens from its
        first on.

        Args:
            first_positions: position of the first token of each row; shape ``[rows]``.
            num_tokens: number of tokens of each row, 0 or more; shape ``[rows]``.

        Returns:
            ``(rows, positions)``, each int64 of shape ``[sum(num_tokens)]``.

        Raises:
            ValueError: the shapes differ, or a number of tokens is negative.
        """
        firsts = np.asarray(first_positions, np.int64)
        counts = np.asarray(num_tokens, np.int64)
        if firsts.shape != counts.shape or firsts.ndim != 1:
            raise ValueError(
                f"first_positions and num_tokens: shapes {firsts.shape} and {counts.shape}; give "
                "one number per row in both"
            )
        rows = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
        ends = np.cumsum(counts)
        # Subtracting the start of each row in the batch turns a running index into an index per
        # row.
        positions = np.arange(len(rows), dtype=np.int64) + np.repeat(
            firsts - (ends - counts), counts
        )
        return rows, positions

    def locate(self, rows: npt.ArrayLike, positions: npt.ArrayLike) -> tuple[IntArray, IntArray]:
        """The blocks and offsets of tokens.

        Args:
            rows: row of each token; broadcasts against ``positions``.
            positions: position of each token in its sequence.

        Returns:
            ``(block ids, offsets in the block)``, int64, of the broadcast shape.

        Raises:
            BlockTableError: a row does not exist, or a position lies outside the blocks of its row.
        """
        row, position = np.broadcast_arrays(
            np.asarray(rows, np.int64), np.asarray(positions, np.int64)
        )
        index, offset = np.divmod(position, self.block_size)
        self._check_rows(row)
        outside = (index < 0) | (index >= self.num_blocks[row])
        if np.any(outside):
            bad_row, bad_position = row[outside][0], position[outside][0]
            raise BlockTableError(
                f"position {bad_position} of row {bad_row}, which has "
                f"{self.num_blocks[bad_row]} blocks of {self.block_size} tokens"
            )
        return self.block_ids[row, index], offset

    def between(
        self, rows: npt.ArrayLike, first_blocks: npt.ArrayLike, num_blocks: npt.ArrayLike
    ) -> IntArray:
        """A run of neighbouring blocks in each of the given rows.

        >>> table = BlockTable.from_lists(4, [[7, 3, 8], [5]])
        >>> table.between([0, 1], [1, 0], [2, 1]).tolist()
        [[3, 8], [5, 0]]

        Args:
            rows: shape ``[n]``.
            first_blocks: index in its row of each run's first block; shape ``[n]``.
            num_blocks: length of each run; shape ``[n]``.

        Returns:
            Block ids ``[n, longest run]``, int64; shorter runs end in 0, the null block.

        Raises:
            BlockTableError: a row does not exist, or a run leaves the blocks of its row.
        """
        row, first, count = (
            np.asarray(given, np.int64) for given in (rows, first_blocks, num_blocks)
        )
        self._check_rows(row)
        outside = (first < 0) | (count < 0) | (first + count > self.num_blocks[row])
        if np.any(outside):
            bad = int(np.flatnonzero(outside)[0])
            raise BlockTableError(
                f"blocks {first[bad]} to {first[bad] + count[bad]} of row {row[bad]}, which has "
                f"{self.num_blocks[row[bad]]} blocks"
            )
        index = np.arange(count.max(initial=0))
        inside = index < count[:, None]
        found = np.zeros(inside.shape, np.int64)
        run, step = np.nonzero(inside)
        found[inside] = self.block_ids[row[run], first[run] + step]
        return found

    def split(self, block_size: int) -> "BlockTable":
        """The same table for a kernel with smaller blocks.

        If a block has ``k`` times the size, block ``b`` becomes the kernel's blocks ``b * k`` to
        ``b * k + k - 1``. All parts of the null block stay 0.

        >>> BlockTable.from_lists(4, [[7, 3], [5]]).split(2).block_ids.tolist()
        [[14, 15, 6, 7], [10, 11, 0, 0]]

        Raises:
            ValueError: ``block_size`` does not divide the block size of the table.
        """
        if block_size < 1 or self.block_size % block_size:
            raise ValueError(
                f"block_size: {block_size} does not divide the table's {self.block_size}; give a "
                "divisor of it"
            )
        parts = self.block_size // block_size
        ids = self.block_ids[:, :, None] * parts + np.arange(parts)
        ids[self.block_ids == 0] = 0
        rows = len(self.block_ids)
        return BlockTable(block_size, ids.reshape(rows, -1), self.num_blocks * parts)

    def slot_mapping(self, rows: npt.ArrayLike, positions: npt.ArrayLike) -> IntArray:
        """Slots of tokens: ``block id * block_size + offset``. See :meth:`locate`."""
        block_ids, offsets = self.locate(rows, positions)
        return block_ids * self.block_size + offsets

    def _check_rows(self, row: IntArray) -> None:
        unknown = (row < 0) | (row >= len(self.num_blocks))
        if np.any(unknown):
            raise BlockTableError(
                f"row {row[unknown][0]} of a table with {len(self.num_blocks)} rows"
            )
