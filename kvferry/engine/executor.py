"""Runs steps on all ranks of an engine."""

import logging
import socket
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from kvferry import errors
from kvferry.engine.messages import (
    Answer,
    Failed,
    LoadWeights,
    RankOutput,
    RanksElsewhere,
    SchedulerOutput,
    Start,
    WorkerSpec,
)
from kvferry.engine.ranks import CLOSE_S, Rank, RankElsewhere, RankProcess, RankThread
from kvferry.engine.weights import fingerprint, same_shape
from kvferry.errors import EngineError, KVFerryError, WorkerDiedError
from kvferry.lifetimes import Closing
from kvferry.topology.heads import HeadDigests
from kvferry.zeromq import join_address

logger = logging.getLogger(__name__)

#: Seconds for the other ranks to end a step in which a rank failed.
GRACE_S = 5.0


class Executor(Closing):
    """All ranks of an engine, ready to execute steps. Only a single thread may use the executor.

    A rank that fails in a step counts as dead, because its KV may be half written. Steps without
    requests still reach the live ranks, so that their connectors can finish their work.

    The death of a rank is noticed at once, because the rank's end of the socket pair closes. A
    rank that hangs is given up after ``spec.step_timeout_s``, plus a short time in which the ranks
    that wait for it can report this. Ranks end together with this process.

    Args:
        spec: settings of the ranks.
        in_process: whether ranks are threads of this process. If so, ``spec.threads`` also becomes
            torch's default for threads that this process starts later.
        elsewhere: ranks that are processes on other hosts, if any.

    Raises:
        ModelError, ConfigError, HostError: a rank could not start, with the rank's own message; no
            rank is left running.
        WorkerDiedError: a rank died during its start, or did not start in time.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        *,
        in_process: bool = False,
        elsewhere: RanksElsewhere | None = None,
    ) -> None:
        self.spec = spec
        self._has_ranks_elsewhere = elsewhere is not None
        self._failures: dict[int, WorkerDiedError] = {}
        self._ranks: list[Rank] = []
        self._asked: tuple[int, ...] = ()
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        try:
            self._handshakes = self._start(in_process, elsewhere)
            self.weights_digest = fingerprint(spec.folder, spec.dtype).weights_digest
            """Digest of the weights that the ranks compute with."""
        except BaseException:
            self.close()
            raise

    def _start(self, in_process: bool, elsewhere: RanksElsewhere | None) -> list[bytes]:
        spec, numbers = self.spec, range(self.world_size)
        host = "" if elsewhere is None else elsewhere.host
        meeting, listener = "", None
        if in_process:
            from kvferry.engine.communicator import LocalGroup  # imports torch, which is slow

            group = LocalGroup(spec.parallel, spec.step_timeout_s)
            self._ranks = [RankThread(spec, number, group) for number in numbers]
        else:
            # Open all ranks before any rank gets its start message: a started rank would wait for a
            # rank that cannot be reached.
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            with socket.create_server((host or "127.0.0.1", 0), family=family) as here:
                # Rank 0 inherits the socket, so that no other process can take the port; a rank
                # that meets no other rank keeps no port open.
                meeting, listener = join_address(*here.getsockname()[:2]), here.fileno()
                self._ranks.append(RankProcess(spec, 0, [listener] if self.world_size > 1 else []))
            for number in numbers[1:]:
                self._ranks.append(_open_rank(spec, number, elsewhere))
        level = logging.getLogger("kvferry").getEffectiveLevel()
        start = Start(
            spec=spec, rank=0, meeting=meeting, listener=listener, log_level=level, host=host
        )
        for rank, number in zip(self._ranks, numbers, strict=True):
            rank.send(msgspec.structs.replace(start, rank=number))
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
        """The ranks, for inspection between steps."""
        return self._ranks

    @property
    def failures(self) -> Mapping[int, WorkerDiedError]:
        """Dead rank → the error with its exit code or signal, or its last report."""
        return self._failures

    def handshakes(self) -> list[bytes]:
        """The ``handshake_metadata`` of each rank's connector, by rank."""
        return list(self._handshakes)

    def alive(self) -> bool:
        """Whether all ranks live; also notices ranks that died between steps."""
        for number, rank in enumerate(self._ranks):
            if number not in self._failures and rank.has_ended():
                self._note(number, rank.death())
        return not self._failures

    def execute(self, step: SchedulerOutput) -> list[RankOutput | None]:
        """Executes a step on all live ranks, and waits for all of them.

        Returns:
            An output per rank, at the rank's index; ``None`` for a dead rank.

        Raises:
            WorkerDiedError: no rank returned an output; or the step has requests, and a rank was
                dead before the step.
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

    def load_weights(self, folder: Path) -> list[HeadDigests]:
        """Gives all ranks other weights between two steps.

        Args:
            folder: folder with a converted model of the same shape.

        Returns:
            Digests of the weights of each rank's KV heads, by rank.

        Raises:
            EngineError: ranks run on other hosts, where the folder may not be; nothing has changed.
            ModelError: the model has another shape, or the folder cannot be used; nothing has
                changed.
            WorkerDiedError: a rank is gone, or could not read the weights.
        """
        if self._has_ranks_elsewhere:
            raise EngineError(
                "ranks of this engine run on other hosts, and the weights change on one host only; "
                "restart the engine with the new model"
            )
        digest = same_shape(self.spec.folder, folder, self.spec.dtype).weights_digest
        for rank in self._ranks:
            rank.send(LoadWeights(model_folder=str(folder)))
        answers = self._collect(range(self.world_size), self.spec.start_timeout_s)
        if self._failures:
            raise self.first_failure()
        self.weights_digest = digest
        return [
            msgspec.msgpack.decode(answer, type=HeadDigests)
            for _, answer in sorted(answers.items())
            if isinstance(answer, bytes)
        ]

    def waiting_for(self) -> tuple[int, ...]:
        """Ranks that have not answered the current step; empty between steps. Thread-safe.

        If some of these ranks are stopped (SIGSTOP, a debugger), only the stopped ranks are
        returned, because the others wait for them.
        """
        asked = self._asked
        stopped = tuple(rank for rank in asked if self._ranks[rank].is_stopped())
        return stopped or asked

    def first_failure(self) -> WorkerDiedError:
        """The failure to report if several ranks failed: a failure that caused the others.

        Raises:
            LookupError: no rank failed.
        """
        for failure in self._failures.values():
            # A rank that lost its neighbour only reports this; the neighbour's failure matters.
            if not isinstance(failure.__cause__, WorkerDiedError):
                return failure
        for failure in self._failures.values():
            return failure
        raise LookupError("no rank failed")

    def close(self) -> None:
        """Asks all ranks to end, and kills the ranks that still run after ``CLOSE_S`` seconds."""
        for rank in self._ranks:
            rank.send(None)
        deadline = time.monotonic() + CLOSE_S
        for rank in self._ranks:
            rank.close(max(deadline - time.monotonic(), 0.1))

    def _collect(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Answer]:
        """Waits for an answer of each rank; notes failures in place of answers."""
        answers: dict[int, Answer] = {}
        pending = {self._ranks[rank].connection: rank for rank in ranks}
        started = time.monotonic()
        # Ranks that wait for a silent rank give up after ``timeout_s`` too. The grace lets them
        # report this, so that only the silent rank is blamed.
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
                # The other ranks wait for the failed rank in vain; not all of them notice.
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
        """Kills the ranks that have not answered, and notes which of them are to blame."""
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
    """Opens the process of a rank on this host, or connects to a rank on another host."""
    if elsewhere is not None:
        here = spec.parallel.world_size - len(elsewhere.addresses)
        if number >= here:
            return RankElsewhere(spec, number, elsewhere.addresses[number - here], elsewhere.key)
    return RankProcess(spec, number)


def _error(failed: Failed) -> Exception:
    """The rank's error as a kvferry error; an EngineError for errors of other kinds."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, KVFerryError):
        try:
            return kind(failed.text)
        except TypeError:
            pass  # the class needs more than a message
    return EngineError(f"{failed.kind}: {failed.text}")
