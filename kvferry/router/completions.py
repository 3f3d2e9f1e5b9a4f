"""Requests that the router understands: text becomes token ids, and sampled tokens become text.

If the router does not understand a request, but foreign servers may, the request passes through
unchanged (:mod:`kvferry.router.pass_through`).
"""

import asyncio
import dataclasses
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvferry.engine.messages import SamplingParams
from kvferry.observe.spans import RequestSpan
from kvferry.router.answer import Answer, ChoiceDelta, Shape, TextCodec
from kvferry.router.choice import Chooser
from kvferry.router.engines import Engine
from kvferry.router.hand_over import HandOver
from kvferry.router.headers import Head
from kvferry.router.members import Members
from kvferry.router.metrics import RouterMetrics
from kvferry.router.queue import QueuePlace, priority_of
from kvferry.router.token_request import TokenRequest
from kvferry.serving import web
from kvferry.serving.messages import RouterSettings
from kvferry.serving.openai import ApiError, Generation, parse_completion

Parse: TypeAlias = Callable[[Mapping[str, Any]], Generation]
Understood: TypeAlias = tuple[Generation, list[Sequence[int]]]
"""A client's parsed request, and the token ids of each of its prompts."""

_ROUTES = 8
"""Maximum number of choices whose routes appear in the answer's header."""
_DEFAULTS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_p")
"""Fields that the router does not send, and for which a foreign server may have a default of its
own: a client that names the usual value has to reach the server."""
_LONG_TEXT = 100_000
"""Number of characters of all texts above which they are tokenized outside of the event loop:
tokenizing takes more than 10 ms."""


