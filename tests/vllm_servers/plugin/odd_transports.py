"""Transports with a fault, for servers in tests.

They are found as any plugin is: this folder is on the servers' path, and the metadata beside this
file names the entry points.
"""

import os
from typing import Any

from kvferry.layouts.tiles import Runs, Tiles
from kvferry.testing.faults import Faults, faulty_transport
from kvferry.transports.base import Peer, Transfer, Waitable
from kvferry.transports.tcp import TcpTransport

DELAY_S = float(os.environ.get("SLOW_TCP_S", "2"))

_Delayed: Any = faulty_transport(TcpTransport, Faults(delay_s=(DELAY_S, DELAY_S)))


class SlowTcp(_Delayed):
    """``tcp`` whose reads start late, so that there is time to interfere."""

    name = "slow_tcp"


class MixedUpTcp(TcpTransport):
    """``tcp`` that reads the blocks of its first read again whatever it is asked for."""

    name = "mixed_up_tcp"
    _first: Runs | None = None

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """As ``tcp``, from the first read's blocks."""
        if self._first is None:
            self._first = runs["source_block"].copy()
        mixed_up = runs.copy()
        common = min(len(runs), len(self._first))
        mixed_up["source_block"][:common] = self._first[:common]
        return super().read(peer, tiles, mixed_up, after=after)
