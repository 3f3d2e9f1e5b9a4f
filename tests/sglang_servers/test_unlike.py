"""A vLLM server and an SGLang server, either of them first, answer as a lone server does.

`kvferry router` stands in front of them. The bytes that moved are counted: a decode server that
computes the prompt itself would answer as well. A lone SGLang server gives the right answers; two
engines may differ where two tokens are equally likely, and such answers are counted apart.
"""

from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from benchmarks.vllm_servers.client import RefusalError, complete, stream
from kvferry.testing.waiting import until
from tests.sglang_servers.models import WINDOW, windowed_model
from tests.sglang_servers.servers import BYTES_PER_TOKEN, prompts
from tests.sglang_servers.unlike import Shape, unlike_pair

SHAPES = {
    "vllm 32 to sglang 24": Shape(first="vllm", block_size=32, page_size=24, number=12),
    "vllm 128 to sglang 1": Shape(first="vllm", block_size=128, page_size=1, number=100),
    "vllm 32 to sglang 64": Shape(first="vllm", block_size=32, page_size=64, number=100),
    "sglang 16 to vllm 96": Shape(first="sglang", block_size=96, page_size=16, number=100),
    "sglang 64 to vllm 32": Shape(first="sglang", block_size=32, page_size=64, number=100),
    "vllm 32 to sglang 24, TP 2": Shape(first="vllm", block_size=32, page_size=24, ranks=(1, 2)),
    "sglang 16, TP 2, to vllm 96": Shape(first="sglang", block_size=96, page_size=16, ranks=(1, 2)),
    "vllm 64, TP 2, to sglang 24": Shape(first="vllm", block_size=64, page_size=24, ranks=(2, 1)),
    "sglang 16 to vllm 64, TP 2": Shape(first="sglang", block_size=64, page_size=16, ranks=(2, 1)),
}
SHORT = "vllm 32 to sglang 24"
MOST_TIES = 2
"""Number of answers of a hundred that may differ by a near tie."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(shape, id=name, marks=() if name == SHORT else pytest.mark.slow)
        for name, shape in SHAPES.items()
    ],
)
def unlike(request, reference, tmp_path_factory):
    number = request.param.number
    # Before the pair runs: a lone server takes a core too.
    reference.learn(prompts("one by one", number), prompts("eight at once", number))
    with unlike_pair(tmp_path_factory.mktemp("unlike"), request.param) as pair:
        yield pair


def check(pair, asked, answers, reference, before):
    right = reference.of(asked)
    found = zip(asked, answers, right, strict=True)
    wrong = [(prompt, answer) for prompt, answer, expected in found if answer != expected]
    moved = sum(len(prompt) - pair.shape.computed_here for prompt in asked)
    assert pair.loaded_bytes - before == BYTES_PER_TOKEN * moved
    until(lambda: pair.is_idle)
    print(f"{len(asked)} answers, {len(wrong)} of them other than the lone server's")
    assert len(wrong) <= MOST_TIES
    assert not wrong or reference.are_near_ties(wrong)


def test_one_at_a_time(unlike, reference):
    asked, before = prompts("one by one", unlike.shape.number), unlike.loaded_bytes
    answers = [complete(unlike.url, prompt, 16).tokens for prompt in asked]
    check(unlike, asked, answers, reference, before)


def test_eight_at_a_time(unlike, reference):
    asked, before = prompts("eight at once", unlike.shape.number), unlike.loaded_bytes
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: complete(unlike.url, prompt, 16).tokens, asked))
    check(unlike, asked, answers, reference, before)


def test_streams(unlike, reference):
    asked = prompts("one by one", unlike.shape.number)[:8]
    answers = [stream(unlike.url, prompt, 16)[1] for prompt in asked]
    assert answers == reference.of(asked)


def test_operators_see_of_which_kind_each_server_is(unlike):
    names = [report.serving_engine.partition(" ")[0] for report in unlike.reports]
    assert names == (["vLLM", "SGLang"] if unlike.shape.is_vllm_first else ["SGLang", "vLLM"])
    engines = httpx.get(f"{unlike.url}/health").json()["engines"]
    assert {engine["kind"].partition(" ")[0] for engine in engines} == {"vllm", "sglang"}


# ---- layers with a window ------------------------------------------------------------------------


OF_TWO_LAYERS = 2 * 2 * 4 * 32 * 4
"""Bytes of a token in the two layers with a window, and in the two layers without."""


@pytest.mark.slow
@pytest.mark.parametrize("first", ["vllm", "sglang"])
def test_a_layer_with_a_window_loads_only_its_last_tokens(first, reference_of, tmp_path):
    asked = prompts("windows", 24)
    reference = reference_of(windowed_model())
    reference.learn(asked)
    shape = Shape(first=first, block_size=32, page_size=16, model=windowed_model)
    with unlike_pair(tmp_path, shape) as pair, ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda prompt: complete(pair.url, prompt, 16).tokens, asked))
        lengths = [len(prompt) - shape.computed_here for prompt in asked]
        # The next token attends to itself and to one token less than the window has. vLLM may find
        # a prefix in its cache later, so it loads whole blocks.
        granule = 1 if first == "vllm" else shape.block_size
        beyond = [max(0, each - WINDOW + 1) // granule * granule for each in lengths]
        assert pair.loaded_bytes == OF_TWO_LAYERS * (2 * sum(lengths) - sum(beyond))
        until(lambda: pair.is_idle)
    wrong = [
        (prompt, answer)
        for prompt, answer, right in zip(asked, answers, reference.of(asked), strict=True)
        if answer != right
    ]
    print(f"{len(asked)} answers, {len(wrong)} of them other than the lone server's")
    assert len(wrong) <= MOST_TIES
    assert not wrong or reference.are_near_ties(wrong)


# ---- keys ----------------------------------------------------------------------------------------

KEY = {"cluster_key": "of the servers of one test run alone"}


OTHER = {"cluster_key": "of the servers of another test run"}
(PROMPT,) = prompts("keys", 9)[8:]


def assert_refused_for_its_key(pair, url):
    """A client of an SGLang server is told why. vLLM writes such reasons to its log alone."""
    before = pair.vllm.log.read_text().count("cluster_key_file")
    with pytest.raises(RefusalError) as caught:
        complete(url, PROMPT, 16)
    print(caught.value)
    is_told = "cluster_key_file" in str(caught.value)
    assert is_told or pair.vllm.log.read_text().count("cluster_key_file") > before


@pytest.mark.slow
@pytest.mark.parametrize("first", ["vllm", "sglang"])
def test_servers_with_a_key_refuse_a_router_with_another_by_name(first, reference, tmp_path):
    right = reference.of([PROMPT])[0]
    files = [tmp_path / "cluster.key", tmp_path / "other.key"]
    for file, key in zip(files, (KEY, OTHER), strict=True):
        file.write_text(key["cluster_key"])
    shape = Shape(first=first, block_size=32, page_size=16, extra=KEY)
    with unlike_pair(tmp_path, shape, "--cluster-key-file", str(files[0])) as pair:
        assert complete(pair.url, PROMPT, 16).tokens == right
        for arguments in (("--cluster-key-file", str(files[1])), ()):
            with pair.router(*arguments) as url:
                assert_refused_for_its_key(pair, url)
        until(lambda: pair.is_idle)
        assert complete(pair.url, PROMPT, 16).tokens == right


@pytest.mark.slow
@pytest.mark.parametrize("first", ["vllm", "sglang"])
def test_a_decode_server_with_another_key_is_refused_by_name(first, tmp_path):
    file = tmp_path / "cluster.key"
    file.write_text(KEY["cluster_key"])
    shape = Shape(first=first, block_size=32, page_size=16, extra=KEY, others=OTHER)
    with unlike_pair(tmp_path, shape, "--cluster-key-file", str(file)) as pair:
        assert_refused_for_its_key(pair, pair.url)
        until(lambda: pair.is_idle)
