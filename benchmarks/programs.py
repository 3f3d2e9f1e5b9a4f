"""Programs that serve HTTP, as a process and all that descend from it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

import httpx
import psutil

from benchmarks.remote import ROOT
from kvferry.lifetimes import Closing

_START_S = 600.0
"""Seconds for a start; a quiet machine needs 12 for a vLLM server, and 30 with several ranks."""
_STOP_S = 20.0


class ServerError(Exception):
    """A program did not start, or ended; the message has the end of its log."""


def family(pid: int) -> list[psutil.Process]:
    """A process and all that descend from it; none where it has ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        own = psutil.Process(pid)
        return [own, *own.children(recursive=True)]
    return []


class Program(Closing):
    """A program that serves HTTP. A context manager.

    The constructor starts it, :meth:`wait` waits until it serves.
    """

    def __init__(
        self, command: Sequence[str], health: str, log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        """Starts it.

        Args:
            command: the program and its arguments.
            health: URL that answers once it serves.
            log: file for what it writes; its name is the program's in messages.
            env: all of its environment; ours, unless given.
        """
        self.log = log
        self._health = health
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # its processes are stopped with it, as one group
            )

    def wait(self) -> Self:
        """Returns when the program answers.

        Raises:
            ServerError: it ended, or takes too long.
        """
        deadline = time.monotonic() + _START_S
        while not self.healthy():
            status = self._process.poll()
            if status is not None:
                raise ServerError(f"{self.log.stem}: ended with {status}\n{self.tail()}")
            if time.monotonic() > deadline:
                raise ServerError(f"{self.log.stem}: not up after {_START_S:.0f} s\n{self.tail()}")
            time.sleep(0.1)
        return self

    def healthy(self) -> bool:
        """Whether it answers that it is."""
        try:
            return httpx.get(self._health, timeout=5).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def tail(self, lines: int = 60) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def processes(self) -> list[psutil.Process]:
        """The program's own and all that descend from it."""
        return family(self._process.pid)

    def cpu_seconds(self) -> float:
        """User and system time of all its processes so far."""
        total = 0.0
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def pause(self) -> None:
        """Stops all its processes where they are (SIGSTOP)."""
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets them go on."""
        os.killpg(self._process.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends all its processes at once, as a crash of the host would."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        """Asks it to end, and ends what has not done so soon."""
        members = self.processes()
        with contextlib.suppress(ProcessLookupError):
            self.resume()
            self._process.terminate()
        psutil.wait_procs(members, timeout=_STOP_S)
        Program.kill(self)
