"""Nodes of a Ray cluster on hosts of a test. Needs the extra ``ray``."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from kvferry.errors import HostError
from kvferry.testing.hosts import Host
from kvferry.zeromq import join_address

HEAD_PORT = 6379
START_TIMEOUT_S = 150.0
"""Seconds within which a node must be up, even on a busy machine."""
TRIES = 3
STORE_BYTES = 80_000_000
"""Number of bytes of Ray's object store, which kvferry does not use: slightly above Ray's
minimum."""


def start_ray(
    host: Host,
    folder: Path,
    *,
    cpus: int,
    head: Host | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Starts a Ray node on a host, and returns the address of the cluster when the node is up.

    The node ends with the host. Ray waits only 30 s for a new node, and a busy machine may need
    longer. The host is then restarted for another try, which ends all other processes on the host.

    Args:
        host: host of the node.
        folder: folder for Ray's files. The path must be short, because Unix sockets in the folder
            have bounded paths.
        cpus: number of CPUs of the node.
        head: host of the head node of the cluster to join; if left out, the node heads a new
            cluster.
        env: further environment variables for Ray and all its children.

    Raises:
        HostError: the node does not start; quotes Ray's output.
    """
    address = join_address((head or host).ipv4, HEAD_PORT)
    as_head = [f"--port={HEAD_PORT}", "--head", "--include-dashboard=false"]
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--disable-usage-stats"),
        *(as_head if head is None else [f"--address={address}"]),
        *(f"--node-ip-address={host.ipv4}", f"--num-cpus={cpus}"),
        *(f"--temp-dir={folder / host.name}", f"--object-store-memory={STORE_BYTES}"),
    ]
    environment = {**os.environ, **(env or {})}
    said = folder / f"{host.name}.log"
    for _ in range(TRIES):
        with said.open("wb") as log:
            process = host.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            if process.wait(START_TIMEOUT_S) == 0:
                return address
        host.kill()
        host.start()
    raise HostError(f"Ray does not start on {host.name}: {said.read_text(errors='replace')}")
