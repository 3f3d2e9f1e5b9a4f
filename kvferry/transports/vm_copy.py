"""A read out of another process, in chunks that mover threads share."""

import threading

import numpy as np

from kvferry.layouts.chunks import CHUNK_DTYPE, PROGRESS_DTYPE, ChunkedCopy
from kvferry.layouts.copier import STREAM_BYTES, Int64s
from kvferry.layouts.tiles import RUN_DTYPE, TILE_DTYPE, Runs, Tiles, num_bytes
from kvferry.transports.vm_desk import Desk, new_desk
from kvferry.transports.vm_kernels import read_chunks
from kvferry.transports.vm_process import RemoteProcess

MIN_CHUNK_BYTES = 256 << 10
"""A read is not cut smaller than this to give every thread something."""

_desks = threading.local()


class ProcessCopy(ChunkedCopy):
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
        each = max(MIN_CHUNK_BYTES, -(-num_bytes(tiles, runs) // threads))
        super().__init__(tiles, runs, min(chunk_bytes, each))
        self._process = process
        self._addresses = source_addresses, target_addresses
        self._stream = self.nbytes >= STREAM_BYTES

    def step(self, nbytes: int) -> bool:
        """See :meth:`ChunkedCopy.step`.

        Raises:
            PeerLostError: the process has ended, closed its transport, or may not be read.
            TransferError: it has unmapped what it serves.
        """
        source, target = self._addresses
        failed, left = read_chunks(
            self._process.pid,
            self._tiles,
            self._runs,
            self._chunks,
            self._progress,
            _desk()._replace(sources=source, targets=target),
            nbytes,
            self._stream,
        )
        if failed:
            raise self._process.reading_error(failed)
        return left


def warm() -> None:
    """Compiles the kernels, or loads them from disk, so that the first read does not wait."""
    tiles, runs = np.empty(0, dtype=TILE_DTYPE), np.empty(0, dtype=RUN_DTYPE)
    chunks, progress = np.empty(0, dtype=CHUNK_DTYPE), np.zeros(1, dtype=PROGRESS_DTYPE)
    read_chunks(0, tiles, runs, chunks, progress, _desk(), 1, False)


def _desk() -> Desk:
    """The calling thread's own."""
    desk = getattr(_desks, "desk", None)
    if desk is None:
        desk = _desks.desk = new_desk()
    return desk
