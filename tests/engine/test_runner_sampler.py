import math
from collections import Counter

import pytest
import torch

from kvferry.engine.messages import SamplingParams
from kvferry.engine.worker import best_two_gaps, sample

LOGITS = torch.tensor([0.0, 2.0, 1.0, -1.0, 1.5], dtype=torch.float64)


def draws(count, **params):
    choice = SamplingParams(seed=11, **({"temperature": 1.0} | params))
    return [sample(LOGITS, choice, index) for index in range(count)]


def test_gap_is_the_difference_of_the_two_best_logits():
    rows = torch.tensor([[1.0, 4.0, 3.5], [2.0, 2.0, -1.0]])
    assert best_two_gaps(rows) == [0.5, 0.0]
    assert best_two_gaps(rows.bfloat16()) == [0.5, 0.0]


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=1e-9),
        SamplingParams(temperature=1.0, top_k=1),
        SamplingParams(temperature=1.0, top_p=0.0),
        SamplingParams(temperature=1.0, top_p=0.3, seed=4),
    ],
)
def test_choices_that_leave_one_token_take_the_best(params):
    assert {sample(LOGITS, params, index) for index in range(20)} == {1}


def test_frequencies_are_the_probabilities():
    count = 4000
    found = Counter(draws(count, temperature=0.7))
    for token, probability in enumerate((LOGITS / 0.7).softmax(-1).tolist()):
        deviation = math.sqrt(probability * (1 - probability) / count)
        assert abs(found[token] / count - probability) < 4 * deviation


def test_top_k_keeps_the_best_and_those_alone():
    assert set(draws(400, top_k=3)) == {1, 2, 4}
    assert set(draws(400, top_k=9)) == {0, 1, 2, 3, 4}


def test_top_p_keeps_the_fewest_tokens_that_reach_it():
    # Probabilities, best first: 0.46, 0.28, 0.17, 0.06, 0.02.
    assert set(draws(400, top_p=0.45)) == {1}
    assert set(draws(400, top_p=0.5)) == {1, 4}
    assert set(draws(400, top_p=0.8)) == {1, 4, 2}


def test_a_seeded_draw_follows_from_seed_and_index_alone():
    assert draws(50) == draws(50)
    other = SamplingParams(seed=12, temperature=1.0)
    assert draws(50) != [sample(LOGITS, other, index) for index in range(50)]
    assert len(set(draws(50))) > 2  # the index counts too


def test_the_last_bits_of_the_logits_do_not_change_the_draw():
    """Engines of different shapes add in different orders."""
    choice = SamplingParams(seed=3, temperature=1.0, top_p=0.9)
    logits = torch.randn(5000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    noise = 1e-7 * torch.randn(5000, generator=torch.Generator().manual_seed(2))
    for index in range(200):
        assert sample(logits, choice, index) == sample(logits + noise, choice, index)


def test_without_a_seed_draws_differ():
    choice = SamplingParams(temperature=1.0)
    logits = torch.zeros(1000)
    assert len({sample(logits, choice, 0) for _ in range(20)}) > 10
