"""The communicator between processes: ``torch.distributed`` with gloo."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from kvferry.engine.communicator import DEFAULT_TIMEOUT_S, Communicator
from kvferry.errors import WorkerDiedError
from kvferry.topology.geometry import ParallelShape


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
