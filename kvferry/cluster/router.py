"""The router: OpenAI's API in front of prefill and decode engines.

It speaks plain HTTP to the engines and knows nothing of KV: the transfer parameters that a prefill
engine returns are handed to a decode engine as they are.

In front of foreign servers (vLLM's) it serves all that they serve. Completions that it understands
get their first token from the prefill engine; every other body is passed through as it is. So are
all chats: nobody but the server itself has its chat template and its parsers.
"""

import asyncio
import contextlib
import dataclasses
import signal
import socket
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.cluster import web
from kvferry.cluster.answer import Answer, ChoiceDelta, Shape, TextCodec
from kvferry.cluster.choice import Chooser
from kvferry.cluster.engine_client import EngineClient
from kvferry.cluster.headers import Head, put_on
from kvferry.cluster.lists import EngineList
from kvferry.cluster.members import Members, told
from kvferry.cluster.messages import RouterSettings
from kvferry.cluster.metrics import RouterMetrics, count_as_worker
from kvferry.cluster.openai import ApiError, Generation, parse_chat, parse_completion
from kvferry.cluster.pass_through import PassThrough
from kvferry.cluster.paths import without_transfer
from kvferry.cluster.prefill_decode import PrefillDecode
from kvferry.cluster.process import temporary_folder
from kvferry.cluster.relays import Relays
from kvferry.cluster.watch import ClusterWatch
from kvferry.cluster.workers import Leader, SharedListener, Workers, WorkerSettings, door
from kvferry.control.tracing import RequestSpan, Spans, checked_traceparent
from kvferry.engine.messages import SamplingParams
from kvferry.zeromq import join_address


