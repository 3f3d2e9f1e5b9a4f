"""A decode server with a prefix cache of its own loads only the tokens that it lacks."""

import pytest

from tests.sglang_servers.servers import BYTES_PER_TOKEN, prompts

pytestmark = pytest.mark.slow
PAGE = 24
PROMPTS = [prompt for prompt in prompts("prefixes", 40) if len(prompt) < 600][:8]
"""Together fewer tokens than the cache holds."""


def test_only_the_last_tokens_of_a_prompt_move_again(start_pair, reference, together):
    right = reference.of(PROMPTS)
    with start_pair(16, PAGE, "--disaggregation-decode-enable-radix-cache") as pair:
        urls = [pair.prefill.url, pair.decode.url]
        moved = []
        for _ in range(2):
            before = pair.decode.loaded_bytes()
            assert [together(urls, pair.body(prompt)) for prompt in PROMPTS] == right
            moved.append(pair.decode.loaded_bytes() - before)
    lengths = [len(prompt) for prompt in PROMPTS]
    # No two of these prompts begin with the same page of tokens.
    assert moved[0] == BYTES_PER_TOKEN * sum(lengths)
    assert moved[1] == BYTES_PER_TOKEN * sum(length % PAGE for length in lengths)
