"""Who reads what from whom, for people and for programs."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from kvferry.cli.units import bytes_text
from kvferry.config import ClusterConfig
from kvferry.engine.cache_groups import engine_cache
from kvferry.engine.model_config import DecoderConfig
from kvferry.topology import PairCost, explain_transfer, ranges_text


@dataclass(frozen=True, slots=True)
class EnginePair:
    """What one decode engine reads from one prefill engine for a request."""

    prefill: str
    decode: str
    costs: tuple[PairCost, ...]
    """One entry per pair of ranks."""


def engine_pairs(cluster: ClusterConfig, model: DecoderConfig, tokens: int) -> list[EnginePair]:
    """Every pair of a prefill and a decode engine.

    Raises:
        ConfigError: an engine's shape does not fit the model.
    """
    dtype = cluster.model.dtype
    return [
        EnginePair(
            prefill.name,
            decode.name,
            explain_transfer(
                source=engine_cache(prefill, model, dtype).geometries,
                target=engine_cache(decode, model, dtype).geometries,
                num_tokens=tokens,
                target_engine_id=decode.transfer_config().engine_id,
            ),
        )
        for prefill in cluster.prefill
        for decode in cluster.decode
    ]


def as_json(pairs: Sequence[EnginePair], tokens: int) -> dict[str, Any]:
    """Plain data of all pairs."""
    return {
        "tokens": tokens,
        "pairs": [
            {
                "prefill": pair.prefill,
                "decode": pair.decode,
                "transfers": [
                    {
                        "decode_rank": cost.target_rank,
                        "prefill_rank": cost.source_rank,
                        **{
                            key: value
                            for key, value in asdict(cost).items()
                            if key not in ("target_rank", "source_rank")
                        },
                    }
                    for cost in pair.costs
                ],
            }
            for pair in pairs
        ],
    }


def show_pair(pair: EnginePair, tokens: int, console: Console) -> None:
    """Prints the map of one pair of engines."""
    table = Table(
        "decode rank", "reads from", "layers", "KV heads", "bytes", "copies unmerged",
        "merged, blocks in order", "merged, blocks shuffled",
        title=f"{pair.decode} reads {tokens} tokens from {pair.prefill}",
        title_justify="left",
    )  # fmt: skip
    for column in table.columns:
        column.overflow = "fold"
    for column in table.columns[4:]:
        column.justify = "right"
    previous = None
    for cost in pair.costs:
        if previous not in (None, cost.target_rank):
            table.add_section()
        table.add_row(
            f"{pair.decode} {cost.target_rank}" if previous != cost.target_rank else "",
            f"{pair.prefill} {cost.source_rank}",
            ranges_text(cost.layers, most=len(cost.layers)),
            ranges_text(cost.heads, most=len(cost.heads)),
            bytes_text(cost.nbytes),
            f"{cost.rows:,}",
            f"{cost.segments_ordered:,}",
            f"{cost.segments_shuffled:,}",
        )
        previous = cost.target_rank
    table.add_section()
    table.add_row(
        "all", "", "", "",
        bytes_text(sum(cost.nbytes for cost in pair.costs)),
        f"{sum(cost.rows for cost in pair.costs):,}",
        f"{sum(cost.segments_ordered for cost in pair.costs):,}",
        f"{sum(cost.segments_shuffled for cost in pair.costs):,}",
    )  # fmt: skip
    console.print(table)
