"""What a manager says of room holds: the most that a request takes, and that it can finish."""

from collections.abc import Callable

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


@LAW
@given(
    setup=setups(ANY, ANY),
    num_before=st.integers(0, 40),
    num_external=st.integers(0, 20),
    num_tokens=st.integers(1, 60),
    step=st.integers(1, 20),
)
def test_a_request_takes_no_more_blocks_than_were_said_to_come(
    setup, num_before, num_external, num_tokens, step
):
    manager = manager_over(setup, 60)
    before = Request("before", list(range(num_before + 1)))
    if manager.allocate_slots(before, num_before + 1) is not None:
        manager.free(before)
    request = Request("r", list(range(num_tokens)))
    hits, num_local = manager.get_computed_blocks(request)
    num_external = min(num_external, num_tokens - 1 - num_local)
    num_free = manager.block_pool.get_num_free_blocks()
    to_come = manager.blocks_to_come(request, step, num_local, hits, num_external)
    counts = [step] * (num_tokens // step + 1)
    if num_external:
        counts = [0, *counts]
    admission = {
        "num_new_computed_tokens": num_local,
        "new_computed_blocks": hits,
        "num_external_computed_tokens": num_external,
    }
    for count in counts:
        ready = request.num_computed_tokens + sum(
            n for name, n in admission.items() if name.startswith("num")
        )
        num_new = min(count, num_tokens - ready)
        if ready == num_tokens:
            break
        if manager.allocate_slots(request, num_new, **admission) is None:
            assert to_come > num_free
            break
        request.num_computed_tokens = ready + num_new
        admission = {}
        assert num_free - manager.block_pool.get_num_free_blocks() <= to_come


def test_an_encoders_output_is_no_block_to_come(
    make_group_manager: Callable[..., KVCacheManager],
) -> None:
    manager = make_group_manager(("full",), ("cross",))
    request = Request("r", list(range(12)))
    manager.allocate_slots(request, 8, num_encoder_tokens=4)
    request.num_computed_tokens = 8
    assert manager.blocks_to_come(request, 4) == 1
