"""Servers that close a kept connection at the moment at which the next request comes over it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest

from kvferry.cluster.engines import EngineDownError
from kvferry.cluster.messages import EngineAddress, RouterSettings
from kvferry.cluster.router import Router
from kvferry.control.tracing import RequestSpan
from tests.cluster.conftest import WAIT_S

ANSWER = {"choices": [{"text": "yes"}]}


@dataclass
class Server:
    """Answers the first request of each connection, and closes it when a second one has come."""

    name: str
    answers: int = 1
    """Requests that it answers per connection."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of the POSTs that it answered."""
    ids: list[str] = field(default_factory=list)
    lost: int = 0
    """POSTs that it closed the connection on."""
    port: int = 0

    async def start(self) -> asyncio.Server:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        return server

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for _ in range(self.answers):
                await self._answer(*await _request(reader), writer)
            path, _, _ = await _request(reader)
            self.lost += path.endswith("completions")
        except asyncio.IncompleteReadError:
            pass  # the router closed it
        finally:
            writer.close()

    async def _answer(
        self, path: str, request_id: str, content: bytes, writer: asyncio.StreamWriter
    ) -> None:
        reply: Any = ANSWER
        if path == "/v1/models":
            reply = {"data": [{"id": "big", "max_model_len": 512}]}
        elif content:
            body = msgspec.json.decode(content)
            self.bodies.append(body)
            self.ids.append(request_id)
            if body.get("kv_transfer_params", {}).get("do_remote_decode"):
                reply = {"kv_transfer_params": {"ticket": len(self.bodies)}}
        text = msgspec.json.encode(reply)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(text), text))
        await writer.drain()


async def _request(reader: asyncio.StreamReader) -> tuple[str, str, bytes]:
    """Path, id and body of the next request."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    content = await reader.readexactly(int(headers.get("content-length", 0)))
    return head[0].split()[1], headers.get("x-request-id", ""), content


Ask = Callable[..., Awaitable[httpx.Response]]


def run(
    talk: Callable[[Router, Ask], Awaitable[None]],
    prefill: Server,
    decode: Server,
    *,
    kept: bool = True,
) -> None:
    """A conversation with a router in front of the two; it keeps a connection to each, or none."""

    async def main() -> None:
        listening = [await prefill.start(), await decode.start()]
        addresses = tuple(
            EngineAddress(name=server.name, role=role, url=f"http://127.0.0.1:{server.port}")
            for role, server in (("prefill", prefill), ("decode", decode))
        )
        router = Router(RouterSettings(engines=addresses, foreign=True, decode_only="never"), None)
        transport = httpx.ASGITransport(router.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:

            async def ask(**body: Any) -> httpx.Response:
                return await client.post("/v1/completions", json={"prompt": "Hi", **body})

            for engine in router.members:
                await engine.probe()  # two requests: the second one ends the connection
                if kept:
                    await engine.probe()
            await talk(router, ask)
        await router._client.aclose()
        for server in listening:
            server.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_requests_and_probes_on_connections_that_were_just_closed_succeed() -> None:
    prefill, decode = Server("p"), Server("d")

    async def talk(router: Router, ask: Ask) -> None:
        for _ in range(3):
            assert (await ask()).json() == ANSWER
            for engine in router.members:
                await engine.probe()
                assert engine.healthy, engine.last_error

    run(talk, prefill, decode)

    assert prefill.lost > 0, "no request came over a kept connection"
    assert len(prefill.bodies) == 3


def test_a_request_that_is_sent_again_has_an_id_of_its_own() -> None:
    prefill, decode = Server("p"), Server("d")

    async def talk(_: Router, ask: Ask) -> None:
        await ask()

    run(talk, prefill, decode)

    assert prefill.lost == 1
    assert prefill.ids == [f"{decode.ids[0]}-again"]


def test_a_ticket_never_goes_over_a_kept_connection() -> None:
    """It may have been used when the connection broke, and serves one request."""
    prefill, decode = Server("p"), Server("d")

    async def talk(_: Router, ask: Ask) -> None:
        for _ in range(3):
            await ask()

    run(talk, prefill, decode)

    assert decode.lost == 0
    tickets = [body["kv_transfer_params"]["ticket"] for body in decode.bodies]
    assert tickets == [1, 2, 3]


def test_a_decode_request_without_a_ticket_is_sent_again() -> None:
    prefill, decode = Server("p"), Server("d")

    async def talk(_: Router, ask: Ask) -> None:
        assert (await ask(n=2)).json() == ANSWER

    run(talk, prefill, decode)

    assert decode.lost == 1


@pytest.mark.parametrize("kept", [False, True])
def test_a_server_that_closes_new_connections_too_has_failed(kept: bool) -> None:
    prefill, decode = Server("p"), Server("d")

    async def talk(router: Router, ask: Ask) -> None:
        prefill.answers = 0
        response = await ask()
        assert response.status_code == 503
        assert not router.members.prefill.engines[0].healthy

    run(talk, prefill, decode, kept=kept)

    assert prefill.lost == (2 if kept else 1), "sent once too often, or not often enough"


def test_a_server_that_died_of_a_request_on_a_kept_connection_may_have_seen_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = Server("p"), Server("d")

    async def refuse(*_args: object, **_kwargs: object) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async def talk(router: Router, _: Ask) -> None:
        monkeypatch.setattr(router._client._new, "send", refuse)  # its port is closed by now
        span = RequestSpan(None, "request", "")
        with pytest.raises(EngineDownError) as raised:
            await router.members.prefill.engines[0].complete({"prompt": [1]}, "r", span)
        assert raised.value.reached

    run(talk, prefill, decode)

    assert prefill.lost == 1
