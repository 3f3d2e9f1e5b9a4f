"""A transport whose reads take long enough for something to happen to them.

Servers find it as any plugin: this folder is on their path, and the metadata beside this file
names the entry point.
"""

from kvferry.testing.faults import Faults, faulty_transport
from kvferry.transports.tcp import TcpTransport

DELAY_S = 2.0

_Slow = faulty_transport(TcpTransport, Faults(delay_s=(DELAY_S, DELAY_S)))


class SlowTcp(_Slow):
    """``tcp`` whose reads start two seconds late."""

    name = "slow_tcp"
