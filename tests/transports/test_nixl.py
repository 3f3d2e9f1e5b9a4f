"""The nixl transport: the conformance class, what proves the end of a read, and NIXL's errors."""

import hashlib
import importlib.util
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import pytest

from kvferry.errors import (
    ConfigError,
    DecodeError,
    HostError,
    KVFerryError,
    PeerLostError,
    StalledError,
    TransferError,
)
from kvferry.layouts.copier import expand
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.testing.transport_peer import PeerProcess, pattern
from kvferry.testing.transport_scene import LARGE, SMALL, Scene
from kvferry.testing.unfenced_conformance import UnfencedTransportConformance
from kvferry.testing.waiting import until
from kvferry.transports import nixl, nixl_agents, nixl_reader, regions
from kvferry.transports.base import (
    DeviceTransport,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
)
from kvferry.transports.nixl import NixlTransport
from kvferry.transports.nixl_agents import (
    AgentEndpoint,
    AgentOptions,
    Region,
    decode_endpoint,
    encode_endpoint,
    error_of,
    has_rdma,
    nixl_errors,
)
from kvferry.transports.nixl_segments import merge

OVER_TCP: Mapping[str, Any] = MappingProxyType(
    {"backend_params": {"UCX": {"engine_config": "TLS=tcp,KEEPALIVE_INTERVAL=1s"}}}
)
WITHOUT_CMA: Mapping[str, Any] = MappingProxyType(
    {"backend_params": {"UCX": {"engine_config": "TLS=^cma"}}}
)


needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None,
    reason="the package nixl is not installed (`make test-rest` installs it)",
)
needed = [pytest.mark.slow, needs_nixl]
UCX_ABORTS = (
    "where the source itself sends the data (over TCP, and over shared memory on a host that "
    "forbids CMA), UCX 1.22 may abort a process that resumes while it owes data to a reader that "
    "has gone (ucp_request.inl: Fatal: unexpected error: Endpoint timeout)"
)


def peer_of(scene: Scene) -> nixl_reader.NixlPeer:
    assert isinstance(scene.peer, nixl_reader.NixlPeer)
    return scene.peer


class NixlConformance(TransportConformance):
    """Peers that stop may owe data when they resume, which their UCX may not survive."""

    transport = NixlTransport

    @pytest.mark.parametrize("when", ["before", "during"])
    def test_a_peer_that_stops_and_resumes_lands_nothing_late(
        self, impatient: Transport, fresh_peer: PeerProcess, when: str
    ) -> None:
        """Nothing does, whatever becomes of the peer, which is asked for more at the very end."""
        try:
            super().test_a_peer_that_stops_and_resumes_lands_nothing_late(
                impatient, fresh_peer, when
            )
        except TransferError as error:
            if "the peer process ended" not in str(error):
                raise
            pytest.xfail(UCX_ABORTS)


class TestNixlTransport(NixlConformance):
    """Over what UCX chooses on one host: shared memory, read by CMA where the host allows it."""

    pytestmark = needed


class TestNixlTransportWithoutCma(NixlConformance):
    """Over shared memory that the source itself fills, as on a host that forbids CMA."""

    pytestmark = needed
    extra = WITHOUT_CMA


