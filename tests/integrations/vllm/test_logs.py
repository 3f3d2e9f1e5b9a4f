"""What kvferry says stands in vLLM's log as vLLM's own lines do."""

import json
import logging
import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("vllm")

# Each process imports vLLM, which takes minutes where the machine has much else to do.
pytestmark = pytest.mark.timeout(900)

SAY = """
import logging
import vllm.logger
if hasattr(vllm.logger, "configure_logging_if_needed"):  # since 0.31 servers do so when they start
    from vllm.config.logging import LoggingConfig
    vllm.logger.configure_logging_if_needed(LoggingConfig())
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
        timeout=800,
        check=True,
    )
    return [line for line in done.stdout.splitlines() if "p0" in line or "beside" in line]


def test_its_lines_have_vllms_format_and_level():
    ours, beside = said(VLLM_LOGGING_PREFIX="[prefix] ")
    assert ours.startswith("[prefix] ")
    assert " INFO " in ours
    assert ours.endswith("] reading from engine p0")
    others = beside.replace("beside it", "reading from engine p0")
    assert re.sub(r"\d+", "0", ours) == re.sub(r"\d+", "0", others)


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
