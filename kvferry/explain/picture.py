"""Draws plans: each rank as a map of the model's layers and heads, and the reads between ranks.

Region map of a pair, in pixels::

    title, the two engines
    +-----------+-----------+                     +-----------+-----------+
    | rank text | rank map  |~~~~~~ ribbons ~~~~~~| rank map  | rank text |   one row per rank
    +-----------+-----------+                     +-----------+-----------+
    the blocks of both sides along the first tokens; how to read it; groups
"""

import colorsys
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvferry.errors import ConfigError
from kvferry.explain.costs import read_parts
from kvferry.explain.models import ModelInfo
from kvferry.explain.pairs import EnginePair, PlannedEngine, layout_text
from kvferry.explain.sentences import bytes_text, engine_text, kept_text, layers_text
from kvferry.explain.svg import HATCHED, Canvas
from kvferry.topology import GroupGeometry, ranges_text
from kvferry.topology.sharding import joined_ranges

MAX_RANKS = 64
"""Maximum number of ranks of an engine in a picture; more ranks would be too small to see."""

WIDTH = 1180.0
MARGIN = 24.0
TEXT_WIDTH = 190.0
MAP_WIDTH = 170.0
GAP = 14.0
"""Pixels between two neighbouring ranks."""

_GOLDEN_RATIO = (math.sqrt(5) - 1) / 2

_DIM_WORDS = {"L": "layer", "K": "k/v", "N": "token", "H": "head", "D": "element", "C": "k+v"}


@dataclass(frozen=True, slots=True)
class _Frame:
    """Place of a rank's map."""

    x: float
    y: float
    height: float

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class _Grid:
    """The axes that all maps of a pair share."""

    num_layers: int
    num_heads: int

    def paint(
        self, canvas: Canvas, frame: _Frame, layers: Sequence[int], heads: range, color: str,
        opacity: float = 1.0, tip: str = "",
    ) -> None:  # fmt: skip
        """Fills neighbouring layers of some heads."""
        row, column = frame.height / self.num_layers, MAP_WIDTH / self.num_heads
        canvas.rect(
            frame.x + heads.start * column,
            frame.y + layers[0] * row,
            len(heads) * column,
            len(layers) * row,
            color,
            opacity=opacity,
            tip=tip,
        )


def check_drawable(engines: Sequence[PlannedEngine]) -> None:
    """Refuses engines that no picture can show, before any computation.

    Raises:
        ConfigError: an engine has too many ranks.
    """
    for engine in engines:
        if engine.world_size > MAX_RANKS:
            raise ConfigError(
                f"--picture: {engine.name} has {engine.world_size} ranks, at most {MAX_RANKS} are "
                "drawn; leave the option out, or plan one replica of a part"
            )


def draw_pairs(pairs: Sequence[EnginePair], model: ModelInfo) -> str:
    """An SVG document with pairs of engines, from top to bottom."""
    canvas, y = Canvas(), MARGIN
    for pair in pairs:
        y = _draw_pair(canvas, pair, model, y) + 2 * MARGIN
    names = ", ".join(f"{pair.decode.name} from {pair.prefill.name}" for pair in pairs)
    return canvas.document(WIDTH, y, f"KV transfers of {model.name}: {names}")


def _draw_pair(canvas: Canvas, pair: EnginePair, model: ModelInfo, y: float) -> float:
    """Draws a pair from ``y`` downwards and returns the lower end."""
    right = WIDTH - MARGIN
    canvas.text(
        MARGIN,
        y + 16,
        f"{pair.decode.name} reads {pair.num_tokens:,} tokens of {model.name} from "
        f"{pair.prefill.name}: {bytes_text(sum(cost.nbytes for cost in pair.costs))}",
        size=17,
        bold=True,
    )
    canvas.text(MARGIN, y + 44, engine_text(pair.prefill), bold=True)
    canvas.text(right, y + 44, engine_text(pair.decode), bold=True, anchor="end")
    most = max(heads.num_kv_heads for heads in model.shape.layers_by_heads())
    grid = _Grid(len(model.shape.layers), most)
    givers, takers, y = _frames(pair, y + 78)
    _draw_axes(canvas, grid, givers[0], takers[0])
    _draw_ribbons(canvas, pair, givers, takers)
    _draw_maps(canvas, pair, grid, givers, takers)
    _draw_rank_texts(canvas, pair, givers, takers)
    y = _draw_blocks(canvas, pair, y + 24)
    return _draw_notes(canvas, pair, y + 10)


