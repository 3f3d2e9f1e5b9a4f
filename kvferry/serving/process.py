"""Child processes of the launcher: first the side of the child, then the side of the launcher.

A child reads its settings as a line of JSON from stdin, and reports over a separate pipe. Stdin
stays open: the end of stdin means that the launcher is gone, so the child ends too.
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
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from kvferry import errors
from kvferry.config import printable
from kvferry.errors import HostError, KVFerryError, PortInUseError, WorkerDiedError
from kvferry.serving.messages import ChildFailed, Event, Loading
from kvferry.transports.shm_segment import SHM_DIR

T = TypeVar("T")

SPARE_PREFIX = "kvferry-models-"
"""Prefix of the temporary folder for the model of a single start; the launcher removes the
folder."""

ORPHAN_GRACE_S = 10.0
"""Seconds for a clean end of a child after the end of its launcher."""


class Reporter:
    """Sends events to the launcher. Thread-safe."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._lock = threading.Lock()

    def send(self, event: Event) -> None:
        """Sends an event; does nothing if the launcher is gone."""
        with self._lock, suppress(BrokenPipeError):
            os.write(self._fd, msgspec.json.encode(event) + b"\n")

    def loading(self, doing: str, done: float) -> None:
        """Reports progress; usable as a ``Progress`` callback."""
        self.send(Loading(doing=doing, done=done))

    @contextmanager
    def telling(self, log: logging.Logger, marker: str) -> Iterator[None]:
        """Within the context, reports as progress what follows ``marker`` in the lines of a log."""
        handler = _LogProgress(self, marker)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)


class _LogProgress(logging.Handler):
    """Reports lines of a log as progress."""

    def __init__(self, report: Reporter, marker: str) -> None:
        super().__init__()
        self._report = report
        self._marker = marker

    def emit(self, record: logging.LogRecord) -> None:
        """Reports what follows the marker, if the line has the marker."""
        _, found, text = record.getMessage().partition(self._marker)
        if found:
            self._report.loading(text, 0.3)


class LogFormatter(logging.Formatter):
    """Formats log records so that text from peers and clients cannot forge a line of the log."""

    def format(self, record: logging.LogRecord) -> str:
        """Formats a record: indents its further lines, and escapes control characters."""
        return printable(super().format(record), keep="\n\t").replace("\n", "\n    ")


class Terminated(SystemExit):
    """Raised by SIGTERM; unwinds the stack, so that everything is closed."""


def begin(kind: type[T]) -> T:
    """Reads the settings. From then on, the process ends with its launcher, and SIGTERM raises.

    Raises:
        msgspec.DecodeError: the launcher is of another release.
    """
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=kind)
    signal.signal(signal.SIGTERM, _terminate)
    # The launcher handles Ctrl-C at the terminal and ends its children in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_follow_launcher, name="kvferry-launcher-watch", daemon=True).start()
    return settings


def _terminate(_signal: int, _frame: object) -> None:
    raise Terminated(0)


def _follow_launcher() -> None:
    os.read(0, 1)  # returns at the end of the pipe, as the launcher never writes a second line
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(ORPHAN_GRACE_S)
    os._exit(1)


def listen(host: str, port: int, who: str, key: str = "port") -> socket.socket:
    """Opens a listening TCP socket.

    Args:
        host: address of this machine; empty for all addresses.
        port: TCP port; 0 takes a free port.
        who: owner of the port, for error messages.
        key: key of the port in the configuration, for error messages.

    Raises:
        PortInUseError: the port is taken.
        HostError: this machine does not have the address, or the port needs privileges.
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
    # Accepted connections inherit this option. asyncio sets the option only for listeners with an
    # explicit protocol. Without it, the part of an answer after the head waits 40 ms for an
    # acknowledgement by the client.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def temporary_folder() -> str:
    """The folder for temporary files; ``/dev/shm``, also for children, if no other is writable.

    Raises:
        HostError: no such folder is writable.
    """
    try:
        return tempfile.gettempdir()
    except OSError as error:
        if os.access(SHM_DIR, os.W_OK):  # the only such folder in a read-only container
            os.environ["TMPDIR"] = tempfile.tempdir = str(SHM_DIR)
            return str(SHM_DIR)
        raise HostError(
            f"temporary files: {error.strerror}; set TMPDIR to a folder that can be written"
        ) from error


def output_folder(folder: Path, option: str) -> Path:
    """Makes the folder that a command-line option names.

    Raises:
        HostError: the folder cannot be made or written.
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
"""Seconds for the ranks of a dead engine to notice its end."""
TAIL_LINES = 12
"""Number of log lines in an error about a dead child."""

OOM_HINT = "killed from outside, perhaps by the OOM killer: see dmesg"
"""Most frequent reason of a SIGKILL that the launcher did not send."""
START_MARK = "=== start of "
"""Beginning of the line in a log that separates a start from earlier starts."""

_decoder: msgspec.json.Decoder[Event] = msgspec.json.Decoder(Event)


@dataclass(frozen=True, slots=True)
class News:
    """An event of a child, or the end of the child."""

    child: "Child"
    event: Event | None
    """The event; ``None`` for the end of the process."""


