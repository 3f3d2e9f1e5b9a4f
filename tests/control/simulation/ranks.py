"""Ranks, each in its own process, and the transport whose reads take as long as the dice say."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvferry.connectors.base import ConnectorContext, KVConnectorOutput
from kvferry.connectors.pull.loads import Loads, RankLoad
from kvferry.connectors.pull.metadata import PullMetadata, ids_of
from kvferry.connectors.pull.peer import TargetRank
from kvferry.connectors.pull.worker import PullWorker, RegisteredCache
from kvferry.control.client import ControlClient
from kvferry.errors import CancelledError, PeerLostError, StalledError, TransferError
from kvferry.layouts.tiles import num_bytes
from kvferry.topology.description import (
    RankDescription,
)
from kvferry.transports.base import Peer, Transfer, TransferState
from kvferry.transports.staging import StagingNumbers
from tests.control.simulation.shapes import NUM_BLOCKS, Part
from tests.control.simulation.world import Process, SimMailbox, World

if TYPE_CHECKING:
    from tests.control.simulation.engines import Start

STALL_S = 10.0
"""Seconds without progress after which a read fails."""


class SimTransfer(Transfer):
    """One read, and what it found."""

    def __init__(self, nbytes: int, source: list[int], target: list[int], world: World) -> None:
        super().__init__(nbytes)
        self.source_blocks = source
        self.target_blocks = target
        self.found: set[str] = set()
        self.ended_in = 0
        """Step in which it became terminal."""
        self._world = world

    def ended(self, state: TransferState) -> None:
        self.ended_in = self._world.step


class SimPeer(Peer):
    """A connection to a rank of one start of a source."""

    def __init__(self, source: "Start", process: Process) -> None:
        self.source = source
        self.incarnation = source.incarnation
        """Of the source when the connection was made."""
        self.process = process
        """Of the reader."""
        self.transfers: list[SimTransfer] = []

    @property
    def is_lost(self) -> bool:
        """Whether the source has died, or has let its caches go."""
        return self.source.is_dead or self.source.incarnation != self.incarnation

    def close(self) -> None:
        for transfer in self.transfers:
            if not transfer.is_terminal:
                lost = partial(transfer.fail, PeerLostError("the connection was closed"))
                self.process.run(0.0, lost)


class SimTransport:
    """Reads as long as the dice say, in one to three pieces."""

    name = "sim"
    fences = True
    least_segment_bytes = 0

    def __init__(self, start: "Start", process: Process) -> None:
        self._start = start
        self._process = process
        self._world = start.world
        self.running: list[SimTransfer] = []

    def connect(self, endpoint: bytes) -> SimPeer:
        source = self._start.cluster.starts[endpoint.decode()]
        if source.is_dead or source.incarnation != endpoint.decode():
            raise PeerLostError(f"nobody is there: {source.incarnation}")
        return SimPeer(source, self._process)

    def prepare(self, peer: SimPeer, tiles: Any, most_tokens: int) -> None:
        pass

    def poll(self) -> list[Transfer]:
        self.running = [transfer for transfer in self.running if not transfer.is_terminal]
        return []

    def read(self, peer: SimPeer, tiles: Any, runs: Any, *, after: object = None) -> SimTransfer:
        self.poll()
        transfer = SimTransfer(
            num_bytes(tiles, runs),
            runs["source_block"].tolist(),
            runs["target_block"].tolist(),
            self._world,
        )
        peer.transfers = [one for one in peer.transfers if not one.is_terminal]
        peer.transfers.append(transfer)
        self.running.append(transfer)
        self._go_on(peer, transfer, self._world.dice.randint(1, 3), 0.0)
        return transfer

    def cancel(self, transfer: SimTransfer) -> None:
        cancelled = CancelledError("the read was cancelled")
        stop = partial(transfer.stop, TransferState.CANCELLED, cancelled)
        self._process.run(self._world.between(0.0005, 1.0), stop)

    def _go_on(self, peer: SimPeer, transfer: SimTransfer, pieces: int, stood: float) -> None:
        seconds = self._world.between(0.0002, 0.05)
        if self._world.chance(self._start.cluster.slow_reads):
            seconds = self._world.between(0.1, 9.0)
        self._world.after(seconds, partial(self._land, peer, transfer, pieces, stood))

    def _land(self, peer: SimPeer, transfer: SimTransfer, pieces: int, stood: float) -> None:
        """A piece arrives, whether or not the process runs; it takes note when it does."""
        if transfer.stopped or self._process.is_dead:
            return
        source = peer.source
        cut = self._start.internet.cut_until(source.shape.host, self._start.shape.host)
        if peer.is_lost and self._world.chance(0.5):  # else its memory is read on
            self._process.run(0.0, partial(transfer.fail, PeerLostError("the source has died")))
        elif cut > self._world.now:
            if stood > STALL_S:
                stalled = StalledError("no progress")
                self._process.run(0.0, partial(transfer.fail, stalled))
            else:
                again = partial(self._land, peer, transfer, pieces, stood + 1.0)
                self._world.after(1.0, again)
        else:
            transfer.found.update(source.pool.content[block] for block in transfer.source_blocks)
            self._start.check_target(transfer)
            self._process.run(0.0, partial(self._landed, peer, transfer, pieces))

    def _landed(self, peer: SimPeer, transfer: SimTransfer, pieces: int) -> None:
        left = transfer.nbytes - transfer.bytes_done
        if transfer.enter():
            transfer.leave(left if pieces == 1 else left // pieces, 1)
        if pieces > 1:
            self._go_on(peer, transfer, pieces - 1, 0.0)


class SimWorker(PullWorker):
    """The product's worker half over the simulated transport."""

    def __init__(
        self,
        context: ConnectorContext,
        rank: int,
        transport: Any,
        client: ControlClient,
        output: KVConnectorOutput | None,
    ) -> None:
        super().__init__(context, rank, {"sim": transport}, client, output)

    def register(self, target: TargetRank, loads: Loads, tell: Callable[[RankLoad], None]) -> None:
        """In place of ``register_kv_caches``; there is no memory."""
        self._registered = RegisteredCache(target, loads, None, (), None)
        self._tell = tell

    def _report(self, load: RankLoad, output: KVConnectorOutput) -> None:
        self._tell(load)
        super()._report(load, output)


