"""Processes that hold one object each and do what they are told, one call at a time."""

import contextlib
import ctypes
import functools
import multiprocessing
import os
import resource
import signal
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.cases import WrongDataError
from kvferry.lifetimes import Closing

_PR_SET_PDEATHSIG = 1
_START_S = 600.0
"""Seconds in which an object is made: kernels may have to be compiled."""
_CALL_S = 120.0
"""Seconds after which a call has failed: a peer that lost its connection may wait for ever."""
_CLOSE_S = 10.0
"""The same for putting things away."""


class RemoteError(Exception):
    """A call failed in its process; the message is the traceback there."""


class Remote(Closing):
    """A process with an object made by ``make(*arguments)``. A context manager."""

    def __init__(
        self, name: str, make: Callable[..., Any], *arguments: Any, env: Mapping[str, str]
    ) -> None:
        """Starts the process and waits until the object is made.

        Args:
            name: for messages.
            make: a class or function that the process can import.
            arguments: for ``make``.
            env: environment variables, set before anything heavy is imported there.
        """
        context = multiprocessing.get_context("spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, dict(env), make, arguments), name=name, daemon=True
        )
        self._process.start()
        theirs.close()
        try:
            self._answer(_START_S)
        except BaseException:
            self.kill()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        assert self._process.pid is not None
        return self._process.pid

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls a method there and returns what it returned.

        Raises:
            WrongDataError: it raised that.
            RemoteError: it raised anything else, or the process ended or does not answer.
        """
        return self._ask(method, arguments, _CALL_S)

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
        self._process.join()
        self._pipe.close()

    def close(self) -> None:
        """Asks it to end; kills it if it does not. Idempotent."""
        if self._process.is_alive():
            self.resume()
            # It may have things to put away: segments of shared memory.
            with contextlib.suppress(RemoteError):
                self._ask("close", (), _CLOSE_S)
        self.kill()

    def _ask(self, method: str, arguments: tuple[Any, ...], timeout_s: float) -> Any:
        try:
            self._pipe.send((method, arguments))
        except OSError as error:
            raise RemoteError(f"{self.name}: has ended ({error})") from error
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise RemoteError(f"{self.name}: no answer in {timeout_s:.0f} s")
        try:
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            self._process.join(timeout=5)
            raise RemoteError(
                f"{self.name}: the process ended with status {self._process.exitcode}"
            ) from error
        if kind == "wrong data":
            raise WrongDataError(f"{self.name}: {value}")
        if kind == "error":
            raise RemoteError(f"{self.name}: {value}")
        return value


def _serve(
    pipe: Connection,
    env: Mapping[str, str],
    make: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(env)
    # A suspended child would outlive a parent that was killed.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    held: list[Any] = []
    _reply(pipe, lambda: held.append(make(*arguments)))
    while held:
        try:
            method, call_arguments = pipe.recv()
        except EOFError:
            return
        if method == "cpu":
            _reply(pipe, _cpu)
        else:
            _reply(pipe, functools.partial(_call, held[0], method, call_arguments))


def _call(thing: Any, method: str, arguments: tuple[Any, ...]) -> Any:
    return getattr(thing, method)(*arguments)


def _reply(pipe: Connection, call: Callable[[], Any]) -> None:
    try:
        value = call()
    except WrongDataError as error:
        pipe.send(("wrong data", str(error)))
    except Exception:
        pipe.send(("error", traceback.format_exc()))
    else:
        pipe.send(("value", value))


def _cpu() -> tuple[float, float]:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime
