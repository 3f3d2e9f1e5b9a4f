"""The tcp transport's reading side against servers that lie, vanish, or send late."""

import contextlib
import errno
import math
import socket
import subprocess
import sys
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from kvferry.errors import (
    BoundsError,
    DecodeError,
    HostError,
    PeerLostError,
    PortInUseError,
    ProtocolError,
    StalledError,
    TransferError,
)
from kvferry.layouts.staging import stage
from kvferry.layouts.tiles import TILE_DTYPE, blank_runs
from kvferry.testing.hosts import Network
from kvferry.testing.transport_peer import pattern
from kvferry.testing.waiting import WAIT_S, until
from kvferry.transports import (
    TransferState,
    TransportOptions,
    base,
    tcp_reader,
    wire_chunks,
    wire_reader,
)
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.wire_chunks import plan_chunks
from kvferry.transports.wire_messages import (
    CHUNK_DTYPE,
    HEADER,
    MAX_READS,
    MESSAGE,
    TCP_REQUESTS,
    Cancel,
    Endpoint,
    Hello,
    Read,
    Refused,
    decode_endpoint,
    encode,
)
from kvferry.zeromq import error_of, tcp_address, zmq_errors
from tests.clock import Clock
from tests.transports.framed import Framed, readable

NBYTES = 1 << 16
CHUNK = 1 << 13


STALL_S = 120.0
"""Seconds without a byte after which a read is stalled, by the clock of the tests."""


