"""The tcp transport's data port against readers that err, lie, stall or send noise."""

import contextlib
import socket
import weakref
from typing import Any

import numpy as np
import pytest

from kvferry.errors import ConfigError, HostError, PortInUseError, TransferError
from kvferry.layouts.copier import expand
from kvferry.layouts.staging import stage
from kvferry.layouts.tiles import TILE_DTYPE, blank_runs
from kvferry.testing.host_device import HostPackedTcpTransport
from kvferry.testing.transport_cases import copy_slowly, large_case, random_case
from kvferry.testing.transport_peer import pattern
from kvferry.testing.waiting import until
from kvferry.transports import TransferState, TransportOptions, wire, wire_chunks
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.tcp_server import MAX_ANSWERS, _Reader
from kvferry.transports.wire_chunks import KEPT_LENGTHS, plan_chunks
from kvferry.transports.wire_messages import (
    CHUNK_DTYPE,
    MAX_READS,
    MESSAGE,
    REPLIES,
    SOURCE_RUN_DTYPE,
    SOURCE_TILE_DTYPE,
    VERSION_MAX,
    VERSION_MIN,
    Cancel,
    Hello,
    Read,
    Refused,
    decode_endpoint,
    encode,
    encode_table,
    refused_error,
)
from tests.transports.framed import Framed

REGION_BYTES = 1 << 20
BLOCKS = REGION_BYTES // 4096


@pytest.fixture(params=[TcpTransport, HostPackedTcpTransport], ids=["in place", "packed"])
def server(request):
    """A transport that serves one region of pattern 1, or what a device packs of it."""
    options = TransportOptions(threads=1, extra={"chunk_bytes": 1 << 16})
    with contextlib.closing(request.param.open(options)) as opened:
        _, memory = opened.allocate(REGION_BYTES)
        memory[:] = pattern(REGION_BYTES, 1)
        yield opened


class RawReader(Framed):
    """A reader that says what a test wants it to."""

    def __init__(self, server, *, hello=True):
        self.endpoint = decode_endpoint(server.endpoint())
        super().__init__(socket.create_connection(("127.0.0.1", self.endpoint.port), timeout=60))
        if hello:
            self.send(Hello(self.endpoint.token, VERSION_MIN, VERSION_MAX))

    def receive(self, decoder=REPLIES):
        """The next message, or transfer and index of a chunk, whose bytes are in ``data``."""
        return super().receive(decoder)

    def refusal(self, message):
        """Sends, and returns the refusal that must be the answer."""
        self.send(message)
        answer = self.receive()
        assert isinstance(answer, Refused), answer
        return answer


@pytest.fixture
def reader(server):
    with contextlib.closing(RawReader(server)) as opened:
        yield opened


def flat_tiles(**changes):
    """One tile over the region: blocks of 16 tokens of 256 bytes."""
    tiles = np.zeros(1, dtype=TILE_DTYPE)
    values = {
        "source_block_stride": 4096,
        "source_token_stride": 256,
        "source_head_stride": 256,
        "source_element_stride": 1,
        "heads": 1,
        "elements": 256,
        "itemsize": 1,
    }
    for name, value in (values | changes).items():
        tiles[name] = value
    return tiles


def flat_runs(count, **changes):
    runs = blank_runs(count)
    runs["source_block"], runs["tokens"] = np.arange(count), 16
    for name, value in changes.items():
        runs[name] = value
    return runs


def request(transfer, tiles, runs, chunks=None, steps=b""):
    """A read of everything, in the given chunks or in one."""
    chunks = [(0, len(tiles), 0, len(runs))] if chunks is None else chunks
    return Read(
        transfer,
        encode_table(tiles, SOURCE_TILE_DTYPE),
        encode_table(runs, SOURCE_RUN_DTYPE),
        np.array(chunks, dtype=CHUNK_DTYPE).tobytes(),
        steps,
    )


def readers_of(server):
    """What the server knows of its readers, once it knows of one."""
    (serving,) = server.server.threads
    return until(lambda: [reader for reader in serving.readers if reader.welcome])


