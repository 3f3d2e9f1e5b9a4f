"""What a manager says of room holds: the most that a request takes, and that it can finish."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.cache import KVCacheManager, Request
from tests.cache.slow.configs import chunk, full, mla, setups, sink, state, window
from tests.cache.slow.model import live_blocks

ANY = (full, mla, sink, window, chunk, state)
LAW = settings(max_examples=150, deadline=None)


def manager_over(setup, max_model_len):
    return KVCacheManager(setup.config, max_model_len, setup.enable_caching, setup.use_eagle)


@LAW
@given(setup=setups(ANY), num_tokens=st.integers(1, 120), step=st.integers(1, 20))
def test_peak_is_the_most_that_a_request_holds_at_once(setup, num_tokens, step):
    (group,) = setup.groups
    steps = [(n, min(n + step, num_tokens)) for n in range(num_tokens)]
    most = max(live_blocks(group, *room) for room in steps)
    peak = manager_over(setup, 120).peak_blocks(num_tokens, step)
    assert most <= peak
    if num_tokens >= 80:  # long enough for windows to begin anywhere in a block
        assert most == peak


@LAW
@given(setup=setups(ANY, ANY), num_tokens=st.integers(1, 60), step=st.integers(1, 20))
def test_a_request_whose_whole_sequence_fits_gets_to_its_end(setup, num_tokens, step):
    manager = manager_over(setup, 60)
    request = Request("r", list(range(num_tokens)))
    while request.num_computed_tokens < num_tokens:
        num_new = min(step, num_tokens - request.num_computed_tokens)
        is_first = request.num_computed_tokens == 0
        blocks = manager.allocate_slots(request, num_new, full_sequence_must_fit=is_first)
        if is_first and blocks is None:
            peak = manager.peak_blocks(num_tokens, step)
            assert peak > manager.block_pool.get_num_free_blocks()
            return
        assert blocks is not None
        request.num_computed_tokens += num_new