class Router:
    """The router's endpoints and what they share."""

    def __init__(
        self,
        settings: RouterSettings,
        codec: TextCodec | None,
        lists: Sequence[EngineList] = (),
        spans: Spans | None = None,
        *,
        workers: Workers | None = None,
        leader: Leader | None = None,
    ) -> None:
        """Without a codec, which takes foreign engines, every request is passed through.

        ``lists`` name more engines than the settings, other ones from time to time. ``spans`` are
        made of every request, and become the router's own. A leader has ``workers``, and a worker
        has its ``leader``.
        """
        if codec is None and not settings.foreign:
            raise ValueError("codec: None, but only foreign engines can do without")
        self._settings = settings
        self._codec = codec
        self._spans = spans
        self._bodies = web.BodyReader(settings.max_request_bytes)
        self._client = EngineClient(web.bearer(settings.api_key))
        self._workers, self._leader = workers, leader
        shared = workers or leader
        self.members = members = Members(
            settings,
            self._client,
            lists,
            shared.table if shared is not None else None,
            follows=leader is not None,
        )
        """The engines that it knows."""
        folder = workers.folder if workers is not None else None
        self._metrics = RouterMetrics(members, members.index, folder)
        chooser = Chooser(
            members,
            self._metrics,
            settings.direct_tokens,
            settings.explain,
            settings.assume_cached and settings.route_by == "cost",
        )
        self._prefill_decode = PrefillDecode(
            members.prefill,
            members.decode,
            chooser,
            at_once=settings.at_once,
            key=settings.cluster_key,
        )
        self._pass_through = PassThrough(
            members.prefill,
            members.decode,
            settings.request_timeout_s,
            at_once=settings.at_once,
            key=settings.cluster_key,
        )
        judges = self._authorize, self._authorize_operator
        self._relays = Relays(self._pass_through, self._bodies, self._head, *judges)
        elsewhere = workers.requests if workers is not None else None
        self._watch = ClusterWatch(members, self._client, settings.curve, elsewhere)

    def app(self) -> Starlette:
        """The ASGI application; watches the engines' health while it runs."""
        routes = [
            Route("/v1/completions", self._generate(parse_completion), methods=["POST"]),
            Route("/v1/chat/completions", self._generate(parse_chat), methods=["POST"]),
            Route("/v1/models", self._models),
            *(self._relays.routes(self._counted) if self._settings.foreign else ()),
            *(self._leader.routes() if self._leader is not None else self._own_routes()),
        ]
        return Starlette(
            routes=routes, lifespan=self._lifespan, exception_handlers=web.EXCEPTION_HANDLERS
        )

    def _own_routes(self) -> list[Route]:
        """What a worker leaves to its leader."""
        return [
            Route("/health", self._health),
            Route("/metrics", self._render_metrics),
            *self.members.routes(
                self._authorize_reader, self._authorize_operator, self._tell_workers
            ),
            *self._watch.routes(self._authorize_reader),
        ]

    async def _tell_workers(self) -> None:
        if self._workers is not None:
            await self._workers.tell(self.members)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.members.watching())
            if self._leader is not None:
                followed = self._leader.followed(self.members, self._watch.last_requests)
                await stack.enter_async_context(followed)
            yield
            await self._watch.aclose()
        await self._client.aclose()
        if self._spans is not None:
            await asyncio.to_thread(self._spans.close)

    def _generate(self, parse: Callable[[dict[str, Any]], Generation]) -> Callable[[Request], Any]:
        async def generate(request: Request) -> Response:
            self._authorize(request)
            return await self._respond(request, await self._bodies.json(request), parse)

        return self._counted(generate)

    def _counted(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            try:
                response = await answer(request)
            except ApiError as error:
                self._metrics.requests.labels(str(error.status)).inc()
                self._count_error(error)
                raise
            self._metrics.requests.labels(str(response.status_code)).inc()
            return response

        return endpoint

    async def _respond(
        self, request: Request, body: dict[str, Any], parse: Callable[[dict[str, Any]], Generation]
    ) -> Response:
        await self.members.meet()
        if self._codec is not None and self._max_model_len() is None:
            await self.members.decode.pick()  # nobody has told yet whose words it understands
        head = self._head(request)
        understood = await self._understood(body, parse)
        if understood is None:
            span = self._span(request, head.new_id("kvferry"))
            words = without_transfer(body)
            return await self._pass_through.answer(request, _path(request), words, span, head)
        return await self._serve(request, head, *understood)

    async def _understood(
        self, body: dict[str, Any], parse: Callable[[dict[str, Any]], Generation]
    ) -> "tuple[Generation, list[Sequence[int]], TextCodec] | None":
        """What the router makes tokens of; ``None`` where servers must see the client's own words.

        Raises:
            ApiError: 400, engines of ours cannot serve it.
        """
        codec = self._codec
        if codec is not None and (not self._settings.foreign or self.members.are_ours):
            generation = parse(body)
            self._check_model(generation.model)
            everything = frozenset(SamplingParams.__struct_fields__)
            generation = dataclasses.replace(generation, named=everything, are_ours=True)
            prompts = await self._encode(generation, codec)
            return self._fit(generation, prompts), prompts, codec
        if codec is None or parse is not parse_completion or self._max_model_len() is None:
            return None
        try:
            generation = parse(body)
            prompts = await self._encode(generation, codec)
            generation = self._fit(generation, prompts)
        except ApiError:
            return None  # the servers serve it, or say better what is wrong
        sampling = generation.sampling
        # A seeded draw belongs to one server: another would begin its draws anew at the next token.
        is_greedy = sampling.temperature == 0
        if (sampling.seed is not None and not is_greedy) or (generation.n > 1 and is_greedy):
            return None  # vLLM refuses several greedy answers
        return generation, prompts, codec

    async def _serve(
        self,
        request: Request,
        head: Head,
        generation: Generation,
        prompts: list[Sequence[int]],
        codec: TextCodec,
    ) -> Response:
        span = self._span(request, head.new_id("chatcmpl" if generation.kind == "chat" else "cmpl"))
        answer = Answer(
            span.request_id,
            prompts,
            generation,
            engines=self._prefill_decode,
            codec=codec,
            timeout_s=self._settings.request_timeout_s,
            span=span,
            head=head,
        )
        shape = Shape(generation, answer.request_id, self._model_name(generation))
        headers = {"x-request-id": head.request_id or answer.request_id}
        deltas = self._measured(answer, span)
        if not generation.stream:
            count = len(prompts) * generation.n
            work = _collect(deltas, shape, answer, count)
            body = await web.until_disconnect(request.receive, work)
            response = web.json_response(body, headers=headers | self._why(answer))
            put_on(response, answer.words.headers)
            return response
        # The first delta is awaited here, so that an early failure still has its status code.
        try:
            first = await web.until_disconnect(request.receive, _next(deltas))
        except BaseException:
            await deltas.aclose()
            raise
        events = self._events(first, deltas, shape, answer)
        stream = web.EventStream(events, headers | self._why(answer))
        put_on(stream, answer.words.headers)
        return stream

    def _why(self, answer: Answer) -> dict[str, str]:
        """The header that says which engines were chosen, and why."""
        if not self._settings.explain or not answer.routes:
            return {}
        return {"x-kvferry-route": ", ".join(answer.routes[:_ROUTES])}

    async def _events(
        self,
        first: ChoiceDelta,
        deltas: AsyncGenerator[ChoiceDelta, None],
        shape: Shape,
        answer: Answer,
    ) -> AsyncGenerator[bytes, None]:
        async with aclosing(deltas):
            chunk = shape.chunk(first)
            if chunk is not None:
                yield web.sse_event(chunk)
            try:
                async for delta in deltas:
                    chunk = shape.chunk(delta)
                    if chunk is not None:
                        yield web.sse_event(chunk)
            except ApiError as error:
                self._count_error(error)
                raise
            if shape.generation.include_usage:
                yield web.sse_event(shape.usage_chunk(answer.usage(), answer.words))
            yield web.SSE_DONE

    def _span(self, request: Request, request_id: str) -> RequestSpan:
        """What is told of a client's request: a part of the client's trace, if it has one."""
        parent = checked_traceparent(request.headers.get("traceparent"))
        span = RequestSpan(self._spans, _path(request), parent, request_id=request_id)
        self._watch.requests.append(span)
        return span

    async def _measured(
        self, answer: Answer, span: RequestSpan
    ) -> AsyncGenerator[ChoiceDelta, None]:
        """The answer's deltas, counted and timed; the span ends with them."""
        began = time.monotonic()
        first = True
        self._metrics.prompt_tokens.inc(answer.prompt_tokens)
        try:
            async with aclosing(answer.deltas()) as deltas:
                async for delta in deltas:
                    if first:
                        self._metrics.first_token_s.observe(time.monotonic() - began)
                        first = False
                    self._metrics.completion_tokens.inc(len(delta.token_ids))
                    yield delta
            self._metrics.total_s.observe(time.monotonic() - began)
        except ApiError as error:
            span.end(str(error))
            raise
        finally:
            span.end()

    def _count_error(self, error: ApiError) -> None:
        self._metrics.errors.labels(error.code or str(error.status)).inc()

    def _authorize(self, request: Request) -> None:
        if self._settings.api_key is not None:
            web.check_bearer(request, self._settings.api_key, "this router, its api_key")

    def _authorize_reader(self, request: Request) -> None:
        """Whoever may change the engines may look at them too."""
        try:
            self._authorize(request)
        except ApiError:
            if self._settings.operator_key is None:
                raise
            self._authorize_operator(request)

    def _authorize_operator(self, request: Request) -> None:
        """Whoever may change the engines sees all prompts: a client's token is not enough, nor is
        it to reach the router, which clients of a proxy do as well.
        """
        if self._settings.operator_key is None:
            raise ApiError(
                403,
                "operator_key: this router has none, so its engines cannot be changed; start it "
                "with KVFERRY_OPERATOR_KEY, and show that key",
            )
        web.check_bearer(request, self._settings.operator_key, "this router, its operator_key")

    def _model_name(self, generation: Generation) -> str:
        return self._settings.model_name or generation.model or self._first_model() or ""

    def _first_model(self) -> str | None:
        return next((engine.model for engine in self.members if engine.model), None)

    def _max_model_len(self) -> int | None:
        """Tokens of the longest sequence that every engine takes, once one has told."""
        limits = [engine.max_model_len for engine in self.members if engine.max_model_len]
        return min(limits, default=None)

    def _check_model(self, model: str | None) -> None:
        name = self._settings.model_name
        if name is not None and model is not None and model != name:
            raise ApiError(
                404,
                f"model: {model!r} is not served here; {name!r} is",
                code="model_not_found",
                param="model",
            )

    async def _encode(self, generation: Generation, codec: TextCodec) -> list[Sequence[int]]:
        texts = [message["content"] for message in generation.messages]
        texts += [prompt for prompt in generation.prompts if isinstance(prompt, str)]
        longest = max(map(len, texts), default=0)
        limit = self._max_model_len()
        if limit and longest > limit * codec.longest_token:
            raise _too_long(generation, limit, f"the text has {longest} characters")
        if longest > _LONG_TEXT:
            # Others are served meanwhile.
            return await asyncio.to_thread(_encode, generation, codec)
        return _encode(generation, codec)

    def _fit(self, generation: Generation, prompts: Sequence[Sequence[int]]) -> Generation:
        """``generation`` with ``max_tokens`` filled in; refuses what cannot fit."""
        limit = self._max_model_len()
        longest = max(len(prompt) for prompt in prompts)
        wanted = generation.sampling.max_tokens
        if limit is None:
            if not wanted:  # how long the answer may be is theirs to say
                raise self.members.decode.nobody()
        elif longest + max(wanted, 1) > limit:
            asked = f" and max_tokens is {wanted}" if wanted and longest < limit else ""
            raise _too_long(generation, limit, f"the prompt has {longest}{asked}")
        else:
            wanted = wanted or limit - longest
        sampling = msgspec.structs.replace(generation.sampling, max_tokens=wanted)
        return dataclasses.replace(generation, sampling=sampling)

    def _head(self, request: Request) -> Head:
        """What of the request's head engines get."""
        return Head.of(request, self._settings.api_key, self._settings.operator_key)

    async def _models(self, request: Request) -> Response:
        self._authorize(request)
        await self.members.meet()
        if self._settings.foreign and self.members.decode.fit() and not self.members.are_ours:
            return await self._relays.ask_one(request)
        model: dict[str, Any] = {
            "id": self._settings.model_name or self._first_model(),
            "object": "model",
            "created": 0,
            "owned_by": "kvferry",
            "max_model_len": self._max_model_len(),
        }
        return web.json_response({"object": "list", "data": [model]})

    async def _health(self, _: Request) -> Response:
        prefill, decode = self.members.prefill, self.members.decode
        prefills, decodes = (bool(pool.fit() or pool.slow()) for pool in (prefill, decode))
        engines = [told(engine) for engine in self.members]
        able = decodes and (prefills or prefill.dispensable)
        status = "unavailable" if not able else "ok" if prefills else "decode_only"
        return web.json_response({"status": status, "engines": engines}, 200 if able else 503)

    async def _render_metrics(self, _: Request) -> Response:
        return Response(self._metrics.render(), media_type="text/plain; version=0.0.4")


def _path(request: Request) -> str:
    """The path that was routed: the URL is put together with a header that the client chooses."""
    path: str = request.scope["path"]
    return path


_ROUTES = 8
"""Choices of one request whose routes are told in its header."""
_LONG_TEXT = 100_000
"""Characters of a text that are tokenized beside the event loop: it takes longer than 10 ms."""


def _too_long(generation: Generation, limit: int, reason: str) -> ApiError:
    return ApiError(
        400,
        f"the longest sequence here is {limit} tokens, answer included; {reason}",
        code="context_length_exceeded",
        param="messages" if generation.kind == "chat" else "prompt",
    )


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
    deltas: AsyncGenerator[ChoiceDelta, None], shape: Shape, answer: Answer, count: int
) -> dict[str, Any]:
    gained: list[list[ChoiceDelta]] = [[] for _ in range(count)]
    async with aclosing(deltas):
        async for delta in deltas:
            gained[delta.index].append(delta)
    return shape.whole(
        [ChoiceDelta.joined(choice) for choice in gained], answer.usage(), answer.words
    )