class TestNixlTransportOverTcp(NixlConformance):
    pytestmark = needed
    extra = OVER_TCP

    def stopped_read(self, local: Transport, process: PeerProcess) -> tuple:
        """A scene whose peer has stopped, and a read from it that has been posted."""
        scene = self.scene(local, process, large_case(LARGE))
        self.wait(local, scene.read())
        process.suspend()
        scene.refill()
        transfer = scene.read()
        self.wait_for(lambda: bool(peer_of(scene).posts))
        return scene, transfer

    def test_a_cancelled_read_of_a_stopped_peer_ends_with_its_agent(
        self, local: Transport, fresh_peer: PeerProcess
    ) -> None:
        """What was posted cannot be taken back, and yet nothing lands when the peer resumes."""
        scene, transfer = self.stopped_read(local, fresh_peer)
        local.cancel(transfer)
        before = transfer.state
        self.wait(local, transfer)
        assert before is TransferState.RUNNING
        assert transfer.state is TransferState.CANCELLED
        assert time.monotonic() - transfer.started > nixl_reader.END_S
        fresh_peer.resume()
        self.assert_nothing_lands(scene)

    @pytest.mark.parametrize("closing", ["connection", "transport"])
    def test_closing_waits_for_the_reads_of_a_source_that_answers(
        self, healthy_peer: PeerProcess, closing: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """UCX would abort a source that finds its reader gone, and other readers are served."""
        left: list[int] = []
        destroy = nixl_agents.Agent.destroy

        def note(agent: nixl_agents.Agent, running: list) -> bool:
            left.append(len(running))
            return destroy(agent, running)

        monkeypatch.setattr(nixl_agents.Agent, "destroy", note)
        with self.transport.open(self.options()) as local:
            scene = self.scene(local, healthy_peer, large_case(LARGE))
            read = scene.read()
            self.wait_for_bytes(read)
            (scene.peer if closing == "connection" else local).close()
            self.wait_for(lambda: peer_of(scene).agent.agent is None and read.is_terminal)
        assert left
        assert not any(left)

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

    def test_a_read_stays_running_while_somebody_holds_its_agent(
        self, local: Transport, fresh_peer: PeerProcess
    ) -> None:
        """The agent's worker lives on, and bytes may land; once it is gone the read is over."""
        scene, transfer = self.stopped_read(local, fresh_peer)
        held = scene.peer.agent.agent._agent.agent
        scene.peer.close()
        self.wait_for(lambda: scene.peer.agent.agent is None)
        assert transfer.state is TransferState.RUNNING
        del held
        self.wait(local, transfer)
        assert isinstance(transfer.error, PeerLostError)
        fresh_peer.resume()
        self.assert_nothing_lands(scene)


class TestConnectionsThatShareAnAgent(NixlConformance):
    """All of them, over TCP: whatever ends the agent of one ends that of all."""

    pytestmark = needed
    extra = MappingProxyType({**OVER_TCP, "max_agents": 1})

    def test_a_read_is_not_posted_to_a_source_that_is_forgotten(
        self, local: Transport, healthy_peer: PeerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """It comes while the connection is made, after another one to the source was closed."""
        closed = self.scene(local, healthy_peer, large_case(SMALL))
        kept = self.scene(local, healthy_peer, large_case(SMALL))
        self.wait(local, closed.read(), kept.read())
        forgotten: list[str] = []
        reads: list[Transfer] = []
        forget, serve = nixl_agents.Agent.forget, nixl_agents.Agent.serve

        def note(agent: nixl_agents.Agent, name: str) -> None:
            forget(agent, name)
            forgotten.append(name)

        def read(agent: nixl_agents.Agent) -> None:
            serve(agent)
            if forgotten and not reads:
                kept.refill()
                reads.append(kept.read())

        monkeypatch.setattr(nixl_agents.Agent, "forget", note)
        monkeypatch.setattr(nixl_agents.Agent, "serve", read)
        peer_of(kept).meets_until = time.monotonic() + 60.0
        closed.peer.close()
        self.wait_for(lambda: bool(reads))
        self.wait(local, *reads)
        assert reads[0].error is None
        kept.assert_exact()

    def test_reads_go_on_when_the_agent_ends_because_of_another_connection(
        self, impatient: Transport, healthy_peer: PeerProcess, fresh_peer: PeerProcess
    ) -> None:
        """They are posted again; the connection stays."""
        stopped = self.scene(impatient, fresh_peer, large_case(SMALL))
        healthy = self.scene(impatient, healthy_peer, large_case(LARGE))
        self.wait(impatient, stopped.read(), healthy.read())
        agent = peer_of(healthy).agent
        assert peer_of(stopped).agent is agent
        fresh_peer.suspend()
        stuck = stopped.read()
        self.wait_for(lambda: bool(peer_of(stopped).posts))
        first = agent.agent
        healthy.refill()
        reads = []
        while not stuck.is_terminal:
            reads.append(healthy.read())
            self.wait_for(lambda: stuck.is_terminal or reads[-1].is_terminal)
        self.wait(impatient, stuck, *reads)
        assert isinstance(stuck.error, StalledError)
        assert [read.error for read in reads if read.error] == []
        healthy.assert_exact()
        assert peer_of(healthy).lost is None
        assert peer_of(healthy).agent.agent is not first
        fresh_peer.resume()


class TestBackendsWithoutProof(UnfencedTransportConformance):
    """A transport whose backends are not known to fence, over TCP."""

    pytestmark = needed
    transport = type("NixlWithoutProof", (NixlTransport,), {"fences": False})
    serving = NixlTransport
    extra = OVER_TCP

    @pytest.fixture(autouse=True)
    def no_proof(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(nixl_agents, "FENCED_BACKENDS", frozenset())

    def test_lost_reads_run_on_and_keep_their_memory(
        self, fresh_peer: PeerProcess, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also after close, because no one else may ever have the memory."""
        kept: list[Any] = []
        monkeypatch.setattr(regions, "_kept", kept)
        local = NixlTransport.open(self.options())
        scene = self.scene(local, fresh_peer, large_case(LARGE))
        self.wait(local, scene.read())
        fresh_peer.suspend()
        transfer = scene.read()
        self.wait_for(lambda: bool(peer_of(scene).posts))
        scene.peer.close()
        self.wait_for(lambda: peer_of(scene).agent.agent is None)
        assert transfer.state is TransferState.RUNNING
        local.close()
        assert transfer.state is TransferState.RUNNING
        assert any(memory is scene.targets[0] for memory in kept)


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
    until(lambda: transfer.is_terminal, every_s=0.001, what=transfer)
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
@pytest.mark.parametrize("device_memory", [False, True])
def test_the_class_that_keys_give_is_known_before_it_is_opened(device_memory: bool) -> None:
    extra = {"device_memory": device_memory}
    with NixlTransport.open(TransportOptions(extra=extra)) as transport:
        assert type(transport) is NixlTransport.with_keys(extra)
        assert isinstance(transport, DeviceTransport) == device_memory


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
        assert peer.agent.registered == ({1} if region else {0, 1})
    assert bytes(staging) == bytes(pattern(staging.nbytes, 1))


@pytest.mark.slow
@needs_nixl
def test_agent_and_connection_are_made_before_the_first_read(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = pair
    served: list[nixl_agents.Agent] = []
    serve = nixl_agents.Agent.serve

    def note(agent: nixl_agents.Agent) -> None:
        served.append(agent)
        serve(agent)

    monkeypatch.setattr(nixl_agents.Agent, "serve", note)
    peer = target.connect(source.endpoint())
    until(lambda: not peer.is_busy, what="the connection")
    made = peer.agent.agent
    assert made is not None
    assert served.count(made) > 10  # UCX makes connections while it is asked for news
    calls = len(served)
    assert wait(target, target.read(peer, *one_tile())).state is TransferState.DONE
    assert peer.agent.agent is made
    time.sleep(0.05)
    assert served[calls:].count(made) == 0  # an idle connection costs nothing
    served.clear()  # who holds an agent keeps its memory in use


@pytest.mark.slow
@needs_nixl
def test_connections_of_one_agent_whose_metadata_differ_do_not_contend_for_it() -> None:
    extra = {"max_agents": 1}
    with (
        NixlTransport.open(TransportOptions()) as source,
        NixlTransport.open(TransportOptions(extra=extra)) as target,
    ):
        source.allocate(1 << 16)
        target.allocate(1 << 16)
        older = target.connect(source.endpoint())
        source.allocate(1 << 16)
        younger = target.connect(source.endpoint())
        until(lambda: not (older.is_busy or younger.is_busy), what="both connections")
        for peer in (older, younger, older):
            assert wait(target, target.read(peer, *one_tile())).state is TransferState.DONE


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
        # One per token and head, as the layouts differ, but for neighbours of different tiles.
        assert transfer.segments == len(merge(expand(case.tiles, case.runs))) < SMALL // 512


@pytest.mark.slow
@pytest.mark.timed("The CPU time of all threads of the process counts.")
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
@pytest.mark.parametrize("theirs", [True, False])
@pytest.mark.parametrize("only_rdma", [True, False])
def test_where_only_rdma_is_allowed_a_peer_without_it_is_out_of_reach(
    only_rdma: bool, theirs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nixl, "has_rdma", lambda: True)
    with NixlTransport.open(TransportOptions(extra={"only_rdma": only_rdma})) as transport:
        assert decode_endpoint(transport.endpoint()).rdma
        endpoint = with_changes(transport.endpoint(), rdma=theirs)
        if theirs or not only_rdma:
            transport.connect(endpoint).close()
            return
        with pytest.raises(PeerLostError, match=r"only_rdma: kvferry-.* has no active port"):
            transport.connect(endpoint)


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


@pytest.mark.parametrize(
    ("state", "device", "found"),
    [
        ("4: ACTIVE", "uverbs0", True),
        ("1: DOWN", "uverbs0", False),
        ("4: ACTIVE", "rdma_cm", False),
    ],
)
def test_rdma_needs_an_active_port_and_its_device(
    state: str, device: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = tmp_path / "sys" / "mlx5_0" / "ports" / "1" / "state"
    port.parent.mkdir(parents=True)
    port.write_text(f"{state}\n")
    (tmp_path / device).touch()
    monkeypatch.setattr(nixl_agents, "_RDMA_PORTS", tmp_path / "sys")
    monkeypatch.setattr(nixl_agents, "_RDMA_DEVICES", tmp_path)
    assert has_rdma() is found


def test_where_only_rdma_is_allowed_and_there_is_none_the_machine_lacks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nixl, "has_rdma", lambda: False)
    with pytest.raises(HostError, match="only_rdma: no port"):
        NixlTransport.open(TransportOptions(extra={"only_rdma": True}))


def test_settings_of_ucx_that_the_user_gives_come_last() -> None:
    def settings(device_memory: bool, **params: str) -> str:
        options = AgentOptions(backend_params={"UCX": params}, device_memory=device_memory)
        return options.params("UCX")["engine_config"]

    assert settings(False) == "KEEPALIVE_INTERVAL=1s"
    assert settings(True) == "KEEPALIVE_INTERVAL=1s,CUDA_IPC_ENABLE_GET_ZCOPY=on"
    assert settings(True, engine_config="CUDA_IPC_ENABLE_GET_ZCOPY=off").endswith(
        "=on,CUDA_IPC_ENABLE_GET_ZCOPY=off"
    )


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
        ({"max_agents": 0}, "max_agents: 0 is less than 1"),
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
    garbled = AgentEndpoint(
        agent="agent", metadata=b"other", digest=hashlib.sha256(b"meta").digest(), regions=()
    )
    with pytest.raises(DecodeError, match="garbled"):
        decode_endpoint(msgspec.msgpack.encode(garbled))
    with pytest.raises(DecodeError, match="bytes of metadata"):
        decode_endpoint(encode_endpoint("agent", b"", ()))
