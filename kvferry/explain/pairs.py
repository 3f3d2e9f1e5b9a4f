"""The cost of a request between a pair of engines, for people and for programs."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull.memory import check_device
from kvferry.errors import ConfigError
from kvferry.explain.costs import (
    Balance,
    Memories,
    PairCost,
    balance_over,
    explain_transfer,
    read_parts,
    segment_lengths,
)
from kvferry.explain.savings import TRIAL_RANKS, Saving, SideChange, find_savings
from kvferry.layouts import LAYOUT_NAMES, Layout
from kvferry.layouts.arrays import HOST
from kvferry.topology import GroupGeometry
from kvferry.transports.base import Transport
from kvferry.transports.registry import device_keys
from kvferry.transports.ways import Way, choose_way

_CELLS = ("num_kv_heads", "head_size", "head_size_v", "use_mla", "dtype", "recurrent_state")
"""Properties of a group's cells in the JSON, if the kind of the group has them."""

_LOADS = KVTransferConfig(kv_connector="PullConnector", kv_role="kv_consumer", kv_port=0)
"""The configuration of a decode engine that lends nothing, with which its transports are checked.
"""

_NAMES = {Layout.named(name): name for name in reversed(list(LAYOUT_NAMES))}


@dataclass(frozen=True, slots=True)
class PlannedEngine:
    """An engine of a pair."""

    name: str
    groups: tuple[GroupGeometry, ...]
    engine_id: str = ""
    """Engine id that determines a decode engine's choice among replicas."""
    memory: Memories | None = None
    """Memory of a running engine's cells; ``None`` for dense memory."""
    convert_dtype: bool = False
    """Whether a decode engine reads KV of another dtype even if precision is lost."""

    @property
    def world_size(self) -> int:
        """Number of ranks of the engine."""
        return self.groups[0].world_size


@dataclass(frozen=True, slots=True)
class GroupWay:
    """The way of the cells between two groups, for the layers that both groups have."""

    layers: tuple[int, ...]
    """Layers of the model, ascending."""
    segment_bytes: float
    """Mean length of a segment in bytes, see ``SegmentLength.mean_bytes``."""
    way: Way


@dataclass(frozen=True, slots=True)
class EnginePair:
    """The reads of a decode engine from a prefill engine for a request."""

    prefill: PlannedEngine
    decode: PlannedEngine
    num_tokens: int
    costs: tuple[PairCost, ...]
    """Costs, with an entry per pair of ranks."""
    savings: tuple[Saving, ...] = ()
    ways: Mapping[str, Sequence[GroupWay]] = field(default_factory=dict)
    """Transport → the way of the cells for each pair of groups."""

    @property
    def prefill_balance(self) -> Balance:
        """Bytes that each prefill rank gives."""
        shares = ((cost.source_rank, cost.nbytes) for cost in self.costs)
        return balance_over(shares, self.prefill.world_size)

    @property
    def decode_balance(self) -> Balance:
        """Bytes that each decode rank reads."""
        shares = ((cost.target_rank, cost.nbytes) for cost in self.costs)
        return balance_over(shares, self.decode.world_size)

    @property
    def link_balance(self) -> Balance:
        """Bytes between each pair of ranks with a transfer, in the order of the costs."""
        return Balance(tuple(cost.nbytes for cost in self.costs))


def explain_pair(
    prefill: PlannedEngine,
    decode: PlannedEngine,
    num_tokens: int,
    transports: Iterable[type[Transport]] = (),
    device: str = HOST,
) -> EnginePair:
    """The costs of a request, possible savings, and the way of its cells per transport.

    Args:
        prefill: the source engine.
        decode: the target engine.
        num_tokens: number of tokens of the request.
        transports: transports for which the way is computed.
        device: device of the decode engine's memory, ``cpu`` or ``cuda``.

    Raises:
        ValueError: the two engines can never exchange KV.
        ProtocolError, BoundsError: the memory that an engine described does not fit its groups.
    """
    return EnginePair(
        prefill,
        decode,
        num_tokens,
        _costs(prefill, decode, num_tokens),
        find_savings(prefill.groups, decode.groups, num_tokens, decode.convert_dtype),
        _ways(prefill, decode, num_tokens, transports, device),
    )


