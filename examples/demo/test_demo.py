"""The demo: its comparison, its last line, and a whole run with the tiny model."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from kvferry.engine.messages import RequestTimings
from kvferry.errors import ConfigError
from kvferry.observe.records import TransferRecord
from kvferry.serving.metrics import Records, RequestSummary

from .acts import (
    CONVERSATION_FOLDER,
    Answer,
    Difference,
    Reference,
    Turn,
    TurnResult,
    find_difference,
    load_prompts,
    turn_result,
)
from .acts import compare as compare_all
from .display import turn_table, verdict
from .timeline import Life, draw_timeline


def summary(tokens, gaps, **timings):
    return RequestSummary(
        request_id="r",
        prompt_tokens=7,
        token_ids=tokens,
        gaps=gaps,
        finish_reason="length",
        error="",
        num_cached_tokens=0,
        num_external_tokens=0,
        timings=RequestTimings(arrival=100.0, **timings),
    )


def record(rank, direction, digests, **values):
    return TransferRecord(
        request_id="r",
        rank=rank,
        peer="other",
        direction=direction,
        tokens=2,
        nbytes=64,
        copies=4,
        **{
            "lease_id": "lease",
            "first_token": 0,
            "started": 101.0 + rank / 100,
            "finished": 101.5 + rank / 100,
            "ok": True,
            "token_digests": digests,
            **values,
        },
    )


@pytest.fixture
def records():
    """Two source ranks and one target rank whose digests agree in sum."""
    prefill = summary([5], [0.5], prefill_started=100.2, prefill_finished=100.9)
    decode = summary([6, 7], [0.6, 0.7], prefill_started=101.7, finished=103.0)
    half = 2**63
    lent = [record(0, "send", (half + 1, 10)), record(1, "send", (half + 2, 20))]
    return {
        "prefill": Records(engine="p", transfers=lent, requests=[prefill]),
        "decode": Records(engine="d", transfers=[record(0, "recv", (3, 30))], requests=[decode]),
    }


def answer(tokens):
    return Answer(
        "one", sent=100.0, first_token=101.0, finished=103.5, request_id="r", token_ids=tokens
    )


def compare(records, tokens=(5, 6, 7), reference=(5, 6, 7)):
    (result,) = compare_all(
        [Reference(list(reference), [0.1, 0.2, 0.3], 7)], [answer(list(tokens))], records
    )
    return result


def verdict_of(results):
    console = Console(record=True, width=60)
    code = verdict(console, results)
    return code, console.export_text().splitlines()


def test_equal_tokens_and_equal_digests_pass(records):
    result = compare(records)

    assert result.ok
    assert (result.nbytes, result.copies, result.tokens_moved) == (64, 4, 2)
    assert result.transfer_s == pytest.approx(0.5)
    code, lines = verdict_of([result, result])
    assert code == 0
    assert lines[-1] == (
        "demo: 2/2 requests identical to the undivided engine, KV verified bit for bit"
    )


def test_a_token_that_differs_fails_and_shows_the_gap(records):
    result = compare(records, tokens=(5, 6, 9))

    assert result.difference == Difference(2, 7, 9, 0.3, 0.7)
    code, lines = verdict_of([result])
    assert code == 1
    text = " ".join(" ".join(lines).split())
    assert "one: token 2 is 9, the undivided engine drew 7" in text
    assert "0.3 (undivided), 0.7 (cluster)" in text
    assert lines[-1].startswith("demo: 0/1 requests identical")


@pytest.mark.parametrize(
    "damage",
    [
        {"token_digests": (3, 31)},
        {"ok": False, "error": "stalled"},
        {"lease_id": "another"},
    ],
)
def test_kv_that_differs_fails_although_the_tokens_agree(records, damage):
    values = {"token_digests": (3, 30), **damage}
    digests = values.pop("token_digests")
    loads = [record(0, "recv", digests, **values)]
    decode = records["decode"]
    broken = Records(engine="d", transfers=loads, requests=decode.requests)

    result = compare({**records, "decode": broken})

    assert result.damage
    assert not result.ok
    code, lines = verdict_of([result])
    assert code == 1
    assert "KV of 1 requests differs" in lines[-1]


def turn(name="2_newspaper", difference=None, **values):
    fields = {
        "engine": "prefill",
        "prompt_tokens": 100,
        "cached": 48,
        "borrowed": 24,
        "decode_cached": 72,
        "moved": 28,
        "prefill": None,
        "decode": None,
        "loads": (),
        **values,
    }
    return TurnResult(name=name, answer=answer([5, 6]), difference=difference, **fields)


def test_turn_that_differs_fails_although_the_prompts_are_the_same(records):
    console = Console(record=True, width=200)
    difference = Difference(1, 7, 6, 0.25, None)
    held = [turn(), turn("3_friend", difference)]
    assert verdict(console, [compare(records)], [turn()]) == 0
    assert verdict(console, [compare(records)], held) == 1
    lines = console.export_text().splitlines()
    assert any("3_friend: token 1 is 6, the undivided engine drew 7" in line for line in lines)
    assert lines[-2] == (
        "conversation: 1/2 turns identical to the undivided engine, "
        "56 of 200 prompt tokens computed"
    )


def test_table_of_turns_says_what_came_from_where():
    console = Console(record=True, width=200)
    console.print(turn_table([turn(), turn("4_letter", engine="decode", moved=0, borrowed=0)]))
    text = console.export_text()
    rows = [[cell.strip() for cell in row.split("│")[1:-1]] for row in text.splitlines()]
    assert [row for row in rows if row] == [
        ["2_newspaper", "100", "28", "prefill", "48", "24", "72", "28", "1.00", "2 same"],
        ["4_letter", "100", "52", "decode", "48", "0", "72", "0", "1.00", "2 same"],
    ]


def test_a_turn_is_told_by_the_engine_that_computed_it(records):
    asked = Turn("one", [], Reference([5, 6, 7], [0.1, 0.2, 0.3], 7))
    by_both = turn_result(asked, answer([5, 6, 7]), records)
    assert (by_both.engine, by_both.difference) == ("prefill", None)
    alone = {**records, "prefill": Records(engine="p", transfers=[], requests=[])}
    by_decode = turn_result(asked, answer([6, 7]), alone)
    assert (by_decode.engine, by_decode.moved, by_decode.computed) == ("decode", 0, 7)
    assert by_decode.difference == Difference(0, 5, 6, 0.1, 0.6)


def test_conversation_that_ships_has_four_turns_with_something_long_in_the_last():
    turns = load_prompts(CONVERSATION_FOLDER)
    lengths = [len(turn.text) for turn in turns]
    assert len(turns) == 4
    assert lengths[1] < lengths[0] > 500 < lengths[3] > lengths[2]


def test_an_answer_that_ends_early_differs_where_it_ends():
    reference = Reference([1, 2, 3], [0.1, 0.2, 0.3], 1)

    assert find_difference(reference, [1, 2], [9.0, 8.0]) == Difference(2, 3, None, 0.3, None)
    assert find_difference(reference, [1, 2, 3, 4], [1.0] * 4) == Difference(3, None, 4, None, 1.0)
    assert find_difference(reference, [1, 2, 3], []) is None


def test_the_timeline_has_every_phase_and_is_a_png(records, tmp_path):
    result = compare(records)

    spans = Life.of(result).spans(100.0)
    assert spans.keys() == {"waiting", "prefill", "transfer", "decode"}
    assert spans["waiting"] == pytest.approx((0.0, 0.2))
    assert spans["prefill"] == pytest.approx((0.2, 0.9))
    assert spans["transfer"] == pytest.approx((1.0, 1.5))
    assert spans["decode"] == pytest.approx((1.7, 3.0))
    early = turn(prefill=result.prefill.timings, decode=result.decode.timings, loads=result.loads)
    assert Life.of(early).spans(100.0) == Life.of(result).spans(100.0)
    alone = turn(decode=result.decode.timings)
    draw_timeline([result] * 3, [early, alone], tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_prompts_that_ship_differ_in_length_and_one_is_long():
    prompts = load_prompts()

    assert len(prompts) >= 8
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    words = sorted(len(prompt.text.split()) for prompt in prompts)
    assert words[0] < 15
    assert words[-1] > 1300


def test_an_empty_prompt_folder_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="holds no prompts"):
        load_prompts(tmp_path)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.smoke)])
def test_a_whole_run_with_the_tiny_model(tmp_path, monkeypatch, transport):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for index, text in enumerate(["Why?", "What is a tide? " * 9, "Name an island. " * 40]):
        (prompts / f"{index}.txt").write_text(text)

    command = [
        sys.executable, "-m", "kvferry.cli",
        "demo", "--model", "tiny", "--transport", transport, "--max-tokens", "8",
        "--prompts", prompts, "--out", tmp_path / "out",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == (
        "demo: 3/3 requests identical to the undivided engine, KV verified bit for bit"
    )
    assert (tmp_path / "out" / "timeline.png").exists()
    told = json.loads((tmp_path / "out" / "results.json").read_bytes())
    requests = told["requests"]
    assert [request["identical"] for request in requests] == [True] * 3
    assert all(request["bytes_moved"] > 0 for request in requests)
    conversation = told["conversation"]
    assert [each["identical"] for each in conversation] == [True] * 4
    turns = [each["turn"] for each in conversation]
    assert [turn["name"] for turn in turns] == [
        "1_timetable",
        "2_newspaper",
        "3_friend",
        "4_letter",
    ]
    # The router may choose differently, depending on the events so far; no engine computes the
    # first prompt again.
    first = turns[0]["prompt_tokens"] // 24 * 24
    for turn, each in zip(turns[1:], conversation[1:], strict=True):
        assert turn["cached"] + turn["borrowed"] + each["computed"] == turn["prompt_tokens"]
        assert turn["cached"] + turn["borrowed"] >= first - 24
    assert "conversation: 4/4 turns identical to the undivided engine" in done.stdout
