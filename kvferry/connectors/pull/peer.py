"""One source engine as one target rank sees it: plans, lowered tiles, connections."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.errors import ProtocolError
from kvferry.layouts.tiles import Tiles
from kvferry.topology import EngineGeometry, TransferPlan, plan_transfer
from kvferry.topology.description import EngineDescription, RankMemory
from kvferry.transports.base import Peer, Transport


@dataclass(frozen=True, slots=True, eq=False)
class GroupPlan:
    """How one KV cache group moves from a source engine to this rank."""

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
    groups: tuple[GroupPlan, ...]
    connections: Mapping[int, Peer]
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
        """Plans every group and connects to every source rank.

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
        transport = _common(description, transports)
        plans = []
        for index, (target, ours) in enumerate(zip(groups, memory, strict=True)):
            source = EngineGeometry.from_description(description.groups[index])
            plan = plan_transfer(
                source=source, target=target, target_rank=rank, target_engine_id=engine_id
            )
            theirs = {r: description.ranks[r].memory[index] for r in plan.source_ranks}
            plans.append(
                GroupPlan(
                    plan=plan,
                    tiles=plan.lower(theirs, ours),
                    source_num_blocks=min(memory.num_blocks for memory in theirs.values()),
                    target_num_blocks=ours.num_blocks,
                )
            )
        ranks = sorted({source_rank for group in plans for source_rank in group.plan.source_ranks})
        connections: dict[int, Peer] = {}
        try:
            for source_rank in ranks:
                endpoint = description.ranks[source_rank].endpoints[transport.name]
                connections[source_rank] = transport.connect(endpoint)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        return cls(description, transport, tuple(plans), connections)

    def close(self) -> None:
        """Drops the connections; reads still running on them fail."""
        for connection in self.connections.values():
            connection.close()


def _common(description: EngineDescription, transports: Mapping[str, Transport]) -> Transport:
    offered = set.intersection(*(set(rank.endpoints) for rank in description.ranks))
    for name, transport in transports.items():
        if name in offered:
            return transport
    raise ProtocolError(
        f"transport: engine {description.engine_id!r} offers {', '.join(sorted(offered)) or 'none'}"
        f", this one has {', '.join(transports)}; give both sides one in common"
    )
