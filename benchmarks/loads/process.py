"""The processes of the benchmark of short loads, and the calls that they answer.

A process uses the ``kvferry`` of one checkout and this checkout's benchmarks.
"""

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import tomllib
import traceback
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.loads.shared import Loads, WrongBytesError

ROOT = Path(__file__).parents[2]
_UCX_TLS = {"shm": "all", "tcp": "tcp"}
"""``UCX_TLS``. Of all that UCX has it takes cross memory attach for a READ on one host."""
_OPEN_S, _CALL_S, _CLOSE_S = 600.0, 120.0, 10.0
"""Seconds after which a process does not answer. The first start in a checkout compiles kernels."""
_PR_SET_PDEATHSIG = 1
_MODULES = {
    "Prefill": "benchmarks.loads.engines",
    "Decode": "benchmarks.loads.engines",
    "NixlSource": "benchmarks.loads.nixl_pair",
    "NixlTarget": "benchmarks.loads.nixl_pair",
}
"""What a process may hold, and where it is."""


class LoadsError(Exception):
    """A process of the benchmark failed, or a load left wrong bytes; the message says which."""


def install(checkout: Path, folder: Path) -> Path:
    """Fills a new folder for processes that use a checkout's ``kvferry``; returns it.

    It holds a link to our benchmarks, and the checkout's entry points: those of the environment are
    another checkout's.
    """
    package = folder / "kvferry-0.dist-info"
    package.mkdir(parents=True)
    (folder / "benchmarks").symlink_to(ROOT / "benchmarks")
    (folder / "kvferry").symlink_to(checkout.resolve() / "kvferry")
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: kvferry\nVersion: 0\n")
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())]
    (package / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


class Side:
    """A process that holds one object and does what it is told."""

    def __init__(self, installed: Path, path: str, name: str, *arguments: Any) -> None:
        """Starts it; the object is there when :meth:`wait_until_open` returns.

        Args:
            installed: what :func:`install` returned for the checkout that it uses.
            path: over which NIXL may go.
            name: of a class, a key of ``_MODULES``.
            arguments: for that class.
        """
        self.name = name
        self._pipe, theirs = Pipe()
        descriptor = theirs.fileno()
        variables = {
            "PYTHONPATH": str(installed),
            "UCX_TLS": _UCX_TLS[path],
            "NIXL_LOG_LEVEL": "ERROR",
        }
        code = f"from benchmarks.loads.process import serve; serve({descriptor})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],  # -P: without the current folder on its path
            env=os.environ | variables,
            pass_fds=[descriptor],
            stdout=subprocess.DEVNULL,  # NIXL writes a line per agent
        )
        theirs.close()
        self._pipe.send((name, arguments))

    def wait_until_open(self) -> None:
        """Returns when the object is made. To be called once, before anything else.

        Raises:
            LoadsError: it cannot be made.
        """
        self._answer(_OPEN_S)

    def call(self, method: str, *arguments: Any, timeout_s: float = _CALL_S) -> Any:
        """Calls a method there and returns what it returned.

        Raises:
            LoadsError: it raised something, or the process ended or does not answer.
        """
        with contextlib.suppress(OSError):  # the answer says that it has ended
            self._pipe.send((method, arguments))
        return self._answer(timeout_s)

    def _answer(self, timeout_s: float) -> Any:
        try:
            if not self._pipe.poll(timeout_s):
                raise LoadsError(f"{self.name}: no answer in {timeout_s:.0f} s")
            kind, value = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise LoadsError(f"{self.name}: the process ended") from error
        if kind != "value":
            raise LoadsError(f"{self.name}: {kind}: {value}")
        return value

    def signal(self, number: int) -> None:
        """Suspends or resumes the process."""
        self._process.send_signal(number)

    def close(self) -> None:
        """Asks it to put its memory away, then ends it."""
        if self._process.poll() is None:
            self.signal(signal.SIGCONT)
            with contextlib.suppress(LoadsError):
                self.call("close", timeout_s=_CLOSE_S)
        self._process.kill()
        self._process.wait()
        self._pipe.close()


class Pair:
    """Who lends and who loads."""

    def __init__(self, source: Side, target: Side, *, suspended: bool = False) -> None:
        """``suspended`` says that both stand still between two calls."""
        self._sides = (source, target)
        self._suspended = suspended
        self._signal(signal.SIGSTOP)

    def load(self, tokens: int, count: int, work_rounds: int) -> Loads:
        """``count`` loads of so many tokens, one after the other; every byte is compared."""
        source, target = self._sides
        self._signal(signal.SIGCONT)
        lent = source.call("lend", tokens, count)
        loads: Loads = target.call("load", lent, tokens, work_rounds)
        self._signal(signal.SIGSTOP)
        return loads

    def _signal(self, number: int) -> None:
        if self._suspended:
            for side in self._sides:
                side.signal(number)


def serve(descriptor: int) -> None:
    """A process's life: makes what the first message names, then calls its methods.

    Each message is ``(name, arguments)``, each answer ``("value", value)``, or for what was raised
    ``("wrong bytes" or "error", text)``.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # also while it is suspended
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    pipe = Connection(descriptor)
    side: Any = None
    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if side is None:
                side = getattr(importlib.import_module(_MODULES[name]), name)(*arguments)
                value = None
            else:
                value = getattr(side, name)(*arguments)
        except WrongBytesError as error:
            pipe.send(("wrong bytes", str(error)))
        except Exception:
            pipe.send(("error", traceback.format_exc()))
        else:
            pipe.send(("value", value))
