"""The PullConnector passes its suite with caches on a device, over each transport that serves one.

A GPU, where there is one, and a thread that takes the place of one: what lies on that thread's
device has addresses at which the host has nothing.
"""

import importlib.util
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, nullcontext
from typing import Any, ClassVar

import pytest
import torch

from kvferry import plugins
from kvferry.config import KVTransferConfig
from kvferry.connectors.records import digest_mismatch
from kvferry.plugins import TRANSPORTS, load_plugin, temporary_plugin
from kvferry.testing.connector_conformance import (
    GEOMETRIES,
    WINDOW,
    WINDOWED,
    HybridConnectorConformance,
    Pair,
    open_pair,
)
from kvferry.testing.fake_engine import FakeEngine, Groups, run
from kvferry.testing.fake_rank import ContractBrokenError, FakeRequest, Stage, promise
from kvferry.testing.faults import lossy_transport
from kvferry.testing.host_device import HostDevice
from kvferry.testing.known_cache import CacheDevice
from kvferry.testing.torch_device import TorchDevice
from kvferry.testing.unfenced import ReadGate, unfenced_transport
from kvferry.transports.base import Transport
from kvferry.transports.tcp import TcpTransport
from tests.connectors.engines import SHORT_LEASE, on_devices
from tests.connectors.test_pull_devices import ways_of
from tests.connectors.test_pull_staged_geometries import CASES
from tests.transports import test_conformance_teeth as defects

Configs = tuple[KVTransferConfig, KVTransferConfig]

BUFFERS = {"cuda_ipc": "cuda", "nixl": "cuda", "tcp": "cpu", "ucx": "cpu"}
"""Transport that serves a cache on a device → what ``kv_buffer_device`` says with it."""
PACKAGES = {"nixl": "nixl", "ucx": "ucxx"}
MARKS = {"thread": pytest.mark.slow, "gpu": pytest.mark.gpu}


def ways_over(transports: Iterable[str]) -> list[Any]:
    """Each device with each of these transports that knows the device."""
    return [
        pytest.param((device, transport), marks=mark, id=f"{device}-{transport}")
        for device, mark in MARKS.items()
        for transport in transports
        if (device, transport) != ("thread", "nixl")  # which knows no device but a GPU
    ]


WAYS, WIRES = ways_over(BUFFERS), ways_over(["tcp"])


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[str, str]:
    """What plays the device, and the transport."""
    device, transport = request.param
    if device == "gpu" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; none is here")
    package = PACKAGES.get(transport)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"the package {package} is not installed (`make test-rest` installs it)")
    return device, transport


@pytest.fixture
def cache_device(way: tuple[str, str], request: pytest.FixtureRequest) -> CacheDevice:
    """Where the caches of both engines lie."""
    if way[0] == "gpu":
        return TorchDevice()
    device: CacheDevice = request.getfixturevalue("host_device")
    return device


@pytest.fixture
def configs(way: tuple[str, str], pull_configs: Callable[..., Configs]) -> Configs:
    """The configs of two engines whose caches are on the device."""
    _, transport = way
    keys: dict[str, Any] = {"record_digests": True}
    if transport == "nixl":
        keys["transport_config"] = {"nixl": {"device_memory": True}}
    one, two = pull_configs(**keys)
    device = BUFFERS[transport]
    return on_devices(one, device, transport), on_devices(two, device, transport)


class TestOnDevices(HybridConnectorConformance):
    short_lease = SHORT_LEASE

    @pytest.fixture
    def configs(self, configs: Configs) -> Configs:
        return configs

    @pytest.fixture
    def cache_device(self, cache_device: CacheDevice) -> CacheDevice:
        return cache_device


def check_digests(pair: Pair, ids: Iterable[str]) -> None:
    """Both sides' digests of these requests agree."""
    for id in ids:
        sides = []
        for engine, direction in ((pair.producer, "send"), (pair.consumer, "recv")):
            records = [
                record
                for output in engine.outputs
                for record in output.transfer_records
                if (record.direction, record.request_id) == (direction, id)
                and record.token_digests is not None
            ]
            assert len(records) == len(engine.ranks)
            sides.append(records)
        assert digest_mismatch(*sides) is None


@pytest.mark.parametrize(
    "geometries", [*GEOMETRIES.values(), *CASES.values()], ids=[*GEOMETRIES, *CASES]
)
def test_several_loads_at_once_arrive_whatever_the_shapes(
    configs: Configs, cache_device: CacheDevice, geometries: tuple[Groups, Groups]
) -> None:
    windows = dict.fromkeys(WINDOWED, WINDOW) if isinstance(geometries[0], tuple) else {}
    with open_pair(configs, geometries, 128, layer_windows=windows, device=cache_device) as pair:
        lengths = {"a": 30, "b": 17, "c": 3, "d": 25, "e": 24}
        sources = {id: pair.prefill(id, length) for id, length in lengths.items()}
        requests = [
            pair.decode(source, local_blocks=1 if id == "d" else 0)
            for id, source in sources.items()
        ]
        pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "all to end")
        assert [(r.request_id, r.error) for r in requests if r.failed or r.error] == []
        assert all(request.external_tokens for request in requests)
        pair.settle()
        check_digests(pair, lengths)


