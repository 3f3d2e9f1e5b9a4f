"""Engines made of the product's own classes: a scheduler process and a process per rank.

Real are the lease table, the service that answers, the client with its connections, the sources,
both halves of the PullConnector with the loads of each rank, plans included, and the aggregator.
Simulated are what they stand on: clock, threads, sockets (:mod:`world`, :mod:`network`), the
transport, whose reads take their time and find in the source's blocks whatever lies there just
then, and the engine around them, which gives out blocks and runs one step after the other.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from types import SimpleNamespace
from typing import Any

from kvferry.config import KVTransferConfig
from kvferry.connectors.aggregator import KVOutputAggregator
from kvferry.connectors.base import ConnectorContext, KVConnectorOutput
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.loads import Loads, RankLoad
from kvferry.connectors.pull.metadata import PullMetadata
from kvferry.connectors.pull.peer import TargetRank
from kvferry.connectors.pull.scheduler import PullScheduler
from kvferry.connectors.pull.sources import Sources
from kvferry.connectors.pull.worker import PullWorker, _Cache
from kvferry.control.client import ControlClient
from kvferry.control.leases import LeaseTable
from kvferry.control.options import ControlOptions
from kvferry.control.server import LOOK_S, ControlService
from kvferry.control.tickets import verify
from kvferry.errors import CancelledError, KVFerryError, PeerLostError, StalledError
from kvferry.layouts.tiles import num_bytes
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.description import (
    EngineDescription,
    ModelFingerprint,
    RankDescription,
    tagged_groups,
)
from kvferry.transports.base import Peer, Transfer, TransferState
from kvferry.transports.staging import StagingNumbers
from tests.control.simulation.network import Internet, Port, SimNetwork
from tests.control.simulation.oracle import Oracle
from tests.control.simulation.world import Process, SimMailbox, World

NUM_BLOCKS = 64
STALL_S = 10.0
"""Seconds without progress after which a read fails."""
KEY = "the key of the simulated cluster"
MODEL = ModelFingerprint(
    name="tiny",
    architecture="Llama",
    num_layers=2,
    num_kv_heads=3,
    head_size=2,
    dtype="float32",
    rope="",
    config_digest="c",
    weights_digest="w",
)


@dataclass(frozen=True)
class Build:
    """The product's classes; a mutation takes the place of one."""

    table: type[LeaseTable] = LeaseTable
    service: type[ControlService] = ControlService
    client: type[ControlClient] = ControlClient
    sources: type[Sources] = Sources
    scheduler: type[PullScheduler] = PullScheduler
    loads: type[Loads] = Loads
    aggregator: type[KVOutputAggregator] = KVOutputAggregator

    @property
    def name(self) -> str:
        """Of the class that is not the product's."""
        made = (getattr(self, one.name) for one in fields(self))
        return " ".join(one.__name__ for one in made if not one.__module__.startswith("kvferry"))


@dataclass(frozen=True)
class Shape:
    """An engine as its user configures it."""

    name: str
    host: str
    """Address of its machine."""
    advertised: str
    """What its tickets name: that address, or a name."""
    block_size: int
    tp: int
    pp: int = 1
    peers: tuple[str, ...] = ()
    lends: bool = False
    """Whether it is a source, or a target."""

    @property
    def address(self) -> str:
        return f"{self.host}:14579"

    @property
    def world_size(self) -> int:
        return self.tp * self.pp

    @functools.cached_property
    def geometry(self) -> EngineGeometry:
        return EngineGeometry(
            num_layers=MODEL.num_layers,
            num_kv_heads=MODEL.num_kv_heads,
            head_size=MODEL.head_size,
            dtype=MODEL.dtype,
            block_size=self.block_size,
            layout="NHD",
            parallel=ParallelShape(tp=self.tp, pp=self.pp),
        )

    @functools.cached_property
    def extra(self) -> PullConfig:
        return PullConfig(host=self.advertised, cluster_key=KEY, peers=self.peers)


class Pool:
    """The blocks of an engine, and what is in them."""

    def __init__(self) -> None:
        self.content = ["nothing"] * NUM_BLOCKS
        """Whose tokens each block holds."""
        self._free = list(range(NUM_BLOCKS - 1, 0, -1))

    @property
    def num_held(self) -> int:
        return NUM_BLOCKS - 1 - len(self._free)

    def take(self, count: int, content: str) -> list[int] | None:
        """Blocks for somebody; ``None`` if there are not so many."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        for block in blocks:
            self.content[block] = content
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Gives them back; the next one to take any takes these."""
        for block in blocks:
            self.content[block] = "nothing"
        self._free.extend(blocks)

    def forget(self, content: str) -> None:
        """The process has died: what is left in memory is of no use."""
        self.content[:] = [content] * NUM_BLOCKS


