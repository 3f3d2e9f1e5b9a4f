"""``kvferry router`` as a process."""

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from kvferry.cli import members
from kvferry.errors import KVFerryError, PeerLostError
from kvferry.router.router_client import RouterClient

COMMAND = [sys.executable, "-m", "kvferry.cli", "router"]


@pytest.mark.processes
@pytest.mark.parametrize("workers", ["1", "2"])
def test_it_serves_until_ctrl_c_and_says_which_servers_are_down(workers):
    urls = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9/v1/"]
    with subprocess.Popen(
        [*COMMAND, *urls, "--port", "0", "--workers", workers], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = next(
                found.group()
                for line in process.stdout
                if (found := re.search(r"http://127\.0\.0\.1:\d+(?=/v1 )", line))
            )
            health = httpx.get(f"{url}/health", trust_env=False, timeout=60)
            answer = httpx.post(
                f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False, timeout=60
            )
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert health.status_code == 503
    assert [engine["url"] for engine in health.json()["engines"]] == ["http://127.0.0.1:9"] * 2
    assert answer.status_code == 503
    assert "no decode engine can serve this" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "localhost:8100", "--decode", "http://b"], "is no URL of a server"),
        (["--engines", "missing.toml"], "missing.toml: cannot be read"),
        (["--prefill", "http://a", "--control", "a:1", "--control", "b:1"], "2 control channels"),
        (["--prefill", "http://a", "--control", "14579"], "'14579' is not host:port"),
        (["--all-addresses", "--prefill", "http://a", "--control", "a:1"], "several servers"),
        (["--host", "", "--engines", "missing.toml"], "'' is no address"),
        (["--workers", "65"], "less than or equal to 64"),
        (["--cluster-key-file=missing.key"], "cannot be read"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert message in done.stderr


@pytest.mark.parametrize("key", ["schlüssel", " spaces", "line\n", "", "\udcff"])
@pytest.mark.parametrize(
    ("command", "option", "variable"),
    [
        (("router", "--engines", "missing.toml"), "--api-key", "KVFERRY_API_KEY"),
        (
            ("router", "list", "--router", "http://127.0.0.1:9"),
            "--operator-key",
            "KVFERRY_OPERATOR_KEY",
        ),
        (("top", "--once", "http://127.0.0.1:9"), "--api-key", "KVFERRY_API_KEY"),
        (("engine", "missing.toml", "d0"), "--operator-key", "KVFERRY_OPERATOR_KEY"),
        (("serve", "missing.toml"), "--api-key", "KVFERRY_API_KEY"),
    ],
)
def test_a_key_that_no_client_can_show_is_refused_at_the_start(
    kvferry, monkeypatch, command, option, variable, key
):
    outcome = kvferry(*command, f"{option}={key}")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"kvferry: {option}: clients show this key in an HTTP header" in outcome.err
    assert "write letters, digits and punctuation of ASCII" in outcome.err

    if key:  # an empty variable is as good as none
        monkeypatch.setenv(variable, key)
        outcome = kvferry(*command)
        assert (outcome.code, outcome.out) == (2, "")
        assert f"kvferry: {variable}: clients show" in outcome.err


def test_a_key_may_have_punctuation_and_spaces_inside(kvferry):
    outcome = kvferry("serve", "missing.toml", "--api-key", "a b!~", "--operator-key", "x")
    assert "missing.toml" in outcome.err


@pytest.mark.parametrize("arguments", [(), ("--all-addresses",)])
def test_a_router_that_can_never_have_a_server_is_refused(kvferry, monkeypatch, arguments):
    monkeypatch.delenv("KVFERRY_OPERATOR_KEY")
    monkeypatch.setattr("kvferry.cli.router.listen", lambda *_: pytest.fail("it would listen"))

    outcome = kvferry("router", *arguments)

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.count("\n") == 1
    for remedy in ("KVFERRY_OPERATOR_KEY", "--prefill and --decode", "--engines"):
        assert remedy in outcome.err


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        urls = ["--prefill", "http://a", "--decode", "http://b"]
        done = subprocess.run(
            [*COMMAND, *urls, "--port", str(port)], capture_output=True, text=True, check=False
        )

    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr


@pytest.fixture(autouse=True)
def _operator_key(monkeypatch):
    monkeypatch.setenv("KVFERRY_OPERATOR_KEY", "operator")


@pytest.fixture
def running():
    """A router without engines; returns how its commands are called."""
    with subprocess.Popen([*COMMAND, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = url = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"http://127\.0\.0\.1:\d+(?=/v1 )", line):
                url = found.group()
                break
        assert "no servers yet" in said

        def call(*arguments):
            return subprocess.run(
                [*COMMAND, *arguments, "--router", url], capture_output=True, text=True, check=False
            )

        try:
            yield call
        finally:
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 0


@pytest.mark.processes
def test_engines_are_entered_shown_drained_and_forgotten(running):
    assert (
        "decode engine d0 is entered"
        in running("add", "decode", "http://127.0.0.1:9/v1", "--name", "d0").stdout
    )
    running("add", "prefill", "http://127.0.0.1:9")
    shown = running("list").stdout
    assert re.search(r"decode +│ d0 +│ +│ down +│ 0 +│ 0 +│ http://127\.0\.0\.1:9 ", shown), shown
    assert "127.0.0.1:9" in shown

    drained = running("drain", "decode", "d0")
    assert drained.returncode == 0
    assert "decode engine d0 has drained; it can be stopped" in drained.stdout
    assert "is forgotten" in running("remove", "prefill", "127.0.0.1:9").stdout

    assert running("list", "--json").stdout.strip() == "[]"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("drain", "decode", "d7"), "decode engine 'd7' is not known here; there are none"),
        (("add", "decode", "localhost"), "'localhost' is no URL of a server"),
        (("add", "both", "http://a"), "'both' is not one of 'prefill', 'decode'"),
    ],
)
def test_mistakes_about_engines_are_named(running, arguments, message):
    done = running(*arguments)
    assert done.returncode == 2
    assert message in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("written", "asked"),
    [
        ("fd00::a:1:8200", "[fd00::a:1]:8200"),  # "$POD_IP:8200" of the manifests
        ("[fd00:0::1]:8200", "[fd00:0::1]:8200"),  # as in the URL
        ("10.0.0.1:8200", "10.0.0.1:8200"),
        ("a:80:8200", "a:80:8200"),
        ("[fd00:b::1]:8200", "[fd00:b::1]:8200"),  # in which rich sees an emoji
        ("d0", "d0"),
    ],
)
@pytest.mark.parametrize("command", ["drain", "remove"])
def test_an_ipv6_address_with_a_port_names_the_engine_behind_it(
    kvferry, monkeypatch, command, written, asked
):
    told = []

    class Client:
        def __init__(self, *_):
            pass

        def drain(self, role, name):
            told.append((role, name))
            return {"state": "drained"}

        def delete(self, role, name):
            told.append((role, name))
            return {"outstanding": 0, "lent": 0}

    monkeypatch.setattr(members, "RouterClient", Client)
    outcome = kvferry("router", command, "decode", written)
    assert outcome.code == 0, outcome.err
    assert set(told) == {("decode", asked)}
    assert f"decode engine {asked} " in outcome.out


