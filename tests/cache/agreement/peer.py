"""A manager that is told to do a workload or a script."""

from benchmarks.peers.process import Peer
from benchmarks.peers.setups import Setup
from tests.cache.agreement.script import Step, play
from tests.cache.agreement.trace import Record
from tests.cache.agreement.workload import Workload, run


class TracedPeer(Peer):
    """Tells what new managers answer."""

    def trace(self, setup: Setup, workload: Workload) -> list[Record]:
        """Does a workload; the trace."""
        return run(self.make(setup), workload)

    def script(self, setup: Setup, steps: list[Step]) -> list[Record]:
        """Does steps; the trace."""
        return play(self.make(setup), steps)
