"""Servers whose streams stand still until a test lets them go on, for each API with streams."""

import asyncio
import json
import threading
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"


def event(payload: dict[str, Any], name: str = "") -> bytes:
    """An event of a stream."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(payload)}\n\n".encode()


def typed(kind: str, **fields: Any) -> bytes:
    """An event that names its own type."""
    return event({"type": kind, **fields}, kind)


def piece(**fields: Any) -> bytes:
    """An event of a completion or a chat."""
    return event({"choices": [{"index": 0, "finish_reason": None, **fields}]})


FRAME: dict[str, list[bytes]] = {
    COMPLETIONS: [],
    CHAT: [piece(delta={"role": "assistant", "content": ""})],
    MESSAGES: [typed("message_start"), typed("content_block_start"), typed("ping")],
    RESPONSES: [
        typed("response.created", sequence_number=0),
        typed("response.output_item.added", sequence_number=1),
    ],
}
"""What each API sends before the first content."""
CONTENT = {
    COMPLETIONS: piece(text="a", token_ids=[97]),
    CHAT: piece(delta={"content": "a"}),
    MESSAGES: typed("content_block_delta", delta={"type": "text_delta", "text": "a"}),
    RESPONSES: typed("response.output_text.delta", delta="a", sequence_number=2),
}
"""A content of each API."""
END = {
    COMPLETIONS: piece(text="b", token_ids=[98], finish_reason="length") + b"data: [DONE]\n\n",
    CHAT: piece(delta={}, finish_reason="length") + b"data: [DONE]\n\n",
    MESSAGES: typed("message_stop"),
    RESPONSES: typed("response.completed", sequence_number=3),
}
"""The end of each API's streams."""


@dataclass
class Server:
    """Answers as a vLLM server does, up to a place at which it waits."""

    waits_after: str = "content"
    """``nothing``, ``frame`` or ``content``: what an answer has when the server waits."""
    torn: bytes = b""
    """Bytes of an event without its end, sent before the server waits."""
    waits_s: float | None = None
    """Seconds for which it waits; ``None``: until the test lets it go on."""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    goes_on: threading.Event = field(default_factory=threading.Event)

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", lambda _: Response()),
                Route("/v1/models", self._models),
                Route("/kvferry/take_back", lambda _: Response(), methods=["POST"]),
                Route("/{path:path}", self._answer, methods=["POST"]),
            ]
        )

    async def _models(self, _: Any) -> Response:
        return JSONResponse({"data": [{"id": "served", "max_model_len": 512}]})

    async def _answer(self, request: Any) -> Response:
        body, path = await request.json(), request.scope["path"]
        self.bodies.append(body)
        if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
            choice = {"index": 0, "text": "!", "token_ids": [33], "finish_reason": "length"}
            return JSONResponse({"choices": [choice], "kv_transfer_params": {"ticket": "t"}})
        if self.waits_after == "nothing" or not body.get("stream"):
            await self._wait()
        if not body.get("stream"):
            return JSONResponse({"said": "whole"})
        return StreamingResponse(self._events(path), media_type="text/event-stream")

    async def _events(self, path: str):
        for place, sent in (("frame", FRAME[path]), ("content", [CONTENT[path]])):
            for each in sent:
                yield each
            if self.waits_after == place:
                if self.torn:
                    yield self.torn
                await self._wait()
        yield END[path]

    async def _wait(self) -> None:
        if self.waits_s is not None:
            await asyncio.sleep(self.waits_s)
            return
        while not self.goes_on.is_set():
            await asyncio.sleep(0.01)