class Rank:
    """One rank of one start, in its own process."""

    def __init__(
        self,
        start: "Start",
        rank: int,
        context: ConnectorContext,
        output: KVConnectorOutput | None = None,
    ) -> None:
        self.rank = rank
        self.start = start
        self.process = start.fork(f"{context.incarnation}.{rank}")
        self.transport = SimTransport(start, self.process)
        self.client = start.open_client(
            self.process, None, self._reports, incarnation=context.incarnation
        )
        self.worker = SimWorker(context, rank, self.transport, self.client, output)
        staging: Any = SimpleNamespace(
            device="cpu", stall_timeout_s=STALL_S, numbers=StagingNumbers()
        )
        transports: Any = {"sim": self.transport}
        memory = (start.shape.geometry.memory(rank, NUM_BLOCKS, region_per_tensor=True),)
        target = TargetRank(
            start.shape.name, rank, context.groups, memory, staging, transports, transports
        )
        # The ranks of a source load nothing, so the thread of their loads never runs.
        runs = self.process if start.shape.lends is False else start.fork("nobody")
        runs.is_dead = start.shape.lends
        mailbox = partial(SimMailbox, runs)
        self.loads = start.build.loads(
            target, self.client, None, clock=self.process.clock, mailbox=mailbox
        )
        self.worker.register(target, self.loads, self._ended)
        self.description = RankDescription(
            rank=rank, endpoints={"sim": context.incarnation.encode()}, memory=memory
        )
        self._begun: set[str] = set()
        self._said = KVConnectorOutput()

    def close(self) -> KVConnectorOutput:
        """Lets the caches go, as the product's worker does; what is to be reported later."""
        self.loads.close()
        self.client.close()
        for transfer in self.transport.running:
            if not transfer.is_terminal:
                transfer.fail(TransferError("the transport was closed"))
        self.loads.end()
        self.process.is_dead = True
        return self.worker.get_transfer_results(set())

    def step(
        self,
        metadata: PullMetadata,
        parts: Sequence[Part],
        done: Callable[["Rank", KVConnectorOutput], None],
    ) -> None:
        """One step of the engine on this rank, which computes these parts of prompts."""
        for spec in metadata.loads:
            is_new = spec.ticket.lease_id not in self._begun
            self.start.oracle.require(is_new, "a rank reads a lease once", spec.request_id)
            self._begun.add(spec.ticket.lease_id)
        self.worker.start_load_kv(metadata)
        if parts:
            seconds = self.start.world.between(0.002, self.start.cluster.slowest_chunk)
            self.process.run(seconds, partial(self._computed, parts, done))
        else:
            self._computed(parts, done)

    def _computed(
        self, parts: Sequence[Part], done: Callable[["Rank", KVConnectorOutput], None]
    ) -> None:
        for part in parts:
            self.start.wrote(self.rank, part)
        output = self.worker.get_transfer_results(set())
        if self.start.world.chance(self.start.cluster.stutter):  # it says again what it said
            output.finished_recving |= self._said.finished_recving
            output.failed_recving |= self._said.failed_recving
        self._said = output
        done(self, output)

    def _reports(self, lease_id: str) -> None:
        load = self.loads._loads.get(lease_id)
        filled = (
            set()
            if load is None
            else set().union(*(ids_of(table).tolist() for table in load.spec.target_tables))
        )
        reads = [one for one in self.transport.running if not one.is_terminal]
        self.start.oracle.reports(
            self.start.target,
            self.rank,
            lease_id,
            is_reading=any(filled & set(one.target_blocks) for one in reads),
        )

    def _ended(self, load: RankLoad) -> None:
        ok = load.error is None
        name = self.start.oracle.name(load.spec.ticket.lease_id)
        why = "" if load.error is None else f": {self.start.oracle.plain(load.error)}"
        self.start.world.note(f"{self.process.name}: the load of {name} has ended{why}")
        if ok:
            self.start.oracle.confirmed(self.start.target, self.rank, load)
