"""Prints pairs of engines: which rank reads which cells from which rank, and the cost."""

from collections.abc import Iterable, Sequence

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvferry.cache.cache_shape import STATE_BLOCK_SIZE
from kvferry.errors import PluginError
from kvferry.explain.pairs import EnginePair, GroupWay, PlannedEngine
from kvferry.explain.sentences import (
    balance_texts,
    bytes_text,
    cells_text,
    difference_texts,
    engine_text,
    kept_text,
    layers_text,
    saving_texts,
)
from kvferry.topology import ranges_text
from kvferry.transports.base import Transport
from kvferry.transports.registry import transport_class
from kvferry.transports.ways import Way

MAX_ROWS = 64
"""Number of rank pairs that a table lists at most; ``--json`` lists all."""


def show_explained(pair: EnginePair, console: Console) -> None:
    """Prints all known facts about a pair."""
    for role, engine in (("Prefill", pair.prefill), ("Decode", pair.decode)):
        _say(console, role, engine_text(engine))
    for engine in (pair.prefill, pair.decode):
        if len(engine.groups) > 1:
            console.print(_group_table(engine))
    show_pair(pair, console)
    _say_list(console, "What differs", difference_texts(pair))
    _say_list(console, "Balance", balance_texts(pair))
    _say_list(console, "Cheaper", saving_texts(pair) or ["nothing that was tried"])
    if pair.ways:
        console.print(_ways_table(pair))


def load_transports(names: Iterable[str]) -> list[type[Transport]]:
    """Transport classes of some names; standard error names the transports that cannot be
    loaded.
    """
    found = []
    for name in names:
        try:
            found.append(transport_class(name))
        except PluginError as error:
            typer.echo(f"{name}: its way is not told: {error}", err=True)
    return found


def show_pair(pair: EnginePair, console: Console) -> None:
    """Prints the map of a pair of engines."""
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
        "group", "layers", "cells", "keeps", "block",
        title=f"Groups of {engine.name}",
        title_justify="left",
    )  # fmt: skip
    for index, group in enumerate(engine.groups):
        table.add_row(
            str(index),
            ranges_text(group.model_layers),
            cells_text(group),
            kept_text(group),
            str(group.block_size) if group.block_size < STATE_BLOCK_SIZE else "one per request",
        )
    return table


def _ways_table(pair: EnginePair) -> Table:
    """A row per transport, or several rows if layers come by different ways."""
    table = Table(
        "transport", "layers", "way", "mean segment", "why",
        title="How cells come to the decode engine's memory",
        title_justify="left",
    )  # fmt: skip
    for name, groups in pair.ways.items():
        alike: dict[Way, list[GroupWay]] = {}
        for group in groups:
            alike.setdefault(group.way, []).append(group)
        for way, those in alike.items():
            layers = sorted(layer for group in those for layer in group.layers)
            shortest = min(group.segment_bytes for group in those)
            table.add_row(name, ranges_text(layers), str(way), bytes_text(shortest), way.reason)
    return table


def _say_list(console: Console, heading: str, texts: Sequence[str]) -> None:
    for number, text in enumerate(texts):
        _say(console, heading if not number else "", text)


def _say(console: Console, heading: str, text: str) -> None:
    # As plain text: names may look like markup.
    console.print(Text.assemble((f"{heading:<14}", "bold"), text), soft_wrap=True)