def steps_of(*steps):
    return np.array(steps, dtype="<i8").tobytes()


def per_run(count):
    """One chunk per run."""
    return [(0, 1, run, 1) for run in range(count)]


def test_a_read_is_answered_with_its_bytes(reader):
    reader.send(request(5, flat_tiles(), flat_runs(3)))
    assert reader.receive() == (5, 0)
    assert np.array_equal(
        np.frombuffer(reader.data, dtype=np.uint8), pattern(REGION_BYTES, 1)[: 3 * 4096]
    )


def test_tokens_that_lie_apart_come_packed(reader):
    reader.send(request(5, flat_tiles(), flat_runs(2, tokens=8), steps=steps_of(2, 1)))
    assert reader.receive() == (5, 0)
    rows = pattern(REGION_BYTES, 1).reshape(-1, 256)
    wanted = np.concatenate([rows[0:16:2], rows[16:24]]).ravel()
    assert np.array_equal(np.frombuffer(reader.data, dtype=np.uint8), wanted)


@pytest.mark.parametrize(
    ("read", "error", "reason"),
    [
        (request(1, flat_tiles(source_region=1), flat_runs(1)), "BoundsError", "region 1"),
        (request(1, flat_tiles(source_region=-1), flat_runs(1)), "BoundsError", "region -1"),
        (request(1, flat_tiles(), flat_runs(257)), "BoundsError", "which has 1048576 bytes"),
        (request(1, flat_tiles(source_offset=-1), flat_runs(1)), "BoundsError", "bytes -1"),
        (request(1, flat_tiles(heads=1 << 62), flat_runs(1)), "BoundsError", "addresses reach"),
        (
            request(
                1,
                flat_tiles(
                    heads=1 << 62, elements=1 << 62, source_head_stride=0, source_element_stride=0
                ),
                flat_runs(1),
            ),
            "BoundsError",
            "in one message",
        ),
        (
            request(1, flat_tiles(source_token_stride=0), flat_runs(2, tokens=1 << 61)),
            "BoundsError",
            "in one message",
        ),
        (request(1, flat_tiles(), flat_runs(1), [(0, 1, 0, 2)]), "BoundsError", "the table has 1"),
        (request(1, flat_tiles(), flat_runs(1), [(-1, 1, 0, 1)]), "BoundsError", "chunk 0"),
        (request(1, flat_tiles(), flat_runs(1), [(0, 1, 0, 0)]), "BoundsError", "chunk 0"),
        (
            request(1, flat_tiles(), flat_runs(1), [(0, 1, 0, 1), (1 << 62, 1 << 62, 0, 1)]),
            "BoundsError",
            "chunk 1",
        ),
        (
            request(1, flat_tiles(), flat_runs(2, tokens=[16, 8]), [(0, 1, 0, 2)]),
            "BoundsError",
            "different lengths",
        ),
        (Read(1, b"", b"", b""), "DecodeError", "tiles: 0 bytes"),
        (Read(1, b"x" * 72, b"y" * 25, b""), "DecodeError", "runs: 25 bytes"),
        (request(1, flat_tiles(), flat_runs(1), []), "DecodeError", "chunks: 0 bytes"),
        (
            request(1, flat_tiles(), flat_runs(2), steps=steps_of(2)),
            "DecodeError",
            "steps: 8 bytes for 2 runs",
        ),
        (
            request(1, flat_tiles(), flat_runs(1), steps=steps_of(0)),
            "BoundsError",
            "source_step is 0",
        ),
        (
            request(1, flat_tiles(), flat_runs(1), steps=steps_of(1 << 30)),
            "BoundsError",
            "which has 1048576 bytes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_read_that_asks_for_the_impossible_is_refused_by_name(reader, read, error, reason):
    refused = reader.refusal(read)
    assert (refused.transfer, refused.error) == (1, error)
    assert reason in refused.reason
    reader.send(request(2, flat_tiles(), flat_runs(1)))
    assert reader.receive() == (2, 0)


def plenty(times=64):
    """Chunks of a request of all blocks: far more than two sockets hold."""
    return per_run(BLOCKS) * times


def test_one_transfer_number_cannot_be_used_twice_at_once(reader):
    reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
    reader.send(request(1, flat_tiles(), flat_runs(1)))
    while isinstance(answer := reader.receive(), tuple):
        pass
    assert answer.transfer == 1
    assert "under way already" in answer.reason


def test_strangers_are_refused_and_their_connections_end(server):
    token = decode_endpoint(server.endpoint()).token
    for number, (message, error, reason) in enumerate(
        [
            (request(1, flat_tiles(), flat_runs(1)), "ProtocolError", "Read came before"),
            (request(1, flat_tiles(), flat_runs(99)), "ProtocolError", "a message of"),
            (Cancel(1), "ProtocolError", "before Hello"),
            (Hello(b"guess", VERSION_MIN, VERSION_MAX), "ProtocolError", "earlier start"),
            (Hello(token, 98, 99), "ProtocolError", "speaks versions 98 to 99, this server"),
            (Hello(token, 1, 2), "ProtocolError", "upgrade the older side"),
            ((1, 0, 0), "ProtocolError", "readers send messages"),
            ((MESSAGE, 0, 1 << 40), "ProtocolError", "a message of 1099511627776 bytes"),
            (b"\xc1", "DecodeError", "request"),
        ],
        start=1,
    ):
        with contextlib.closing(RawReader(server, hello=False)) as stranger:
            refused = stranger.refusal(message)
            assert (refused.transfer, refused.error) == (None, error)
            assert reason in refused.reason
            assert stranger.is_ended()
        assert server.refused_messages == number


def test_a_reader_that_takes_nothing_holds_what_the_sockets_hold_and_nobody_up(server, reader):
    nbytes = 64 * REGION_BYTES
    reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
    (served,) = readers_of(server)
    until(lambda: served.full)
    with contextlib.closing(RawReader(server)) as other:
        other.send(request(1, flat_tiles(), flat_runs(1)))
        assert other.receive() == (1, 0)
    assert 1 in served.reads
    got = 0
    while got < nbytes:
        assert reader.receive()[0] == 1
        got += len(reader.data)
    until(lambda: not served.reads)


def test_a_cancelled_read_stops(server, reader):
    reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
    (served,) = readers_of(server)
    until(lambda: served.full)
    for transfer in (1, 1, 12345):
        reader.send(Cancel(transfer))
    reader.send(request(2, flat_tiles(), flat_runs(1)))
    until(lambda: 1 not in served.reads)
    chunks = 0
    while reader.receive() != (2, 0):
        chunks += 1
    assert chunks < len(plenty())
    assert reader.is_silent()


def test_reads_that_are_cancelled_leave_nothing_though_nothing_is_taken(server, reader):
    reader.send(request(0, flat_tiles(), flat_runs(BLOCKS), plenty()))
    (served,) = readers_of(server)
    until(lambda: served.full)
    for _ in range(3 * MAX_READS):
        reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
        reader.send(Cancel(1))
    reader.send(request(2, flat_tiles(), flat_runs(BLOCKS), plenty()))
    until(lambda: 2 in served.reads)
    assert {transfer for transfer, _, _ in served.turns} <= {0, 2}


def test_a_number_that_is_used_again_after_a_cancel_stands_for_the_new_read(server, reader):
    reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
    (served,) = readers_of(server)
    until(lambda: served.full)
    old = served.reads[1]
    reader.send(Cancel(1))
    reader.send(request(1, flat_tiles(source_offset=256), flat_runs(3), per_run(3)))
    until(lambda: served.reads.get(1) is not old)
    answers: list[Any] = []
    while len(answers) < 3 or answers[-3:] != [(1, 0), (1, 1), (1, 2)] or not reader.is_silent():
        answers.append(reader.receive())
    assert np.array_equal(
        np.frombuffer(reader.data, dtype=np.uint8),
        pattern(REGION_BYTES, 1)[256 + 2 * 4096 : 256 + 3 * 4096],
    )


def many_strides(tiles, runs):
    """A read of which every tile has another stride, so that none can borrow another's bounds."""
    table = np.zeros(tiles, SOURCE_TILE_DTYPE)
    for name in ("heads", "elements", "itemsize"):
        table[name] = 1
    table["source_block_stride"] = np.arange(tiles)
    ends = np.zeros(runs, SOURCE_RUN_DTYPE)
    ends["tokens"] = 1
    cut = np.array([(0, 1, 0, 1)], CHUNK_DTYPE)
    return Read(1, table.tobytes(), ends.tobytes(), cut.tobytes())


def test_a_message_costs_the_server_no_more_than_its_length(server, reader):
    """24 megabytes, for which tables of tiles times runs would have 87 billion entries: nobody
    would wait for them.
    """
    message = many_strides(168_000, 520_000)
    with contextlib.closing(RawReader(server)) as other:
        reader.send(message)
        other.send(request(1, flat_tiles(), flat_runs(1)))
        assert other.receive() == (1, 0)
        assert reader.receive() == (1, 0)


def test_the_tables_of_one_reader_are_bounded_and_of_one_length_kept_at_a_time(server, reader):
    many = flat_runs(370_000, source_block=0, tokens=1)
    for transfer in range(8):
        # No chunk of it is taken, so the reads stay under way.
        reader.send(request(transfer, flat_tiles(), many, [(0, 1, 0, 370_000)] * 8))
    answers = [reader.receive()]
    while not isinstance(answers[-1], Refused):
        answers.append(reader.receive())
    assert "read less at a time" in answers[-1].reason
    (served,) = readers_of(server)
    assert served.table_bytes < 128 << 20
    lengths = flat_runs(1000, source_block=0, tokens=1 + np.arange(1000))
    plan = plan_chunks(flat_tiles(source_token_stride=0), lengths, 1 << 20)
    for index in range(len(plan.chunks)):
        plan.pack(index)
    assert len(plan._dense) == KEPT_LENGTHS


@pytest.mark.parametrize("transfer", [-1, -2, 1 << 63, (1 << 64) - 1])
def test_a_number_that_no_header_can_carry_is_refused_by_name(reader, transfer):
    refused = reader.refusal(request(transfer, flat_tiles(), flat_runs(1)))
    assert (refused.transfer, refused.error) == (transfer, "ProtocolError")
    assert f"transfer: {transfer} is not in 0 to" in refused.reason
    reader.send(request((1 << 63) - 1, flat_tiles(), flat_runs(1)))
    assert reader.receive() == ((1 << 63) - 1, 0)


def test_a_tile_that_no_chunk_has_may_not_be_of_any_size_either(reader):
    """The bytes of both tiles together would wrap to nothing."""
    tiles = np.concatenate([flat_tiles(elements=1), flat_tiles(elements=(1 << 44) - 1)])
    for dim in ("token", "head", "element"):
        tiles[f"source_{dim}_stride"] = 0
    read = request(1, tiles, flat_runs(1, tokens=1 << 20), [(0, 1, 0, 1)])
    assert reader.refusal(read).error == "BoundsError"
    reader.send(request(2, flat_tiles(), flat_runs(1)))
    assert reader.receive() == (2, 0)


def test_refusals_that_a_reader_does_not_take_are_bounded(server, reader, monkeypatch):
    (served,) = readers_of(server)
    monkeypatch.setattr(served.link, "_write", lambda _data: 0)  # its socket is full
    impossible = request(1, flat_tiles(source_region=7), flat_runs(1))
    with contextlib.suppress(ConnectionError):  # it was refused before the end
        for _ in range(10 * MAX_ANSWERS):
            reader.send(impossible)
    assert reader.is_ended()
    until(lambda: served.link.is_closed)
    assert server.refused_messages == MAX_ANSWERS + 2
    with contextlib.closing(RawReader(server)) as other:
        other.send(request(1, flat_tiles(), flat_runs(1)))
        assert other.receive() == (1, 0)


def test_nothing_of_a_read_is_kept_once_it_has_left(server, reader):
    reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
    (served,) = readers_of(server)
    until(lambda: served.full)
    table = weakref.ref(served.reads[1].pack(0)[1].base)
    for _ in plenty():
        assert reader.receive()[0] == 1
    until(lambda: not served.reads)
    until(lambda: table() is None, 60)


@pytest.mark.parametrize("server", [TcpTransport], indirect=True)
def test_a_run_of_any_size_is_packed_in_a_buffer_of_bounded_size(server, reader):
    """64 MiB of pieces of 512 bytes, all of one run of one tile."""
    tiles = flat_tiles(
        source_token_stride=8, source_head_stride=2048, heads=2, elements=512, source_offset=64
    )
    reader.send(request(1, tiles, flat_runs(1, tokens=1 << 16)))
    (served,) = readers_of(server)
    until(lambda: served.full)
    assert served.link._chunk[0].buffer.nbytes <= 4 << 20
    assert reader.receive() == (1, 0)
    tokens = np.frombuffer(reader.data, dtype=np.uint8)
    token, head = tokens.reshape(2, 1 << 16, 512), pattern(REGION_BYTES, 1)
    for number in (0, 1, 65535):
        first = 64 + 8 * number
        assert np.array_equal(token[0, number], head[first : first + 512])
        assert np.array_equal(token[1, number], head[first + 2048 : first + 2560])


def test_a_reader_that_takes_nothing_for_long_leaves_nothing(server, reader, monkeypatch):
    reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
    (served,) = readers_of(server)
    until(lambda: served.full)
    (serving,) = server.server.threads
    assert serving.readers == [served]
    monkeypatch.setattr("kvferry.transports.tcp_server.SILENCE_S", 0.2)
    serving.mailbox.post(lambda: setattr(serving, "_next_look", 0.0))
    until(lambda: not serving.readers and not served.reads)
    assert reader.is_ended()


def test_a_reader_that_is_hung_is_dropped_while_another_is_always_served(
    server, reader, monkeypatch
):
    reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
    (served,) = readers_of(server)
    until(lambda: served.full)
    (serving,) = server.server.threads
    serve = serving._serve
    insatiable = _Reader(link=served.link)
    monkeypatch.setattr(
        serving,
        "_serve",
        lambda known: serving._enqueue(known) if known is insatiable else serve(known),
    )
    monkeypatch.setattr("kvferry.transports.tcp_server.SILENCE_S", 0.2)
    serving.mailbox.post(lambda: setattr(serving, "_next_look", 0.0))
    serving.mailbox.post(lambda: serving._enqueue(insatiable))
    until(lambda: not serving.readers, 60)
    assert reader.is_ended()


def test_requests_take_turns_by_their_bytes(server, reader, monkeypatch):
    """The tables of a long one take a third of a second to look through."""
    (served,) = readers_of(server)
    (serving,) = server.server.threads
    long = encode(Read(1, b"x" * (5 << 20), b"", b""))
    messages = iter([long] * 9 + [None])
    monkeypatch.setattr(served.link, "receive", lambda _most: next(messages))
    serving.mailbox.call(lambda: serving._receive(served))
    assert len(list(messages)) == 9


def test_a_reader_that_goes_leaves_nothing(server, reader):
    reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
    (served,) = readers_of(server)
    until(lambda: served.full)
    reader.close()
    until(lambda: not server.server.threads[0].readers and not served.reads)


def test_a_small_read_does_not_wait_for_a_large_one_of_another_reader(server, reader):
    with contextlib.closing(RawReader(server)) as other:
        reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
        assert reader.receive() == (1, 0)
        other.send(request(1, flat_tiles(), flat_runs(1)))
        assert other.receive() == (1, 0)


def test_reads_of_one_reader_take_turns(server, reader):
    reader.send(request(1, flat_tiles(), flat_runs(BLOCKS), plenty()))
    (served,) = readers_of(server)
    until(lambda: served.full)
    reader.send(request(2, flat_tiles(), flat_runs(4), per_run(4)))
    order = [reader.receive()[0] for _ in range(len(plenty()) + 4)]
    assert order.count(2) == 4
    first = order.index(2)
    assert order[first : first + 7] == [2, 1, 2, 1, 2, 1, 2]


def test_the_reader_silent_longest_is_dropped_when_there_are_too_many():
    options = TransportOptions(extra={"max_readers": 2})
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(TcpTransport.open(options)))
        server.allocate(REGION_BYTES)
        readers = []
        for _ in range(3):
            readers.append(stack.enter_context(contextlib.closing(RawReader(server))))
            if len(readers) < 3:  # the last one comes when the others are known
                until(lambda: len(readers_of(server)) == len(readers))
        assert readers[0].is_ended()
        for reader in readers[1:]:
            reader.send(request(1, flat_tiles(), flat_runs(1)))
            assert reader.receive() == (1, 0)


def test_threads_have_equal_shares_of_the_readers_whoever_else_connects():
    options = TransportOptions(threads=2, extra={"max_readers": 4})
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(TcpTransport.open(options)))
        server.allocate(REGION_BYTES)
        threads = server.server.threads
        readers = []
        for count in range(1, 5):
            readers.append(stack.enter_context(contextlib.closing(RawReader(server))))
            until(lambda: sum(len(each.readers) for each in threads) == count)  # noqa: B023
            RawReader(server, hello=False).close()  # somebody looks whether the port is open
            until(lambda: sum(each.dealt for each in threads) == 2 * count)  # noqa: B023
            until(lambda: sum(each.gone for each in threads) == count)  # noqa: B023
        for reader in readers:
            reader.send(request(1, flat_tiles(), flat_runs(1)))
            assert reader.receive() == (1, 0)


@pytest.fixture
def little_room(monkeypatch):
    """Readers may have tables of 1 MiB each, and of 4 MiB together."""
    for name, nbytes in (("MAX_TABLE_BYTES", 1 << 20), ("MAX_TABLE_BYTES_IN_ALL", 4 << 20)):
        monkeypatch.setattr(wire, name, nbytes)
    monkeypatch.setattr(wire_chunks, "MAX_TABLE_BYTES", 1 << 20)


@pytest.mark.usefixtures("little_room")
def test_the_tables_of_all_readers_are_bounded_over_all_threads():
    many = flat_runs(12_000, source_block=0, tokens=1)
    with contextlib.ExitStack() as stack:
        options = TransportOptions(threads=2)
        server = stack.enter_context(contextlib.closing(TcpTransport.open(options)))
        server.allocate(REGION_BYTES)
        readers = [stack.enter_context(contextlib.closing(RawReader(server))) for _ in range(16)]
        for reader in readers:  # no more of it is taken than sockets hold
            reader.send(request(1, flat_tiles(), many, [(0, 1, 0, 12_000)] * 64))
        until(lambda: server.refused_messages)
        held = sum(each.table_bytes for thread in server.server.threads for each in thread.readers)
        assert (1 << 20) < held <= 4 << 20


@pytest.mark.usefixtures("little_room")
def test_a_read_without_room_now_is_told_from_a_read_that_never_has_room():
    with contextlib.ExitStack() as stack:
        served = stack.enter_context(contextlib.closing(TcpTransport.open(TransportOptions())))
        served.allocate(REGION_BYTES)
        readers = [stack.enter_context(contextlib.closing(RawReader(served))) for _ in range(2)]
        large = flat_runs(30_000, source_block=0, tokens=1)
        # Of eight chunks, no more is taken than sockets hold.
        readers[0].send(request(1, flat_tiles(), large, [(0, 1, 0, 30_000)] * 8))
        until(lambda: [each for each in served.server.threads[0].readers if each.reads])
        refused = readers[1].refusal(request(1, flat_tiles(), large))
        assert refused.error == "NotReadyError"
        assert type(refused_error(refused, "P")) is TransferError  # a reader of an older release
        too_large = flat_runs(40_000, source_block=0, tokens=1)
        refused = readers[1].refusal(request(2, flat_tiles(), too_large))
        assert refused.error == "TransferError"
        assert "allowed are 4194304; read less at a time" in refused.reason
        readers[0].send(Cancel(1))
        until(lambda: not any(each.reads for each in served.server.threads[0].readers))
        readers[1].send(request(1, flat_tiles(), large))
        assert readers[1].receive() == (1, 0)


def test_strangers_who_say_nothing_are_bounded_and_drop_no_reader(server, reader, monkeypatch):
    monkeypatch.setattr("kvferry.transports.tcp_server.MAX_STRANGERS", 3)
    readers_of(server)
    with contextlib.ExitStack() as stack:
        strangers = [
            stack.enter_context(contextlib.closing(RawReader(server, hello=False)))
            for _ in range(10)
        ]
        assert all(stranger.is_ended() for stranger in strangers[:7])
        until(lambda: len(server.server.threads[0].readers) == 4)  # the last one is taken in
        reader.send(request(2, flat_tiles(), flat_runs(1)))
        assert reader.receive() == (2, 0)


def test_two_threads_serve_readers_at_once():
    with contextlib.closing(TcpTransport.open(TransportOptions(threads=2))) as server:
        _, memory = server.allocate(REGION_BYTES)
        memory[:] = pattern(REGION_BYTES, 1)
        with contextlib.ExitStack() as stack:
            readers = [stack.enter_context(contextlib.closing(RawReader(server))) for _ in range(4)]
            for reader in readers:
                reader.send(request(5, flat_tiles(), flat_runs(3)))
                assert reader.receive() == (5, 0)
                got = np.frombuffer(reader.data, dtype=np.uint8)
                assert np.array_equal(got, memory[: 3 * 4096])
            assert [len(thread.readers) for thread in server.server.threads] == [2, 2]


def test_a_thousand_random_and_truncated_messages_harm_nobody(server):
    """Noise on the data port while reads keep working. What is no message ends its connection."""
    rng = np.random.default_rng(11)
    token = decode_endpoint(server.endpoint()).token
    hello = Hello(token, VERSION_MIN, VERSION_MAX)
    valid = [encode(hello), encode(request(1, flat_tiles(), flat_runs(20))), encode(Cancel(1))]
    case = large_case(1 << 18)
    with contextlib.closing(TcpTransport.open(TransportOptions())) as local:
        source_region, held = server.allocate(case.source_region_bytes[0])
        held[:] = pattern(held.nbytes, 2)
        case.tiles["source_region"] = source_region
        _, memory = local.allocate(case.target_region_bytes[0])
        expected = np.zeros_like(memory)
        empty = np.empty(0, dtype=np.uint8)
        copy_slowly(case.tiles, case.runs, [empty] * source_region + [held], [expected])
        peer = local.connect(server.endpoint())
        for number in range(1000):
            with contextlib.closing(RawReader(server, hello=number % 2 == 0)) as noisy:
                send_noise(rng, noisy, valid)
            if number % 50 == 0:
                memory[:] = 0
                transfer = local.read(peer, case.tiles, case.runs)
                until(lambda: transfer.is_terminal)  # noqa: B023
                assert transfer.state is TransferState.DONE, transfer.error
                assert np.array_equal(memory, expected)
        until(lambda: server.refused_messages > 300)
        # All that is left is the honest one, and the listener still welcomes.
        until(lambda: len(server.server.threads[0].readers) == 1)
    with contextlib.closing(RawReader(server)) as last:
        last.send(request(1, flat_tiles(), flat_runs(1)))
        assert last.receive() == (1, 0)


def send_noise(rng, noisy, valid):
    """Random bytes with or without a true header, or a valid message cut short, or changed."""
    kind = rng.integers(0, 4)
    message = valid[rng.integers(0, len(valid))]
    with contextlib.suppress(ConnectionError):  # it was refused before the end
        if kind == 0:
            noisy.send(rng.bytes(int(rng.integers(1, 300))))
        elif kind == 1:
            noisy.send(message[: int(rng.integers(1, len(message)))])
        elif kind == 2:
            changed = bytearray(message)
            changed[int(rng.integers(0, min(len(changed), 20)))] ^= int(rng.integers(1, 256))
            noisy.send(bytes(changed))
        else:
            noisy.tcp.sendall(rng.bytes(int(rng.integers(1, 2000))))


def test_a_taken_port_is_named_with_a_remedy():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"127\.0\.0\.1 port {port}.*another port"):
            TcpTransport.open(TransportOptions(extra={"port": port}))


