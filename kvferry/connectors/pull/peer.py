"""The source engines as one target rank sees them: plans, ways, connections."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

from kvferry.connectors.pull.groups import SourceGroups
from kvferry.errors import BlockTableError, KVFerryError, PeerLostError, ProtocolError
from kvferry.layouts.tiles import Tiles
from kvferry.mailbox import Mailbox, Serial
from kvferry.topology import (
    BoundCopies,
    GroupGeometry,
    GroupPair,
    TransferPlan,
    check_block_ids,
    plan_transfer,
)
from kvferry.topology.description import EngineDescription
from kvferry.topology.sharding import Int64s, ranges_text
from kvferry.topology.tensors import RankMemory
from kvferry.topology.typical import (
    TYPICAL_TOKENS,
    mean_segment_bytes,
    mean_source_bytes,
    typical_copies,
)
from kvferry.transports.base import Peer, Transfer, Transport, Waitable, as_transfer_error
from kvferry.transports.staged import StagedTransport, Staging
from kvferry.transports.ways import Way, choose_way

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetRank:
    """The rank that reads: its groups and memory, and the transports that move the cells."""

    engine_id: str
    rank: int
    groups: tuple[GroupGeometry, ...]
    memory: tuple[RankMemory, ...]
    """Memory of the rank, one entry per group."""
    staging: Staging
    """Staging memory; knows the regions and the device of the cache."""
    transports: Mapping[str, Transport]
    """Open transports by name, best first."""
    staged: Mapping[str, StagedTransport]
    """Transport name → the transport with staging around it."""
    convert_dtype: bool = False
    """Whether a conversion may lose precision."""


@dataclass(frozen=True, slots=True, eq=False)
class PairPlan:
    """Plan for the layers that a group of the source shares with a group of ours, on this rank."""

    index: int
    """Index of the pair among all pairs of the two engines."""
    pair: GroupPair
    plan: TransferPlan
    tiles: Mapping[int, Tiles]
    """Source rank → its tiles, lowered onto both memories."""
    num_blocks: tuple[int, int]
    """Number of blocks in the memory of a source rank (the smallest), and in ours."""
    way: Way

    def prepare(
        self, source_rank: int, transport: Transport, staged: StagedTransport, connection: Peer
    ) -> None:
        """Prepares the state that the reads over a connection share, if the source rank has tiles.

        Raises:
            KVFerryError: the device failed, or has no room.
        """
        if source_rank in self.tiles:
            longest = min(self.plan.source.block_size, self.plan.target.block_size)
            by = transport if self.way.placed else staged
            by.prepare(connection, self.tiles[source_rank], longest)

    def bind(
        self, source_blocks: Int64s, target_blocks: Int64s, num_tokens: int, first_token: int
    ) -> BoundCopies:
        """The copies of a load, checked.

        Raises:
            BlockError: the tables do not fit the plan or the memories.
        """
        copies = self.plan.bind(source_blocks, target_blocks, num_tokens, first_token)
        check_block_ids(copies, *self.num_blocks)
        return copies


@dataclass(slots=True, eq=False)
class Move:
    """A read from one source rank for one pair of groups, as a part of a load."""

    pair: PairPlan
    source_rank: int
    copies: BoundCopies
    """The tokens that the read moves."""
    connection: Peer
    """Connection over which the cells come."""
    transfer: Transfer
    is_repeated: bool = False
    """Whether this read repeats a read whose connection was lost."""


@dataclass(frozen=True, slots=True, eq=False)
class SourcePeer:
    """One incarnation of a source engine; :meth:`close` forgets the engine."""

    description: EngineDescription
    transport: Transport
    staged: StagedTransport
    """The transport with staging around it."""
    pairs: tuple[GroupPair, ...]
    """All pairs of the source's groups and ours."""
    plans: tuple[PairPlan, ...]
    """The plans of the pairs from which this rank reads cells."""
    connections: dict[int, Peer]
    """Source rank → the connection to it; only ranks that this rank reads from."""

    @classmethod
    def connect(cls, description: EngineDescription, target: TargetRank) -> "SourcePeer":
        """Plans every pair of groups, connects to every source rank, and chooses the ways.

        Uses the best transport that both sides have and that reaches the source: shared memory, for
        example, does not reach another host.

        Args:
            description: the source engine, already compared with ours.
            target: this rank.

        Raises:
            ProtocolError: the source offers none of our transports.
            PeerLostError: a source rank cannot be reached.
            ConfigError: the staging memory is too small for a single block.
        """
        source = SourceGroups.of(description, target.groups)
        plans = {
            index: plan
            for index, pair in enumerate(source.pairs)
            if (plan := _plan(pair, source, target)).source_ranks
        }
        ranks = sorted({rank for plan in plans.values() for rank in plan.source_ranks})
        transport, connections, passed_over = _reach(description, ranks, target.transports)
        staged = target.staged[transport.name]
        try:
            pairs = tuple(
                _pair_plan(index, source.pairs[index], plan, description, target, transport)
                for index, plan in plans.items()
            )
            for pair in pairs:
                if not pair.way.placed:
                    _check_staging(pair, staged)
                for rank in pair.tiles:
                    pair.prepare(rank, transport, staged, connections[rank])
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        peer = cls(description, transport, staged, source.pairs, pairs, connections)
        logger.info("reading from engine %s: %s", description.engine_id, peer.summary(passed_over))
        return peer

    @property
    def stages(self) -> bool:
        """Whether any of the source's cells come through staging memory."""
        return not all(pair.way.placed for pair in self.plans)

    @property
    def converts(self) -> bool:
        """Whether any of the source's cells arrive in another dtype."""
        return any(pair.plan.conversion is not None for pair in self.plans)

    @property
    def movement(self) -> str:
        """Name of the transport, and whether cells are staged: ``tcp``, ``tcp, staged``."""
        return f"{self.transport.name}, staged" if self.stages else self.transport.name

    def summary(self, passed_over: Mapping[str, str]) -> str:
        """How the source's cells come, in one line: ``tcp, not vm (why), layers 0-3 placed (why)``.

        Args:
            passed_over: better transports of ours, each with the reason against this transport.
        """
        others = (f"not {name} ({why})" for name, why in passed_over.items())
        ways = (
            f"layers {ranges_text(pair.pair.layers)} {pair.way} ({pair.way.reason})"
            for pair in self.plans
        )
        return ", ".join([self.transport.name, *others, *ways])

    def read(
        self, pair: PairPlan, source_rank: int, copies: BoundCopies, after: Waitable | None
    ) -> Move | None:
        """Starts to move the cells of one source rank; ``None`` if there are no cells to move.

        Raises:
            KVFerryError: the read cannot be started; nothing will land.
        """
        runs = copies.runs_of(source_rank)
        if not len(runs):
            return None  # all cells lie behind the window, or on other ranks
        connection, tiles = self.connections[source_rank], pair.tiles[source_rank]
        if pair.way.placed:
            transfer = self.transport.read(connection, tiles, runs, after=after)
        else:
            transfer = self.staged.read(
                connection,
                tiles,
                runs,
                after=after,
                source=self.description.engine_id,
                conversion=pair.plan.conversion,
            )
        return Move(pair, source_rank, copies, connection, transfer)

    def cancel(self, move: Move) -> None:
        """Asks a read that :meth:`read` has started to stop."""
        (self.transport if move.pair.way.placed else self.staged).cancel(move.transfer)

    def reconnect(self, lost: Move) -> None:
        """Connects to a source rank again, unless the lost connection was replaced already.

        Raises:
            PeerLostError: the source rank cannot be reached.
        """
        if self.connections[lost.source_rank] is lost.connection:
            lost.connection.close()
            again = _connect(self.transport, self.description, [lost.source_rank])
            self.connections.update(again)
            (connection,) = again.values()
            for pair in self.plans:
                pair.prepare(lost.source_rank, self.transport, self.staged, connection)

    def close(self) -> None:
        """Drops the connections; reads still running on them fail."""
        for connection in self.connections.values():
            connection.close()


