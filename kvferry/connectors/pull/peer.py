"""One source engine as one target rank sees it: plans, lowered tiles, connections."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.connectors.pull.groups import SourceGroups
from kvferry.errors import PeerLostError, ProtocolError
from kvferry.layouts.tiles import Tiles
from kvferry.topology import EngineGeometry, GroupPair, TransferPlan, plan_transfer
from kvferry.topology.description import EngineDescription, RankMemory
from kvferry.transports.base import Peer, Transport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """How the layers that a group of the source shares with one of ours move to this rank."""

    index: int
    """Of the pair among all pairs of the two engines."""
    pair: GroupPair
    plan: TransferPlan
    tiles: Mapping[int, Tiles]
    """Source rank → its tiles, lowered onto both memories."""
    source_num_blocks: int
    """Blocks of the source's tables."""
    target_num_blocks: int
    """Blocks of ours."""


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
        *,
        rank: int,
        engine_id: str,
        groups: Sequence[EngineGeometry],
        memory: Sequence[RankMemory],
        transports: Mapping[str, Transport],
    ) -> "SourcePeer":
        """Plans every pair of groups and connects to every source rank.

        By the best transport that both sides have and that reaches: shared memory, for one, does
        not reach another host.

        Args:
            description: the source engine, already compared with ours.
            rank: this rank.
            engine_id: this engine; spreads the targets over the source's replicas.
            groups: this engine's geometries, one per group.
            memory: this rank's memory, one per group.
            transports: open transports by name, best first.

        Raises:
            ProtocolError: the source offers none of our transports.
            PeerLostError: a source rank is not there.
        """
        source = SourceGroups.of(description, groups)
        plans = []
        for index, pair in enumerate(source.pairs):
            plan = plan_transfer(
                source=source.geometries[pair.source_group],
                target=groups[pair.target_group],
                target_rank=rank,
                target_engine_id=engine_id,
                layers=pair.layers,
            )
            if not plan.source_ranks:
                continue  # none of these layers are on this rank's stage
            ours = memory[pair.target_group]
            theirs = {r: description.ranks[r].memory[pair.source_group] for r in plan.source_ranks}
            plans.append(
                GroupPlan(
                    index=index,
                    pair=pair,
                    plan=plan,
                    tiles=plan.lower(theirs, ours),
                    source_num_blocks=min(memory.num_blocks for memory in theirs.values()),
                    target_num_blocks=ours.num_blocks,
                )
            )
        ranks = sorted({source_rank for group in plans for source_rank in group.plan.source_ranks})
        *better, last = _common(description, transports)
        for transport in better:
            try:
                connections = _connect(transport, description, ranks)
            except PeerLostError as error:
                logger.info(
                    "%s does not reach %s: %s", transport.name, description.engine_id, error
                )
                continue
            return cls(description, transport, source.pairs, tuple(plans), connections)
        connections = _connect(last, description, ranks)
        return cls(description, last, source.pairs, tuple(plans), connections)

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
