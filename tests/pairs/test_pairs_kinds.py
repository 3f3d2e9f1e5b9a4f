"""Pairs of engines whose layers keep windows or latents: equal tokens, and not a block too many."""

import random
from typing import Any

import pytest

MAX_TOKENS = 8
WINDOW = 24
FULL_LAYERS, WINDOW_LAYERS = 2, 4

hybrid = pytest.mark.parametrize("model_folder", ["hybrid"], indirect=True)
mla = pytest.mark.parametrize("model_folder", ["mla"], indirect=True)


def prompts(count: int, seed: int, shared: int = 0) -> list[list[int]]:
    """Prompts of 1 to 150 tokens, the first ones shorter than the window; ``shared`` alike."""
    chance = random.Random(seed)
    prefix = [chance.randrange(3, 300) for _ in range(shared)]
    lengths = [1, 11, *(chance.randint(30, 150) for _ in range(count - 2))]
    return [prefix + [chance.randrange(3, 300) for _ in range(length)] for length in lengths]


def shape(text: str) -> dict[str, Any]:
    """``"2x1 16 NHD whole"``: TP 2, PP 1, block size 16, layout NHD, all layers in one group."""
    parallel, block_size, layout, *grouping = text.split()
    tp, pp = parallel.split("x")
    return {
        "tp": int(tp),
        "pp": int(pp),
        "block_size": int(block_size),
        "layout": layout,
        "num_blocks": 200,
        "hybrid_kv_cache": grouping != ["whole"],
    }


def check_tokens_and_digests(open_pair: Any, undivided: Any, prefill: str, decode: str) -> None:
    """Five prompts through a pair: all KV from the source, bit for bit, and the right tokens."""
    pair = open_pair(shape(prefill), shape(decode))
    questions = prompts(5, seed=len(prefill) * len(decode))
    answers = pair.generate(questions, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    assert [answer.num_external_tokens for answer in answers] == [len(q) for q in questions]
    assert pair.check_digests() == len(questions)
    pair.settle()


HYBRID_PAIRS = [
    ("1x1 16 NHD", "1x1 16 NHD"),
    ("1x1 16 NHD whole", "1x1 16 NHD"),
    ("1x1 16 HND", "1x1 16 NHD whole"),
    ("2x1 16 NHD", "1x1 8 HND"),
    ("1x1 5 HND", "3x1 32 NHD"),
    ("1x2 12 BLKNHD", "2x1 7 BKHND"),
    ("2x1 32 BHNKD", "1x3 9 NHD"),
    ("1x5 10 NHD whole", "2x2 16 BLHNKD"),
    ("3x2 9 NHD", "2x3 40 HND whole"),
    ("4x1 64 NHD", "1x6 6 HND"),
]


@hybrid
@pytest.mark.parametrize(("prefill", "decode"), HYBRID_PAIRS)
def test_windows_and_full_attention_together_give_the_tokens_of_the_undivided_engine(
    open_pair: Any, undivided: Any, prefill: str, decode: str
) -> None:
    check_tokens_and_digests(open_pair, undivided, prefill, decode)


MLA_PAIRS = [
    ("1x1 16 NHD", "1x1 16 NHD"),
    ("2x1 16 NHD", "1x1 8 NHD"),
    ("1x1 8 HND", "4x1 16 NHD"),
    ("1x2 12 BLKNHD", "3x1 7 HND"),
    ("3x1 32 NHD", "1x5 9 BKHND"),
    ("2x2 5 NHD", "3x2 64 BLHNKD"),
]


@mla
@pytest.mark.parametrize(("prefill", "decode"), MLA_PAIRS)
def test_latent_attention_gives_the_tokens_of_the_undivided_engine(
    open_pair: Any, undivided: Any, prefill: str, decode: str
) -> None:
    check_tokens_and_digests(open_pair, undivided, prefill, decode)


def _first_block(num_tokens: int, block_size: int) -> int:
    """The block in which the window of the next token begins."""
    return max(0, num_tokens - WINDOW + 1) // block_size


@pytest.mark.parametrize("model_folder", ["hybrid", "mla"], indirect=True)
@pytest.mark.parametrize(
    ("prefill", "decode"), [("2x1 16 NHD", "1x2 8 HND"), ("1x2 8 HND", "3x1 12 NHD")]
)
def test_prefix_hits_on_either_side_change_no_token_and_what_is_here_is_not_fetched(
    open_pair: Any, undivided: Any, request: Any, prefill: str, decode: str
) -> None:
    pair = open_pair(shape(prefill), shape(decode))
    for questions in (prompts(3, seed=5, shared=100), prompts(3, seed=5, shared=100)[::-1]):
        answers = pair.generate(questions, MAX_TOKENS)
        assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
        for question, answer in zip(questions, answers, strict=True):
            assert answer.num_cached_tokens + answer.num_external_tokens == len(question)
    # The second time round, D has each prompt but for its last, unfinished block. Of layers with
    # windows it has the blocks from the one on in which the window of the whole prompt began.
    block_size = int(decode.split()[1])
    again = [
        answer.num_external_tokens < block_size
        for question, answer in zip(questions, answers, strict=True)
        if request.node.callspec.params["model_folder"] == "mla"
        or _first_block(len(question) // block_size * block_size, block_size)
        == _first_block(len(question), block_size)
    ]
    assert again
    assert all(again)
    longer = [[*question, *range(3, 60)] for question in questions]
    answers = pair.generate(longer, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(longer, MAX_TOKENS)
    assert all(answer.num_cached_tokens >= 96 for answer in answers)
    pair.check_digests()
    pair.settle()


@hybrid
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("1x1 16 NHD", "1x1 16 NHD"),
        ("2x1 16 NHD", "1x3 7 HND"),
        ("1x2 5 HND whole", "3x1 32 NHD"),
    ],
)
def test_no_block_outside_the_windows_moves(
    open_pair: Any, undivided: Any, prefill: str, decode: str
) -> None:
    pair = open_pair(shape(prefill), shape(decode))
    questions = prompts(4, seed=9)
    answers = pair.generate(questions, MAX_TOKENS)
    assert [answer.token_ids for answer in answers] == undivided(questions, MAX_TOKENS)
    moved = sum(record.nbytes for record in pair.records if record.direction == "recv")
    per_layer = [min(len(question), WINDOW - 1) for question in questions]
    needed = sum(
        FULL_LAYERS * len(question) + WINDOW_LAYERS * tokens
        for question, tokens in zip(questions, per_layer, strict=True)
    )
    # The rest of the block in which a window begins may come along.
    rest = WINDOW_LAYERS * len(questions) * (int(decode.split()[1]) - 1)
    bytes_per_token_and_layer = 2 * 3 * 16 * 8  # k and v, heads, elements, float64
    assert needed <= moved // bytes_per_token_and_layer <= needed + rest
    pair.settle()
