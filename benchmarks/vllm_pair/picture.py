"""The picture of the README: how soon the first token comes, by this benchmark's newest results.

``python -m benchmarks.vllm_pair.picture`` draws it anew from the page of the results.
"""

import re
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import report
from benchmarks.remote import ROOT

PAGE = report.RESULTS / "VLLM.md"
PICTURE = ROOT / "docs" / "first_token.svg"
_ROW = re.compile(
    r"^\| one host, ([\d,]+) tokens, (\d) at a time(, at once)? \|(.*)\|$", re.MULTILINE
)
_CELL = re.compile(r"([\d.]+) / ([\d.]+): \**([\d.]+) \(")


class FirstToken(msgspec.Struct, frozen=True):
    """Time from the end of prefill to the first token, on one host."""

    tokens: int
    """Number of tokens of a prompt."""
    requests: int
    """Number of requests at a time."""
    at_once: bool
    """Whether the router sends a request to both servers at once."""
    kvferry: float
    """Milliseconds."""
    nixl: float
    """Milliseconds."""
    ratio: float
    """How many times less time kvferry takes: the median over the rounds."""


def first_tokens(page: str) -> list[FirstToken]:
    """The cases on one host of the page of the results, without the cases beside other answers."""
    found = []
    for tokens, requests, at_once, cells in _ROW.findall(page):
        kvferry, nixl, ratio = map(float, _CELL.findall(cells)[1])
        count = int(tokens.replace(",", ""))
        found.append(FirstToken(count, int(requests), bool(at_once), kvferry, nixl, ratio))
    return found


def draw(cases: list[FirstToken], path: Path) -> None:
    """Draws two panels, 1 and 8 requests at a time, with a bar per connector and prompt length."""
    import matplotlib.pyplot as plt

    plt.rcParams |= {"svg.hashsalt": "kvferry", "svg.fonttype": "none"}
    figure, panels = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for axes, requests in zip(panels, (1, 8), strict=True):
        _bars(axes, [case for case in cases if case.requests == requests])
        axes.set_title(f"{requests} request{'s' if requests > 1 else ''} at a time", fontsize=10)
        axes.set_xlabel("tokens of the prompt")
    panels[0].set_ylabel("end of prefill to first token, ms")
    panels[0].legend(frameon=False, fontsize=9)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _bars(axes: Any, cases: list[FirstToken]) -> None:
    lengths = sorted({case.tokens for case in cases})
    turn = {case.tokens: case for case in cases if not case.at_once}
    once = {case.tokens: case for case in cases if case.at_once}
    for offset, (label, color, heights) in enumerate(
        (
            ("NixlConnector", "#e8710a", [turn[each].nixl for each in lengths]),
            ("kvferry, in turn", "#1a73e8", [turn[each].kvferry for each in lengths]),
            ("kvferry, at once", "#81b0f4", [once[each].kvferry for each in lengths]),
        )
    ):
        places = [place + 0.27 * (offset - 1) for place in range(len(lengths))]
        axes.bar(places, heights, width=0.25, color=color, label=label)
    axes.set_xticks(range(len(lengths)), [f"{each:,}" for each in lengths])
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    draw(first_tokens(PAGE.read_text(encoding="utf-8")), PICTURE)
