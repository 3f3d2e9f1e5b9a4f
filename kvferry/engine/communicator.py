"""What the ranks of one engine say to each other while they compute.

Two kinds of talk: sums and gathers among the TP ranks of a stage, and hidden states from a stage
to the next. Ranks call the same operations in the same order, because they run the same steps.
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from kvferry.errors import WorkerDiedError
from kvferry.topology.geometry import ParallelShape

#: Seconds after which a rank that does not take part counts as dead.
DEFAULT_TIMEOUT_S = 300.0


class Communicator(ABC):
    """One rank's end. Used from the rank's step thread only; every operation blocks.

    Every operation raises :class:`WorkerDiedError` when a rank it needs is gone or silent.
    """

    def __init__(self, parallel: ParallelShape, rank: int) -> None:
        coordinates = parallel.coordinates(rank)
        self.parallel = parallel
        self.rank = rank
        self.tp_rank = coordinates.tp
        self.stage = coordinates.pp

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> None:
        """Adds ``x`` up over the TP ranks of the stage, in place, to the same bits on each."""

    @abstractmethod
    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Joins the TP ranks' ``x`` along the last dim.

        Args:
            x: ``[rows, sizes[tp_rank]]``, contiguous.
            sizes: extent of the last dim on every TP rank.

        Returns:
            ``[rows, sum(sizes)]`` on TP rank 0, ``None`` on the others.
        """

    @abstractmethod
    def send(self, x: torch.Tensor) -> None:
        """Hands ``x``, contiguous, to the same TP rank of the next stage."""

    @abstractmethod
    def recv(self, x: torch.Tensor) -> None:
        """Fills ``x``, contiguous, with what the same TP rank of the previous stage sends."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group. Idempotent."""


class SingleCommunicator(Communicator):
    """The only rank of its engine."""

    def __init__(self) -> None:
        super().__init__(ParallelShape(), 0)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Nothing to add."""

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """``x`` itself."""
        assert list(sizes) == [x.shape[-1]]
        return x

    def send(self, x: torch.Tensor) -> None:
        """Never called: there is no next stage."""
        raise AssertionError(f"a single rank has no next stage for {tuple(x.shape)}")

    def recv(self, x: torch.Tensor) -> None:
        """Never called: there is no previous stage."""
        raise AssertionError(f"a single rank has no previous stage for {tuple(x.shape)}")

    def close(self) -> None:
        """Nothing to leave."""


class LocalGroup:
    """The ranks of an engine as threads of one process; makes their communicators."""

    def __init__(self, parallel: ParallelShape, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.parallel = parallel
        self.timeout_s = timeout_s
        self.barriers = [threading.Barrier(parallel.tp) for _ in range(parallel.pp)]
        self.slots: list[torch.Tensor | None] = [None] * parallel.world_size
        self.inboxes: list[queue.SimpleQueue[torch.Tensor | None]] = [
            queue.SimpleQueue() for _ in range(parallel.world_size)
        ]

    def communicator(self, rank: int) -> Communicator:
        """The end of one rank."""
        if self.parallel.world_size == 1:
            return SingleCommunicator()
        return LocalCommunicator(self, rank)

    def abort(self) -> None:
        """Makes every operation that waits, now or later, raise ``WorkerDiedError``."""
        for barrier in self.barriers:
            barrier.abort()
        for inbox in self.inboxes:
            inbox.put(None)


class LocalCommunicator(Communicator):
    """One thread of a :class:`LocalGroup`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        super().__init__(group.parallel, rank)
        self._group = group
        first = self.stage * group.parallel.tp
        self._peers = range(first, first + group.parallel.tp)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Adds in the order of the ranks, so that all get the same bits."""
        if len(self._peers) == 1:
            return
        total = sum(self._exchange(x)[1:], start=self._slot(self._peers[0]))
        self._wait()  # until all have added: x is what the others add
        x.copy_(total)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Copies the others' tensors on TP rank 0."""
        joined = None
        tensors = self._exchange(x)
        if self.tp_rank == 0:
            assert [tensor.shape[-1] for tensor in tensors] == list(sizes)
            joined = torch.cat(tensors, dim=-1)
        self._wait()
        return joined

    def send(self, x: torch.Tensor) -> None:
        """Never blocks; the other side gets a copy."""
        self._group.inboxes[self.rank + self.parallel.tp].put(x.clone())

    def recv(self, x: torch.Tensor) -> None:
        """Waits for the previous stage."""
        try:
            received = self._group.inboxes[self.rank].get(timeout=self._group.timeout_s)
        except queue.Empty:
            received = None
        if received is None:
            raise WorkerDiedError(f"rank {self.rank}: the previous stage is gone or silent")
        x.copy_(received)

    def close(self) -> None:
        """The group owns nothing."""

    def _slot(self, rank: int) -> torch.Tensor:
        tensor = self._group.slots[rank]
        assert tensor is not None
        return tensor

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._group.slots[self.rank] = x
        self._wait()
        return [self._slot(rank) for rank in self._peers]

    def _wait(self) -> None:
        try:
            self._group.barriers[self.stage].wait(self._group.timeout_s)
        except threading.BrokenBarrierError:
            raise WorkerDiedError(
                f"rank {self.rank}: a TP rank of stage {self.stage} is gone or silent"
            ) from None
