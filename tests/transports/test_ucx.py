"""The ucx transport: the conformance class, lying peers, and UCX's errors."""

import importlib.util
import sys
from types import MappingProxyType

import msgspec
import pytest

from kvferry.errors import (
    ConfigError,
    DecodeError,
    KVFerryError,
    PeerLostError,
    PortInUseError,
    TransferError,
)
from kvferry.testing.host_device import HostPackedUcxTransport
from kvferry.testing.transport_cases import large_case
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.testing.transport_scene import SMALL
from kvferry.testing.waiting import until
from kvferry.transports.base import Transfer, TransferState, TransportOptions
from kvferry.transports.ucx import UcxTransport
from kvferry.transports.ucx_link import UcxLink, ucx_errors
from kvferry.transports.wire_messages import Hello, decode_endpoint, encode

needs_ucxx = pytest.mark.skipif(
    importlib.util.find_spec("ucxx") is None,
    reason="the package ucxx is not installed (`make test-rest` installs it)",
)
needed = [pytest.mark.slow, needs_ucxx]


class TestUcxTransport(TransportConformance):
    pytestmark = needed
    transport = UcxTransport


class TestUcxTransportOverTcp(TransportConformance):
    pytestmark = needed
    transport = UcxTransport
    extra = MappingProxyType({"config": {"TLS": "tcp"}, "chunk_bytes": 65536})


class TestUcxTransportThatPacks(TransportConformance):
    pytestmark = needed
    transport = HostPackedUcxTransport


@pytest.fixture
def pair():
    """Two transports of this process, each with memory for a small case."""
    case = large_case(SMALL)
    with (
        UcxTransport.open(TransportOptions()) as source,
        UcxTransport.open(TransportOptions()) as target,
    ):
        source.allocate(case.source_region_bytes[0])
        target.allocate(case.target_region_bytes[0])
        yield source, target, case


def wait(local: UcxTransport, transfer: Transfer) -> Transfer:
    until(lambda: transfer.is_terminal, every_s=0.001, what=transfer)
    assert local.poll() == [transfer]
    return transfer


@pytest.mark.slow
@needs_ucxx
def test_a_reader_without_the_token_is_refused(pair) -> None:
    source, target, case = pair
    honest = target.connect(source.endpoint())
    wait(target, target.read(honest, case.tiles, case.runs))
    forged = msgspec.structs.replace(decode_endpoint(source.endpoint(), "ucx"), token=b"x" * 16)
    transfer = target.read(target.connect(encode(forged)), case.tiles, case.runs)
    error = wait(target, transfer).error
    assert isinstance(error, PeerLostError)
    assert "of another rank" in str(error)
    assert wait(target, target.read(honest, case.tiles, case.runs)).state is TransferState.DONE


@pytest.mark.slow
@needs_ucxx
def test_connections_begun_after_refused_ones_are_whole(pair) -> None:
    # They often lie at the same place in memory, by which ucxx knows a connection.
    source, target, case = pair
    forged = msgspec.structs.replace(decode_endpoint(source.endpoint(), "ucx"), token=b"x" * 16)
    for _ in range(10):
        refused = target.read(target.connect(encode(forged)), case.tiles, case.runs)
        assert wait(target, refused).state is TransferState.FAILED
        with target.connect(source.endpoint()) as honest:
            transfer = wait(target, target.read(honest, case.tiles, case.runs))
            assert transfer.state is TransferState.DONE, transfer.error


@pytest.mark.slow
@needs_ucxx
def test_a_region_that_the_endpoint_makes_larger_is_refused_by_the_source(pair) -> None:
    source, target, case = pair
    endpoint = decode_endpoint(source.endpoint(), "ucx")
    larger = msgspec.structs.replace(endpoint, regions=(endpoint.regions[0] * 2,))
    peer = target.connect(encode(larger))
    tiles = case.tiles.copy()
    tiles["source_offset"] += endpoint.regions[0]
    error = wait(target, target.read(peer, tiles, case.runs)).error
    assert isinstance(error, KVFerryError)
    assert "source region" in str(error)
    assert wait(target, target.read(peer, case.tiles, case.runs)).state is TransferState.DONE