def test_a_foreign_address_is_a_host_error():
    with pytest.raises(HostError, match=r"192\.0\.2\.1"):
        TcpTransport.open(TransportOptions(host="192.0.2.1"))


def test_a_wildcard_needs_a_name_that_peers_can_use():
    with pytest.raises(ConfigError, match="advertise_host"):
        TcpTransport.open(TransportOptions(host="0.0.0.0"))
    options = TransportOptions(host="0.0.0.0", extra={"advertise_host": "127.0.0.1"})
    with contextlib.closing(TcpTransport.open(options)) as opened:
        assert decode_endpoint(opened.endpoint()).host == "127.0.0.1"
    options = TransportOptions(host="0.0.0.0", advertise_host="203.0.113.7")
    with contextlib.closing(TcpTransport.open(options)) as opened:
        assert decode_endpoint(opened.endpoint()).host == "203.0.113.7"


def test_ranks_listen_on_ports_in_a_row_and_tell_those_that_lead_there():
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    extra = {"port": port - 3, "advertise_port": 30600}
    with contextlib.closing(TcpTransport.open(TransportOptions(rank=3, extra=extra))) as opened:
        assert decode_endpoint(opened.endpoint()).port == 30603
        socket.create_connection(("127.0.0.1", port)).close()
    with pytest.raises(ConfigError, match="port: 65535 leaves none for rank 1"):
        TcpTransport.open(TransportOptions(rank=1, extra={"port": 65535}))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"advertise_port": 30600}, "advertise_port: 30600 leads to port, which is 0"),
        ({"advertise_port": -1}, "advertise_port: -1 is not a TCP port"),
    ],
)
def test_a_port_that_leads_nowhere_is_refused(extra, message):
    with pytest.raises(ConfigError, match=message):
        TcpTransport.open(TransportOptions(extra=extra))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"prot": 1}, "did you mean 'port'"),
        ({"port": 70000}, "not a TCP port"),
        ({"chunk_bytes": 1}, "chunk_bytes"),
        ({"window_bytes": 1 << 20}, "window_bytes"),
        ({"connections": 65}, "connections: 65 is not in 0 to 64"),
        ({"port": "5"}, "port"),
    ],
)
def test_wrong_extra_keys_are_named(extra, message):
    with pytest.raises(ConfigError, match=message):
        TcpTransport.open(TransportOptions(extra=extra))