Waiting = TypeVar("Waiting")
"""Type of the objects that wait for a connection."""


class SourcePeers(Generic[Waiting]):
    """The source engines that a rank has met, and its connections to them.

    A thread connects to an engine, once the engine is met or an object waits for it, so that no
    other thread waits for the wire. All other work is done by the tasks of one series.
    """

    def __init__(
        self,
        target: TargetRank,
        thread: Mailbox,
        serial: Serial,
        go_on: Callable[[Iterable[Waiting], KVFerryError | None], None],
    ) -> None:
        """Args:
        target: this rank.
        thread: connects; stays the caller's.
        serial: the series of tasks.
        go_on: called in this series with the objects that have waited for an engine, once the
            engine is connected to or has to be asked for again; also with the error if the engine
            cannot be connected to.
        """
        self._target = target
        self._thread = thread
        self._serial = serial
        self._go_on = go_on
        self.known: dict[str, EngineDescription] = {}
        """Engine id → its newest incarnation that was met."""
        self.connected: dict[str, SourcePeer] = {}
        """Engine id → the connection to this incarnation."""
        self.waiting: dict[str, list[Waiting]] = {}
        """Engine id → the objects that wait for the engine; an entry for each engine that the
        thread is connecting to."""
        self._closed = False

    def peer_for(self, waiting: Waiting, engine_id: str, incarnation: str) -> SourcePeer | None:
        """The connection to an incarnation of an engine; ``None`` if ``waiting`` has to wait for
        the connection.

        Raises:
            PeerLostError: the engine was started again.
        """
        description = self.known.get(engine_id)
        if description is None or description.incarnation != incarnation:
            restarted = f"engine {engine_id!r} restarted: the lease is from start"
            raise PeerLostError(f"{restarted} {incarnation}")
        peer = self.connected.get(engine_id)
        if peer is None:
            if engine_id not in self.waiting:
                self._begin_to_connect(description, is_awaited=True)
            self.waiting[engine_id].append(waiting)
        return peer

    def replaced_by(self, description: EngineDescription) -> SourcePeer | None:
        """Takes out the connection to an older incarnation of an engine; the caller closes the
        connection.
        """
        known = self.known.get(description.engine_id)
        if known is None or known.incarnation == description.incarnation:
            return None
        return self.connected.pop(description.engine_id, None)

    def meet(self, description: EngineDescription) -> None:
        """Takes an engine whose handshake succeeded, and connects to the engine, unless a
        connection is being made.
        """
        engine_id = description.engine_id
        self.known[engine_id] = description
        if engine_id not in self.connected and engine_id not in self.waiting:
            self._begin_to_connect(description, is_awaited=False)

    def forget(self, engine_id: str, incarnation: str) -> None:
        """Drops an incarnation of an engine, from which nothing is read, with its connections. An
        engine that the thread is connecting to is kept.
        """
        known = self.known.get(engine_id)
        if known is None or known.incarnation != incarnation or engine_id in self.waiting:
            return
        del self.known[engine_id]
        if (peer := self.connected.pop(engine_id, None)) is not None:
            peer.close()

    def close(self) -> None:
        """Drops all connections, and later the connections that are still being made."""
        self._closed = True
        for peer in self.connected.values():
            peer.close()

    def _begin_to_connect(self, description: EngineDescription, *, is_awaited: bool) -> None:
        self.waiting[description.engine_id] = []
        self._thread.post(partial(self._connect, description, is_awaited=is_awaited))

    def _connect(self, description: EngineDescription, *, is_awaited: bool) -> None:
        """Connects to an engine; runs on the thread."""
        found: SourcePeer | KVFerryError
        try:
            found = SourcePeer.connect(description, self._target)
        except Exception as error:
            found = as_load_error(error, "an engine could not be connected to")
            logger.warning("cannot read from engine %s: %s", description.engine_id, found)
        self._serial.post(partial(self._connected, description, found, is_awaited))

    def _connected(
        self, description: EngineDescription, found: SourcePeer | KVFerryError, is_awaited: bool
    ) -> None:
        engine_id = description.engine_id
        waiting, newest = self.waiting.pop(engine_id), self.known[engine_id]
        is_newest = newest.incarnation == description.incarnation
        error = None
        if not isinstance(found, SourcePeer):
            # Objects that came after this attempt began, or that wait for the newest incarnation,
            # go on waiting.
            error = found if is_awaited and is_newest else None
        elif is_newest and not self._closed:
            self.connected[engine_id] = found
        else:
            found.close()
        if not is_newest:
            self._begin_to_connect(newest, is_awaited=False)
        self._go_on(waiting, error)


