"""The configuration and the scripts of the pair; with vLLM (marked ``vllm``), the pair itself."""

import contextlib
import json
import os
import re
import subprocess
from pathlib import Path

import httpx
import msgspec
import pytest

from kvferry.config import KVTransferConfig, parse_struct
from kvferry.connectors.pull.config import PullConfig
from kvferry.engine.weights import prepare_model
from kvferry.testing.waiting import until

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
VLLM_BIN = ROOT / os.environ.get("KVFERRY_TEST_VLLM", ".venv-vllm") / "bin"
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


def written(role: str) -> dict:
    return msgspec.json.decode((HERE / f"{role}.json").read_bytes())


@pytest.mark.parametrize("role", ROLES)
def test_the_configuration_is_valid(role):
    config = KVTransferConfig.from_mapping(written(role), f"{role}.json")
    parse_struct(PullConfig, config.kv_connector_extra_config, f"{role}.json")
    assert config.kv_role == ROLES[role]
    assert config.engine_id == f"{role}-0"


def test_the_decode_server_shakes_hands_with_the_prefill_server():
    prefill, decode = (written(role) for role in ROLES)
    address = f"{prefill['kv_connector_extra_config']['host']}:{prefill['kv_port']}"
    assert decode["kv_connector_extra_config"]["peers"] == [address]
    assert decode["kv_port"] != prefill["kv_port"]


def test_the_readme_shows_this_configuration():
    readme = (ROOT / "README.md").read_text("utf-8")
    shown = re.findall(r"--kv-transfer-config '(\{.*?\})'", readme, re.DOTALL)
    assert [json.loads(text) for text in shown] == [written(role) for role in ROLES]


@pytest.fixture
def called(tmp_path, monkeypatch):
    """``called()`` returns the last call of a script: python and kvferry are stand-ins."""
    for name in ("python", "kvferry"):
        stand_in = tmp_path / "bin" / name
        stand_in.parent.mkdir(exist_ok=True)
        stand_in.write_text(f'#!/bin/sh\nprintf "%s\\0" {name} "$@" > "$CALL"\n')
        stand_in.chmod(0o755)
    call = tmp_path / "call"
    monkeypatch.setenv("CALL", str(call))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    for name in ("MODEL", "PORT", "KV_CACHE_BYTES"):
        monkeypatch.delenv(name, raising=False)
    return lambda: call.read_text().removesuffix("\0").split("\0")


@pytest.mark.parametrize(("role", "port"), [("prefill", "8100"), ("decode", "8200")])
def test_serve_starts_vllm_with_the_configuration(role, port, called):
    subprocess.run([HERE / "serve.sh", role, "--max-model-len", "512"], check=True)
    command = called()
    options = dict(zip(command[3::2], command[4::2], strict=True))
    assert command[:3] == ["python", "-m", "vllm.entrypoints.openai.api_server"]
    assert options["--port"] == port
    assert options["--max-model-len"] == "512"
    assert json.loads(options["--kv-transfer-config"]) == written(role)


def test_serve_says_what_it_needs():
    run = subprocess.run([HERE / "serve.sh"], capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("usage: serve.sh prefill|decode")


def test_the_router_is_told_of_both_servers(called):
    subprocess.run([HERE / "router.sh"], check=True)
    assert called() == [
        *("kvferry", "router"),
        *("--prefill", "http://127.0.0.1:8100"),
        *("--decode", "http://127.0.0.1:8200"),
    ]


def test_the_request_is_a_chat():
    text = (HERE / "request.sh").read_text()
    (body,) = re.findall(r"-d '(\{.*?\})'", text, re.DOTALL)
    assert json.loads(body)["messages"][0]["role"] == "user"


@contextlib.contextmanager
def running(command: list, log: Path, url: str, **variables: str):
    """Runs a script from the start, until ``url`` answers, to the end."""
    environment = {**os.environ, **variables}
    environment.pop("PYTHONPATH", None)  # kvferry is installed there
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=log.parent, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:

        def is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            return answers(url)

        until(is_ready, every_s=0.2, what=lambda: f"{log.read_text()}\nan answer at {url}")
        yield
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


@pytest.mark.vllm
@pytest.mark.slow  # two servers of the demo's model on one machine
@pytest.mark.timeout(900)
def test_the_pair_serves_a_request(tmp_path):
    path = f"{VLLM_BIN}{os.pathsep}{os.environ['PATH']}"
    variables = {
        "PATH": path,
        "MODEL": str(prepare_model("smollm2")),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "KV_CACHE_BYTES": str(1 << 28),
    }
    small = ["--enforce-eager", "--max-model-len", "1024"]
    subprocess.run([VLLM_BIN / "kvferry", "keys", "kvferry-keys"], cwd=tmp_path, check=True)
    with contextlib.ExitStack() as stack:
        for role, port in (("prefill", 8100), ("decode", 8200)):
            command = [HERE / "serve.sh", role, "--dtype", "float32", *small]
            log = tmp_path / f"{role}.log"
            url = f"http://127.0.0.1:{port}/health"
            stack.enter_context(running(command, log, url, **variables))
        router = running(
            [HERE / "router.sh"],
            tmp_path / "router.log",
            "http://127.0.0.1:8000/v1/models",
            **variables,
        )
        stack.enter_context(router)
        answer = subprocess.run(
            [HERE / "request.sh"], capture_output=True, text=True, check=True, cwd=tmp_path
        ).stdout
    assert "data: [DONE]" in answer
    (loaded,) = re.findall(r'source_total\{.*"external_kv_transfer".* ([0-9.e+]+)', answer)
    assert float(loaded) > 0, answer