class FakeServer:
    """A serving rank that says what a test wants it to."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(60)
        self.port = self.listener.getsockname()[1]
        self.lines = []

    @property
    def endpoint(self):
        return encode(Endpoint(host="127.0.0.1", port=self.port, token=b"t", regions=(NBYTES,)))

    def accept(self):
        """Another connection, which has said Hello."""
        line = Framed(self.listener.accept()[0])
        assert isinstance(line.receive(TCP_REQUESTS), Hello)
        self.lines.append(line)
        return line

    def expect(self, kind):
        """The next message on the first connection, which is of that kind."""
        if not self.lines:
            self.accept()
        message = self.lines[0].receive(TCP_REQUESTS)
        assert isinstance(message, kind), message
        return message

    def send(self, message, data=b""):
        self.lines[0].send(message, data)

    def send_chunk(self, transfer, index, data=None):
        data = chunk_of(index) if data is None else data
        self.send((transfer, index, len(data)), data)

    def close(self):
        self.listener.close()
        for line in self.lines:
            line.close()


@pytest.fixture
def server():
    with contextlib.closing(FakeServer()) as opened:
        yield opened


@pytest.fixture
def clock(monkeypatch):
    """The clock of what reads; name the fixture before ``local``."""
    clock = Clock.install(monkeypatch)
    clock.move(monkeypatch, base, tcp_reader, wire_reader)
    return clock


@pytest.fixture
def local():
    """A reading transport."""
    options = TransportOptions(stall_timeout_s=STALL_S, extra={"chunk_bytes": CHUNK})
    with contextlib.closing(TcpTransport.open(options)) as opened:
        opened.allocate(NBYTES)
        yield opened


def tables():
    """The whole region, blocks of 4 KiB."""
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    for side in ("source", "target"):
        tiles[f"{side}_block_stride"], tiles[f"{side}_token_stride"] = 4096, 256
        tiles[f"{side}_element_stride"] = 1
    tiles["heads"], tiles["elements"], tiles["itemsize"] = 1, 256, 1
    runs = blank_runs(NBYTES // 4096)
    runs["source_block"] = runs["target_block"] = np.arange(len(runs))
    runs["tokens"] = 16
    return tiles, runs


def chunk_of(index):
    return pattern(NBYTES, 1)[index * CHUNK : (index + 1) * CHUNK].tobytes()


def chunk_array(index):
    return np.frombuffer(chunk_of(index), dtype=np.uint8)


def memory_of(local):
    return local._regions.arrays[0]


def ended(local, transfer):
    """Polls until the transfer is reported."""
    until(lambda: transfer in local.poll(), every_s=0.001, what=transfer)
    return transfer


@contextlib.contextmanager
def held(local):
    """The receiving thread does something else."""
    holding, release = threading.Event(), threading.Event()
    local.reader.post(lambda: (holding.set(), release.wait(60)))
    assert holding.wait(60)
    yield
    release.set()


@pytest.fixture
def peer(server, local):
    return local.connect(server.endpoint)


@pytest.fixture
def under_way(server, local, peer):
    """A read whose first chunk is in place: (the transfer, the server's request)."""
    transfer = local.read(peer, *tables())
    read = server.expect(Read)
    server.send_chunk(read.transfer, 0)
    until(lambda: transfer.bytes_done == CHUNK)
    return transfer, read


def test_the_chunks_of_a_read_may_come_in_any_order(server, local, under_way):
    transfer, read = under_way
    for index in (3, 1, 2, 7, 6, 5, 4):
        server.send_chunk(read.transfer, index)
    assert ended(local, transfer).state is TransferState.DONE
    assert np.array_equal(memory_of(local), pattern(NBYTES, 1))


def test_a_chunk_may_come_in_any_pieces(server, local, under_way):
    transfer, read = under_way
    stream = b"".join(
        HEADER.pack(read.transfer, index, CHUNK) + chunk_of(index) for index in range(1, 8)
    )
    for first in range(0, len(stream), 999):
        server.lines[0].tcp.sendall(stream[first : first + 999])
    assert ended(local, transfer).state is TransferState.DONE
    assert np.array_equal(memory_of(local), pattern(NBYTES, 1))


def test_what_came_while_the_reader_did_not_run_is_read_before_the_read_counts_as_stalled(
    clock, server, local, under_way
):
    transfer, read = under_way
    stands, goes_on = threading.Event(), threading.Event()

    def stand():
        with clock.stopped():
            stands.set()
            goes_on.wait(WAIT_S)

    local.reader.post(stand)
    assert stands.wait(WAIT_S)
    for index in range(1, 8):
        server.send_chunk(read.transfer, index)
    clock.advance(3 * STALL_S)
    goes_on.set()
    assert ended(local, transfer).state is TransferState.DONE


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (lambda read: ((read.transfer, 0, CHUNK), chunk_of(0)), DecodeError),
        (lambda read: ((read.transfer, 99, CHUNK), chunk_of(0)), DecodeError),
        (lambda read: ((read.transfer, -1, CHUNK), chunk_of(0)), DecodeError),
        (lambda read: ((read.transfer, 1, CHUNK + 1), chunk_of(0) + b"x"), DecodeError),
        (lambda read: ((read.transfer, 1, 0),), DecodeError),
        (lambda read: ((read.transfer, 1, -1),), DecodeError),
        (lambda read: ((read.transfer + 1, 1, CHUNK), chunk_of(0)), DecodeError),
        (lambda read: ((-2, 1, CHUNK), chunk_of(0)), DecodeError),
        (lambda read: ((MESSAGE, 0, 0),), ProtocolError),
        (lambda read: ((MESSAGE, 0, 1 << 40),), ProtocolError),
        (lambda read: ((MESSAGE, 1, 10), b"0123456789"), ProtocolError),
        (lambda read: (b"\xc1noise",), DecodeError),
        (lambda read: (Refused(None, "ProtocolError", "go away"),), PeerLostError),
        (lambda read: (Refused(read.transfer, "BoundsError", "too far"),), BoundsError),
        (lambda read: (Refused(read.transfer, "TransferError", "busy"),), TransferError),
        (lambda read: (Refused(read.transfer, "SystemExit", "?"),), TransferError),
        (lambda read: (Refused(read.transfer, "ConfigError", "?"),), TransferError),
    ],
)
def test_what_a_lying_server_sends_fails_its_read_by_name(server, local, under_way, answer, error):
    transfer, read = under_way
    server.send(*answer(read))
    assert ended(local, transfer).state is TransferState.FAILED
    assert type(transfer.error) is error
    time.sleep(0.05)
    expected = np.zeros(NBYTES, dtype=np.uint8)
    expected[:CHUNK] = pattern(NBYTES, 1)[:CHUNK]
    assert np.array_equal(memory_of(local), expected)