@dataclass(eq=False)
class Want:
    """One request at one engine, as the connector sees it."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    state: str = "waiting"
    """``waiting``, ``loading``, ``running`` or ``over``."""
    outcome: str = ""
    """What came of its load: ``loaded``, ``computed``, ``aborted``, ``died``, ``refused``."""
    blocks: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def is_aborted(self) -> bool:
        return self.finish_reason == "abort"

    @property
    def finished_cleanly(self) -> bool:
        return not self.is_aborted

    def content_keys(self, num_tokens: int) -> dict[str, str]:
        return {}

    def get_block_ids(self) -> tuple[list[int], ...]:
        return (self.blocks,)


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
        self.process = process
        """Of the reader."""
        self.transfers: list[SimTransfer] = []

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
        if source.is_dead:
            raise PeerLostError(f"nobody is there: {source.incarnation}")
        return SimPeer(source, self._process)

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
        if source.is_dead and self._world.chance(0.5):  # else its memory is read on
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
        self, context: ConnectorContext, rank: int, transport: Any, client: ControlClient
    ) -> None:
        super().__init__(context, rank, {"sim": transport}, client)

    def register(self, target: TargetRank, loads: Loads, tell: Callable[[RankLoad], None]) -> None:
        """In place of ``register_kv_caches``; there is no memory."""
        self._registered = _Cache(target, loads, None, None, None)
        self._tell = tell

    def _report(self, load: RankLoad, output: KVConnectorOutput) -> None:
        self._tell(load)
        super()._report(load, output)


class Rank:
    """One rank of one start, in its own process."""

    def __init__(self, start: "Start", rank: int, context: ConnectorContext) -> None:
        self.rank = rank
        self.start = start
        self.process = start.fork(f"{start.incarnation}.{rank}")
        self.transport = SimTransport(start, self.process)
        client = start.open_client(self.process, None, self._reports)
        self.worker = SimWorker(context, rank, self.transport, client)
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
            target, client, None, clock=self.process.clock, mailbox=mailbox
        )
        self.worker.register(target, self.loads, self._ended)
        self.description = RankDescription(
            rank=rank, endpoints={"sim": start.incarnation.encode()}, memory=memory
        )
        self._begun: set[str] = set()
        self._said = KVConnectorOutput()

    def step(
        self, metadata: PullMetadata, done: Callable[["Rank", KVConnectorOutput], None]
    ) -> None:
        """One step of the engine on this rank."""
        for spec in metadata.loads:
            is_new = spec.ticket.lease_id not in self._begun
            self.start.oracle.require(is_new, "a rank reads a lease once", spec.request_id)
            self._begun.add(spec.ticket.lease_id)
        self.worker.start_load_kv(metadata)
        output = self.worker.get_transfer_results(set())
        if self.start.world.chance(self.start.cluster.stutter):  # it says again what it said
            output.finished_recving |= self._said.finished_recving
            output.failed_recving |= self._said.failed_recving
        self._said = output
        done(self, output)

    def _reports(self, lease_id: str) -> None:
        load = self.loads._loads.get(lease_id)
        self.start.oracle.reports(self.start.target, self.rank, lease_id, load)

    def _ended(self, load: RankLoad) -> None:
        ok = load.error is None
        name = self.start.oracle.name(load.spec.ticket.lease_id)
        why = "" if load.error is None else f": {self.start.oracle.plain(load.error)}"
        self.start.world.note(f"{self.process.name}: the load of {name} has ended{why}")
        if ok:
            self.start.oracle.confirmed(self.start.target, self.rank, load)


@dataclass
class Cluster:
    """What all engines of one world share."""

    world: World
    internet: Internet
    oracle: Oracle
    build: Build
    options: ControlOptions
    starts: dict[str, "Start"] = field(default_factory=dict)
    """By incarnation."""
    world_sizes: dict[str, int] = field(default_factory=dict)
    """Ranks by engine id."""
    slow_reads: float = 0.0
    """How many pieces of reads take long, of all."""
    lateness: float = 0.0
    """How often a thread gets to run late, of all times."""
    stutter: float = 0.0
    """How often a rank repeats its report."""


@functools.cache
def watching_table(table: type[LeaseTable]) -> type[LeaseTable]:
    """The same table, which says what it sweeps."""

    class Watching(table):  # type: ignore[valid-type, misc]
        told: Callable[[Any], None]

        def sweep(self) -> list[Any]:
            swept: list[Any] = super().sweep()
            for ended in swept:
                self.told(ended)
            return swept

    return Watching


@functools.cache
def watching_client(client: type[ControlClient]) -> type[ControlClient]:
    """The same client, which says what it reports and gives up."""

    class Watching(client):  # type: ignore[valid-type, misc]
        reports: Callable[[str], None]
        gives_up: Callable[[str], None]

        def finish(self, address: str, start: str, lease_id: str, *said: Any, **more: Any) -> Any:
            self.reports(lease_id)
            return super().finish(address, start, lease_id, *said, **more)

        def release(self, address: str, start: str, leases: Any, **more: Any) -> Any:
            for lease_id in leases:
                self.gives_up(lease_id)
            return super().release(address, start, leases, **more)

    return Watching


@functools.cache
def listening(service: type[ControlService]) -> type[ControlService]:
    """The same service as the scheduler half owns it."""

    class Listening(service):  # type: ignore[valid-type, misc]
        port = 14579

        def close(self) -> None:
            pass

    return Listening


class Start:
    """One start of one engine."""

    def __init__(self, cluster: Cluster, shape: Shape, number: int) -> None:
        self.cluster, self.shape = cluster, shape
        self.world, self.internet, self.oracle = cluster.world, cluster.internet, cluster.oracle
        self.build = cluster.build
        self.incarnation = f"{shape.name}.{number}"
        self.target = (shape.name, self.incarnation)
        self.is_dead = False
        self.pool = Pool()
        self.wants: dict[str, Want] = {}
        self.lent: dict[str, str] = {}
        """Request id → the lease on its blocks."""
        cluster.starts[self.incarnation] = self
        cluster.world_sizes[shape.name] = shape.world_size
        config = KVTransferConfig(
            kv_connector="PullConnector",
            kv_role="kv_producer" if shape.lends else "kv_consumer",
            engine_id=shape.name,
        )
        context = ConnectorContext(
            config=config,
            extra=shape.extra,
            incarnation=self.incarnation,
            groups=(shape.geometry,),
            model=MODEL,
            num_blocks=NUM_BLOCKS,
            world_size=shape.world_size,
        )
        self.process = self.fork(self.incarnation)
        self.ranks = [Rank(self, rank, context) for rank in range(shape.world_size)]
        self._open_scheduler(context)
        self.aggregator = self.build.aggregator(shape.world_size)
        self._outputs: dict[int, KVConnectorOutput] = {}
        self._reported: dict[str, set[int]] = {}
        """Request id → the ranks that have reported its load."""
        self._step_number = 0
        """The step planned last is the one that takes place."""
        self._in_step = False
        self.description = EngineDescription(
            engine_id=shape.name,
            incarnation=self.incarnation,
            model=MODEL,
            groups=tagged_groups([shape.geometry]),
            ranks=tuple(rank.description for rank in self.ranks),
        )
        self.server.set_description(self.description)
        self.sources.describe(self.description)
        self.world.note(f"{self.incarnation} has started")
        self._plan_step(0.0)

    def _open_scheduler(self, context: ConnectorContext) -> None:
        clock, extra, options = self.process.clock, self.shape.extra, self.cluster.options
        self.table = watching_table(self.build.table).from_options(options, NUM_BLOCKS, clock)
        table: Any = self.table
        table.told = lambda ended: self.oracle.swept(ended, self.cluster.world_sizes)
        server: Any = listening(self.build.service)(
            engine_id=self.shape.name,
            incarnation=self.incarnation,
            role=context.config.kv_role,
            leases=self.table,
            options=options,
            clock=clock,
        )
        self.server = server
        self.port = Port(self.process, server, partial(self.oracle.answered, self))
        self.internet.ports[self.shape.address] = self.port
        if self.shape.lends:
            self._server_mailbox = SimMailbox(self.process, "control", self._look_at_leases).start()
        client = self.open_client(self.process, server.peers, lambda lease_id: None)
        self.sources = self.build.sources(
            client,
            groups=context.groups,
            addresses=extra.peers,
            renew_interval=lambda ticket: ticket.lease_duration_s / options.renewals_per_lease,
            handshake_timeout_s=extra.handshake_timeout_s,
            progress_timeout_s=extra.progress_timeout_s,
            note_error=server.note_error,
            clock=clock,
            mailbox=partial(SimMailbox, self.process),
        )
        self.scheduler = self.build.scheduler(
            context, extra, extra.key(), self.table, server, client, self.sources, clock
        )

    def _look_at_leases(self) -> float:
        """As the product's server does, which looks at its ROUTER socket."""
        awake_s, peers = self._server_mailbox.awake_s, self.server.peers
        self.table.expire(
            awake_s=awake_s,
            lives=lambda target: self.internet.lives(peers.connection(*target)),
        )
        return LOOK_S

    def open_client(
        self, process: Process, peers: Any, reports: Callable[[str], None]
    ) -> ControlClient:
        """A client of one of the processes."""
        client: Any = watching_client(self.build.client)(
            engine_id=self.shape.name,
            incarnation=self.incarnation,
            options=self.cluster.options,
            peers=peers,
            network=SimNetwork(self.internet, process),
            clock=process.clock,
            mailbox=partial(SimMailbox, process),
        )
        client.reports = reports
        client.gives_up = lambda lease_id: self.oracle.leases[lease_id].given_up.add(self.target)
        made: ControlClient = client
        return made

    def fork(self, name: str) -> Process:
        """A process of this engine."""
        cluster = self.cluster
        return Process(cluster.world, name, self.shape.host, lambda: cluster.lateness)

    @property
    def processes(self) -> list[Process]:
        return [self.process, *(rank.process for rank in self.ranks)]

    def die(self) -> None:
        """All its processes are gone, and so is what was in its blocks."""
        self.is_dead = True
        self.world.note(f"{self.incarnation} dies")
        for process in self.processes:
            process.is_dead = True
        if self.internet.ports.get(self.shape.address) is self.port:
            del self.internet.ports[self.shape.address]
        self.pool.forget(f"left by {self.incarnation}")
        for lease_id in self.lent.values():
            self.oracle.freed(lease_id)
        self.lent.clear()
        for want in self.wants.values():
            want.outcome = want.outcome or "died"

    # ---- as a source --------------------------------------------------------------------------

    def prefill(self, request_id: str, prompt: tuple[int, ...]) -> Any:
        """Computes a prompt and lends its blocks; the transfer parameters, ``None`` for none."""
        blocks = self.pool.take(
            -(-len(prompt) // self.shape.block_size),
            f"{self.shape.name}/{self.incarnation}/{request_id}",
        )
        if blocks is None:
            return None
        want = Want(request_id, prompt, {"do_remote_decode": True}, len(prompt), "length")
        want.blocks = blocks
        keeps, params = self.scheduler.request_finished(want, (blocks,))  # type: ignore[arg-type]
        if not keeps or params is None:
            self.pool.free(blocks)
            return None
        ticket = verify(params["ticket"], KEY.encode())
        self.oracle.lent(ticket)
        self.lent[request_id] = ticket.lease_id
        self.wants[request_id] = want
        want.outcome = "lent"
        return params

    def take_back(self, params: dict[str, Any]) -> None:
        """The router will not have it fetched."""
        lease_id = verify(params["ticket"], KEY.encode()).lease_id
        self.oracle.leases[lease_id].is_taken_back = True
        self.scheduler.take_back(params)

    def _free_lent(self, request_id: str) -> None:
        if request_id in self.lent:
            self.oracle.freed(self.lent.pop(request_id))
            self.pool.free(self.wants.pop(request_id).blocks)
        else:
            self.world.broken("a block is freed once", f"{self.incarnation} lends no {request_id}")

    # ---- as a target --------------------------------------------------------------------------

    def decode(self, want: Want) -> None:
        """A request to be loaded, and then computed."""
        self.oracle.wants.append(want)
        try:
            self.scheduler.on_new_request(want)  # type: ignore[arg-type]
        except KVFerryError as error:
            self.world.note(
                f"{self.incarnation} refuses {want.request_id}: {self.oracle.plain(error)}"
            )
            want.outcome = want.state = "refused"
            return
        self.world.note(f"{self.incarnation} is given {want.request_id}")
        self.wants[want.request_id] = want
        if not self._in_step:
            self._plan_step(0.0)

    def abort(self, want: Want) -> None:
        """Whoever asked has gone away."""
        if want.state in ("running", "over") or want.is_aborted or self.is_dead:
            return
        self.world.note(f"{self.incarnation}: {want.request_id} is aborted")
        want.finish_reason = "abort"
        if not self.scheduler.request_finished(want, (want.blocks,))[0]:  # type: ignore[arg-type]
            self._end(want, "aborted")

    def check_target(self, transfer: SimTransfer) -> None:
        """Bytes land: in blocks that nobody has got since they were to land there."""
        contents = {self.pool.content[block] for block in transfer.target_blocks}
        self.oracle.require(
            len(contents) == 1 and "nothing" not in contents,
            "no read lands in a block that was freed",
            f"{self.incarnation}: bytes land in blocks of {sorted(contents)}",
        )

    def _admit(self, want: Want) -> None:
        try:
            count, _ = self.scheduler.get_num_new_matched_tokens(want, 0)  # type: ignore[arg-type]
        except KVFerryError as error:
            self.world.note(f"{want.request_id} is computed: {self.oracle.plain(error)}")
            count, want.outcome = 0, "computed"
        if count is None:
            return
        name = f"{self.incarnation}/{want.request_id}"
        blocks = self.pool.take(-(-want.num_tokens // self.shape.block_size), name)
        if blocks is None:
            return
        want.blocks = blocks
        self.scheduler.update_state_after_alloc(want, want, count)  # type: ignore[arg-type]
        if count:
            want.state = "loading"
        else:
            self._compute(want)

    def _compute(self, want: Want) -> None:
        want.state = "running"
        self.process.run(self.world.between(0.02, 0.5), partial(self._computed, want))

    def _computed(self, want: Want) -> None:
        want.finish_reason = "length"
        self.scheduler.request_finished(want, (want.blocks,))  # type: ignore[arg-type]
        self._end(want, want.outcome)

    def _end(self, want: Want, outcome: str) -> None:
        want.state, want.outcome = "over", outcome
        if want.blocks:
            law, ids = "no read lands in a block that was freed", set(want.blocks)
            for rank in self.ranks:
                for transfer in rank.transport.running:
                    clear = transfer.is_terminal or ids.isdisjoint(transfer.target_blocks)
                    where = f"{rank.process.name} still reads into blocks of {want.request_id}"
                    self.oracle.require(clear, law, where)
            self.pool.free(want.blocks)
        del self.wants[want.request_id]

    # ---- step by step -------------------------------------------------------------------------

    def _plan_step(self, seconds: float) -> None:
        self._step_number += 1
        self.process.run(seconds, partial(self._step, self._step_number))

    def _step(self, number: int) -> None:
        if number != self._step_number:
            return
        for want in list(self.wants.values()):
            if want.state == "waiting" and want.outcome != "lent" and not want.is_aborted:
                self._admit(want)
        if not (self.scheduler.has_pending_work() or self.scheduler.has_news()):
            is_idle = all(want.outcome == "lent" for want in self.wants.values())
            self._plan_step(2.0 if is_idle else 0.05)
            return
        self._in_step = True
        metadata = self.scheduler.build_connector_meta(None)  # type: ignore[arg-type]
        self._outputs = {}
        for rank in self.ranks:
            rank.process.run(0.0002, partial(rank.step, metadata, self._rank_stepped))

    def _rank_stepped(self, rank: Rank, output: KVConnectorOutput) -> None:
        self.process.run(0.0002, partial(self._collect, rank.rank, output))

    def _collect(self, rank: int, output: KVConnectorOutput) -> None:
        self._outputs[rank] = output
        for request_id in output.finished_recving:
            self._reported.setdefault(request_id, set()).add(rank)
        if len(self._outputs) < len(self.ranks):
            return
        joined = self.aggregator.join([self._outputs[rank.rank] for rank in self.ranks])
        self.scheduler.update_connector_output(joined)
        for request_id in sorted(joined.finished_sending):
            self._free_lent(request_id)
        for request_id in sorted(joined.finished_recving):
            self._loaded(request_id, ok=request_id not in joined.failed_recving)
        self._in_step = False
        self._plan_step(self.world.between(0.005, 0.1))

    def _loaded(self, request_id: str, *, ok: bool) -> None:
        want = self.wants.get(request_id)
        missing = {rank.rank for rank in self.ranks} - self._reported.get(request_id, set())
        self.oracle.require(
            want is not None and want.state == "loading" and not missing,
            "one report per rank",
            f"{request_id} has ended at {self.incarnation}, no report of {sorted(missing)}",
        )
        if want is None:
            return
        if want.is_aborted:
            self._end(want, "aborted")
        else:
            want.outcome = "loaded" if ok else "computed"
            self._compute(want)
