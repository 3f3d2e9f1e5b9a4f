"""Pairs of groups of two engines that hold the same layers; engines may group layers differently.

The layers of a model lie in groups, each with a block table. One engine may keep windows in
separate groups while the other engine keeps all tokens in one group. The order and the number of
groups are private to each engine. Layers match by their index in the model. Each pair of groups
that share layers moves by its own plan.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvferry.layouts.convert import is_convertible, is_lossless
from kvferry.topology.group import GroupGeometry
from kvferry.topology.sharding import ranges_text
from kvferry.topology.windows import first_kept_token

_SAME_MODEL = "serve the same model on both"
#: Property that must be the same on both sides → what to do if it differs.
_REMEDIES = {
    "num_kv_heads": _SAME_MODEL,
    "head_size": _SAME_MODEL,
    "head_size_v": _SAME_MODEL,
    "dtype": "give both the same KV cache dtype, or allow a conversion that rounds",
    "use_mla": "switch MLA on or off on both",
    "scale_dtype": "give both the same quantisation of the KV cache, with scales of one dtype",
    "recurrent_state": f"{_SAME_MODEL}, with the same dtypes of states, on the same kind of device",
    "opaque_blocks": "give both the same block size and kind of CPU, or a dtype that is not packed",
    "kept tokens": _SAME_MODEL,
}


@dataclass(frozen=True, slots=True)
class GroupPair:
    """The layers that a group of a target reads from a group of a source."""

    source_group: int
    """Index of the group among the source's groups, and of its block table."""
    target_group: int
    """Index of the group among the target's groups, and of its block table."""
    layers: tuple[int, ...]
    """Indices in the model of the layers that both groups have, ascending; never empty."""
    is_partial: bool = False
    """Whether the source keeps only a window while the target keeps all tokens. After such a load
    the target's blocks lack the tokens below the window, so no other request may hit these blocks.
    """
    sliding_window: int | None = None
    """Number of tokens of a request that both sides keep, if either side keeps a window."""
    attention_chunk_size: int | None = None
    """Number of tokens per chunk, if either side keeps chunks."""

    def first_kept_token(self, num_tokens: int) -> int:
        """The first of a request's ``num_tokens`` tokens that the source has and the target wants.

        >>> GroupPair(0, 1, layers=(0, 2), sliding_window=4).first_kept_token(10)
        7
        """
        return first_kept_token(
            num_tokens,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )


def pair_groups(
    sources: Sequence[GroupGeometry],
    targets: Sequence[GroupGeometry],
    *,
    convert: bool = False,
) -> tuple[GroupPair, ...]:
    """The pairs of groups that share layers; every layer of the targets is in exactly one pair.

    >>> from dataclasses import replace
    >>> from kvferry.topology import EngineGeometry, ParallelShape
    >>> whole = EngineGeometry(num_layers=4, num_kv_heads=1, head_size=4, dtype="float32",
    ...                        block_size=2, layout="NHD", parallel=ParallelShape())
    >>> windows = replace(whole, num_layers=2, layer_indices=(0, 2), sliding_window=4)
    >>> rest = replace(whole, num_layers=2, layer_indices=(1, 3))
    >>> for pair in pair_groups([whole], [windows, rest]):
    ...     print(pair.source_group, pair.target_group, pair.layers, pair.is_partial)
    0 0 (0, 2) False
    0 1 (1, 3) False
    >>> [pair.is_partial for pair in pair_groups([windows, rest], [whole])]
    [True, False]

    Args:
        sources: the groups of the source engine.
        targets: the groups of the target engine.
        convert: see :func:`~kvferry.topology.plan.plan_transfer`.

    Returns:
        The pairs by target group, then by source group.

    Raises:
        ValueError: the groups can never match; the message lists every mismatch.
    """
    mismatches = group_mismatches(sources, targets, convert=convert)
    if mismatches:
        raise ValueError("these groups cannot exchange KV: " + "; ".join(mismatches))
    return tuple(
        _pair(sources, targets, source_group, target_group, layers)
        for (target_group, source_group), layers in sorted(_shared(sources, targets).items())
    )


def group_mismatches(
    sources: Sequence[GroupGeometry],
    targets: Sequence[GroupGeometry],
    *,
    names: tuple[str, str] = ("source", "target"),
    convert: bool = False,
) -> list[str]:
    """The reasons why two engines' groups can never exchange KV, a sentence per difference.

    Number and order of groups, parallel shapes, block sizes and layouts may differ freely. One side
    may keep a window while the other side keeps all tokens.

    >>> from dataclasses import replace
    >>> from kvferry.topology import EngineGeometry, ParallelShape
    >>> one = EngineGeometry(num_layers=2, num_kv_heads=1, head_size=4, dtype="float32",
    ...                      block_size=2, layout="NHD", parallel=ParallelShape())
    >>> group_mismatches([one], [replace(one, head_size_v=2, block_size=3)])
    ['head_size_v of layers 0-1: source has 4, target has 2; serve the same model on both']

    Args:
        sources: the groups of the source engine.
        targets: the groups of the target engine. The result is symmetric, except for dtypes
            that can be converted without loss in only one direction.
        names: names of the two engines in the messages.
        convert: see :func:`~kvferry.topology.plan.plan_transfer`.

    Returns:
        The sentences; empty if the engines fit.
    """
    return [
        *_repeats(sources, names[0]),
        *_repeats(targets, names[1]),
        *_differing_layers(sources, targets, names),
        *(
            f"{what} of layers {ranges_text(sorted(layers))}: {names[0]} has {one}, {names[1]} "
            f"has {two}; {_REMEDIES[what]}"
            for (what, one, two), layers in _differing_values(sources, targets, convert).items()
        ),
    ]


