"""Routes: by which strategy the cells of one pair of KV cache groups come to this rank.

Chosen once per peer, transport and pair of groups; a load starts a :class:`Read` on every route.
Strided, direct and staged routes are one per source rank. Whole blocks are permuted when those of
all source ranks are there, so that route is one for all of them.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvferry.connectors.pull.reads import PlainRead, Read, StagedRead, TargetMemory
from kvferry.layouts.staging import WIRE_CHUNK_BYTES, stage
from kvferry.layouts.tiles import Tiles, num_bytes
from kvferry.topology import BoundCopies, TransferPlan, check_block_ids
from kvferry.topology.strategies import Addressing, Strategy
from kvferry.transports.base import Peer, Transport

logger = logging.getLogger(__name__)

CHUNKS_AT_ONCE = 4
"""A chunk is at most this part of the staging memory, so that wire and unpacking overlap."""


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """What a load moves of one pair of groups."""

    plan: TransferPlan
    source_blocks: Sequence[int]
    """The whole block table on the source."""
    target_blocks: Sequence[int]
    """The whole block table here."""
    first_token: int
    num_tokens: int
    """It moves the tokens ``[first_token, num_tokens)``."""
    num_blocks: tuple[int, int]
    """Blocks that the source and the target have."""
    copies: BoundCopies
    """The plan, bound to all of it."""

    @classmethod
    def of(
        cls,
        plan: TransferPlan,
        tables: tuple[Sequence[int], Sequence[int]],
        tokens: tuple[int, int],
        num_blocks: tuple[int, int],
    ) -> "Span":
        """Binds and checks it.

        Args:
            plan: what moves of a token.
            tables: whole block tables of source and target.
            tokens: first token and the one behind the last.
            num_blocks: blocks that the source and the target have.

        Raises:
            ValueError, BlockError: see :func:`~kvferry.topology.binding.bind`.
        """
        first_token, num_tokens = tokens
        copies = plan.bind(*tables, num_tokens, first_token)
        check_block_ids(copies, *num_blocks)
        return cls(plan, *tables, first_token, num_tokens, num_blocks, copies)

    def part(self, first_token: int, num_tokens: int) -> "Span":
        """Some of its tokens."""
        tables = (self.source_blocks, self.target_blocks)
        return Span.of(self.plan, tables, (first_token, num_tokens), self.num_blocks)


class Route(ABC):
    """How cells come from some ranks of a source. Made once per peer; holds no state of loads."""

    strategy: Strategy
    source_ranks: tuple[int, ...]
    """The ranks that it reads from."""

    @abstractmethod
    def start(self, span: Span, connections: Mapping[int, Peer]) -> Read | None:
        """Starts to move a load's cells; ``None`` where none of them come this way.

        Args:
            span: what to move.
            connections: source rank → connection.

        Raises:
            KVFerryError: it cannot be started; nothing will land.
        """


@dataclass(frozen=True, slots=True, eq=False)
class PlainRoute(Route):
    """The transport puts the cells where they belong."""

    strategy: Strategy
    source_ranks: tuple[int, ...]
    transport: Transport
    tiles: Tiles

    def start(self, span: Span, connections: Mapping[int, Peer]) -> Read | None:
        """See :class:`Route`."""
        (rank,) = self.source_ranks
        runs = span.copies.runs_of(rank)
        if not len(runs):
            return None  # all that moves lies behind the window, or on other ranks
        return PlainRead(self.transport, connections[rank], self.tiles, runs)


@dataclass(frozen=True, slots=True, eq=False)
class StagedRoute(Route):
    """Dense chunks through staging memory; for every transport and every pair."""

    strategy: Strategy
    source_ranks: tuple[int, ...]
    transport: Transport
    tiles: Tiles
    memory: TargetMemory
    conversion: tuple[str, str] | None
    target_itemsize: int | None
    """Bytes of a converted element."""
    chunk_bytes: int

    @classmethod
    def of(
        cls,
        plan: TransferPlan,
        source_rank: int,
        tiles: Tiles,
        transport: Transport,
        memory: TargetMemory,
    ) -> "StagedRoute":
        """The route from one source rank.

        Raises:
            ConfigError: the staging memory is smaller than a single block of one tensor.
        """
        row_bytes = tiles["heads"] * tiles["elements"] * tiles["itemsize"]
        tokens = min(plan.source.block_size, plan.target.block_size)
        memory.staging.check(int(row_bytes.max(initial=0)) * tokens)
        return cls(
            Strategy.STAGED,
            (source_rank,),
            transport,
            tiles,
            memory,
            plan.conversion,
            plan.target.itemsize if plan.conversion else None,
            min(WIRE_CHUNK_BYTES, max(memory.staging.nbytes // CHUNKS_AT_ONCE, 1)),
        )

    def start(self, span: Span, connections: Mapping[int, Peer]) -> Read | None:
        """See :class:`Route`."""
        (rank,) = self.source_ranks
        runs = span.copies.runs_of(rank)
        if not len(runs):
            return None
        chunks = stage(self.tiles, runs, self.chunk_bytes, target_itemsize=self.target_itemsize)
        nbytes = num_bytes(self.tiles, runs)
        return StagedRead(
            self.transport, connections[rank], self.memory, chunks, nbytes, self.conversion
        )


def make_routes(
    plan: TransferPlan,
    tiles: Mapping[int, Tiles],
    transport: Transport,
    memory: TargetMemory,
    forced: Strategy | None,
) -> tuple[Route, ...]:
    """The routes of one pair of groups.

    Args:
        plan: what moves.
        tiles: source rank → its tiles, lowered onto both memories.
        transport: what moves it.
        memory: this rank's cache.
        forced: the strategy that the configuration asks for.

    Raises:
        ConfigError: see :meth:`StagedRoute.of`.
    """
    strategy = _plain(plan, transport)
    if forced in (Strategy.STAGED, strategy) and forced is not None:
        strategy = forced
    elif forced is not None:
        logger.warning("strategy: %s cannot do it %s; taking %s", transport.name, forced, strategy)
    if strategy is Strategy.STAGED:
        return tuple(
            StagedRoute.of(plan, rank, table, transport, memory) for rank, table in tiles.items()
        )
    return tuple(PlainRoute(strategy, (rank,), transport, table) for rank, table in tiles.items())


def _plain(plan: TransferPlan, transport: Transport) -> Strategy:
    if plan.conversion is not None or not transport.fences:
        return Strategy.STAGED
    segments = transport.addressing is Addressing.SEGMENTS
    return Strategy.DIRECT if segments else Strategy.STRIDED
