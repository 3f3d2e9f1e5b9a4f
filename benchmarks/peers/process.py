"""A manager in a process of an environment that has it."""

import functools
import sys
from pathlib import Path

from benchmarks.peers.peer import CachePeer
from benchmarks.peers.setups import Setup
from benchmarks.peers.speed import Busy, Load, bytes_per_block
from benchmarks.remote import ROOT, Remote, RemoteError

PYTHONS = {
    "kvferry": Path(sys.executable),
    "vllm": ROOT / ".venv-vllm" / "bin" / "python",
}
"""Peer → the interpreter whose environment has what the peer imports."""
_ENVIRONMENT = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}


def start_peer(name: str, make: "type[Peer] | None" = None) -> Remote:
    """A process with a :class:`Peer`, or with an object of a class derived from it.

    Raises:
        RemoteError: its environment is not there.
    """
    python = PYTHONS[name]
    if not python.exists():
        raise RemoteError(
            f"{python.relative_to(ROOT)} is not there; `make test-rest` and `make bench` set it up"
        )
    return Remote(name, make or Peer, name, env=_ENVIRONMENT, python=python)


def make_peer(name: str, setup: Setup) -> CachePeer:
    """A manager; heavy modules are imported here."""
    if name == "vllm":
        from benchmarks.peers.vllm_peer import VllmPeer

        return VllmPeer(setup)
    from benchmarks.peers.kvferry_peer import KvferryPeer

    return KvferryPeer(setup)


class Peer:
    """Makes managers of one kind, and has them work."""

    def __init__(self, name: str) -> None:
        self.make = functools.partial(make_peer, name)
        self._busy: dict[str, Busy] = {}

    def busy(self, name: str, setup: Setup, load: Load) -> None:
        """Makes a manager busy, for :meth:`round`."""
        self._busy[name] = Busy(self.make(setup), load)

    def round(self, name: str) -> dict[str, float]:
        """See :meth:`~benchmarks.peers.speed.Busy.round`."""
        return self._busy[name].round()

    def memory(self) -> dict[str, float]:
        """See :func:`~benchmarks.peers.speed.bytes_per_block`."""
        return bytes_per_block(self.make)
