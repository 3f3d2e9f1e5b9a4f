"""How a read is cut into chunks; the reader sends the cuts, so both sides agree."""

import threading
from collections import OrderedDict
from collections.abc import Collection

import numpy as np

from kvferry.errors import BoundsError
from kvferry.layouts.arrays import Int64s
from kvferry.layouts.bounds import check_bounds
from kvferry.layouts.chunks import chunk_slices, cut_chunks
from kvferry.layouts.staging import dense_runs, dense_tiles
from kvferry.layouts.tiles import ADDRESS_LIMIT, Runs, Tiles, copy_rows
from kvferry.transports.wire_messages import CHUNK_DTYPE, MAX_CHUNK_BYTES, MAX_TABLE_BYTES, Table

KEPT_LENGTHS = 4
"""Number of run lengths for which a read keeps tables; bounded, because a remote reader chooses the
lengths."""


class ChunkPlan:
    """Tiles × runs and their chunks, checked. Gives each side the tables of each chunk.

    :func:`~kvferry.layouts.staging.stage` says where the bytes of a chunk lie. The plan computes
    the strides of all tiles once per length of runs, and then only offsets per chunk.
    """

    def __init__(self, tiles: Tiles, runs: Runs, chunks: Table, nbytes: Int64s) -> None:
        self.tiles = tiles
        self.runs = runs
        """Runs of the read; runs of equal length are adjacent."""
        self.chunks = chunks
        """Rows of ``CHUNK_DTYPE``."""
        self.nbytes = nbytes
        """Number of bytes of each chunk."""
        self._dense: OrderedDict[tuple[str, int], Tiles] = OrderedDict()
        """Side of the buffer and length of the runs → all tiles with a buffer of one run."""
        self._lock = threading.Lock()
        self._dense_runs: dict[str, Runs] = {}

    @property
    def table_bytes(self) -> int:
        """Largest number of bytes that the plan's tables take."""
        tiles = self.tiles.nbytes * (1 + 2 * min(KEPT_LENGTHS, len(self.runs)))
        return tiles + 2 * self.runs.nbytes + self.chunks.nbytes + self.nbytes.nbytes

    def pack(self, index: int) -> tuple[Tiles, Runs]:
        """Tables to copy a chunk from the source's regions to a dense buffer, target region 0."""
        return self._half(index, "target")

    def unpack(self, index: int) -> tuple[Tiles, Runs]:
        """Tables to copy a chunk from a dense buffer, source region 0, to the reader's regions."""
        return self._half(index, "source")

    def _half(self, index: int, side: str) -> tuple[Tiles, Runs]:
        first_tile, tiles, first_run, count = self.chunks[index].tolist()
        with self._lock:
            whole, runs = self._dense_of(first_run, side), self._runs_of(side)
        part = copy_rows(whole[first_tile : first_tile + tiles])
        offsets = part[f"{side}_offset"]  # in a buffer of one run of all tiles
        offsets -= offsets[0]
        offsets *= count
        # Blocks of the buffer are numbered by rows of the whole table, so the first block is not 0.
        offsets -= first_run * part[f"{side}_block_stride"]
        return part, runs[first_run : first_run + count]

    # The caller of these methods must hold the lock.

    def _dense_of(self, first_run: int, side: str) -> Tiles:
        """All tiles, with a buffer of one run of the same length as this run."""
        tokens = int(self.runs["tokens"][first_run])
        dense = self._dense.get((side, tokens))
        if dense is None:
            dense = self._dense[side, tokens] = dense_tiles(self.tiles, tokens, side)
            if len(self._dense) > KEPT_LENGTHS:  # chunks of equal length follow each other
                self._dense.popitem(last=False)
        return dense

    def _runs_of(self, side: str) -> Runs:
        """The runs with the buffer on one side; a server packs, a reader unpacks."""
        if side not in self._dense_runs:
            self._dense_runs[side] = dense_runs(self.runs, side)
        return self._dense_runs[side]


def has_room(plan: ChunkPlan, others: Collection[ChunkPlan]) -> bool:
    """Whether a server has room for the tables of a read beside the other reads of its reader.

    Both sides use this function. If the reader finds room, so does the server: the tables of the
    server's plan are never larger, as the server gets only the chunks of one connection.
    """
    held = sum(other.table_bytes for other in others)
    return not others or held + plan.table_bytes <= MAX_TABLE_BYTES


