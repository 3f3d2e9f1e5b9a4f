"""A process that the launcher starts: the process's own end, then the launcher's.

A child reads its settings as one line of JSON from stdin and reports over a pipe of its own. Stdin
stays open: its end means that the launcher is gone, and the child ends too.
"""

import datetime as dt
import errno
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from kvferry import errors
from kvferry.cluster.messages import Event, Failed, Loading
from kvferry.config import printable
from kvferry.errors import HostError, KVFerryError, PortInUseError, WorkerDiedError
from kvferry.transports.shm_segment import SHM_DIR

T = TypeVar("T")

SPARE_PREFIX = "kvferry-models-"
"""Begins the name of a temporary folder for the model of one start, which the launcher removes."""

ORPHAN_GRACE_S = 10.0
"""Seconds that a child whose launcher is gone has for a clean end."""


class Reporter:
    """Sends events to the launcher. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, event: Event) -> None:
        """Reports; silent when the launcher is gone."""
        with self._lock, suppress(BrokenPipeError):
            os.write(self._fd, msgspec.json.encode(event) + b"\n")

    def loading(self, doing: str, done: float) -> None:
        """Reports progress; fits where a ``Progress`` callback is wanted."""
        self.send(Loading(doing=doing, done=done))


class LogFormatter(logging.Formatter):
    """Lines of a log in which nothing that a peer or a client sent passes for a line of its own."""

    def format(self, record: logging.LogRecord) -> str:
        """The record; lines after its first are indented, and control characters escaped."""
        return printable(super().format(record), keep="\n\t").replace("\n", "\n    ")


class Terminated(SystemExit):
    """SIGTERM arrived; unwinds the stack so that everything is closed."""


def begin(kind: type[T]) -> T:
    """Reads the settings, and from then on ends with the launcher. SIGTERM raises.

    Raises:
        msgspec.DecodeError: the launcher is of another release.
    """
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    signal.signal(signal.SIGTERM, _terminate)
    # A Ctrl-C at the terminal is the launcher's to handle, in its order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_launcher, name="kvferry-launcher-watch", daemon=True).start()
    return settings


def _terminate(_signal: int, _frame: object) -> None:
    raise Terminated(0)


def _follow_launcher() -> None:
    os.read(0, 1)  # returns at the end of the pipe: the launcher never writes a second line
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def listen(host: str, port: int, who: str, key: str = "port") -> socket.socket:
    """A listening TCP socket. ``who`` and ``key`` say where the user wrote the port.

    Raises:
        PortInUseError: the port is taken.
        HostError: the address is not of this machine, or the port needs privileges.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"{who}: {key} {port} on {host or '*'} is in use; "
                "write another one, or 0 for a free one"
            ) from error
        raise HostError(f"{who}: cannot listen on {host}:{port}: {error.strerror}") from error
    # Its connections inherit that. asyncio sets it only where the protocol was named; without it
    # what follows the head of an answer waits until the client has acknowledged that: 40 ms.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def temporary_folder() -> str:
    """The folder for temporary files; ``/dev/shm``, for children too, where there is no other.

    Raises:
        HostError: none can be written.
    """
    try:
        return tempfile.gettempdir()
    except OSError as error:
        if os.access(SHM_DIR, os.W_OK):  # the one such folder of a container that is read-only
            os.environ["TMPDIR"] = tempfile.tempdir = str(SHM_DIR)
            return str(SHM_DIR)
        raise HostError(
            f"temporary files: {error.strerror}; set TMPDIR to a folder that can be written"
        ) from error


