"""The tcp transport with ``encrypt_data``: nobody on the way reads or answers."""

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path
from types import MappingProxyType

import msgspec
import numpy as np
import pytest

from kvferry.errors import ConfigError, DecodeError, IncompatibleError, PeerLostError
from kvferry.layouts.tiles import TILE_DTYPE, blank_runs
from kvferry.testing.host_device import HostPackedTcpTransport
from kvferry.testing.transport_conformance import TransportConformance
from kvferry.testing.transport_peer import pattern
from kvferry.testing.waiting import until
from kvferry.transports import TransferState, TransportOptions, tcp_tls
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.tcp_reader import TcpReader
from kvferry.transports.tcp_tls import TlsLink, reading_context
from kvferry.transports.wire_messages import (
    CHUNK_DTYPE,
    REPLIES,
    SOURCE_RUN_DTYPE,
    SOURCE_TILE_DTYPE,
    Hello,
    Read,
    decode_endpoint,
    encode,
    encode_table,
)
from tests.transports.framed import Framed, readable

ENCRYPTED = MappingProxyType({"encrypt_data": True})
BLOCKS, BLOCK_BYTES = 24, 1 << 15
NBYTES = BLOCKS * BLOCK_BYTES
ROOT = Path(__file__).parents[2]


def needs_cryptography():
    return pytest.importorskip("cryptography")


@pytest.mark.slow
class TestTcpTransportEncrypted(TransportConformance):
    transport = TcpTransport
    extra = ENCRYPTED

    @pytest.fixture(autouse=True)
    def _needs(self):
        needs_cryptography()


@pytest.mark.slow
class TestTcpTransportThatPacksEncrypted(TestTcpTransportEncrypted):
    transport = HostPackedTcpTransport


class Relay:
    """Between a reader and its server; keeps every byte that goes by, of both directions."""

    def __init__(self, port):
        self.seen = bytearray()
        self._port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._ends = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                reader, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._port))
                self._ends += [reader, server]
                for ends in ((reader, server), (server, reader)):
                    self._threads.append(threading.Thread(target=self._carry, args=ends))
                    self._threads[-1].start()

    def _carry(self, source, target):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.seen += data
                target.sendall(data)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


def tables(heads_first):
    """All blocks of 16 tokens and 4 heads of 512 bytes; the target may have heads first."""
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    for side in ("source", "target"):
        tiles[f"{side}_block_stride"], tiles[f"{side}_element_stride"] = BLOCK_BYTES, 1
        tiles[f"{side}_token_stride"], tiles[f"{side}_head_stride"] = 2048, 512
    if heads_first:
        tiles["target_token_stride"], tiles["target_head_stride"] = 512, 8192
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 4, 512, 1
    runs = blank_runs(BLOCKS)
    runs["source_block"] = np.arange(BLOCKS)
    runs["target_block"] = np.arange(BLOCKS)[::-1]
    runs["tokens"] = 16
    return tiles, runs


def expected(heads_first):
    blocks = pattern(NBYTES, 1).reshape(BLOCKS, 16, 4, 512)[::-1]
    return (blocks.transpose(0, 2, 1, 3) if heads_first else blocks).ravel()


@contextlib.contextmanager
def opened(**extra):
    with contextlib.closing(TcpTransport.open(TransportOptions(extra=extra))) as transport:
        _, memory = transport.allocate(NBYTES)
        yield transport, memory


@pytest.fixture
def source():
    needs_cryptography()
    with opened(**ENCRYPTED) as (transport, memory):
        memory[:] = pattern(NBYTES, 1)
        yield transport


def read(transport, endpoint, heads_first=False):
    transfer = transport.read(transport.connect(endpoint), *tables(heads_first))
    until(lambda: transfer.is_terminal)
    return transfer


@pytest.mark.parametrize("heads_first", [False, True], ids=["equal", "heads first"])
@pytest.mark.parametrize("connections", [1, 3])
def test_nothing_of_the_cells_nor_the_token_is_on_the_wire(source, heads_first, connections):
    endpoint = decode_endpoint(source.endpoint())
    with (
        contextlib.closing(Relay(endpoint.port)) as relay,
        opened(**ENCRYPTED, chunk_bytes=1 << 16, connections=connections) as (target, memory),
    ):
        through = encode(msgspec.structs.replace(endpoint, port=relay.port))
        transfer = read(target, through, heads_first)
        assert transfer.state is TransferState.DONE, transfer.error
        assert np.array_equal(memory, expected(heads_first))
        seen = bytes(relay.seen)
        assert len(seen) > NBYTES
        assert endpoint.token not in seen
        cells = pattern(NBYTES, 1)
        assert not any(
            cells[first : first + 16].tobytes() in seen for first in range(0, NBYTES, 4096)
        )


def test_the_relay_would_see_cells_that_are_not_encrypted():
    with opened() as (source, held), opened() as (target, _):
        held[:] = pattern(NBYTES, 1)
        endpoint = decode_endpoint(source.endpoint())
        with contextlib.closing(Relay(endpoint.port)) as relay:
            through = encode(msgspec.structs.replace(endpoint, port=relay.port))
            assert read(target, through).state is TransferState.DONE
            assert endpoint.token in relay.seen
            assert pattern(NBYTES, 1)[:4096].tobytes() in relay.seen
            target.close()


@pytest.mark.parametrize("encrypted", [True, False], ids=["source", "reader"])
def test_two_sides_of_which_one_encrypts_are_refused_before_anything_is_sent(encrypted):
    needs_cryptography()
    with (
        opened(encrypt_data=encrypted) as (source, _),
        opened(encrypt_data=not encrypted) as (target, _),
        pytest.raises(
            IncompatibleError,
            match=f"encrypt_data of tcp: it has {encrypted}, we have {not encrypted}; give".lower(),
        ),
    ):
        target.connect(source.endpoint())