@pytest.mark.slow
@needs_ucxx
def test_a_chunk_that_was_cut_short_is_never_unpacked(
    pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target, case = pair
    send = UcxLink.send_buffer
    monkeypatch.setattr(
        UcxLink, "send_buffer", lambda link, tag, chunk: send(link, tag, chunk[:-100].copy())
    )
    transfer = target.read(target.connect(source.endpoint()), case.tiles, case.runs)
    assert isinstance(wait(target, transfer).error, DecodeError)
    assert transfer.bytes_done == 0


@pytest.mark.slow
@needs_ucxx
@pytest.mark.parametrize(
    "frame", [b"garbage", encode(Hello(b"", 99, 99)), b"x" * ((32 << 20) + 1)], ids=len
)
def test_a_lying_reader_ends_its_own_connection_only(pair, frame: bytes) -> None:
    source, target, case = pair
    good, bad = target.connect(source.endpoint()), target.connect(source.endpoint())
    for peer in (good, bad):
        wait(target, target.read(peer, case.tiles, case.runs))
    target.reader.post(lambda: bad.link.send(frame))
    until(lambda: source.server.refused, what="the refusal")
    assert wait(target, target.read(good, case.tiles, case.runs)).state is TransferState.DONE


@pytest.mark.slow
@needs_ucxx
def test_a_port_that_is_taken_is_named(pair) -> None:
    port = decode_endpoint(pair[0].endpoint(), "ucx").port
    with pytest.raises(PortInUseError, match=str(port)):
        UcxTransport.open(TransportOptions(extra={"port": port}))


@pytest.mark.slow
@needs_ucxx
def test_every_error_of_ucxx_is_mapped() -> None:
    import ucxx.exceptions

    kinds = [
        kind
        for kind in vars(ucxx.exceptions).values()
        if isinstance(kind, type) and issubclass(kind, Exception)
    ]
    assert len(kinds) > 20
    for kind in kinds:
        with pytest.raises(KVFerryError, match="pigeons: UCX says coo"), ucx_errors("pigeons"):
            raise kind("coo")


@pytest.mark.slow
@needs_ucxx
def test_a_configuration_that_ucx_refuses_is_an_error() -> None:
    with pytest.raises(ConfigError, match="ucx"):
        UcxTransport.open(TransportOptions(extra={"config": {"TLS": "pigeon"}}))


# What follows needs no UCX.


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("UCXXConnectionResetError", PeerLostError),
        ("UCXXEndpointTimeoutError", PeerLostError),
        ("UCXXCanceledError", PeerLostError),
        ("UCXXBusyError", PortInUseError),
        ("UCXXMessageTruncatedError", TransferError),
        ("RuntimeError", TransferError),
    ],
)
def test_errors_are_known_by_their_names(name: str, expected: type[KVFerryError]) -> None:
    kind = type(name, (Exception,), {})
    with pytest.raises(KVFerryError, match="doing: UCX says") as raised, ucx_errors("doing"):
        raise kind
    assert type(raised.value) is expected


def test_without_the_package_the_error_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "ucxx", None)
    with pytest.raises(ConfigError, match=r"install kvferry\[ucx\]"):
        UcxTransport.open(TransportOptions())


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"port": 1 << 16}, "port: 65536 is not a TCP port"),
        ({"chunk_bytes": 1}, "chunk_bytes: 1 is not in"),
        ({"window_bytes": 0}, "window_bytes: 0 is less than 1"),
        ({"max_readers": 0}, "max_readers: 0 is less than 1"),
    ],
)
def test_impossible_keys_are_refused(extra: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        UcxTransport.open(TransportOptions(extra=extra))


def test_a_host_that_peers_cannot_be_told_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"host: 0\.0\.0\.0 is every address"):
        UcxTransport.open(TransportOptions(host="0.0.0.0"))