def test_random_replies_end_their_connection_only(local):
    rng = np.random.default_rng(4)
    for _ in range(30):
        with contextlib.closing(FakeServer()) as liar:
            transfer = local.read(local.connect(liar.endpoint), *tables())
            liar.expect(Read)
            liar.send(rng.bytes(int(rng.integers(1, 100))))  # behind a true header
            assert isinstance(ended(local, transfer).error, ProtocolError)
    with contextlib.closing(TcpTransport.open(TransportOptions())) as honest:
        _, held = honest.allocate(NBYTES)
        held[:] = 7
        transfer = local.read(local.connect(honest.endpoint()), *tables())
        assert ended(local, transfer).state is TransferState.DONE
    assert (memory_of(local) == 7).all()


def test_chunks_of_a_cancelled_read_do_not_land(server, local, peer, under_way):
    transfer, read = under_way
    local.cancel(transfer)
    assert ended(local, transfer).state is TransferState.CANCELLED
    assert server.expect(Cancel) == Cancel(read.transfer)
    memory_of(local)[:] = 5
    for index in range(1, 8):
        server.send_chunk(read.transfer, index)
    server.send(Refused(None, "TransferError", "the end"))  # behind them: they have come
    until(lambda: peer.lost is not None)
    assert (memory_of(local) == 5).all()


