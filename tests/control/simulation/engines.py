"""Engines made of the product's own classes: a scheduler process and a process per rank.

Real are the lease table, the service that answers, the client with its connections, the sources,
both halves of the PullConnector with the loads of each rank, plans included, and the aggregator.
Simulated are what they stand on: clock, threads, sockets (:mod:`world`, :mod:`network`), the
transport, whose reads take their time and find in the source's blocks whatever lies there just
then, and the engine around them, which gives out blocks and runs one step after the other.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import msgspec

from kvferry.config import KVTransferConfig
from kvferry.connectors.base import ConnectorContext, KVConnectorOutput, SchedulerOutputView
from kvferry.connectors.pull.sources import Sources
from kvferry.connectors.pull.tickets import AcceptedTickets
from kvferry.control import messages
from kvferry.control.client import ControlClient
from kvferry.control.give_backs import WORD
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import Asked
from kvferry.control.options import ControlOptions
from kvferry.control.server import LOOK_S, ControlService
from kvferry.control.tickets import Ticket, TransferId, verify
from kvferry.errors import KVFerryError
from kvferry.topology.description import (
    EngineDescription,
    tagged_groups,
)
from tests.control.simulation.network import Internet, Port, SimNetwork
from tests.control.simulation.oracle import Oracle
from tests.control.simulation.ranks import Rank, SimTransfer
from tests.control.simulation.shapes import (
    KEY,
    MODEL,
    NUM_BLOCKS,
    Build,
    Part,
    Pool,
    Shape,
    Step,
    Want,
    word_of,
)
from tests.control.simulation.world import Process, SimMailbox, World


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
    preempts: float = 0.0
    """How often a request is preempted while it is lent and still written."""
    slowest_chunk: float = 1.0
    """Seconds that a rank computes at most for one step."""


@functools.cache
def watching_table(table: type[LeaseTable]) -> type[LeaseTable]:
    """The same table, which says what it sweeps, and is told which leases are shared or grow."""

    class Watching(table):  # type: ignore[valid-type, misc]
        told: Callable[[Any], None]
        shares: Callable[[], bool]
        writers: Callable[[], Iterable[int]]

        def grant(self, request_id: str, num_blocks: int, **how: Any) -> Any:
            drawn = {"shared": self.shares(), "writers": how["writers"] or self.writers()}
            return super().grant(request_id, num_blocks, **how | drawn)

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
        tells: Callable[[Any, str], None]
        lends: Callable[[TransferId, Ticket], None]
        denies: Callable[[TransferId, str], None]
        tells_asker: Callable[[bytes, Asked], None]

        def _tell(self, holders: Any) -> None:
            for target, lease_id in holders:
                self.tells(target, lease_id)

        def lend(self, transfer: TransferId, ticket: Ticket) -> None:
            self.lends(transfer, ticket)
            super().lend(transfer, ticket)

        def deny(self, transfer: TransferId, reason: str) -> None:
            self.denies(transfer, reason)
            super().deny(transfer, reason)

        def _tell_askers(self, connections: Iterable[bytes], news: Asked) -> None:
            for connection in connections:
                self.tells_asker(connection, news)

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
        self.context = context
        self._let_go: set[str] = set()
        """Requests whose blocks were let go since they were last computed, or began to load."""
        self.process = self.fork(self.incarnation)
        self.ranks = [Rank(self, rank, context) for rank in range(shape.world_size)]
        self._open_scheduler(context)
        self.aggregator = self.build.aggregator(shape.world_size)
        self._outputs: dict[int, KVConnectorOutput] = {}
        self._reported: dict[str, set[int]] = {}
        """Request id → the ranks that have reported its load."""
        self._parts: list[Part] = []
        """Of the step that takes place."""
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
        self.scheduler.description.tell(self.description)
        self.world.note(f"{self.incarnation} has started")
        self._plan_step(0.0)

    def _open_scheduler(self, context: ConnectorContext) -> None:
        clock, extra, options = self.process.clock, self.shape.extra, self.cluster.options
        # A class is hashable, though mypy says that the next two are not.
        self.table = watching_table(self.build.table).from_options(  # type: ignore[arg-type]
            options, NUM_BLOCKS, clock
        )
        table: Any = self.table
        table.shares = lambda: self.world.chance(0.3)
        every_rank = range(self.shape.world_size)
        table.writers = lambda: every_rank if self.world.chance(0.3) else ()
        table.told = lambda ended: self.oracle.swept(ended, self.cluster.world_sizes)
        server: Any = listening(self.build.service)(  # type: ignore[arg-type]
            engine_id=self.shape.name,
            incarnation=self.incarnation,
            role=context.config.kv_role,
            leases=self.table,
            options=options,
            key=extra.key(),
            clock=clock,
        )
        self.server = server
        server.tells = lambda *news: self.process.run(0.0, partial(self._send_news, *news))
        server.lends = self._lends
        server.denies = self.oracle.denied
        server.tells_asker = self._tell_asker
        self.port = Port(self.process, server, partial(self.oracle.answered, self))
        self.internet.ports[self.shape.address] = self.port
        if self.shape.lends:
            self.look_at_leases()
        client = self.open_client(self.process, server.peers, lambda lease_id: None)
        self.sources = Sources(
            client,
            AcceptedTickets(extra.key(), extra),
            groups=context.groups,
            addresses=extra.peers,
            renew_interval=lambda ticket: ticket.lease_duration_s / options.renewals_per_lease,
            handshake_timeout_s=extra.handshake_timeout_s,
            progress_timeout_s=extra.progress_timeout_s,
            note_error=server.note_error,
            clock=clock,
            mailbox=partial(SimMailbox, self.process),
            pursuits=partial(
                self.build.pursuits, asks=self.build.asks, renewals=self.build.renewals
            ),
        )
        self.scheduler = self.build.scheduler(
            context, extra, extra.key(), server, client, self.sources, clock
        )

    def _send_news(self, target: Any, lease_id: str) -> None:
        connection = self.server.peers.connection(*target)
        self.port.tell(connection, self.server.news(target, lease_id))

    def _tell_asker(self, connection: bytes, news: Asked) -> None:
        self.oracle.asked(self, news)
        self.process.run(0.0, partial(self.port.tell, connection, messages.encode(news)))

    def look_at_leases(self) -> None:
        """From now on leases and peers expire, as at the product's server."""
        self._server_mailbox = SimMailbox(self.process, "control", self._look_at_leases).start()

    def _look_at_leases(self) -> float:
        """As the product's server does, which looks at its ROUTER socket."""
        awake_s, peers = self._server_mailbox.awake_s, self.server.peers
        self.table.expire(
            awake_s=awake_s,
            lives=lambda target: self.internet.lives(peers.connection(*target)),
        )
        self.server.asks.expire()
        peers.expire(lambda target: self.internet.lives(peers.connection(*target)))
        return LOOK_S

    def open_client(
        self,
        process: Process,
        peers: Any,
        reports: Callable[[str], None],
        *,
        incarnation: str = "",
    ) -> ControlClient:
        """A client of one of the processes."""
        client: Any = watching_client(self.build.client)(
            engine_id=self.shape.name,
            incarnation=incarnation or self.incarnation,
            options=self.cluster.options,
            peers=peers,
            network=SimNetwork(self.internet, process),
            clock=process.clock,
            mailbox=partial(SimMailbox, process),
        )
        client.reports = reports
        client.gives_up = lambda lease_id: self.oracle.find(lease_id).given_up.add(self.target)
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

    def nap(self) -> None:
        """Between two steps, the memory of its caches goes and comes back with nothing in it."""
        if self._in_step:
            self.process.run(0.01, self.nap)
            return
        incarnation = f"{self.incarnation}+"
        self.world.note(f"{self.incarnation} lets its caches go, and is {incarnation}")
        self.table.revoke_all()
        for lease_id in self.lent.values():
            self.oracle.leases[lease_id].kept.is_revoked = True
        for want in self._computing:
            if want.blocks:
                self._lose_blocks(want)
                want.num_computed_tokens, want.written = 0, {}
                self._let_go.add(want.request_id)
        self._let_go |= {id for id, want in self.wants.items() if want.state == "loading"}
        for request_id in self.lent:
            self.pool.fill(self.wants[request_id].blocks, f"let go by {self.incarnation}")
        left = [rank.close() for rank in self.ranks]
        self.context = dataclasses.replace(self.context, incarnation=incarnation)
        self.ranks = [Rank(self, rank, self.context, output) for rank, output in enumerate(left)]
        handshakes = [msgspec.msgpack.encode(rank.description) for rank in self.ranks]
        self.cluster.starts[incarnation] = self
        self.scheduler.begin_anew(incarnation, handshakes)
        self.incarnation, self.target = incarnation, (self.shape.name, incarnation)

    # ---- as a source --------------------------------------------------------------------------

    def prefill(self, request_id: str, prompt: tuple[int, ...]) -> Any:
        """Computes a prompt and lends its blocks; the transfer parameters, ``None`` for none."""
        blocks = self.pool.take(
            -(-len(prompt) // self.shape.block_size),
            f"{self.shape.name}/{self.incarnation}/{request_id}",
        )
        if blocks is None:
            return None
        params = {"do_remote_decode": True, WORD: word_of(request_id).hex()}
        want = Want(request_id, prompt, params, len(prompt), "length")
        want.blocks = blocks
        keeps, lent = self.scheduler.request_finished(want, (blocks,))
        if not keeps or lent is None:
            self.pool.free(blocks)
            return None
        ticket = verify(lent["ticket"], KEY.encode())
        self.wants[request_id] = want
        self._note_lent(want, ticket)
        return lent

    def _note_lent(self, want: Want, ticket: Ticket) -> None:
        """A prompt is computed and lent."""
        if ticket.lease_id not in self.oracle.leases:
            self.oracle.lent(ticket)
        self.lent[want.request_id] = ticket.lease_id
        want.outcome = "lent"
        if self.table.readable([ticket.lease_id]):
            self._write(ticket, want.blocks)

    def _write(self, ticket: Ticket, blocks: list[int]) -> None:
        """The ranks are still writing what a lease that grows lends; it may be taken from them."""
        name, missing = self.pool.content[blocks[0]], set(range(self.shape.world_size))
        self.pool.fill(blocks, f"{name}, half written")
        self.oracle.leases[ticket.lease_id].kept.unwritten = missing
        self.world.note(f"{self.incarnation} is still writing {ticket.request_id}")

        def write(rank: int) -> None:
            missing.discard(rank)
            if not missing and self.lent.get(ticket.request_id) == ticket.lease_id:
                self.pool.fill(blocks, name)
            say = partial(self.server.written, ticket.lease_id, rank, ticket.num_tokens)
            self.process.run(0.0002, say)

        for rank in self.ranks:
            rank.process.run(self.world.between(0.001, 8.0), partial(write, rank.rank))
        if self.world.chance(self.cluster.preempts):
            self.process.run(self.world.between(0.001, 8.0), partial(self._preempt, ticket))

    def _preempt(self, ticket: Ticket) -> None:
        if self.table.readable([ticket.lease_id]):
            self.world.note(f"{self.incarnation} preempts {ticket.request_id}")
            self.oracle.leases[ticket.lease_id].kept.is_revoked = True
            self.server.revoke([ticket.lease_id])

    def take_back(self, params: dict[str, Any]) -> None:
        """The router will not have it fetched."""
        if "ticket" in params:
            lease_ids = [verify(params["ticket"], KEY.encode()).lease_id]
        else:
            lease_ids = list(self.oracle.lent_as[params["transfer"].rpartition(".")[0]])
        for lease_id in lease_ids:
            self.oracle.leases[lease_id].kept.is_taken_back = True
        self.scheduler.take_back(params)

    def give_back(self, request_id: str) -> None:
        """The router will not have fetched what a request lends, whether it has come or not."""
        self.world.note(f"{self.incarnation} is given {request_id} back")
        self.oracle.given_back_by_word(f"{self.incarnation}/{request_id}")
        self.server.handle(messages.encode(messages.TakeBack(id=1, word=word_of(request_id))))

    # ---- as a source that computes in chunks --------------------------------------------------

    def compute(self, want: Want) -> None:
        """A prompt to be computed, and lent from its first chunk on to whoever asks for it."""
        self.world.note(f"{self.incarnation} is to compute {want.request_id}")
        self.scheduler.on_new_request(want)
        want.state = "computing"
        self.wants[want.request_id] = want
        if not self._in_step:
            self._plan_step(0.0)

    @property
    def _computing(self) -> list[Want]:
        return [want for want in self.wants.values() if want.state == "computing"]

    def _schedule(self) -> Step:
        """What the next step computes, and who has lost its blocks before it."""
        step, began = Step(), [want for want in self._computing if want.blocks]
        computed = self._let_go & {want.request_id for want in self._computing}
        step.preempted_req_ids |= computed
        self._let_go -= computed
        for want in began:
            if self.world.chance(self.cluster.preempts / 3):
                self.world.note(f"{self.incarnation} preempts {want.request_id}")
                step.preempted_req_ids.add(want.request_id)
                self._lose_blocks(want)
                want.num_computed_tokens, want.written = 0, {}
        for want in self._computing:
            if want.request_id not in step.preempted_req_ids and self._may_begin(want):
                self._add_part(want, step)
        return step

    def _may_begin(self, want: Want) -> bool:
        """Whether there are blocks for all of it, beside those that others will need."""
        size = self.shape.block_size
        need = sum(-(-w.num_tokens // size) - len(w.blocks) for w in self._computing if w.blocks)
        need += 0 if want.blocks else -(-want.num_tokens // size)
        return self.pool.num_held + need < NUM_BLOCKS

    def _add_part(self, want: Want, step: Step) -> None:
        start = want.num_computed_tokens
        end = min(start + self.world.dice.randint(1, 24), want.num_tokens)
        lacking = -(-end // self.shape.block_size) - len(want.blocks)
        more = self.pool.take(lacking, f"{self._content(want)}, not written")
        if more is not None:
            want.blocks = [*want.blocks, *more]
            step.requests.append(Part(want, start, end, (want.blocks,)))

    def _content(self, want: Want) -> str:
        return f"{self.shape.name}/{self.incarnation}/{want.request_id}"

    def wrote(self, rank: int, part: Part) -> None:
        """A rank has computed a part of a prompt."""
        want = part.want
        if want.state != "computing":
            return  # it was aborted
        want.written[rank] = part.end
        written = min(want.written.get(each.rank, 0) for each in self.ranks)
        is_whole = written == want.num_tokens
        full = len(want.blocks) if is_whole else written // self.shape.block_size
        self.pool.fill(want.blocks[:full], self._content(want))
        if part.end == want.num_tokens and want.request_id in self.lent:
            self.oracle.leases[self.lent[want.request_id]].kept.unwritten.discard(rank)

    def _lends(self, transfer: TransferId, ticket: Ticket) -> None:
        """The ticket of a transfer is known."""
        self.oracle.lent_as[transfer.transfer_id].add(ticket.lease_id)
        want = self.wants[ticket.request_id]
        if want.state == "computing" and want.request_id not in self.lent:
            self.oracle.lent(ticket)
            self.lent[want.request_id] = ticket.lease_id
            missing = {rank.rank for rank in self.ranks} - {
                rank for rank, end in want.written.items() if end == want.num_tokens
            }
            self.oracle.leases[ticket.lease_id].kept.unwritten = missing

    def _lose_blocks(self, want: Want) -> None:
        """A prompt's blocks are given to others; whatever lease is on them is to be revoked."""
        if want.request_id in self.lent:
            lease_id = self.lent.pop(want.request_id)
            self.oracle.leases[lease_id].kept.is_revoked = True
            self.oracle.freed(lease_id)
        self.pool.free(want.blocks)
        want.blocks = []

    def _step_computed(self) -> None:
        """Every rank has done its part of a step."""
        parts, self._parts = self._parts, []
        for part in parts:
            want = part.want
            if want.state == "computing":
                want.num_computed_tokens = part.end
                if part.end == want.num_tokens:
                    self._prompt_computed(want)

    def _prompt_computed(self, want: Want) -> None:
        want.finish_reason = "length"
        early = self.lent.get(want.request_id)
        keeps, params = self.scheduler.request_finished(want, (want.blocks,))
        want.state = "over"
        if not keeps or params is None:
            del self.wants[want.request_id]
            self._lose_blocks(want)
            want.outcome = "kept"
        elif "ticket" in params:
            self._note_lent(want, verify(params["ticket"], KEY.encode()))
        else:
            lease_id = self.lent[want.request_id]
            if lease_id == early:
                want.outcome = "lent"
            else:
                self._note_lent(want, self.oracle.leases[lease_id].ticket)

    def _abort_prompt(self, want: Want) -> None:
        """Its client has gone away: nothing will be lent of it."""
        want.finish_reason, want.outcome, want.state = "abort", "aborted", "over"
        if want.request_id in self.lent:
            self.oracle.leases[self.lent[want.request_id]].kept.is_revoked = True
        self.scheduler.request_finished(want, (want.blocks,))
        del self.wants[want.request_id]
        self._lose_blocks(want)

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
            self.scheduler.on_new_request(want)
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
        if want.state == "computing":
            self._abort_prompt(want)
            return
        want.finish_reason = "abort"
        if not self.scheduler.request_finished(want, (want.blocks,))[0]:
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
            count, _ = self.scheduler.get_num_new_matched_tokens(want, 0)
        except KVFerryError as error:
            self.world.note(f"{want.request_id} is computed: {self.oracle.plain(error)}")
            count, want.outcome = 0, "computed"
        if count is None:
            return
        if not count and not want.outcome:
            want.outcome = "denied"
        name = f"{self.incarnation}/{want.request_id}"
        blocks = self.pool.take(-(-want.num_tokens // self.shape.block_size), name)
        if blocks is None:
            return
        want.blocks = blocks
        self.scheduler.update_state_after_alloc(want, want, count)
        if count:
            want.state = "loading"
        else:
            self._compute(want)

    def _compute(self, want: Want) -> None:
        want.state = "running"
        self.process.run(self.world.between(0.02, 0.5), partial(self._computed, want))

    def _computed(self, want: Want) -> None:
        want.finish_reason = "length"
        self.scheduler.request_finished(want, (want.blocks,))
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
        step = self._schedule()
        has_work = step.requests or step.preempted_req_ids or self.scheduler.has_pending_work()
        if not (has_work or self.scheduler.has_news()):
            is_idle = all(want.outcome == "lent" for want in self.wants.values())
            self._plan_step(2.0 if is_idle else 0.05)
            return
        self._in_step = True
        metadata = self.scheduler.build_connector_meta(cast(SchedulerOutputView, step))
        self._outputs, self._parts = {}, step.requests
        for rank in self.ranks:
            stepped = partial(rank.step, metadata, step.requests, self._rank_stepped)
            rank.process.run(0.0002, stepped)

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
        self._step_computed()
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
        self.oracle.require(
            not (ok and request_id in self._let_go),
            "no load counts whose memory was let go",
            f"{request_id} is loaded at {self.incarnation}",
        )
        if want.is_aborted:
            self._end(want, "aborted")
        else:
            want.outcome = "loaded" if ok else "computed"
            self._compute(want)
