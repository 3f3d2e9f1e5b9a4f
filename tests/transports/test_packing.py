"""What a device packs for a wire: right bytes, a bounded ring, and room for whoever takes them."""

import contextlib
import random
import threading
import time

import numpy as np
import pytest

from kvferry.errors import PeerLostError, TransferError
from kvferry.layouts.arrays import bytes_at
from kvferry.layouts.copier import copy_tiles
from kvferry.layouts.tiles import num_bytes
from kvferry.testing.host_device import HostCopyStream, HostPackedTcpTransport
from kvferry.testing.transport_cases import large_case, random_case
from kvferry.testing.transport_peer import pattern
from kvferry.testing.waiting import until
from kvferry.transports import TransferState, TransportOptions, tcp_server
from kvferry.transports.packing import PackedPiece, Packer
from kvferry.transports.tcp_link import TcpLink
from kvferry.transports.tcp_tls import TlsLink, reading_context
from kvferry.transports.wire_chunks import plan_chunks
from kvferry.transports.wire_messages import VERSION_MAX, VERSION_MIN, Hello
from tests.transports.test_tcp_server import (
    BLOCKS,
    REGION_BYTES,
    RawReader,
    flat_runs,
    flat_tiles,
    readers_of,
    request,
)

STOPPED = 64
RING_BYTES = 16 << 20
"""Of the transport of :mod:`kvferry.testing.host_device`."""


@pytest.fixture
def server():
    """Serves what a device packs of one region of pattern 1."""
    options = TransportOptions(threads=1)
    with contextlib.closing(HostPackedTcpTransport.open(options)) as opened:
        _, memory = opened.allocate(REGION_BYTES)
        memory[:] = pattern(REGION_BYTES, 1)
        yield opened


@pytest.fixture
def stream():
    with contextlib.closing(HostCopyStream()) as opened:
        yield opened


def whole(chunks):
    """A read of the whole region in each of so many chunks."""
    return request(1, flat_tiles(), flat_runs(BLOCKS), [(0, 1, 0, BLOCKS)] * chunks)


# ---- pieces --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_the_pieces_of_a_chunk_are_its_bytes_in_order(stream, seed):
    check_pieces(stream, seed)


def check_pieces(stream, seed=1):
    rng = random.Random(seed)
    most = rng.randint(1, 4000)
    case = random_case(seed)
    sources = [pattern(nbytes, seed) for nbytes in case.source_region_bytes]
    addresses = np.array([source.ctypes.data for source in sources])
    plan = plan_chunks(case.tiles, case.runs, rng.randint(1, 20000))
    with Packer([stream, stream], 1 << 20) as packer:
        for index, nbytes in enumerate(plan.nbytes.tolist()):
            dense = np.zeros(nbytes, dtype=np.uint8)
            copy_tiles(addresses, [dense.ctypes.data], *plan.pack(index))
            came, first = np.zeros(nbytes, dtype=np.uint8), 0
            for tables in packer.pieces(*plan.pack(index), most):
                ready = threading.Event()
                piece = PackedPiece(*tables, ready.set)
                stream.pause()
                packer.pack(piece, addresses, "reader")
                assert not ready.wait(0.001)
                stream.resume()
                assert ready.wait(60)
                assert piece.first_byte == first
                came[first : first + piece.nbytes] = bytes_at(piece.address, piece.nbytes)
                first += piece.nbytes
                packer.release(piece)
            assert first == nbytes == num_bytes(*plan.pack(index))
            assert np.array_equal(came, dense)
        assert packer.used_bytes == 0


def test_a_run_that_no_ring_holds_is_refused_by_the_key_that_helps(server):
    tiles = flat_tiles(source_token_stride=0, source_block_stride=0)
    with contextlib.closing(RawReader(server)) as reader:
        refused = reader.refusal(request(1, tiles, flat_runs(1, tokens=1 << 17)))
    assert refused.error == "TransferError"
    assert "packing_bytes: one block of one tensor is 33554432 bytes" in refused.reason


# ---- readers that stop ---------------------------------------------------------------------------


def take(reader, count):
    """Receives chunks, each of which is the whole region."""
    for _ in range(count):
        reader.receive()
        assert reader.data == bytes(pattern(REGION_BYTES, 1))


@contextlib.contextmanager
def stopped_readers(server, count):
    """So many readers that take nothing of what they have asked for."""
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(contextlib.closing(RawReader(server))) for _ in range(count)]
        for reader in readers:
            reader.send(whole(64))
        (serving,) = server.server.threads
        until(lambda: sum(each.full is not None for each in serving.readers) == count)
        yield readers


def test_readers_that_stop_leave_the_ring_to_one_that_does_not(server):
    with stopped_readers(server, STOPPED) as stopped:
        until(lambda: server.packer.used_bytes == 0)
        with contextlib.closing(RawReader(server)) as other:
            other.send(whole(200))
            take(other, 200)
        for reader in stopped[:3]:  # what was taken from them comes again, from where it was
            take(reader, 64)


