"""A plan in words: the engines, their differences, the balance, and cheaper shapes."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from kvferry.explain.costs import Balance, first_moved_token
from kvferry.explain.pairs import EnginePair, PlannedEngine, change_values, layout_text
from kvferry.explain.savings import SideChange
from kvferry.layouts import CellStrides, Layout
from kvferry.topology import EngineGeometry, GroupGeometry, pair_groups, ranges_text


def engine_text(engine: PlannedEngine) -> str:
    """An engine in a single line."""
    group = engine.groups[0]
    axes = [
        f"{axis} {getattr(group.parallel, axis)}"
        for axis in ("tp", "pp", "dcp", "pcp")
        if axis == "tp" or getattr(group.parallel, axis) > 1
    ]
    return (
        f"{engine.name}: {', '.join(axes)}; blocks of {group.block_size} tokens, "
        f"{layout_text(group.layout)}, {group.parts[0].dtype}"
    )


def heads_text(num_kv_heads: int, head_size: int, head_size_v: int | None, use_mla: bool) -> str:
    """The cells of a token in a layer.

    >>> heads_text(8, 192, 128, use_mla=False)
    '8 KV heads of 192 (k) and 128 (v)'
    """
    if use_mla:
        return f"a latent of {head_size} per token"
    text = f"{num_kv_heads} KV head{'s' * (num_kv_heads > 1)} of {head_size}"
    return text if head_size_v in (None, head_size) else f"{text} (k) and {head_size_v} (v)"


def cells_text(group: GroupGeometry) -> str:
    """The cells of a group, in a few words."""
    if not isinstance(group, EngineGeometry):
        return "state"
    return heads_text(group.num_kv_heads, group.head_size, group.head_size_v, group.use_mla)


def kept_text(group: GroupGeometry) -> str:
    """The part of a request that a group keeps."""
    if group.is_recurrent:
        return "the state after the last token"
    if group.sliding_window is not None:
        return f"window of {group.sliding_window}"
    if group.attention_chunk_size is not None:
        return f"chunk of {group.attention_chunk_size}"
    return "all tokens"


# ---- differences, and their treatment on the way -------------------------------------------------


def difference_texts(pair: EnginePair) -> list[str]:
    """A sentence per difference that affects the transfer of a pair; empty for equal engines."""
    prefill, decode = pair.prefill.groups[0], pair.decode.groups[0]
    return [
        *_layouts(prefill, decode),
        *_blocks(prefill, decode),
        *_contexts(prefill, decode),
        *_replicas(pair),
        *_readers(pair, prefill, decode),
        *_stages(pair),
        *_windows(pair),
    ]


def _layouts(prefill: GroupGeometry, decode: GroupGeometry) -> Iterator[str]:
    if prefill.layout == decode.layout:
        return
    names = layout_text(prefill.layout), layout_text(decode.layout)
    if _alike(decode, prefill.layout) and _alike(prefill, decode.layout):
        yield f"layout: {names[0]} and {names[1]} lie alike here, with one head per rank"
    else:
        yield f"layout: {names[0]} becomes {names[1]} on the way"


def _alike(group: GroupGeometry, layout: Layout) -> bool:
    """Whether both layouts have equal strides because every rank has a single head."""
    try:
        other = replace(group, layout=layout)
    except ValueError:
        return False  # the layout cannot hold these cells
    ranks = range(group.parallel.tp)
    return all(
        len(group.heads(rank)) == 1 and _without_head(group, rank) == _without_head(other, rank)
        for rank in ranks
    )


def _without_head(group: GroupGeometry, rank: int) -> dict[str, CellStrides]:
    parts = group.part_strides(rank, num_blocks=2)
    return {part: strides._replace(head=0) for part, strides in parts.items()}


def _blocks(prefill: GroupGeometry, decode: GroupGeometry) -> Iterator[str]:
    one, two = prefill.virtual_block_size, decode.virtual_block_size
    if one == two:
        return
    if one % two == 0:
        meet = f"a prefill block fills {one // two} decode blocks"
    elif two % one == 0:
        meet = f"{two // one} prefill blocks fill a decode block"
    else:
        meet = "copies end where a block of either side ends"
    over = " of all context ranks" * (prefill.block_size != one or decode.block_size != two)
    yield f"block: {one} tokens{over} become {two}; {meet}"


def _contexts(prefill: GroupGeometry, decode: GroupGeometry) -> Iterator[str]:
    texts = []
    for name, group in (("prefill", prefill), ("decode", decode)):
        ranks, turn = group.parallel.num_context_ranks, group.parallel.interleave_size
        several = f"go round over {ranks} {name} ranks, {turn} at a time"
        texts.append(several if ranks > 1 else f"lie together on a {name} rank")
    if max(group.parallel.num_context_ranks for group in (prefill, decode)) > 1:
        yield f"context: tokens {texts[0]}, and {texts[1]}"


def _replicas(pair: EnginePair) -> Iterator[str]:
    """Sentences about replicas, for each number of KV heads in the layers."""
    for side, engine in (("prefill", pair.prefill), ("decode", pair.decode)):
        by_heads: dict[int, list[int]] = {}
        for group in engine.groups:
            if isinstance(group, EngineGeometry):  # states have no heads
                by_heads.setdefault(group.num_kv_heads, []).extend(group.model_layers)
        for num_heads, layers in by_heads.items():
            parallel = engine.groups[0].parallel
            replicas = parallel.tp / num_heads / parallel.dcp
            if replicas <= 1:
                continue
            what = "the latent" if engine.groups[0].cells.get("use_mla") else "each KV head"
            if len(by_heads) > 1:
                what += f" of layers {ranges_text(sorted(layers), most=4)}"
            yield f"tp={parallel.tp}: {what} " + (
                f"lies on {_about(replicas)} prefill ranks; who reads from whom changes with the "
                "layer, so that they share the work"
                if side == "prefill"
                else f"is read by {_about(replicas)} decode ranks, each of which keeps it whole"
            )


def _readers(pair: EnginePair, prefill: GroupGeometry, decode: GroupGeometry) -> Iterator[str]:
    if not isinstance(prefill, EngineGeometry) or prefill.use_mla:
        return
    if prefill.parallel.tp != decode.parallel.tp:
        readers = [sum(cost.target_rank == rank for cost in pair.costs) for rank in _ranks(pair)]
        yield (
            f"tp: {prefill.parallel.tp} becomes {decode.parallel.tp}; a decode rank reads from "
            f"{_span(readers)} prefill rank{'s' * (max(readers) > 1)}"
        )


def _ranks(pair: EnginePair) -> range:
    return range(pair.decode.world_size)


def _about(replicas: float) -> str:
    return f"{replicas:.0f}" if replicas.is_integer() else f"{int(replicas)} or {int(replicas) + 1}"


def _span(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least}" if least == most else f"{least} to {most}"


def _stages(pair: EnginePair) -> Iterator[str]:
    prefill, decode = pair.prefill, pair.decode
    if prefill.groups[0].parallel.pp != decode.groups[0].parallel.pp:
        yield (
            f"pp: layers {_stage_text(prefill)} become {_stage_text(decode)}; two ranks move the "
            "layers that both have"
        )


def _stage_text(engine: PlannedEngine) -> str:
    """The layers of each stage, over all groups."""
    parallel = engine.groups[0].parallel
    per_stage = parallel.pcp * parallel.tp
    return " | ".join(
        ranges_text(sorted(layer for group in engine.groups for layer in group.layers(rank)))
        for rank in range(0, engine.world_size, per_stage)
    )


def _windows(pair: EnginePair) -> Iterator[str]:
    groups = pair.prefill.groups, pair.decode.groups
    counts = tuple(len(side) for side in groups)
    if counts != (1, 1):
        yield (
            f"groups: {counts[0]} on prefill and {counts[1]} on decode; layers meet by their index "
            "in the model"
        )
    windows: dict[int, list[int]] = {}
    recurrent: list[int] = []
    for part in pair_groups(*groups, convert=pair.decode.convert_dtype):
        if groups[0][part.source_group].is_recurrent:
            recurrent += part.layers
            continue
        first = first_moved_token(part, groups[1], pair.num_tokens)
        if first:
            windows.setdefault(pair.num_tokens - first, []).extend(part.layers)
    for tokens, layers in sorted(windows.items()):
        yield (
            f"window: of layers {ranges_text(sorted(layers), most=4)} only the last "
            f"{tokens} tokens move"
        )
    if recurrent:
        yield (
            f"state: of layers {ranges_text(sorted(recurrent), most=4)} the state after the last "
            "token moves, as many bytes for any number of tokens"
        )


# ---- costs and savings ---------------------------------------------------------------------------


def balance_texts(pair: EnginePair) -> list[str]:
    """The distribution of a request's bytes over the ranks of each side and over the links."""
    return [
        f"prefill ranks: {_balance_text(pair.prefill_balance)}",
        f"decode ranks: {_balance_text(pair.decode_balance)}",
        f"links ({len(pair.costs)}): {_balance_text(pair.link_balance)}",
    ]


