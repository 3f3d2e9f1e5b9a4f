"""Engines that let their caches go, and register them again under another incarnation."""

import ctypes
import dataclasses
import mmap
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest

from kvferry.connectors.base import KVConnectorOutput
from kvferry.connectors.pull.worker import PullWorker
from kvferry.layouts.arrays import MemorySpan
from kvferry.testing.connector_conformance import Pair, open_pair
from kvferry.testing.fake_engine import FakeEngine
from kvferry.testing.fake_rank import FakeRank, FakeRequest, Stage
from kvferry.testing.host_device import AWAY, HostDevice
from tests.connectors.engines import SOURCE, TARGET, on_devices, pull_config, served

OpenEngine = Callable[..., FakeEngine]
LARGE = dataclasses.replace(SOURCE, block_size=16, head_size=64, num_layers=8, num_kv_heads=4)
NOT_THERE, THERE = 0, mmap.PROT_READ | mmap.PROT_WRITE


@pytest.fixture(params=["tcp", "vm"])
def pair(open_engine: OpenEngine, request: pytest.FixtureRequest) -> Pair:
    """Two engines that know each other."""
    settings = {"transport": request.param, "lease_duration_s": 600.0}
    producer = open_engine("p", SOURCE, **settings)
    pair = Pair(producer, open_engine("d", TARGET, **settings), 60.0)
    served(pair, "first")
    return pair


Spans = Mapping[FakeEngine, Sequence[tuple[int, int]]]
"""Address and number of bytes of the memory of each engine's caches."""


def spans_of(pair: Pair) -> Spans:
    """The host memory of the caches of both engines."""
    return {
        engine: [
            (tensor.ctypes.data, tensor.nbytes)
            for rank in engine.ranks
            for cache in rank.caches
            for tensor in cache.tensors.values()
        ]
        for engine in (pair.producer, pair.consumer)
    }


