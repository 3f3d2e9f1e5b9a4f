"""Servers that close a kept connection at the moment at which the next request comes over it."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import httpx
import msgspec
import pytest

from kvferry.observe.spans import RequestSpan
from kvferry.router import engine_client
from kvferry.router.answer import TextCodec
from kvferry.router.engine_client import EngineClient
from kvferry.router.replies import EngineDownError
from kvferry.router.router import Router
from kvferry.serving import web
from kvferry.serving.messages import EngineAddress, Role, RouterSettings
from kvferry.serving.process import listen
from kvferry.testing.waiting import WAIT_S

ANSWER = {"choices": [{"text": "yes", "token_ids": [70], "finish_reason": "length"}]}


@dataclass
class Server:
    """Answers the first request of each connection, and closes it when a second one has come."""

    name: str
    answers: int = 1
    """Requests that it answers per connection."""
    is_mortal: bool = False
    """Whether it dies of the first POST that it does not answer."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    """Of the POSTs that it answered."""
    ids: list[str] = field(default_factory=list)
    lost: int = 0
    """POSTs that it closed the connection on."""
    port: int = 0
    _listening: asyncio.Server | None = None

    @property
    def prompts(self) -> list[dict[str, Any]]:
        """The completions that it answered."""
        return [body for body in self.bodies if "prompt" in body]

    async def start(self) -> asyncio.Server:
        self._listening = await asyncio.start_server(self.connected, "127.0.0.1", 0)
        self.port = self._listening.sockets[0].getsockname()[1]
        return self._listening

    async def connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            for _ in range(self.answers):
                await self._answer(*await _request(reader), writer)
            path, _, _ = await _request(reader)
            if path.endswith("completions"):
                self.lost += 1
                if self.is_mortal and self._listening is not None:
                    self._listening.close()
        except asyncio.IncompleteReadError:
            pass  # the router closed it
        finally:
            writer.close()

    async def _answer(
        self, path: str, request_id: str, content: bytes, writer: asyncio.StreamWriter
    ) -> None:
        reply: Any = ANSWER
        is_stream = False
        if path == "/v1/models":
            reply = {"data": [{"id": "big", "max_model_len": 512}]}
        elif content:
            body = msgspec.json.decode(content)
            self.bodies.append(body)
            self.ids.append(request_id)
            is_stream = body.get("stream", False)
            if body.get("kv_transfer_params", {}).get("do_remote_decode"):
                reply = {**ANSWER, "kv_transfer_params": {"ticket": len(self.prompts)}}
        text = web.sse_event(reply) + web.SSE_DONE if is_stream else msgspec.json.encode(reply)
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
    codec: TextCodec | None = None,
) -> None:
    """A conversation with a router in front of the two, which keeps a connection to each."""

    async def main() -> None:
        listening = [await prefill.start(), await decode.start()]
        servers: dict[Role, Server] = {"prefill": prefill, "decode": decode}
        addresses = tuple(
            EngineAddress(name=server.name, role=role, url=f"http://127.0.0.1:{server.port}")
            for role, server in servers.items()
        )
        router = Router(RouterSettings(engines=addresses, foreign=True, decode_only="never"), codec)
        transport = httpx.ASGITransport(router.app())
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as client:

            async def ask(**body: Any) -> httpx.Response:
                return await client.post("/v1/completions", json={"prompt": "Hi", **body})

            for engine in router.members:
                await engine.health.probe()  # two requests: the second one ends the connection
                await engine.health.probe()
            await talk(router, ask)
        await router.client.aclose()
        for server in listening:
            server.close()

    asyncio.run(asyncio.wait_for(main(), WAIT_S))


def test_requests_and_probes_on_connections_that_were_just_closed_succeed() -> None:
    prefill, decode = Server("p"), Server("d")

    async def talk(router: Router, ask: Ask) -> None:
        for _ in range(3):
            assert (await ask()).json() == ANSWER
            for engine in router.members:
                await engine.health.probe()
                assert engine.status.healthy, engine.status.last_error

    run(talk, prefill, decode)

    assert prefill.lost > 0, "no request came over a kept connection"
    assert len(prefill.prompts) == 4  # one for a ticket that may have been used


def test_a_request_that_is_sent_again_has_an_id_of_its_own() -> None:
    prefill, decode = Server("p"), Server("d", answers=9)

    async def talk(_: Router, ask: Ask) -> None:
        await ask()

    run(talk, prefill, decode)

    assert prefill.lost == 1
    assert prefill.ids == [f"{decode.ids[0]}-again"]


@pytest.mark.parametrize("takes_apart", [False, True])
def test_a_ticket_that_may_have_been_used_is_not_brought_again(
    takes_apart: bool, codec: TextCodec
) -> None:
    """It serves one request: the prompt is computed anew, and the engine is not to blame."""
    prefill, decode = Server("p"), Server("d")

    async def talk(router: Router, ask: Ask) -> None:
        for _ in range(3):
            response = await ask(**({"max_tokens": 3} if takes_apart else {}))
            assert response.status_code == 200
            assert response.json()["choices"][0]["finish_reason"] == "length"
            (engine,) = router.members.decode.engines
            assert engine.status.healthy

    run(talk, prefill, decode, codec if takes_apart else None)

    # After the first one its tickets go over new connections.
    assert decode.lost == 1
    tickets = [body["kv_transfer_params"]["ticket"] for body in decode.prompts]
    assert tickets == [2, 3, 4]


def test_a_transfer_that_may_have_been_heard_of_is_not_sent_again() -> None:
    """It stands for one computation: the end of one would deny it to the other."""
    prefill, decode = Server("p"), Server("d")

    async def talk(router: Router, _: Ask) -> None:
        params = {"do_remote_decode": True, "transfer": "t"}
        body = {"prompt": [1], "kv_transfer_params": params}
        (engine,) = router.members.prefill.engines
        with pytest.raises(EngineDownError) as raised:
            await engine.complete(body, "r", RequestSpan(None, "request", ""))
        assert raised.value.is_well

    run(talk, prefill, decode)

    assert (prefill.lost, prefill.prompts) == (1, [])


@pytest.mark.timed("The rest of a stream must be read within 0.05 s.")
@pytest.mark.parametrize("takes_apart", [False, True])
def test_tickets_go_over_kept_connections(takes_apart: bool, codec: TextCodec) -> None:
    prefill, decode = Server("p", answers=99), Server("d", answers=99)
    connected = 0

    async def talk(router: Router, ask: Ask) -> None:
        nonlocal connected
        make = decode.connected

        async def connects(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal connected
            connected += 1
            await make(reader, writer)

        decode.connected = connects  # type: ignore[method-assign]
        for _ in range(5):
            await ask(**({"max_tokens": 3} if takes_apart else {}))
            await asyncio.sleep(0.05)  # what is left of a stream is read meanwhile

    run(talk, prefill, decode, codec if takes_apart else None)

    assert [body["kv_transfer_params"]["ticket"] for body in decode.prompts] == [1, 2, 3, 4, 5]
    assert connected == 0


def test_an_engine_that_dies_of_a_ticket_on_a_kept_connection_is_to_blame() -> None:
    prefill, decode = Server("p"), Server("d", is_mortal=True)

    async def talk(router: Router, ask: Ask) -> None:
        response = await ask()
        assert response.status_code == 503
        assert not router.members.decode.engines[0].status.healthy

    run(talk, prefill, decode)

    assert decode.lost == 1
    assert not decode.prompts


def test_a_connection_that_was_closed_while_the_event_loop_looked_elsewhere_carries_nothing() -> (
    None
):
    """Though it must come once, it is sent again: nothing of it was sent before."""
    closed = threading.Event()
    heard = []

    def serve(listener: socket.socket) -> None:
        for _ in range(2):
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
            closed.set()

    async def main(url: str) -> None:
        client = EngineClient({})
        for number in range(2):
            response = await client.send(url, {"number": number}, f"r{number}", once=True)
            assert await response.read() == b"{}"
            closed.wait(WAIT_S)  # the event loop stands still
        await client.aclose()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve, args=(listener,), daemon=True)
        server.start()
        asyncio.run(main(f"http://127.0.0.1:{listener.getsockname()[1]}/"))
        server.join(WAIT_S)

    assert [request.rpartition(b"\r\n")[2] for request in heard] == [
        b'{"number":0}',
        b'{"number":1}',
    ]


def test_a_decode_request_without_a_ticket_is_sent_again() -> None:
    prefill, decode = Server("p"), Server("d")

    async def talk(_: Router, ask: Ask) -> None:
        assert (await ask(n=2)).json() == ANSWER

    run(talk, prefill, decode)

    assert decode.lost == 1


@pytest.mark.parametrize("kept", [False, True])
def test_a_server_that_closes_new_connections_too_has_failed(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = Server("p"), Server("d")
    if not kept:
        monkeypatch.setattr(engine_client, "KEPT_S", 0.0)

    async def talk(router: Router, ask: Ask) -> None:
        prefill.answers = 0
        response = await ask()
        assert response.status_code == 503
        assert not router.members.prefill.engines[0].status.healthy

    run(talk, prefill, decode)

    assert prefill.lost == (2 if kept else 1), "sent once too often, or not often enough"


def test_a_server_that_died_of_a_request_on_a_kept_connection_may_have_seen_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prefill, decode = Server("p"), Server("d")

    async def refuse(*_args: object, **_kwargs: object) -> None:
        raise aiohttp.ClientConnectorError(None, OSError("refused"))  # type: ignore[arg-type]

    async def talk(router: Router, _: Ask) -> None:
        monkeypatch.setattr(router.client.new, "request", refuse)  # its port is closed by now
        span = RequestSpan(None, "request", "")
        with pytest.raises(EngineDownError) as raised:
            await router.members.prefill.engines[0].complete({"prompt": [1]}, "r", span)
        assert raised.value.reached

    run(talk, prefill, decode)

    assert prefill.lost == 1


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_what_a_server_answers_never_waits_for_an_acknowledgement(host: str) -> None:
    """Head and body are sent one after the other."""
    with listen(host, 0, "router") as listener:
        with socket.create_connection(listener.getsockname()[:2]):
            accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
