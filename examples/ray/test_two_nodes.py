"""The example, with a tiny model."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timed("Ray takes a node for dead after four health checks and starts within 30 s."),
]


@pytest.mark.slow
@pytest.mark.timeout(1500)  # Ray alone needs a minute on a busy machine
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_the_demo_over_two_nodes_gives_the_tokens_of_the_undivided_engine(network, tmp_path):
    network.close()  # only shows that the machine allows networks
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    for number in range(3):
        (prompts / f"{number}.txt").write_text("Where do ferries go? " * (number + 1))
    script = Path(__file__).with_name("two_nodes.py")
    arguments = ["--model", "tiny", "--max-tokens", "8", "--prompts", prompts, "--out", tmp_path]
    found = subprocess.run(
        [sys.executable, script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "KVFERRY_CACHE": str(tmp_path / "cache")},
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "decode   runs as nodes " in found.stdout
    assert found.stdout.splitlines()[-1] == (
        "demo: 3/3 requests identical to the undivided engine, KV verified bit for bit"
    )
