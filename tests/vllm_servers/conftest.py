"""Servers are started once per shape; a single one, without a connector, tells the right tokens."""

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.remote import ROOT
from benchmarks.vllm_servers.client import complete, less_likely
from benchmarks.vllm_servers.front import in_front, router
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import Pair, pair_options, running
from benchmarks.vllm_servers.ports import free_port, free_ports
from benchmarks.vllm_servers.server import PYTHON, ServerOptions

collect_ignore = ["absent", "plugin"]
"""What servers import, vLLM among it, is no test."""
ROUTERS = ROOT / os.environ.get("KVFERRY_TEST_ROUTERS", ".venv-routers") / "bin" / "python"
"""The environment of ``vllm-router``; `make test-vllm` sets it up."""
PROXY = PYTHON.parents[1] / "examples" / "toy_proxy_server.py"
_RUNNING: list[Any] = []
"""Servers whose logs are shown beside a failure."""


def pytest_collection_modifyitems(items):
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if item.get_closest_marker("timeout") is None:
                # The first test of a shape starts its servers, perhaps beside other work.
                item.add_marker(pytest.mark.timeout(900))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        report.sections += [(f"log of {each.options.name}", each.tail()) for each in _RUNNING]
    return report


@pytest.fixture(scope="session")
def start(tmp_path_factory):
    """``start([options, ...])`` is a context manager over running servers."""
    logs = tmp_path_factory.mktemp("logs")

    @contextlib.contextmanager
    def starting(options):
        with running(options, logs) as servers:
            _RUNNING.extend(servers)
            try:
                yield servers
            finally:
                for server in servers:
                    _RUNNING.remove(server)

    return starting


@pytest.fixture(scope="session")
def start_pair(start):
    """``start_pair(model, shape, shape, connector)`` is a context manager over a pair."""

    @contextlib.contextmanager
    def starting(model, prefill, decode, connector, **options):
        with start(pair_options(model, prefill, decode, connector, **options)) as servers:
            yield Pair(*servers)

    return starting


@pytest.fixture(scope="session")
def start_router(tmp_path_factory):
    """``start_router(pair, *arguments)`` is a context manager over the URL of `kvferry router`,
    which knows no servers yet if the pair is ``None``."""
    log = tmp_path_factory.mktemp("router") / "log"

    def starting(pair, *arguments):
        if pair is not None:
            arguments += ("--prefill", pair.prefill.url, "--decode", pair.decode.url)
        return router(log, *arguments)

    return starting


@pytest.fixture(scope="session")
def start_vllms_proxy(tmp_path_factory):
    """``start_vllms_proxy(pair)`` is the same for the proxy among vLLM's own examples."""
    log = tmp_path_factory.mktemp("proxy") / "log"

    def starting(pair):
        port = free_port()
        prefill, decode = (httpx.URL(each.url) for each in (pair.prefill, pair.decode))
        command = [str(PYTHON), str(PROXY), "--port", str(port)]
        command += ["--prefiller-hosts", prefill.host, "--prefiller-ports", str(prefill.port)]
        command += ["--decoder-hosts", decode.host, "--decoder-ports", str(decode.port)]
        return in_front(command, f"http://127.0.0.1:{port}", "/healthcheck", log)

    return starting


@pytest.fixture
def through(tmp_path):
    """``through(proxy, pair)`` is a context manager over the URL of a proxy."""

    def starting(proxy, pair, *more):
        port = free_ports(2)
        command, health = proxy(pair.prefill.url, pair.decode.url, port, *more)
        program = Path(command[1] if command[1] != "-m" else command[0])
        if not program.exists():
            pytest.skip(f"{program} is not there; `make test-vllm` sets it up")
        return in_front(command, f"http://127.0.0.1:{port}", health, tmp_path / "proxy.log")

    return starting


def vllm_router(prefill, decode, port, *more):
    """Command and path that answers, for the fixture ``through``."""
    command = [str(ROUTERS), "-m", "vllm_router.launch_router", "--port", str(port)]
    command += ["--prometheus-port", str(port + 1), "--vllm-pd-disaggregation"]
    command += ["--prefill", prefill, "--decode", decode, "--policy", "round_robin", *more]
    # A server on a busy machine is slow, not gone.
    command += ["--disable-circuit-breaker", "--health-failure-threshold", "1000"]
    return command, "/health"


class Reference:
    """The greedy tokens of single servers, one at a time."""

    def __init__(self, start):
        self._start = start
        self._stack = contextlib.ExitStack()
        self._server = None
        self._known = {}

    def tokens(self, model, prompt, max_tokens=16):
        key = (model.name, tuple(prompt), max_tokens)
        if key not in self._known:
            self._known[key] = complete(self._of(model).url, prompt, max_tokens).tokens
        return self._known[key]

    def less_likely(self, model, prompt, token):
        """See :func:`less_likely`."""
        return less_likely(self._of(model).url, prompt, token)

    def _of(self, model):
        if self._server is None or self._server.options.model != model:
            self.close()
            options = ServerOptions(name="single", model=model)
            (self._server,) = self._stack.enter_context(self._start([options]))
        return self._server

    def close(self):
        self._stack.close()
        self._server = None


@pytest.fixture(scope="session")
def reference(start):
    reference = Reference(start)
    yield reference
    reference.close()


@pytest.fixture
def prompts(request):
    """24 for the tiny model, other ones in every test."""
    draw = random.Random(request.node.name)
    lengths = [draw.randrange(3, 700) for _ in range(24)]
    return [[draw.randrange(8, tiny_model().vocab_size) for _ in range(each)] for each in lengths]


@pytest.fixture
def expected(prompts, reference):
    """What a lone server answers to them."""
    return [reference.tokens(tiny_model(), prompt) for prompt in prompts]