# ---- places ------------------------------------------------------------------------------------


def _frames(pair: EnginePair, top: float) -> tuple[list[_Frame], list[_Frame], float]:
    """The maps of the prefill ranks and of the decode ranks, and the end of the lower column."""
    most = max(pair.prefill.world_size, pair.decode.world_size)
    height = max(26.0, min(96.0, 900.0 / most))
    total = most * (height + GAP) - GAP
    left = MARGIN + TEXT_WIDTH
    columns = []
    for x, engine in ((left, pair.prefill), (WIDTH - left - MAP_WIDTH, pair.decode)):
        pitch = (total + GAP) / engine.world_size
        first = top + (pitch - GAP - height) / 2
        columns.append(
            [_Frame(x, first + rank * pitch, height) for rank in range(engine.world_size)]
        )
    return columns[0], columns[1], top + total


def _color(group: GroupGeometry, rank: int) -> str:
    """The colour of a prefill rank: hue by TP rank, lightness by stage."""
    place, shape = group.rank_coordinates(rank), group.parallel
    stage = place.pp * shape.pcp + place.pcp
    lightness = 0.42 + 0.28 * stage / max(shape.pp * shape.pcp - 1, 1)
    hue = place.tp * _GOLDEN_RATIO % 1.0  # all hues differ, and neighbours differ most
    channels = colorsys.hls_to_rgb(hue, lightness, 0.62)
    return "#" + "".join(f"{round(channel * 255):02x}" for channel in channels)


# ---- cells that move ---------------------------------------------------------------------------


class _Cells(NamedTuple):
    """Cells that a decode rank reads from a prefill rank, equal for neighbouring layers."""

    decode_rank: int
    prefill_rank: int
    heads: range
    layers: range
    is_windowed: bool
    """Whether only the last tokens move."""


def _cells(pair: EnginePair) -> Iterator[_Cells]:
    prefill, decode = pair.prefill, pair.decode
    found: dict[tuple[int, int, range, bool], list[int]] = {}
    for part in read_parts(
        prefill.groups,
        decode.groups,
        pair.num_tokens,
        decode.engine_id,
        convert=decode.convert_dtype,
    ):
        if part.plan.source.is_recurrent:
            continue
        for piece in part.plan.pieces:
            key = part.plan.target_rank, piece.source_rank, piece.heads, part.first_token > 0
            found.setdefault(key, []).append(piece.layer)
    for (decode_rank, prefill_rank, heads, is_windowed), layers in found.items():
        for neighbours in joined_ranges(sorted(layers)):
            yield _Cells(decode_rank, prefill_rank, heads, neighbours, is_windowed)


# ---- painting ----------------------------------------------------------------------------------


def _draw_axes(canvas: Canvas, grid: _Grid, giver: _Frame, taker: _Frame) -> None:
    last = grid.num_heads - 1
    heads = f"KV heads 0 to {last} →" if last else "one head"
    text = f"{heads}, layers 0 to {grid.num_layers - 1} ↓"
    for frame in (giver, taker):
        canvas.text(frame.x, frame.y - 6, text, size=10, color="#666666")