def _plan(pair: GroupPair, source: SourceGroups, target: TargetRank) -> TransferPlan:
    return plan_transfer(
        source=source.geometries[pair.source_group],
        target=target.groups[pair.target_group],
        target_rank=target.rank,
        target_engine_id=target.engine_id,
        layers=pair.layers,
        convert=target.convert_dtype,
    )


def _pair_plan(
    index: int,
    pair: GroupPair,
    plan: TransferPlan,
    description: EngineDescription,
    target: TargetRank,
    transport: Transport,
) -> PairPlan:
    """The plan on the memory of both sides, and the way of the cells for a typical request."""
    ours = target.memory[pair.target_group]
    theirs = {r: description.ranks[r].memory[pair.source_group] for r in plan.source_ranks}
    tiles = plan.lower(theirs, ours)
    first_token = pair.first_kept_token(TYPICAL_TOKENS) % TYPICAL_TOKENS  # never an empty span
    copies = typical_copies(plan, first_token=first_token, seed=0)
    way = choose_way(
        transport,
        device=target.staging.device,
        conversion=plan.conversion,
        segment_bytes=mean_segment_bytes(tiles, copies),
        source_bytes=mean_source_bytes(tiles, copies),
    )
    num_blocks = min(memory.num_blocks for memory in theirs.values()), ours.num_blocks
    return PairPlan(index, pair, plan, tiles, num_blocks, way)


