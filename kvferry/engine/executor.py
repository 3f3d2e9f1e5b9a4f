"""Runs steps on every rank of an engine."""

import logging
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from kvferry import errors
from kvferry.engine.messages import (
    Answer,
    Failed,
    RankOutput,
    RanksElsewhere,
    SchedulerOutput,
    Start,
    WorkerSpec,
)
from kvferry.engine.ranks import CLOSE_S, Rank, RankElsewhere, RankProcess, RankThread
from kvferry.errors import EngineError, KVFerryError, WorkerDiedError
from kvferry.lifetimes import Closing
from kvferry.zeromq import join_address

logger = logging.getLogger(__name__)

#: Seconds that the other ranks get to end a step in which one rank failed.
GRACE_S = 5.0


class Executor(Closing):
    """All ranks of one engine, ready to execute steps. Used from one thread.

    A rank that fails a step is dead to the engine: it may have written half of its KV. Steps
    without requests still reach the ranks that live, so that their connectors can wind up.

    A rank that dies is noticed at once, because its end of the socket pair closes; a rank that
    hangs is given up after ``spec.step_timeout_s``, or a little later where ranks that wait for it
    are still to say so. Ranks end when this process does.

    Args:
        spec: of the workers.
        in_process: whether ranks are threads of this process. ``spec.threads`` then also becomes
            torch's default for threads that this process starts later.
        elsewhere: the ranks that are processes of other hosts, if there are some.

    Raises:
        ModelError, ConfigError, HostError: a rank could not start, with its own message; none is
            left running.
        WorkerDiedError: a rank died while it started, or did not start in time.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        in_process: bool = False,
        elsewhere: RanksElsewhere | None = None,
    ) -> None:
        self.spec = spec
        self._failures: dict[int, WorkerDiedError] = {}
        self._ranks: list[Rank] = []
        self._asked: tuple[int, ...] = ()
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
            try:
                meeting = (Path(folder) / "meet").as_uri()
                if elsewhere is not None:
                    meeting = _free_address(elsewhere.host)
                self._handshakes = self._start(meeting, in_process, elsewhere)
            except BaseException:
                self.close()
                raise

    def _start(
        self, init_method: str, in_process: bool, elsewhere: RanksElsewhere | None
    ) -> list[bytes]:
        spec, numbers = self.spec, range(self.world_size)
        if in_process:
            from kvferry.engine.communicator import LocalGroup  # loads torch

            group = LocalGroup(spec.parallel, spec.step_timeout_s)
            self._ranks = [RankThread(spec, number, group) for number in numbers]
        else:
            # All of them before the first is told to start: it would wait for one that cannot be
            # reached.
            for number in numbers:
                self._ranks.append(_open_rank(spec, number, elsewhere))
        level = logging.getLogger("kvferry").getEffectiveLevel()
        host = "" if elsewhere is None else elsewhere.host
        for rank, number in zip(self._ranks, numbers, strict=True):
            rank.send(
                Start(spec=spec, rank=number, init_method=init_method, log_level=level, host=host)
            )
        answers = self._collect(numbers, spec.start_timeout_s)
        if self._failures:
            failure = self.first_failure()
            cause = failure.__cause__
            raise type(cause)(str(failure)) if isinstance(cause, KVFerryError) else failure
        return [answer for _, answer in sorted(answers.items()) if isinstance(answer, bytes)]

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.spec.parallel.world_size

    @property
    def ranks(self) -> Sequence[Rank]:
        """The ranks, to look at between steps."""
        return self._ranks

    @property
    def failures(self) -> Mapping[int, WorkerDiedError]:
        """Why each dead rank is dead: its exit code or signal, and what it said last."""
        return self._failures

    def handshakes(self) -> list[bytes]:
        """What each rank's connector returned as ``handshake_metadata``, by rank."""
        return list(self._handshakes)

    def alive(self) -> bool:
        """Whether every rank is there; notices ranks that died between steps."""
        for number, rank in enumerate(self._ranks):
            if number not in self._failures and rank.has_ended():
                self._note(number, rank.death())
        return not self._failures

    def execute(self, step: SchedulerOutput) -> list[RankOutput | None]:
        """Executes one step on all ranks that live, and waits for all of them.

        Returns:
            One output per rank, at the rank's index; ``None`` in the place of a dead one.

        Raises:
            WorkerDiedError: nothing came back from any rank; or the step has requests, and a rank
                was dead before it began.
        """
        if self._failures and (step.requests or len(self._failures) == self.world_size):
            raise self.first_failure()
        living = [rank for rank in range(self.world_size) if rank not in self._failures]
        for rank in living:
            self._ranks[rank].send(step)
        outputs: list[RankOutput | None] = [None] * self.world_size
        for rank, answer in self._collect(living, self.spec.step_timeout_s).items():
            assert isinstance(answer, RankOutput)
            outputs[rank] = answer
        if all(output is None for output in outputs):
            raise self.first_failure()
        return outputs

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that have not answered the step under way; none between steps. Any thread.

        Where ranks are stopped (SIGSTOP, a debugger), only those: the others wait for them.
        """
        asked = self._asked
        stopped = tuple(rank for rank in asked if self._ranks[rank].is_stopped())
        return stopped or asked

    def first_failure(self) -> WorkerDiedError:
        """The failure to report where several ranks failed: one that caused the others.

        Raises:
            LookupError: no rank failed.
        """
        for failure in self._failures.values():
            # A rank that lost its neighbour says so; the neighbour is the news.
            if not isinstance(failure.__cause__, WorkerDiedError):
                return failure
        for failure in self._failures.values():
            return failure
        raise LookupError("no rank failed")

    def close(self) -> None:
        """Asks the ranks to end, and kills those that have not in ``CLOSE_S`` seconds."""
        for rank in self._ranks:
            rank.send(None)
        deadline = time.monotonic() + CLOSE_S
        for rank in self._ranks:
            rank.close(max(deadline - time.monotonic(), 0.1))

    def _collect(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Answer]:
        """One answer of each rank; failures are noted instead."""
        answers: dict[int, Answer] = {}
        pending = {self._ranks[rank].connection: rank for rank in ranks}
        started = time.monotonic()
        # Ranks that wait for a silent one give up after ``timeout_s`` too; who says so is not it.
        deadline = started + timeout_s + (GRACE_S if len(pending) > 1 else 0.0)
        failed_before = len(self._failures)
        while pending:
            self._asked = tuple(pending.values())
            left = deadline - time.monotonic()
            ready = wait(list(pending), max(left, 0.0))
            if not ready and left <= 0:
                self._give_up(started, failed_before)
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                answer = self._answer(rank)
                if answer is not None:
                    answers[rank] = answer
            if len(self._failures) > failed_before:
                # The others wait for the failed rank in vain; most notice, some may not.
                deadline = min(deadline, time.monotonic() + GRACE_S)
        self._asked = ()
        return answers

    def _answer(self, rank: int) -> Answer | None:
        try:
            answer = self._decoder.decode(self._ranks[rank].connection.recv_bytes())
        except (EOFError, OSError):
            self._note(rank, self._ranks[rank].death())
            return None
        if not isinstance(answer, Failed):
            return answer
        cause = _error(answer)
        lost = isinstance(cause, WorkerDiedError)
        said = answer.text if lost else f"{answer.kind}: {answer.text}"
        failure = WorkerDiedError(f"{self._ranks[rank].name}: {said}")
        failure.__cause__ = cause
        self._note(rank, failure)
        return None

    def _give_up(self, started: float, failed_before: int) -> None:
        """Ends the ranks that have not answered, and says which of them are to blame."""
        noted = list(self._failures.values())[failed_before:]
        explained = any(not isinstance(failure.__cause__, WorkerDiedError) for failure in noted)
        silent = self.waiting_for()
        waited = f"{time.monotonic() - started:.0f} s"
        for number in self._asked:
            rank = self._ranks[number]
            rank.kill()
            if explained or number not in silent:
                failure = WorkerDiedError(f"{rank.name}: ended, as another rank had failed")
                failure.__cause__ = WorkerDiedError("another rank failed")
            else:
                failure = WorkerDiedError(
                    f"{rank.name} did not answer for {waited} {rank.given_up}"
                )
            self._note(number, failure)

    def _note(self, rank: int, failure: WorkerDiedError) -> None:
        caused = isinstance(failure.__cause__, WorkerDiedError)
        logger.log(logging.WARNING if caused else logging.ERROR, "%s", failure)
        self._failures[rank] = failure


def _open_rank(spec: WorkerSpec, number: int, elsewhere: RanksElsewhere | None) -> Rank:
    """A rank that is a process, of this host unless it is one of those elsewhere."""
    if elsewhere is not None:
        here = spec.parallel.world_size - len(elsewhere.addresses)
        if number >= here:
            return RankElsewhere(spec, number, elsewhere.addresses[number - here], elsewhere.key)
    return RankProcess(spec, number)


def _free_address(host: str) -> str:
    """Where ranks on several hosts meet: rank 0, which is here, is about to listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listener:
        return f"tcp://{join_address(host, listener.getsockname()[1])}"


def _error(failed: Failed) -> Exception:
    """What the rank raised, as far as it is an error of ours."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, KVFerryError):
        try:
            return kind(failed.text)
        except TypeError:
            pass  # it takes more than a message
    return EngineError(f"{failed.kind}: {failed.text}")
