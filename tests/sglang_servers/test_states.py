"""Pairs of servers of a model with recurrent layers answer as a lone server does.

The kernels of gated delta nets are those of ``absent/delta_nets.py``; all else is SGLang's.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.vllm_servers.models import delta_net_model
from kvferry.testing.waiting import until
from tests.sglang_servers.conftest import Reference
from tests.sglang_servers.servers import asked, mini_lb, prompts, tokens

pytestmark = pytest.mark.slow

PROMPTS = prompts("states", 16)
WITHOUT_PREFIXES = "--disable-radix-cache"
"""SGLang keeps states for prefixes with pages of one token alone."""
PER_TOKEN = 2 * 2 * 64 * 4
"""Bytes of K and V of a token: 1 layer, 2 KV heads of 64 float32."""
STATES = 3 * (3 * (2 * 256 + 512) + 4 * 128 * 128) * 4
"""Bytes of the states of a request: 3 layers with the last 3 inputs of a convolution of queries,
keys and values, and 4 heads with a matrix of 128 by 128, all float32."""
SHAPES = {
    "16 to 64": ((16, 64), (1, 1), (WITHOUT_PREFIXES,)),
    "64 to 16, TP 2 to 1": ((64, 16), (2, 1), (WITHOUT_PREFIXES,)),
    "16 to 32, TP 1 to 2": ((16, 32), (1, 2), (WITHOUT_PREFIXES,)),
    "1 to 32, prefill with a prefix cache": ((1, 32), (1, 1), ()),
}
"""Page sizes, numbers of ranks, and options of both servers. SGLang wants pages that divide 64, a
chunk of its kernels."""


@pytest.fixture(scope="module")
def model():
    return delta_net_model("float32")


@pytest.fixture(scope="module")
def right(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("lone-states")
    return Reference(folder, WITHOUT_PREFIXES, model=model).of(PROMPTS)


@pytest.fixture(
    scope="module", params=[pytest.param(shape, id=name) for name, shape in SHAPES.items()]
)
def pair(request, right, model, start_pair):
    pages, ranks, both = request.param
    with start_pair(*pages, ranks=ranks, model=model, both=both) as pair:
        yield pair


def moved(prompts):
    return PER_TOKEN * sum(map(len, prompts)) + STATES * len(prompts)


def test_one_at_a_time(pair, right, together):
    before = pair.decode.loaded_bytes()
    urls = [pair.prefill.url, pair.decode.url]
    assert [together(urls, pair.body(prompt)) for prompt in PROMPTS] == right
    assert pair.decode.loaded_bytes() - before == moved(PROMPTS)
    until(lambda: pair.prefill.open_leases() == 0)


def test_eight_at_a_time(pair, right, tmp_path):
    before = pair.decode.loaded_bytes()
    with mini_lb(tmp_path / "lb.log", pair) as url, ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda prompt: tokens(url, asked(prompt)), PROMPTS)) == right
    assert pair.decode.loaded_bytes() - before == moved(PROMPTS)
    until(lambda: pair.prefill.open_leases() == 0)


def test_states_move_again_whatever_a_prefix_cache_has(start_pair, right, model, together):
    """The decode server has tokens of the prompts, and no states that it could go on from."""
    asked_twice = [number for number, prompt in enumerate(PROMPTS) if len(prompt) < 600][:8]
    some = [PROMPTS[number] for number in asked_twice]
    with start_pair(1, 1, "--disaggregation-decode-enable-radix-cache", model=model) as pair:
        urls = [pair.prefill.url, pair.decode.url]
        loaded = []
        for _ in range(2):
            before = pair.decode.loaded_bytes()
            answers = [together(urls, pair.body(prompt)) for prompt in some]
            assert answers == [right[number] for number in asked_twice]
            loaded.append(pair.decode.loaded_bytes() - before)
    assert loaded[0] == moved(some)
    assert STATES * len(some) <= loaded[1] < loaded[0]