def plan_chunks(tiles: Tiles, runs: Runs, chunk_bytes: int) -> ChunkPlan:
    """Cuts a read into chunks of about ``chunk_bytes``; all runs of a chunk have the same length.

    Raises:
        BoundsError: one run of one tile is larger than the largest message.
    """
    order = np.argsort(-runs["tokens"], kind="stable")
    runs = runs[order]
    lengths, starts, counts = np.unique(-runs["tokens"], return_index=True, return_counts=True)
    rows = [
        (tile.start, tile.stop - tile.start, start + run.start, run.stop - run.start)
        for _, start, count in zip(lengths, starts.tolist(), counts.tolist(), strict=True)
        for tile, run in chunk_slices(cut_chunks(tiles, runs[start : start + count], chunk_bytes))
    ]
    table = np.array(rows, dtype=CHUNK_DTYPE)
    return ChunkPlan(tiles, runs, table, _chunk_bytes(tiles, runs, table))


def check_chunks(
    tiles: Tiles, runs: Runs, chunks: Table, region_bytes: tuple[int, ...]
) -> ChunkPlan:
    """Checks a requested read against the local regions; safe for numbers of any size.

    Raises:
        BoundsError: an address outside its region; or a chunk that lies outside the tables, has
            runs of different lengths, or is larger than the largest message.
    """
    check_bounds(tiles, runs, region_bytes, None)
    for first, count, length in (
        ("first_tile", "tiles", len(tiles)),
        ("first_run", "runs", len(runs)),
    ):
        # Compared without an addition, which could wrap.
        bad = (chunks[first] < 0) | (chunks[count] < 1) | (chunks[count] > length)
        bad |= chunks[first] > length - chunks[count]
        if bad.any():
            row = int(np.argmax(bad))
            raise BoundsError(
                f"chunk {row}: {count} {chunks[first][row]} and {chunks[count][row]} more, "
                f"the table has {length}"
            )
    changes = np.concatenate(([0], np.cumsum(np.diff(runs["tokens"]) != 0)))
    mixed = changes[chunks["first_run"]] != changes[chunks["first_run"] + chunks["runs"] - 1]
    if mixed.any():
        raise BoundsError(f"chunk {int(np.argmax(mixed))}: its runs have different lengths")
    return ChunkPlan(tiles, runs, chunks, _chunk_bytes(tiles, runs, chunks))


def _chunk_bytes(tiles: Tiles, runs: Runs, chunks: Table) -> Int64s:
    """Bytes of each chunk; floats first, as a tile of zero strides may have any extent."""
    per_token = (
        tiles["heads"].astype(np.float64)
        * tiles["elements"].astype(np.float64)
        * tiles["itemsize"].astype(np.float64)
    )
    widths = np.concatenate(([0.0], np.cumsum(per_token)))
    tokens = np.concatenate(([0.0], np.cumsum(runs["tokens"].astype(np.float64))))
    last_tile, last_run = (
        chunks["first_tile"] + chunks["tiles"],
        chunks["first_run"] + chunks["runs"],
    )
    sizes = (widths[last_tile] - widths[chunks["first_tile"]]) * (
        tokens[last_run] - tokens[chunks["first_run"]]
    )
    # Sums of whole numbers are exact below 2**53; a larger table is refused.
    too_large = sizes > MAX_CHUNK_BYTES
    if too_large.any() or widths[-1] > 2**53 or tokens[-1] > 2**53:
        row = int(np.argmax(sizes)) if len(sizes) else 0
        raise BoundsError(
            f"chunk {row}: {sizes[row] if len(sizes) else 0:.0f} bytes in one message, "
            f"{MAX_CHUNK_BYTES} are the most"
        )
    # Tiles in no chunk count too: the place of each tile is computed for one run of all tiles.
    if widths[-1] * float(runs["tokens"].max(initial=0)) >= ADDRESS_LIMIT:
        raise BoundsError(
            f"one run of all tiles takes {ADDRESS_LIMIT:.3g} bytes or more; ask only for tiles "
            "that a chunk has"
        )
    nbytes: Int64s = sizes.astype(np.int64)
    return nbytes
