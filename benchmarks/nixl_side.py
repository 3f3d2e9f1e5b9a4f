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
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.cases import LAYOUTS, CacheShape, Case, Reader, merged_blocks
from benchmarks.kvferry_side import Offer

Addresses: TypeAlias = npt.NDArray[np.int64]
Request: TypeAlias = tuple[Any, tuple[Any, Any]]
"""A READ, and the lists of descriptors of which it is made."""

_LOOK_S = 5e-4
"""Seconds between two looks of a source that has no progress thread."""


def why_missing() -> str | None:
    """Why NIXL cannot take part, or ``None``."""
    if importlib.util.find_spec("nixl") is None:
        return "the package nixl is not installed (`make bench` installs it)"
    return None


class NixlMemory:
    """An agent with UCX, and memory that is registered with it."""

    def __init__(
        self,
        name: str,
        spans: Sequence[tuple[int, int]],
        *,
        kind: str = "DRAM",
        num_threads: int = 0,
        progress_thread: bool = False,
    ) -> None:
        """Registers the memory.

        Args:
            name: of the agent.
            spans: address and bytes of each piece of memory.
            kind: ``DRAM``, or ``VRAM`` for a GPU's.
            num_threads: that UCX is given; 0 for its own choice.
            progress_thread: whether the agent has one; else its caller makes the progress.
        """
        from nixl._api import nixl_agent, nixl_agent_config

        config = nixl_agent_config(
            backends=["UCX"], num_threads=num_threads, enable_prog_thread=progress_thread
        )
        self.agent: Any = nixl_agent(name, config)
        self._kind = kind
        addresses, nbytes = np.array(spans, dtype=np.int64).T
        self._registered = self.agent.register_memory(_rows(addresses, nbytes), kind)
        self.metadata: bytes = self.agent.get_agent_metadata()
        """What a reader needs to know of this agent."""

    def meet(self, metadata: bytes) -> None:
        """Gets to know the agent that is read from."""
        self._peer = self.agent.add_remote_agent(metadata)

    def request(self, source: Addresses, target: Addresses, nbytes: Any) -> Request:
        """A READ that can be posted again and again: a descriptor per address, on both sides."""
        local = self.agent.prep_xfer_dlist("NIXL_INIT_AGENT", _rows(target, nbytes), self._kind)
        remote = self.agent.prep_xfer_dlist(self._peer, _rows(source, nbytes), self._kind)
        chosen = np.arange(len(source), dtype=np.int32)
        handle = self.agent.make_prepped_xfer("READ", local, chosen, remote, chosen)
        return handle, (local, remote)

    def read(self, *requests: Request) -> float:
        """Posts all, and waits for them; seconds.

        Raises:
            RuntimeError: one did not end well.
        """
        began = time.perf_counter()
        states = [self.agent.transfer(handle) for handle, _ in requests]
        for number, (handle, _) in enumerate(requests):
            while states[number] == "PROC":
                states[number] = self.agent.check_xfer_state(handle)
        seconds = time.perf_counter() - began
        if set(states) != {"DONE"}:
            raise RuntimeError(f"a READ ended as {set(states) - {'DONE'}}")
        return seconds

    def release(self, *requests: Request) -> None:
        """Gives requests and their descriptors back."""
        for handle, lists in requests:
            self.agent.release_xfer_handle(handle)
            for each in lists:
                self.agent.release_dlist_handle(each)

    def close(self) -> None:
        """Gives the memory back."""
        self.agent.deregister_memory(self._registered)


def _rows(addresses: Addresses, nbytes: Any) -> npt.NDArray[np.uint64]:
    """Descriptors: address, bytes, device."""
    rows = np.zeros((len(addresses), 3), dtype=np.uint64)
    rows[:, 0], rows[:, 1] = addresses, nbytes
    return rows


class NixlSource:
    """An agent that serves the memory of a :class:`~benchmarks.kvferry_side.KvferrySource`."""

    def __init__(self, offer: Offer, num_threads: int, progress_thread: bool) -> None:
        self._segments = offer.attach()
        arrays = [segment.array for segment in self._segments]
        self._addresses = [array.ctypes.data for array in arrays]
        self._memory = NixlMemory(
            "source",
            [(array.ctypes.data, array.nbytes) for array in arrays],
            num_threads=num_threads,
            progress_thread=progress_thread,
        )
        self._closing = threading.Event()
        self._looking = threading.Thread(target=self._look, daemon=True)
        if not progress_thread:
            self._looking.start()  # from here on the agent is its alone

    def metadata(self) -> tuple[bytes, list[int]]:
        """What a reader needs: the agent's own, and the address of the cache in each layout."""
        return self._memory.metadata, self._addresses

    def close(self) -> None:
        """Gives the memory back."""
        self._closing.set()
        if self._looking.is_alive():
            self._looking.join()
        self._memory.close()

    def _look(self) -> None:
        """Makes what progress there is to make."""
        while not self._closing.wait(_LOOK_S):
            self._memory.agent.get_new_notifs()


class NixlReader(Reader):
    """Reads into private memory."""

    def __init__(
        self, shape: CacheShape, metadata: tuple[bytes, list[int]], num_threads: int
    ) -> None:
        super().__init__(shape)
        span = (self.target.ctypes.data, self.target.nbytes)
        self._memory = NixlMemory("reader", [span], num_threads=num_threads)
        described, self._addresses = metadata
        self._memory.meet(described)
        self._requests: dict[tuple[str, bool], Request] = {}

    def measure(self, _contender: str, case: Case) -> float:
        """One READ: post and wait; seconds."""
        return self._memory.read(self._request(case))

    def permute(self, case: Case) -> float:
        """Changes the layout of what was read; seconds."""
        import torch

        torch.set_num_threads(case.threads)
        caches, indices = self._caches(case)
        began = time.perf_counter()
        for cache in caches:
            permute(cache, indices)
        return time.perf_counter() - began

    def close(self) -> None:
        """Gives requests and memory back."""
        self._memory.release(*self._requests.values())
        self._memory.close()

    def _request(self, case: Case) -> Request:
        key = (case.source_layout, case.shuffled)
        if key not in self._requests:
            source, target, nbytes = merged_blocks(self.shape, case)
            source += self._addresses[LAYOUTS.index(case.source_layout)]
            target += self.target.ctypes.data
            self._requests[key] = self._memory.request(source, target, nbytes)
        return self._requests[key]

    def _caches(self, case: Case) -> tuple[list[Any], Any]:
        """What has to be permuted: one tensor per layer and part, and the blocks' ids."""
        import torch

        shape = self.shape
        _, target_blocks = case.block_tables(shape)
        inner = (shape.block_size, shape.kv_heads)
        if case.target_layout == "HND":
            inner = inner[::-1]
        whole = torch.from_numpy(self.target).view(torch.bfloat16)
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
