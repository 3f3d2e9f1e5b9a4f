"""What staging costs: reads as the PullConnector makes them over a transport that cannot fence.

The same memory, cases and clock as for our other readers; the read goes through staging memory of
the size that the connector takes, and is placed from there. Processes of their own, because the
transport ``nixl`` looks for progress when it is idle.
"""

import time

import numpy as np

from benchmarks.cases import LAYOUTS, CacheShape, Case, check_target, lowered
from benchmarks.kvferry_side import Offer, writable
from benchmarks.samples import Sample
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.loader import POLL_S
from kvferry.connectors.pull.reads import TargetMemory
from kvferry.connectors.pull.staged_reads import StagedRead
from kvferry.layouts.arrays import HOST, MemorySpan
from kvferry.layouts.host_staging import HostPlacer
from kvferry.layouts.staging import stage
from kvferry.layouts.tiles import Tiles
from kvferry.topology import TransferPlan
from kvferry.transports.registry import open_transport


class StagedSource:
    """Serves the memory of a :class:`~benchmarks.kvferry_side.KvferrySource` over ``nixl``."""

    def __init__(self, offer: Offer) -> None:
        self._segments = offer.attach()
        self._transport = open_transport("nixl")
        for segment in self._segments:
            self._transport.register(np.ctypeslib.as_array(writable(segment.array)))

    def endpoint(self) -> bytes:
        """How to reach it."""
        return self._transport.endpoint()

    def close(self) -> None:
        """Closes the transport."""
        self._transport.close()


class StagedReader:
    """Reads into private memory, through staging."""

    def __init__(self, shape: CacheShape, endpoint: bytes, threads: tuple[int, ...]) -> None:
        self._shape = shape
        self._known = shape.known_cells()
        self._target = np.zeros(shape.region_bytes, dtype=np.uint8)
        self._target[:] = 0
        self._transport = open_transport("nixl")
        self._peer = self._transport.connect(endpoint)
        defaults = PullConfig()
        address = self._target.ctypes.data
        self._memories = {
            count: TargetMemory(
                [MemorySpan(address, self._target.nbytes, HOST)],
                HostPlacer([address]),
                staging_bytes=defaults.staging_bytes,
                stall_timeout_s=defaults.stall_timeout_s,
                threads=count,
            )
            for count in threads
        }
        self._plans: dict[tuple[str, str], tuple[TransferPlan, Tiles]] = {}
        # The connection is made and staging's pages are taken now.
        for count in threads:
            self.measure("", Case(LAYOUTS[0], LAYOUTS[0], shuffled=False, threads=count))

    def measure(self, _contender: str, case: Case) -> Sample:
        """Binds the request's tables to the plan, reads, waits until everything is in place."""
        layouts = (case.source_layout, case.target_layout)
        if layouts not in self._plans:
            self._plans[layouts] = lowered(self._shape, *layouts)
        plan, tiles = self._plans[layouts]
        memory = self._memories[case.threads]
        source_blocks, target_blocks = case.block_tables(self._shape)
        began = time.perf_counter()
        copies = plan.bind(source_blocks, target_blocks, self._shape.tokens)
        chunks = stage(tiles, copies.runs_of(0))
        read = StagedRead(
            self._transport, self._peer, "source", memory, chunks, self._shape.transfer_bytes
        )
        while not read.is_settled:
            self._transport.poll()
            memory.staging.sweep()
            read.advance(time.monotonic())
            time.sleep(POLL_S)
        seconds = time.perf_counter() - began
        if read.error is not None:
            raise RuntimeError(f"staged, {case}: {read.error}")
        return Sample(seconds, segments=read.segments)

    def clear(self) -> None:
        """Zeroes the target."""
        self._target[:] = 0

    def check(self, _contender: str, case: Case) -> None:
        """Checks the target after a transfer.

        Raises:
            WrongDataError: it holds something else than it should.
        """
        check_target(self._shape, case, self._target, self._known)

    def close(self) -> None:
        """Ends the threads and closes the transport."""
        for memory in self._memories.values():
            memory.stop()
            memory.staging.close()
        self._transport.close()
