"""The nixl transport: the conformance class, what proves the end of a read, and NIXL's errors."""

import hashlib
import importlib.util
import sys
import threading
import time
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from kvferry.errors import ConfigError, DecodeError, KVFerryError, PeerLostError, TransferError
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_peer import PeerProcess, pattern
from kvferry.testing.transport_scene import LARGE, SMALL
from kvferry.testing.unfenced_conformance import UnfencedTransportConformance
from kvferry.transports import nixl, nixl_agents
from kvferry.transports.base import Transfer, TransferState, Transport, TransportOptions
from kvferry.transports.nixl import NixlTransport
from kvferry.transports.nixl_agents import error_of, nixl_errors
from kvferry.transports.nixl_wire import Endpoint, Region, decode_endpoint, encode_endpoint

OVER_TCP = MappingProxyType(
    {"backend_params": {"UCX": {"engine_config": "TLS=tcp,KEEPALIVE_INTERVAL=1s"}}}
)


needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None,
    reason="the package nixl is not installed (`make test SLOW=1` installs it)",
)
needed = [pytest.mark.slow, needs_nixl]


class TestNixlTransport(UnfencedTransportConformance):
    """Over what UCX chooses on one host, which is shared memory."""

    pytestmark = needed
    transport = NixlTransport


class TestNixlTransportOverTcp(UnfencedTransportConformance):
    pytestmark = needed
    transport = NixlTransport
    extra = OVER_TCP

    def stopped_read(self, local: Transport, process: PeerProcess) -> tuple:
        """A scene whose peer has stopped, and a read from it that has been posted."""
        scene = self.scene(local, process, large_case(LARGE))
        self.wait(local, scene.read())
        process.suspend()
        scene.refill()
        transfer = scene.read()
        time.sleep(self.settle_s)
        return scene, transfer

    def test_a_cancelled_read_of_a_stopped_peer_runs_until_its_bytes_have_landed(
        self, local: Transport, fresh_peer: PeerProcess
    ) -> None:
        """Stalled, cancelled: neither proves anything, and the bytes do land when it resumes."""
        scene, transfer = self.stopped_read(local, fresh_peer)
        local.cancel(transfer)
        time.sleep(self.stall_timeout_s)
        assert transfer.state is TransferState.RUNNING
        assert local.poll() == []
        scene.assert_untouched()
        fresh_peer.resume()
        self.wait(local, transfer)
        assert transfer.state is TransferState.CANCELLED
        assert 0 < transfer.bytes_done < transfer.nbytes  # what was posted; the rest never was
        landed = sum(int((memory != 0xA5).sum()) for memory in scene.targets)
        assert landed > 0.9 * transfer.bytes_done
        scene.refill()
        time.sleep(self.settle_s)
        scene.assert_untouched()

    def test_closing_the_connection_to_a_stopped_peer_ends_its_reads(
        self, local: Transport, fresh_peer: PeerProcess, healthy_peer: PeerProcess
    ) -> None:
        """The connection's agent ends with it: nothing lands when the peer resumes."""
        scene, transfer = self.stopped_read(local, fresh_peer)
        scene.peer.close()
        self.wait(local, transfer)
        assert transfer.state is TransferState.FAILED
        assert isinstance(transfer.error, PeerLostError)
        fresh_peer.resume()
        time.sleep(2 * self.settle_s)
        scene.assert_untouched()
        other = self.scene(local, healthy_peer, large_case(SMALL))
        self.wait(local, other.read())
        other.assert_exact()

    def test_a_backend_that_proves_nothing_leaves_lost_reads_running(
        self, fresh_peer: PeerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also after close; and the memory is kept, because no one else may ever have it."""
        monkeypatch.setattr(nixl_agents, "FENCED_BACKENDS", frozenset())
        monkeypatch.setattr(nixl, "_kept", kept := [])
        local = self.transport.open(self.options())
        scene, transfer = self.stopped_read(local, fresh_peer)
        scene.peer.close()
        time.sleep(self.settle_s)
        assert transfer.state is TransferState.RUNNING
        local.close()
        assert transfer.state is TransferState.RUNNING
        assert any(memory is scene.targets[0] for memory in kept[0])

    def test_an_agent_that_somebody_still_holds_proves_nothing(
        self, local: Transport, fresh_peer: PeerProcess
    ) -> None:
        """Its worker lives on: the read keeps running."""
        scene, transfer = self.stopped_read(local, fresh_peer)
        held = scene.peer.agent._agent.agent
        scene.peer.close()
        time.sleep(self.settle_s)
        assert transfer.state is TransferState.RUNNING
        del held


@pytest.fixture
def pair():
    """Two transports of this process; the first serves 64 KiB, the second reads into as much."""
    with (
        NixlTransport.open(TransportOptions()) as source,
        NixlTransport.open(TransportOptions()) as target,
    ):
        _, held = source.allocate(1 << 16)
        held[:] = pattern(held.nbytes, 1)
        target.allocate(1 << 16)
        yield source, target


def wait(local: Transport, transfer: Transfer) -> Transfer:
    deadline = time.monotonic() + 30
    while not transfer.is_terminal:
        assert time.monotonic() < deadline, transfer
        time.sleep(0.001)
    assert local.poll() == [transfer]
    return transfer


def one_tile(nbytes: int = 1 << 16):
    case = large_case(SMALL)
    tiles, runs = case.tiles[:1].copy(), case.runs[:1].copy()
    tiles["heads"] = tiles["elements"] = 1
    tiles["source_offset"] = tiles["target_offset"] = 0
    tiles["itemsize"] = nbytes
    runs["source_block"] = runs["target_block"] = 0
    runs["tokens"] = 1
    return tiles, runs


def with_changes(endpoint: bytes, **changes: object) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(decode_endpoint(endpoint), **changes))


@pytest.mark.slow
@needs_nixl
def test_memory_that_the_peer_never_registered_fails_that_read_only(pair) -> None:
    source, target = pair
    (region,) = decode_endpoint(source.endpoint()).regions
    lie = msgspec.structs.replace(region, address=region.address + (1 << 30))
    lying = target.connect(with_changes(source.endpoint(), regions=(lie,)))
    assert type(wait(target, target.read(lying, *one_tile())).error) is TransferError
    honest = target.connect(source.endpoint())
    assert wait(target, target.read(honest, *one_tile())).state is TransferState.DONE


@pytest.mark.slow
@needs_nixl
def test_a_connection_registers_only_the_memory_that_is_read_into(pair) -> None:
    source, target = pair
    _, staging = target.allocate(1 << 16)
    peer = target.connect(source.endpoint())
    for region in (1, 1, 0):
        tiles, runs = one_tile()
        tiles["target_region"] = region
        assert wait(target, target.read(peer, tiles, runs)).state is TransferState.DONE
        assert peer.registered == ({1} if region else {0, 1})
    assert bytes(staging) == bytes(pattern(staging.nbytes, 1))


@pytest.mark.slow
@needs_nixl
def test_the_metadata_of_another_agent_is_refused(pair) -> None:
    source, target = pair
    peer = target.connect(with_changes(source.endpoint(), agent="somebody-else"))
    error = wait(target, target.read(peer, *one_tile())).error
    assert isinstance(error, PeerLostError)
    assert "somebody-else" in str(error)


@pytest.mark.slow
@needs_nixl
def test_regions_made_after_the_connection_can_be_read_into(pair) -> None:
    source, target = pair
    peer = target.connect(source.endpoint())
    wait(target, target.read(peer, *one_tile()))
    later = np.zeros(1 << 16, dtype=np.uint8)
    tiles, runs = one_tile()
    tiles["target_region"] = target.register(later, serve=False)
    assert wait(target, target.read(peer, tiles, runs)).state is TransferState.DONE
    assert np.array_equal(later, pattern(1 << 16, 1))


@pytest.mark.slow
@needs_nixl
def test_a_read_takes_as_many_posts_as_its_limits_say() -> None:
    case = large_case(SMALL)
    extra = {"chunk_bytes": 65536, "max_descriptors": 7}
    with (
        NixlTransport.open(TransportOptions()) as source,
        NixlTransport.open(TransportOptions(extra=extra)) as target,
    ):
        source.allocate(case.source_region_bytes[0])
        target.allocate(case.target_region_bytes[0])
        transfer = target.read(target.connect(source.endpoint()), case.tiles, case.runs)
        assert wait(target, transfer).state is TransferState.DONE
        assert transfer.segments == SMALL // 512  # one per token and head: the layouts differ


@pytest.mark.slow
@needs_nixl
def test_an_idle_transport_that_serves_takes_little_of_a_core(pair) -> None:
    before, began = time.process_time(), time.monotonic()
    time.sleep(0.5)
    assert time.process_time() - before < 0.3 * (time.monotonic() - began)


@pytest.mark.slow
@needs_nixl
def test_after_close_memory_is_refused() -> None:
    transport = NixlTransport.open(TransportOptions())
    transport.close()
    with pytest.raises(TransferError, match="closed"):
        transport.allocate(4096)
    transport.close()


@pytest.mark.slow
@needs_nixl
def test_an_unknown_backend_is_refused_with_the_installed_ones() -> None:
    with pytest.raises(ConfigError, match=r"'PIGEON' is not one of .*UCX"):
        NixlTransport.open(TransportOptions(extra={"backends": ["PIGEON"]}))


@pytest.mark.slow
@needs_nixl
def test_a_backend_that_does_not_start_is_a_configuration_error() -> None:
    params = {"UCX": {"ucx_error_handling_mode": "pigeon"}}
    with pytest.raises(ConfigError, match="backend UCX does not start"):
        NixlTransport.open(TransportOptions(extra={"backend_params": params}))


@pytest.mark.slow
@needs_nixl
def test_every_error_of_nixl_is_mapped() -> None:
    from nixl import _bindings

    kinds = [kind for name, kind in vars(_bindings).items() if name.endswith("Error")]
    assert len(kinds) >= 12
    lost = {_bindings.nixlRemoteDisconnectError, _bindings.nixlCancelledError}
    for kind in kinds:
        for default in (TransferError, DecodeError, ConfigError):
            with (
                pytest.raises(KVFerryError, match="pigeons: NIXL says coo") as raised,
                nixl_errors("pigeons", default),
            ):
                raise kind("coo")
            assert type(raised.value) is (PeerLostError if kind in lost else default)


# What follows needs no NIXL.


@pytest.mark.parametrize("kind", [RuntimeError, ValueError, TypeError, KeyError])
def test_other_errors_of_its_bindings_are_mapped_too(kind: type[Exception]) -> None:
    assert type(error_of(kind("x"), "doing")) is TransferError


def test_a_mapped_error_holds_no_frames_of_nixl() -> None:
    # They would keep the agent, and so its worker, alive.
    with pytest.raises(TransferError) as raised, nixl_errors("doing"):
        raise RuntimeError("x")
    assert raised.value.__cause__ is None
    context = raised.value.__context__
    assert context is None or context.__traceback__ is None


def test_without_the_package_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    threads = threading.active_count()
    with pytest.raises(ConfigError, match=r"install kvferry\[nixl\]"):
        NixlTransport.open(TransportOptions())
    assert threading.active_count() == threads


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"backends": []}, "backends: expected at least one"),
        ({"backend_params": {"GDS": {}}}, "GDS is not in backends"),
        ({"num_threads": -1}, "num_threads: -1 is less than 0"),
        ({"chunk_bytes": 1}, "chunk_bytes: 1 is less than 4096"),
        ({"max_descriptors": 0}, "max_descriptors: 0 is less than 1"),
    ],
)
def test_impossible_keys_are_refused(extra: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NixlTransport.open(TransportOptions(extra=extra))


@pytest.mark.parametrize(
    "region",
    [
        Region(-1, 10),
        Region(0, -1),
        Region(1 << 63, 10),
        Region(0, 1 << 60),
        Region(0, 10, "FILE"),
        Region(0, 10, "VRAM", -1),
    ],
)
def test_an_endpoint_with_impossible_memory_is_refused(region: Region) -> None:
    with pytest.raises(DecodeError, match="region 0 is impossible"):
        decode_endpoint(encode_endpoint("agent", b"metadata", (region,)))


def test_metadata_that_was_garbled_never_reaches_nixl() -> None:
    garbled = Endpoint(
        agent="agent", metadata=b"other", digest=hashlib.sha256(b"meta").digest(), regions=()
    )
    with pytest.raises(DecodeError, match="garbled"):
        decode_endpoint(msgspec.msgpack.encode(garbled))
    with pytest.raises(DecodeError, match="bytes of metadata"):
        decode_endpoint(encode_endpoint("agent", b"", ()))
