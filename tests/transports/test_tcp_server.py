"""The tcp transport's data port against readers that err, lie, stall or send noise."""

import contextlib
import socket
import time

import numpy as np
import pytest
import zmq

from kvferry.errors import ConfigError, HostError, PortInUseError
from kvferry.layouts.copier import expand
from kvferry.layouts.staging import stage
from kvferry.layouts.tiles import TILE_DTYPE, blank_runs
from kvferry.testing.transport_cases import copy_slowly, large_case, random_case
from kvferry.testing.transport_peer import pattern
from kvferry.transports import TransferState, TransportOptions
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.wire_chunks import KEPT_LENGTHS, plan_chunks
from kvferry.transports.wire_messages import (
    CHUNK_DTYPE,
    SOURCE_RUN_DTYPE,
    SOURCE_TILE_DTYPE,
    TCP_REPLIES,
    VERSION_MAX,
    Cancel,
    Chunk,
    Hello,
    Read,
    Refused,
    Taken,
    Welcome,
    decode_endpoint,
    encode,
    encode_table,
)

REGION_BYTES = 1 << 20


@pytest.fixture
def server():
    """A transport that serves one region of pattern 1."""
    options = TransportOptions(threads=1, extra={"window_bytes": 1 << 18, "chunk_bytes": 1 << 16})
    with contextlib.closing(TcpTransport.open(options)) as opened:
        _, memory = opened.allocate(REGION_BYTES)
        memory[:] = pattern(REGION_BYTES, 1)
        yield opened


class RawReader:
    """A reader that says what a test wants it to."""

    def __init__(self, server, *, hello=True):
        self.endpoint = decode_endpoint(server.endpoint())
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 60_000
        self.socket.connect(f"tcp://127.0.0.1:{self.endpoint.port}")
        if hello:
            self.send(Hello(self.endpoint.token, 1, VERSION_MAX, 1 << 30))
            assert isinstance(self.receive(), Welcome)

    def send(self, message):
        self.socket.send(message if isinstance(message, bytes) else encode(message))

    def receive(self):
        """The next message; what follows its first frame is in ``data``."""
        header, *self.data = self.socket.recv_multipart()
        return TCP_REPLIES.decode(header)

    def is_silent(self, seconds=0.2):
        return not self.socket.poll(int(seconds * 1000))

    def refusal(self, message):
        """Sends, and returns the refusal that must be the answer."""
        self.send(message)
        answer = self.receive()
        assert isinstance(answer, Refused), answer
        return answer

    def close(self):
        self.socket.close()
        self.context.term()


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


def steps_of(*steps):
    return np.array(steps, dtype="<i8").tobytes()


def per_run(count):
    """One chunk per run."""
    return [(0, 1, run, 1) for run in range(count)]


def test_a_read_is_answered_with_its_bytes(reader):
    reader.send(request(5, flat_tiles(), flat_runs(3)))
    assert reader.receive() == Chunk(5, 0)
    assert np.array_equal(
        np.frombuffer(reader.data[0], dtype=np.uint8), pattern(REGION_BYTES, 1)[: 3 * 4096]
    )


def test_tokens_that_lie_apart_come_packed(reader):
    reader.send(request(5, flat_tiles(), flat_runs(2, tokens=8), steps=steps_of(2, 1)))
    assert reader.receive() == Chunk(5, 0)
    rows = pattern(REGION_BYTES, 1).reshape(-1, 256)
    wanted = np.concatenate([rows[0:16:2], rows[16:24]]).ravel()
    assert np.array_equal(np.frombuffer(reader.data[0], dtype=np.uint8), wanted)


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
    assert reader.receive() == Chunk(2, 0)


def test_one_transfer_number_cannot_be_used_twice_at_once(reader):
    reader.send(request(1, flat_tiles(), flat_runs(200), per_run(200)))
    reader.send(request(1, flat_tiles(), flat_runs(1)))
    while isinstance(answer := reader.receive(), Chunk):
        pass
    assert "under way already" in answer.reason


def test_reads_before_hello_and_hellos_of_strangers_are_refused(server):
    with contextlib.closing(RawReader(server, hello=False)) as stranger:
        assert "before Hello" in stranger.refusal(request(1, flat_tiles(), flat_runs(1))).reason
        refused = stranger.refusal(Hello(b"guess", 1, VERSION_MAX, 1 << 20))
        assert refused.transfer is None
        assert "earlier start" in refused.reason
        token = stranger.endpoint.token
        assert "upgrade" in stranger.refusal(Hello(token, 98, 99, 1 << 20)).reason
        assert "window_bytes" in stranger.refusal(Hello(token, 1, 1, 0)).reason
    assert server.refused_messages == 4