def test_a_reader_that_stops_at_any_byte_goes_on_there(server, monkeypatch):
    check_going_on(server, monkeypatch, TcpLink, RawReader(server))


class EncryptedReader(RawReader):
    """A reader over TLS."""

    def __init__(self, server):
        super().__init__(server, hello=False)
        self.tcp = reading_context(self.endpoint.certificate).wrap_socket(self.tcp)
        self.send(Hello(self.endpoint.token, VERSION_MIN, VERSION_MAX))


def test_over_tls_too_it_goes_on_at_any_byte(monkeypatch):
    """The library wants a row again of which it has sent a part, although the piece is gone."""
    pytest.importorskip("cryptography")
    options = TransportOptions(threads=1, extra={"encrypt_data": True})
    with contextlib.closing(HostPackedTcpTransport.open(options)) as server:
        _, memory = server.allocate(REGION_BYTES)
        memory[:] = pattern(REGION_BYTES, 1)
        check_going_on(server, monkeypatch, TlsLink, EncryptedReader(server))


def check_going_on(server, monkeypatch, link_class, reader):
    """It takes some bytes, waits until its pieces are taken from it, and takes some more."""
    monkeypatch.setattr(tcp_server, "SLOW_BYTES", 60_000)
    draw = random.Random(1)
    taken = []
    take_back = link_class.take_back
    monkeypatch.setattr(
        link_class, "take_back", lambda link: taken.append(take_back(link)) or taken[-1]
    )
    chunks, header = 16, 24
    with contextlib.closing(reader):
        reader.send(whole(chunks))
        (served,) = readers_of(server)
        came = bytearray()
        while left := chunks * (REGION_BYTES + header) - len(came):
            came += reader.exactly(min(draw.randint(1, 3 << 20), left))
            until(lambda: not served.reads or (served.full and server.packer.used_bytes == 0))
    for index in range(chunks):
        first = index * (REGION_BYTES + header)
        numbers = np.frombuffer(came, "<i8", 3, first).tolist()
        assert numbers == [1, index, REGION_BYTES]
        data = np.frombuffer(came, np.uint8, REGION_BYTES, first + header)
        # In CI, pytest would show the whole difference of two strings of bytes, for minutes.
        assert np.array_equal(data, pattern(REGION_BYTES, 1))
    assert len([sent for sent in taken if sent]) >= 3


def test_a_reader_that_goes_gives_its_pieces_back(server):
    with stopped_readers(server, 1), contextlib.closing(RawReader(server)) as other:
        other.send(whole(64))
    until(lambda: server.packer.used_bytes == 0)