def _check_staging(pair: PairPlan, staged: StagedTransport) -> None:
    """Checks that the smallest chunk of a pair fits into the staging memory.

    Raises:
        ConfigError: the chunk does not fit.
    """
    # A recurrent state has its cells once per block.
    sides = pair.plan.source, pair.plan.target
    tokens = min(1 if side.is_recurrent else side.block_size for side in sides)
    for tiles in pair.tiles.values():
        staged.check(tiles, tokens)


def _reach(
    description: EngineDescription, ranks: Sequence[int], transports: Mapping[str, Transport]
) -> tuple[Transport, dict[int, Peer], dict[str, str]]:
    """The best common transport that reaches a source, the connections to the source's ranks, and
    the reason why each better transport of ours does not serve.
    """
    *better, last = _common(description, transports)
    passed_over: dict[str, str] = {}
    for name, transport in transports.items():
        if transport is last:
            break
        if transport not in better:
            passed_over[name] = "the source does not offer it"
            continue
        try:
            return transport, _connect(transport, description, ranks), passed_over
        except PeerLostError as error:
            passed_over[name] = str(error)
    return last, _connect(last, description, ranks), passed_over


def _connect(
    transport: Transport, description: EngineDescription, ranks: Sequence[int]
) -> dict[int, Peer]:
    """Connections to some ranks of a source; all are closed again if a connection cannot be
    made.
    """
    connections: dict[int, Peer] = {}
    with ExitStack() as opened:
        for rank in ranks:
            endpoint = description.ranks[rank].endpoints[transport.name]
            connections[rank] = transport.connect(endpoint)
            opened.callback(connections[rank].close)
        opened.pop_all()
    return connections


def _common(description: EngineDescription, transports: Mapping[str, Transport]) -> list[Transport]:
    """The transports that every rank of both sides has, best first; at least one transport."""
    offered = set.intersection(*(set(rank.endpoints) for rank in description.ranks))
    if common := [transport for name, transport in transports.items() if name in offered]:
        return common
    raise ProtocolError(
        f"transport: engine {description.engine_id!r} offers {', '.join(sorted(offered)) or 'none'}"
        f", this one has {', '.join(transports)}; give both sides one in common"
    )


def as_load_error(error: Exception, what: str) -> KVFerryError:
    """The error of a load. A defect of ours is logged, and becomes an error that says so."""
    if isinstance(error, ValueError) and not isinstance(error, KVFerryError):
        return BlockTableError(str(error))  # a ticket's table that does not fit the plan
    return as_transfer_error(error, what)
