"""``kvferry router`` as a process."""

import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

COMMAND = [sys.executable, "-m", "kvferry.cli", "router"]


def test_it_serves_until_ctrl_c_and_says_which_servers_are_down():
    urls = ["--prefill", "http://127.0.0.1:9", "--decode", "http://127.0.0.1:9/v1/"]
    with subprocess.Popen(
        [*COMMAND, *urls, "--port", "0"], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            url = next(
                found.group()
                for line in process.stdout
                if (found := re.search(r"http://127\.0\.0\.1:\d+(?=/v1 )", line))
            )
            health = httpx.get(f"{url}/health", trust_env=False, timeout=20)
            answer = httpx.post(
                f"{url}/v1/completions", json={"prompt": "a"}, trust_env=False, timeout=20
            )
        finally:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    assert health.status_code == 503
    assert [engine["url"] for engine in health.json()["engines"]] == ["http://127.0.0.1:9"] * 2
    assert answer.status_code == 503
    assert "no decode engine can serve this" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prefill", "localhost:8100", "--decode", "http://b"], "is no URL of a server"),
        (["--prefill", "http://a"], "Missing option '--decode'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    done = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert message in done.stderr


def test_a_taken_port_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        urls = ["--prefill", "http://a", "--decode", "http://b"]
        done = subprocess.run(
            [*COMMAND, *urls, "--port", str(port)], capture_output=True, text=True, check=False
        )

    assert done.returncode == 2
    assert f"port {port} on 127.0.0.1 is in use" in done.stderr
