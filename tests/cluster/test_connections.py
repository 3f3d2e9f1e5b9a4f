"""What a connection of our HTTP servers makes of bytes: one request at a time, as RFC 9112 says."""

import asyncio
import json
import logging

import pytest
import uvicorn

from kvferry.serving import connections
from kvferry.serving.connections import Connections
from tests.cluster.fuzzing import Line

HEAD = b"POST /p HTTP/1.1\r\nhost: h\r\n"
FIVE = b"content-length: 5\r\n\r\nhello"
CHUNKS = b"transfer-encoding: chunked\r\n\r\n2\r\nhe\r\n3;x=y\r\nllo\r\n0\r\ntrailer: t\r\n\r\n"
UPGRADE = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: A\r\n"
WHOLE = [(b"content-length", b"5")]


class Asked:
    """An application that repeats the bodies of requests, and keeps their scopes."""

    def __init__(self, headers=WHOLE):
        self._headers = headers
        self.scopes, self.bodies = [], []

    async def __call__(self, scope, receive, send):
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.scopes.append(scope)
        self.bodies.append(body)
        await send({"type": "http.response.start", "status": 200, "headers": self._headers})
        for part in (body[:2], body[2:]):
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body"})

    def told(self, *pieces):
        """What a client is told that sends ``pieces`` over one connection."""

        async def say():
            ours = Connections(1000, self, lambda _: None)
            config = uvicorn.Config(self, http=ours, ws="none", log_config=None)  # type: ignore[arg-type]
            config.load()
            return await Line(config, ours).say(pieces, leave=False)

        return asyncio.run(say())


@pytest.fixture
def asked():
    return Asked()


@pytest.fixture
def uvicorn_log(caplog):
    """Its records come to ``caplog`` even where uvicorn has set its loggers up."""
    logger = logging.getLogger("uvicorn.error")
    logger.addHandler(caplog.handler)
    caplog.set_level(logging.WARNING, logger.name)
    yield
    logger.removeHandler(caplog.handler)


def cut(data, size):
    return [data[begin : begin + size] for begin in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("body", [FIVE, CHUNKS])
@pytest.mark.parametrize("more", [b"", UPGRADE], ids=["", "upgrade"])
def test_a_body_arrives_whole_however_it_is_cut_and_sent(asked, more, body, size):
    answer = asked.told(*cut(HEAD + b"X-Id:  a b \r\n" + more + body, size))

    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert answer.endswith(b"\r\n\r\nhello")
    assert asked.bodies == [b"hello"]
    (scope,) = asked.scopes
    assert (b"x-id", b"a b") in scope["headers"]
    assert b"trailer" not in dict(scope["headers"])


@pytest.mark.parametrize("more", [b"", UPGRADE], ids=["", "upgrade"])
@pytest.mark.parametrize("size", [30, 1000])
def test_a_request_before_the_last_answer_ends_the_connection_after_it(asked, size, more):
    first = HEAD + more + FIVE
    answer = asked.told(*cut(first + HEAD + b"content-length: 6\r\n\r\nsecond", size))

    assert asked.bodies == [b"hello"]
    assert answer.count(b"HTTP/1.1 200 OK") == 1
    assert b"HTTP/1.1 400" not in answer
    assert b"connection: close" in answer


def test_a_request_after_the_last_answer_is_answered(asked):
    # The client waits, as the application needs no more than one turn of the loop.
    answer = asked.told(HEAD + FIVE, b"", HEAD + FIVE)

    assert asked.bodies == [b"hello", b"hello"]
    assert answer.count(b"HTTP/1.1 200 OK") == 2
    assert b"connection: close" not in answer


@pytest.mark.parametrize("headers", [WHOLE, []], ids=["length", "no length"])
def test_a_client_of_http_1_0_gets_no_chunks_and_the_end_of_the_connection(headers):
    answer = Asked(headers).told(b"POST /p HTTP/1.0\r\n" + FIVE)

    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert b"connection: close" in head
    assert body == b"hello"
    assert b"transfer-encoding: chunked" in Asked([]).told(HEAD + FIVE)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", b"HTTP 1.1 with 0 headers `host`"),
        (b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", b"HTTP 1.1 with 2 headers `host`"),
        (b"GET / HTTP/2.0\r\nhost: a\r\n\r\n", b"HTTP 2.0 with 1 headers `host`"),
        (HEAD + b"x-request-id: \x1b[31mred\r\n", b"Invalid header value char"),
        (b"\x16\x03\x01\x02\x00\x01\x00", b"Invalid method encountered"),
        (HEAD + b"content-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", b"Content-Length"),
        (HEAD + b"content-length: 1\r\ncontent-length: 2\r\n\r\n", b"Content-Length"),
        (HEAD + UPGRADE + b"transfer-encoding: chunked\r\n\r\nno length", b"chunk size"),
        (b"GET /" + b"x" * 70_000, b"a head is longer than 65536 bytes"),
        (HEAD + b"x-a: b\r\n" * 10_000, b"a head is longer than 65536 bytes"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 70_000, b"a head is longer"),
        (HEAD + CHUNKS[:-2] + b"x-a: b\r\n" * 10_000, b"a head is longer than 65536 bytes"),
    ],
)
def test_what_is_not_http_is_refused_by_name(asked, data, reason, caplog, uvicorn_log):
    answer = asked.told(*cut(data, 1000))

    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert answer.count(b"HTTP/1.1") == 1
    assert reason in answer
    assert len(answer) < 500
    told = json.loads(answer.partition(b"\r\n\r\n")[2])
    assert told["error"]["type"] == "invalid_request_error"
    assert asked.bodies == []
    assert reason.decode() in caplog.text


def test_bytes_that_are_not_http_behind_a_request_do_not_disturb_its_answer(asked):
    answer = asked.told(HEAD + FIVE + b"\x00\xff nonsense")

    assert answer.endswith(b"\r\n\r\nhello")
    assert answer.count(b"HTTP/1.1") == 1


def test_a_long_body_is_no_head(asked):
    length = 3 * connections.MOST_HEAD_BYTES
    asked.told(
        HEAD + b"content-length: %d\r\n\r\n" % length,
        *[b"x" * 1000] * (length // 1000),
        b"x" * (length % 1000),
    )

    assert [len(body) for body in asked.bodies] == [length]
