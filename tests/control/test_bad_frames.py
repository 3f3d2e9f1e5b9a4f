"""Law 5: whatever arrives on the control port, the listener and the other peers go on."""

import contextlib
import math
import random
import socket
import struct
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from kvferry.control import messages
from kvferry.control.client import fetch_status
from kvferry.control.leases import LeaseTable
from kvferry.control.messages import (
    Ask,
    DescriptionRequest,
    ErrorEvent,
    ErrorReply,
    Finish,
    FinishAnswer,
    Finishes,
    Handshake,
    Release,
    Renew,
    StatusReply,
    StatusReport,
    StatusRequest,
    TraceRequest,
)
from kvferry.control.options import ControlOptions
from kvferry.control.server import ControlService
from kvferry.errors import DecodeError
from kvferry.testing.waiting import WAIT_S


@pytest.fixture(scope="session")
def requests(describe, hybrid):
    """One good request of each kind."""
    header: dict[str, Any] = {"id": 7, "engine_id": "d", "incarnation": "i"}
    header["source_incarnation"] = "s"
    items = tuple(
        Finish(lease_id=f"lease-{rank}", rank=rank, ok=True, nonce=b"n" * 8, proof=b"p" * 16)
        for rank in range(3)
    )
    windows = {"layer_indices": (0, 2), "sliding_window": 40, "layer_split": (2, 0)}
    rest = {"layer_indices": (1, 3, 4, 5), "layer_split": (2, 2)}
    return [
        Handshake(id=7, description=describe("d", "i", tp=2)),
        Handshake(id=7, description=hybrid("h", [windows, rest], pp=2)),
        Renew(**header, leases={"a": b"p" * 16, "b": b"q" * 16}),
        Finishes(**header, items=items),
        Release(**header, leases={"a": b"p" * 16}, keep=True),
        Ask(**header, transfer_id="t", proof=b"p" * 16),
        StatusRequest(id=7),
        TraceRequest(id=8, request_id="r"),
        DescriptionRequest(id=7),
    ]


@contextlib.contextmanager
def dealer(served):
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.rcvtimeo = int(WAIT_S * 1000)
        raw.sndtimeo = int(WAIT_S * 1000)
        raw.connect(f"tcp://{served.address}")
        yield raw


def decode_error(payload):
    reply = messages.decode_reply(payload)
    assert isinstance(reply, ErrorReply)
    return reply


def confirm_works(served, describe):
    """A whole life of a lease on the same listener."""
    description = describe("good", "g1")
    client = served.client(description)
    client.handshake(served.address, description).result(WAIT_S)
    lease_id = served.grant()
    future = served.finish(client, lease_id)
    assert future.result(WAIT_S) == FinishAnswer.HELD
    client.close()


def test_a_thousand_random_frames(serve, describe):
    served = serve()
    rng = random.Random(1)
    with dealer(served) as raw:
        for _ in range(1000):
            raw.send(rng.randbytes(rng.randrange(200)))
            reply = decode_error(raw.recv())
            assert (reply.id, reply.name) == (0, "DecodeError")
    confirm_works(served, describe)
    status = served.server.status()
    assert status.counters["errors.DecodeError"] == 1000
    assert len(status.errors) == ControlOptions().remembered_errors


def test_a_thousand_truncated_frames(serve, describe, requests):
    served = serve()
    rng = random.Random(2)
    payloads = [messages.encode(request) for request in requests]
    with dealer(served) as raw:
        for _ in range(1000):
            payload = rng.choice(payloads)
            raw.send(payload[: rng.randrange(len(payload))])
            reply = decode_error(raw.recv())
            assert (reply.id, reply.name) == (0, "DecodeError")
    confirm_works(served, describe)


def test_a_thousand_frames_with_a_flipped_byte(serve, describe, requests):
    """Some still decode: a changed lease id, rank or stride. All are answered."""
    served = serve()
    rng = random.Random(3)
    payloads = [messages.encode(request) for request in requests]
    with dealer(served) as raw:
        for _ in range(1000):
            payload = bytearray(rng.choice(payloads))
            payload[rng.randrange(len(payload))] = rng.randrange(256)
            raw.send(bytes(payload))
            messages.decode_reply(raw.recv())
    status = served.server.status()
    assert "errors.internal" not in status.counters, status.errors
    confirm_works(served, describe)


def test_messages_of_no_or_of_many_frames(serve, describe):
    served = serve()
    with dealer(served) as raw:
        for frames in ([b"", b""], [b"a"] * 100):
            raw.send_multipart(frames)
            reply = decode_error(raw.recv())
            assert reply.name == "ProtocolError"
            assert f"this one has {len(frames)}" in reply.message
        raw.send(b"")
        assert decode_error(raw.recv()).name == "DecodeError"
    confirm_works(served, describe)