@pytest.mark.parametrize("way", WIRES, indirect=True)
@pytest.mark.parametrize("on_device", ["producer", "consumer"])
def test_digests_agree_between_a_device_and_host_memory(
    way: tuple[str, str], configs: Configs, cache_device: CacheDevice, on_device: str
) -> None:
    with ExitStack() as stack:
        engines = []
        for name, config, shape in zip(
            ("producer", "consumer"), configs, CASES["windows"], strict=True
        ):
            device = cache_device if name == on_device else None
            windows = dict.fromkeys(WINDOWED, WINDOW)
            engines.append(FakeEngine.open(config, shape, layer_windows=windows, device=device))
            stack.callback(engines[-1].close)
        producer, consumer = engines
        pair = Pair(producer, consumer, timeout_s=60.0)
        is_served(pair)
        pair.settle()
        check_digests(pair, ["r"])


# ---- what is wrong is found ----------------------------------------------------------------------


def is_served(pair: Pair) -> None:
    pair.finish(pair.decode(pair.prefill("r", 23)))


def begun(pair: Pair) -> FakeRequest:
    """A load, of what the source has lent, of which the ranks have heard."""
    request = pair.decode(pair.producer.requests["lent"])
    pair.run(lambda: request.stage is Stage.LOADING, "its admission")
    for _ in range(20):
        pair.consumer.step()
    return request


def waits(pair: Pair) -> None:
    """A load does not end while the engine may use its blocks."""
    request = begun(pair)
    time.sleep(0.2)
    pair.consumer.step()
    promise(request.stage is Stage.LOADING, "it has ended before its blocks may be written")
    pair.consumer.abort(request.request_id)


