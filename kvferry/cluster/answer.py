"""All choices of one client's request, run side by side and turned into text."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec

from kvferry.cluster.engines import Wording
from kvferry.cluster.life import Delta, Lives
from kvferry.cluster.openai import ApiError, Generation
from kvferry.cluster.text import TextCodec, TextStream


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """What one choice gained."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


class Answer:
    """The choices of one request; counts its tokens as they pass."""

    def __init__(
        self,
        request_id: str,
        prompts: Sequence[Sequence[int]],
        generation: Generation,
        *,
        lives: Lives,
        codec: TextCodec,
        timeout_s: float,
        wording: Wording,
    ) -> None:
        self.request_id = request_id
        self.prompt_tokens = sum(len(prompt) for prompt in prompts)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._prompts = prompts
        self._generation = generation
        self._lives = lives
        self._codec = codec
        self._timeout_s = timeout_s
        self._wording = wording

    def usage(self) -> dict[str, object]:
        """OpenAI's usage of what has passed so far: each prompt once, however many choices."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """News of all choices as they come. Closing it, or one choice's failure, ends them all.

        Raises:
            ApiError: the first failure of any choice.
        """
        queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue()
        count = len(self._prompts) * self._generation.n
        tasks = [asyncio.create_task(self._run(index, queue)) for index in range(count)]
        try:
            while count:
                news = await queue.get()
                if news is None:
                    count -= 1
                elif isinstance(news, Exception):
                    raise news
                else:
                    self.completion_tokens += len(news.token_ids)
                    yield news
        finally:
            for task in tasks:
                task.cancel()

    async def _run(
        self, index: int, queue: "asyncio.Queue[ChoiceDelta | Exception | None]"
    ) -> None:
        """One choice, in a task of its own; whatever happens ends up in the queue."""
        try:
            await self._choice(index, queue)
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    async def _choice(
        self, index: int, queue: "asyncio.Queue[ChoiceDelta | Exception | None]"
    ) -> None:
        place, sample = divmod(index, self._generation.n)
        prompt = self._prompts[place]
        sampling = self._generation.sampling
        if sampling.seed is not None:
            # Samples of one prompt under one seed would all be the same.
            sampling = msgspec.structs.replace(sampling, seed=sampling.seed + sample)
        only_one = len(self._prompts) * self._generation.n == 1
        request_id = self.request_id if only_one else f"{self.request_id}-{index}"
        text = self._codec.stream(self._generation.stop)
        run = self._lives.run(request_id, prompt, sampling, self._timeout_s, self._wording)
        async with aclosing(run) as deltas:
            async for delta in deltas:
                if sample == 0:
                    self.cached_tokens += delta.cached_tokens
                news = _absorb(index, delta, text)
                queue.put_nowait(news)
                if news.finish_reason is not None:
                    return
        raise ApiError(502, f"request {request_id}: the engine ended it without a finish_reason")


def _absorb(index: int, delta: Delta, text: TextStream) -> ChoiceDelta:
    pieces: list[str] = []
    taken = 0
    for token in delta.token_ids:
        taken += 1
        if delta.finish_reason == "stop" and taken == len(delta.token_ids):
            break  # the stop token ends the text and is no part of it
        pieces.append(text.push(token))
        if text.stopped:
            break
    if delta.finish_reason is not None:
        pieces.append(text.finish())
    finish_reason = "stop" if text.stopped else delta.finish_reason
    return ChoiceDelta(index, "".join(pieces), delta.token_ids[:taken], finish_reason)
