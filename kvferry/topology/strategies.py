"""How a transfer is run: the strategies, what a mover can do of them, and which one is chosen.

=========  ========================================  =============================================
strategy   what it does                              who can
=========  ========================================  =============================================
strided    one pass into the final place             movers of strided boxes that fence
direct     one wire operation per contiguous piece   movers of pieces that fence
in place   whole blocks, then a permute of them      movers that fence; whole blocks on both sides
staged     dense chunks, converted, then unpacked    everybody: it is what there is otherwise
=========  ========================================  =============================================
"""

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvferry.topology.machine_costs import MachineCosts


class Strategy(enum.StrEnum):
    """The ways in which the cells of a plan get from source memory into their final places."""

    STRIDED = "strided"
    """One pass from source memory to the final place, layout change included."""
    DIRECT = "direct"
    """One wire operation per contiguous piece, into its final place."""
    IN_PLACE = "in place"
    """Whole blocks into their final slots, then a permute of those blocks."""
    STAGED = "staged"
    """Dense chunks into staging memory, then an unpack (and conversion) into place."""


class Addressing(enum.StrEnum):
    """What a mover does with tiles × runs."""

    BOTH = "movers"
    """It reads source memory and writes target memory itself, in one pass."""
    PACKED = "packed"
    """Our code packs at the source and unpacks at the target; the wire between is dense."""
    SEGMENTS = "segments"
    """One wire operation per contiguous piece."""


@dataclass(frozen=True, slots=True)
class MoverTraits:
    """What a transport can do, as far as the choice of a strategy depends on it."""

    name: str
    addressing: Addressing
    fences: bool
    """Whether a terminal state proves that nothing can land any more."""
    places: bool = True
    """Whether it writes into the target's cache: a wire into host memory does not into a GPU's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyWork:
    """What a plan has to move for a request: the numbers by which a strategy is chosen.

    Segments are counted for shuffled block tables, which is how a busy engine's look.
    """

    nbytes: int
    """Bytes that leave the sources."""
    placed_nbytes: int
    """Bytes that arrive in the target's cache: others only where the dtype is converted."""
    segments_ordered: int
    """Contiguous copies after merging, if both block tables are in order."""
    segments_shuffled: int
    """The same if both are shuffled."""
    chunks: int
    """Dense chunks that the request is cut into for a wire or for staging memory."""
    pack_segments: int
    """Contiguous copies from the sources into the chunks."""
    unpack_segments: int
    """Contiguous copies from the chunks into the cache."""
    block_nbytes: int = 0
    """Bytes of the whole blocks that hold the request; 0 with an ``in_place_obstacle``."""
    block_segments: int = 0
    """Contiguous copies of them into their final slots."""
    repack_nbytes: int = 0
    """Bytes that the permutation in place reads, and writes."""
    repack_segments: int = 0
    """Contiguous copies of that permutation."""
    conversion: tuple[str, str] | None = None
    """Source dtype and target dtype, where they differ."""
    in_place_obstacle: str | None = None
    """Why whole blocks cannot be moved, or ``None`` if they can."""

    def __add__(self, other: "StrategyWork") -> "StrategyWork":
        """Both together: what one of them cannot do cannot be done."""
        counts = {
            name: getattr(self, name) + getattr(other, name)
            for name in self.__slots__
            if name not in ("conversion", "in_place_obstacle")
        }
        return StrategyWork(
            **counts,
            conversion=self.conversion or other.conversion,
            in_place_obstacle=self.in_place_obstacle or other.in_place_obstacle,
        )


@dataclass(frozen=True, slots=True)
class StrategyCost:
    """One strategy for some work and a mover."""

    strategy: Strategy
    seconds: float | None
    """What it would take; ``None`` where it cannot serve."""
    reason: str
    """What the seconds go into, or why it cannot serve."""


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """The strategy that is used, and what the others would have cost."""

    strategy: Strategy
    seconds: float
    reason: str
    """What the seconds go into."""
    alternatives: tuple[StrategyCost, ...]
    """All the others: those that can serve, cheapest first, then those that cannot."""

    @property
    def costs(self) -> tuple[StrategyCost, ...]:
        """The chosen one, then the alternatives."""
        return (StrategyCost(self.strategy, self.seconds, self.reason), *self.alternatives)

    def text(self) -> str:
        """In one line: ``strided (1.2 ms; staged 3.4 ms; direct: why it cannot serve)``."""
        others = [
            f"{cost.strategy}: {cost.reason}"
            if cost.seconds is None
            else f"{cost.strategy} {1e3 * cost.seconds:.1f} ms"
            for cost in self.alternatives
        ]
        return f"{self.strategy} ({'; '.join([f'{1e3 * self.seconds:.1f} ms', *others])})"

    def cost_of(self, strategy: Strategy) -> StrategyCost:
        """What was found for one of the strategies."""
        return next(cost for cost in self.costs if cost.strategy is strategy)


