"""The child's end of a process that the launcher started.

A child reads its settings as one line of JSON from stdin and reports over a pipe of its own. Stdin
stays open: its end means that the launcher is gone, and the child ends too.
"""

import errno
import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import TypeAlias, TypeVar

import msgspec

from kvferry.errors import HostError, PortInUseError

T = TypeVar("T")

ORPHAN_GRACE_S = 10.0
"""Seconds that a child whose launcher is gone has for a clean end."""


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the child does before it is ready."""

    doing: str
    done: float
    """Fraction of the whole, 0 to 1."""


class Bound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child listens on its HTTP port; requests wait until it is ready."""

    port: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child serves, or has done what it was started for."""

    control: str | None = None
    """``host:port`` of an engine's control channel."""
    folder: str | None = None
    """What a conversion made."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child cannot go on and is about to end."""

    name: str
    """Class name of the error."""
    message: str


Event: TypeAlias = Loading | Bound | Ready | Failed


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
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(
                f"{who}: {key} {port} on {host or '*'} is in use; "
                "write another one, or 0 for a free one"
            ) from error
        raise HostError(f"{who}: cannot listen on {host}:{port}: {error.strerror}") from error
