"""A read out of another process, in chunks that mover threads share."""

import threading

import numpy as np

from kvferry.layouts.copier import STREAM_BYTES, Int64s, as_table, chunks
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, num_bytes
from kvferry.transports.vm_desk import Desk, new_desk
from kvferry.transports.vm_kernels import read_table
from kvferry.transports.vm_process import RemoteProcess

MIN_CHUNK_BYTES = 256 << 10
"""A read is not cut smaller than this to give every thread something."""

_desks = threading.local()


class ProcessCopy:
    """Copies tiles × runs from a process's regions into ours; any number of threads may step."""

    def __init__(
        self,
        process: RemoteProcess,
        source_addresses: Int64s,
        target_addresses: Int64s,
        tiles: Tiles,
        runs: Runs,
        *,
        chunk_bytes: int,
        threads: int,
    ) -> None:
        """Args:
        process: whose memory is read.
        source_addresses: int64, address of each of its regions.
        target_addresses: int64, address of each of ours.
        tiles: a 1-d array of ``TILE_DTYPE``; bounds are checked already.
        runs: a 1-d array of ``RUN_DTYPE``.
        chunk_bytes: bytes per chunk at most (but one run of one tile is never cut).
        threads: among how many a short read is divided.
        """
        self.bytes_done = 0
        """Bytes of the chunks that are complete."""
        self.segments = 0
        """Contiguous pieces written by them."""
        nbytes = num_bytes(tiles, runs)
        self._process = process
        self._addresses = source_addresses, target_addresses
        self._tiles = as_table(tiles, TILE_DTYPE)
        self._runs = as_table(runs, RUN_DTYPE)
        each = max(MIN_CHUNK_BYTES, -(-nbytes // threads))
        self._chunks = chunks(tiles, runs, min(chunk_bytes, each))
        self._bytes = [num_bytes(tiles[some], runs[these]) for some, these in self._chunks]
        self._stream = nbytes >= STREAM_BYTES
        self._lock = threading.Lock()
        self._next = 0

    @property
    def num_chunks(self) -> int:
        """Chunks in all; 0 if there is nothing to copy."""
        return len(self._chunks)

    def step(self) -> bool:
        """Copies one chunk; returns whether it found one to copy.

        Raises:
            PeerLostError: the process has ended, closed its transport, or may not be read.
            TransferError: it has unmapped what it serves.
        """
        with self._lock:
            number = self._next
            if number == len(self._chunks):
                return False
            self._next = number + 1
        tiles, runs = self._chunks[number]
        source, target = self._addresses
        failed, pieces, _ = read_table(
            self._process.pid,
            self._tiles[tiles],
            self._runs[runs],
            _desk()._replace(sources=source, targets=target),
            self._stream,
        )
        if failed:
            raise self._process.reading_error(failed)
        with self._lock:
            self.bytes_done += self._bytes[number]
            self.segments += pieces
        return True


def warm() -> None:
    """Compiles the kernels, or loads them from disk, so that the first read does not wait."""
    tiles = as_table(np.empty(0, dtype=TILE_DTYPE), TILE_DTYPE)
    runs = as_table(np.empty(0, dtype=RUN_DTYPE), RUN_DTYPE)
    read_table(0, tiles, runs, _desk(), False)


def _desk() -> Desk:
    """The calling thread's own."""
    desk = getattr(_desks, "desk", None)
    if desk is None:
        desk = _desks.desk = new_desk()
    return desk
