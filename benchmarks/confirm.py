"""How long a rank waits for the confirm: the round trip of a Finish, with 64 leases in flight.

The source's control server runs in a process of its own, as in an engine. Two cases are timed:

``one by one``
    A rank's Finish is sent when the one before was answered; 64 other leases stay open meanwhile.
``all at once``
    64 Finishes are sent back to back; what waits together shares a message.
"""

import multiprocessing
import secrets
import statistics
import time
from collections.abc import Callable
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import TypeAlias

import msgspec

from kvferry.control.client import ControlClient
from kvferry.control.leases import Lease, LeaseTable
from kvferry.control.messages import FinishAnswer
from kvferry.control.server import ControlServer
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.description import (
    EngineDescription,
    ModelFingerprint,
    RankDescription,
    tagged_groups,
)

LEASES = 64

Leases: TypeAlias = list[tuple[str, bytes]]
"""Ids and secrets."""


def describe(engine_id: str) -> EngineDescription:
    """A small engine with one rank."""
    geometry = EngineGeometry(
        num_layers=32,
        num_kv_heads=8,
        head_size=128,
        dtype="bfloat16",
        block_size=16,
        layout="NHD",
        parallel=ParallelShape(),
    )
    model = ModelFingerprint(
        name="benchmark",
        architecture="benchmark",
        num_layers=32,
        num_kv_heads=8,
        head_size=128,
        dtype="bfloat16",
        rope="",
        config_digest="",
        weights_digest="",
    )
    memory = geometry.memory(0, num_blocks=16)
    return EngineDescription(
        engine_id=engine_id,
        incarnation="benchmark",
        model=model,
        groups=tagged_groups([geometry]),
        ranks=(RankDescription(rank=0, endpoints={"shm": b""}, memory=(memory,)),),
    )


def serve(pipe: Connection) -> None:
    """The source: answers on its control port, and grants as many leases as the pipe asks for."""
    leases = LeaseTable(max_blocks=1 << 30)
    with ControlServer(
        engine_id="source", incarnation="benchmark", role="kv_producer", leases=leases
    ) as server:
        server.set_description(describe("source"))
        pipe.send(server.port)
        while (count := pipe.recv()) > 0:
            leases.sweep()
            granted = [leases.grant(f"request-{index}", 128) for index in range(count)]
            ids = [lease.lease_id for lease in granted if isinstance(lease, Lease)]
            pipe.send({lease_id: server.secret(lease_id) for lease_id in ids})


def one_by_one(client: ControlClient, address: str, leases: Leases) -> list[float]:
    """Seconds of each round trip, one after the other."""
    seconds = []
    for lease_id, secret in leases:
        began = time.perf_counter()
        answer = _finish(client, address, lease_id, secret).result()
        seconds.append(time.perf_counter() - began)
        assert answer is FinishAnswer.HELD
    return seconds


def all_at_once(client: ControlClient, address: str, leases: Leases) -> list[float]:
    """Seconds of each round trip, from its own call to its own answer."""
    ended: dict[Future[FinishAnswer], float] = {}

    def note(future: Future[FinishAnswer]) -> None:
        ended[future] = time.perf_counter()

    began: dict[Future[FinishAnswer], float] = {}
    for lease_id, secret in leases:
        start = time.perf_counter()
        future = _finish(client, address, lease_id, secret)
        began[future] = start
        future.add_done_callback(note)
    assert {future.result() for future in began} == {FinishAnswer.HELD}
    while len(ended) < len(began):  # a future has its result just before its callbacks run
        time.sleep(0)
    return [ended[future] - start for future, start in began.items()]


def _finish(
    client: ControlClient, address: str, lease_id: str, secret: bytes
) -> "Future[FinishAnswer]":
    nonce = secrets.token_bytes(8)
    return client.finish(address, "benchmark", lease_id, secret, rank=0, ok=True, nonce=nonce)


CASES: dict[str, Callable[[ControlClient, str, Leases], list[float]]] = {
    "one by one": one_by_one,
    "all at once": all_at_once,
}


class ConfirmResult(msgspec.Struct, frozen=True, kw_only=True):
    """One case."""

    case: str
    leases: int
    """In flight."""
    confirms: int
    """Round trips that were timed."""
    median_seconds: float
    p99_seconds: float


def measure(rounds: int = 30) -> list[ConfirmResult]:
    """Times 64 confirms of each case ``rounds`` times."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()  # if it dies, we read its end and do not wait for ever
    seconds: dict[str, list[float]] = {case: [] for case in CASES}
    try:
        address = f"127.0.0.1:{ours.recv()}"
        with ControlClient(engine_id="target", incarnation="benchmark") as client:
            client.handshake(address, describe("target")).result()
            for number in range(rounds + 1):
                for case, run in CASES.items():
                    ours.send(2 * LEASES)
                    leases = ours.recv()
                    client.renew(address, "benchmark", leases).result()
                    read, unread = list(leases.items())[:LEASES], list(leases.items())[LEASES:]
                    found = run(client, address, read)
                    client.release(address, "benchmark", dict(unread)).result()
                    if number > 0:  # the first round warms up
                        seconds[case] += found
        ours.send(0)
        process.join()
    finally:
        process.kill()
    return [
        ConfirmResult(
            case=case,
            leases=LEASES,
            confirms=len(found),
            median_seconds=statistics.median(found),
            p99_seconds=statistics.quantiles(found, n=100, method="inclusive")[98],
        )
        for case, found in seconds.items()
    ]
