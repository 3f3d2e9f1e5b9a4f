"""Every rank a process of its own, on this machine.

The executor and a rank's process exchange MessagePack over a socket pair; the rank's end is
:mod:`kvferry.engine.worker_process`.
"""

import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path

import msgspec

from kvferry import errors
from kvferry.engine.executor import CLOSE_S, GRACE_S, Executor
from kvferry.engine.messages import (
    Answer,
    Command,
    Done,
    Failed,
    RankOutput,
    Ready,
    SchedulerOutput,
    Start,
    Step,
    Stop,
    WorkerSpec,
)
from kvferry.errors import EngineError, KVFerryError, WorkerDiedError

logger = logging.getLogger(__name__)

#: What each rank writes to stderr, line by line, tagged with engine and rank.
rank_logger = logging.getLogger("kvferry.engine.rank")

_LAST_LINES = 20


class ProcessExecutor(Executor):
    """Starts the processes, and ends them all when one of them cannot start.

    A rank that dies is noticed at once, because its end of the socket pair closes; a rank that
    hangs is killed after ``spec.step_timeout_s``, or a little later where ranks that wait for it
    are still to say so. Ranks end when this process does.

    Args:
        spec: of the workers.

    Raises:
        ModelError, ConfigError, HostError: a rank could not start, with its own message.
        WorkerDiedError: a rank died while it started, or did not start in time.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        self.spec = spec
        self._failures: dict[int, WorkerDiedError] = {}
        self._ranks: list[_RankProcess] = []
        self._asked: tuple[int, ...] = ()
        self._decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)
        with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
            try:
                self._handshakes = self._start((Path(folder) / "meet").as_uri())
            except BaseException:
                self.close()
                raise

    def _start(self, init_method: str) -> list[bytes]:
        level = logging.getLogger("kvferry").getEffectiveLevel()
        for rank in range(self.world_size):
            process = _RankProcess(self.spec, rank)
            self._ranks.append(process)
            process.send(Start(spec=self.spec, rank=rank, init_method=init_method, log_level=level))
        answers = self._collect(range(self.world_size), self.spec.start_timeout_s)
        if self._failures:
            failure = self.first_failure()
            cause = failure.__cause__
            raise type(cause)(str(failure)) if isinstance(cause, KVFerryError) else failure
        ready = [answers[rank] for rank in range(self.world_size)]
        return [answer.handshake for answer in ready if isinstance(answer, Ready)]

    @property
    def failures(self) -> Mapping[int, WorkerDiedError]:
        """Why each dead rank is dead."""
        return self._failures

    @property
    def pids(self) -> list[int]:
        """Process id of each rank."""
        return [rank.process.pid for rank in self._ranks]

    def handshakes(self) -> list[bytes]:
        """Gathered at the start."""
        return list(self._handshakes)

    def alive(self) -> bool:
        """Also notices ranks that died between steps."""
        for rank, process in enumerate(self._ranks):
            if rank not in self._failures and process.process.poll() is not None:
                self._note(rank, process.death())
        return not self._failures

    def _run(self, step: SchedulerOutput) -> list[RankOutput | None]:
        living = [rank for rank in range(self.world_size) if rank not in self._failures]
        command = Step(output=step)
        for rank in living:
            self._ranks[rank].send(command)
        answers = self._collect(living, self.spec.step_timeout_s)
        outputs: list[RankOutput | None] = [None] * self.world_size
        for rank, answer in answers.items():
            assert isinstance(answer, Done)
            outputs[rank] = answer.output
        return outputs

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
        process = self._ranks[rank]
        try:
            answer = self._decoder.decode(process.connection.recv_bytes())
        except (EOFError, OSError):
            self._note(rank, process.death())
            return None
        if not isinstance(answer, Failed):
            return answer
        cause = _error(answer)
        lost = isinstance(cause, WorkerDiedError)
        said = answer.text if lost else f"{answer.kind}: {answer.text}"
        failure = WorkerDiedError(f"{process.name}: {said}")
        failure.__cause__ = cause
        self._note(rank, failure)
        return None

    def _give_up(self, started: float, failed_before: int) -> None:
        """Kills the ranks that have not answered, and says which of them are to blame."""
        noted = list(self._failures.values())[failed_before:]
        explained = any(not isinstance(failure.__cause__, WorkerDiedError) for failure in noted)
        silent = self.waiting_for()
        waited = f"{time.monotonic() - started:.0f} s"
        for rank in self._asked:
            process = self._ranks[rank]
            process.kill()
            if explained or rank not in silent:
                failure = WorkerDiedError(f"{process.name}: ended, as another rank had failed")
                failure.__cause__ = WorkerDiedError("another rank failed")
            else:
                failure = WorkerDiedError(
                    f"{process.name} did not answer for {waited} and was killed"
                )
            self._note(rank, failure)

    def waiting_for(self) -> tuple[int, ...]:
        """Where ranks are stopped (SIGSTOP, a debugger), only those: the others wait for them."""
        asked = self._asked
        stopped = tuple(rank for rank in asked if self._ranks[rank].is_stopped())
        return stopped or asked

    def _note(self, rank: int, failure: WorkerDiedError) -> None:
        caused = isinstance(failure.__cause__, WorkerDiedError)
        logger.log(logging.WARNING if caused else logging.ERROR, "%s", failure)
        self._failures[rank] = failure

    def close(self) -> None:
        """Asks the ranks to end, and kills those that have not in ``CLOSE_S`` seconds."""
        for process in self._ranks:
            process.send(Stop())
        deadline = time.monotonic() + CLOSE_S
        for process in self._ranks:
            process.close(max(deadline - time.monotonic(), 0.1))


class _RankProcess:
    """One process, this end of its socket pair, and the thread that relays its stderr."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        self.name = f"rank {rank} of engine {spec.engine!r}"
        self._tag = f"{spec.engine} rank {rank}"
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    *(sys.executable, "-m", "kvferry.engine.worker_process"),
                    *(str(theirs.fileno()), spec.engine, f"rank{rank}"),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(spec.threads),
                text=True,
                errors="replace",
            )
        self._relay = threading.Thread(target=self._relay_lines, name=self._tag, daemon=True)
        self._relay.start()

    def send(self, command: Command) -> None:
        """Sends; a rank that is gone shows when its answer is awaited."""
        try:
            self.connection.send_bytes(msgspec.msgpack.encode(command))
        except OSError:
            logger.debug("%s does not hear %s", self.name, type(command).__name__)

    def death(self) -> WorkerDiedError:
        """How the process ended; waits for that, as its socket closes a little earlier."""
        try:
            code = self.process.wait(CLOSE_S)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.process.wait()
        self._relay.join(GRACE_S)
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        said = "".join(f"\n    {line}" for line in self._last_lines)
        return WorkerDiedError(
            f"{self.name} (pid {self.process.pid}) died: {how}"
            + (f"; its last lines:{said}" if said else "; it wrote nothing")
        )

    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger; ``False`` where there is no /proc."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in {"T", "t"}

    def kill(self) -> None:
        """Ends the process at once."""
        self.process.kill()

    def close(self, timeout_s: float) -> None:
        """Waits for the end, or kills. Idempotent."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end in time and is killed", self.name)
            self.kill()
            self.process.wait()
        self._relay.join(GRACE_S)
        self.connection.close()

    def _relay_lines(self) -> None:
        assert self.process.stdout is not None
        levels, level = logging.getLevelNamesMapping(), logging.INFO
        with self.process.stdout as lines:
            for line in lines:
                text = line.rstrip()
                self._last_lines.append(text)
                # A line without a level, of a traceback for example, belongs to the last with one.
                level = levels.get(text.partition(" ")[0], level)
                rank_logger.log(level, "[%s] %s", self._tag, text)


def _environment(threads: int) -> dict[str, str]:
    """Like ours, with our module search path and as many OpenMP threads as are asked for."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - a string
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


def _error(failed: Failed) -> Exception:
    """What the rank raised, as far as it is an error of ours."""
    kind = getattr(errors, failed.kind, None)
    if isinstance(kind, type) and issubclass(kind, KVFerryError):
        try:
            return kind(failed.text)
        except TypeError:
            pass  # it takes more than a message
    return EngineError(f"{failed.kind}: {failed.text}")
