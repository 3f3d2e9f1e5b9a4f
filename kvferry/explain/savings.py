"""Cheaper transfers: tries other shapes, and keeps the changes that help."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvferry.explain.costs import count_segments, read_parts
from kvferry.layouts.layout import LAYOUT_NAMES, Layout
from kvferry.topology.group import GroupGeometry

WORTH = 1.5
"""Minimum factor between the segments before and after a change that is reported."""

TRIAL_TOKENS = 4096
"""Maximum number of tokens in a trial: counts grow with the tokens, but ratios hardly change."""

TRIAL_RANKS = 64
"""Maximum number of target ranks in a trial; for larger engines, an evenly spaced sample."""


@dataclass(frozen=True, slots=True)
class SideChange:
    """Changed values of an engine's configuration; ``None`` keeps a value."""

    layout: Layout | None = None
    block_size: int | None = None
    tp: int | None = None

    @property
    def num_values(self) -> int:
        """Number of values that change."""
        return sum(value is not None for value in (self.layout, self.block_size, self.tp))

    def apply(self, groups: Sequence[GroupGeometry]) -> tuple[GroupGeometry, ...]:
        """The engine's groups after the change; block sizes of all groups change in proportion.

        Raises:
            ValueError: no engine can have these values.
        """
        return tuple(self._one(group, groups[0].block_size) for group in groups)

    def _one(self, group: GroupGeometry, block_size: int) -> GroupGeometry:
        size = block_size if self.block_size is None else self.block_size
        tp = group.parallel.tp if self.tp is None else self.tp
        parallel = replace(group.parallel, tp=tp)
        if group.is_recurrent:  # states have their own layout, with a state per block of any size
            return replace(group, parallel=parallel)
        return replace(
            group,
            layout=self.layout or group.layout,
            block_size=max(1, group.block_size * size // block_size),
            parallel=parallel,
        )


@dataclass(frozen=True, slots=True)
class Saving:
    """A change of one or both engines, and its saving."""

    source: SideChange
    target: SideChange
    segments: int
    """Number of contiguous copies after the change, if both block tables are shuffled."""
    segments_now: int
    """Number of contiguous copies without the change, for the same request."""

    @property
    def factor(self) -> float:
        """Segments without the change, divided by segments after the change."""
        return self.segments_now / self.segments

    @property
    def effort(self) -> tuple[int, int]:
        """Effort of the change, for sorting: small changes before large changes.

        TP affects more than transfers. Not every engine can keep all layers in a tensor, or k and v
        packed. So layouts that are in common use come first.
        """
        sides = self.source, self.target
        return max(map(_depth, sides)), sum(side.num_values for side in sides)


def _depth(side: SideChange) -> int:
    if side.tp is not None or (side.layout is not None and side.layout.is_cross_layer):
        return 2
    return int(side.layout not in (None, Layout.named("NHD"), Layout.named("HND")))


def find_savings(
    source: Sequence[GroupGeometry],
    target: Sequence[GroupGeometry],
    num_tokens: int,
    convert: bool = False,
) -> tuple[Saving, ...]:
    """The changes that pay: each saves more than every other change with no more effort.

    The function tries every named layout and the layouts of both sides, the block size of either
    side for the other, and the TP of either side for the other (unless only a sample of the ranks
    is tried). It also tries the best layouts together with either block size.

    >>> from kvferry.topology import EngineGeometry, ParallelShape
    >>> hnd = EngineGeometry(num_layers=2, num_kv_heads=4, head_size=8, dtype="float32",
    ...                      block_size=16, layout="HND", parallel=ParallelShape())
    >>> nhd = replace(hnd, layout=Layout.named("NHD"))
    >>> best = find_savings([hnd], [nhd], 160)[0]
    >>> str(best.source.layout or best.target.layout), best.factor
    ('KBHND', 64.0)

    Args:
        source: the groups of the source engine.
        target: the groups of the target engine.
        num_tokens: number of tokens of the request.
        convert: see :func:`~kvferry.topology.plan.plan_transfer`.

    Returns:
        The savings, least effort first; empty if no tried change saves a third of the segments.

    Raises:
        ValueError: the geometries can never match.
    """
    num_ranks = target[0].world_size
    sample = range(0, num_ranks, -(-num_ranks // TRIAL_RANKS))

    def count(one: Sequence[GroupGeometry], two: Sequence[GroupGeometry]) -> tuple[int, int]:
        ranks = None if len(sample) == num_ranks else sample
        tokens = min(num_tokens, TRIAL_TOKENS)
        return count_segments(read_parts(one, two, tokens, target_ranks=ranks, convert=convert))

    nbytes, now = count(source, target)

    def tried(changes: Iterable[tuple[SideChange, SideChange]]) -> Iterator[Saving]:
        for one, two in changes:
            try:
                moved, segments = count(one.apply(source), two.apply(target))
            except ValueError:
                continue  # an impossible engine, for example a layout without tokens or heads
            if moved == nbytes:  # otherwise the engines hold other cells, which is no saving
                yield Saving(one, two, segments, now)

    layouts = _worthwhile(tried(_layout_changes(source[0], target[0])))
    blocks = list(_block_changes(source[0], target[0]))
    shapes = _tp_changes(source[0], target[0]) if len(sample) == num_ranks else ()
    others = tried([*blocks, *shapes])
    both = tried(
        (
            replace(saving.source, block_size=one.block_size),
            replace(saving.target, block_size=two.block_size),
        )
        for saving in layouts
        for one, two in blocks
    )
    return tuple(_worthwhile([*layouts, *others, *both]))


def _layout_changes(
    source: GroupGeometry, target: GroupGeometry
) -> Iterator[tuple[SideChange, SideChange]]:
    layouts = [source.layout, target.layout, *map(Layout.named, LAYOUT_NAMES)]
    for layout in dict.fromkeys(layouts):
        yield (
            SideChange(layout=None if layout == source.layout else layout),
            SideChange(layout=None if layout == target.layout else layout),
        )


def _block_changes(
    source: GroupGeometry, target: GroupGeometry
) -> Iterator[tuple[SideChange, SideChange]]:
    if source.block_size != target.block_size:
        yield SideChange(block_size=target.block_size), SideChange()
        yield SideChange(), SideChange(block_size=source.block_size)


def _tp_changes(
    source: GroupGeometry, target: GroupGeometry
) -> Iterator[tuple[SideChange, SideChange]]:
    if source.parallel.tp != target.parallel.tp:
        yield SideChange(tp=target.parallel.tp), SideChange()
        yield SideChange(), SideChange(tp=source.parallel.tp)


def _worthwhile(savings: Iterable[Saving]) -> list[Saving]:
    """Savings that clearly exceed all savings with no more effort; least effort first."""
    kept: list[Saving] = []
    for saving in sorted(savings, key=lambda saving: (*saving.effort, saving.segments)):
        if saving.factor >= WORTH * max((one.factor for one in kept), default=1.0):
            kept.append(saving)
    return kept
