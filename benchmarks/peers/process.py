"""A manager in a process of another environment, told what to do by JSON lines over pipes.

``python -m benchmarks.peers.process vllm`` reads one JSON object a line and answers each with one.
"""

import contextlib
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.peers.peer import CachePeer
from benchmarks.peers.script import Step, play
from benchmarks.peers.setups import Setup
from benchmarks.peers.speed import Busy, Load, bytes_per_block
from benchmarks.peers.trace import Record
from benchmarks.peers.workload import Workload, run
from kvferry.lifetimes import Closing

ROOT = Path(__file__).parents[2]
PYTHONS = {
    "kvferry": Path(sys.executable),
    "vllm": ROOT / ".venv-vllm" / "bin" / "python",
}
"""Whose environment has what the peer imports."""
_ANSWER_S = 300.0
"""Seconds after which a process that does not answer is killed."""


class TraceOrder(msgspec.Struct, frozen=True, tag="trace"):
    """Do a workload to a new manager and give the trace."""

    setup: Setup
    workload: Workload


class ScriptOrder(msgspec.Struct, frozen=True, tag="script"):
    """Do steps to a new manager and give the trace."""

    setup: Setup
    steps: list[Step]


class BusyOrder(msgspec.Struct, frozen=True, tag="busy"):
    """Make a manager busy; nothing is answered but ``null``."""

    name: str
    """For the rounds."""
    setup: Setup
    load: Load


class RoundOrder(msgspec.Struct, frozen=True, tag="round"):
    """Time one round of a busy manager; see :meth:`~benchmarks.peers.speed.Busy.round`."""

    name: str


class MemoryOrder(msgspec.Struct, frozen=True, tag="memory"):
    """See :func:`~benchmarks.peers.speed.bytes_per_block`."""


Order = TraceOrder | ScriptOrder | BusyOrder | RoundOrder | MemoryOrder


class PeerError(Exception):
    """The process could not be started, failed, or does not answer; the message says why."""


def make_peer(name: str, setup: Setup) -> CachePeer:
    """A manager; heavy modules are imported here."""
    if name == "vllm":
        from benchmarks.peers.vllm_peer import VllmPeer

        return VllmPeer(setup)
    from benchmarks.peers.kvferry_peer import KvferryPeer

    return KvferryPeer(setup)


class PeerProcess(Closing):
    """A process of a peer. A context manager."""

    def __init__(self, name: str) -> None:
        """Starts it.

        Raises:
            PeerError: its environment is not there.
        """
        python = PYTHONS[name]
        if not python.exists():
            raise PeerError(
                f"{python.relative_to(ROOT)} is not there; `make test-rest` and `make bench` "
                "set it up"
            )
        self._name = name
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.peers.process", name],
            cwd=ROOT,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def trace(self, order: TraceOrder | ScriptOrder) -> list[Record]:
        """What the manager answers to a workload or to a script.

        Raises:
            PeerError: it failed.
        """
        return msgspec.convert(self.ask(order), list[Record])

    def ask(self, order: Order) -> Any:
        """Has an order done; the answer, of plain objects.

        Raises:
            PeerError: it failed.
        """
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        killer = threading.Timer(_ANSWER_S, self._process.kill)
        killer.start()
        try:
            stdin.write(msgspec.json.encode(order) + b"\n")
            stdin.flush()
            line = stdout.readline()
        except OSError as error:
            raise PeerError(f"{self._name}: has ended ({error})") from error
        finally:
            killer.cancel()
        if not line:
            raise PeerError(f"{self._name}: ended without an answer; see what it wrote to stderr")
        return msgspec.json.decode(line)

    def close(self) -> None:
        """Kills it. Idempotent."""
        self._process.kill()  # it has nothing to put away
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # an order that it did not read
                pipe.close()


class Server:
    """Does orders, one after the other."""

    def __init__(self, name: str) -> None:
        self._make = functools.partial(make_peer, name)
        self._busy: dict[str, Busy] = {}

    def do(self, order: Order) -> Any:
        """What the order says; the answer."""
        match order:
            case TraceOrder(setup, workload):
                return run(self._make(setup), workload)
            case ScriptOrder(setup, steps):
                return play(self._make(setup), steps)
            case BusyOrder(name, setup, load):
                self._busy[name] = Busy(self._make(setup), load)
                return None
            case RoundOrder(name):
                return self._busy[name].round()
            case MemoryOrder():
                return bytes_per_block(self._make)


def serve(name: str) -> None:
    """Does what stdin says until it ends. Whatever else is printed goes to stderr."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    server = Server(name)
    for line in sys.stdin.buffer:
        answer = server.do(msgspec.json.decode(line, type=Order))
        answers.write(msgspec.json.encode(answer) + b"\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1])