def test_a_router_that_is_not_there_is_named():
    done = subprocess.run(
        [*COMMAND, "list", "--router", "http://127.0.0.1:9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "router http://127.0.0.1:9: " in done.stderr


@pytest.mark.parametrize("answer", [b'{"error": "no"}', b'["kvferry"]', b"Not Found"])
def test_a_server_of_another_kind_is_no_router(monkeypatch, answer):
    monkeypatch.setattr(
        httpx.Client, "request", lambda *_, **__: httpx.Response(404, content=answer)
    )
    with pytest.raises(KVFerryError, match="http://a is no router of kvferry: it answers 404"):
        RouterClient("http://a/v1/", None).put("decode", "d0", "http://b")


def test_a_drain_goes_on_while_the_router_gives_no_answer(monkeypatch, capsys):
    state = {"role": "decode", "name": "d0", "outstanding": 1, "lent": 0, "drain": None}
    answers = iter([PeerLostError("timed out"), [{**state, "state": "drained"}]])

    class Router:
        def __init__(self, *_):
            pass

        def drain(self, *_):
            return {**state, "state": "draining"}

        def engines(self):
            answer = next(answers)
            if isinstance(answer, Exception):
                raise answer
            return answer

        def delete(self, *_):
            pass

    monkeypatch.setattr(members, "RouterClient", Router)
    monkeypatch.setattr(members, "POLL_S", 0.0)
    members.drain("decode", "d0", "http://a", None, 60.0)
    assert "decode engine d0 has drained; it can be stopped" in capsys.readouterr().out


def test_an_engine_that_was_entered_again_while_it_drained_is_not_said_to_have(monkeypatch):
    class Router:
        """Takes an engine back as soon as it has been told to drain it."""

        def __init__(self, *_):
            self.state = {"role": "decode", "name": "d0", "outstanding": 1, "lent": 0}

        def drain(self, *_):
            return {**self.state, "state": "draining", "drain": None}

        def engines(self):
            return [{**self.state, "state": "ready", "drain": None}]

    monkeypatch.setattr(members, "RouterClient", Router)
    monkeypatch.setattr(members, "POLL_S", 0.0)
    with pytest.raises(KVFerryError, match="'d0' is ready: somebody has entered it again"):
        members.drain("decode", "d0", "http://a", None, 60.0)
