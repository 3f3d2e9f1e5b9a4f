"""The picture: the times at which each request was prefilled, moved and decoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.engine.messages import RequestTimings
from kvferry.observe.records import TransferRecord

from .acts import Answer, Result, TurnResult

PHASES = (
    ("waiting", "#d9d9d9"),
    ("prefill", "#4c78a8"),
    ("transfer", "#e45756"),
    ("decode", "#54a24b"),
)
"""Name and colour of each phase, in the order of a request's life."""

Spans = dict[str, tuple[float, float]]
"""Phase → begin and end in seconds."""


@dataclass(frozen=True, slots=True)
class Life:
    """A request's row in the picture."""

    label: str
    answer: Answer
    prefill: RequestTimings | None
    decode: RequestTimings | None
    loads: Sequence[TransferRecord]

    @classmethod
    def of(cls, result: Result | TurnResult) -> "Life":
        """The row of a request of either act."""
        if isinstance(result, TurnResult):
            label = f"{result.name} ({result.computed} of {result.prompt_tokens} computed)"
            return cls(label, result.answer, result.prefill, result.decode, result.loads)
        decode = result.decode.timings if result.decode is not None else None
        label = f"{result.name} ({result.prefill.prompt_tokens} tokens)"
        return cls(label, result.answer, result.prefill.timings, decode, result.loads)

    def spans(self, origin: float) -> Spans:
        """Phase → begin and end in seconds since ``origin``, a Unix time."""
        found: Spans = {}
        computed = self.prefill or self.decode
        if computed is not None and computed.prefill_started and computed.prefill_finished:
            started, finished = computed.prefill_started, computed.prefill_finished
            found["prefill"] = (started - origin, finished - origin)
            found["waiting"] = (self.answer.sent - origin, started - origin)
        if self.loads:
            began = min(load.started for load in self.loads)
            ended = max(load.finished for load in self.loads)
            found["transfer"] = (began - origin, ended - origin)
        decode = self.decode
        if decode is not None and decode.prefill_started and decode.finished:
            begun = decode.prefill_started if self.prefill else decode.prefill_finished
            found["decode"] = ((begun or decode.finished) - origin, decode.finished - origin)
        return found


def draw_timeline(results: Sequence[Result], turns: Sequence[TurnResult], path: Path) -> None:
    """Writes the timeline as PNG: a bar per request, an enlarged view of the transfers, and the
    turns of the conversation, each from the time at which the turn was sent.

    Transfers take milliseconds and the other phases take seconds. Transfers therefore have a
    minimum width in the upper picture, and another panel with a true scale. In the conversation, a
    transfer may begin while the prompt is computed.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed, nor present
    from matplotlib import pyplot as plt

    requests, held = [Life.of(result) for result in results], [Life.of(turn) for turn in turns]
    heights = [1.0 + 0.42 * len(requests), 0.9 + 0.3 * len(requests)]
    if held:
        heights.append(1.0 + 0.42 * len(held))
    figure, panels = plt.subplots(
        len(heights), 1, figsize=(11, sum(heights)), height_ratios=heights, layout="constrained"
    )
    origin = min(life.answer.sent for life in requests)
    end = _draw_lives(panels[0], requests, [origin] * len(requests))
    panels[0].set_xlabel("seconds since the first request was sent")
    panels[0].set_title("Each request's life (black mark: first token at the client)", loc="left")
    panels[0].set_xlim(0, end * 1.01)
    _add_legend(panels[0])
    _draw_transfers(panels[1], results, requests)
    if held:
        _draw_lives(panels[2], held, [life.answer.sent for life in held])
        panels[2].set_xlabel("seconds since the turn was sent, until just after its first token")
        panels[2].set_title(
            "The conversation: a load may begin while its prompt is computed", loc="left"
        )
        firsts = [(life.answer.first_token or 0.0) - life.answer.sent for life in held]
        panels[2].set_xlim(0, max(firsts) * 1.25)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_lives(axes: Any, lives: Sequence[Life], origins: Sequence[float]) -> float:
    """Draws a row for each life; returns the end of the last life."""
    end = max(
        (life.answer.finished or origin) - origin
        for life, origin in zip(lives, origins, strict=True)
    )
    colours = dict(PHASES)
    for row, (life, origin) in enumerate(zip(lives, origins, strict=True)):
        for phase, (began, ended) in life.spans(origin).items():
            is_load = phase == "transfer"
            width = max(ended - began, end / 400) if is_load else ended - began
            axes.barh(
                row,
                width,
                left=began,
                height=0.3 if is_load else 0.62,
                color=colours[phase],
                zorder=3 if is_load else 2,
            )
        first = life.answer.first_token
        if first is not None:
            axes.plot(first - origin, row, marker="|", color="black", markersize=13, zorder=4)
    _label_rows(axes, lives)
    return end


def _add_legend(axes: Any) -> None:
    from matplotlib.patches import Patch

    handles = [Patch(color=colour, label=phase) for phase, colour in PHASES]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        fontsize=8,
        frameon=False,
    )


def _draw_transfers(axes: Any, results: Sequence[Result], lives: Sequence[Life]) -> None:
    milliseconds = [result.transfer_s * 1000 for result in results]
    axes.barh(range(len(results)), milliseconds, height=0.62, color=dict(PHASES)["transfer"])
    for row, result in enumerate(results):
        text = f" {result.nbytes / 1e6:.1f} MB, {result.copies} copies"
        axes.text(milliseconds[row], row, text, va="center", fontsize=8)
    _label_rows(axes, lives)
    axes.set_xlim(0, max(milliseconds) * 1.35 or 1.0)
    axes.set_xlabel("milliseconds in which something moved to the slowest rank")
    axes.set_title("Transfers alone", loc="left")


def _label_rows(axes: Any, lives: Sequence[Life]) -> None:
    axes.set_yticks(range(len(lives)), [life.label for life in lives], fontsize=8)
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