def test_a_reader_that_takes_nothing_holds_one_window(reader):
    reader.send(request(1, flat_tiles(), flat_runs(256), per_run(256)))
    got = 0
    while not reader.is_silent():
        assert isinstance(reader.receive(), Chunk)
        got += len(reader.data[0])
    assert got == 1 << 18
    reader.send(Taken(1 << 17, 32))
    while not reader.is_silent():
        assert isinstance(reader.receive(), Chunk)
        got += len(reader.data[0])
    assert got == (1 << 18) + (1 << 17)


@pytest.mark.parametrize("taken", [Taken(1, 0), Taken(0, 1), Taken(-1, 0), Taken(1 << 62, 1)])
def test_a_reader_cannot_take_what_was_not_sent(reader, taken):
    assert reader.refusal(taken).error == "BoundsError"
    reader.send(request(2, flat_tiles(), flat_runs(1)))
    assert reader.receive() == Chunk(2, 0)


def test_a_cancelled_read_stops(reader):
    reader.send(request(1, flat_tiles(), flat_runs(256), per_run(256)))
    while not reader.is_silent():
        reader.receive()
    reader.send(Cancel(1))
    reader.send(Cancel(1))
    reader.send(Cancel(12345))
    reader.send(Taken(1 << 18, 64))
    assert reader.is_silent()
    reader.send(request(2, flat_tiles(), flat_runs(1)))
    assert reader.receive() == Chunk(2, 0)


def test_a_number_that_is_used_again_after_a_cancel_stands_for_the_new_read(reader):
    reader.send(request(1, flat_tiles(), flat_runs(256), per_run(256)))
    while not reader.is_silent():
        reader.receive()
    reader.send(Cancel(1))
    reader.send(request(1, flat_tiles(), flat_runs(3), per_run(3)))
    reader.send(Taken(1 << 18, 64))
    assert [reader.receive() for _ in range(3)] == [Chunk(1, index) for index in range(3)]
    assert reader.is_silent()


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
        assert other.receive() == Chunk(1, 0)
        assert reader.receive() == Chunk(1, 0)


def test_the_tables_of_one_reader_are_bounded_and_of_one_length_kept_at_a_time(server, reader):
    many = flat_runs(370_000, source_block=0, tokens=1)
    for transfer in range(8):
        # No chunk of it is taken, so the reads stay under way.
        reader.send(request(transfer, flat_tiles(), many, [(0, 1, 0, 370_000)] * 8))
    answers = [reader.receive()]
    while not isinstance(answers[-1], Refused):
        answers.append(reader.receive())
    while not reader.is_silent(2.0):
        answers.append(reader.receive())
    refused = [answer for answer in answers if isinstance(answer, Refused)]
    assert refused
    assert all("read less at a time" in answer.reason for answer in refused)
    (served,) = server._server._readers.values()
    assert served.table_bytes < 128 << 20
    lengths = flat_runs(1000, source_block=0, tokens=1 + np.arange(1000))
    plan = plan_chunks(flat_tiles(source_token_stride=0), lengths, 1 << 20)
    for index in range(len(plan.chunks)):
        plan.pack(index)
    assert len(plan._dense) == KEPT_LENGTHS


def test_a_reader_that_has_gone_leaves_nothing(server, reader, monkeypatch):
    reader.send(request(1, flat_tiles(), flat_runs(256), per_run(256)))
    reader.receive()
    while not reader.is_silent():
        reader.receive()
    (served,) = server._server._readers.values()
    assert served.reads
    monkeypatch.setattr("kvferry.transports.tcp_server.SILENCE_S", 0.2)
    server._server._mailbox.post(lambda: setattr(server._server, "_next_look", 0.0))
    deadline = time.monotonic() + 60
    while server._server._readers:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "silent for" in reader.receive().reason


def test_a_small_read_does_not_wait_for_a_large_one_of_another_reader(server, reader):
    with contextlib.closing(RawReader(server)) as other:
        reader.send(request(1, flat_tiles(), flat_runs(256), per_run(256)))
        assert isinstance(reader.receive(), Chunk)
        other.send(request(1, flat_tiles(), flat_runs(1)))
        assert other.receive() == Chunk(1, 0)


