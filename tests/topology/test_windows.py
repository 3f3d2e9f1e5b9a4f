"""Which tokens a window or a chunk still needs, against what attention masks say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvferry.topology.windows import computed_to_forget, first_kept_token

WINDOWS = st.one_of(
    st.builds(lambda size: {"sliding_window": size}, st.integers(1, 12)),
    st.builds(lambda size: {"attention_chunk_size": size}, st.integers(1, 12)),
    st.just({}),
)


def attends(token, other, sliding_window=None, attention_chunk_size=None):
    if sliding_window is not None:
        return token - sliding_window < other <= token
    if attention_chunk_size is not None:
        return other // attention_chunk_size == token // attention_chunk_size and other <= token
    return other <= token


@given(WINDOWS, st.integers(0, 40))
def test_first_kept_token_is_the_first_that_any_token_to_come_attends_to(window, num_computed):
    needed = [
        other
        for token in range(num_computed, num_computed + 30)
        for other in range(token + 1)
        if attends(token, other, **window)
    ]
    assert first_kept_token(num_computed, **window) == min(needed)


@given(WINDOWS, st.integers(0, 40))
def test_forgetting_takes_the_fewest_computed_tokens(window, num_tokens):
    wanted = next((n for n in range(80) if first_kept_token(n, **window) >= num_tokens), None)
    assert computed_to_forget(num_tokens, **window) == wanted


@pytest.mark.parametrize("rule", [first_kept_token, computed_to_forget])
def test_a_window_and_a_chunk_exclude_each_other(rule):
    with pytest.raises(ValueError, match="sliding_window=4 and attention_chunk_size=8"):
        rule(5, sliding_window=4, attention_chunk_size=8)
