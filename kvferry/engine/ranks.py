"""The executor's side of an engine's ranks: local processes, remote processes, or threads.

An executor and a rank exchange MessagePack over a socket pair or a TCP connection, with an answer
to each message. The rank's side is :mod:`kvferry.engine.worker_process`.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvferry.engine import remote
from kvferry.engine.messages import Command, Start, WorkerSpec
from kvferry.errors import WorkerDiedError

if TYPE_CHECKING:
    from kvferry.engine.communicator import LocalGroup
    from kvferry.engine.worker import Worker

logger = logging.getLogger(__name__)

#: Logger for the ranks' stderr, line by line, with the engine and the rank in each line.
rank_logger = logging.getLogger("kvferry.engine.rank")

#: Seconds for a rank to close its connector and end; this takes long on a busy machine.
CLOSE_S = 20.0

_RELAY_END_S = 5.0
_LAST_LINES = 20


class Rank(ABC):
    """A rank, with the executor's end of the connection. Only the executor's thread may use it."""

    connection: Connection
    given_up = "and was killed"
    """End of the error message about a rank that did not answer."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        self.name = f"rank {rank} of engine {spec.engine!r}"

    def send(self, command: Command) -> None:
        """Sends a command; the loss of a rank only shows when the executor awaits the answer."""
        try:
            self.connection.send_bytes(msgspec.msgpack.encode(command))
        except OSError:
            logger.debug("%s does not hear %s", self.name, type(command).__name__)

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the rank is gone. Never waits."""

    @abstractmethod
    def death(self) -> WorkerDiedError:
        """The reason for a closed connection; waits until the rank has ended."""

    def is_stopped(self) -> bool:
        """Whether a signal or a debugger has stopped the rank."""
        return False

    @abstractmethod
    def kill(self) -> None:
        """Ends the rank at once, as far as possible."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Waits for the end of a rank that was asked to end, or kills the rank. Idempotent."""


class RankProcess(Rank):
    """A rank as a separate process, with a thread that relays the process's stderr.

    Args:
        spec: settings of the ranks.
        rank: number of the rank.
        inherited: file descriptors that the process inherits under the same numbers.
    """

    def __init__(self, spec: WorkerSpec, rank: int, inherited: Sequence[int] = ()) -> None:
        super().__init__(spec, rank)
        self._tag = f"{spec.engine} rank {rank}"
        self._last_lines: deque[str] = deque(maxlen=_LAST_LINES)
        self.connection, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603 - our own module
                [
                    *(sys.executable, "-m", "kvferry.engine.worker_process"),
                    *(str(theirs.fileno()), spec.engine, f"rank{rank}"),
                ],
                pass_fds=[theirs.fileno(), *inherited],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=_environment(spec.threads),
                text=True,
                errors="replace",
            )
        self._relay = threading.Thread(target=self._relay_lines, name=self._tag, daemon=True)
        self._relay.start()

    def has_ended(self) -> bool:
        """Whether the process has an exit code."""
        return self.process.poll() is not None

    def death(self) -> WorkerDiedError:
        """The exit code or signal of the process, and its last log lines."""
        try:
            code = self.process.wait(CLOSE_S)  # the socket closes a little before the exit
        except subprocess.TimeoutExpired:
            self.kill()
            code = self.process.wait()
        self._relay.join(_RELAY_END_S)
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        said = "".join(f"\n    {line}" for line in self._last_lines)
        return WorkerDiedError(
            f"{self.name} (pid {self.process.pid}) died: {how}"
            + (f"; its last lines:{said}" if said else "; it wrote nothing")
        )

    def is_stopped(self) -> bool:
        """Whether ``/proc`` shows the process as stopped; ``False`` without ``/proc``."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in {"T", "t"}

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.process.kill()

    def close(self, timeout_s: float) -> None:
        """Waits for the end of the process, or kills it after the timeout."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            logger.warning("%s did not end in time and is killed", self.name)
            self.kill()
            self.process.wait()
        self._relay.join(_RELAY_END_S)
        self.connection.close()

    def _relay_lines(self) -> None:
        assert self.process.stdout is not None
        levels, level = logging.getLevelNamesMapping(), logging.INFO
        with self.process.stdout as lines:
            for line in lines:
                text = line.rstrip()
                self._last_lines.append(text)
                # A line without a level, for example in a traceback, belongs to the previous line.
                level = levels.get(text.partition(" ")[0], level)
                rank_logger.log(level, "[%s] %s", self._tag, text)


def _environment(threads: int) -> dict[str, str]:
    """This process's environment with its module search path and the number of OpenMP threads."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - a string
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


class RankElsewhere(Rank):
    """A rank as a process on another host, started by a launcher, that waits for the executor.

    Args:
        spec: settings of the ranks.
        rank: number of the rank.
        address: ``host:port`` of the rank.
        key: secret that both sides must prove to know.

    Raises:
        WorkerDiedError: the rank cannot be reached, or has not proved within
            ``spec.start_timeout_s`` that it knows the key.
    """

    given_up = "and was cut off"

    def __init__(self, spec: WorkerSpec, rank: int, address: str, key: str) -> None:
        super().__init__(spec, rank)
        self.name += f" at {address}"
        try:
            self.connection = remote.connect(address, key, spec.start_timeout_s)
        except remote.REFUSALS as error:
            raise WorkerDiedError(f"{self.name} cannot be reached: {error!r}") from error

    def has_ended(self) -> bool:
        """Whether the rank has closed the connection; between steps, a rank never sends data."""
        return self.connection.closed or self.connection.poll()

    def death(self) -> WorkerDiedError:
        """An error without details; the log of the rank has the reason."""
        return WorkerDiedError(f"{self.name} is gone: its connection has ended")

    def kill(self) -> None:
        """Closes the connection, which makes the process end."""
        self.connection.close()

    def close(self, timeout_s: float) -> None:
        """Waits until the rank closes the connection, or closes it after the timeout."""
        with suppress(OSError, EOFError):  # the connection is closed already
            while self.connection.poll(timeout_s):
                self.connection.recv_bytes()
        self.connection.close()


class RankThread(Rank):
    """A rank as a thread of this process: equal semantics without the cost of a process."""

    given_up = "and is waited for no longer"

    def __init__(self, spec: WorkerSpec, rank: int, group: "LocalGroup") -> None:
        super().__init__(spec, rank)
        self.worker: Worker
        """The worker, for inspection between steps."""
        self._group = group
        self.connection, theirs = Pipe()
        self._thread = threading.Thread(
            target=self._serve, args=(theirs,), name=f"{spec.engine}-rank{rank}", daemon=True
        )
        self._thread.start()

    def _serve(self, connection: Connection) -> None:
        from kvferry.engine.worker_process import serve

        with connection:
            serve(connection, self._open_worker)

    def _open_worker(self, start: Start) -> "Worker":
        from kvferry.engine.worker import Worker

        self.worker = Worker(start.spec, self._group.communicator(start.rank))
        return self.worker

    def has_ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def death(self) -> WorkerDiedError:
        """An error without details; the last answer of the thread was the reason."""
        return WorkerDiedError(f"{self.name} has ended")

    def kill(self) -> None:
        """Breaks all waits for the rank; a thread cannot be ended from outside."""
        self._group.abort()

    def close(self, timeout_s: float) -> None:
        """Waits for the end of the thread."""
        self._group.abort()
        self._thread.join(timeout_s)
        self.connection.close()
