"""Our transport ``nixl`` beside a READ of NIXL's own: placed, and through staging.

The same memory, cases and clock as for our other readers. A placed read goes straight into the
cache; a staged one goes through staging memory of the size that the connector takes. Processes of
their own, because the transport ``nixl`` looks for progress when it is idle.
"""

import threading
import time

import numpy as np

from benchmarks.cases import LAYOUTS, CacheShape, Case, check_target, lowered
from benchmarks.kvferry_side import Offer, writable
from benchmarks.samples import Sample
from kvferry.connectors.pull.config import PullConfig
from kvferry.layouts.arrays import HOST, MemorySpan
from kvferry.layouts.tiles import Tiles
from kvferry.topology import TransferPlan
from kvferry.transports.registry import open_transport
from kvferry.transports.staged import StagedTransport, Staging


class NixlWaysSource:
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


class NixlWaysReader:
    """Reads into private memory, straight or through staging."""

    def __init__(self, shape: CacheShape, endpoint: bytes, threads: tuple[int, ...]) -> None:
        self._shape = shape
        self._known = shape.known_cells()
        self._target = np.zeros(shape.region_bytes, dtype=np.uint8)
        self._target[:] = 0
        self._transport = open_transport("nixl")
        self._transport.register(self._target, serve=False)
        self._peer = self._transport.connect(endpoint)
        defaults = PullConfig()
        span = MemorySpan(self._target.ctypes.data, self._target.nbytes, HOST)
        self._stagings = {
            count: Staging(
                [span],
                nbytes=defaults.staging_bytes,
                stall_timeout_s=defaults.stall_timeout_s,
                threads=count,
            )
            for count in threads
        }
        self._staged = {
            count: StagedTransport(self._transport, staging)
            for count, staging in self._stagings.items()
        }
        self._plans: dict[tuple[str, str], tuple[TransferPlan, Tiles]] = {}
        # The connection is made, and memory is registered and taken, now.
        for count in threads:
            case = Case(LAYOUTS[0], LAYOUTS[0], shuffled=False, threads=count)
            for way in ("placed", "staged"):
                self.measure(way, case)

    def measure(self, contender: str, case: Case) -> Sample:
        """Binds the request's tables to the plan, reads, waits until everything is in place."""
        layouts = (case.source_layout, case.target_layout)
        if layouts not in self._plans:
            self._plans[layouts] = lowered(self._shape, *layouts)
        plan, tiles = self._plans[layouts]
        source_blocks, target_blocks = case.block_tables(self._shape)
        transport = self._transport if "placed" in contender else self._staged[case.threads]
        over = threading.Event()
        began = time.perf_counter()
        copies = plan.bind(source_blocks, target_blocks, self._shape.tokens)
        read = transport.read(self._peer, tiles, copies.runs_of(0))
        read.on_end(lambda _: over.set())
        over.wait()
        seconds = time.perf_counter() - began
        if read.error is not None:
            raise RuntimeError(f"{contender}, {case}: {read.error}")
        transport.poll()
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
        for staged in self._staged.values():
            staged.close()
        self._transport.close()
        for staging in self._stagings.values():
            staging.close()
