"""Runs steps on every rank of an engine: the contract, and the executor within one process."""

import logging
import queue
import threading
from abc import abstractmethod
from collections.abc import Mapping

import torch

from kvferry.engine.communicator import Communicator, LocalGroup
from kvferry.engine.messages import RankOutput, SchedulerOutput
from kvferry.engine.worker import Worker
from kvferry.engine.worker_spec import WorkerSpec
from kvferry.errors import KVFerryError, WorkerDiedError
from kvferry.lifetimes import Closing

logger = logging.getLogger(__name__)

#: Seconds that the other ranks get to end a step in which one rank failed.
GRACE_S = 5.0

#: Seconds that a rank gets to close its connector and end; ending takes long on a busy machine.
CLOSE_S = 20.0


class Executor(Closing):
    """All ranks of one engine, ready to execute steps. Used from one thread.

    A rank that fails a step is dead to the engine: it may have written half of its KV. Steps
    without requests still reach the ranks that live, so that their connectors can wind up.
    """

    spec: WorkerSpec

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.spec.geometry.world_size

    @property
    @abstractmethod
    def failures(self) -> Mapping[int, WorkerDiedError]:
        """Why each dead rank is dead: its exit code or signal, and what it said last."""

    @abstractmethod
    def handshakes(self) -> list[bytes]:
        """What each rank's connector returned as ``handshake_metadata``, by rank."""

    @abstractmethod
    def _run(self, step: SchedulerOutput) -> list[RankOutput | None]:
        """Executes a step on the ranks that live; notes failures. By rank."""

    def execute(self, step: SchedulerOutput) -> list[RankOutput | None]:
        """Executes one step on all ranks, and waits for all of them.

        Returns:
            One output per rank, at the rank's index; ``None`` in the place of a dead one.

        Raises:
            WorkerDiedError: nothing came back from any rank; or the step has requests, and a rank
                was dead before it began.
        """
        if self.failures and (step.requests or len(self.failures) == self.world_size):
            raise self.first_failure()
        outputs = self._run(step)
        if all(output is None for output in outputs):
            raise self.first_failure()
        return outputs

    def alive(self) -> bool:
        """Whether every rank is there, as far as is known without asking them."""
        return not self.failures

    def first_failure(self) -> WorkerDiedError:
        """The failure to report where several ranks failed: one that caused the others.

        Raises:
            LookupError: no rank failed.
        """
        for failure in self.failures.values():
            # A rank that lost its neighbour says so; the neighbour is the news.
            if not isinstance(failure.__cause__, WorkerDiedError):
                return failure
        for failure in self.failures.values():
            return failure
        raise LookupError("no rank failed")

    @abstractmethod
    def close(self) -> None:
        """Ends all ranks. Idempotent."""


class InProcessExecutor(Executor):
    """Every rank a thread of this process; the same semantics without the cost of processes.

    Args:
        spec: of the workers. ``threads`` also becomes torch's default for threads that this
            process starts later.

    Raises:
        ModelError, ConfigError, HostError: a rank could not start; none is left running.
        WorkerDiedError: a rank did not start in time.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        group = LocalGroup(spec.geometry.parallel, spec.step_timeout_s)
        self._group = group
        self._failures: dict[int, WorkerDiedError] = {}
        self._ranks = [
            _RankThread(spec, group.communicator(rank), group) for rank in range(self.world_size)
        ]
        try:
            self._handshakes = [rank.started(spec.start_timeout_s) for rank in self._ranks]
        except BaseException:
            self.close()
            raise

    @property
    def failures(self) -> Mapping[int, WorkerDiedError]:
        """Why each dead rank is dead."""
        return self._failures

    def worker(self, rank: int) -> Worker:
        """A rank's worker, to look at between steps."""
        return self._ranks[rank].worker

    def handshakes(self) -> list[bytes]:
        """Gathered at the start."""
        return list(self._handshakes)

    def _run(self, step: SchedulerOutput) -> list[RankOutput | None]:
        living = [rank for rank in range(self.world_size) if rank not in self._failures]
        for rank in living:
            self._ranks[rank].steps.put(step)
        outputs: list[RankOutput | None] = [None] * self.world_size
        for rank in living:
            answer = self._ranks[rank].answer(self.spec.step_timeout_s)
            if isinstance(answer, RankOutput):
                outputs[rank] = answer
            else:
                assert isinstance(answer, Exception)
                self._group.abort()  # the others must not wait for this rank
                failure = WorkerDiedError(f"rank {rank} of engine {self.spec.engine!r}: {answer}")
                failure.__cause__ = answer
                logger.error("%s", failure, exc_info=answer)
                self._failures[rank] = failure
        return outputs

    def close(self) -> None:
        """Ends the threads; each closes its own worker."""
        self._group.abort()
        for rank in self._ranks:
            rank.steps.put(None)
        for rank in self._ranks:
            rank.thread.join(CLOSE_S)


class _RankThread:
    """One rank: a thread that owns a worker and executes what it finds in ``steps``."""

    def __init__(self, spec: WorkerSpec, communicator: Communicator, group: LocalGroup) -> None:
        self.steps: queue.SimpleQueue[SchedulerOutput | None] = queue.SimpleQueue()
        self.worker: Worker
        self._answers: queue.SimpleQueue[bytes | RankOutput | Exception] = queue.SimpleQueue()
        self._group = group
        self.thread = threading.Thread(
            target=self._serve,
            args=(spec, communicator),
            name=f"{spec.engine}-rank{communicator.rank}",
            daemon=True,
        )
        self.thread.start()

    def started(self, timeout_s: float) -> bytes:
        """Waits for the worker; returns its handshake or raises what it raised."""
        answer = self.answer(timeout_s)
        if isinstance(answer, bytes):
            return answer
        assert isinstance(answer, Exception)
        raise answer

    def answer(self, timeout_s: float) -> bytes | RankOutput | Exception:
        """The next answer: a handshake, an output, or what was raised instead."""
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return WorkerDiedError(f"no answer for {timeout_s:g} seconds")

    def _serve(self, spec: WorkerSpec, communicator: Communicator) -> None:
        torch.set_num_threads(spec.threads)  # of this thread; ranks would crowd each other out
        try:
            self.worker = Worker(spec, communicator)
        except Exception as error:  # whatever it is, the executor raises it
            self._answers.put(error)
            return
        try:
            self._answers.put(self.worker.handshake())
            while (step := self.steps.get()) is not None:
                self._answers.put(self.worker.execute(step))
        except Exception as error:
            self._group.abort()
            self._answers.put(error)
        finally:
            try:
                self.worker.close()
            except KVFerryError:
                logger.exception("%s: closing", threading.current_thread().name)
