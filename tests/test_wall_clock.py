"""Whoever sets a machine's clock changes what is told, and nothing that is decided."""

import ast
import re
from pathlib import Path

import pytest

import kvferry

PACKAGE = Path(kvferry.__file__).parent
TESTS = Path(__file__).parent

#: Who reads the wall clock, and what for. Leases, heartbeats, time-outs and back-offs do not.
READERS = {
    "router/answer.py": "`created` of an answer",
    "cluster/engine_server.py": "`created` of an answer",
    "router/watch.py": "when a snapshot was taken, for people",
    "serving/process.py": "the line that begins the log of a start",
    "connectors/pull/digests.py": "records of transfers",
    "connectors/pull/loads.py": "records of transfers",
    "connectors/pull/memory.py": "records of transfers",
    "connectors/pull/metadata.py": "records of transfers",
    "observe/records.py": "where a request's record lies in time, for `kvferry trace`",
    "control/cache_events.py": "the time stamp of a batch of events",
    "control/server.py": "times of the last errors and of an answer, for people",
    "observe/timeline.py": "how the engines' clocks differ from this machine's, for its picture",
    "observe/spans.py": "when a request began, for people",
    "engine/request.py": "timings of a request, for its record and metrics",
    "engine/scheduler.py": "timings of a request, for its record and metrics",
    # Of a file that nobody holds a lock on and that has no size yet: an engine that has
    # just started may be about to lock it. With a clock set back it is left for a later sweep.
    "transports/shm_segment.py": "the age of a segment that its maker left without a size",
}
WALL_CLOCKS = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow")}


def reads_the_wall_clock(source: str) -> bool:
    nodes = list(ast.walk(ast.parse(source)))
    read = {
        (getattr(node.value, "id", "") or getattr(node.value, "attr", ""), node.attr)
        for node in nodes
        if isinstance(node, ast.Attribute)
    }
    read |= {
        (node.module, alias.name)
        for node in nodes
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    return bool(read & WALL_CLOCKS)


def moves_the_clock_of_all(source: str) -> bool:
    """Whether a test replaces a function of the module ``time`` itself, not a module's ``time``."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    patched = [
        ast.unparse(call.args[0]).strip("'")
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "setattr" and call.args
    ]
    return any(re.search(r"(^|\.)time(\.\w+)?$", each) for each in patched)


@pytest.mark.parametrize(
    ("source", "moves"),
    [
        ('patch.setattr("kvferry.serving.metrics.time.monotonic", now)', True),
        ('patch.setattr(time, "monotonic", now)', True),
        ('patch.setattr(metrics.time, "monotonic", now)', True),
        ('patch.setattr(metrics, "time", moved)', False),
    ],
)
def test_a_clock_that_is_moved_for_all_is_found(source, moves):
    assert moves_the_clock_of_all(source) == moves


def test_no_test_moves_the_clock_of_all_threads():
    """An event loop in another thread sets its timers by that clock, and sleeps for hours once the
    right time is back.
    """
    found = [
        str(path.relative_to(TESTS))
        for path in TESTS.rglob("*.py")
        if moves_the_clock_of_all(path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_the_wall_clock_is_read_for_records_alone():
    found = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if reads_the_wall_clock(path.read_text(encoding="utf-8"))
    }
    assert found == set(READERS)