class Child(ABC):
    """A process that the launcher has started; its events arrive in a queue."""

    host = ""
    """Address of the machine of the process; empty for this machine."""

    def __init__(self, name: str, log: Path, log_start: int) -> None:
        """``log_start`` is the size of the log in bytes before this start."""
        self.name = name
        self.log = log
        """File with stdout and stderr of the process."""
        self.failure: ChildFailed | None = None
        """Error that the process reported before its end; ``None`` for no report."""
        self.exit_code: int | None = None
        """Exit code, negative for a signal; ``None`` for a running or a lost process."""
        self._log_start = log_start
        self._killed = False
        self._ended = threading.Event()
        self._group_ended = threading.Event()

    @property
    @abstractmethod
    def where(self) -> str:
        """Place of the process in words, for error messages."""

    @abstractmethod
    def terminate(self) -> None:
        """Asks the process to end. Idempotent."""

    @abstractmethod
    def _kill(self) -> None:
        """Kills the process."""

    @abstractmethod
    def _events(self) -> Iterator[Event]:
        """Yields the events of the process until its end."""

    @abstractmethod
    def _wait(self) -> int | None:
        """Returns the exit code, after the end of the events."""

    @abstractmethod
    def _end_group(self) -> None:
        """Ends all processes that the process has left behind."""

    def follow(self, news: "queue.Queue[News]") -> None:
        """Starts a thread that puts all events into ``news``, and the end of the process last."""
        threading.Thread(
            target=self._follow, args=(news,), name=f"kvferry-{self.name}", daemon=True
        ).start()

    def _follow(self, news: "queue.Queue[News]") -> None:
        for event in self._events():
            if isinstance(event, ChildFailed):
                self.failure = event
            news.put(News(self, event))
        self.exit_code = self._wait()
        self._ended.set()
        news.put(News(self, None))
        self._end_group()
        self._group_ended.set()

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended yet."""
        return not self._ended.is_set()

    def error(self) -> KVFerryError:
        """The reason of the end: the reported error, or the exit code and the last log lines."""
        if self.failure is not None:
            kind = getattr(errors, self.failure.name, None)
            message = self._named(printable(self.failure.message, keep="\n")) + _oom_hint(
                self.failure.message
            )
            if isinstance(kind, type) and issubclass(kind, KVFerryError):
                try:
                    return kind(message)
                except TypeError:  # the class needs more than a message
                    return KVFerryError(message)
            return WorkerDiedError(f"{message}{self._quoted_log()}")
        return WorkerDiedError(
            f"{self.name} ({self.where}) ended with {describe_exit(self.exit_code)}"
            f"{self._killed_hint()}{self._quoted_log()}"
        )

    def _named(self, message: str) -> str:
        """``message`` after the name of the process, unless the message begins with the name."""
        if message.startswith((f"{self.name}: ", f"engine {self.name!r}")):
            return message
        return f"{self.name}: {message}"

    def log_tail(self) -> list[str]:
        """The last lines in the log of the process since this start."""
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
        return written[-TAIL_LINES:]

    def reap(self, timeout_s: float) -> None:
        """Waits for the end of the process and of its descendants; kills them after the timeout."""
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
    """A process on this machine."""

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
        """Starts ``python -m kvferry.cluster.main WHAT FD NAME`` in a new session.

        Args:
            name: name of the process, for people.
            what: ``"engine"``, ``"rank"``, ``"router"`` or ``"convert"``.
            settings: settings of the process. They travel over a pipe, so ``ps`` shows no secrets.
            log: file for stdout and stderr.
            news: queue for the events of the process.
            threads: number of compute threads of numeric libraries in the process.
        """
        status_read, status_write = os.pipe()
        # The variables must be set at the start: numeric libraries read them only when imported.
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        with log.open("ab") as output:
            log_start = output.tell()
            process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "kvferry.cluster.main", what, str(status_write), name],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(status_write,),
                # In a new session, Ctrl-C reaches only the launcher, and the process group has
                # exactly this child and its descendants.
                start_new_session=True,
                env=environment,
            )
            # An interpreter starts far slower than this write, so this line is the first.
            output.write(f"{_start_line(name, what, process.pid)}\n".encode())
        os.close(status_write)
        child = cls(name, process, log, status_read, log_start)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # the child is dead already; its last event reports this
            process.stdin.write(msgspec.json.encode(settings) + b"\n")
            process.stdin.flush()
        child.follow(news)
        return child

    @property
    def pid(self) -> int:
        """Process id of the child, also the id of its process group."""
        return self._process.pid

    @property
    def where(self) -> str:
        """The process id, in words."""
        return f"process {self.pid}"

    def terminate(self) -> None:
        """Sends SIGTERM."""
        # Popen knows whether the process has been reaped, so a reused id never gets the signal.
        self._process.send_signal(signal.SIGTERM)

    def _kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)

    def _wait(self) -> int:
        return self._process.wait()

    def _end_group(self) -> None:
        """Waits shortly for the end of the child's descendants, so that they can remove their
        shared memory, then kills them. The id of a group is not reused while the group has members.
        """
        deadline = time.monotonic() + GROUP_GRACE_S
        with suppress(ProcessLookupError):
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)
                time.sleep(0.02)
            os.killpg(self.pid, signal.SIGKILL)
        if self._process.stdin is not None:
            with suppress(BrokenPipeError):  # the child died before it read its settings
                self._process.stdin.close()

    def _events(self) -> Iterator[Event]:
        with os.fdopen(self._status_fd, "rb") as pipe:
            for line in pipe:
                try:
                    yield _decoder.decode(line)
                except msgspec.DecodeError:  # incomplete, as the child died during a report
                    logger.warning("%s: a report that does not decode: %.200r", self.name, line)


def _oom_hint(failure: str) -> str:
    """A hint for an engine's report of a rank that was killed by SIGKILL; else empty."""
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