def output_folder(folder: Path, option: str) -> Path:
    """Makes the folder that an option of a command names.

    Raises:
        HostError: it cannot be made, or not be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise HostError(
            f"{option}: {folder.absolute()} cannot be written: {error.strerror}; name another"
        ) from error
    return folder


logger = logging.getLogger(__name__)

TERM_GRACE_S = 15.0
"""Seconds between SIGTERM and SIGKILL."""
GROUP_GRACE_S = 5.0
"""Seconds that the ranks of a dead engine have to notice it."""
TAIL_LINES = 12
"""Log lines that a report of a death quotes."""

OOM_HINT = "killed from outside, perhaps by the OOM killer: see dmesg"
"""What a SIGKILL that is not ours means most often."""
START_MARK = "=== start of "
"""Begins the line that divides the log of a start from those of earlier ones."""

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


@dataclass(frozen=True, slots=True)
class News:
    """An event of a child, or its end."""

    child: "Child"
    event: Event | None
    """``None`` when the process has ended."""


class Child(ABC):
    """What the launcher has started. Its news arrive in the queue it was started with."""

    host = ""
    """Address of the machine on which it runs; empty for this one."""

    def __init__(self, name: str, log: Path, log_start: int) -> None:
        """``log_start`` is the size of the log, in bytes, before this start."""
        self.name = name
        self.log = log
        """File that gets its stdout and stderr."""
        self.failure: Failed | None = None
        """What it reported before it ended."""
        self.exit_code: int | None = None
        """Negative for a signal; ``None`` while it runs, and if it was lost."""
        self._log_start = log_start
        self._killed = False
        self._ended = threading.Event()
        self._group_ended = threading.Event()

    @property
    @abstractmethod
    def where(self) -> str:
        """Where it runs, for people."""

    @abstractmethod
    def terminate(self) -> None:
        """Asks it to end. Idempotent."""

    @abstractmethod
    def _kill(self) -> None:
        """Ends it at once."""

    @abstractmethod
    def _events(self) -> Iterator[Event]:
        """What it reports, until it has ended."""

    @abstractmethod
    def _wait(self) -> int | None:
        """Its exit code, once its events have ended."""

    @abstractmethod
    def _end_group(self) -> None:
        """Ends what it has left behind."""

    def follow(self, news: "queue.Queue[News]") -> None:
        """From now on ``news`` gets its events, and in the end its end."""
        threading.Thread(
            target=self._follow, args=(news,), name=f"kvferry-{self.name}", daemon=True
        ).start()

    def _follow(self, news: "queue.Queue[News]") -> None:
        for event in self._events():
            if isinstance(event, Failed):
                self.failure = event
            news.put(News(self, event))
        self.exit_code = self._wait()
        self._ended.set()
        news.put(News(self, None))
        self._end_group()
        self._group_ended.set()

    @property
    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        return not self._ended.is_set()

    def error(self) -> KVFerryError:
        """Why it ended, in words: what it reported, or its exit code and last log lines."""
        if self.failure is not None:
            kind = getattr(errors, self.failure.name, None)
            message = self._named(printable(self.failure.message, keep="\n")) + _oom_hint(
                self.failure.message
            )
            if isinstance(kind, type) and issubclass(kind, KVFerryError):
                try:
                    return kind(message)
                except TypeError:  # its constructor takes more than a message
                    return KVFerryError(message)
            return WorkerDiedError(f"{message}{self._quoted_log()}")
        return WorkerDiedError(
            f"{self.name} ({self.where}) ended with {describe_exit(self.exit_code)}"
            f"{self._killed_hint()}{self._quoted_log()}"
        )

    def _named(self, message: str) -> str:
        """``message`` with the process's name in front, unless it begins with it."""
        if message.startswith((f"{self.name}: ", f"engine {self.name!r}")):
            return message
        return f"{self.name}: {message}"

    def log_tail(self, lines: int = TAIL_LINES) -> list[str]:
        """The last lines that it wrote to its log since this start."""
        try:
            with self.log.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, file.tell() - 65536))
                text = file.read().decode(errors="replace")
        except OSError:
            return []
        written = [
            printable(line, keep="\t")
            for line in text.splitlines()
            if not line.startswith(START_MARK)
        ]
        return written[-lines:]

    def reap(self, timeout_s: float) -> None:
        """Waits for its end and that of all it has started; kills them when time is up."""
        if not self._ended.wait(max(0.0, timeout_s)):
            self._killed = True
            self._kill()
        self._group_ended.wait()

    def _killed_hint(self) -> str:
        if self.exit_code != -signal.SIGKILL or self._killed:
            return ""
        return f"; {OOM_HINT}"

    def _quoted_log(self) -> str:
        tail = self.log_tail()
        if not tail:
            return f"; its log {self.log} is empty"
        return "".join(f"\n  | {line}" for line in tail) + f"\n  (log: {self.log})"


