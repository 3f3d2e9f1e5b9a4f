"""The benchmark of loads that begin early, without its hosts."""

from types import SimpleNamespace
from typing import cast

import pytest
import typer

from benchmarks.early import __main__ as early
from benchmarks.early.cluster import ANSWER_TOKENS, MODES, Served, engine_config
from benchmarks.early.report import HALF, EarlyResults, Measured, Sample, page, rows
from benchmarks.report import describe_machine
from kvferry.connectors.pull.config import PullConfig
from kvferry.engine.messages import RequestTimings
from kvferry.serving.metrics import RequestSummary
from kvferry.testing.hosts import Host


def sample(link, tokens, mode, after_s, block_s=1.0, *, turn=1, is_right=True):
    return Sample(
        link=link,
        bytes_per_s=None,
        tokens=tokens,
        mode=mode,
        turn=turn,
        prefill_s=2.0,
        after_prefill_s=after_s,
        first_token_s=2.1,
        second_token_s=2.1 + after_s,
        load_s=1.0,
        block_s=block_s,
        is_right=is_right,
    )


def cell(link, tokens, after_s, block_s=(1.0, 1.0, 1.0, 1.0)):
    """One sample of each mode."""
    return [sample(link, tokens, *each) for each in zip(MODES, after_s, block_s, strict=True)]


def told(tokens, **moments):
    return RequestSummary(
        request_id="r",
        prompt_tokens=tokens,
        token_ids=[1],
        gaps=[],
        finish_reason="length",
        error="",
        num_cached_tokens=0,
        num_external_tokens=0,
        timings=RequestTimings(arrival=0.0, **moments),
    )


def test_a_sample_counts_what_the_decode_engine_pinned_from_admission_to_first_token():
    served = Served(
        tokens=[1, 2],
        first_token_s=5.5,
        second_token_s=6.5,
        prefill=told(100, prefill_started=1.0, prefill_finished=5.0),
        decode=told(100, scheduled=3.0, load_started=3.0, load_finished=6.0, first_token=6.25),
        nbytes=400,
    )
    one = Sample.of(Measured("full", None, "now", 1, (1,), served), is_right=True)
    assert (one.prefill_s, one.after_prefill_s, one.load_s) == (4.0, 1.25, 3.0)
    assert one.block_s == 5 * 3.25  # of 24 tokens each


def test_cells_keep_the_order_of_links_and_sort_lengths():
    samples = [sample("slow", 1000, "off", 1.0), *cell("slow", 256, (1,) * 4)]
    samples.append(sample("fast", 256, "off", 1.0))
    _, *found = rows(samples)
    assert [row[:2] for row in found] == [
        *[("slow", "256")] * len(MODES),
        ("slow", "1,000"),
        ("fast", "256"),
    ]


def test_the_page_has_every_figure():
    samples = [
        *cell("full", 256, (1.0, 1.0, 1.04, 1.06)),
        *cell(HALF, 4000, (1.2, 1.0, 0.2, 0.25), (1.0, 1.0, 2.0, 4.5)),
        sample(HALF, 4000, "now", 0.25, 4.5, is_right=False),
    ]
    results = EarlyResults(
        command="python -m benchmarks.early",
        machine=describe_machine(),
        load_after=1.0,
        rounds=1,
        samples=tuple(samples),
    )
    text = page(results)
    row = "| half | 4,000 | late |  | 2,000 | 200 | 5.0 | 2,100 | 2,300 | 2.0 | 0 of 1 |"
    assert row in text
    assert "| half | 4,000 | in turn | 0.50 |" in text
    assert "| 4.5 | 1 of 2 |" in text


def test_the_longest_prompts_are_others_than_each_engine_had_last(monkeypatch):
    monkeypatch.setattr(early, "LONGEST", 500)
    prompts = early.Prompts()
    assert len({prompts.next(20, "off") for _ in range(10)}) == 10
    last: dict[str, tuple[int, ...]] = {}
    for number in range(40):
        mode = list(MODES)[(number + number // 4) % 4]
        prompt = prompts.next(500, mode)
        for engine in ("prefill", MODES[mode][0]):
            assert last.get(engine) != prompt
            last[engine] = prompt


def test_links_and_lengths_are_chosen_by_name():
    assert early.chosen(["4000", "50 MB/s"]) == (["50 MB/s"], [4000])
    assert early.chosen([]) == ([*early.LINKS, HALF], list(early.PROMPTS))
    with pytest.raises(typer.BadParameter, match="none of full"):
        early.chosen(["40"])


def test_only_the_way_to_load_differs_and_one_prompt_fills_the_cache():
    host = cast(Host, SimpleNamespace(ipv4="10.0.0.1"))
    off, late = (engine_config("decode-x", host, way, 1000) for way in ("off", "late"))
    extras = [one.kv_transfer_config["kv_connector_extra_config"] for one in (off, late)]
    assert [extra.pop("early_load") for extra in extras] == ["off", "late"]
    assert off == late
    assert PullConfig(**extras[0]).max_leased_blocks == off.num_blocks - 1
    usable = (off.num_blocks - 1) * off.block_size
    assert 0 <= usable - 1000 - ANSWER_TOKENS < off.block_size