# ---- processes -----------------------------------------------------------------------------------


async def serve_router(
    settings: RouterSettings,
    codec: TextCodec | None,
    lists: Sequence[EngineList],
    listener: socket.socket,
    stop: asyncio.Event,
) -> None:
    """Serves with as many workers as the settings say, until SIGTERM or until the event is set.

    Raises:
        WorkerDiedError: a worker ended before any has served.
    """
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    if settings.workers == 1:
        spans = Spans.from_environment("kvferry-router", _place(settings, listener))
        app = Router(settings, codec, lists, spans).app()
        await web.serve(app, listener, stop, settings.max_connections)
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-router-", dir=temporary_folder()) as folder:
        workers = Workers(settings, listener, Path(folder))
        router = Router(settings, codec, lists, workers=workers)
        inside, ended = socket.socket(socket.AF_UNIX), asyncio.Event()
        inside.bind(door(folder))
        serving = asyncio.create_task(web.serve(router.app(), inside, ended, ends_on_sigterm=False))
        try:
            await workers.run(router.members, stop)
        finally:
            ended.set()
            await serving


def serve_as_worker(settings: WorkerSettings) -> None:
    """Serves as a worker until SIGTERM, which it sends itself when its leader has gone."""
    count_as_worker(settings.number)
    mine, leader = settings.router, Leader(settings)
    codec = TextCodec.open(mine.model_folder) if mine.model_folder is not None else None
    with contextlib.closing(SharedListener(fileno=settings.listener)) as listener:
        place = f"{_place(mine, listener)}-{settings.number}"
        spans = Spans.from_environment("kvferry-router", place)
        app = Router(mine, codec, spans=spans, leader=leader).app()
        try:
            asyncio.run(web.serve(app, listener, None, mine.max_connections, takes_at_a_time=1))
        finally:
            leader.sweep()


def _place(settings: RouterSettings, listener: socket.socket) -> str:
    return join_address(settings.host, listener.getsockname()[1])
