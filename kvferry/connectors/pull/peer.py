"""One source engine as one target rank sees it: plans, routes, connections."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.connectors.pull.groups import SourceGroups
from kvferry.connectors.pull.reads import TargetMemory
from kvferry.connectors.pull.routes import Planned, Route, RouteOptions, make_routes
from kvferry.errors import PeerLostError, ProtocolError
from kvferry.topology import GroupGeometry, GroupPair, TransferPlan, plan_transfer
from kvferry.topology.description import EngineDescription
from kvferry.topology.sharding import ranges_text
from kvferry.topology.strategies import StrategyChoice
from kvferry.topology.tensors import RankMemory
from kvferry.topology.typical import TYPICAL_TOKENS
from kvferry.transports.base import Peer, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankIdentity:
    """Which rank this is, and what it holds."""

    engine_id: str
    rank: int
    groups: tuple[GroupGeometry, ...]
    memory: tuple[RankMemory, ...]
    """One per group."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """How the layers that a group of the source shares with one of ours move to this rank."""

    index: int
    """Of the pair among all pairs of the two engines."""
    pair: GroupPair
    plan: TransferPlan
    choice: StrategyChoice
    """By which strategy its cells come, and what the others would cost."""
    routes: tuple[Route, ...]
    num_blocks: tuple[int, int]
    """Blocks of the source's tables and of ours."""

    @classmethod
    def of(
        cls,
        index: int,
        source: SourceGroups,
        planned: Planned,
        transport: Transport,
        target: TargetMemory,
        options: RouteOptions,
    ) -> "GroupPlan":
        """A planned pair with its routes.

        Raises:
            ConfigError: see :func:`make_routes`.
        """
        pair = source.pairs[index]
        first_token = pair.first_kept_token(TYPICAL_TOKENS) % TYPICAL_TOKENS  # never an empty span
        choice, routes = make_routes(planned, transport, target, options, first_token)
        theirs = min(memory.num_blocks for memory in planned.source_memory.values())
        num_blocks = theirs, planned.target_memory.num_blocks
        return cls(index, pair, planned.plan, choice, routes, num_blocks)


@dataclass(frozen=True, slots=True, eq=False)
class SourcePeer:
    """One start of a source engine. Forgetting it is one :meth:`close`."""

    description: EngineDescription
    transport: Transport
    pairs: tuple[GroupPair, ...]
    """All pairs of the source's groups and ours."""
    groups: tuple[GroupPlan, ...]
    """Those of which this rank reads anything."""
    connections: dict[int, Peer]
    """Source rank → the connection to it; only ranks that this rank reads from."""

    @classmethod
    def connect(
        cls,
        description: EngineDescription,
        identity: RankIdentity,
        target: TargetMemory,
        transports: Mapping[str, Transport],
        options: RouteOptions,
    ) -> "SourcePeer":
        """Plans every pair of groups, connects to every source rank, and chooses the routes.

        By the best transport that both sides have and that reaches: shared memory, for one, does
        not reach another host.

        Args:
            description: the source engine, already compared with ours.
            identity: this rank.
            target: its memory in this process.
            transports: open transports by name, best first.
            options: what a user said about routes.

        Raises:
            ProtocolError: the source offers none of our transports.
            PeerLostError: a source rank is not there.
            ConfigError: the staging memory is too small for a single block.
        """
        source = SourceGroups.of(description, identity.groups)
        plans = [
            plan
            for index in range(len(source.pairs))
            if (plan := _plan(index, description, source, identity, options)) is not None
        ]
        ranks = sorted({source_rank for _, planned in plans for source_rank in planned.tiles})
        transport, connections = _reach(description, ranks, transports)
        try:
            groups = tuple(
                GroupPlan.of(index, source, planned, transport, target, options)
                for index, planned in plans
            )
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        peer = cls(description, transport, source.pairs, groups, connections)
        logger.info("reading from engine %s: %s", description.engine_id, peer.summary())
        return peer

    @property
    def converts(self) -> bool:
        """Whether any of its cells arrive in another dtype."""
        return any(group.plan.conversion is not None for group in self.groups)

    def summary(self) -> str:
        """How its cells come, in one line: ``tcp, layers 0-3 strided (1.2 ms; staged 3.4 ms)``.

        The times are for a request of :data:`TYPICAL_TOKENS` tokens.
        """
        return ", ".join(
            [
                self.transport.name,
                *(
                    f"layers {ranges_text(group.pair.layers)} {group.choice.text()}"
                    for group in self.groups
                ),
            ]
        )

    def reconnect(self, source_rank: int, lost: Peer) -> Peer:
        """The connection to a source rank, in place of one that was lost.

        Raises:
            PeerLostError: the source rank is not there.
        """
        if self.connections[source_rank] is lost:
            lost.close()
            fresh = _connect(self.transport, self.description, [source_rank])
            self.connections[source_rank] = fresh[source_rank]
        return self.connections[source_rank]

    def close(self) -> None:
        """Drops the connections; reads still running on them fail."""
        for connection in self.connections.values():
            connection.close()


def _plan(
    index: int,
    description: EngineDescription,
    source: SourceGroups,
    identity: RankIdentity,
    options: RouteOptions,
) -> tuple[int, Planned] | None:
    """Plans a pair of groups; ``None`` where none of its layers are on this rank's stage."""
    pair = source.pairs[index]
    plan = plan_transfer(
        source=source.geometries[pair.source_group],
        target=identity.groups[pair.target_group],
        target_rank=identity.rank,
        target_engine_id=identity.engine_id,
        layers=pair.layers,
        convert=options.convert_dtype,
    )
    if not plan.source_ranks:
        return None
    ours = identity.memory[pair.target_group]
    theirs = {r: description.ranks[r].memory[pair.source_group] for r in plan.source_ranks}
    tiles = plan.lower(theirs, ours)
    return index, Planned(description.engine_id, plan, tiles, theirs, ours)


def _reach(
    description: EngineDescription, ranks: Sequence[int], transports: Mapping[str, Transport]
) -> tuple[Transport, dict[int, Peer]]:
    """The best common transport that reaches a source, and the connections to its ranks."""
    *better, last = _common(description, transports)
    for transport in better:
        try:
            return transport, _connect(transport, description, ranks)
        except PeerLostError as error:
            logger.info("%s does not reach %s: %s", transport.name, description.engine_id, error)
    return last, _connect(last, description, ranks)


def _connect(
    transport: Transport, description: EngineDescription, ranks: Sequence[int]
) -> dict[int, Peer]:
    """Connections to some ranks of a source; to none of them if one cannot be made."""
    connections: dict[int, Peer] = {}
    try:
        for rank in ranks:
            endpoint = description.ranks[rank].endpoints[transport.name]
            connections[rank] = transport.connect(endpoint)
    except BaseException:
        for connection in connections.values():
            connection.close()
        raise
    return connections


def _common(description: EngineDescription, transports: Mapping[str, Transport]) -> list[Transport]:
    """The transports that every rank of both sides has, best first; never none."""
    offered = set.intersection(*(set(rank.endpoints) for rank in description.ranks))
    if common := [transport for name, transport in transports.items() if name in offered]:
        return common
    raise ProtocolError(
        f"transport: engine {description.engine_id!r} offers {', '.join(sorted(offered)) or 'none'}"
        f", this one has {', '.join(transports)}; give both sides one in common"
    )
