"""Pairs whose ranks are processes of their own, as they are in a cluster."""

import random
from typing import Any

import pytest

pytestmark = pytest.mark.processes

MAX_TOKENS = 6

PAIRS = {
    "tp3-to-pp2": (
        {"tp": 3, "block_size": 16, "layout": "HND"},
        {"pp": 2, "block_size": 24, "layout": "NHD"},
    ),
    "pp2-to-tp2": (
        {"pp": 2, "block_size": 12, "layout": "BLKNHD"},
        {"tp": 2, "block_size": 8, "layout": "HND"},
    ),
    "tp1-to-tp3": (
        {"tp": 1, "block_size": 7, "layout": "NHD"},
        {"tp": 3, "block_size": 16, "layout": "BNHKD"},
    ),
}


TRANSPORTS = ("shm", "vm", "tcp")

#: By default one pair over one transport: starting the ranks takes most of the time.
BY_DEFAULT = ("tp1-to-tp3", "tcp")
CASES = [
    pytest.param(
        shapes,
        transport,
        marks=pytest.mark.smoke if (name, transport) == BY_DEFAULT else pytest.mark.slow,
        id=f"{name}-{transport}",
    )
    for name, shapes in PAIRS.items()
    for transport in TRANSPORTS
]


@pytest.mark.parametrize(("shapes", "transport"), CASES)
def test_separate_processes_give_the_tokens_of_the_undivided_engine(
    open_pair: Any, undivided: Any, shapes: tuple[dict[str, Any], dict[str, Any]], transport: str
) -> None:
    pair = open_pair(*shapes, executor="process", transport=transport)
    chance = random.Random(1)
    questions = [[chance.randrange(3, 300) for _ in range(n)] for n in (2, 30, 100)]
    answers = pair.generate(questions, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    assert pair.check_digests() == len(questions)
    pair.settle()
