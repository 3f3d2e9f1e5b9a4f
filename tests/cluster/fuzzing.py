"""Nearly right HTTP, and a server of ours that is spoken to without a socket.

:func:`nearly_http` writes requests whose bodies, heads or framing are changed at a few places.
:class:`Line` is a connection as the server has it (its own protocol class on uvicorn's) on a
transport that keeps what is written, so that ten thousand requests take seconds.
"""

import asyncio
import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from kvferry.serving.connections import Connections
from tests.fuzzing import damaged, nearly_value


@dataclass(frozen=True)
class HttpRequest:
    """A good request, from which others are made."""

    path: str
    body: Any = None
    """JSON to post; ``None`` to get."""
    headers: dict[str, str] = field(default_factory=dict)


NUMBERS = (b"1" + b"0" * 300, b"-1" + b"0" * 300, b"1e999", b"-0", b"18446744073709551616", b"1.0")
DEEP = (b"[" * 200, b"[" * 100_000, b'{"a":' * 20_000, b"[" * 900 + b"]" * 900)
HEADERS = (
    ("x-request-id", "r"),
    ("x-request-id", "\x1b[31m"),
    ("x-request-id", "x" * 5000),
    ("authorization", "Bearer \u00e9"),
    ("content-type", "text/plain"),
    ("content-encoding", "gzip"),
    ("expect", "100-continue"),
    ("connection", "close"),
    ("connection", "upgrade"),
    ("upgrade", "websocket"),
    ("upgrade", "h2c"),
    ("http2-settings", "AAMAAABkAAQAAP__"),
    ("range", "bytes=0-1"),
    ("", "no name"),
    ("a b", "a space in the name"),
    ("x-long", "x" * 70_000),
    ("x-nul", "\x00"),
    ("host", "a, b"),
)
METHODS = ("GET", "POST", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "X" * 300, "")
PATHS = (
    "/",
    "*",
    "",
    "/v1",
    "/v1/completions/",
    "//",
    "/%00%ff",
    "/..",
    "http://x/health",
    "/é?\t",
)
VERSIONS = ("HTTP/1.0", "HTTP/0.9", "HTTP/2.0", "HTTP/1.1.1", "")
LENGTHS = ("-1", "0", "1", "nine", "1" * 30, "0x10", "+5", "16777217", "")
CODINGS = ("gzip", "chunked, chunked", "identity", "gzip, chunked")


def nearly_http(
    requests: Sequence[HttpRequest], count: int, rng: random.Random
) -> Iterator[list[bytes]]:
    """``count`` times what one client sends on one connection, in the pieces in which it comes.

    Of ten requests one is as it should be, and eight have a changed body; heads and framing are
    changed as well in one of four.
    """
    for _ in range(count):
        data = _request(rng.choice(requests), rng)
        while rng.random() < 0.05:
            data += _request(rng.choice(requests), rng)  # and the next before there is an answer
        if rng.random() < 0.03:
            data = damaged(data, rng)
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 0, 1, 4))))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        yield [piece for piece in pieces if piece]


def _request(request: HttpRequest, rng: random.Random) -> bytes:
    body = b"" if request.body is None else _body(request.body, rng)
    method, path, version = "GET" if request.body is None else "POST", request.path, "HTTP/1.1"
    headers = [("host", "x"), *request.headers.items()]
    chunked = rng.random() < 0.1
    if body or chunked:
        headers.append(("transfer-encoding", "chunked") if chunked else _length(len(body)))
    if rng.random() < 0.25:
        match rng.randrange(7):
            case 0:
                method = rng.choice(METHODS)
            case 1:
                path = rng.choice((*PATHS, "/" + "x" * 5000, path + "?a=%zz&b"))
            case 2:
                version = rng.choice(VERSIONS)
            case 3:
                headers.insert(rng.randrange(len(headers) + 1), rng.choice(HEADERS))
            case 4:
                headers += [rng.choice(HEADERS)] * rng.choice((2, 200, 2000))
            case 5:
                headers = _framing(headers, len(body), rng)
            case _:
                headers.pop(rng.randrange(len(headers)))
    head = "".join(f"{name}: {value}\r\n" for name, value in headers)
    data = f"{method} {path} {version}\r\n{head}\r\n".encode("utf-8", "surrogatepass")
    return data + (_chunks(body, rng) if chunked else body)


