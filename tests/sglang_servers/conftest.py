"""Servers are started once per shape; a lone one tells the right tokens."""

import contextlib
import functools
from itertools import takewhile
from pathlib import Path

import pytest

from benchmarks.vllm_servers.models import tiny_model
from tests.sglang_servers.servers import PYTHON, asked, launched, lead, pair, running, tokens

collect_ignore = ["absent"]
"""What servers import is no test."""


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.sglang)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(1200))


@pytest.fixture(scope="session", autouse=True)
def environment():
    if not PYTHON.exists():
        pytest.skip(f"{PYTHON} is not there; `make test-sglang` sets it up")


@pytest.fixture(scope="session")
def start_pair(tmp_path_factory):
    """``start_pair(page_size, page_size, *arguments)`` is a context manager over a pair; see
    :func:`pair`.
    """
    return lambda *shape, **more: pair(tmp_path_factory.mktemp("pair"), *shape, **more)


NEAR_TIE = 1e-4
"""Difference in nats below which two engines may take either of two tokens."""


def same(one, other):
    """The tokens before the first that differs."""
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=True))]


class Reference:
    """The greedy tokens of a lone server, which runs while it is asked."""

    def __init__(self, folder, *arguments, model=None):
        self._launched = lambda name: launched(folder / f"{name}.log", *arguments, model=model)
        self._known = {}

    def learn(self, *sets):
        """Asks for all prompts of some sets that are not known yet."""
        unknown = [each for one in sets for each in one if tuple(each) not in self._known]
        if not unknown:
            return
        lone = self._launched("lone")
        with running(lone):
            for prompt in unknown:
                self._known[tuple(prompt)] = tokens(lone.url, asked(prompt))

    def are_near_ties(self, answers):
        """Whether each wrong answer differs first where two tokens are equally likely.

        ``answers`` are pairs of a prompt and its wrong answer.
        """
        lone = self._launched("ties")
        with running(lone):
            return all(
                lead(lone.url, [*prompt, *same(answer, self._known[tuple(prompt)])]) < NEAR_TIE
                for prompt, answer in answers
            )

    def of(self, prompts):
        self.learn(prompts)
        return [self._known[tuple(prompt)] for prompt in prompts]


@pytest.fixture(scope="session")
def reference_of(tmp_path_factory):
    """``reference_of(model)`` is the reference of a model."""
    return functools.cache(lambda model: Reference(tmp_path_factory.mktemp("lone"), model=model))


@pytest.fixture(scope="session")
def reference(reference_of):
    return reference_of(tiny_model())


@pytest.fixture
def together():
    """``together(urls, body)`` sends one request to some servers; returns the last one's tokens."""
    from concurrent.futures import ThreadPoolExecutor

    with contextlib.ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor(32))

        def send(urls, body):
            first = [threads.submit(tokens, url, body) for url in urls[:-1]]
            found = tokens(urls[-1], body)
            for each in first:
                each.result()
            return found

        yield send