def protect(spans: Sequence[tuple[int, int]], protection: int) -> None:
    """Takes the pages of caches away, so that a late touch ends this process, or gives them
    back.
    """
    for address, nbytes in spans:
        first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
        last = (address + nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
        if last > first:
            span = ctypes.c_void_p(first), ctypes.c_size_t(last - first)
            assert ctypes.CDLL(None).mprotect(*span, protection) == 0


def register_again(rank: FakeRank, incarnation: str) -> None:
    assert isinstance(rank.worker, PullWorker)
    rank.worker = rank.worker.successor(incarnation)
    tensors = [cache.registered(by_layer=False) for cache in rank.caches]
    rank.worker.register_kv_caches({name: t for each in tensors for name, t in each.items()})


def fall_asleep(engine: FakeEngine, spans: Sequence[tuple[int, int]]) -> None:
    """The memory of the caches goes, and with it what the engine's own requests have there."""
    for request in engine.requests.values():
        # A load that every rank has reported belongs to the engine: its connector cannot fail the
        # load any more. A busy machine ends a load within the step that began it.
        engine.preempt(request.request_id)
    engine.scheduler.lender.leases.revoke_all()  # type: ignore[attr-defined]
    for rank in engine.ranks:
        rank.worker.close()
    protect(spans, NOT_THERE)


def wake_up(engine: FakeEngine, spans: Sequence[tuple[int, int]]) -> None:
    """The memory comes back, with nothing of value in it."""
    protect(spans, THERE)
    incarnation = uuid.uuid4().hex
    for rank in engine.ranks:
        rank.spoil(range(1, engine.num_blocks))
        register_again(rank, incarnation)
    handshakes = [rank.worker.handshake_metadata() for rank in engine.ranks]
    engine.scheduler.begin_anew(incarnation, handshakes)  # type: ignore[attr-defined]


def sleep(engine: FakeEngine) -> None:
    fall_asleep(engine, ())
    wake_up(engine, ())


def has_begun(request: FakeRequest) -> bool:
    return request.stage is not Stage.WAITING


LEAST_TURNS, MOST_TURNS = 4, 40


def read_meanwhile(pair: Pair, sleeper: str, spans: Spans) -> None:
    """One engine falls asleep while prompts are read, and wakes; each load is checked cell by cell,
    and a late touch of memory that is gone ends this run.
    """
    engine: FakeEngine = getattr(pair, sleeper)
    other = pair.consumer if engine is pair.producer else pair.producer
    draw, failed = random.Random(sleeper), 0
    for turn in range(MOST_TURNS):
        if failed and turn >= LEAST_TURNS:
            break  # some loads were under way when the memory went
        sources = [pair.prefill(f"{turn}.{index}", 600) for index in range(3)]
        requests = [pair.decode(source) for source in sources]
        pair.run(partial(has_begun, requests[0]), "a load to begin")
        time.sleep(draw.random() * 0.004)
        fall_asleep(engine, spans[engine])
        other.step()
        wake_up(engine, spans[engine])
        for request in requests:
            pair.finish(request)
            failed += request.failed or request.error is not None
        pair.settle()
        served(pair, f"after {turn}")
    assert failed


@pytest.mark.parametrize("sleeper", ["producer", "consumer"])
def test_a_pair_serves_after_each_of_its_engines_slept(pair: Pair, sleeper: str) -> None:
    for turn in range(3):
        sleep(getattr(pair, sleeper))
        served(pair, f"after {turn}")


def test_a_prompt_that_was_lent_before_is_not_loaded_after(pair: Pair) -> None:
    source = pair.prefill("r", 21)
    sleep(pair.producer)
    request = pair.decode(source)
    pair.finish(request)
    assert request.failed or request.error is not None
    pair.settle()


def test_a_load_that_waits_while_its_engine_sleeps_is_loaded_after(pair: Pair) -> None:
    request = pair.decode(pair.prefill("r", 21))
    sleep(pair.consumer)
    pair.finish(request)
    assert request.error is None
    assert not request.failed
    pair.settle()


def test_a_load_that_ended_unreported_before_its_engine_slept_has_failed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pair.decode(pair.prefill("r", 21))
    with monkeypatch.context() as patch:
        for rank in pair.consumer.ranks:
            patch.setattr(rank.worker, "get_transfer_results", lambda _: KVConnectorOutput())
        # The source lets its blocks go once every rank has read them, and the load counts.
        pair.run(lambda: not pair.producer.held, "the ranks to read")
    assert request.stage is Stage.LOADING
    sleep(pair.consumer)
    pair.finish(request)
    assert request.failed
    pair.settle()
    served(pair, "after")


def test_a_load_that_was_reported_before_its_engine_slept_is_computed_again(pair: Pair) -> None:
    request = pair.decode(pair.prefill("r", 21))
    pair.run(lambda: request.stage is Stage.COMPUTING, "the load to be reported")
    sleep(pair.consumer)
    pair.finish(request)
    assert request.error is None
    assert not request.external_tokens
    pair.settle()
    served(pair, "after")


@pytest.mark.parametrize("transport", ["tcp", "vm"])
@pytest.mark.parametrize("sleeper", ["producer", "consumer"])
def test_a_reader_reads_while_an_engine_falls_asleep_and_wakes(
    open_engine: OpenEngine, transport: str, sleeper: str
) -> None:
    settings = {"transport": transport, "lease_duration_s": 600.0, "num_blocks": 320}
    pair = Pair(open_engine("p", LARGE, **settings), open_engine("d", LARGE, **settings), 60.0)
    read_meanwhile(pair, sleeper, spans_of(pair))


@pytest.mark.parametrize("sleeper", ["producer", "consumer"])
def test_a_device_packs_and_unpacks_while_an_engine_falls_asleep_and_wakes(
    host_device: HostDevice, monkeypatch: pytest.MonkeyPatch, sleeper: str
) -> None:
    allocated: list[MemorySpan] = []
    allocate = host_device.allocate

    def noted(nbytes: int) -> MemorySpan:
        allocated.append(allocate(nbytes))
        return allocated[-1]

    monkeypatch.setattr(host_device, "allocate", noted)
    configs = (
        on_devices(pull_config("kv_producer", "p", lease_duration_s=600.0), "cpu", "tcp"),
        on_devices(pull_config("kv_consumer", "d", lease_duration_s=600.0), "cpu", "tcp"),
    )
    with open_pair(configs, (LARGE, LARGE), num_blocks=320, device=host_device) as pair:
        spans = [(each.address % AWAY, each.nbytes) for each in allocated]
        half = len(spans) // 2
        engines = {pair.producer: spans[:half], pair.consumer: spans[half:]}
        read_meanwhile(pair, sleeper, engines)
