"""Hundreds of short loads while connections break, requests end early and the source restarts."""

import queue
import random
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvferry.connectors.pull.loads import look_at_time
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.testing import lossy_transport
from kvferry.testing.connector_conformance import REMOTE_DECODE, Pair, prompt
from kvferry.testing.fake_engine import FakeEngine
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S, until
from kvferry.transports.base import Transport
from kvferry.transports.shm import ShmTransport
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.vm import VmTransport
from tests.connectors.engines import SOURCE, TARGET, pull_config

LOADS = 250
AT_ONCE = 5
"""Requests that the target works on at a time."""
LOADS_PER_BREAK = 3


def open_engine(engine_id: str, kv_port: int = 0) -> FakeEngine:
    """A producer ``p`` or a consumer ``d``."""
    config = pull_config(
        "kv_producer" if engine_id == "p" else "kv_consumer",
        engine_id,
        kv_port,
        lease_duration_s=600.0,
        handshake_timeout_s=600.0,
        transport="lossy",
        staging_bytes=1 << 16,
    )
    return FakeEngine.open(config, SOURCE if engine_id == "p" else TARGET, num_blocks=256)


class Storm:
    """A producer and a consumer on a thread each, and one that breaks what they stand on."""

    def __init__(self) -> None:
        self.producer = open_engine("p")
        self.consumer = open_engine("d")
        self.requests: list[FakeRequest] = []
        """What the consumer was given."""
        self._wanted: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._computed: queue.SimpleQueue[FakeRequest] = queue.SimpleQueue()
        self._over = threading.Event()
        self._failures: list[BaseException] = []

    def run(self) -> None:
        """Loads all; then every engine stands still, with its threads alive."""
        tasks = self._produce, self._consume, self._break_connections
        threads = [threading.Thread(target=self._guard, args=(task,)) for task in tasks]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)  # threads change places in the middle of everything
        try:
            for thread in threads:
                thread.start()
            until(self._over.is_set, what="the end of all requests")
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(interval)
        assert self._failures == []

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()

    def _guard(self, task: Callable[[], None]) -> None:
        try:
            task()
        except BaseException as failure:
            self._failures.append(failure)
            self._over.set()

    def _produce(self) -> None:
        """Computes what is wanted; starts again in the middle of everything."""
        count = 0
        computing: list[FakeRequest] = []
        while not self._over.is_set():
            while not self._wanted.empty():
                request_id = self._wanted.get()
                count += 1
                if count in (LOADS // 3, 2 * LOADS // 3):
                    self._restart()
                    for lost in computing:
                        self._wanted.put(lost.request_id)
                    computing.clear()
                tokens = prompt(10 + count % 20, request_id)
                computing.append(self.producer.add(request_id, tokens, REMOTE_DECODE))
            self.producer.step()
            for request in [one for one in computing if one.stage is Stage.FINISHED]:
                computing.remove(request)
                self._computed.put(request)

    def _restart(self) -> None:
        port: int = self.producer.scheduler.port  # type: ignore[attr-defined]
        self.producer.close()
        self.producer = open_engine("p", port)

    def _consume(self) -> None:
        rng = random.Random(1)
        for number in range(AT_ONCE):
            self._wanted.put(f"r{number}")
        asked = AT_ONCE
        while not self._over.is_set():
            self.consumer.step()
            live = [one for one in self.requests if one.stage is not Stage.FINISHED]
            if not self._computed.empty():
                source = self._computed.get()
                tokens = (*source.prompt_token_ids, *source.output_token_ids)
                self.requests.append(
                    self.consumer.add(source.request_id, tokens, source.response_params)
                )
                if live and rng.random() < 0.2:  # as many as on a fast machine
                    self.consumer.abort(rng.choice(live).request_id)
                if asked < LOADS:
                    self._wanted.put(f"r{asked}")
                    asked += 1
            elif len(self.requests) == LOADS and not live:
                self._over.set()

    def _break_connections(self) -> None:
        """Breaks one after every few loads: as many on a slow machine as on a fast one."""
        rng = random.Random(2)
        broken = 0
        while not self._over.wait(0.001):
            if len(self.requests) < LOADS_PER_BREAK * (broken + 1):
                continue
            broken += 1
            worker: Any = rng.choice(self.consumer.workers)
            peer = worker.cache.loads.peers.connected.get("p")
            if peer is not None:
                rng.choice(list(peer.connections.values())).close()
            worker.client.pump()

    def ways(self) -> set[str]:
        """How the cells came."""
        workers: Any = self.consumer.workers
        known = [worker.cache.loads.peers for worker in workers]
        peers = [peer for each in known for peer in each.connected.values()]
        return {str(plan.way) for peer in peers for plan in peer.plans}

    def check_nothing_is_left(self) -> None:
        """No thread has died, and no table keeps anything of what is over."""
        scheduler: Any = self.consumer.scheduler
        scheduler.sources.thread.check()
        assert scheduler.borrower.loads == {}
        assert scheduler.sources.agenda.pursuits == []
        for worker in self.consumer.workers:
            self._check_rank(worker)

    def _check_rank(self, worker: Any) -> None:
        cache = worker.cache
        loads, client = cache.loads, worker.client
        # What has ended meanwhile is taken back.
        loads.thread.call(lambda: look_at_time(cache.target))
        for thread in (loads.thread, client._mailbox):
            thread.check()
        assert loads._loads == loads.peers.waiting == {}
        assert not loads._ended
        assert not client._ended
        assert not client._broken
        assert all(not connection.calls for connection in client._connections.values())
        numbers = cache.target.staging.numbers
        assert (numbers.used_bytes, numbers.quarantined_bytes, numbers.waiting) == (0, 0, 0)
        for staged in cache.target.staged.values():
            assert not staged._reads
            for transfers in (staged.transfers, staged._inner._inner._transfers):
                assert not transfers._running
                assert not transfers._ended


@pytest.mark.slow
@pytest.mark.parametrize("staged", [False, True], ids=["placed", "staged"])
@pytest.mark.parametrize(
    "transport", [ShmTransport, VmTransport, TcpTransport], ids=lambda kind: kind.name
)
def test_a_storm_leaves_nothing_behind(transport: type[Transport], *, staged: bool) -> None:
    # A staged load is many reads, and may not lose more than two.
    lossy = lossy_transport(transport, loss=0.01 if staged else 0.1, seed=5)
    lossy.least_segment_bytes = 1 << 30 if staged else 0
    lossy.name = "lossy"
    with temporary_plugin(TRANSPORTS, "lossy", lossy):
        storm = Storm()
        try:
            storm.run()
            Pair(storm.producer, storm.consumer, WAIT_S).settle()
            storm.check_nothing_is_left()
            assert storm.ways() == {"staged" if staged else "placed"}
            good = [one for one in storm.requests if one.external_tokens and not one.failed]
            assert len(good) > LOADS // 10
        finally:
            storm.close()