def test_reads_of_one_reader_take_turns(reader):
    reader.send(request(1, flat_tiles(), flat_runs(256), per_run(256)))
    reader.send(request(2, flat_tiles(), flat_runs(4), per_run(4)))
    order = []
    while not reader.is_silent():
        order.append(reader.receive().transfer)
        reader.send(Taken(len(reader.data[0]), 1))
    assert order.count(1) == 256
    assert order.count(2) == 4
    assert max(index for index, transfer in enumerate(order) if transfer == 2) < 128


def test_the_reader_silent_longest_is_dropped_when_there_are_too_many():
    options = TransportOptions(extra={"max_readers": 2})
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(contextlib.closing(TcpTransport.open(options)))
        server.allocate(REGION_BYTES)
        first, second, third = (
            stack.enter_context(contextlib.closing(RawReader(server))) for _ in range(3)
        )
        assert "connect again" in first.refusal(request(1, flat_tiles(), flat_runs(1))).reason
        for reader in (second, third):
            reader.send(request(1, flat_tiles(), flat_runs(1)))
            assert reader.receive() == Chunk(1, 0)


def test_a_thousand_random_and_truncated_messages_harm_nobody(server):
    """Noise on the data port, as ZeroMQ messages and as raw bytes, while reads keep working."""
    rng = np.random.default_rng(11)
    valid = [
        encode(Hello(b"0" * 16, 1, 1, 1000)),
        encode(request(1, flat_tiles(), flat_runs(20))),
        encode(Taken(100, 1)),
        encode(Cancel(1)),
    ]
    case = large_case(1 << 18)
    with (
        contextlib.closing(RawReader(server)) as noisy,
        contextlib.closing(TcpTransport.open(TransportOptions())) as local,
    ):
        source_region, held = server.allocate(case.source_region_bytes[0])
        held[:] = pattern(held.nbytes, 2)
        case.tiles["source_region"] = source_region
        _, memory = local.allocate(case.target_region_bytes[0])
        expected = np.zeros_like(memory)
        empty = np.empty(0, dtype=np.uint8)
        copy_slowly(case.tiles, case.runs, [empty] * source_region + [held], [expected])
        peer = local.connect(server.endpoint())
        for number in range(1000):
            send_noise(rng, noisy, valid)
            if number % 50 == 0:
                send_raw_noise(rng, noisy.endpoint.port)
                memory[:] = 0
                transfer = local.read(peer, case.tiles, case.runs)
                while not local.poll():
                    time.sleep(0.001)
                assert transfer.state is TransferState.DONE, transfer.error
                assert np.array_equal(memory, expected)
        deadline = time.monotonic() + 60
        while server.refused_messages < 1000 and time.monotonic() < deadline:
            time.sleep(0.01)
        # More than a thousand: ZeroMQ takes some raw bytes for messages of its oldest protocol.
        assert server.refused_messages >= 1000
        # Every refusal is answered, and the listener still welcomes.
        assert isinstance(noisy.receive(), Refused)
    RawReader(server).close()


def send_noise(rng, noisy, valid):
    """One ZeroMQ message: random bytes, a valid one cut short, or one with a byte changed."""
    kind = rng.integers(0, 4)
    message = valid[rng.integers(0, len(valid))]
    if kind == 0:
        noisy.send(rng.bytes(int(rng.integers(0, 300))))
    elif kind == 1:
        noisy.send(message[: int(rng.integers(0, len(message)))])
    elif kind == 2:
        changed = bytearray(message)
        changed[int(rng.integers(0, min(len(changed), 20)))] ^= int(rng.integers(1, 256))
        noisy.send(bytes(changed))
    else:
        noisy.socket.send_multipart([rng.bytes(10) for _ in range(int(rng.integers(2, 6)))])


def send_raw_noise(rng, port):
    """Bytes that are not even ZeroMQ, on a connection of their own."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(rng.bytes(int(rng.integers(1, 2000))))


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


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"prot": 1}, "did you mean 'port'"),
        ({"port": 70000}, "not a TCP port"),
        ({"chunk_bytes": 1}, "chunk_bytes"),
        ({"window_bytes": 0}, "window_bytes"),
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
