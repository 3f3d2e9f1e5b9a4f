"""Slow is not dead (law 7): processes and threads that live, and do not get to run for a while.

A process whose interpreter lock is held has ZeroMQ's own thread running: its connections live. One
that is stopped has not, and is cut off.
"""

import contextlib
import subprocess
import sys
import threading
import time

import msgspec
import pytest

from kvferry.control.leases import LeaseOutcome, LeaseTable
from kvferry.control.messages import FinishAnswer, LeaseAnswer
from kvferry.control.options import ControlOptions
from kvferry.errors import PeerLostError
from kvferry.testing.waiting import WAIT_S, until
from tests.clock import Clock
from tests.load import stop

LEASE_S = 60.0
"""Seconds that a lease lives without being renewed, by a clock that the test moves."""
HEARTBEAT_S = 0.5
"""Seconds between heartbeats; three that stay away end a connection."""


@pytest.fixture
def clock(monkeypatch):
    """The clock of all sources; name the fixture before ``serve``."""
    return Clock.install(monkeypatch)


@pytest.fixture
def serve_leases(clock, serve):
    """Serves with leases of the clock."""

    def serve_them(**more):
        leases = LeaseTable(max_blocks=100, duration_s=LEASE_S, clock=clock)
        return serve(leases=leases, clock=clock, **more)

    return serve_them


def target(served, describe, options=None):
    description = describe("decode-0", "d1")
    client = served.client(description, options)
    client.handshake(served.address, description).result(WAIT_S)
    return client


@contextlib.contextmanager
def server_stands_still(served, client, clock=None):
    """The server's thread does not run, and so hears nobody."""
    stands, goes_on = threading.Event(), threading.Event()

    def stand():
        with clock.stopped() if clock else contextlib.nullcontext():
            stands.set()
            goes_on.wait(WAIT_S)
        return []

    served.server.set_transfers(stand)
    status = client.status(served.address)
    try:
        assert stands.wait(WAIT_S)
        yield
    finally:
        goes_on.set()
        status.result(WAIT_S)


def test_a_source_whose_thread_stands_still_charges_no_lease_for_it(clock, serve_leases, describe):
    served = serve_leases()
    client = target(served, describe)
    other = served.client(describe("monitor", "m1"))
    held, untaken = served.grant(), served.grant()
    assert served.renew(client, held).result(WAIT_S) == {held: LeaseAnswer.HELD}
    with server_stands_still(served, other, clock):
        clock.advance(5 * LEASE_S)  # longer than any lease lasts by itself
        renewed = served.renew(client, held, untaken)
        assert served.leases.sweep() == []
    assert renewed.result(WAIT_S) == dict.fromkeys((held, untaken), LeaseAnswer.HELD)
    assert served.finish(client, held).result(WAIT_S) == FinishAnswer.HELD


def test_calls_wait_for_a_server_whose_thread_stands_still(serve, describe):
    """For longer than the heartbeats of a connection would take to find it dead."""
    options = ControlOptions(heartbeat_s=HEARTBEAT_S)
    served = serve(options=options)
    client = target(served, describe, options)
    lease_id = served.grant()
    with server_stands_still(served, client):
        calls = [served.renew(client, lease_id), served.finish(client, lease_id)]
        time.sleep(4 * HEARTBEAT_S)
        assert not any(call.done() for call in calls)
    assert calls[0].result(WAIT_S) == {lease_id: LeaseAnswer.HELD}
    assert calls[1].result(WAIT_S) == FinishAnswer.HELD


def count(served, name):
    """How often something has come to the server."""
    return served.server.status().counters.get(name, 0)


def is_connected(served):
    """Whether the server takes the target of these tests for one that lives."""
    server = served.server
    # On its own thread: a socket of ZeroMQ that two threads use at once ends the process.
    return server._mailbox.call(lambda: server._lives(("decode-1", "d1")))