def choose_strategy(
    work: StrategyWork,
    mover: MoverTraits,
    costs: "MachineCosts",
    *,
    wanted: Strategy | None = None,
) -> StrategyChoice:
    """The cheapest strategy that can serve. Total: staging serves every plan and every mover.

    Args:
        work: what is to be moved.
        mover: the transport.
        costs: of the machine that reads.
        wanted: choose this one wherever it can serve, whatever it costs.
    """
    found = [_cost(strategy, work, mover, costs) for strategy in Strategy]
    serving = sorted((cost for cost in found if cost.seconds is not None), key=_seconds)
    chosen = next((cost for cost in serving if cost.strategy is wanted), serving[0])
    others = [cost for cost in serving if cost is not chosen]
    others += [cost for cost in found if cost.seconds is None]
    return StrategyChoice(chosen.strategy, _seconds(chosen), chosen.reason, tuple(others))


def obstacle(strategy: Strategy, work: StrategyWork, mover: MoverTraits) -> str | None:
    """Why a strategy cannot serve some work with a mover, or ``None`` if it can."""
    if strategy is Strategy.STAGED:
        return None
    if work.conversion is not None:
        one, two = work.conversion
        return f"{one} becomes {two} on the way, which needs staging memory"
    if not mover.fences:
        return f"{mover.name} cannot fence: its reads may only land in staging memory"
    if not mover.places:
        return f"{mover.name} writes host memory, and the cache is on a device"
    if strategy is Strategy.IN_PLACE:
        return work.in_place_obstacle
    per_piece = mover.addressing is Addressing.SEGMENTS
    if strategy is Strategy.STRIDED and per_piece:
        return f"{mover.name} moves contiguous pieces; strided reads are beyond it"
    if strategy is Strategy.DIRECT and not per_piece:
        return f"{mover.name} moves strided boxes; nothing is gained by single pieces"
    return None


def _cost(
    strategy: Strategy, work: StrategyWork, mover: MoverTraits, costs: "MachineCosts"
) -> StrategyCost:
    reason = obstacle(strategy, work, mover)
    if reason is not None:
        return StrategyCost(strategy, None, reason)
    if strategy is Strategy.STAGED:
        return _staged_cost(work, mover, costs)
    if strategy is Strategy.IN_PLACE:
        return _in_place_cost(work, mover, costs)
    # Packing and unpacking are a transport's own matter only where there is a wire between.
    halves = work.pack_segments + work.unpack_segments
    said = f"{work.segments_shuffled} pieces"
    if mover.addressing is Addressing.PACKED:
        said = f"{halves} pieces around the wire"
    seconds = costs.wire(mover).transfer_s
    seconds += _wire_s(work, mover, costs, work.nbytes, work.segments_shuffled, halves)
    return StrategyCost(strategy, seconds, said)


def _staged_cost(work: StrategyWork, mover: MoverTraits, costs: "MachineCosts") -> StrategyCost:
    pieces = work.pack_segments
    seconds = work.chunks * costs.wire(mover).transfer_s  # each chunk is a read of its own
    seconds += _wire_s(work, mover, costs, work.nbytes, pieces, pieces + work.chunks)
    seconds += _copy_s(costs, work.placed_nbytes, work.unpack_segments)
    converted = ""
    if work.conversion is not None:
        seconds += costs.convert_byte_s * work.placed_nbytes
        converted = f"{work.conversion[0]} to {work.conversion[1]}, "
    said = f"{pieces} pieces into {work.chunks} chunks, {converted}{work.unpack_segments} out"
    return StrategyCost(Strategy.STAGED, seconds, said)


def _in_place_cost(work: StrategyWork, mover: MoverTraits, costs: "MachineCosts") -> StrategyCost:
    pieces = work.block_segments
    seconds = costs.wire(mover).transfer_s
    seconds += _wire_s(work, mover, costs, work.block_nbytes, pieces, 2 * pieces)
    # Out of the cache and back into it.
    seconds += _copy_s(costs, 2 * work.repack_nbytes, work.repack_segments)
    said = f"{pieces} pieces of whole blocks, {work.repack_segments} to permute them"
    return StrategyCost(Strategy.IN_PLACE, seconds, said)


def _wire_s(
    work: StrategyWork,
    mover: MoverTraits,
    costs: "MachineCosts",
    nbytes: int,
    pieces: int,
    halves: int,
) -> float:
    """Seconds of bytes under way: in pieces, or dense between two halves of pieces."""
    wire = costs.wire(mover)
    seconds = nbytes * wire.byte_s
    if mover.addressing is Addressing.PACKED:
        return seconds + work.chunks * wire.operation_s + halves * costs.piece_s
    return seconds + pieces * wire.operation_s


def _copy_s(costs: "MachineCosts", nbytes: int, pieces: int) -> float:
    return nbytes * costs.copy_byte_s + pieces * costs.piece_s


def _seconds(cost: StrategyCost) -> float:
    assert cost.seconds is not None
    return cost.seconds
