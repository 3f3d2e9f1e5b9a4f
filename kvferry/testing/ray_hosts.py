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
"""Seconds for a node to be up, however busy the machine is."""
TRIES = 3
STORE_BYTES = 80_000_000
"""Of Ray's object store, which kvferry does not need: the least that Ray allows, and a little."""


def start_ray(
    host: Host,
    folder: Path,
    *,
    cpus: int,
    head: Host | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """Starts a node on a host, and returns the address of its cluster when it is up.

    It ends with its host. What else runs on the host may end: Ray's own patience with a new node is
    30 s, which a busy machine needs, and the host is then restarted for another try.

    Args:
        host: that becomes the node.
        folder: for Ray's files. Its path is short, as those of Unix sockets in it are bounded.
        cpus: how many it has to give.
        head: host of the head node of a cluster to join; unless given, it is the head of a new one.
        env: further environment of Ray and of all that it starts.

    Raises:
        HostError: it does not start; quotes what it says.
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
