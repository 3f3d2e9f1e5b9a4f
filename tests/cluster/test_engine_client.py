"""The router's client of its engines: names, credentials, and answers that are not HTTP."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from kvferry.router import engine_client
from kvferry.router.engine_client import ClientError, EngineClient, Response
from kvferry.router.engines import Engine
from kvferry.router.health import NOT_REACHED
from kvferry.testing.waiting import WAIT_S

Talk = Callable[[EngineClient, str, asyncio.Event], Awaitable[None]]


def run(talk: Talk, *said: bytes, headers: dict[str, str] | None = None) -> list[bytes]:
    """Talks with a server that gives each request the same answer, the next part of it whenever
    the event is set that the talk is given.

    Returns:
        The heads of the requests that it was sent.
    """
    heads: list[bytes] = []
    connections: list[Any] = []
    go_on = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.append(asyncio.current_task())
        try:
            while True:
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                if b"content-length: 2" in heads[-1].lower():
                    assert await reader.readexactly(2) == b"{}"
                writer.write(said[0])
                for part in said[1:]:
                    await go_on.wait()
                    go_on.clear()
                    writer.write(part)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def main() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        client = EngineClient(headers or {})
        try:
            await talk(client, f"127.0.0.1:{server.sockets[0].getsockname()[1]}", go_on)
        finally:
            await client.aclose()
            server.close()
            await asyncio.gather(*connections)

    asyncio.run(asyncio.wait_for(main(), WAIT_S))
    return heads


WELL = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
KEY = {"authorization": "Bearer key"}


@pytest.mark.parametrize("headers", [{}, KEY], ids=["no key", "key"])
def test_credentials_in_the_url_of_an_engine_count_more_than_the_key(
    headers: dict[str, str],
) -> None:
    async def talk(client: EngineClient, place: str, _: asyncio.Event) -> None:
        answer = await client.ask("GET", f"http://user:secret@{place}/health")
        assert answer.status == 200
        response = await client.send(f"http://user:secret@{place}/x", {}, "r", once=True)
        response.close()

    for head in run(talk, WELL, headers=headers):
        assert head.lower().count(b"authorization:") == 1
        assert b"Basic dXNlcjpzZWNyZXQ=" in head


def test_an_error_shows_no_credentials() -> None:
    async def talk(client: EngineClient, *_: Any) -> None:
        with pytest.raises(ClientError) as raised:
            await client.ask("GET", "http://user:secret@127.0.0.1:99999/health")
        assert "secret" not in str(raised.value)

    run(talk)


def test_a_name_that_nobody_resolves_in_time_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "CONNECT_TIMEOUT_S", 0.05)

    async def hangs(*_: Any, **__: Any) -> None:
        await asyncio.sleep(WAIT_S)

    async def talk(client: EngineClient, *_: Any) -> None:
        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hangs)
        with pytest.raises(engine_client.UNSENT):
            await client.ask("GET", "http://engine.example/health")
        with pytest.raises(engine_client.UNSENT):
            await client.send("http://engine.example/v1/completions", {}, "r", once=True)

    run(talk)


def test_a_whole_answer_that_comes_byte_by_byte_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "CONNECT_TIMEOUT_S", 0.2)

    dripping: list[Any] = []

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        dripping.append(asyncio.current_task())
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n")
        while not writer.is_closing():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(drip, "127.0.0.1", 0)
        client = EngineClient({})
        port = server.sockets[0].getsockname()[1]
        async with server, contextlib.aclosing(client):
            with pytest.raises(engine_client.SilentError):
                await client.ask("GET", f"http://127.0.0.1:{port}/health")
        await asyncio.gather(*dripping)

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_a_whole_answer_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_client, "MOST_ANSWER_BYTES", 1)

    async def talk(client: EngineClient, place: str, _: asyncio.Event) -> None:
        with pytest.raises(ClientError, match="its answer has more than 1 bytes"):
            await client.ask("GET", f"http://{place}/health")

    run(talk, WELL)


@pytest.mark.parametrize("deep", [b"%s", b'{"drain": %s}', b'{"x": %s}', b'{"data": [%s]}'])
def test_an_engine_whose_answers_are_nested_too_deeply_is_down(deep: bytes) -> None:
    content = deep % (b"[" * 100_000 + b"]" * 100_000)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)

    async def talk(client: EngineClient, place: str, _: asyncio.Event) -> None:
        engine = Engine("e", f"http://{place}", "prefill", client)
        await engine.health.probe()
        assert not engine.status.healthy
        assert engine.status.last_error != NOT_REACHED

    run(talk, answer)


BEGUN = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"


@pytest.mark.parametrize("wrong", [b"ZZ\r\nno chunk", b"3\r\nmore than that\r\n"])
@pytest.mark.parametrize("how", ["read", "chunks", "lines"])
def test_an_answer_that_ceases_to_be_http_is_not_waited_for(how: str, wrong: bytes) -> None:
    async def hear(response: Response) -> None:
        if how == "read":
            await response.read()
        else:
            async for _ in getattr(response, how)():
                pass

    async def talk(client: EngineClient, place: str, go_on: asyncio.Event) -> None:
        response = await client.send(f"http://{place}/v1/completions", {}, "r", once=True)
        go_on.set()
        with pytest.raises(ClientError):
            await hear(response)
        response.close()

    run(talk, BEGUN, wrong)


def test_a_kept_connection_is_watched_for_the_answer_under_way_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_client, "KEPT_S", WAIT_S)
    ends: list[Any] = []

    async def talk(client: EngineClient, place: str, go_on: asyncio.Event) -> None:
        for _ in range(3):
            response = await client.send(f"http://{place}/v1/completions", {}, "r", once=False)
            ends.append(response._ended)
            go_on.set()
            assert await response.read() == b"ok"
            response.close()
        assert not ends[0]._callbacks

    run(talk, WELL[:-2], WELL[-2:])
    assert len({id(end) for end in ends}) == 1, "it was kept"
