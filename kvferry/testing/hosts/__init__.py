"""Hosts for tests: several machines, and the links between them, on this one.

    Network       hosts and the links between them; all of it ends with it   network.py
    Host          a machine: addresses, a name, shared memory, processes     network.py
    HostProcess   a process in a host, much like subprocess.Popen            process.py
    Link          what one direction between two hosts does to packets       messages.py

A process of its own, the keeper (``keeper.py``), makes the namespaces and starts the processes. All
packets between hosts pass its relay (``relay.py``), which drops and delays them as a test says.

Works on Linux, as root or where the kernel allows unprivileged user namespaces, with pyroute2.
"""

from kvferry.testing.hosts.messages import Link
from kvferry.testing.hosts.network import Host, Network
from kvferry.testing.hosts.process import HostProcess

__all__ = ["Host", "HostProcess", "Link", "Network"]