def swept(served, clock):
    """Waits for the end of a lease."""
    return until(clock.passing(served.leases.sweep), what="the end of a lease")


HOLDER = """
import ctypes, sys
import msgspec
from kvferry.control.client import ControlClient
from kvferry.control.options import ControlOptions
from kvferry.topology.description import EngineDescription

address, incarnation, heartbeat_s, hold_s = sys.argv[1:]
description = msgspec.json.decode(sys.stdin.readline(), type=EngineDescription)
options = ControlOptions(request_timeout_s=2.0, heartbeat_s=float(heartbeat_s))
ids = {"engine_id": description.engine_id, "incarnation": description.incarnation}
hold = ctypes.PyDLL(None).usleep  # keeps the interpreter lock
with ControlClient(**ids, options=options) as client:
    client.handshake(address, description).result()
    print("met", flush=True)
    lease, secret = sys.stdin.readline().split()
    leases = {lease: bytes.fromhex(secret)}
    print(client.renew(address, incarnation, leases).result().states[lease], flush=True)
    sys.stdin.readline()
    asked = [client.renew(address, incarnation, leases) for _ in range(3)]
    hold(round(float(hold_s) * 1e6))
    print(*(call.result().states[lease] for call in asked), flush=True)
    sys.stdin.readline()
"""


@contextlib.contextmanager
def holder(served, describe, hold_s=0.0):
    """A target in a process of its own that holds a lease; told so, it does not let Python run."""
    arguments = [served.address, served.incarnation, str(HEARTBEAT_S), str(hold_s)]
    command = [sys.executable, "-c", HOLDER, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            described = msgspec.json.encode(describe("decode-1", "d1")).decode()
            print(described, file=process.stdin, flush=True)
            assert process.stdout.readline() == "met\n"
            ((lease_id, secret),) = served.keys(served.grant()).items()
            print(lease_id, secret.hex(), file=process.stdin, flush=True)
            assert process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_a_target_that_never_gets_the_interpreter_lock_keeps_its_lease_and_its_answers(
    clock, serve_leases, describe
):
    """It says nothing for longer than its lease lasts, than heartbeats and than its patience."""
    served = serve_leases(options=ControlOptions(heartbeat_s=HEARTBEAT_S))
    with holder(served, describe, hold_s=3.0) as process:
        renewals = count(served, "requests.Renew")
        print(file=process.stdin, flush=True)
        until(lambda: count(served, "requests.Renew") > renewals, what="what is said before")
        clock.advance(2 * LEASE_S)
        assert process.stdout.readline() == "held held held\n"
        assert served.leases.sweep() == []


def test_a_target_that_was_stopped_is_cut_off_and_its_lease_expires(clock, serve_leases, describe):
    """Its connection is lost once heartbeats are not answered."""
    served = serve_leases(options=ControlOptions(heartbeat_s=HEARTBEAT_S))
    with holder(served, describe) as process:
        assert is_connected(served)
        stop(process.pid)
        until(lambda: not is_connected(served), what="the end of the connection")
        (ended,) = swept(served, clock)
        assert ended.outcome is LeaseOutcome.EXPIRED


def test_a_target_that_was_killed_has_no_connection_that_would_keep_its_lease(
    clock, serve_leases, describe
):
    served = serve_leases()
    with holder(served, describe) as process:
        process.kill()
        process.wait()
        until(lambda: not is_connected(served), what="the end of the connection")
        assert [ended.outcome for ended in swept(served, clock)] == [LeaseOutcome.EXPIRED]


def test_a_server_that_never_answers_is_given_up_at_last(serve, describe):
    served = serve()
    client = target(served, describe, ControlOptions(request_timeout_s=2.0))
    other = served.client(describe("monitor", "m1"))
    with (
        server_stands_still(served, other),
        pytest.raises(PeerLostError, match=r"no answer within request_timeout_s \(2.0 s\)"),
    ):
        served.renew(client, served.grant()).result(WAIT_S)
