"""Processes that hold one object each and do what they are told, one call at a time.

A process may run the Python of another environment. This module must import there, so it needs the
standard library and no more of kvferry than :mod:`kvferry.lifetimes`.
"""

import contextlib
import ctypes
import importlib
import operator
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kvferry.lifetimes import Closing

ROOT = Path(__file__).parents[1]
_PR_SET_PDEATHSIG = 1
_START_S = 600.0
"""Seconds in which an object is made: kernels may have to be compiled."""
_CALL_S = 300.0
"""Seconds after which a call has failed: a peer that lost its connection may wait for ever."""
_CLOSE_S = 10.0
"""The same for putting things away."""


class RemoteError(Exception):
    """A process does not start, or a call failed in it; the message is the traceback there."""


class WrongDataError(Exception):
    """A contender moved something else than it was asked for."""


class Remote(Closing):
    """A process with an object made by ``make(*arguments)``. A context manager."""

    def __init__(
        self,
        name: str,
        make: Callable[..., Any],
        *arguments: Any,
        env: Mapping[str, str] | None = None,
        python: Path = Path(sys.executable),
    ) -> None:
        """Starts the process and waits until the object is made.

        Args:
            name: for messages.
            make: a class or function that the process can import.
            arguments: for ``make``.
            env: environment variables of the process, beside our own.
            python: the interpreter that it runs.
        """
        self.name = name
        self._pipe, theirs = Pipe()
        code = f"from benchmarks.remote import serve; serve({theirs.fileno()})"
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [python, "-P", "-c", code],  # -P: without the current folder on its path
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **(env or {})},
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        try:
            self._send(_importable(make), arguments)
            self._answer(_START_S)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method there and returns what it returned.

        Raises:
            WrongDataError: it raised that.
            RemoteError: it raised anything else, or the process ended or does not answer.
        """
        self._send(method, arguments)
        return self._answer(_CALL_S)

    def cpu(self) -> tuple[float, float]:
        """CPU seconds that the process has used so far: its own code, and the kernel for it."""
        user, kernel = self.call("cpu")
        return user, kernel

    def suspend(self) -> None:
        """Stops the process: a peer that polls when idle must not take a core from others."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Lets it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Ends the process at once. Idempotent."""
        self._process.kill()
        self._process.wait()
        self._pipe.close()

    def close(self) -> None:
        """Asks it to end; kills it if it does not. Idempotent."""
        if self._process.poll() is None:
            self.resume()
            # It may have things to put away: segments of shared memory.
            with contextlib.suppress(RemoteError):
                self._send("close", ())
                self._answer(_CLOSE_S)
        self.kill()

    def _send(self, what: object, arguments: tuple[Any, ...]) -> None:
        try:
            self._pipe.send((what, arguments))
        except OSError as error:
            raise RemoteError(f"{self.name}: has ended ({error})") from error

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RemoteError(f"{self.name}: no answer in {timeout_s:.0f} s")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=5)
            raise RemoteError(
                f"{self.name}: the process ended with status {self._process.returncode}"
            ) from error
        if kind == "wrong data":
            raise WrongDataError(f"{self.name}: {value}")
        if kind == "error":
            raise RemoteError(f"{self.name}: {value}")
        return value


def _importable(make: Callable[..., Any]) -> tuple[str, str]:
    """Module and name of a class or function; a command's own module has another name there."""
    module = make.__module__
    if module == "__main__":
        module = sys.modules["__main__"].__spec__.name  # type: ignore[union-attr]
    return module, make.__qualname__


def serve(descriptor: int) -> None:
    """The life of a process: makes the object that the first message names, then calls it."""
    # A suspended child would outlive a parent that was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    pipe = Connection(descriptor)
    held: list[Any] = []
    with contextlib.suppress(EOFError):
        while True:
            what, arguments = pipe.recv()
            try:
                value = _do(held, what, arguments)
            except WrongDataError as error:
                pipe.send(("wrong data", str(error)))
            except Exception:
                pipe.send(("error", traceback.format_exc()))
            else:
                pipe.send(("value", value))


def _do(held: list[Any], what: Any, arguments: tuple[Any, ...]) -> Any:
    """Makes the object, or calls a method of it."""
    if not held:
        module, name = what
        held.append(operator.attrgetter(name)(importlib.import_module(module))(*arguments))
        return None
    if what == "cpu":
        usage = resource.getrusage(resource.RUSAGE_SELF)
        return usage.ru_utime, usage.ru_stime
    return getattr(held[0], what)(*arguments)
