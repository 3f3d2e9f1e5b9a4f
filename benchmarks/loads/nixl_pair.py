"""NIXL's two processes: one serves a cache, the other READs from it."""

import random
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.loads.shared import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Cache,
    KnownBlocks,
    Lent,
    Loads,
    draw_table,
    pausing,
)

_SOURCE_LOOK_S = 5e-4
"""Seconds between two looks of the source for progress that is to be made."""


def _nixl_agent(progress_thread: bool) -> Any:
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(backends=["UCX"], enable_prog_thread=progress_thread)
    return nixl_agent(uuid.uuid4().hex, config)


def _nixl_memory(cache: Cache) -> npt.NDArray[np.uint8]:
    memory = np.empty(cache.nbytes, dtype=np.uint8)
    memory[:] = 0  # its pages are taken now
    return memory


class NixlSource:
    """An agent that serves a cache.

    Over TCP its progress thread answers, which polls without a pause. A READ over shared memory
    needs no answer, so there a look now and then is enough, and leaves the core to the reader.
    """

    def __init__(self, path: str, cache: Cache) -> None:
        self._memory = _nixl_memory(cache)
        KnownBlocks(cache, self._memory).fill()
        self._agent = _nixl_agent(progress_thread=path == "tcp")
        self._closing = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        self._registered = self._agent.register_memory(_whole(self._memory), "DRAM")
        self._shuffle = random.Random(1)

    def describe(self) -> tuple[bytes, int]:
        """The agent's metadata and the address of the cache; to be asked once."""
        metadata = self._agent.get_agent_metadata()
        self._looking.start()  # from here on the agent is its alone
        return metadata, self._memory.ctypes.data

    def _look(self) -> None:
        while not self._closing.wait(_SOURCE_LOOK_S):
            self._agent.get_new_notifs()

    def lend(self, tokens: int, count: int) -> list[Lent]:
        """Block tables; NIXL itself knows no leases."""
        return [("", {}, draw_table(self._shuffle, tokens)) for _ in range(count)]

    def close(self) -> None:
        """Gives the memory back."""
        self._closing.set()
        self._looking.join()
        self._agent.deregister_memory(self._registered)


class NixlTarget:
    """An agent that READs; it and the source are connected, and all memory is registered."""

    def __init__(self, progress_thread: bool, cache: Cache, described: tuple[bytes, int]) -> None:
        self._cache = cache
        self._memory = _nixl_memory(cache)
        self._blocks = KnownBlocks(cache, self._memory)
        self._agent = _nixl_agent(progress_thread)
        self._registered = self._agent.register_memory(_whole(self._memory), "DRAM")
        metadata, self._source_address = described
        self._peer = self._agent.add_remote_agent(metadata)
        self._agent.make_connection(self._peer)
        self._shuffle = random.Random(2)

    def load(self, lent: Sequence[Lent], tokens: int, work_rounds: int) -> Loads:
        """As :meth:`benchmarks.loads.engines.Decode.load`."""
        measured = []
        with pausing(work_rounds) as pause:
            for _, _, source in lent:
                target = draw_table(self._shuffle, tokens)
                measured.append(self._read(source, target, tokens, pause))
                self._blocks.check(source, target, tokens)
        return measured

    def _read(
        self,
        source: list[int],
        target: list[int],
        tokens: int,
        pause: Callable[[], object],
    ) -> tuple[float, float, float]:
        agent = self._agent
        pause()
        began = time.perf_counter()
        remote = descriptors(self._cache, self._source_address, source, tokens)
        local = descriptors(self._cache, self._memory.ctypes.data, target, tokens)
        handle = agent.initialize_xfer(
            "READ",
            agent.get_xfer_descs(local, "DRAM"),
            agent.get_xfer_descs(remote, "DRAM"),
            self._peer,
        )
        state = agent.transfer(handle)
        called = time.perf_counter()
        while state == "PROC":
            state = agent.check_xfer_state(handle)
            if state == "PROC":
                pause()
        ended = time.perf_counter()
        if state != "DONE":
            raise RuntimeError(f"the READ ended as {state}")
        agent.release_xfer_handle(handle)
        return ended - began, called - began, ended - began

    def close(self) -> None:
        """Gives the memory back."""
        self._agent.deregister_memory(self._registered)


def descriptors(
    cache: Cache, address: int, table: list[int], tokens: int
) -> npt.NDArray[np.uint64]:
    """Address, bytes and device: a row per block of K or V of one layer, the last one cut short."""
    firsts = np.arange(cache.layers * 2, dtype=np.uint64) * (NUM_BLOCKS * cache.block_bytes)
    offsets = np.array(table, dtype=np.uint64) * cache.block_bytes
    rows = np.zeros((len(firsts), len(table), 3), dtype=np.uint64)
    rows[:, :, 0] = firsts[:, None] + offsets + address
    rows[:, :, 1] = cache.block_bytes
    rows[:, -1, 1] -= (-tokens % BLOCK_SIZE) * cache.token_bytes
    return rows.reshape(-1, 3)


def _whole(memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64]:
    return np.array([[memory.ctypes.data, memory.nbytes, 0]], dtype=np.uint64)
