"""Runs steps on every rank of an engine: the contract, and the executor within one process."""

import logging
import queue
import threading
import time
from abc import abstractmethod
from collections.abc import Mapping

import torch

from kvferry.engine.communicator import Communicator, LocalGroup
from kvferry.engine.messages import RankOutput, SchedulerOutput, WorkerSpec
from kvferry.engine.worker import Worker
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
        return self.spec.parallel.world_size

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

    @abstractmethod
    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that have not answered the step under way; none between steps. Any thread."""

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
        group = LocalGroup(spec.parallel, spec.step_timeout_s)
        self._group = group
        self._failures: dict[int, WorkerDiedError] = {}
        self._asked: tuple[int, ...] = ()
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
        started = time.monotonic()
        for rank in living:
            self._ranks[rank].steps.put(step)
        outputs: list[RankOutput | None] = [None] * self.world_size
        self._asked = tuple(living)
        try:
            for rank in living:
                answer = self._ranks[rank].answer(self._patience_s(started))
                self._asked = tuple(other for other in self._asked if other != rank)
                if isinstance(answer, RankOutput):
                    outputs[rank] = answer
                else:
                    self._note(rank, answer, started)
        finally:
            self._asked = ()
        return outputs

    def _patience_s(self, started: float) -> float:
        """Seconds left for an answer; ranks that wait for a silent one get time to say so."""
        grace = GRACE_S if self.world_size > 1 else 0.0
        return max(started + self.spec.step_timeout_s + grace - time.monotonic(), 0.0)

    def _note(self, rank: int, answer: bytes | Exception | None, started: float) -> None:
        assert not isinstance(answer, bytes)
        self._group.abort()  # the others must not wait for this rank
        name = f"rank {rank} of engine {self.spec.engine!r}"
        if answer is None:
            failure = WorkerDiedError(
                f"{name} did not answer for {time.monotonic() - started:.0f} s"
            )
        else:
            failure = WorkerDiedError(f"{name}: {answer}")
        failure.__cause__ = answer
        logger.error("%s", failure, exc_info=answer)
        self._failures[rank] = failure

    def waiting_for(self) -> tuple[int, ...]:
        """By what has come back; ranks that wait for one of the others are among them."""
        return tuple(rank for rank in self._asked if not self._ranks[rank].has_answered())

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
        if answer is None:
            raise WorkerDiedError(f"{self.thread.name} did not start in {timeout_s:g} s")
        assert isinstance(answer, Exception)
        raise answer

    def answer(self, timeout_s: float) -> bytes | RankOutput | Exception | None:
        """The next answer: a handshake, an output, or what was raised; ``None`` if none came."""
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def has_answered(self) -> bool:
        """Whether an answer has come that was not taken yet."""
        return not self._answers.empty()

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
