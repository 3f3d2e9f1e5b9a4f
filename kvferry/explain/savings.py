"""What would make a transfer cheaper: other shapes are tried, and what helps is kept."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from kvferry.explain.costs import count_segments, read_parts
from kvferry.layouts.layout import LAYOUT_NAMES, Layout
from kvferry.topology.group import GroupGeometry

WORTH = 1.5
"""A change is named from this many times fewer segments on."""

TRIAL_TOKENS = 4096
"""Tokens of the request that is tried at most: counts grow with the tokens, ratios hardly do."""

TRIAL_RANKS = 64
"""Target ranks that are tried at most; of larger engines as many, evenly spaced."""


@dataclass(frozen=True, slots=True)
class SideChange:
    """What to write for one engine; ``None`` leaves a value as it is."""

    layout: Layout | None = None
    block_size: int | None = None
    tp: int | None = None

    @property
    def num_values(self) -> int:
        """Values that change."""
        return sum(value is not None for value in (self.layout, self.block_size, self.tp))

    def apply(self, groups: Sequence[GroupGeometry]) -> tuple[GroupGeometry, ...]:
        """The engine's groups after the change; its block sizes change in proportion.

        Raises:
            ValueError: an engine cannot be made so.
        """
        return tuple(self._one(group, groups[0].block_size) for group in groups)

    def _one(self, group: GroupGeometry, block_size: int) -> GroupGeometry:
        size = block_size if self.block_size is None else self.block_size
        tp = group.parallel.tp if self.tp is None else self.tp
        parallel = replace(group.parallel, tp=tp)
        if group.is_recurrent:  # they lie in their own orders, one to a block of any size
            return replace(group, parallel=parallel)
        return replace(
            group,
            layout=self.layout or group.layout,
            block_size=max(1, group.block_size * size // block_size),
            parallel=parallel,
        )


@dataclass(frozen=True, slots=True)
class Saving:
    """A change of one engine or of both, and what it saves."""

    source: SideChange
    target: SideChange
    segments: int
    """Contiguous copies after the change, both block tables shuffled."""
    segments_now: int
    """The same as it is, for the same request."""

    @property
    def factor(self) -> float:
        """How many times fewer segments."""
        return self.segments_now / self.segments

    @property
    def effort(self) -> tuple[int, int]:
        """What is to be changed, small before large.

        TP decides more than transfers, and not every engine can keep all layers in one tensor, or k
        and v packed: what people run anyway comes first.
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
) -> tuple[Saving, ...]:
    """The changes that pay: each saves more than every other one that is no more work.

    Tried are every layout with a name and those in use on both sides, either side's block size and
    (unless only a sample of the ranks is tried) TP on both sides, and the best layouts together
    with either block size.

    >>> from kvferry.topology import EngineGeometry, ParallelShape
    >>> hnd = EngineGeometry(num_layers=2, num_kv_heads=4, head_size=8, dtype="float32",
    ...                      block_size=16, layout="HND", parallel=ParallelShape())
    >>> nhd = replace(hnd, layout=Layout.named("NHD"))
    >>> best = find_savings([hnd], [nhd], 160)[0]
    >>> str(best.source.layout or best.target.layout), best.factor
    ('KBHND', 64.0)

    Args:
        source: the groups of the engine that is read from.
        target: the groups of the engine that reads.
        num_tokens: tokens of the request.

    Returns:
        The least work first. Empty where nothing tried saves a third of the segments.

    Raises:
        ValueError: the geometries can never match.
    """
    num_ranks = target[0].world_size
    sample = range(0, num_ranks, -(-num_ranks // TRIAL_RANKS))

    def count(one: Sequence[GroupGeometry], two: Sequence[GroupGeometry]) -> tuple[int, int]:
        ranks = None if len(sample) == num_ranks else sample
        tokens = min(num_tokens, TRIAL_TOKENS)
        return count_segments(read_parts(one, two, tokens, target_ranks=ranks))

    nbytes, now = count(source, target)

    def tried(changes: Iterable[tuple[SideChange, SideChange]]) -> Iterator[Saving]:
        for one, two in changes:
            try:
                moved, segments = count(one.apply(source), two.apply(target))
            except ValueError:
                continue  # no such engine: a layout without tokens or heads, say
            if moved == nbytes:  # else the engines hold other cells, which is no saving
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
    """Those that save clearly more than any that is no more work, the least work first."""
    kept: list[Saving] = []
    for saving in sorted(savings, key=lambda saving: (*saving.effort, saving.segments)):
        if saving.factor >= WORTH * max((one.factor for one in kept), default=1.0):
            kept.append(saving)
    return kept