def test_whoever_answers_without_the_key_of_the_certificate_is_not_read_from(source):
    with opened(**ENCRYPTED) as (other, _), opened(**ENCRYPTED) as (target, memory):
        endpoint = decode_endpoint(source.endpoint())
        port = decode_endpoint(other.endpoint()).port
        transfer = read(target, encode(msgspec.structs.replace(endpoint, port=port)))
        assert isinstance(transfer.error, PeerLostError)
        assert "certificate" in str(transfer.error).lower()
        assert not memory.any()
        garbage = msgspec.structs.replace(endpoint, certificate=b"x" * 300)
        with pytest.raises(DecodeError, match="certificate does not parse"):
            target.connect(encode(garbage))


def test_the_token_is_asked_for_inside_too(source):
    with opened(**ENCRYPTED) as (target, _):
        forged = msgspec.structs.replace(decode_endpoint(source.endpoint()), token=b"x" * 16)
        transfer = read(target, encode(forged))
        assert isinstance(transfer.error, PeerLostError)
        assert "of another rank" in str(transfer.error)


def test_a_reader_that_does_not_encrypt_gets_no_answer(source):
    endpoint = decode_endpoint(source.endpoint())
    tcp = socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)
    with contextlib.closing(Framed(tcp)) as plain:
        plain.send(Hello(endpoint.token, endpoint.version_min, endpoint.version_max))
        assert plain.is_ended()
    with opened(**ENCRYPTED) as (target, memory):
        assert read(target, source.endpoint()).state is TransferState.DONE
        assert np.array_equal(memory, expected(False))


def test_what_was_queued_before_the_handshake_leaves_when_it_is_over(source, monkeypatch):
    """Although its end was taken in between a look at the flags and the next one."""
    shake, ready, receive = TlsLink._shake, TcpReader._ready, TcpReader._receive
    polled = set()

    def shake_once_polled(self):
        serves = self._context.protocol is ssl.PROTOCOL_TLS_SERVER
        return shake(self) if serves or self in polled else None

    def ready_with_two(self, line):
        if line.link in polled or line.link.queued == 2:  # Hello, and the read behind it
            polled.add(line.link)
            ready(self, line)

    def receive_late(self, line):
        if not line.link._is_shaken:
            readable([line.link.descriptor], 60)
        receive(self, line)

    monkeypatch.setattr(TlsLink, "_shake", shake_once_polled)
    monkeypatch.setattr(TcpReader, "_ready", ready_with_two)
    monkeypatch.setattr(TcpReader, "_receive", receive_late)
    options = TransportOptions(stall_timeout_s=30.0, extra=ENCRYPTED)
    with contextlib.closing(TcpTransport.open(options)) as target:
        target.allocate(NBYTES)
        assert read(target, source.endpoint()).error is None


def test_what_encrypts_compiles_nothing_while_it_moves():
    needs_cryptography()
    code = """
from kvferry.transports import tcp_kernels as kernels
from tests.transports.test_tcp_tls import ENCRYPTED, opened, read
each = [kernels.begin, kernels.fill, kernels.took, kernels.place]
with opened(**ENCRYPTED) as (source, _), opened(**ENCRYPTED) as (target, _):
    warmed = [len(kernel.signatures) for kernel in each]
    for heads_first in (False, True):
        assert read(target, source.endpoint(), heads_first).error is None
    assert [len(kernel.signatures) for kernel in each] == warmed
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_of_a_long_piece_counts_what_has_left_although_the_rest_has_not(monkeypatch):
    """Or a reader that is slow would look like one that takes nothing."""
    needs_cryptography()
    monkeypatch.setattr(tcp_tls, "_MOST_BYTES", 1 << 14)  # sockets may have room for little
    nbytes = 32 << 20  # more than two sockets hold
    tiles, runs = tables(False)
    for dim, stride in (("token", nbytes), ("head", nbytes), ("element", 1)):
        tiles[f"source_{dim}_stride"] = stride
    tiles["heads"], tiles["elements"] = 1, nbytes
    runs = runs[:1]
    runs["source_block"], runs["tokens"] = 0, 1
    with contextlib.closing(TcpTransport.open(TransportOptions(extra=ENCRYPTED))) as server:
        server.allocate(nbytes)
        endpoint = decode_endpoint(server.endpoint())
        tcp = socket.create_connection(("127.0.0.1", endpoint.port), timeout=60)
        with contextlib.closing(
            Framed(reading_context(endpoint.certificate).wrap_socket(tcp))
        ) as slow:
            slow.send(Hello(endpoint.token, endpoint.version_min, endpoint.version_max))
            slow.send(
                Read(
                    1,
                    encode_table(tiles, SOURCE_TILE_DTYPE),
                    encode_table(runs, SOURCE_RUN_DTYPE),
                    np.array([(0, 1, 0, 1)], CHUNK_DTYPE).tobytes(),
                )
            )
            (serving,) = server.server.threads
            until(lambda: any(0 < each.link.left < nbytes for each in serving.readers))
            assert slow.receive(REPLIES) == (1, 0)
            assert len(slow.data) == nbytes


def test_nothing_older_than_tls_1_3_is_spoken(source):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    port = decode_endpoint(source.endpoint()).port
    with (
        socket.create_connection(("127.0.0.1", port), timeout=60) as tcp,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(tcp).close()


def test_without_the_package_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ConfigError, match=r"install kvferry\[tls\]"):
        TcpTransport.open(TransportOptions(extra=dict(ENCRYPTED)))