def test_the_rest_of_a_chunk_of_which_the_beginning_has_landed_does_not(
    server, local, peer, under_way
):
    transfer, read = under_way
    server.send((read.transfer, 1, CHUNK), chunk_of(1)[: CHUNK // 2])
    until(lambda: (memory_of(local)[CHUNK : 3 * CHUNK // 2] == chunk_array(1)[: CHUNK // 2]).all())
    local.cancel(transfer)
    assert ended(local, transfer).state is TransferState.CANCELLED
    memory_of(local)[:] = 5
    server.lines[0].tcp.sendall(chunk_of(1)[CHUNK // 2 :])
    again = local.read(peer, *tables())
    server.expect(Cancel)
    second = server.expect(Read)
    assert (memory_of(local) == 5).all()
    for index in range(8):
        server.send_chunk(second.transfer, index)
    assert ended(local, again).state is TransferState.DONE
    assert np.array_equal(memory_of(local), pattern(NBYTES, 1))


def test_chunks_of_a_stalled_read_do_not_land_and_the_next_read_works(clock, server, local):
    peer = local.connect(server.endpoint)
    transfer = local.read(peer, *tables())
    read = server.expect(Read)
    until(clock.passing(lambda: transfer in local.poll()), what="the end of the read")
    assert isinstance(transfer.error, StalledError)
    assert f"stall_timeout_s: {STALL_S}" in str(transfer.error)
    server.expect(Cancel)
    memory_of(local)[:] = 5
    for index in range(8):
        server.send_chunk(read.transfer, index)
    again = local.read(peer, *tables())
    second = server.expect(Read)
    assert (memory_of(local) == 5).all()
    assert second.transfer != read.transfer
    for index in range(8):
        server.send_chunk(second.transfer, index)
    assert ended(local, again).state is TransferState.DONE


def is_moving(transfer, nbytes):
    return lambda: transfer.bytes_done >= nbytes


def test_a_slow_server_is_not_a_stalled_one(clock, server, local, under_way):
    transfer, read = under_way
    for index in range(1, 8):
        until(is_moving(transfer, index * CHUNK), what="what was sent")
        clock.advance(0.8 * STALL_S)  # in all longer than a stall
        server.send_chunk(read.transfer, index)
    assert ended(local, transfer).state is TransferState.DONE


def test_a_read_that_waits_behind_others_is_not_stalled(clock, server, local):
    peer = local.connect(server.endpoint)
    transfers = [local.read(peer, *tables()) for _ in range(MAX_READS + 3)]
    reads = [server.expect(Read) for _ in range(MAX_READS)]
    assert server.lines[0].is_silent(0.05)  # the rest is kept back
    for index in range(8):
        clock.advance(0.8 * STALL_S)
        server.send_chunk(reads[0].transfer, index)
        until(is_moving(transfers[0], (index + 1) * CHUNK), what="what was sent")
    assert ended(local, transfers[0]).state is TransferState.DONE
    server.expect(Read)
    assert not any(transfer.is_terminal for transfer in transfers[1:])


@pytest.fixture
def room_for_two(monkeypatch):
    """A source has room for the tables of two reads of one reader."""
    tiles, runs = tables()
    plan = plan_chunks(tiles, runs, CHUNK)
    monkeypatch.setattr(wire_chunks, "MAX_TABLE_BYTES", 2 * plan.table_bytes)


NO_ROOM = "NotReadyError", "the tables of all reads are many"


def test_reads_whose_tables_are_too_many_are_kept_back_in_order(room_for_two, server, local, peer):
    transfers = [local.read(peer, *tables()) for _ in range(4)]
    reads = [server.expect(Read) for _ in range(2)]
    assert server.lines[0].is_silent(0.05)
    local.cancel(transfers[2])  # while it is kept back
    assert ended(local, transfers[2]).state is TransferState.CANCELLED
    for index in range(8):
        server.send_chunk(reads[1].transfer, index)
    assert ended(local, transfers[1]).state is TransferState.DONE
    last = server.expect(Read)
    for transfer in (reads[0].transfer, last.transfer):
        for index in range(8):
            server.send_chunk(transfer, index)
    until(lambda: transfers[0].is_terminal and transfers[3].is_terminal)
    assert transfers[0].state is transfers[3].state is TransferState.DONE


def test_a_single_read_may_have_tables_of_any_size(monkeypatch, server, local, peer):
    monkeypatch.setattr(wire_chunks, "MAX_TABLE_BYTES", 1)
    transfers = [local.read(peer, *tables()) for _ in range(2)]
    for transfer in transfers:
        read = server.expect(Read)
        assert server.lines[0].is_silent(0.05)
        for index in range(8):
            server.send_chunk(read.transfer, index)
        assert ended(local, transfer).state is TransferState.DONE


def test_a_read_that_was_put_off_is_requested_again_when_another_has_ended(server, local, peer):
    first, second = local.read(peer, *tables()), local.read(peer, *tables())
    reads = [server.expect(Read) for _ in range(2)]
    server.send(Refused(reads[1].transfer, *NO_ROOM))
    for index in range(8):
        server.send_chunk(reads[0].transfer, index)
    assert ended(local, first).state is TransferState.DONE
    assert server.expect(Read) == reads[1]
    for index in range(8):
        server.send_chunk(reads[1].transfer, index)
    assert ended(local, second).state is TransferState.DONE


def test_a_read_is_requested_again_only_where_it_was_put_off(clock, server):
    options = TransportOptions(extra={"chunk_bytes": CHUNK, "connections": 2})
    with contextlib.closing(TcpTransport.open(options)) as local:
        local.allocate(NBYTES)
        transfer = local.read(local.connect(server.endpoint), *tables())
        one, other = server.accept(), server.accept()
        first, second = one.receive(TCP_REQUESTS), other.receive(TCP_REQUESTS)
        one.send(Refused(first.transfer, *NO_ROOM))
        again = until(clock.passing(lambda: readable([one.tcp], 0.1)))
        assert again is one.tcp
        assert one.receive(TCP_REQUESTS) == first
        for line, read in ((one, first), (other, second)):
            blocks = np.frombuffer(read.chunks, CHUNK_DTYPE)["first_run"] // 2
            for index, block in enumerate(blocks.tolist()):
                line.send((read.transfer, index, CHUNK), chunk_of(block))
        assert ended(local, transfer).state is TransferState.DONE
        assert np.array_equal(memory_of(local), pattern(NBYTES, 1))
        assert other.is_silent(0.05)


def test_a_read_that_was_put_off_can_be_cancelled(clock, server, local, peer):
    transfer = local.read(peer, *tables())
    read = server.expect(Read)
    server.send(Refused(read.transfer, *NO_ROOM))
    until(lambda: peer.put_off)
    local.cancel(transfer)
    assert ended(local, transfer).state is TransferState.CANCELLED
    assert server.expect(Cancel) == Cancel(read.transfer)
    clock.advance(5.0)
    assert server.lines[0].is_silent(0.05)
    assert not peer.put_off


@pytest.mark.parametrize("close", ["the source", "the connection", "the transport"])
def test_reads_that_wait_for_room_end_with_their_connection(
    room_for_two, server, local, peer, close
):
    transfers = [local.read(peer, *tables()) for _ in range(3)]
    reads = [server.expect(Read) for _ in range(2)]
    server.send(Refused(reads[0].transfer, *NO_ROOM))
    until(lambda: peer.put_off and peer.waiting)
    {"the source": server, "the connection": peer, "the transport": local}[close].close()
    until(lambda: all(transfer.is_terminal for transfer in transfers))
    kind = TransferError if close == "the transport" else PeerLostError
    assert {type(transfer.error) for transfer in transfers} == {kind}
    assert not peer.put_off


def test_a_connection_that_breaks_fails_its_reads_quickly(server, local, under_way):
    transfer, _ = under_way
    server.close()
    assert isinstance(ended(local, transfer).error, PeerLostError)  # not by the stall timeout


def test_a_refused_connection_fails_its_reads_quickly(local):
    with contextlib.closing(FakeServer()) as gone:
        endpoint = gone.endpoint
    transfer = local.read(local.connect(endpoint), *tables())
    assert isinstance(ended(local, transfer).error, PeerLostError)


def test_another_start_of_a_rank_at_the_same_port_is_not_read_from(local):
    first = TcpTransport.open(TransportOptions())
    first.allocate(NBYTES)
    endpoint = first.endpoint()
    port = msgspec.msgpack.decode(endpoint)["port"]
    first.close()
    with contextlib.closing(TcpTransport.open(TransportOptions(extra={"port": port}))) as second:
        second.allocate(NBYTES)
        transfer = local.read(local.connect(endpoint), *tables())
        assert isinstance(ended(local, transfer).error, PeerLostError)
        assert "earlier start" in str(transfer.error)


def test_a_read_that_begins_while_its_refusal_is_taken_in_names_the_reason(local, monkeypatch):
    taking, receive = threading.Event(), tcp_reader.TcpReader._receive

    def receive_late(self, line):
        taking.set()
        time.sleep(0.2)  # the refusal and the end of the connection come meanwhile, and the read
        receive(self, line)

    monkeypatch.setattr(tcp_reader.TcpReader, "_receive", receive_late)
    with contextlib.closing(TcpTransport.open(TransportOptions())) as other:
        other.allocate(NBYTES)
        endpoint = msgspec.structs.replace(decode_endpoint(other.endpoint()), token=b"x" * 16)
        peer = local.connect(encode(endpoint))
        assert taking.wait(60)
        transfer = local.read(peer, *tables())
        assert "earlier start" in str(ended(local, transfer).error)


def test_a_connection_that_always_has_more_leaves_others_their_turn(local, server, monkeypatch):
    monkeypatch.setattr(tcp_reader, "TURN_BYTES", CHUNK)
    ready = tcp_reader.TcpReader._ready
    turns: list[int] = []

    def noted(self, line):
        before = transfer.bytes_done
        ready(self, line)
        turns.append(transfer.bytes_done - before)

    peer = local.connect(server.endpoint)
    transfer = local.read(peer, *tables())
    read = server.expect(Read)
    with held(local):
        monkeypatch.setattr(tcp_reader.TcpReader, "_ready", noted)
        for line in peer.lines:
            local.reader._watch(line, is_full=False)
        for index in range(NBYTES // CHUNK):
            server.send_chunk(read.transfer, index)
    assert ended(local, transfer).state is TransferState.DONE
    assert 0 < max(turns) <= 2 * CHUNK


def test_what_comes_after_close_is_harmless(server):
    local = TcpTransport.open(TransportOptions())
    local.allocate(NBYTES)
    peer = local.connect(server.endpoint)
    local.close()
    peer.close()
    transfer = local.read(peer, *tables())
    assert transfer.state is TransferState.FAILED
    assert local.poll() == [transfer]
    local.cancel(transfer)
    with pytest.raises(TransferError, match="cannot connect"):
        local.connect(server.endpoint)


@pytest.mark.parametrize(
    "changes",
    [
        {"transport": "shm"},
        {"version_min": 7, "version_max": 9},
        {"port": 0},
        {"port": 70000},
        {"host": ""},
        {"host": "a\0b"},
        {"regions": (-1,)},
    ],
)
def test_an_impossible_endpoint_is_refused(local, server, changes):
    endpoint = msgspec.msgpack.decode(server.endpoint, type=Endpoint)
    with pytest.raises(DecodeError, match="endpoint"):
        local.connect(encode(msgspec.structs.replace(endpoint, **changes)))


@pytest.mark.parametrize("versions", [(1, 2), (4, 9)])
def test_a_server_of_another_protocol_is_refused_by_its_endpoint(local, server, versions):
    low, high = versions
    endpoint = msgspec.msgpack.decode(server.endpoint, type=Endpoint)
    other = msgspec.structs.replace(endpoint, version_min=low, version_max=high)
    with pytest.raises(DecodeError, match=f"speaks versions {low} to {high} .* upgrade the older"):
        local.connect(encode(other))


def test_tokens_that_lie_apart_are_asked_for_by_their_steps(local, server):
    peer = local.connect(server.endpoint)
    tiles, runs = tables()
    runs["tokens"], runs["source_step"] = 8, 2
    local.read(peer, tiles, runs)
    assert np.frombuffer(server.expect(Read).steps, "<i8").tolist() == [2] * len(runs)


@pytest.mark.parametrize("threads", [1, 2])
def test_the_chunks_of_a_read_are_dealt_over_its_connections(server, threads):
    options = TransportOptions(threads=threads, extra={"chunk_bytes": CHUNK, "connections": 3})
    with contextlib.closing(TcpTransport.open(options)) as local:
        local.allocate(NBYTES)
        peer = local.connect(server.endpoint)
        firsts = set()
        for _ in range(3):  # each begins with another connection
            transfer = local.read(peer, *tables())
            while len(server.lines) < 3:
                server.accept()
            memory_of(local)[:] = 0
            seen = []
            for line in server.lines:
                read = line.receive(TCP_REQUESTS)
                blocks = np.frombuffer(read.chunks, CHUNK_DTYPE)["first_run"] // 2
                seen += blocks.tolist()
                for index, block in enumerate(blocks.tolist()):
                    line.send((read.transfer, index, CHUNK), chunk_of(block))
            assert ended(local, transfer).state is TransferState.DONE
            assert sorted(seen) == list(range(8))
            firsts.add(seen[0])
            assert np.array_equal(memory_of(local), pattern(NBYTES, 1))
        assert firsts == {0, 1, 2}


def test_what_one_connection_refuses_is_cancelled_at_the_others(server):
    options = TransportOptions(extra={"chunk_bytes": CHUNK, "connections": 2})
    with contextlib.closing(TcpTransport.open(options)) as local:
        local.allocate(NBYTES)
        transfer = local.read(local.connect(server.endpoint), *tables())
        one, other = server.accept(), server.accept()
        (number,) = {line.receive(TCP_REQUESTS).transfer for line in (one, other)}
        one.send(Refused(number, "TransferError", "busy"))
        assert isinstance(ended(local, transfer).error, TransferError)
        assert other.receive(TCP_REQUESTS) == Cancel(number)


@pytest.mark.parametrize("row", [0, -1])
def test_a_read_of_one_chunk_takes_one_connection_and_no_other_may_send_it(server, row):
    options = TransportOptions(extra={"connections": 2})
    with contextlib.closing(TcpTransport.open(options)) as local:
        local.allocate(NBYTES)
        peer = local.connect(server.endpoint)
        transfer = local.read(peer, *tables())
        lines = server.accept(), server.accept()
        tcp = readable([line.tcp for line in lines], 60)
        asked, other = lines if tcp is lines[0].tcp else lines[::-1]
        read = asked.receive(TCP_REQUESTS)
        assert other.is_silent()
        other.send((read.transfer, row, NBYTES), pattern(NBYTES, 1).tobytes())
        assert isinstance(ended(local, transfer).error, DecodeError)
        assert not memory_of(local).any()


def test_one_connection_that_breaks_ends_them_all(server):
    options = TransportOptions(threads=2, extra={"chunk_bytes": CHUNK, "connections": 2})
    with contextlib.closing(TcpTransport.open(options)) as local:
        local.allocate(NBYTES)
        transfer = local.read(local.connect(server.endpoint), *tables())
        one, other = server.accept(), server.accept()
        other.close()
        assert isinstance(ended(local, transfer).error, PeerLostError)
        assert one.is_ended()


def test_a_host_that_is_no_name_is_an_error_of_ours(local, server):
    endpoint = msgspec.msgpack.decode(server.endpoint, type=Endpoint)
    with pytest.raises(PeerLostError, match="cannot resolve 'not a host;'"):
        local.connect(encode(msgspec.structs.replace(endpoint, host="not a host;")))


def test_a_chunk_is_what_staging_packs(server, local, under_way):
    _, read = under_way
    tiles, runs = tables()
    (first, *rest) = stage(tiles, runs, CHUNK)
    assert first.nbytes == CHUNK
    assert len(rest) == 7
    assert len(read.chunks) == 8 * CHUNK_DTYPE.itemsize


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.EADDRINUSE, PortInUseError),
        (errno.EADDRNOTAVAIL, HostError),
        (errno.ENODEV, HostError),
        (errno.EMFILE, HostError),
        (zmq.EHOSTUNREACH, PeerLostError),
        (errno.ECONNREFUSED, PeerLostError),
        (zmq.ETERM, TransferError),
        (zmq.ENOTSOCK, TransferError),
        (zmq.EAGAIN, TransferError),
    ],
)
def test_every_error_of_zmq_becomes_one_of_ours(number, kind):
    error = error_of(zmq.ZMQError(number), "doing this")
    assert type(error) is kind
    assert str(error).startswith("doing this: ")
    with pytest.raises(kind), zmq_errors("doing this"):
        raise zmq.ZMQError(number)


def test_an_ipv6_address_is_put_in_brackets():
    assert tcp_address("::1", 5) == "tcp://[::1]:5"
    assert tcp_address("host", "*") == "tcp://host:*"


def test_ipv6_works():
    with (
        contextlib.closing(TcpTransport.open(TransportOptions(host="::1"))) as source,
        contextlib.closing(TcpTransport.open(TransportOptions(host="::1"))) as target,
    ):
        _, held = source.allocate(NBYTES)
        held[:] = 3
        _, memory = target.allocate(NBYTES)
        transfer = target.read(target.connect(source.endpoint()), *tables())
        assert ended(target, transfer).state is TransferState.DONE
        assert (memory == 3).all()


@pytest.mark.parametrize("stall_timeout_s", [1e-6, 1e9])
def test_any_stall_timeout_can_be_connected_with(stall_timeout_s):
    """Also one beyond what a socket's own timeout can be; and closing does not hang."""
    options = TransportOptions(stall_timeout_s=stall_timeout_s)
    with (
        contextlib.closing(TcpTransport.open(TransportOptions())) as source,
        contextlib.closing(TcpTransport.open(options)) as target,
    ):
        target.connect(source.endpoint()).close()


class Trickle:
    """Between a reader and its server: of what the server sends, the first bytes pass, then one
    every few milliseconds for some seconds, then all.
    """

    def __init__(self, port, nbytes, seconds):
        self.slow_until = None
        self._port, self._nbytes, self._seconds = port, nbytes, seconds
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self):
        reader, _ = self._listener.accept()
        server = socket.create_connection(("127.0.0.1", self._port))
        with reader, server:
            there = threading.Thread(target=self._carry, args=(reader, server, math.inf))
            there.start()
            self._carry(server, reader, self._nbytes)
            there.join()

    def _carry(self, source, target, left):
        with contextlib.suppress(OSError):
            while data := source.recv(1 if left <= 0 else int(min(left, 1 << 16))):
                target.sendall(data)
                left -= len(data)
                if left <= 0:
                    self.slow_until = self.slow_until or time.monotonic() + self._seconds
                    if time.monotonic() > self.slow_until:
                        left = math.inf
                    time.sleep(0.02)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self):
        self._listener.close()
        self._threads[0].join()


@pytest.mark.timed("The kernel must acknowledge within 0.5 s.")
def test_a_slow_link_is_not_a_lost_one(local, monkeypatch):
    """A chunk takes longer than a source may be silent."""
    monkeypatch.setattr(tcp_reader, "GONE_S", 0.5)
    with contextlib.closing(TcpTransport.open(TransportOptions())) as source:
        _, held = source.allocate(NBYTES)
        held[:] = 7
        endpoint = decode_endpoint(source.endpoint(), "tcp")
        with contextlib.closing(Trickle(endpoint.port, CHUNK // 2, 2.0)) as link:
            through = encode(msgspec.structs.replace(endpoint, port=link.port))
            peer = local.connect(through)
            transfer = local.read(peer, *tables())
            assert ended(local, transfer).state is TransferState.DONE
            peer.close()
    assert (memory_of(local) == 7).all()


@pytest.mark.timed("The kernel must acknowledge within 0.5 s.")
def test_a_source_that_stands_still_while_a_long_request_is_on_its_way_is_not_lost(monkeypatch):
    """What its host has no room for stays in ours, however long."""
    monkeypatch.setattr(tcp_reader, "GONE_S", 0.5)
    count = 200_000
    with (
        contextlib.closing(TcpTransport.open(TransportOptions())) as source,
        contextlib.closing(TcpTransport.open(TransportOptions())) as target,
    ):
        for transport in (source, target):
            transport.allocate(16 * count)
        tiles, runs = tables()
        for side in ("source", "target"):
            tiles[f"{side}_block_stride"] = tiles[f"{side}_token_stride"] = 16
        tiles["elements"] = 8
        runs = blank_runs(count)
        runs["source_block"] = runs["target_block"] = np.arange(count)
        runs["tokens"] = 1
        stands, goes_on = threading.Event(), threading.Event()

        def stand():
            stands.set()
            goes_on.wait(60)

        peer = target.connect(source.endpoint())
        (serving,) = source.server.threads
        until(lambda: [reader for reader in serving.readers if reader.welcome])
        serving.mailbox.post(stand)
        assert stands.wait(60)
        transfer = target.read(peer, tiles, runs)
        until(lambda: peer.reads)
        time.sleep(4.0)  # many times as long as a host may be silent
        goes_on.set()
        assert ended(target, transfer).state is TransferState.DONE, transfer.error


CUT_OFF = """
import sys, time
import numpy as np
from kvferry.transports import TransportOptions
from kvferry.transports.tcp import TcpTransport
from tests.transports.test_tcp_reader import CHUNK, NBYTES, tables
options = TransportOptions(host=sys.argv[2], extra={"chunk_bytes": CHUNK})
transport = TcpTransport.open(options)
transport.allocate(NBYTES)
if sys.argv[1] == "source":
    print(transport.endpoint().hex(), flush=True)
    sys.stdin.readline()
else:
    peer = transport.connect(bytes.fromhex(sys.argv[3]))
    while True:
        transfer = transport.read(peer, *tables())
        while not transport.poll():
            time.sleep(0.01)
        print(transfer.state.value, transfer.error, flush=True)
        if sys.stdin.readline() != "again\\n":
            break
"""


@pytest.mark.timed("Heartbeats of 0.2 s must be answered within 0.5 s.")
@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("idle", [True, False], ids=["waiting", "asking"])
def test_a_source_that_is_cut_off_is_known_though_its_process_does_not_run(idle):
    try:
        network = Network.open()
    except HostError as error:
        pytest.skip(str(error))
    with network:
        ours, theirs = network.add_host("reader"), network.add_host("source")
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        python = [sys.executable, "-c", CUT_OFF]
        source: Any = theirs.run([*python, "source", theirs.ipv4], **pipes)
        endpoint = source.stdout.readline().decode().strip()
        reader: Any = ours.run([*python, "reader", ours.ipv4, endpoint], **pipes)
        assert reader.stdout.readline().startswith(b"done")
        theirs.pause()
        if idle:
            reader.stdin.write(b"again\n")
            reader.stdin.flush()
            time.sleep(1.0)
        network.cut(ours, theirs)
        if not idle:
            reader.stdin.write(b"again\n")
            reader.stdin.flush()
        assert b"is gone" in reader.stdout.readline()
        theirs.resume()