def _ways(
    prefill: PlannedEngine,
    decode: PlannedEngine,
    num_tokens: int,
    transports: Iterable[type[Transport]],
    device: str,
) -> dict[str, tuple[GroupWay, ...]]:
    """Computes ``EnginePair.ways``; for large engines, from a sample of the ranks.

    Each transport has the keys with which engines open it by default.
    """
    keys = {} if device == HOST else device_keys(f"{device}:0")
    ranks = range(0, decode.world_size, -(-decode.world_size // TRIAL_RANKS))
    parts = read_parts(
        prefill.groups, decode.groups, num_tokens, decode.engine_id, ranks, decode.convert_dtype
    )
    lengths = segment_lengths(parts, prefill.memory, decode.memory)
    return {
        kind.name: tuple(
            GroupWay(
                found.layers,
                found.mean_bytes,
                _refusal(kind, device)
                or choose_way(
                    kind,
                    device=device,
                    conversion=found.conversion,
                    segment_bytes=found.mean_bytes,
                    source_bytes=found.source_bytes,
                ),
            )
            for found in lengths
        )
        for kind in (each.with_keys(keys.get(each.name, {})) for each in transports)
    }


def _refusal(kind: type[Transport], device: str) -> Way | None:
    """The refusal of a transport by a decode engine whose cache is on ``device``, if any."""
    try:
        check_device(device, _LOADS, {kind.name: kind})
    except ConfigError as error:
        return Way("refused", str(error))
    return None


def map_pairs(
    prefill: Sequence[PlannedEngine], decode: Sequence[PlannedEngine], num_tokens: int
) -> list[EnginePair]:
    """Every pair of engines with its costs, without savings.

    Raises:
        ValueError: two engines can never exchange KV.
    """
    return [
        EnginePair(one, two, num_tokens, _costs(one, two, num_tokens))
        for one in prefill
        for two in decode
    ]


def _costs(prefill: PlannedEngine, decode: PlannedEngine, num_tokens: int) -> tuple[PairCost, ...]:
    return explain_transfer(
        source=prefill.groups,
        target=decode.groups,
        num_tokens=num_tokens,
        target_engine_id=decode.engine_id,
        source_memory=prefill.memory,
        target_memory=decode.memory,
        convert=decode.convert_dtype,
    )


def layout_text(layout: Layout) -> str:
    """The shortest name of a layout.

    >>> layout_text(Layout("KBHND")), layout_text(Layout("BKD"))
    ('HND', 'BKD')
    """
    return _NAMES.get(layout, str(layout))


def change_values(change: SideChange) -> dict[str, str | int]:
    """The changed values of an engine, by the keys of a spec."""
    values: dict[str, str | int] = {}
    if change.layout is not None:
        values["layout"] = layout_text(change.layout)
    if change.block_size is not None:
        values["block"] = change.block_size
    if change.tp is not None:
        values["tp"] = change.tp
    return values


# ---- for programs ------------------------------------------------------------------------------


def pair_as_json(pair: EnginePair) -> dict[str, Any]:
    """A pair as plain data for JSON."""
    return {
        "prefill": pair.prefill.name,
        "decode": pair.decode.name,
        "engines": {
            "prefill": _engine_as_json(pair.prefill),
            "decode": _engine_as_json(pair.decode),
        },
        "ways": {
            name: [
                {
                    "layers": group.layers,
                    "way": str(group.way),
                    "reason": group.way.reason,
                    "segment_bytes": group.segment_bytes,
                }
                for group in groups
            ]
            for name, groups in pair.ways.items()
        },
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
        "balance": {
            "prefill_ranks": _balance_as_json(pair.prefill_balance),
            "decode_ranks": _balance_as_json(pair.decode_balance),
            "links": _balance_as_json(pair.link_balance),
        },
        "savings": [
            {
                "prefill": change_values(saving.source),
                "decode": change_values(saving.target),
                "factor": saving.factor,
            }
            for saving in pair.savings
        ],
    }


def _engine_as_json(engine: PlannedEngine) -> dict[str, Any]:
    parallel = engine.groups[0].parallel
    return {
        "ranks": engine.world_size,
        **asdict(parallel),
        "groups": [
            {
                "layers": tuple(group.model_layers),
                **{cell: group.cells.get(cell) for cell in _CELLS},
                "block_size": group.block_size,
                "layout": layout_text(group.layout),
                "sliding_window": group.sliding_window,
                "attention_chunk_size": group.attention_chunk_size,
            }
            for group in engine.groups
        ],
    }


def _balance_as_json(balance: Balance) -> dict[str, Any]:
    return {"nbytes": balance.nbytes, "peak": balance.peak, "idle": balance.idle}
