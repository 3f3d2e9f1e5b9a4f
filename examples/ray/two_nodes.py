"""Two Ray nodes on hosts of this machine, and ``kvferry demo`` on the nodes: ``make demo-ray``.

The prefill engine has three ranks and the decode engine two. One node has a single CPU and the
other node has four, so that each node has a rank of the decode engine. Further arguments go to the
demo.
"""

import sys
import tempfile
from pathlib import Path

from kvferry.errors import HostError
from kvferry.testing import Network
from kvferry.testing.ray_hosts import start_ray


def main() -> int:
    """The exit code of the demo; 2 if the machine allows no hosts."""
    try:
        with tempfile.TemporaryDirectory(prefix="kr-") as folder, Network.open() as network:
            small, large = network.add_host("small"), network.add_host("large")
            print("starting a Ray node on each of two hosts", flush=True)
            address = start_ray(small, Path(folder), cpus=1)
            start_ray(large, Path(folder), cpus=4, head=small)
            command = [sys.executable, "-m", "kvferry.cli", "demo", "--ray", address]
            return small.run([*command, *sys.argv[1:]]).wait()
    except HostError as error:
        print(f"two_nodes: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