@dataclass(frozen=True, slots=True)
class Completions:
    """Answers completions and chats."""

    settings: RouterSettings
    codec: TextCodec
    members: Members
    hand_over: HandOver
    chooser: Chooser
    metrics: RouterMetrics
    patience: Callable[[], web.Patience]
    """Makes the time limits of an answer."""

    # ---- text to tokens ---------------------------------------------------------------------

    async def understood(self, body: Mapping[str, Any], parse: Parse) -> Understood | None:
        """Parses and tokenizes a body.

        Returns:
            The request and its token ids; ``None`` if servers must get the client's own body.

        Raises:
            ApiError: 400, kvferry engines cannot serve the body; 503, no engine has reported its
                limits.
        """
        if self.members.max_model_len is None:
            await self.members.decode.pick()  # no engine has reported its model yet
        if self.members.have_sglang:
            return None
        if not self.settings.foreign or self.members.are_ours:
            generation = parse(body)
            self._check_model(generation.model)
            everything = frozenset(SamplingParams.__struct_fields__)
            return await self._encoded(
                dataclasses.replace(generation, named=everything, are_ours=True)
            )
        if parse is not parse_completion or self.members.max_model_len is None:
            return None
        names_default = any(body.get(name) is not None for name in _DEFAULTS)
        # For a server, null means as many tokens as there is room for; no field means 16.
        if names_default or body.get("max_tokens", 0) is None:
            return None
        try:
            generation, prompts = await self._encoded(parse(body))
        except ApiError:
            return None  # the servers serve the body, or explain the error better
        sampling = generation.sampling
        # A seeded sequence of samples belongs to one server: another server would restart the
        # sequence at the next token.
        is_greedy = sampling.temperature == 0
        if (sampling.seed is not None and not is_greedy) or (generation.n > 1 and is_greedy):
            return None  # vLLM refuses several greedy answers
        return generation, prompts

    def _check_model(self, model: str | None) -> None:
        name = self.settings.model_name
        if name is not None and model is not None and model != name:
            message = f"model: {model!r} is not served here; {name!r} is"
            raise ApiError(404, message, code="model_not_found", param="model")

    async def _encoded(self, generation: Generation) -> Understood:
        """Tokenizes the prompts and fills in ``max_tokens``; refuses a request that cannot fit."""
        texts = [message["content"] for message in generation.messages]
        texts += [prompt for prompt in generation.prompts if isinstance(prompt, str)]
        longest = max(map(len, texts), default=0)
        limit = self.members.max_model_len
        if limit and longest > limit * self.codec.longest_token:
            raise _too_long(generation, limit, f"the text has {longest} characters")
        if sum(map(len, texts)) > _LONG_TEXT:
            # The event loop serves other requests meanwhile.
            prompts = await asyncio.to_thread(_encode, generation, self.codec)
        else:
            prompts = _encode(generation, self.codec)
        return self._fit(generation, max(map(len, prompts)), limit), prompts

    def _fit(self, generation: Generation, longest: int, limit: int | None) -> Generation:
        wanted = generation.sampling.max_tokens
        if limit is None:
            if not wanted:  # only engines know the limit
                raise self.members.decode.nobody()
        elif longest + max(wanted, 1) > limit:
            asked = f" and max_tokens is {wanted}" if wanted and longest < limit else ""
            raise _too_long(generation, limit, f"the prompt has {longest}{asked}")
        else:
            wanted = wanted or limit - longest
        sampling = msgspec.structs.replace(generation.sampling, max_tokens=wanted)
        return dataclasses.replace(generation, sampling=sampling)

    def _requests(
        self,
        generation: Generation,
        prompts: Sequence[Sequence[int]],
        span: RequestSpan,
        head: Head,
    ) -> list[TokenRequest]:
        """A request for each choice of each prompt."""
        died: set[Engine] = set()
        count = len(prompts) * generation.n
        priority = priority_of(head.headers, {})
        requests = []
        for index in range(count):
            nth, sample = divmod(index, generation.n)
            sampling = generation.sampling
            if sampling.seed is not None:
                # Samples of one prompt under the same seed would all be the same.
                seed = (sampling.seed + sample) % 2**63  # as large as a seed may be
                sampling = msgspec.structs.replace(sampling, seed=seed)
            requests.append(
                TokenRequest(
                    request_id=span.request_id + ("" if count == 1 else f"-{index}"),
                    died=died,
                    span=span,
                    head=head,
                    place=QueuePlace(priority),
                    prompt=tuple(prompts[nth]),
                    sampling=sampling,
                    generation=generation,
                    chooser=self.chooser,
                )
            )
        return requests

    # ---- tokens to text ---------------------------------------------------------------------

    async def answer(
        self, request: Request, understood: Understood, span: RequestSpan, head: Head
    ) -> Response:
        """Answers a client's request. ``span`` has the request's id, and ends with the answer.

        Raises:
            ApiError: before the first token, no engine is left, the request is refused, or time is
                up.
            ClientGoneError: the client disconnected before the first token.
        """
        generation, prompts = understood
        answer = Answer(
            self._requests(generation, prompts, span, head),
            generation,
            hand_over=self.hand_over,
            codec=self.codec,
            patience=self.patience,
        )
        model = self.settings.model_name or generation.model or self.members.model or ""
        shape = Shape(generation, span.request_id, model)
        deltas = self._measured(answer, span)
        response: Response
        if not generation.stream:
            work = _collect(deltas, shape, answer)
            response = web.json_response(await web.until_disconnect(request.receive, work))
        else:
            # The first delta is awaited here: an early failure can still have its own status code.
            try:
                first = await web.until_disconnect(request.receive, _next(deltas))
            except BaseException:
                await deltas.aclose()
                raise
            events = self._events(first, deltas, shape, answer)
            response = web.EventStream(events, failed=self.metrics.failed)
        response.headers["x-request-id"] = head.request_id or span.request_id
        if self.settings.explain and answer.routes:
            response.headers["x-kvferry-route"] = ", ".join(answer.routes[:_ROUTES])
        web.put_on(response, answer.words.headers)
        return response

    async def _measured(
        self, answer: Answer, span: RequestSpan
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """Yields the answer's deltas, with counts and times for the metrics; the span ends with the
        deltas.
        """
        began = time.monotonic()
        first = True
        self.metrics.prompt_tokens.inc(answer.prompt_tokens)
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    if first:
                        self.metrics.first_token_s.observe(time.monotonic() - began)
                        first = False
                    self.metrics.completion_tokens.inc(len(delta.token_ids))
                    yield delta
            self.metrics.total_s.observe(time.monotonic() - began)
        except ApiError as error:
            span.end(str(error))
            raise
        finally:
            span.end()

    async def _events(
        self,
        first: ChoiceDelta,
        deltas: AsyncGenerator[ChoiceDelta, None],
        shape: Shape,
        answer: Answer,
    ) -> AsyncGenerator[bytes, None]:
        delta: ChoiceDelta | None = first
        async with aclosing(deltas):
            while delta is not None:
                chunk = shape.chunk(delta)
                if chunk is not None:
                    yield web.sse_event(chunk)
                delta = await anext(deltas, None)
            if shape.generation.include_usage:
                yield web.sse_event(shape.usage_chunk(answer.usage(), answer.words))
            yield web.SSE_DONE


def _too_long(generation: Generation, limit: int, reason: str) -> ApiError:
    message = f"the longest sequence here is {limit} tokens, answer included; {reason}"
    param = "messages" if generation.kind == "chat" else "prompt"
    return ApiError(400, message, code="context_length_exceeded", param=param)


def _encode(generation: Generation, codec: TextCodec) -> list[Sequence[int]]:
    if generation.kind == "chat":
        try:
            return [codec.encode_chat(generation.messages)]
        except ValueError as error:
            raise ApiError(400, f"messages: {error}", param="messages") from error
    return [_encode_prompt(prompt, codec) for prompt in generation.prompts]


def _encode_prompt(prompt: str | tuple[int, ...], codec: TextCodec) -> Sequence[int]:
    if isinstance(prompt, str):
        return codec.encode(prompt)
    size = codec.vocab_size
    bad = next((token for token in prompt if not 0 <= token < size), None)
    if bad is not None:
        raise ApiError(
            400, f"prompt: token id {bad} is outside the vocabulary of {size}", param="prompt"
        )
    return prompt


async def _next(deltas: AsyncGenerator[ChoiceDelta, None]) -> ChoiceDelta:
    return await anext(deltas)


async def _collect(
    deltas: AsyncGenerator[ChoiceDelta, None], shape: Shape, answer: Answer
) -> dict[str, Any]:
    gained: list[list[ChoiceDelta]] = [[] for _ in range(answer.num_choices)]
    async with aclosing(deltas):
        async for delta in deltas:
            gained[delta.index].append(delta)
    return shape.whole(
        [ChoiceDelta.joined(choice) for choice in gained], answer.usage(), answer.words
    )
