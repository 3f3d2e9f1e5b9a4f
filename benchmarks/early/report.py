"""What was measured, and the page for people."""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec

from benchmarks import report
from benchmarks.early.cluster import ANSWER_TOKENS, BLOCK_SIZES, CHUNK, MODES, Served

HALF = "half"
"""The link over which the KV of a prompt takes half as long as its prefill; of each length its
own."""


@dataclass(frozen=True, slots=True)
class Measured:
    """One request, before its answer is judged."""

    link: str
    bytes_per_s: float | None
    mode: str
    turn: int
    prompt: tuple[int, ...]
    served: Served


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One request. Times are seconds."""

    link: str
    bytes_per_s: float | None
    """Of the link; ``None`` for what the relay carries."""
    tokens: int
    """Of the prompt."""
    mode: str
    turn: int
    """Samples of one turn were taken one after the other, one of each mode."""
    prefill_s: float
    """From the first step that computes the prompt to its last token."""
    after_prefill_s: float
    """From there to the first token of the decode engine."""
    first_token_s: float
    """From the request to the first token at the client."""
    second_token_s: float
    load_s: float
    """From the admission of the load until the engine knows that all is there."""
    block_s: float
    """Blocks of the decode engine, times seconds from the admission to its first token."""
    is_right: bool
    """Whether the answer is that of one undivided engine."""

    @classmethod
    def of(cls, one: Measured, *, is_right: bool) -> "Sample":
        """What is kept of a request."""
        served = one.served
        p, d = served.prefill.timings, served.decode.timings
        assert p is not None  # it has ended
        assert d is not None
        blocks = -(-served.decode.prompt_tokens // BLOCK_SIZES["decode"])
        return cls(
            link=one.link,
            bytes_per_s=one.bytes_per_s,
            tokens=served.prefill.prompt_tokens,
            mode=one.mode,
            turn=one.turn,
            prefill_s=seconds(p.prefill_started, p.prefill_finished),
            after_prefill_s=seconds(p.prefill_finished, d.first_token),
            first_token_s=served.first_token_s,
            second_token_s=served.second_token_s,
            load_s=seconds(d.load_started, d.load_finished),
            block_s=blocks * seconds(d.scheduled, d.first_token),
            is_right=is_right,
        )


def seconds(first: float | None, last: float | None) -> float:
    """Between two moments of a request that has ended well."""
    assert first is not None
    assert last is not None
    return last - first


class EarlyResults(report.Results, frozen=True, kw_only=True):
    """All that one call measured."""

    samples: tuple[Sample, ...]


def rows(samples: Sequence[Sample]) -> Iterator[tuple[str, ...]]:
    """The table, its header first: medians, links in the order in which they were measured."""
    yield (
        "link",
        "prompt",
        "mode",
        "transfer / prefill",
        "prefill ms",
        "after prefill ms",
        "times less than off",
        "first token ms",
        "second token ms",
        "block-seconds",
        "wrong",
    )
    links = list(dict.fromkeys(one.link for one in samples))
    for link, tokens in sorted({(links.index(one.link), one.tokens) for one in samples}):
        of = [one for one in samples if (one.link, one.tokens) == (links[link], tokens)]
        off = {one.turn: one.after_prefill_s for one in of if one.mode == "off"}
        for mode in MODES:
            found = [one for one in of if one.mode == mode]
            if not found:
                continue
            times = [off[one.turn] / one.after_prefill_s for one in found if one.turn in off]
            shares = [one.load_s / one.prefill_s for one in found]
            yield (
                links[link],
                f"{tokens:,}",
                mode,
                f"{statistics.median(shares):.2f}" if mode == "in turn" else "",
                _ms(one.prefill_s for one in found),
                _ms(one.after_prefill_s for one in found),
                f"{statistics.median(times):.1f}" if times and mode in ("late", "now") else "",
                _ms(one.first_token_s for one in found),
                _ms(one.second_token_s for one in found),
                f"{statistics.median(one.block_s for one in found):.1f}",
                f"{sum(not one.is_right for one in found)} of {len(found)}",
            )


def _ms(times: Iterable[float]) -> str:
    seconds = statistics.median(times)
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"


def page(results: EarlyResults) -> str:
    """The page for people."""
    links = {one.link: one.bytes_per_s for one in results.samples}
    told = [
        (
            "`in turn`: the prefill engine, then the decode engine, as routers do by default. The "
            "others: both engines at once (`at_once`), with that `early_load` of the decode engine."
        ),
        (
            "`after prefill`: from the prompt's last computed token to the decode engine's first "
            "token, which is the answer's second one `in turn`, and its first one otherwise. "
            "`first token`, `second token`: at the client, through the router."
        ),
        (
            "`block-seconds`: blocks of the decode engine, times the seconds from the admission of "
            "the request to its first token there."
        ),
        (
            "`transfer / prefill`: how long the load `in turn` takes, to how long the prompt is "
            f"computed. Of the link `{HALF}` the rate was chosen for each length so that this is "
            "about one half."
        ),
    ]
    told.append(
        "Engines, relay, routers and client share the cores: what loads while a prompt is computed "
        "also slows its computation here, which it does not between machines."
    )
    if None in links.values():
        told.append("Link `full`: as fast as the relay is.")
    return report.page(
        "Loads that begin while the prompt is computed",
        results,
        "Reference engines of one rank on hosts made of network namespaces, each request alone; a "
        "relay in user space is the links between them, transport tcp. Prompts are computed in "
        f"chunks of {CHUNK} tokens, answers have {ANSWER_TOKENS}. Blocks of "
        f"{BLOCK_SIZES['prefill']} tokens (prefill) and {BLOCK_SIZES['decode']} (decode), unequal "
        "layouts. Modes take turns, request by request; medians, and medians of each turn's ratio.",
        [*report.bullets(told), "", *report.table(rows(results.samples), 3)],
    )
