"""The ranks of an engine as its executor sees them: processes, here or elsewhere, or threads.

An executor and a rank exchange MessagePack over a socket pair or a TCP connection, one answer per
message; the rank's end is :mod:`kvferry.engine.worker_process`.
"""

import logging
import os
import signal
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvferry.engine.messages import Command, Start, WorkerSpec
from kvferry.errors import WorkerDiedError
from kvferry.zeromq import split_address, tune_tcp

if TYPE_CHECKING:
    from kvferry.engine.communicator import LocalGroup
    from kvferry.engine.worker import Worker

logger = logging.getLogger(__name__)

#: What each rank writes to stderr, line by line, tagged with engine and rank.
rank_logger = logging.getLogger("kvferry.engine.rank")

#: Seconds that a rank gets to close its connector and end; ending takes long on a busy machine.
CLOSE_S = 20.0

_RELAY_END_S = 5.0
_LAST_LINES = 20


class Rank(ABC):
    """One rank, and the executor's end of its connection. Used from the executor's thread."""

    connection: Connection
    given_up = "and was killed"
    """What has become of a rank that did not answer, for messages."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
        self.name = f"rank {rank} of engine {spec.engine!r}"

    def send(self, command: Command) -> None:
        """Sends; a rank that is gone shows when its answer is awaited."""
        try:
            self.connection.send_bytes(msgspec.msgpack.encode(command))
        except OSError:
            logger.debug("%s does not hear %s", self.name, type(command).__name__)

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether it is gone, without waiting."""

    @abstractmethod
    def death(self) -> WorkerDiedError:
        """How a rank ended whose end of the connection is closed; waits until it has."""

    def is_stopped(self) -> bool:
        """Whether it is stopped by a signal or a debugger."""
        return False

    @abstractmethod
    def kill(self) -> None:
        """Ends it at once, as far as that can be."""

    @abstractmethod
    def close(self, timeout_s: float) -> None:
        """Waits for the end of a rank that was told to, or kills it. Idempotent."""


class RankProcess(Rank):
    """A process of its own, and the thread that relays its stderr."""

    def __init__(self, spec: WorkerSpec, rank: int) -> None:
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

    def has_ended(self) -> bool:
        """By its exit code."""
        return self.process.poll() is not None

    def death(self) -> WorkerDiedError:
        """Its exit code or signal, and what it said last."""
        try:
            code = self.process.wait(CLOSE_S)  # its socket closes a little earlier
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
        """By ``/proc``; ``False`` where there is none."""
        try:
            stat = Path(f"/proc/{self.process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] in {"T", "t"}

    def kill(self) -> None:
        """By SIGKILL."""
        self.process.kill()

    def close(self, timeout_s: float) -> None:
        """Waits for the end, or kills."""
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
                # A line without a level, of a traceback for example, belongs to the last with one.
                level = levels.get(text.partition(" ")[0], level)
                rank_logger.log(level, "[%s] %s", self._tag, text)


def _environment(threads: int) -> dict[str, str]:
    """Like ours, with our module search path and as many OpenMP threads as are asked for."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)  # noqa: PTH109 - a string
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)}


class RankElsewhere(Rank):
    """A process of another host, started by somebody else, that waits to be connected to.

    Args:
        spec: of the workers.
        rank: its number.
        address: its ``host:port``.
        key: secret that both sides prove to know.

    Raises:
        WorkerDiedError: it cannot be reached, or does not know the key.
    """

    given_up = "and was cut off"

    def __init__(self, spec: WorkerSpec, rank: int, address: str, key: str) -> None:
        super().__init__(spec, rank)
        self.name += f" at {address}"
        host, port = split_address(address)
        family = "AF_INET6" if ":" in host else "AF_INET"
        try:
            self.connection = Client((host, port), family, authkey=key.encode())
        except (OSError, EOFError, AuthenticationError) as error:
            raise WorkerDiedError(f"{self.name} cannot be reached: {error}") from error
        tune_tcp(self.connection.fileno())

    def has_ended(self) -> bool:
        """Whether its end is closed: between steps it sends nothing else."""
        return self.connection.closed or self.connection.poll()

    def death(self) -> WorkerDiedError:
        """Only that it is gone; its own log has more."""
        return WorkerDiedError(f"{self.name} is gone: its connection has ended")

    def kill(self) -> None:
        """By ending the connection, on which it ends itself."""
        self.connection.close()

    def close(self, timeout_s: float) -> None:
        """Waits until it closes its end, or cuts it off."""
        with suppress(OSError, EOFError):  # closed already
            while self.connection.poll(timeout_s):
                self.connection.recv_bytes()
        self.connection.close()


class RankThread(Rank):
    """A thread of this process: the same semantics without the cost of a process."""

    given_up = "and is waited for no longer"

    def __init__(self, spec: WorkerSpec, rank: int, group: "LocalGroup") -> None:
        super().__init__(spec, rank)
        self.worker: Worker
        """To look at between steps."""
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
        """Whether the thread has."""
        return not self._thread.is_alive()

    def death(self) -> WorkerDiedError:
        """Only that it ended: what it raised was its last answer."""
        return WorkerDiedError(f"{self.name} has ended")

    def kill(self) -> None:
        """Lets nobody wait for it: a thread cannot be ended from outside."""
        self._group.abort()

    def close(self, timeout_s: float) -> None:
        """Waits for the end."""
        self._group.abort()
        self._thread.join(timeout_s)
        self.connection.close()