def test_slow_readers_leave_the_ring_to_a_fast_one(server):
    """They take some bytes twenty times a second, and never stop."""
    ended = threading.Event()

    def sip(reader):
        while not ended.wait(0.05):
            reader.exactly(32 << 10)

    with stopped_readers(server, 32) as slow:
        threads = [threading.Thread(target=sip, args=(reader,)) for reader in slow]
        for thread in threads:
            thread.start()
        try:
            with contextlib.closing(RawReader(server)) as other:
                other.send(whole(200))
                take(other, 200)
            until(lambda: server.packer.used_bytes < RING_BYTES // 2)
        finally:
            ended.set()
            for thread in threads:
                thread.join(60)


def test_a_ring_smaller_than_a_chunk_serves_it_in_smaller_pieces(stream):
    memory = pattern(REGION_BYTES, 1)
    addresses = np.array([memory.ctypes.data])
    plan = plan_chunks(flat_tiles(), flat_runs(BLOCKS), REGION_BYTES)
    with Packer([stream], 64 << 10) as packer:
        came = bytearray()
        for tables in packer.pieces(*plan.pack(0)):
            ready = threading.Event()
            piece = PackedPiece(*tables, ready.set)
            packer.pack(piece, addresses, "reader")
            assert ready.wait(60)
            assert piece.nbytes <= 16 << 10
            came += bytes(bytes_at(piece.address, piece.nbytes))
            packer.release(piece)
        assert came == bytes(memory)


def test_a_piece_that_the_ring_never_holds_is_answered(stream):
    memory = pattern(REGION_BYTES, 1)
    plan = plan_chunks(flat_tiles(), flat_runs(BLOCKS), REGION_BYTES)
    with Packer([stream], 64 << 10) as packer:
        ready = threading.Event()
        piece = PackedPiece(*plan.pack(0), ready.set)
        packer.pack(piece, np.array([memory.ctypes.data]), "reader")
        assert ready.wait(60)
        assert "packing_bytes" in str(piece.error)
        packer.release(piece)
        assert packer.used_bytes == 0


def test_a_reader_that_waits_for_our_device_is_not_silent(server, monkeypatch):
    with contextlib.closing(RawReader(server)) as reader:
        readers_of(server)
        server.device.pause()
        reader.send(whole(1))
        (served,) = readers_of(server)
        until(lambda: served.parts)
        (serving,) = server.server.threads
        with monkeypatch.context() as patch:
            patch.setattr("kvferry.transports.tcp_server.SILENCE_S", 0.2)
            for _ in range(5):
                serving.mailbox.post(lambda: setattr(serving, "_next_look", 0.0))
                time.sleep(0.1)
        server.device.resume()
        take(reader, 1)


# ---- devices -------------------------------------------------------------------------------------


def test_what_the_device_still_writes_is_nobody_elses(stream):
    check_released(stream)


def check_released(stream):
    """A piece is given back while it is packed: its slot is free when the device is done."""
    memory = pattern(1 << 20, 1)
    plan = plan_chunks(flat_tiles(), flat_runs(BLOCKS), 1 << 20)
    with Packer([stream], 1 << 20) as packer:
        stream.pause()
        ready = threading.Event()
        piece = PackedPiece(*plan.pack(0), ready.set)
        packer.pack(piece, np.array([memory.ctypes.data]), "one")
        packer.release(piece)
        held = packer.used_bytes
        stream.resume()
        assert held == 1 << 20
        assert ready.wait(60)
        until(lambda: packer.used_bytes == 0)


def test_the_ring_is_given_up_after_the_last_piece_was_packed(stream):
    memory = pattern(1 << 20, 1)
    plan = plan_chunks(flat_tiles(), flat_runs(BLOCKS), 1 << 20)
    packer = Packer([stream], 1 << 20)
    (ring,) = stream.pinned
    stream.pause()
    piece = PackedPiece(*plan.pack(0), lambda: None)
    packer.pack(piece, np.array([memory.ctypes.data]), "one")
    closing = threading.Thread(target=packer.close)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    assert stream.pinned == [ring]
    stream.resume()
    closing.join(60)
    assert not stream.pinned
    assert piece.address


def test_a_device_that_fails_fails_the_reads_of_it_and_nothing_hangs(server):
    options = TransportOptions(threads=1)
    with contextlib.closing(HostPackedTcpTransport.open(options)) as local:
        case = large_case(REGION_BYTES)
        for nbytes in case.source_region_bytes:
            server.allocate(nbytes)
        for nbytes in case.target_region_bytes:
            local.register(np.zeros(nbytes, dtype=np.uint8), serve=False)
        tiles = case.tiles.copy()
        tiles["source_region"] += 1
        peer = local.connect(server.endpoint())
        done = local.read(peer, tiles, case.runs)
        until(lambda: done.is_terminal)
        assert done.state is TransferState.DONE
        server.device.fail()
        failed = local.read(peer, tiles, case.runs)
        until(lambda: failed.is_terminal)
        assert isinstance(failed.error, PeerLostError)


def test_memory_that_cannot_be_pinned_is_refused_at_once(stream, monkeypatch):
    def refuse(memory):
        raise TransferError("no")

    monkeypatch.setattr(stream, "pin", refuse)
    with pytest.raises(TransferError, match="no"):
        Packer([stream], 1 << 20)


# ---- defects -------------------------------------------------------------------------------------


def looks_before_it_is_packed(monkeypatch):
    """Takes a piece for packed as soon as the device was asked for it."""
    monkeypatch.setattr("kvferry.testing.host_device.HostCopyEvent.wait", lambda self: None)


def frees_what_is_written(monkeypatch):
    """Gives a slot to somebody else while the device still writes to it."""
    monkeypatch.setattr(Packer, "_release", lambda self, piece: self._give_back(piece))


def begins_the_piece_anew(monkeypatch):
    """Sends a piece from its first byte after it was taken back."""
    take_back = TcpLink.take_back
    monkeypatch.setattr(TcpLink, "take_back", lambda link: None if take_back(link) is None else 0)


def forgets_where_the_piece_lies(monkeypatch):
    """Packs every piece as if its chunk began with it."""
    monkeypatch.setattr(PackedPiece, "first_byte", 0)


@pytest.mark.parametrize("defect", [looks_before_it_is_packed, forgets_where_the_piece_lies])
def test_defects_of_pieces_are_found(stream, monkeypatch, defect):
    defect(monkeypatch)
    with pytest.raises(AssertionError):
        check_pieces(stream)


def test_a_slot_that_is_freed_too_soon_is_found(stream, monkeypatch):
    frees_what_is_written(monkeypatch)
    with pytest.raises(AssertionError):
        check_released(stream)


def test_a_piece_that_begins_anew_is_found(server, monkeypatch):
    begins_the_piece_anew(monkeypatch)
    with pytest.raises(AssertionError):
        check_going_on(server, monkeypatch, TcpLink, RawReader(server))