def cell_differences(
    source: GroupGeometry, target: GroupGeometry, *, convert: bool = False
) -> Iterator[tuple[str, object, object]]:
    """The differences between the cells of two geometries: field, source's value, target's value.

    Layers, parallel shapes, block sizes, layouts and kept tokens may differ freely. Dtypes may
    differ if the target's dtype holds every value of the source's dtype; with ``convert``, any
    convertible dtypes may differ; with scales, dtypes must be equal.

    >>> from dataclasses import replace
    >>> from kvferry.topology import EngineGeometry, ParallelShape
    >>> one = EngineGeometry(num_layers=2, num_kv_heads=1, head_size=4, dtype="float32",
    ...                      block_size=2, layout="NHD", parallel=ParallelShape())
    >>> list(cell_differences(one, replace(one, dtype="bfloat16", block_size=3)))
    [('dtype', 'float32', 'bfloat16')]
    >>> list(cell_differences(replace(one, dtype="bfloat16"), one))
    []
    """
    ours, theirs = source.cells, target.cells
    for field in ours:
        if field not in theirs or ours[field] == theirs[field]:
            continue  # groups of different kinds differ in the names that both have
        if field != "dtype" or not _may_convert(ours, theirs, convert):
            yield field, ours[field], theirs[field]


def _may_convert(ours: Mapping[str, object], theirs: Mapping[str, object], convert: bool) -> bool:
    if ours["scale_dtype"] is not None or theirs["scale_dtype"] is not None:
        return False  # scales belong to the exact codes of their cells
    allowed = is_convertible if convert else is_lossless
    return allowed(str(ours["dtype"]), str(theirs["dtype"]))


def repeated_layers(groups: Sequence[GroupGeometry]) -> tuple[int, ...]:
    """Layers of the model in several groups of an engine, ascending."""
    seen: set[int] = set()
    repeated: set[int] = set()
    for group in groups:
        repeated |= seen.intersection(group.model_layers)
        seen.update(group.model_layers)
    return tuple(sorted(repeated))


def _pair(
    sources: Sequence[GroupGeometry],
    targets: Sequence[GroupGeometry],
    source_group: int,
    target_group: int,
    layers: Sequence[int],
) -> GroupPair:
    source, target = sources[source_group], targets[target_group]
    whole = _kept(target) is None
    narrower = source if whole else target
    return GroupPair(
        source_group,
        target_group,
        tuple(layers),
        is_partial=whole and _kept(source) is not None,
        sliding_window=narrower.sliding_window,
        attention_chunk_size=narrower.attention_chunk_size,
    )


def _shared(
    sources: Sequence[GroupGeometry], targets: Sequence[GroupGeometry]
) -> dict[tuple[int, int], list[int]]:
    """(target group, source group) → the layers that both groups have, ascending."""
    group_of = {layer: index for index, group in enumerate(sources) for layer in group.model_layers}
    shared: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, group in enumerate(targets):
        for layer in group.model_layers:
            if layer in group_of:
                shared[index, group_of[layer]].append(layer)
    return shared


def _repeats(groups: Sequence[GroupGeometry], name: str) -> Iterator[str]:
    if repeated := repeated_layers(groups):
        yield (
            f"layers: {name} has {ranges_text(repeated)} in several groups; put each layer into one"
        )


def _differing_layers(
    sources: Sequence[GroupGeometry], targets: Sequence[GroupGeometry], names: tuple[str, str]
) -> Iterator[str]:
    ours, theirs = (
        {layer for group in groups for layer in group.model_layers} for groups in (sources, targets)
    )
    if ours != theirs:
        yield (
            f"layers: {names[0]} has {ranges_text(sorted(ours))}, {names[1]} has "
            f"{ranges_text(sorted(theirs))}; let the groups of both cover the same layers"
        )


def _differing_values(
    sources: Sequence[GroupGeometry], targets: Sequence[GroupGeometry], convert: bool
) -> dict[tuple[str, object, object], list[int]]:
    """Difference with both values → the layers that differ, from all pairs of groups."""
    found: dict[tuple[str, object, object], list[int]] = defaultdict(list)
    for (target_group, source_group), layers in sorted(_shared(sources, targets).items()):
        source, target = sources[source_group], targets[target_group]
        for difference in cell_differences(source, target, convert=convert):
            found[difference] += layers
        kept = _kept(source), _kept(target)
        if None not in kept and kept[0] != kept[1]:
            found["kept tokens", *kept] += layers
    return found


def _kept(group: GroupGeometry) -> str | None:
    """The limit of the tokens that a group keeps; ``None`` if the group keeps all tokens."""
    if group.sliding_window is not None:
        return f"sliding_window {group.sliding_window}"
    if group.attention_chunk_size is not None:
        return f"attention_chunk_size {group.attention_chunk_size}"
    return None