def _draw_ribbons(
    canvas: Canvas, pair: EnginePair, givers: list[_Frame], takers: list[_Frame]
) -> None:
    most = max((*pair.prefill_balance.nbytes, *pair.decode_balance.nbytes, 1))
    scale = givers[0].height / most
    # Bands are sorted by their other end, so that few bands cross.
    ends = {}
    for frames, side, other in ((givers, 0, 1), (takers, 1, 0)):
        total = (pair.prefill_balance, pair.decode_balance)[side].nbytes
        below = [
            frame.middle - nbytes * scale / 2 for frame, nbytes in zip(frames, total, strict=True)
        ]
        for cost in sorted(pair.costs, key=lambda c: (c.source_rank, c.target_rank)[other]):
            rank = (cost.source_rank, cost.target_rank)[side]
            ends[side, cost] = below[rank] + cost.nbytes * scale / 2
            below[rank] += cost.nbytes * scale
    left, right = givers[0].x + MAP_WIDTH, takers[0].x
    for cost in pair.costs:
        thickness = max(cost.nbytes * scale, 0.75)
        text = f"layers {layers_text(cost.layers)}, heads {ranges_text(cost.heads)}"
        canvas.ribbon(
            (left, ends[0, cost]),
            (right, ends[1, cost]),
            thickness,
            _color(pair.prefill.groups[0], cost.source_rank),
            tip=f"decode rank {cost.target_rank} reads {text} from prefill rank "
            f"{cost.source_rank}: {bytes_text(cost.nbytes)}",
        )
        if thickness >= 8:
            size = min(10.0, thickness)
            label = f"from {cost.source_rank}"
            if thickness > size:  # else, the label of the reading rank has to suffice
                label += f": {bytes_text(cost.nbytes)}"
            canvas.text(right - 6, ends[1, cost] + 0.36 * size, label, size=size, anchor="end")


def _draw_maps(
    canvas: Canvas, pair: EnginePair, grid: _Grid, givers: list[_Frame], takers: list[_Frame]
) -> None:
    for frame in (*givers, *takers):
        canvas.rect(frame.x, frame.y, MAP_WIDTH, frame.height, "#eeeeee")
    for engine, frames in ((pair.prefill, givers), (pair.decode, takers)):
        for rank, frame in enumerate(frames):
            for layers, heads in _held(engine, rank):  # also layers that no rank reads
                grid.paint(canvas, frame, layers, heads, "#bbbbbb")
    for cells in _cells(pair):
        color = _color(pair.prefill.groups[0], cells.prefill_rank)
        what = f"layers {ranges_text(cells.layers)}, KV heads {ranges_text(cells.heads)}"
        tips = (
            f"prefill rank {cells.prefill_rank} holds {what}",
            f"decode rank {cells.decode_rank} reads {what} from prefill rank {cells.prefill_rank}",
        )
        places = givers[cells.prefill_rank], takers[cells.decode_rank]
        for frame, tip in zip(places, tips, strict=True):
            grid.paint(canvas, frame, cells.layers, cells.heads, color, tip=tip)
            if cells.is_windowed:
                grid.paint(canvas, frame, cells.layers, cells.heads, HATCHED, 0.55, tip)
    for frame in (*givers, *takers):
        canvas.rect(frame.x, frame.y, MAP_WIDTH, frame.height, "none", stroke="#555555")


def _held(engine: PlannedEngine, rank: int) -> Iterator[tuple[range, range]]:
    """Neighbouring layers and their heads; states have no place on a map of heads."""
    for group in engine.groups:
        if not group.is_recurrent:
            for layers in joined_ranges(group.layers(rank)):
                yield layers, group.heads(rank)


def _draw_rank_texts(
    canvas: Canvas, pair: EnginePair, givers: list[_Frame], takers: list[_Frame]
) -> None:
    sides = (
        (pair.prefill, givers, pair.prefill_balance, "gives", -8.0, "end"),
        (pair.decode, takers, pair.decode_balance, "reads", MAP_WIDTH + 8.0, "start"),
    )
    for engine, frames, balance, verb, shift, anchor in sides:
        for rank, frame in enumerate(frames):
            layers = sorted({layer for group in engine.groups for layer in group.layers(rank)})
            lines = [
                f"rank {rank}",
                f"layers {ranges_text(layers, most=2)}",
                f"{_heads_text(engine, rank)}, {verb} {bytes_text(balance.nbytes[rank])}",
            ]
            if frame.height < 40:
                lines = [lines[0], lines[2]]
            first = frame.middle - 14.0 * len(lines) / 2 + 11
            for number, line in enumerate(lines):
                canvas.text(
                    frame.x + shift,
                    first + 14 * number,
                    line,
                    size=11 if number else 12,
                    bold=not number,
                    anchor=anchor,
                )


