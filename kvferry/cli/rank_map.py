"""Shows pairs of engines to people: who reads what from whom, and what that costs."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.cache.cache_shape import STATE_BLOCK_SIZE
from kvferry.cli.differences import difference_texts
from kvferry.cli.explained import EnginePair, PlannedEngine, change_values, layout_text
from kvferry.cli.strategies import show_strategies
from kvferry.cli.units import bytes_text, layers_text
from kvferry.topology import EngineGeometry, ranges_text
from kvferry.topology.advice import SideChange
from kvferry.topology.explain import Balance

MAX_ROWS = 64
"""Pairs of ranks that a table lists; ``--json`` has them all."""


def show_explained(pair: EnginePair, console: Console) -> None:
    """Prints everything that is known of a pair."""
    for role, engine in (("Prefill", pair.prefill), ("Decode", pair.decode)):
        _say(console, role, engine_text(engine))
    for engine in (pair.prefill, pair.decode):
        if len(engine.groups) > 1:
            console.print(_group_table(engine))
    show_pair(pair, console)
    _say_list(console, "What differs", difference_texts(pair))
    _say_list(console, "Balance", _balance_texts(pair))
    _say_list(console, "Staging", [_staging_text(pair)])
    _say_list(console, "Cheaper", _saving_texts(pair) or ["nothing that was tried"])
    show_strategies(pair.strategies, console)


def engine_text(engine: PlannedEngine) -> str:
    """An engine in one line."""
    group = engine.groups[0]
    axes = [
        f"{axis} {getattr(group.parallel, axis)}"
        for axis in ("tp", "pp", "dcp", "pcp")
        if axis == "tp" or getattr(group.parallel, axis) > 1
    ]
    return (
        f"{engine.name}: {', '.join(axes)}; blocks of {group.block_size} tokens, "
        f"{layout_text(group.layout)}, {group.dtype}"
    )


def kept_text(group: EngineGeometry) -> str:
    """What of a request a group keeps."""
    if group.states:
        return "the state after the last token"
    if group.sliding_window is not None:
        return f"window of {group.sliding_window}"
    if group.attention_chunk_size is not None:
        return f"chunk of {group.attention_chunk_size}"
    return "all tokens"


def show_pair(pair: EnginePair, console: Console) -> None:
    """Prints the map of one pair of engines."""
    prefill, decode = pair.prefill.name, pair.decode.name
    table = Table(
        "decode rank", "reads from", "layers", "KV heads", "bytes", "copies unmerged",
        "merged, blocks in order", "merged, blocks shuffled",
        title=f"{decode} reads {pair.num_tokens} tokens from {prefill}",
        title_justify="left",
    )  # fmt: skip
    for column in table.columns:
        column.overflow = "fold"
    for column in table.columns[4:]:
        column.justify = "right"
    previous = None
    for cost in pair.costs[:MAX_ROWS]:
        if previous not in (None, cost.target_rank):
            table.add_section()
        table.add_row(
            f"{decode} {cost.target_rank}" if previous != cost.target_rank else "",
            f"{prefill} {cost.source_rank}",
            layers_text(cost.layers),
            ranges_text(cost.heads),
            bytes_text(cost.nbytes),
            f"{cost.rows:,}",
            f"{cost.segments_ordered:,}",
            f"{cost.segments_shuffled:,}",
        )
        previous = cost.target_rank
    if len(pair.costs) > MAX_ROWS:
        table.add_section()
        table.add_row(f"{len(pair.costs) - MAX_ROWS} more", "see --json")
    table.add_section()
    table.add_row(
        "all", "", "", "",
        bytes_text(sum(cost.nbytes for cost in pair.costs)),
        f"{sum(cost.rows for cost in pair.costs):,}",
        f"{sum(cost.segments_ordered for cost in pair.costs):,}",
        f"{sum(cost.segments_shuffled for cost in pair.costs):,}",
    )  # fmt: skip
    console.print(table)


def _group_table(engine: PlannedEngine) -> Table:
    table = Table(
        "group", "layers", "keeps", "block", title=f"Groups of {engine.name}", title_justify="left"
    )
    for index, group in enumerate(engine.groups):
        table.add_row(
            str(index),
            ranges_text(group.model_layers),
            kept_text(group),
            str(group.block_size) if group.block_size < STATE_BLOCK_SIZE else "one per request",
        )
    return table


def _balance_texts(pair: EnginePair) -> list[str]:
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


def _staging_text(pair: EnginePair) -> str:
    most = max(pair.staging)
    if not most:
        return "none; tokens that share a block on both sides are one run on both sides"
    return (
        f"up to {bytes_text(most)} per request and decode rank on a wire that moves contiguous "
        "runs; none where the mover addresses both memories"
    )


def _saving_texts(pair: EnginePair) -> list[str]:
    return [
        f"{_changes_text(saving.source, saving.target)}: {_factor_text(saving.factor)} times fewer "
        "segments"
        for saving in pair.savings
    ]


def _changes_text(prefill: SideChange, decode: SideChange) -> str:
    """What to write, and where; a value that both get is said once."""
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


def _say_list(console: Console, heading: str, texts: Sequence[str]) -> None:
    for number, text in enumerate(texts):
        _say(console, heading if not number else "", text)


def _say(console: Console, heading: str, text: str) -> None:
    # As plain text: names may look like markup.
    console.print(Text.assemble((f"{heading:<14}", "bold"), text), soft_wrap=True)


def show_all(pairs: Iterable[EnginePair], console: Console) -> None:
    """Prints pairs one after the other."""
    for number, pair in enumerate(pairs):
        if number:
            console.print()
        show_explained(pair, console)
