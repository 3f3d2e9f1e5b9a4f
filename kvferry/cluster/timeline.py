"""A picture of when each request was prefilled, moved and decoded."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvferry.cluster.demo import Result

PHASES = (
    ("waiting", "#d9d9d9"),
    ("prefill", "#4c78a8"),
    ("transfer", "#e45756"),
    ("decode", "#54a24b"),
)
"""Name and colour of each phase, in the order of a request's life."""

Spans = dict[str, tuple[float, float]]
"""Phase → begin and end in seconds."""


def spans(result: Result, origin: float) -> Spans:
    """When each phase of a request began and ended.

    Args:
        result: the request.
        origin: Unix seconds that count as 0.
    """
    found: Spans = {}
    prefill = result.prefill.timings
    if prefill is not None and prefill.prefill_started and prefill.prefill_finished:
        found["prefill"] = (prefill.prefill_started - origin, prefill.prefill_finished - origin)
        found["waiting"] = (result.answer.sent - origin, prefill.prefill_started - origin)
    if result.loads:
        began = min(load.started for load in result.loads)
        ended = max(load.finished for load in result.loads)
        found["transfer"] = (began - origin, ended - origin)
    decode = result.decode.timings if result.decode is not None else None
    if decode is not None and decode.prefill_started and decode.finished:
        found["decode"] = (decode.prefill_started - origin, decode.finished - origin)
    return found


def draw(results: Sequence[Result], path: Path) -> None:
    """Writes the timeline as PNG: one bar per request, and below it the transfers enlarged.

    Transfers take milliseconds where the rest takes seconds, so that they get a minimum width in
    the upper picture, and a panel of their own with a true scale.
    """
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed, or there
    from matplotlib import pyplot as plt

    origin = min(result.answer.sent for result in results)
    height = 0.42 * len(results)
    figure, (top, bottom) = plt.subplots(
        2, 1, figsize=(11, 2.4 + 1.7 * height), height_ratios=(1.0, 0.7), layout="constrained"
    )
    _draw_lives(top, results, origin)
    _draw_transfers(bottom, results)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def _draw_lives(axes: Any, results: Sequence[Result], origin: float) -> None:
    from matplotlib.patches import Patch

    end = max(result.answer.finished or origin for result in results) - origin
    thinnest = end / 400
    colours = dict(PHASES)
    for row, result in enumerate(results):
        for phase, (began, ended) in spans(result, origin).items():
            width = max(ended - began, thinnest)
            front = 3 if phase == "transfer" else 2
            axes.barh(row, width, left=began, height=0.62, color=colours[phase], zorder=front)
        first = result.answer.first_token
        if first is not None:
            axes.plot(first - origin, row, marker="|", color="black", markersize=13, zorder=4)
    _label_rows(axes, results)
    axes.set_xlabel("seconds since the first request was sent")
    axes.set_title("Each request's life (black mark: first token at the client)", loc="left")
    axes.set_xlim(0, end * 1.01)
    handles = [Patch(color=colour, label=phase) for phase, colour in PHASES]
    axes.legend(
        handles=handles,
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(handles),
        fontsize=8,
        frameon=False,
    )


def _draw_transfers(axes: Any, results: Sequence[Result]) -> None:
    milliseconds = [result.transfer_s * 1000 for result in results]
    axes.barh(range(len(results)), milliseconds, height=0.62, color=dict(PHASES)["transfer"])
    for row, result in enumerate(results):
        text = f" {result.nbytes / 1e6:.1f} MB, {result.copies} copies"
        axes.text(milliseconds[row], row, text, va="center", fontsize=8)
    _label_rows(axes, results)
    axes.set_xlim(0, max(milliseconds) * 1.35 or 1.0)
    axes.set_xlabel("milliseconds from the first rank's start to the last rank's end")
    axes.set_title("Transfers alone", loc="left")


def _label_rows(axes: Any, results: Sequence[Result]) -> None:
    labels = [f"{result.name} ({result.prefill.prompt_tokens} tokens)" for result in results]
    axes.set_yticks(range(len(results)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.set_axisbelow(True)
    axes.grid(axis="x", alpha=0.3)
