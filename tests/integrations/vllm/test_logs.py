"""What kvferry says stands in vLLM's log as vLLM's own lines do."""

import json
import logging
import os
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

SAY = """
import logging
import kvferry.integrations.vllm

logger = logging.getLogger("kvferry.connectors.pull.peer")
logger.info("reading from engine %s", "p0")
logger.debug("too much")
logging.getLogger("vllm.said").info("beside it")
"""


def said(**environment):
    """The lines that a process writes to its log."""
    done = subprocess.run(
        [sys.executable, "-c", SAY],
        env={**os.environ, "VLLM_LOGGING_STREAM": "ext://sys.stdout", **environment},
        stdout=subprocess.PIPE,
        text=True,
        timeout=240,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if "p0" in line or "beside" in line]


def test_its_lines_have_vllms_format_and_level():
    ours, beside = said(VLLM_LOGGING_PREFIX="[prefix] ")
    head, tail = "[prefix] (MainProcess pid=", "[<string>:5] reading from engine p0"
    assert ours.startswith(head)
    assert beside.startswith(head)
    assert " INFO " in ours
    assert ours.endswith(tail)


def test_vllms_level_is_its_level():
    assert said(VLLM_LOGGING_LEVEL="WARNING") == []


def test_who_configures_it_has_the_last_word(tmp_path):
    file = tmp_path / "logging.json"
    handler = {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "mine"}
    loggers = {name: {"level": "INFO", "handlers": ["mine"]} for name in ("vllm", "kvferry")}
    config = {
        "version": 1,
        "formatters": {"mine": {"format": "mine: %(name)s: %(message)s"}},
        "handlers": {"mine": handler},
        "loggers": loggers,
    }
    file.write_text(json.dumps(config))
    assert said(VLLM_LOGGING_CONFIG_PATH=str(file)) == [
        "mine: kvferry.connectors.pull.peer: reading from engine p0",
        "mine: vllm.said: beside it",
    ]


def test_the_process_of_these_tests_writes_no_line_twice():
    handlers = logging.getLogger("kvferry").handlers
    assert [type(handler).__name__ for handler in handlers].count("VllmHandler") == 1
