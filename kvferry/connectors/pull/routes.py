"""Routes: by which strategy the cells of one pair of KV cache groups come to this rank.

Chosen once per peer, transport and pair of groups; a load starts a :class:`Read` on every route.
Strided, direct and staged routes are one per source rank. Whole blocks are permuted when those of
all source ranks are there, so that route is one for all of them.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvferry.connectors.pull.reads import (
    InPlaceRead,
    JointRead,
    PlainRead,
    Read,
    TargetMemory,
    as_load_error,
)
from kvferry.connectors.pull.staged_reads import StagedRead
from kvferry.layouts.postprocess import run_repack
from kvferry.layouts.repack import Repack, check_ids
from kvferry.layouts.staging import WIRE_CHUNK_BYTES, stage
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.topology import BoundCopies, TransferPlan
from kvferry.topology.in_place import plan_repack
from kvferry.topology.machine_costs import MachineCosts
from kvferry.topology.sharding import ranges_text
from kvferry.topology.strategies import (
    Addressing,
    MoverTraits,
    Strategy,
    StrategyChoice,
    StrategyWork,
    choose_strategy,
)
from kvferry.topology.strategy_work import strategy_work
from kvferry.topology.tensors import RankMemory
from kvferry.topology.typical import TYPICAL_TOKENS
from kvferry.topology.whole_blocks import WholeBlocks, whole_block_copies
from kvferry.transports.base import Peer, Transport, Waitable
from kvferry.transports.device import DeviceTransport

logger = logging.getLogger(__name__)

CHUNKS_AT_ONCE = 8
"""A chunk is at most this part of the staging memory, so that wire and unpacking overlap in the
half of it that one source may fill."""


class Route(ABC):
    """How cells come from some ranks of a source. Made once per peer; holds no state of loads."""

    strategy: Strategy
    source_ranks: tuple[int, ...]
    """The ranks that it reads from."""

    @abstractmethod
    def start(
        self,
        copies: BoundCopies,
        connections: Mapping[int, Peer],
        after: Waitable | None,
    ) -> Read | None:
        """Starts to move a load's cells; ``None`` where none of them come this way.

        Args:
            copies: what to move, checked.
            connections: source rank → connection.
            after: when the cache may be written, if that is not now.

        Raises:
            KVFerryError: it cannot be started; nothing will land.
        """


@dataclass(frozen=True, slots=True, eq=False)
class SourceRoute(Route):
    """What one source rank holds."""

    strategy: Strategy
    source_ranks: tuple[int, ...]
    transport: Transport
    tiles: Tiles

    def start(
        self,
        copies: BoundCopies,
        connections: Mapping[int, Peer],
        after: Waitable | None,
    ) -> Read | None:
        """See :class:`Route`."""
        (rank,) = self.source_ranks
        runs = copies.runs_of(rank)
        if not len(runs):
            return None  # all that moves lies behind the window, or on other ranks
        return self.read(connections[rank], runs, after)

    @abstractmethod
    def read(self, peer: Peer, runs: Runs, after: Waitable | None) -> Read:
        """Starts to move tiles × runs; see :meth:`Route.start`."""


class PlainRoute(SourceRoute):
    """The transport puts the cells where they belong."""

    __slots__ = ()

    def read(self, peer: Peer, runs: Runs, after: Waitable | None) -> Read:
        """See :class:`SourceRoute`."""
        return PlainRead(self.transport, peer, self.tiles, runs, after)


@dataclass(frozen=True, slots=True, eq=False)
class StagedRoute(SourceRoute):
    """Dense chunks through staging memory; for every transport and every pair."""

    source: str
    """Id of the source engine."""
    memory: TargetMemory
    conversion: tuple[str, str] | None
    target_itemsize: int | None
    """Bytes of a converted element."""
    chunk_bytes: int

    @classmethod
    def of(
        cls,
        planned: "Planned",
        source_rank: int,
        transport: Transport,
        memory: TargetMemory,
    ) -> "StagedRoute":
        """The route from one source rank.

        Raises:
            ConfigError: the staging memory is smaller than a single block of one tensor.
        """
        plan, tiles = planned.plan, planned.tiles[source_rank]
        row_bytes = tiles["heads"] * tiles["elements"] * tiles["itemsize"]
        # The cells of a state lie once per block.
        sizes = [1 if side.is_recurrent else side.block_size for side in (plan.source, plan.target)]
        tokens = min(sizes)
        memory.staging.check(int(row_bytes.max(initial=0)) * tokens)
        return cls(
            Strategy.STAGED,
            (source_rank,),
            transport,
            tiles,
            planned.source,
            memory,
            plan.conversion,
            plan.target.itemsize if plan.conversion else None,
            min(WIRE_CHUNK_BYTES, max(memory.staging.nbytes // CHUNKS_AT_ONCE, 1)),
        )

    def read(self, peer: Peer, runs: Runs, after: Waitable | None) -> Read:
        """See :class:`SourceRoute`."""
        chunks = stage(self.tiles, runs, self.chunk_bytes, target_itemsize=self.target_itemsize)
        nbytes = num_bytes(self.tiles, runs)
        return StagedRead(
            self.transport,
            peer,
            self.source,
            self.memory,
            chunks,
            nbytes,
            self.conversion,
            after,
        )


@dataclass(slots=True, eq=False)
class InPlaceRoute(Route):
    """Whole blocks into their final slots, permuted there; for requests that are whole frames."""

    strategy: Strategy
    source_ranks: tuple[int, ...]
    transport: Transport
    memory: TargetMemory
    whole: WholeBlocks
    repack: Repack
    num_blocks: int
    """Blocks of the cache."""
    otherwise: tuple[Route, ...]
    """What moves a load that it cannot."""
    source: str
    """Id of the source engine."""
    log_level: int
    """At which the first such load is told of."""
    _told: bool = field(default=False, init=False)

    def start(
        self,
        copies: BoundCopies,
        connections: Mapping[int, Peer],
        after: Waitable | None,
    ) -> Read | None:
        """See :class:`Route`."""
        if copies.span[0] == copies.span[1]:
            return None
        obstacle = self.whole.obstacle(copies)
        if obstacle is not None:
            self._tell(obstacle)
            return self._start_otherwise(copies, connections, after)
        blocks = self.whole.bind(copies)
        check_ids(self.repack, blocks.target_blocks, self.num_blocks)  # also beyond the request
        landing = [
            (connections[rank], tiles, blocks.runs[rank])
            for rank, tiles in self.whole.tiles.items()
        ]
        return InPlaceRead(
            self.transport,
            landing,
            after,
            self.memory,
            lambda: run_repack(
                self.repack, self.memory.arrays(), blocks.target_blocks, self.num_blocks
            ),
        )

    def _tell(self, obstacle: str) -> None:
        """Says, once, that not all loads come in place, and what to change."""
        if self._told:
            return
        self._told = True
        plan, frame = self.whole.plan, self.whole.frame_tokens
        theirs, ours = plan.source.block_size, plan.target.block_size
        remedy = (
            f"; blocks are {theirs} tokens there and {ours} here, so only whole frames of {frame} "
            f"come in place: give this engine a block_size that is a multiple of {theirs}"
        )
        logger.log(
            self.log_level,
            "layers %s of engine %s: a load comes %s, not in place: %s%s (later ones are not told)",
            ranges_text(sorted({piece.layer for piece in plan.pieces})),
            self.source,
            self.otherwise[0].strategy,
            obstacle,
            remedy if frame != ours else "",
        )

    def _start_otherwise(
        self,
        copies: BoundCopies,
        connections: Mapping[int, Peer],
        after: Waitable | None,
    ) -> Read | None:
        reads: list[Read] = []
        try:
            for route in self.otherwise:
                reads += filter(None, [route.start(copies, connections, after)])
        except Exception as error:
            if not reads:
                raise
            # What is under way must end before the load does.
            joint = JointRead(reads)
            joint.give_up(as_load_error(error, "the read could not be started"))
            return joint
        return JointRead(reads) if reads else None


@dataclass(frozen=True, slots=True, eq=False)
class Planned:
    """A pair of groups before its routes are chosen."""

    source: str
    """Id of the source engine."""
    plan: TransferPlan
    tiles: Mapping[int, Tiles]
    """Source rank → its tiles, lowered onto both memories."""
    source_memory: Mapping[int, RankMemory]
    """Source rank → its memory."""
    target_memory: RankMemory
    """Of this rank."""

    def work(self, first_token: int, num_tokens: int) -> StrategyWork:
        """What a request of the tokens ``[first_token, num_tokens)`` moves."""
        return strategy_work(
            self.plan,
            source_memory=self.source_memory,
            target_memory=self.target_memory,
            tiles=self.tiles,
            num_tokens=num_tokens,
            first_token=first_token,
        )


@dataclass(frozen=True, slots=True)
class RouteOptions:
    """What a user may say about routes."""

    strategy: Strategy | None = None
    """Taken wherever it is possible."""
    convert_dtype: bool = False
    """Whether a conversion may lose precision."""
    costs: MachineCosts = field(default_factory=MachineCosts)
    """Of this machine; the cheapest strategy is taken."""


def make_routes(
    planned: Planned,
    transport: Transport,
    memory: TargetMemory,
    options: RouteOptions,
    first_token: int = 0,
) -> tuple[StrategyChoice, tuple[Route, ...]]:
    """The routes of one pair of groups, and the choice among strategies that they follow.

    Chosen for a request of :data:`~kvferry.topology.typical.TYPICAL_TOKENS`, as
    ``kvferry plan`` does.

    Args:
        planned: what moves.
        transport: what moves it.
        memory: this rank's cache.
        options: what a user said.
        first_token: the first token of such a request that moves.

    Raises:
        ConfigError: see :meth:`StagedRoute.of`.
    """
    work = planned.work(first_token, TYPICAL_TOKENS)
    if not memory.is_host:
        work = replace(work, in_place_obstacle="blocks are permuted in host memory only")
    places = memory.is_host or isinstance(transport, DeviceTransport)
    mover = MoverTraits(transport.name, Addressing(transport.addressing), transport.fences, places)
    # Beside one pass on the device there is only the way through the host, whatever the costs say.
    wanted = options.strategy or (None if memory.is_host else Strategy.STRIDED)
    choice = choose_strategy(work, mover, options.costs, wanted=wanted)
    if choice.strategy is Strategy.IN_PLACE:
        try:
            whole = whole_block_copies(planned.plan, planned.source_memory, planned.target_memory)
        except ValueError as error:  # of a layer that lies unlike the one that was looked at
            work = replace(work, in_place_obstacle=str(error))
            choice = choose_strategy(work, mover, options.costs, wanted=wanted)
        else:
            work = replace(work, in_place_obstacle="the request is no whole frames")
            otherwise = choose_strategy(work, mover, options.costs).strategy
            # Who asked for it should know; who did not has right loads, some of them slower.
            level = logging.INFO if options.strategy is None else logging.WARNING
            return choice, (_in_place(planned, transport, memory, whole, otherwise, level),)
    if options.strategy not in (None, choice.strategy):
        reason = choice.cost_of(options.strategy).reason
        logger.warning(
            "strategy: %s is not possible, taking %s: %s", options.strategy, choice.strategy, reason
        )
    return choice, _by_source(planned, transport, memory, choice.strategy)


def _in_place(
    planned: Planned,
    transport: Transport,
    memory: TargetMemory,
    whole: WholeBlocks,
    otherwise: Strategy,
    log_level: int,
) -> InPlaceRoute:
    return InPlaceRoute(
        Strategy.IN_PLACE,
        planned.plan.source_ranks,
        transport,
        memory,
        whole,
        plan_repack(planned.plan, planned.target_memory),
        planned.target_memory.num_blocks,
        _by_source(planned, transport, memory, otherwise),
        planned.source,
        log_level,
    )


def _by_source(
    planned: Planned, transport: Transport, memory: TargetMemory, strategy: Strategy
) -> tuple[Route, ...]:
    if strategy is Strategy.STAGED:
        return tuple(StagedRoute.of(planned, rank, transport, memory) for rank in planned.tiles)
    return tuple(
        PlainRoute(strategy, (rank,), transport, table) for rank, table in planned.tiles.items()
    )