def _length(nbytes: int) -> tuple[str, str]:
    return "content-length", str(nbytes)


def _framing(
    headers: list[tuple[str, str]], nbytes: int, rng: random.Random
) -> list[tuple[str, str]]:
    """The same head with a body of another length, or of two."""
    kept = [header for header in headers if header[0] != "content-length"]
    match rng.randrange(4):
        case 0:
            return [*kept, ("content-length", rng.choice(LENGTHS))]
        case 1:
            return [*kept, _length(max(0, nbytes + rng.choice((-7, -1, 1, 1000, 1 << 30))))]
        case 2:
            return [*headers, ("transfer-encoding", rng.choice((*CODINGS, "chunked")))]
        case _:
            return [*headers, _length(rng.randrange(nbytes + 9))]


def _chunks(body: bytes, rng: random.Random) -> bytes:
    """A body in chunks; the sizes of some are wrong."""
    data = b""
    while body:
        size = rng.choice((1, 7, 100, len(body)))
        piece, body = body[:size], body[size:]
        said = f"{len(piece):x}".encode()
        if rng.random() < 0.02:
            said = rng.choice((b"", b"-1", b"zz", b"f" * 40, b"0", b"1;x=" + b"y" * 20_000, b"7f"))
        data += said + b"\r\n" + piece + b"\r\n"
    return data + rng.choice((b"0\r\n\r\n",) * 8 + (b"0\r\na: b\r\n\r\n", b"0\r\n", b""))


def _body(value: Any, rng: random.Random) -> bytes:
    if rng.random() < 0.9:
        value = nearly_value(value, rng)
    text = json.dumps(value, default=lambda other: bytes(other).decode("latin-1")).encode()
    if rng.random() > 0.1:
        return text
    numbers = [match.span() for match in re.finditer(rb"(?<=[ \[])-?\d[\d.e]*", text)]
    first, end = rng.choice(numbers) if numbers else (0, 0)
    match rng.randrange(6):
        case 0:
            return text[:first] + rng.choice(NUMBERS) + text[end:]
        case 1:
            return text[:first] + rng.choice(DEEP) + text[end:]
        case 2:
            return text.decode().encode(rng.choice(("utf-16", "utf-32", "utf-8-sig")))
        case 3:
            return text.replace(b'"', rng.choice((b'"\\ud800', b'"\\u0000', b'"\xff')), 3)
        case 4:
            return text[:-1] + b"," + text[1:]  # every key twice
        case _:
            return damaged(text, rng)


class _Transport(asyncio.Transport):
    """Keeps what is written; tells the protocol of its end as a socket does."""

    def __init__(self, protocol: Any) -> None:
        super().__init__({"peername": ("127.0.0.1", 1), "sockname": ("127.0.0.1", 2)})
        self.written = bytearray()
        self.paused = False
        self._protocol = protocol
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)

    abort = close

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


class Line:
    """One connection to a server."""

    def __init__(self, config: uvicorn.Config, connections: Connections) -> None:
        self._state = ServerState()
        self._protocol: Any = connections(config=config, server_state=self._state, app_state={})
        self._transport = _Transport(self._protocol)
        self._protocol.connection_made(self._transport)

    async def say(self, pieces: Sequence[bytes], *, leave: bool) -> bytes:
        """What the server answers; with ``leave`` the client goes away before the answer is whole.

        What was half sent is ended by the client, as the server's time-outs would end it.
        """
        for piece in pieces:
            while self._transport.paused and not self._is_idle and not self._transport.is_closing():
                await asyncio.sleep(0.001)
            if self._transport.is_closing():
                break
            self._protocol.data_received(piece)
            await asyncio.sleep(0)
        if leave:
            self._transport.close()
        while tasks := set(self._state.tasks):
            if self._waits_for_body:
                self._transport.close()
            await asyncio.wait(tasks, timeout=None if self._transport.is_closing() else 0.05)
            await asyncio.sleep(0)  # what was pipelined begins
        self._transport.close()
        await asyncio.sleep(0)
        return bytes(self._transport.written)

    @property
    def _is_idle(self) -> bool:
        return not self._state.tasks

    @property
    def _waits_for_body(self) -> bool:
        cycle = self._protocol.cycle
        return bool(cycle) and cycle.more_body and not cycle.response_complete