@pytest.mark.parametrize("seed", range(40))
def test_chunks_cover_every_run_of_every_tile_once(seed):
    case = random_case(seed)
    plan = plan_chunks(case.tiles, case.runs, 64)
    covered = np.zeros((len(plan.tiles), len(plan.runs)), dtype=int)
    for first_tile, tiles, first_run, runs in plan.chunks.tolist():
        covered[first_tile : first_tile + tiles, first_run : first_run + runs] += 1
        assert len(set(plan.runs["tokens"][first_run : first_run + runs])) == 1
    assert (covered == 1).all()
    assert sorted(plan.runs.tolist()) == sorted(case.runs.tolist())


@pytest.mark.parametrize("seed", range(40))
def test_each_chunk_lies_as_staging_says(seed):
    case = random_case(seed)
    plan = plan_chunks(case.tiles, case.runs, 64)
    for index, (first_tile, tiles, first_run, runs) in enumerate(plan.chunks.tolist()):
        part = plan.tiles[first_tile : first_tile + tiles], plan.runs[first_run : first_run + runs]
        (staged,) = stage(*part, 1 << 40)
        assert staged.nbytes == plan.nbytes[index]
        wanted = expand(staged.pack_tiles, staged.pack_runs)
        assert np.array_equal(expand(*plan.pack(index)), wanted)
        wanted = expand(staged.unpack_tiles, staged.unpack_runs)
        assert np.array_equal(expand(*plan.unpack(index)), wanted)
