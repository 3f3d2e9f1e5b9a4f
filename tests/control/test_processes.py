"""A source in a process of its own: killed, or stopped for longer than its leases last."""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys

import msgspec
import pytest

from kvferry.control.client import ControlClient
from kvferry.control.messages import FinishAnswer, LeaseAnswer
from kvferry.control.options import ControlOptions
from kvferry.errors import PeerLostError
from kvferry.testing.waiting import WAIT_S
from tests.load import stop

LEASE_S = 3.0
TIMEOUT_S = 4.0

SOURCE = """
import sys
import msgspec
from kvferry.control.leases import LeaseTable
from kvferry.control.server import ControlServer
from kvferry.topology.description import EngineDescription

description = msgspec.json.decode(sys.stdin.readline(), type=EngineDescription)
leases = LeaseTable(max_blocks=100, duration_s=float(sys.argv[1]))
names = {"engine_id": "p", "incarnation": "p1", "role": "kv_producer"}
with ControlServer(**names, leases=leases) as server:
    server.set_description(description)
    granted = [leases.grant("r", 1).lease_id for _ in range(2)]
    print(server.port, *(f"{id}:{server.secret(id).hex()}" for id in granted), flush=True)
    sys.stdin.readline()
    print(*sorted(ended.outcome for ended in leases.sweep()), flush=True)
"""


@pytest.fixture
def source(describe):
    """(process, address, ids and secrets of leases) of a source whose leases live ``LEASE_S``."""
    command = [sys.executable, "-c", SOURCE, str(LEASE_S)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(msgspec.json.encode(describe("p", "p1")).decode() + "\n")
            process.stdin.flush()
            port, *granted = process.stdout.readline().split()
            pairs = (lease.split(":") for lease in granted)
            yield process, f"127.0.0.1:{port}", {id: bytes.fromhex(key) for id, key in pairs}
        finally:
            process.kill()


def open_client(timeout_s):
    options = ControlOptions(request_timeout_s=timeout_s)
    return ControlClient(engine_id="d", incarnation="d1", options=options)


@pytest.fixture
def client(describe):
    with open_client(TIMEOUT_S) as client:
        yield client


@pytest.mark.timed("A lease of 3 s ends while a healthy target waits for the processor.")
def test_a_source_that_was_stopped_charges_no_lease_for_it_and_confirms_what_it_kept(
    source, client, describe
):
    process, address, secrets = source
    kept, early = secrets

    def finish(lease_id):
        return client.finish(
            address, "p1", lease_id, secrets[lease_id], rank=0, ok=True, nonce=lease_id.encode()[:8]
        )

    client.handshake(address, describe("d", "d1")).result(WAIT_S)
    held = dict.fromkeys((kept, early), LeaseAnswer.HELD)
    assert client.renew(address, "p1", secrets).result(WAIT_S).states == held
    assert finish(early).result(WAIT_S) == FinishAnswer.HELD
    stop(process.pid)
    # This report waits in the source's socket for longer than a lease lasts.
    with pytest.raises(PeerLostError, match="no answer within"):
        finish(kept).result(WAIT_S)
    assert TIMEOUT_S > LEASE_S
    os.kill(process.pid, signal.SIGCONT)
    assert finish(kept).result(WAIT_S) == FinishAnswer.HELD
    assert finish(early).result(WAIT_S) == FinishAnswer.HELD
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline().split() == ["done", "done"]


def test_a_source_that_is_killed_is_lost_at_once(source, describe):
    process, address, _ = source
    with open_client(10 * WAIT_S) as client:  # the loss, not the timeout, ends the call
        client.handshake(address, describe("d", "d1")).result(WAIT_S)
        process.kill()
        process.wait()
        with pytest.raises(PeerLostError):
            client.renew(address, "p1", {"lease": b""}).result(WAIT_S)


@pytest.mark.timed("Four hundred connections must be there within 0.5 s of each other.")
def test_engines_that_all_come_back_at_once_are_not_told_to_try_again(source):
    """The kernel takes their connections while the source has no time; else they would wait for a
    second, or three.
    """
    process, address, _ = source
    host, port = address.split(":")
    stop(process.pid)
    with contextlib.ExitStack() as stack:
        connecting = select.poll()
        for _ in range(400):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((host, int(port)))
            connecting.register(one, select.POLLOUT)
        assert len(connecting.poll(500)) == 400
    os.kill(process.pid, signal.SIGCONT)
