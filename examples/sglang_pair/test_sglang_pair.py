"""The scripts of the pair: what they start."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture
def called(tmp_path, monkeypatch):
    """``called()`` returns the last call of a script: python is a stand-in."""
    stand_in = tmp_path / "bin" / "python"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > "$CALL"\n')
    stand_in.chmod(0o755)
    call = tmp_path / "call"
    monkeypatch.setenv("CALL", str(call))
    monkeypatch.setenv("PATH", f"{stand_in.parent}{os.pathsep}{os.environ['PATH']}")
    for name in ("MODEL", "PORT", "CPU", "BOOTSTRAP_PORT"):
        monkeypatch.delenv(name, raising=False)
    return lambda: call.read_text().removesuffix("\0").split("\0")


@pytest.mark.parametrize(("role", "port"), [("prefill", "8100"), ("decode", "8200")])
def test_serve_needs_one_option_for_the_backend(role, port, called):
    subprocess.run([HERE / "serve.sh", role, "--page-size", "16"], check=True)
    command = called()
    options = dict(zip(command[2::2], command[3::2], strict=True))
    assert command[:2] == ["-m", "sglang.launch_server"]
    assert options["--port"] == port
    assert options["--disaggregation-mode"] == role
    assert options["--disaggregation-transfer-backend"] == "kvferry"
    assert options["--page-size"] == "16"
    assert options.get("--disaggregation-bootstrap-port") == {"prefill": "8998"}.get(role)


def test_serve_says_what_it_needs():
    run = subprocess.run([HERE / "serve.sh"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("usage: serve.sh prefill|decode")


def test_a_machine_without_a_gpu_gets_operations_of_torch(called, monkeypatch):
    monkeypatch.setenv("CPU", "1")
    subprocess.run([HERE / "serve.sh", "decode"], check=True)
    assert "torch_native" in called()
    assert called()[-2:] == ["--disaggregation-decode-retraction-backup", "none"]


def test_the_router_is_told_of_both_servers_and_of_the_bootstrap_server(called):
    subprocess.run([HERE / "router.sh"], check=True)
    command = called()
    assert command[command.index("--prefill") + 1 :][:2] == ["http://127.0.0.1:8100", "8998"]
    assert command[command.index("--decode") + 1] == "http://127.0.0.1:8200"


def test_the_request_is_a_chat():
    text = (HERE / "request.sh").read_text()
    (body,) = re.findall(r"-d '(\{.*?\n\})'", text, re.DOTALL)
    assert json.loads(body)["messages"][0]["role"] == "user"
