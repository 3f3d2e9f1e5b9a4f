"""A prefill and a decode engine of different shapes give the tokens of one undivided engine."""

import random
from typing import Any

import pytest

MAX_TOKENS = 8


def prompts(count: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to 150 tokens, the first two shorter than any block."""
    chance = random.Random(seed)
    lengths = [1, 3, *(chance.randint(5, 150) for _ in range(count - 2))]
    return [[chance.randrange(3, 300) for _ in range(length)] for length in lengths]


def shape(text: str) -> dict[str, Any]:
    """``"2x1 16 NHD"`` is TP 2, PP 1, block size 16, layout NHD."""
    parallel, block_size, layout = text.split()
    tp, pp = parallel.split("x")
    return {"tp": int(tp), "pp": int(pp), "block_size": int(block_size), "layout": layout}


PAIRS = [
    ("1x1 16 NHD", "1x1 16 NHD"),
    ("1x1 16 HND", "1x1 16 NHD"),
    ("1x1 16 NHD", "1x1 16 HND"),
    ("3x1 16 HND", "1x2 24 NHD"),
    ("1x2 24 NHD", "3x1 16 HND"),
    ("2x1 16 NHD", "1x1 16 NHD"),
    ("1x1 16 NHD", "2x1 16 NHD"),
    ("2x1 8 HND", "3x1 12 NHD"),
    ("3x1 12 NHD", "2x1 8 HND"),
    ("4x1 16 NHD", "3x1 16 HND"),
    ("2x1 16 HND", "4x1 16 HND"),
    ("1x2 32 NHD", "1x3 8 NHD"),
    ("1x3 8 NHD", "1x2 32 NHD"),
    ("2x2 16 BLKNHD", "1x3 10 BKHND"),
    ("1x1 7 BNHKD", "2x2 5 BLHNKD"),
    ("3x2 64 HND", "2x3 48 BLKHND"),
    ("2x3 20 BHNKD", "3x2 64 NHD"),
    ("6x1 16 NHD", "1x5 16 HND"),
]


@pytest.mark.parametrize(("prefill", "decode"), PAIRS)
def test_tokens_equal_those_of_the_undivided_engine(
    open_pair: Any, undivided: Any, prefill: str, decode: str
) -> None:
    pair = open_pair(shape(prefill), shape(decode))
    questions = prompts(5, seed=len(prefill) + len(decode))
    answers = pair.generate(questions, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    assert [a.num_external_tokens for a in answers] == [len(q) for q in questions]
    assert pair.check_digests() == len(questions)
    pair.settle()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_either_transport_serves_a_pair_of_unequal_shapes(
    open_pair: Any, undivided: Any, transport: str
) -> None:
    pair = open_pair(shape("3x1 16 HND"), shape("1x2 24 NHD"), transport=transport)
    questions = prompts(4, seed=3)
    answers = pair.generate(questions, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    assert pair.check_digests() == len(questions)
    pair.settle()


def test_a_pair_takes_the_first_transport_that_both_offer(open_pair: Any, undivided: Any) -> None:
    pair = open_pair(shape("1x1 16 HND"), shape("2x1 16 NHD"), transport=("shm", "tcp"))
    questions = prompts(3, seed=5)
    answers = pair.generate(questions, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    pair.settle()
