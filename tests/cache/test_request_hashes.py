"""Requests and their chained block hashes."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.cache import MultiModalInput, Request
from kvferry.cache.request import HASH_BYTES

TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=24)
SALTS = st.sampled_from([None, "", "a", "b"])


# Few identifiers and a short prompt, so that inputs are often equal, neighbours or overlapping.
IMAGES = st.lists(
    st.builds(
        MultiModalInput, st.sampled_from(["cat", "dog"]), st.integers(0, 7), st.integers(1, 9)
    ),
    max_size=3,
)


def hashes(token_ids, block_size=4, **options):
    return list(Request("r", token_ids, hash_block_size=block_size, **options).block_hashes)


def test_only_full_blocks_are_hashed():
    assert [len(hashes(range(n))) for n in (1, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert all(len(block_hash) == HASH_BYTES for block_hash in hashes(range(8)))


@given(TOKENS, TOKENS, SALTS, SALTS, SALTS, SALTS, st.integers(1, 5))
def test_hashes_are_equal_exactly_where_prefixes_are(a, b, salt_a, salt_b, lora_a, lora_b, size):
    of_a = hashes(a, size, cache_salt=salt_a, lora_name=lora_a)
    of_b = hashes(b, size, cache_salt=salt_b, lora_name=lora_b)
    same_root = (salt_a, lora_a) == (salt_b, lora_b)
    for i, hash_a in enumerate(of_a):
        for j, hash_b in enumerate(of_b):
            same = i == j and same_root and a[: (i + 1) * size] == b[: (i + 1) * size]
            assert (hash_a == hash_b) == same


@given(TOKENS, st.lists(TOKENS, max_size=6), st.integers(1, 5))
def test_appended_tokens_are_hashed_as_if_they_had_been_there(prompt, appended, size):
    request = Request("r", prompt, hash_block_size=size)
    tokens = list(prompt)
    for more in appended:
        request.append_output_token_ids(more[0] if len(more) == 1 else more)
        tokens += more
        assert request.all_token_ids == tokens
        assert request.block_hashes == hashes(tokens, size)
    assert request.num_tokens == len(tokens)
    assert request.prompt_token_ids == prompt
    assert request.output_token_ids == tokens[len(prompt) :]


def seen(block, size, images):
    """The images that a block shows, and where each begins, by looking at every place."""
    first = block * size
    return sorted(
        (image.offset - first, image.identifier)
        for image in images
        if any(
            image.offset <= place < image.offset + image.length
            for place in range(first, first + size)
        )
    )


@given(IMAGES, IMAGES, st.integers(1, 5))
def test_requests_of_equal_text_share_only_the_blocks_before_the_images_differ(a, b, size):
    tokens = [0] * 16
    same = True
    for block, (hash_a, hash_b) in enumerate(
        zip(hashes(tokens, size, mm_inputs=a), hashes(tokens, size, mm_inputs=b), strict=True)
    ):
        same = same and seen(block, size, a) == seen(block, size, b)
        assert (hash_a == hash_b) == same


def test_image_is_hashed_the_same_when_its_block_fills_late():
    image = MultiModalInput("cat", 1, 3)
    request = Request("r", [1, 2, 2, 2], mm_inputs=[image], hash_block_size=3)
    request.append_output_token_ids([3, 4, 5])
    assert request.block_hashes == hashes([1, 2, 2, 2, 3, 4, 5], 3, mm_inputs=[image])
    assert request.block_hashes != hashes([1, 2, 2, 2, 3, 4, 5], 3)


def test_anything_with_the_attributes_of_an_input_will_do():
    class Feature:
        identifier, offset, length = "cat", 0, 2

    like: Any = Feature()  # as an engine's own class is
    assert Request("r", [1, 1], mm_inputs=[like]).mm_inputs == (MultiModalInput("cat", 0, 2),)


@pytest.mark.parametrize(
    ("identifier", "offset", "length"), [("", 0, 1), ("x", -1, 2), ("x", 1, 0), ("x", 2, 3)]
)
def test_input_outside_the_prompt_or_without_a_name_is_refused(identifier, offset, length):
    with pytest.raises(ValueError, match=r"mm_inputs: '.*of a prompt of 4; give"):
        Request("r", range(4), mm_inputs=[MultiModalInput(identifier, offset, length)])


def test_extra_keys_are_what_the_hash_of_the_block_holds_beside_tokens():
    request = Request(
        "r",
        range(12),
        cache_salt="s",
        lora_name="l",
        mm_inputs=[MultiModalInput("dog", 6, 2), MultiModalInput("cat", 3, 3)],
    )
    assert request.extra_keys(0, 4) == ("l", ("cat", 3), "s")
    assert request.extra_keys(4, 8) == ("l", ("cat", -1), ("dog", 2))
    assert request.extra_keys(8, 12) == ("l",)
    assert Request("r", range(4)).extra_keys(0, 4) is None


def test_request_without_a_block_size_is_hashed_on_first_use():
    request = Request("r", range(9))
    assert request.block_hashes == []
    assert request.hash_blocks(4) == hashes(range(9))
    request.append_output_token_ids([9, 10, 11])
    assert request.block_hashes == hashes(range(12))
    assert request.hash_block_size == 4


def test_salt_and_lora_name_are_not_interchangeable():
    assert hashes(range(4), cache_salt="x") != hashes(range(4), lora_name="x")


def test_another_process_computes_the_same_hashes():
    program = (
        "from kvferry.cache import MultiModalInput as M, Request\n"
        "r = Request('r', range(40), cache_salt='s', lora_name='l', hash_block_size=4,\n"
        "            mm_inputs=[M('cat', 3, 9)])\n"
        "print(b''.join(r.block_hashes).hex())\n"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()
        for seed in ("0", "1")
    }
    images = [MultiModalInput("cat", 3, 9)]
    expected = hashes(range(40), cache_salt="s", lora_name="l", mm_inputs=images)
    assert outputs == {b"".join(expected).hex()}


@pytest.mark.parametrize("token_id", [-1, 1 << 32, 1.5, "7", None])
def test_bad_token_id_is_refused_when_hashed(token_id):
    with pytest.raises(ValueError, match="a token id is an integer in"):
        Request("r", [1, 2, 3, token_id], hash_block_size=4)


def test_bad_requests_are_refused():
    with pytest.raises(ValueError, match="the prompt is empty"):
        Request("r", [])
    with pytest.raises(ValueError, match="hash_block_size: 0"):
        Request("r", [1], hash_block_size=0)


def test_block_size_is_fixed_by_the_first_use():
    request = Request("r", range(8), hash_block_size=4)
    with pytest.raises(ValueError, match=r"hashed per 4 tokens.*block size is 8"):
        request.hash_blocks(8)


def test_callers_lists_are_copied():
    prompt = [1, 2, 3]
    request = Request("r", prompt)
    prompt.append(4)
    request.append_output_token_ids(5)
    assert request.prompt_token_ids == [1, 2, 3]
    assert request.all_token_ids == [1, 2, 3, 5]


def test_an_integer_of_numpy_is_one_token():
    request = Request("r", [1, 2], hash_block_size=2)
    request.append_output_token_ids(np.int64(3))
    request.append_output_token_ids(np.array([4, 5]))
    assert list(request.all_token_ids) == [1, 2, 3, 4, 5]
    same = Request("s", [1, 2, 3, 4, 5], hash_block_size=2)
    assert request.block_hashes == same.block_hashes
