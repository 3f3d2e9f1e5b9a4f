"""The five pairs that other systems refuse: planned by the command line, then run."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from kvferry.cli.app import run
from kvferry.cli.specs import parse_spec
from tests.refused_pairs import REFUSED_PAIRS

MAX_TOKENS = 8
PROMPT_TOKENS = (1, 15, 64, 130)

refused = pytest.mark.parametrize(
    ("prefill", "decode"), REFUSED_PAIRS.values(), ids=REFUSED_PAIRS.keys()
)


def shape(text: str) -> dict[str, Any]:
    """The keys of an engine's config that a spec stands for."""
    spec = parse_spec(text, "spec")
    return {
        "tp": spec.parallel.tp,
        "pp": spec.parallel.pp,
        "block_size": spec.block_size,
        "layout": spec.layout,
    }


def planned(
    monkeypatch: Any, capsys: Any, model_folder: Path, prefill: str, decode: str, tokens: int
) -> dict[str, Any]:
    """The one pair that ``kvferry plan --json`` explains."""
    options = ("--prefill", prefill, "--decode", decode, "--model", str(model_folder))
    arguments = ["kvferry", "plan", *options, "--tokens", str(tokens), "--json"]
    monkeypatch.setattr(sys, "argv", arguments)
    with pytest.raises(SystemExit) as end:
        run()
    captured = capsys.readouterr()
    assert not end.value.code, captured.err
    pairs: list[dict[str, Any]] = json.loads(captured.out)["pairs"]
    (pair,) = pairs
    return pair


@refused
def test_a_pair_gives_the_tokens_of_the_undivided_engine_and_moves_what_its_plan_says(
    open_pair: Any,
    undivided: Any,
    model_folder: Path,
    monkeypatch: Any,
    capsys: Any,
    prefill: str,
    decode: str,
) -> None:
    pair = open_pair(shape(prefill), shape(decode))
    chance = random.Random(4)
    questions = [[chance.randrange(3, 300) for _ in range(count)] for count in PROMPT_TOKENS]

    answers = pair.generate(questions, MAX_TOKENS)

    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    assert [answer.num_external_tokens for answer in answers] == list(PROMPT_TOKENS)
    assert pair.check_digests() == len(questions)
    pair.settle()
    received = [record for record in pair.records if record.direction == "recv"]
    for tokens in PROMPT_TOKENS:
        plan = planned(
            monkeypatch, capsys, model_folder, f"{prefill},dtype=float64",
            f"{decode},dtype=float64", tokens,
        )  # fmt: skip
        moved = {rec.rank: rec.nbytes for rec in received if rec.tokens == tokens}
        assert moved == dict(enumerate(plan["balance"]["decode_ranks"]["nbytes"]))


@pytest.mark.processes
@pytest.mark.slow
@refused
def test_a_pair_of_processes_gives_the_tokens_of_the_undivided_engine(
    open_pair: Any, undivided: Any, prefill: str, decode: str
) -> None:
    pair = open_pair(shape(prefill), shape(decode), executor="process")
    chance = random.Random(4)
    questions = [[chance.randrange(3, 300) for _ in range(count)] for count in PROMPT_TOKENS]

    answers = pair.generate(questions, MAX_TOKENS)

    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    assert pair.check_digests() == len(questions)
    pair.settle()