class ChildProcess(Child):
    """A process of this machine."""

    def __init__(
        self,
        name: str,
        process: "subprocess.Popen[bytes]",
        log: Path,
        status_fd: int,
        log_start: int = 0,
    ) -> None:
        """Use :meth:`start`."""
        super().__init__(name, log, log_start)
        self._process = process
        self._status_fd = status_fd

    @classmethod
    def start(
        cls,
        name: str,
        what: str,
        settings: msgspec.Struct,
        log: Path,
        news: "queue.Queue[News]",
        threads: int = 1,
    ) -> "ChildProcess":
        """Starts ``python -m kvferry.cluster.main WHAT FD NAME`` in a session of its own.

        Args:
            name: how people know it.
            what: ``"engine"``, ``"rank"``, ``"router"`` or ``"convert"``.
            settings: its settings; they travel over a pipe, so that secrets stay out of ``ps``.
            log: file that gets its stdout and stderr.
            news: gets its events.
            threads: compute threads of the numeric libraries in it.
        """
        status_read, status_write = os.pipe()
        # Before numeric libraries are loaded: afterwards they do not look at it any more.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as output:
            log_start = output.tell()
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "kvferry.cluster.main", what, str(status_write), name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(status_write,),
                # A session of its own: Ctrl-C reaches only the launcher, and the process group
                # is everything this child has started.
                start_new_session=True,
                env=environment,
            )
            # An interpreter takes far longer to start than this: it is the log's first line.
            output.write(f"{_start_line(name, what, process.pid)}\n".encode())
        os.close(status_write)
        child = cls(name, process, log, status_read, log_start)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it is dead already, which its news will say
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
        child.follow(news)
        return child

    @property
    def pid(self) -> int:
        """Its process id, which is its process group too."""
        return self._process.pid

    @property
    def where(self) -> str:
        """Its process id."""
        return f"process {self.pid}"

    def terminate(self) -> None:
        """By SIGTERM."""
        # Popen knows whether the process has been waited for, so that no reused id is hit.
        self._process.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def _wait(self) -> int:
        return self._process.wait()

    def _end_group(self) -> None:
        """Gives what the child has started a moment to end by itself (and to remove its shared
        memory), then kills it. The id of a group is not reused while it has members.
        """
        deadline = time.monotonic() + GROUP_GRACE_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.02)
            os.killpg(self.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # it died before it read its settings
                self._process.stdin.close()

    def _events(self) -> Iterator[Event]:
        with os.fdopen(self._status_fd, "rb") as pipe:
            for line in pipe:
                try:
                    yield _decoder.decode(line)
                except msgspec.DecodeError:  # cut off: it died in the middle of a report
                    logger.warning("%s: a report that does not decode: %.200r", self.name, line)


def _oom_hint(failure: str) -> str:
    """For an engine's report of a rank that somebody killed."""
    return f"\n  ({OOM_HINT})" if "died: killed by SIGKILL" in failure else ""


def _start_line(name: str, what: str, pid: int) -> str:
    now = dt.datetime.now(dt.UTC).astimezone().isoformat(sep=" ", timespec="seconds")
    return f"{START_MARK}{what} {name!r}, process {pid}, {now} ==="


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "no exit code yet"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
