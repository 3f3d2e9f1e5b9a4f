"""Communication between the ranks of an engine during a step.

There are two kinds of operations: sums and gathers among the TP ranks of a stage, and transfers of
hidden states from a stage to the next. All ranks call the same operations in the same order,
because all ranks run the same steps. Ranks are threads of a process (:class:`LocalCommunicator`),
or processes (:class:`GlooCommunicator`).
"""

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from kvferry.errors import WorkerDiedError
from kvferry.topology import ParallelShape
from kvferry.zeromq import split_address

#: Seconds after which a rank that does not join an operation counts as dead.
DEFAULT_TIMEOUT_S = 300.0


class Communicator(ABC):
    """Communication for a single rank. Only the rank's step thread may use it; operations block.

    Every operation raises :class:`WorkerDiedError` if a rank that it needs is gone or silent.
    """

    def __init__(self, parallel: ParallelShape, rank: int) -> None:
        coordinates = parallel.coordinates(rank)
        self.parallel = parallel
        self.rank = rank
        self.tp_rank = coordinates.tp
        self.stage = coordinates.pp

    @abstractmethod
    def all_reduce(self, x: torch.Tensor) -> None:
        """Sums ``x`` over the TP ranks of the stage, in place; all ranks get the same bits."""

    @abstractmethod
    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Concatenates the ``x`` of all TP ranks of the stage along the last dim.

        Args:
            x: ``[rows, sizes[tp_rank]]``, contiguous.
            sizes: extent of the last dim on every TP rank.

        Returns:
            ``[rows, sum(sizes)]`` on TP rank 0, ``None`` on the other ranks.
        """

    @abstractmethod
    def send(self, x: torch.Tensor) -> None:
        """Sends ``x``, contiguous, to the same TP rank of the next stage."""

    @abstractmethod
    def recv(self, x: torch.Tensor) -> None:
        """Fills ``x``, contiguous, with the tensor of the same TP rank of the previous stage."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group. Idempotent."""


class LocalGroup:
    """The ranks of an engine as threads of a process; makes the communicators."""

    def __init__(self, parallel: ParallelShape, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        self.parallel = parallel
        self.timeout_s = timeout_s
        self.barriers = [threading.Barrier(parallel.tp) for _ in range(parallel.pp)]
        self.slots: list[torch.Tensor | None] = [None] * parallel.world_size
        self.inboxes: list[queue.SimpleQueue[torch.Tensor | None]] = [
            queue.SimpleQueue() for _ in range(parallel.world_size)
        ]

    def communicator(self, rank: int) -> Communicator:
        """The communicator of a rank."""
        return LocalCommunicator(self, rank)

    def abort(self) -> None:
        """Makes every waiting operation, now or later, raise ``WorkerDiedError``."""
        for barrier in self.barriers:
            barrier.abort()
        for inbox in self.inboxes:
            inbox.put(None)


class LocalCommunicator(Communicator):
    """The communicator of a thread in a :class:`LocalGroup`."""

    def __init__(self, group: LocalGroup, rank: int) -> None:
        super().__init__(group.parallel, rank)
        self._group = group
        first = self.stage * group.parallel.tp
        self._peers = range(first, first + group.parallel.tp)

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sums in the order of the ranks, so that all ranks get the same bits."""
        if len(self._peers) == 1:
            return
        total = sum(self._exchange(x)[1:], start=self._slot(self._peers[0]))
        self._wait()  # for the sums of all ranks, which still read this x
        x.copy_(total)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Concatenates the tensors of all ranks on TP rank 0."""
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
        """Puts a copy of ``x`` into the inbox of the other rank. Never blocks."""
        self._group.inboxes[self.rank + self.parallel.tp].put(x.clone())

    def recv(self, x: torch.Tensor) -> None:
        """Waits for a tensor of the previous stage."""
        try:
            received = self._group.inboxes[self.rank].get(timeout=self._group.timeout_s)
        except queue.Empty:
            received = None
        if received is None:
            raise WorkerDiedError(f"rank {self.rank}: the previous stage is gone or silent")
        x.copy_(received)

    def close(self) -> None:
        """Breaks all waits for this rank: operations of the other ranks fail."""
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
    """A rank in torch's default process group; makes and destroys the group.

    Args:
        parallel: the parallel shape of the engine.
        rank: rank of this process.
        meeting: ``host:port`` at which rank 0 listens for the other ranks.
        listener: file descriptor of the socket that listens there; for rank 0 only.
        timeout_s: seconds after which a silent rank counts as dead.

    Raises:
        WorkerDiedError: not all ranks came in time.
    """

    def __init__(
        self,
        parallel: ParallelShape,
        rank: int,
        meeting: str,
        listener: int | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        super().__init__(parallel, rank)
        timeout = timedelta(seconds=timeout_s)
        self._sums: dist.ProcessGroup | None = None
        with self._mapped("meet the other ranks"):
            size = parallel.world_size
            store = TCPStore(
                *split_address(meeting), size, rank == 0, timeout, master_listen_fd=listener
            )
            dist.init_process_group(
                "gloo", store=store, rank=rank, world_size=size, timeout=timeout
            )
            if parallel.tp > 1:
                # new_group is collective: every rank makes every group, in the same order.
                for stage in range(parallel.pp):
                    first = stage * parallel.tp
                    ranks = list(range(first, first + parallel.tp))
                    group = dist.new_group(ranks, timeout=timeout)
                    if stage == self.stage:
                        self._sums = group

    def all_reduce(self, x: torch.Tensor) -> None:
        """Sums with Gloo's ring: a rank sums each chunk, then passes the sum round."""
        if self._sums is not None:
            with self._mapped("add up"):
                dist.all_reduce(x, group=self._sums)

    def gather(self, x: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """Pads all pieces to the longest piece, because Gloo gathers only equal sizes."""
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
        """Blocks until the bytes are sent."""
        with self._mapped("send to the next stage"):
            dist.send(x, self.rank + self.parallel.tp)

    def recv(self, x: torch.Tensor) -> None:
        """Blocks until the bytes have arrived."""
        with self._mapped("receive from the previous stage"):
            dist.recv(x, self.rank - self.parallel.tp)

    def close(self) -> None:
        """Destroys the process group; the next operation of the other ranks fails."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _mapped(self, doing: str) -> Iterator[None]:
        """Maps RuntimeError, which Gloo raises for closed connections and for timeouts."""
        try:
            yield
        except RuntimeError as error:
            # Gloo puts a source location before the error, and sentences of advice after it.
            happened = str(error).partition("] ")[2].partition(". ")[0] or str(error)
            raise WorkerDiedError(f"rank {self.rank}: cannot {doing}: {happened}") from error
