"""The life of a request between a prefill and a decode engine.

The prefill engine computes the prompt and draws the first token, which is passed on at once. The
decode engine gets the prompt plus that token, loads their KV from the prefill engine, and draws
the rest. Where the first token is the last one, no decode engine is asked, and the prefill engine
is not asked to keep anything.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from kvferry.cluster import web
from kvferry.cluster.engines import (
    Engine,
    EngineDownError,
    EnginePool,
    Reply,
    Wording,
    completion_body,
)
from kvferry.cluster.openai import ApiError
from kvferry.engine.messages import SamplingParams

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
    "keep_first_token": True,
}
"""What asks a prefill engine to keep the prompt's KV for another engine. ``keep_first_token`` tells
it that its token counts: where that one ends the answer, nothing has to be kept."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of an answer."""

    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """``stop`` (the last token is a stop token) or ``length``, once it has ended."""
    cached_tokens: int = 0
    """Prompt tokens that the prefill engine already had; with the first token."""


class _StartAgainError(Exception):
    """The decode engine died with the lease in its hands: prefill anew."""


@dataclass(slots=True)
class _Life:
    """One request on its way; remembers what must not be tried or drawn again."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    drawn: list[int]
    prefill_tried: set[Engine]
    decode_tried: set[Engine]
    wording: Wording
    attempt: int = 1

    @property
    def engine_request_id(self) -> str:
        """The id for engines, new for each attempt: the old one may still hold blocks."""
        return self.request_id if self.attempt == 1 else f"{self.request_id}-try{self.attempt}"

    def body(self, max_tokens: int, kv_transfer_params: dict[str, Any] | None) -> dict[str, Any]:
        """An engine's request for the next ``max_tokens`` tokens."""
        sampling = msgspec.structs.replace(
            self.sampling, max_tokens=max_tokens, seed_offset=len(self.drawn)
        )
        prompt = (*self.prompt, *self.drawn)
        return completion_body(prompt, sampling, kv_transfer_params, self.wording)

    @property
    def tokens_left(self) -> int:
        return self.sampling.max_tokens - len(self.drawn)


@dataclass(frozen=True, slots=True)
class Lives:
    """Runs requests over the two pools."""

    prefill: EnginePool
    decode: EnginePool

    async def run(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        timeout_s: float,
        wording: Wording,
    ) -> AsyncGenerator[Delta, None]:
        """Yields the answer's tokens as they are drawn; must be consumed within one task.

        An engine that cannot be reached, or dies before its first token, is replaced by another.

        Raises:
            ApiError: the request is refused or failed, no engine is left, or time is up.
        """
        life = _Life(request_id, tuple(prompt), sampling, [], set(), set(), wording)
        deadline = asyncio.get_running_loop().time() + timeout_s
        steps = self._steps(life)
        async with aclosing(steps):
            while True:
                async with web.deadline(deadline, timeout_s):
                    delta = await anext(steps, None)
                if delta is None:
                    return
                yield delta

    async def _steps(self, life: _Life) -> AsyncGenerator[Delta, None]:
        while True:
            reply = await self._prefill(life)
            token = _only_token(reply)
            life.drawn.append(token)
            usage = reply.usage or {}
            details = usage.get("prompt_tokens_details") or {}
            cached = int(details.get("cached_tokens") or 0)
            stopped = reply.finish_reason == "stop"
            ended = stopped or life.tokens_left == 0
            yield Delta((token,), reply.finish_reason if ended else None, cached)
            if ended:
                return
            try:
                async with aclosing(self._decode(life, reply.kv_transfer_params)) as deltas:
                    async for delta in deltas:
                        yield delta
            except _StartAgainError:
                life.attempt += 1
                continue
            return

    async def _prefill(self, life: _Life) -> Reply:
        # With one token left nothing follows, so nothing has to be kept.
        keep = REMOTE_DECODE if life.tokens_left > 1 else None
        while True:
            engine = self.prefill.pick(life.prefill_tried)
            try:
                return await engine.complete(life.body(1, keep), life.engine_request_id)
            except EngineDownError:
                life.prefill_tried.add(engine)

    async def _decode(
        self, life: _Life, kv_transfer_params: dict[str, Any] | None
    ) -> AsyncGenerator[Delta, None]:
        while True:
            engine = self.decode.pick(life.decode_tried)
            body = life.body(life.tokens_left, kv_transfer_params)
            began = False
            try:
                async with aclosing(engine.stream(body, life.engine_request_id)) as replies:
                    async for reply in replies:
                        if reply.choices:
                            began = True
                            life.drawn.extend(reply.token_ids)
                            yield Delta(tuple(reply.token_ids), reply.finish_reason)
                return
            except EngineDownError as error:
                if began:
                    raise
                life.decode_tried.add(engine)
                if error.reached:
                    raise _StartAgainError from error


def _only_token(reply: Reply) -> int:
    if len(reply.token_ids) != 1:
        raise ApiError(
            502, f"a prefill engine returned {len(reply.token_ids)} tokens where one was asked for"
        )
    return reply.token_ids[0]
