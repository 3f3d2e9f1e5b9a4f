"""Hosts for tests: several machines and their links, simulated on this machine.

    Network       hosts and their links; closing the network ends them all   network.py
    Host          a machine: addresses, a name, shared memory, processes     network.py
    HostProcess   a process in a host, much like subprocess.Popen            process.py
    Link          effects of one direction between two hosts on packets      messages.py

A separate process, the keeper (``keeper.py``), makes the namespaces and starts the processes. All
packets between hosts pass the keeper's relay (``relay.py``), which drops and delays them on a
test's request.

Works on Linux with pyroute2, as root or if the kernel allows unprivileged user namespaces.
"""

from kvferry.testing.hosts.messages import Link
from kvferry.testing.hosts.network import Host, Network
from kvferry.testing.hosts.process import HostProcess

__all__ = ["Host", "HostProcess", "Link", "Network"]