def _balance_text(balance: Balance) -> str:
    least, most = min(balance.nbytes, default=0), max(balance.nbytes, default=0)
    if least == most:
        return f"{bytes_text(most)} each"
    idle = f"; idle: {ranges_text(balance.idle)}" if balance.idle else ""
    return (
        f"{bytes_text(least)} to {bytes_text(most)}, the busiest {balance.peak:.2f} times the mean"
        f"{idle}"
    )


def saving_texts(pair: EnginePair) -> list[str]:
    """A sentence per change that saves segments; empty if no tried change does."""
    return [
        f"{_changes_text(saving.source, saving.target)}: {_factor_text(saving.factor)} times fewer "
        "segments"
        for saving in pair.savings
    ]


def _changes_text(prefill: SideChange, decode: SideChange) -> str:
    """The values to write for each side; a value for both sides is named once."""
    values = {"prefill": change_values(prefill), "decode": change_values(decode)}
    shared = dict(values["prefill"].items() & values["decode"].items())
    sides = {"both sides": shared} | {
        side: {key: value for key, value in found.items() if key not in shared}
        for side, found in values.items()
    }
    return " and ".join(
        f"{', '.join(f'{key}={value}' for key, value in sorted(found.items()))} on {side}"
        for side, found in sides.items()
        if found
    )


def _factor_text(factor: float) -> str:
    return f"{factor:.0f}" if factor >= 10 or factor.is_integer() else f"{factor:.1f}"


# ---- numbers -------------------------------------------------------------------------------------


def bytes_text(count: float) -> str:
    """A number of bytes in words.

    >>> bytes_text(0), bytes_text(2048), bytes_text(3_500_000)
    ('0 B', '2.0 KiB', '3.3 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} TiB"


def layers_text(layers: Sequence[int]) -> str:
    """Ascending layers in words; layers at regular steps (of a replica) are shortened.

    >>> layers_text([0, 1, 2, 5]), layers_text([1, 3, 5, 7, 9])
    ('0-2, 5', '1, 3 ... 9')
    """
    steps = {two - one for one, two in pairwise(layers)}
    if len(steps) == 1 and steps != {1} and len(layers) > 3:
        return f"{layers[0]}, {layers[1]} ... {layers[-1]}"
    return ranges_text(layers)