def test_an_oversized_message_ends_only_its_own_connection(serve, describe):
    served = serve(options=ControlOptions(max_message_bytes=100_000))
    description = describe("good", "g0")
    client = served.client(description)
    client.handshake(served.address, description).result(WAIT_S)
    with dealer(served) as raw:
        monitor = raw.get_monitor_socket(zmq.Event.DISCONNECTED)
        raw.send(b"x" * 100_001)
        assert monitor.poll(int(WAIT_S * 1000)), "the connection was not ended"
        raw.disable_monitor()
        monitor.close()
    assert client.status(served.address).result(WAIT_S).ready
    confirm_works(served, describe)


def test_bytes_that_are_no_zeromq_at_all(serve, describe):
    served = serve()
    rng = random.Random(4)
    for start in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL"):
        for _ in range(30):
            with socket.create_connection(("127.0.0.1", served.server.port)) as raw:
                with contextlib.suppress(OSError):
                    raw.sendall(start + rng.randbytes(rng.randrange(2000)))
                # Reset instead of a clean end, half of the time.
                if rng.random() < 0.5:
                    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    confirm_works(served, describe)


def test_a_bug_in_an_answer_is_noted_and_the_next_request_is_served(serve, describe):
    served = serve()

    def bug(*_args, **_options):
        raise RuntimeError("a bug of ours")

    served.leases.renew = bug
    description = describe("d", "i")
    client = served.client(description)
    client.handshake(served.address, description).result(WAIT_S)
    with pytest.raises(Exception, match="a bug of ours"):
        served.renew(client, "a").result(WAIT_S)
    del served.leases.renew
    confirm_works(served, describe)
    assert served.server.status().counters["errors.internal"] == 1


def test_a_peer_that_reads_no_answers_stops_nobody(serve, describe):
    served = serve()
    with zmq.Context() as context, context.socket(zmq.DEALER) as raw:
        raw.linger = 0
        raw.rcvhwm = 1
        raw.sndhwm = 100_000
        raw.connect(f"tcp://{served.address}")
        request = messages.encode(StatusRequest(id=1))
        for _ in range(20_000):
            raw.send(request, zmq.NOBLOCK)
        report = fetch_status("127.0.0.1", served.server.port, timeout_s=WAIT_S)
        assert report.ready
    confirm_works(served, describe)


# ---- the same without sockets, so that Hypothesis can look further ---------------------------


@pytest.fixture(scope="module")
def service(describe, requests):
    """Answers requests; its engine knows a target `d` in start `i` with two ranks."""
    service = ControlService(
        engine_id="p",
        incarnation="s",
        role="kv_producer",
        leases=LeaseTable(max_blocks=1000),
    )
    service.set_description(describe("p", "s"))
    service.handle(messages.encode(requests[0]))
    return service


@given(payload=st.binary(max_size=400))
def test_any_bytes_are_answered(service, payload):
    messages.decode_reply(service.handle(payload))
    assert "errors.internal" not in service.status().counters


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)


@given(data=st.data())
def test_any_value_in_any_field_is_answered(service, requests, data):
    request = data.draw(st.sampled_from(requests))
    values = msgspec.msgpack.decode(messages.encode(request))
    place = values
    while True:
        key = data.draw(
            st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place)))
        )
        deeper = place[key]
        if not isinstance(deeper, dict | list) or not deeper or data.draw(st.booleans()):
            break
        place = deeper
    place[key] = data.draw(anything)
    reply = messages.decode_reply(service.handle(msgspec.msgpack.encode(values)))
    assert "errors.internal" not in service.status().counters, (reply, service.status().errors)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x91" * 500_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x82\xa4type\xa5Renew\xa9engine_id\xa2\xff\xfe",
    ],
)
def test_nesting_and_lies_about_sizes_are_decode_errors(payload):
    with pytest.raises(DecodeError):
        messages.decode_request(payload)
    with pytest.raises(DecodeError):
        messages.decode_reply(payload)


@pytest.mark.parametrize("uptime_s", [math.nan, math.inf, -math.inf, 1e300])
@pytest.mark.parametrize("moment", [math.nan, math.inf, -1.0, 1e18])
def test_a_report_of_times_that_no_clock_shows_is_not_read(uptime_s, moment):
    report = StatusReport(
        engine_id="e", incarnation="i", role="kv_both", ready=True, uptime_s=1.0, peers=(),
        leases=(), transfers=(), counters={}, errors=(ErrorEvent(time=1.0, message="x"),),
    )  # fmt: skip
    reply = StatusReply(id=1, report=report)
    assert messages.decode_reply(messages.encode(reply)) == reply
    for field, value in (
        ("uptime_s", uptime_s),
        ("errors", (ErrorEvent(time=moment, message="x"),)),
    ):
        wrong = msgspec.structs.replace(report, **{field: value})
        with pytest.raises(DecodeError, match=field):
            messages.decode_reply(messages.encode(StatusReply(id=1, report=wrong)))


def test_every_message_comes_back_as_it_was_sent_and_ignores_what_newer_releases_add(requests):
    for request in requests:
        payload = messages.encode(request)
        assert messages.decode_request(payload) == request
        newer = msgspec.msgpack.decode(payload) | {"added_later": [1, {"a": None}]}
        assert messages.decode_request(msgspec.msgpack.encode(newer)) == request
