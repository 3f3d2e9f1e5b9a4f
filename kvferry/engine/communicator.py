"""What the ranks of one engine say to each other while they compute.

There are two kinds of operations: sums and gathers among the TP ranks of a stage, and hidden states
from a stage to the next. Ranks call the same operations in the same order, because they run the
same steps. Ranks are threads of one process (:class:`LocalCommunicator`), or processes
(:class:`GlooCommunicator`).
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from kvferry.errors import WorkerDiedError
from kvferry.topology import ParallelShape

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
        if len(self._peers) == 1:
            return x
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
        """Lets nobody wait for this rank: the other ranks' operations fail."""
        self._group.abort()

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


class GlooCommunicator(Communicator):
    """One rank of a default process group, which it makes and destroys.

    Args:
        parallel: the engine's shape.
        rank: this process's rank.
        init_method: where ranks meet, for example ``file:///tmp/x/meet`` (a file that does not
            exist yet) or ``tcp://127.0.0.1:29500``.
        timeout_s: seconds after which a silent rank counts as dead.

    Raises:
        WorkerDiedError: not all ranks came in time.
    """

    def __init__(
        self,
        parallel: ParallelShape,
        rank: int,
        init_method: str,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(parallel, rank)
        timeout = timedelta(seconds=timeout_s)
        self._sums: dist.ProcessGroup | None = None
        with self._mapped("meet the other ranks"):
            dist.init_process_group(
                "gloo",
                init_method=init_method,
                rank=rank,
                world_size=parallel.world_size,
                timeout=timeout,
            )
            if parallel.tp > 1:
                # Every rank makes every group, in the same order: new_group is collective.
                for stage in range(parallel.pp):
                    first = stage * parallel.tp
                    ranks = list(range(first, first + parallel.tp))
                    group = dist.new_group(ranks, timeout=timeout)
                    if stage == self.stage:
                        self._sums = group

    def all_reduce(self, x: torch.Tensor) -> None:
        """Gloo's ring: every chunk is added up on one rank, then handed round."""
        if self._sums is not None:
            with self._mapped("add up"):
                dist.all_reduce(x, group=self._sums)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Pads to the longest piece, as gloo gathers equal sizes only."""
        if self._sums is None:
            return x
        rows, longest = x.shape[0], max(sizes)
        padded = x.new_zeros(rows, longest)
        padded[:, : x.shape[1]] = x
        pieces = [torch.empty_like(padded) for _ in sizes] if self.tp_rank == 0 else None
        with self._mapped("gather"):
            dist.gather(padded, pieces, group=self._sums, group_dst=0)
        if pieces is None:
            return None
        return torch.cat(
            [piece[:, :size] for piece, size in zip(pieces, sizes, strict=True)], dim=-1
        )

    def send(self, x: torch.Tensor) -> None:
        """Blocks until the bytes are on their way."""
        with self._mapped("send to the next stage"):
            dist.send(x, self.rank + self.parallel.tp)

    def recv(self, x: torch.Tensor) -> None:
        """Blocks until the bytes are here."""
        with self._mapped("receive from the previous stage"):
            dist.recv(x, self.rank - self.parallel.tp)

    def close(self) -> None:
        """Destroys the process group; the other ranks' next operation fails."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _mapped(self, doing: str) -> Iterator[None]:
        """Gloo says RuntimeError for a closed connection and for a timeout alike."""
        try:
            yield
        except RuntimeError as error:
            # Gloo puts a source line before what happened, and sentences of advice after it.
            happened = str(error).partition("] ")[2].partition(". ")[0] or str(error)
            raise WorkerDiedError(f"rank {self.rank}: cannot {doing}: {happened}") from error