def _heads_text(engine: PlannedEngine, rank: int) -> str:
    """The heads of a rank; for groups with different heads, the heads of each group."""
    groups = [group for group in engine.groups if not group.is_recurrent]
    if not groups:
        return "state"
    if groups[0].cells["use_mla"]:
        return "latent"
    ranges = list(dict.fromkeys(group.heads(rank) for group in groups))
    texts = " or ".join(ranges_text(heads) for heads in ranges)
    return f"head{'s' * (len(ranges) > 1 or len(ranges[0]) > 1)} {texts}"


def _draw_blocks(canvas: Canvas, pair: EnginePair, y: float) -> float:
    """Draws the blocks of both sides along the first tokens, and the order inside a block."""
    sizes = [engine.groups[0].block_size for engine in (pair.prefill, pair.decode)]
    tokens = min(math.lcm(*sizes), 4 * max(sizes))
    left, width = MARGIN + TEXT_WIDTH, WIDTH - 2 * (MARGIN + TEXT_WIDTH)
    canvas.text(MARGIN, y + 12, f"Blocks of tokens 0 to {tokens - 1}", bold=True)
    for engine, size in zip((pair.prefill, pair.decode), sizes, strict=True):
        y += 24
        canvas.text(left - 8, y + 13, engine.name[:28], size=11, anchor="end")
        for first in range(0, tokens, size):
            x, end = (
                left + width * first / tokens,
                left + width * min(first + size, tokens) / tokens,
            )
            canvas.rect(x, y, end - x, 18, "#dfe7f1", stroke="#5f7591")
            if end - x > 40:
                label = f"{size} tokens" if end - x > 70 else str(size)
                canvas.text((x + end) / 2, y + 13, label, size=10, anchor="middle")
        order = _order_text(engine.groups[0])
        canvas.text(left + width + 8, y + 13, order, size=10, color="#444444")
    return y + 24


def _order_text(group: GroupGeometry) -> str:
    """The dims inside a block, outermost first; the layout's name if parts differ in order."""
    outer = group.layout.order.partition("B")[2]
    if group.layout.inner_orders:
        return layout_text(group.layout)
    words = [_DIM_WORDS[dim] for dim in outer if not (dim == "K" and len(group.part_sizes) == 1)]
    return f"{layout_text(group.layout)}: {', '.join(words)}"


def _draw_notes(canvas: Canvas, pair: EnginePair, y: float) -> float:
    notes = [
        "Each map is the whole model: first layer on top, first KV head on the left.",
        "A colour is a prefill rank; on the decode side it tells from whom cells are read.",
        "Dark grey: held by a prefill rank, but read from another one that holds it too.",
        "A band is as thick as its bytes. Point at anything for its layers, heads and bytes.",
    ]
    groups = pair.prefill.groups + pair.decode.groups
    if any(kept_text(group) != "all tokens" for group in groups if not group.is_recurrent):
        notes.append("Hatched: only the last tokens move, those of the layer's window or chunk.")
    if any(group.is_recurrent for group in pair.prefill.groups):
        notes.append("Bands count the states of recurrent layers; maps leave those layers white.")
    for engine in (pair.prefill, pair.decode):
        if len(engine.groups) > 1:
            notes += [
                f"{engine.name}, group {index}: layers {ranges_text(group.model_layers)}, keeps "
                f"{kept_text(group)}"
                for index, group in enumerate(engine.groups)
            ]
    for note in notes:
        y += 15
        canvas.text(MARGIN, y, note, size=10.5, color="#444444")
    return y
