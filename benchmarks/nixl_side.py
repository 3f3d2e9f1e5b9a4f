"""NIXL's side: a READ over UCX, and the three-pass permute where layouts differ.

The peer gets what is known to be best for it:

- descriptors are NumPy rows, merged where blocks are adjacent on both sides, prepared with
  ``prep_xfer_dlist``, and the request is made before the clock starts: only post and wait count;
- its source maps the same shared memory that ours serves;
- nothing polls where that only takes a core from the copy: the reader has no progress thread, since
  its waiting caller makes the progress; over shared memory, where the source has next to nothing
  to do, that one has none either and looks every half millisecond; and the source is suspended
  while the reader permutes;
- the permuted blocks are not made dense before they are scattered (see :func:`permute`);
- with two threads it runs both as it is and with its ``num_threads=2``, and the faster counts.

NIXL's processes poll while they are idle, so all are suspended while others are measured.
"""

import importlib.util
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.cases import (
    LAYOUTS,
    CacheShape,
    Case,
    blank_target,
    check_target,
    merged_blocks,
)
from benchmarks.kvferry_side import Offer
from benchmarks.samples import Sample

LOCAL = "NIXL_INIT_AGENT"
_LOOK_S = 5e-4
"""Seconds between two looks of a source that has no progress thread."""


def why_missing() -> str | None:
    """Why NIXL cannot take part, or ``None``."""
    if importlib.util.find_spec("nixl") is None:
        return "the package nixl is not installed (`make bench` installs it)"
    return None


def make_agent(name: str, num_threads: int, *, progress_thread: bool) -> Any:
    """An agent with UCX; without a progress thread its caller makes the progress."""
    from nixl._api import nixl_agent, nixl_agent_config

    config = nixl_agent_config(
        backends=["UCX"], num_threads=num_threads, enable_prog_thread=progress_thread
    )
    return nixl_agent(name, config)


def descriptor_rows(addresses: npt.NDArray[np.int64], nbytes: Any) -> npt.NDArray[np.uint64]:
    """Descriptors: address, bytes, device."""
    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = addresses, nbytes
    return rows


class NixlSource:
    """An agent that serves the memory of a :class:`~benchmarks.kvferry_side.KvferrySource`."""

    def __init__(self, offer: Offer, num_threads: int, progress_thread: bool) -> None:
        self._segments = offer.attach()
        self._agent = make_agent("source", num_threads, progress_thread=progress_thread)
        arrays = [segment.array for segment in self._segments]
        self._addresses = [array.ctypes.data for array in arrays]
        rows = descriptor_rows(np.array(self._addresses), [array.nbytes for array in arrays])
        self._registered = self._agent.register_memory(rows, "DRAM")
        self._metadata = self._agent.get_agent_metadata()
        self._closing = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        if not progress_thread:
            self._looking.start()  # from here on the agent is its alone

    def metadata(self) -> tuple[bytes, list[int]]:
        """What a reader needs: the agent's own, and the address of the cache in each layout."""
        return self._metadata, self._addresses

    def close(self) -> None:
        """Gives the memory back."""
        self._closing.set()
        if self._looking.is_alive():
            self._looking.join()
        self._agent.deregister_memory(self._registered)

    def _look(self) -> None:
        """Makes what progress there is to make."""
        while not self._closing.wait(_LOOK_S):
            self._agent.get_new_notifs()


class NixlReader:
    """Reads into private memory."""

    def __init__(
        self, shape: CacheShape, metadata: tuple[bytes, list[int]], num_threads: int
    ) -> None:
        self._shape = shape
        self._known = shape.known_cells()
        self._target = blank_target(shape)
        self._agent = make_agent("reader", num_threads, progress_thread=False)
        rows = descriptor_rows(np.array([self._target.ctypes.data]), self._target.nbytes)
        self._registered = self._agent.register_memory(rows, "DRAM")
        described, self._addresses = metadata
        self._peer = self._agent.add_remote_agent(described)
        self._requests: dict[tuple[str, bool], tuple[Any, int]] = {}

    def measure(self, contender: str, case: Case) -> Sample:
        """One READ: post and wait."""
        request, descriptors = self._request(case)
        began = time.perf_counter()
        state = self._agent.transfer(request)
        while state == "PROC":
            state = self._agent.check_xfer_state(request)
        seconds = time.perf_counter() - began
        if state != "DONE":
            raise RuntimeError(f"{contender}, {case}: the READ ended as {state}")
        return Sample(seconds, segments=descriptors)

    def permute(self, case: Case) -> float:
        """Changes the layout of what was read; seconds."""
        import torch

        torch.set_num_threads(case.threads)
        caches, indices = self._caches(case)
        began = time.perf_counter()
        for cache in caches:
            permute(cache, indices)
        return time.perf_counter() - began

    def clear(self) -> None:
        """Zeroes the target."""
        self._target[:] = 0

    def check(self, contender: str, case: Case) -> None:
        """Checks the target after a transfer.

        Raises:
            WrongDataError: it holds something else than it should.
        """
        check_target(self._shape, case, self._target, self._known)

    def close(self) -> None:
        """Gives requests and memory back."""
        for request, _ in self._requests.values():
            self._agent.release_xfer_handle(request)
        self._agent.deregister_memory(self._registered)

    def _request(self, case: Case) -> tuple[Any, int]:
        """A request that can be posted again and again, and its descriptors."""
        key = (case.source_layout, case.shuffled)
        if key not in self._requests:
            source, target, nbytes = merged_blocks(self._shape, case)
            source += self._addresses[LAYOUTS.index(case.source_layout)]
            target += self._target.ctypes.data
            local = self._agent.prep_xfer_dlist(LOCAL, descriptor_rows(target, nbytes), "DRAM")
            remote = self._agent.prep_xfer_dlist(
                self._peer, descriptor_rows(source, nbytes), "DRAM"
            )
            chosen = np.arange(len(nbytes), dtype=np.int32)
            request = self._agent.make_prepped_xfer("READ", local, chosen, remote, chosen)
            self._requests[key] = (request, len(nbytes))
        return self._requests[key]

    def _caches(self, case: Case) -> tuple[list[Any], Any]:
        """What has to be permuted: one tensor per layer and part, and the blocks' ids."""
        import torch

        _, target_blocks = case.block_tables(self._shape)
        shape = self._shape
        inner = (shape.block_size, shape.kv_heads)
        if case.target_layout == "HND":
            inner = inner[::-1]
        whole = torch.from_numpy(self._target).view(torch.bfloat16)
        caches = whole.view(shape.layers * 2, shape.blocks, *inner, shape.head_size)
        return list(caches.unbind(0)), torch.from_numpy(target_blocks)


def permute(cache_BXYD: Any, indices: Any) -> None:
    """Turns blocks that arrived as ``[Y, X, D]`` into ``[X, Y, D]`` in place, in three passes.

    The known way: gather the blocks, permute, scatter them back. Making the permuted blocks dense
    before the scatter would be one pass more, and measured slower.
    """
    blocks_BXYD = cache_BXYD.index_select(0, indices)
    count, x, y, size = blocks_BXYD.shape
    blocks_BYXD = blocks_BXYD.view(count, y, x, size)
    cache_BXYD.index_copy_(0, indices, blocks_BYXD.permute(0, 2, 1, 3))
