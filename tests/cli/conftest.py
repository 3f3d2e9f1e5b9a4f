"""Runs the command line inside the test's process."""

import sys
from dataclasses import dataclass
from typing import Any

import pytest

from kvferry.cli.app import run


@dataclass
class Outcome:
    """What a command did."""

    code: int
    out: str
    err: str


@pytest.fixture
def kvferry(monkeypatch, capsys):
    """Runs ``kvferry ARGS``."""
    monkeypatch.setenv("COLUMNS", "200")

    def call(*args) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["kvferry", *map(str, args)])
        try:
            run()
        except SystemExit as end:
            code: Any = end.code
        else:
            code = 0
        captured = capsys.readouterr()
        return Outcome(code or 0, captured.out, captured.err)

    return call


TWO_ENGINES = """
[model]
source = "tiny"
dtype = "float64"

[router]
port = 0

[[prefill]]
name = "p0"
tp = 3
block_size = 16
layout = "HND"
num_blocks = 64
[prefill.kv_transfer_config]
kv_connector = "PullConnector"
kv_role = "kv_producer"
kv_port = 0

[[decode]]
name = "d0"
pp = 2
block_size = 24
num_blocks = 64
[decode.kv_transfer_config]
kv_connector = "PullConnector"
kv_role = "kv_consumer"
kv_port = 0
"""


@pytest.fixture
def cluster_file(tmp_path):
    """A cluster file of the tiny model; keyword arguments replace text in it."""

    def write(*replacements):
        text = TWO_ENGINES
        for old, new in replacements:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return path

    return write