class LandsLate(defects.LandsLate):
    """What lands late lands once the load is over."""

    opened: ClassVar[list[defects.LandsLate]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.opened.append(self)


def is_given_up(pair: Pair) -> Callable[[], None]:
    """Nothing lands after a load was given up, though the source holds its blocks still.

    What a device was asked for is carried out once it is free: until then the load is not over.
    """
    pair.consumer.abort(begun(pair).request_id)

    def is_over() -> None:
        consumer = pair.consumer
        run([consumer], lambda: consumer.is_idle, timeout_s=pair.timeout_s, what="its end")
        time.sleep(1.0)
        for late in LandsLate.opened:
            late.land()
        consumer.check_memory()

    return is_over


BUSY = (waits, is_given_up)
"""Scenes in which the engine's device is busy."""
DEFECTS = {
    (defects.LosesRuns, is_served): "the load is not what the source held",
    (defects.TellsNobody, is_served): r"waited 3 s for 'r' to end",
    (defects.IgnoresTheEvent, waits): "before its blocks may be written",
    (LandsLate, is_given_up): "written to, held by nobody",
}


@pytest.fixture
def play(
    way: tuple[str, str],
    configs: Configs,
    cache_device: CacheDevice,
) -> Callable[..., None]:
    """Plays a scene over the transport, with a defect if one is given."""
    transport = way[1]

    def played(scene: Callable[[Pair], Any], *defect: type) -> None:
        if isinstance(cache_device, TorchDevice) and scene in BUSY:
            pytest.skip("what a busy GPU holds cannot be looked at without waiting for it")
        sound = load_plugin(TRANSPORTS, transport, Transport)
        broken = type("Broken", (*defect, sound), {})
        LandsLate.opened.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(plugins._temporary, (TRANSPORTS, transport), broken)
            shapes = GEOMETRIES["tp2-pp2"]
            wait_s = 3.0 if defects.TellsNobody in defect else 60.0  # found by a wait without end
            with open_pair(configs, shapes, timeout_s=wait_s, device=cache_device) as pair:
                is_served(pair)
                if scene in BUSY:  # a scene that does not load it would wait for its lease's end
                    pair.prefill("lent", 23)
                    pair.producer.step()  # the ranks have heard of it, and digested it
                with cache_device.busy() if scene in BUSY else nullcontext():  # type: ignore[attr-defined]
                    after = scene(pair)
                if after is not None:
                    after()
                pair.settle()

    return played


@pytest.mark.parametrize("scene", [is_served, *BUSY])
def test_a_sound_transport_passes_what_defects_fail(
    way: tuple[str, str], play: Callable[..., None], scene: Callable[[Pair], None]
) -> None:
    play(scene)


@pytest.mark.parametrize(
    ("defect", "scene", "says"),
    [(*key, says) for key, says in DEFECTS.items()],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_defect_of_a_transport_is_found_with_caches_on_a_device(
    way: tuple[str, str],
    play: Callable[..., None],
    defect: type,
    scene: Callable[[Pair], None],
    says: str,
) -> None:
    if way[1] != "cuda_ipc" and scene in BUSY:
        pytest.skip("it lands in staging memory")
    with pytest.raises(ContractBrokenError, match=says):
        play(scene, defect)


@pytest.fixture
def open_reader(
    configs: Configs, cache_device: CacheDevice
) -> Iterator[Callable[[type[Transport]], Pair]]:
    """Opens a pair of which the consumer alone reads over a given kind of the wire."""
    with ExitStack() as stack:

        def opened(kind: type[Transport]) -> Pair:
            engines = []
            for config, shape in zip(configs, GEOMETRIES["tp2-pp2"], strict=True):
                engines.append(FakeEngine.open(config, shape, device=cache_device))
                stack.callback(engines[-1].close)
                if len(engines) == 1:
                    stack.enter_context(temporary_plugin(TRANSPORTS, "tcp", kind))
            producer, consumer = engines
            return Pair(producer, consumer, timeout_s=60.0)

        yield opened


@pytest.mark.parametrize("way", WIRES, indirect=True)
def test_reads_that_are_lost_half_way_fail_their_loads_and_harm_no_other(
    way: tuple[str, str], open_reader: Callable[[type[Transport]], Pair]
) -> None:
    pair = open_reader(lossy_transport(TcpTransport, loss=0.3, seed=3))
    requests = [pair.decode(pair.prefill(f"r{n}", 20 + n)) for n in range(8)]
    pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "all to end")
    assert 0 < sum(request.failed for request in requests) < len(requests)
    pair.settle()


@pytest.mark.parametrize("way", WIRES, indirect=True)
def test_what_lands_after_a_load_was_given_up_lands_in_no_cell(
    way: tuple[str, str], open_reader: Callable[[type[Transport]], Pair]
) -> None:
    gate = ReadGate()
    pair = open_reader(unfenced_transport(TcpTransport, gate))
    is_served(pair)
    pair.prefill("lent", 23)
    gate.hold()
    try:
        pair.consumer.abort(begun(pair).request_id)
        pair.settle()
    finally:
        gate.release()
    time.sleep(0.3)
    pair.settle()
    is_served(pair)


def test_what_was_lent_is_digested_after_the_steps_that_wrote_it(
    host_device: HostDevice, pull_configs: Callable[..., Configs]
) -> None:
    one, two = pull_configs(record_digests=True, lease_duration_s=30.0)
    configs = on_devices(one, "cuda", "cuda_ipc"), on_devices(two, "cuda", "cuda_ipc")
    with open_pair(configs, GEOMETRIES["equal"], device=host_device) as pair:
        source = pair.prefill("r", 23)
        with host_device.busy():
            lending = threading.Thread(target=pair.producer.step)
            lending.start()
            lending.join(0.2)
            assert lending.is_alive()
        lending.join(60.0)
        pair.finish(pair.decode(source))
        pair.settle()
        check_digests(pair, ["r"])


def test_what_a_device_cannot_digest_is_lent_to_nobody(
    host_device: HostDevice, pull_configs: Callable[..., Configs]
) -> None:
    one, two = pull_configs(record_digests=True, lease_duration_s=600.0)
    configs = on_devices(one, "cuda", "cuda_ipc"), on_devices(two, "cuda", "cuda_ipc")
    with open_pair(configs, GEOMETRIES["equal"], device=host_device) as pair:
        source = pair.prefill("r", 23)
        host_device.streams[0].fail()
        pair.settle()  # the lease was taken back before it expired
        request = pair.decode(source)
        pair.finish(request)
        assert request.external_tokens == 0
        errors = [r.error for out in pair.producer.outputs for r in out.transfer_records if r.error]
        assert len(errors) == 1
        assert "the device failed" in errors[0]


@pytest.mark.parametrize(
    ("transport", "way"), [("cuda_ipc", "placed"), ("tcp", "staged")], ids=["cuda_ipc", "tcp"]
)
def test_a_wrapped_transport_serves_a_device_as_the_transport_does(
    host_device: HostDevice, pull_configs: Callable[..., Configs], transport: str, way: str
) -> None:
    lossy = lossy_transport(load_plugin(TRANSPORTS, transport, Transport), loss=0.1, seed=3)
    lossy.name = "lossy"
    one, two = (on_devices(each, BUFFERS[transport], "lossy") for each in pull_configs())
    with (
        temporary_plugin(TRANSPORTS, "lossy", lossy),
        open_pair((one, two), GEOMETRIES["tp2-pp2"], device=host_device) as pair,
    ):
        requests = [pair.decode(pair.prefill(f"r{n}", 20 + n)) for n in range(8)]
        pair.run(lambda: all(r.stage is Stage.FINISHED for r in requests), "all to end")
        assert not all(request.failed for request in requests)
        assert ways_of(pair) == {("lossy", way)}
        pair.settle()
