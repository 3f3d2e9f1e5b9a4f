"""``kvferry engine`` as processes: it enters a router, comes back when it dies, and drains."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import httpx
import psutil
import pytest

from kvferry.cli import engine as command
from kvferry.cli.console import make_console
from kvferry.testing.waiting import until

COMMAND = [sys.executable, "-m", "kvferry.cli"]
PROMPT = list(range(1, 40))

ENGINE = """
[[{role}]]
name = "{name}"
tp = {tp}
block_size = {block_size}
num_blocks = 64
max_model_len = 512
[{role}.kv_transfer_config]
kv_connector = "PullConnector"
kv_role = "{kv_role}"
kv_port = 0
[{role}.kv_transfer_config.kv_connector_extra_config]
cluster_key = "0123456789abcdef0123456789abcdef"
"""

FILE = (
    '[model]\nsource = "tiny"\ndtype = "float64"\n'
    + ENGINE.format(role="prefill", name="p0", tp=2, block_size=16, kv_role="kv_producer")
    + ENGINE.format(role="decode", name="d0", tp=1, block_size=24, kv_role="kv_consumer")
)


@pytest.fixture(autouse=True)
def _operator_key(monkeypatch):
    monkeypatch.setenv("KVFERRY_OPERATOR_KEY", "operator")


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def start(tmp_path):
    """Starts a command whose output goes to a file; returns both."""
    with contextlib.ExitStack() as stack:

        def begin(*arguments):
            log = tmp_path / f"{arguments[0]}-{arguments[2]}.log"
            with log.open("w") as output:
                process = stack.enter_context(
                    subprocess.Popen([*COMMAND, *arguments], stdout=output, stderr=output)
                )
            stack.callback(process.kill)
            return process, log

        yield begin


def states(url):
    with contextlib.suppress(httpx.HTTPError):
        found = httpx.get(f"{url}/kvferry/engines", trust_env=False, timeout=60).json()
        return {engine["name"]: engine["state"] for engine in found["engines"]}
    return None


def ask(url):
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, trust_env=False, timeout=60).json()
    return answer["choices"][0]["token_ids"]


@pytest.mark.processes
@pytest.mark.smoke
@pytest.mark.slow
def test_engines_enter_a_router_come_back_when_they_die_and_leave_by_draining(file, start):
    router, log = start("router", "--port", "0")
    (url, *_) = until(lambda: re.findall(r"http://127\.0\.0\.1:\d+(?=/v1 )", log.read_text()))
    prefill, _ = start("engine", str(file), "p0", "--router", url)
    decode, said = start("engine", str(file), "d0", "--router", url)
    until(lambda: states(url) == {"p0": "ready", "d0": "ready"})
    tokens = ask(url)

    for child in psutil.Process(decode.pid).children(recursive=True):
        child.kill()
    until(lambda: "serves again: d0" in said.read_text())
    until(lambda: states(url) == {"p0": "ready", "d0": "ready"})
    assert ask(url) == tokens

    for engine in (decode, prefill):
        engine.send_signal(signal.SIGTERM)
        assert engine.wait(60) == 0
    assert "drained\n" in said.read_text()
    assert states(url) == {}
    router.send_signal(signal.SIGINT)
    assert router.wait(60) == 0


@pytest.mark.processes
@pytest.mark.slow
def test_an_engine_that_fails_and_is_not_started_again_ends_with_1(file, start):
    file.write_text(FILE.replace('name = "d0"', 'name = "d0"\nrestart = "never"'))
    command, said = start("engine", str(file), "d0")
    until(lambda: "logs: " in said.read_text())
    for child in psutil.Process(command.pid).children(recursive=True):
        child.kill()
    assert command.wait(60) == 1
    assert "died: d0" in said.read_text()


@pytest.mark.parametrize(
    ("change", "name", "message"),
    [
        ("", "d1", "engine 'd1' is not in the cluster; there are ['p0', 'd0']"),
        ('name = "d0"\nhost = "0.0.0.0"', "d0", "host: '0.0.0.0' is no address that a router"),
        ('name = "d0"\nhost = "10.1.2.3"', "d0", "set KVFERRY_API_KEY for engines and router"),
    ],
)
def test_an_engine_that_cannot_be_started_is_one_message(file, change, name, message):
    if change:
        file.write_text(FILE.replace('name = "d0"', change))
    done = subprocess.run(
        [*COMMAND, "engine", str(file), name], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert message in " ".join(done.stderr.split())


def test_routers_are_told_at_once(monkeypatch):
    """One that cannot be reached takes its time."""
    both_ask = threading.Barrier(2, timeout=60)

    class Client:
        def __init__(self, url, _key):
            self.url = url

        def _told(self, *_):
            both_ask.wait()

        put = drain = delete = _told

    monkeypatch.setattr(command, "RouterClient", Client)
    routers = command.Routers(["http://a", "http://b"], None, make_console())
    engine: Any = SimpleNamespace(role="decode", name="d0", url="http://d0")
    routers.enter(engine)
    routers.drain(engine)
    routers.leave(engine)
    assert not both_ask.broken
