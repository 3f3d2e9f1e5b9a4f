"""One source engine as one target rank sees it: plans, ways, connections."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.connectors.pull.groups import SourceGroups
from kvferry.errors import PeerLostError, ProtocolError
from kvferry.layouts.tiles import Tiles
from kvferry.topology import (
    BoundCopies,
    GroupGeometry,
    GroupPair,
    TransferPlan,
    check_block_ids,
    plan_transfer,
)
from kvferry.topology.description import EngineDescription
from kvferry.topology.sharding import ranges_text
from kvferry.topology.tensors import RankMemory
from kvferry.topology.typical import (
    TYPICAL_TOKENS,
    mean_segment_bytes,
    mean_source_bytes,
    typical_copies,
)
from kvferry.transports.base import Peer, Transfer, Transport, Waitable
from kvferry.transports.staged import StagedTransport, Staging
from kvferry.transports.ways import Way, choose_way

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TargetRank:
    """Which rank reads, what it holds and where, and what moves it."""

    engine_id: str
    rank: int
    groups: tuple[GroupGeometry, ...]
    memory: tuple[RankMemory, ...]
    """One per group."""
    staging: Staging
    """Knows the cache's regions and device."""
    transports: Mapping[str, Transport]
    """Open transports by name, best first."""
    staged: Mapping[str, StagedTransport]
    """The same ones with staging around them."""
    convert_dtype: bool = False
    """Whether a conversion may lose precision."""


@dataclass(frozen=True, slots=True, eq=False)
class PairPlan:
    """How the layers that a group of the source shares with one of ours come to this rank."""

    index: int
    """Of the pair among all pairs of the two engines."""
    pair: GroupPair
    plan: TransferPlan
    tiles: Mapping[int, Tiles]
    """Source rank → its tiles, lowered onto both memories."""
    num_blocks: tuple[int, int]
    """Blocks of the source's tables and of ours."""
    way: Way

    def bind(
        self,
        source_blocks: Sequence[int],
        target_blocks: Sequence[int],
        num_tokens: int,
        first_token: int,
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
    """What one source rank gives of one pair of groups to a load, or to one part of it."""

    pair: PairPlan
    source_rank: int
    copies: BoundCopies
    """The tokens that it moves."""
    connection: Peer
    """Over which they come."""
    transfer: Transfer
    is_repeated: bool = False
    """Whether this is the second time, as the connection of the first one was lost."""


@dataclass(frozen=True, slots=True, eq=False)
class SourcePeer:
    """One start of a source engine. Forgetting it is one :meth:`close`."""

    description: EngineDescription
    transport: Transport
    staged: StagedTransport
    """The same with staging around it."""
    pairs: tuple[GroupPair, ...]
    """All pairs of the source's groups and ours."""
    plans: tuple[PairPlan, ...]
    """Those of which this rank reads anything."""
    connections: dict[int, Peer]
    """Source rank → the connection to it; only ranks that this rank reads from."""

    @classmethod
    def connect(cls, description: EngineDescription, target: TargetRank) -> "SourcePeer":
        """Plans every pair of groups, connects to every source rank, and chooses the ways.

        By the best transport that both sides have and that reaches: shared memory, for one, does
        not reach another host.

        Args:
            description: the source engine, already compared with ours.
            target: this rank.

        Raises:
            ProtocolError: the source offers none of our transports.
            PeerLostError: a source rank is not there.
            ConfigError: the staging memory is too small for a single block.
        """
        source = SourceGroups.of(description, target.groups)
        plans = {
            index: plan
            for index, pair in enumerate(source.pairs)
            if (plan := _plan(pair, source, target)).source_ranks
        }
        ranks = sorted({rank for plan in plans.values() for rank in plan.source_ranks})
        transport, connections = _reach(description, ranks, target.transports)
        staged = target.staged[transport.name]
        try:
            pairs = tuple(
                _pair_plan(index, source.pairs[index], plan, description, target, transport)
                for index, plan in plans.items()
            )
            for pair in pairs:
                if not pair.way.placed:
                    _check_staging(pair, staged)
        except BaseException:
            for connection in connections.values():
                connection.close()
            raise
        peer = cls(description, transport, staged, source.pairs, pairs, connections)
        logger.info("reading from engine %s: %s", description.engine_id, peer.summary())
        return peer

    @property
    def stages(self) -> bool:
        """Whether any of its cells come through staging memory."""
        return not all(pair.way.placed for pair in self.plans)

    @property
    def converts(self) -> bool:
        """Whether any of its cells arrive in another dtype."""
        return any(pair.plan.conversion is not None for pair in self.plans)

    @property
    def movement(self) -> str:
        """The transport, and whether its cells are staged: ``tcp``, ``tcp, staged``."""
        return f"{self.transport.name}, staged" if self.stages else self.transport.name

    def summary(self) -> str:
        """How its cells come, in one line: ``tcp, layers 0-3 placed (tcp writes ...)``."""
        ways = (
            f"layers {ranges_text(pair.pair.layers)} {pair.way} ({pair.way.reason})"
            for pair in self.plans
        )
        return ", ".join([self.transport.name, *ways])

    def read(
        self, pair: PairPlan, source_rank: int, copies: BoundCopies, after: Waitable | None
    ) -> Move | None:
        """Starts to move what one source rank gives; ``None`` where that is nothing.

        Raises:
            KVFerryError: it cannot be started; nothing will land.
        """
        runs = copies.runs_of(source_rank)
        if not len(runs):
            return None  # all that moves lies behind the window, or on other ranks
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
        """Asks for what :meth:`read` has started to stop."""
        (self.transport if move.pair.way.placed else self.staged).cancel(move.transfer)

    def reconnect(self, lost: Move) -> None:
        """Connects to a source rank again, unless somebody has done so since this was lost.

        Raises:
            PeerLostError: the source rank is not there.
        """
        if self.connections[lost.source_rank] is lost.connection:
            lost.connection.close()
            again = _connect(self.transport, self.description, [lost.source_rank])
            self.connections.update(again)

    def close(self) -> None:
        """Drops the connections; reads still running on them fail."""
        for connection in self.connections.values():
            connection.close()


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
    """The plan on both sides' memory, and the way of its cells for a typical request."""
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
        ConfigError: it does not.
    """
    # The cells of a state lie once per block.
    sides = pair.plan.source, pair.plan.target
    tokens = min(1 if side.is_recurrent else side.block_size for side in sides)
    for tiles in pair.tiles.values():
        staged.check(tiles, tokens)


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
