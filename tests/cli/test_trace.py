"""``kvferry trace``: several engines' records, joined into one table and one picture."""

import json
import socket
import threading
import time
from typing import Any

import pytest

from kvferry.control import server
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import RequestTrace, TracePart
from kvferry.control.server import ControlServer


@pytest.fixture
def engines():
    """The control channels of a source ``p7`` and a target ``d9``."""
    options: dict[str, Any] = {"incarnation": "1", "leases": LeaseTable(max_blocks=9)}
    with (
        ControlServer(engine_id="p7", role="kv_producer", **options) as source,
        ControlServer(engine_id="d9", role="kv_consumer", **options) as target,
    ):
        yield source, target


@pytest.fixture
def nobody():
    """A port at which nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        return closed.getsockname()[1]


def part(name, started, seconds, **more):
    return TracePart(name=name, started=started, seconds=seconds, **more)


def remembers(engine, *parts, request_id="cmpl-1", **more):
    """An engine that knows one request; its clock is what ``time.time`` says."""
    trace = RequestTrace(
        request_id=request_id, started=parts[0].started, seconds=1.0, outcome="loaded",
        parts=parts, **more,
    )  # fmt: skip
    known = {trace.request_id, trace.peer_request_id}
    engine.set_traces(lambda wanted: (7, (trace,) if wanted in known else ()))


def test_trace_shows_both_engines_on_one_axis(kvferry, engines):
    source, target = engines
    remembers(source, part("prefill", 100.0, 0.5), part("held", 100.5, 0.25))
    read = part(
        "read", 100.5, 0.25, rank=1, transport="tcp", nbytes=500_000_000, source_ranks=(0, 3)
    )
    remembers(target, part("lease", 100.4, 0.1), read, part("answer", 100.75, 60.0))

    outcome = kvferry("trace", "cmpl-1", source.port, target.port)

    assert outcome.code == 0, outcome.err
    (row,) = [line for line in outcome.out.splitlines() if "tcp" in line]
    for cell in ("d9", "read", "500.0", "250.0", "2.00", "tcp, from ranks 0, 3"):
        assert cell in row
    bars = {
        line.split("│")[0].strip(): line.split("│")[1] for line in outcome.out.splitlines()[-6:-1]
    }
    begins = {name: len(bar) - len(bar.lstrip()) for name, bar in bars.items()}
    assert begins["p7 prefill"] == 0
    assert 0 < begins["d9 lease"] < begins["d9 read 1"] == begins["p7 held"]
    assert bars["d9 answer"].endswith("→")


def test_trace_says_what_the_time_from_prefill_to_the_first_token_went_to(kvferry, engines):
    source, target = engines
    remembers(source, part("prefill", 100.0, 0.5), request_id="cmpl-1-at-p")
    parts = [part("lease", 100.6, 0.1), part("load", 100.7, 0.2), part("first token", 100.9, 0.6)]
    remembers(target, *parts, peer="p7", peer_request_id="cmpl-1-at-p")

    outcome = kvferry("trace", "cmpl-1", source.port, target.port)
    as_json = kvferry("trace", "cmpl-1", source.port, target.port, "--json")

    lines = outcome.out.split("from the end of prefill to the first token")[1].splitlines()
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]
    assert cells == [
        ["answer and router", "prefill engine, router", "100.0", "10%"],
        ["lease", "kvferry", "100.0", "10%"],
        ["report", "decode engine", "200.0", "20%"],
        ["first token", "decode engine", "600.0", "60%"],
        ["all of it", "", "1000.0", ""],
    ]
    names = [stretch["name"] for stretch in json.loads(as_json.out)["handover"]]
    assert names == ["answer and router", "lease", "report", "first token"]


def test_the_rate_of_a_read_leaves_out_what_it_waited_for_its_source(kvferry, engines):
    source, target = engines
    remembers(source, part("prefill", 100.0, 0.5))
    read = part("read", 100.0, 5.0, rank=1, nbytes=500_000_000, moving=0.25)
    remembers(target, read)

    outcome = kvferry("trace", "cmpl-1", source.port, target.port)

    (row,) = [line for line in outcome.out.splitlines() if "476.8 MiB" in line]
    assert "5000.0" in row
    assert "2.00" in row


def test_trace_finds_the_source_by_what_the_target_says(kvferry, engines):
    source, target = engines
    remembers(source, part("prefill", 100.0, 0.5), request_id="cmpl-1-at-p")
    remembers(target, part("lease", 100.5, 0.5), peer="p7", peer_request_id="cmpl-1-at-p")

    outcome = kvferry("trace", "cmpl-1", source.port, target.port)

    assert "cmpl-1-at-p: loaded after 1.0 s" in outcome.out
    assert "p7 prefill" in outcome.out


def test_trace_says_who_does_not_know_and_who_is_not_there(kvferry, engines, nobody):
    source, target = engines
    remembers(target, part("lease", 100.5, 0.5))

    outcome = kvferry("trace", "cmpl-1", source.port, target.port, nobody)

    assert outcome.code == 0, outcome.err
    assert f"p7 (127.0.0.1:{source.port}): knows nothing of cmpl-1" in outcome.out
    assert f"127.0.0.1:{nobody}: " in outcome.out
    assert "d9 lease" in outcome.out


def test_trace_that_nobody_knows_ends_with_1(kvferry, engines):
    outcome = kvferry("trace", "cmpl-1", *(engine.port for engine in engines))

    assert (outcome.code, outcome.err) == (1, "")
    assert outcome.out.count("none of the last 0 requests that loaded or lent KV here") == 2


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize("form", [(), ("--json",)])
def test_trace_that_a_silent_engine_may_know_ends_with_2(kvferry, engines, nobody, others, form):
    heard = [engine.port for engine in engines[:others]]

    outcome = kvferry("trace", "cmpl-1", *heard, nobody, *form)

    assert outcome.code == 2
    assert f"127.0.0.1:{nobody}" in outcome.out
    assert outcome.err == (
        f"kvferry: cmpl-1 was not found, but 1 of {1 + others} engines gave no answer: "
        f"127.0.0.1:{nobody}\n"
    )


@pytest.mark.timed("A difference of clocks must be measured to 1 ms.")
def test_trace_takes_the_difference_of_clocks_off(kvferry, engines, monkeypatch):
    source, target = engines
    ahead = 7230.0
    remembers(source, part("prefill", 100.0, 0.5))

    class Ahead:
        """The clock of a host that is two hours ahead; only the target's engine reads it."""

        @staticmethod
        def time():
            return time.time() + ahead * (threading.current_thread() is target._mailbox._thread)

    monkeypatch.setattr(server, "time", Ahead)
    remembers(target, part("lease", 100.5 + ahead, 0.5))

    outcome = kvferry("trace", "cmpl-1", source.port, target.port)

    assert "its clock is 2 h 0 min ahead of this machine's" in outcome.out
    (row,) = [line for line in outcome.out.splitlines() if "│ lease" in line]
    assert "500." in row or "499." in row


def test_trace_of_a_hostile_engine_forges_no_row(kvferry, engines):
    said = "gone\n┃ forged ┃\x1b[2J[red]"
    remembers(engines[0], part(said, 100.0, 0.5, transport=said, note=said, error=said),
              peer=said, error=said, traceparent=said)  # fmt: skip

    outcome = kvferry("trace", "cmpl-1", engines[0].port)

    assert outcome.code == 0, outcome.err
    assert "\x1b" not in outcome.out
    assert not any(line.startswith("┃ forged") for line in outcome.out.splitlines())


def test_trace_as_json_is_the_same_answer(kvferry, engines):
    remembers(engines[0], part("prefill", 100.0, 0.5))

    outcome = kvferry("trace", "cmpl-1", engines[0].port, "--json")

    document = json.loads(outcome.out)
    (engine,) = document["engines"]
    assert document["request_id"] == "cmpl-1"
    assert (engine["engine_id"], engine["remembered"]) == ("p7", 7)
    assert engine["requests"][0]["parts"][0]["name"] == "prefill"
