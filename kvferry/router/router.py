"""The router: OpenAI's API in front of prefill and decode engines.

The router speaks plain HTTP to the engines and does not look into KV: the transfer parameters from
a prefill engine go to a decode engine unchanged.

In front of foreign servers (vLLM's, SGLang's) the router serves all their paths. Text completions
that the router can tokenize get their first token from the prefill engine; every other body passes
through unchanged. All chats pass through, because only the server itself has its chat template and
parsers. In front of SGLang servers every body passes through.
"""

import asyncio
import contextlib
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from kvferry.observe.spans import Spans
from kvferry.router.answer import TextCodec
from kvferry.router.apis import APIS
from kvferry.router.choice import Chooser
from kvferry.router.completions import Completions, Parse
from kvferry.router.draining import Drain
from kvferry.router.engine_client import EngineClient
from kvferry.router.hand_over import HandOver
from kvferry.router.headers import Keys
from kvferry.router.lists import EngineList
from kvferry.router.members import Members
from kvferry.router.metrics import Endpoint, RouterMetrics, count_as_worker
from kvferry.router.operators import Operators
from kvferry.router.pass_through import PassThrough
from kvferry.router.paths import SGLANGS, without_transfer
from kvferry.router.relays import Relays
from kvferry.router.watch import ClusterWatch
from kvferry.router.workers import Leader, SharedListener, Workers, WorkerSettings, door
from kvferry.serving import web
from kvferry.serving.messages import RouterSettings
from kvferry.serving.openai import parse_chat, parse_completion
from kvferry.serving.process import temporary_folder
from kvferry.zeromq import join_address

_PARSERS: Mapping[str, Parse] = {
    "/v1/completions": parse_completion,
    "/v1/chat/completions": parse_chat,
}
"""Path → parser of the bodies from which the router can make tokens itself."""


class Router:
    """Connects the parts that answer clients, operators and viewers of the cluster page."""

    def __init__(
        self,
        settings: RouterSettings,
        codec: TextCodec | None,
        lists: Sequence[EngineList] = (),
        spans: Spans | None = None,
        *,
        workers: Workers | None = None,
        leader: Leader | None = None,
        drain: Drain | None = None,
    ) -> None:
        """Makes a router. Without a codec, every request passes through.

        Args:
            settings: addresses, keys and limits of the router.
            codec: tokenizer and chat template of the model; ``None`` only for foreign engines.
            lists: sources of further engines, which change with time.
            spans: collector of the trace spans of all requests; the router becomes its owner.
            workers: the worker processes, for a leader.
            leader: the leader process, for a worker.
            drain: the end of this router; by default, the router never drains.

        Raises:
            ValueError: there is no codec, and the engines are not foreign.
        """
        if codec is None and not settings.foreign:
            raise ValueError("codec: None, but only foreign engines can do without")
        self._settings = settings
        self._keys = Keys(settings.api_key, settings.operator_key)
        self._leader = leader
        self.bodies = web.BodyReader(settings.max_request_bytes)
        """Reader of the clients' request bodies."""
        self.client = EngineClient(web.bearer(settings.api_key), settings.curve, settings.tls)
        """HTTP client for requests to the engines."""
        shared = workers or leader
        table = shared.table if shared is not None else None
        self.members = members = Members(
            settings, self.client, lists, table, follows=leader is not None
        )
        """The engines known to the router."""

        async def tell_workers() -> None:
            if workers is not None:
                await workers.tell(members)

        self._operators = Operators(members, self._keys, drain or Drain(), tell_workers)
        folder = workers.folder if workers is not None else None
        self._metrics = RouterMetrics(members, members.index, folder, members.queue)
        hand_over = HandOver(
            members.prefill,
            members.decode,
            at_once=settings.at_once,
            key=settings.cluster_key,
            lapsed=self._metrics.loans_lapsed.inc,
            queue=members.queue,
            waited=self._metrics.queue_s.observe,
        )
        patience = partial(web.Patience, settings.request_timeout_s, settings.idle_timeout_s)
        self._completions = None
        if codec is not None:
            assumes = settings.assume_cached and settings.route_by == "cost"
            chooser = Chooser(
                members, self._metrics, settings.direct_tokens, settings.explain, assumes
            )
            self._completions = Completions(
                settings, codec, members, hand_over, chooser, self._metrics, patience
            )
        self._pass_through = PassThrough(hand_over, patience, self._metrics.failed)
        self._relays = Relays(self._pass_through, self.bodies, self._keys, self._metrics)
        elsewhere = workers.requests if workers is not None else None
        self._watch = ClusterWatch(members, self.client, settings.curve, spans, elsewhere)

    def app(self) -> ASGIApp:
        """Makes the ASGI application, which watches the engines' health while it runs."""
        routes = [
            *(
                Route(path, self._generate(_PARSERS.get(path)), methods=["POST"])
                for path in (*APIS, SGLANGS)
                if path in _PARSERS or path == SGLANGS or self._settings.foreign
            ),
            Route("/v1/models", self._models),
            *(self._relays.routes() if self._settings.foreign else ()),
            *(self._leader.routes() if self._leader is not None else self._own_routes()),
        ]
        return self._operators.drain.around(
            Starlette(
                routes=routes, lifespan=self._lifespan, exception_handlers=web.EXCEPTION_HANDLERS
            ),
            self._metrics.answered_with,
        )

    async def serve(self, listener: socket.socket, takes_at_a_time: int | None = None) -> None:
        """Serves clients until the router has drained; the arguments are those of
        :func:`kvferry.serving.web.serve`.
        """
        await web.serve(
            self.app(),
            listener,
            self._operators.drain.over,
            self._settings.max_connections,
            takes_at_a_time=takes_at_a_time,
            ends_on_sigterm=False,
            refused=self._metrics.answered_with,
        )

    def _own_routes(self) -> list[Route]:
        """Routes that a worker leaves to its leader."""
        return [
            Route("/metrics", self._metrics.show),
            *self._operators.routes(),
            *self._watch.routes(self._keys),
        ]

    @contextlib.asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        async with contextlib.AsyncExitStack() as stack:
            await stack.enter_async_context(self.members.watching())
            if self._leader is not None:
                followed = self._leader.followed(self.members, self._watch.last_requests)
                await stack.enter_async_context(followed)
            yield
            await self._watch.aclose()
        await self.client.aclose()

    def _generate(self, parse: Parse | None) -> Endpoint:
        """The endpoint of a path; ``parse`` is ``None`` for a path whose bodies only servers
        understand.
        """

        async def generate(request: Request) -> Response:
            self._keys.check(request)
            body = await self.bodies.json(request)
            await self.members.meet()
            path = request.scope["path"]
            if path == SGLANGS and not self.members.have_sglang:
                raise self.members.no_sglang()
            if parse is not None and self._completions is not None:
                understood = await self._completions.understood(body, parse)
                if understood is not None:
                    head = self._keys.head(request)
                    kind = "chatcmpl" if parse is parse_chat else "cmpl"
                    span = self._watch.span(request, head.new_id(kind))
                    return await self._completions.answer(request, understood, span, head)
            head = self._keys.head(request)
            span, words = self._watch.span(request, head.new_id("kvferry")), without_transfer(body)
            return await self._pass_through.answer(request, path, words, span, head)

        return self._metrics.counted(generate)

    async def _models(self, request: Request) -> Response:
        self._keys.check(request)
        await self.members.meet()
        if self._settings.foreign and self.members.decode.fit() and not self.members.are_ours:
            return await self._relays.ask_one(request)
        name = self._settings.model_name or self.members.model
        if name is None:
            raise self.members.decode.nobody()
        return web.models_response(name, self.members.max_model_len)


# ---- processes -----------------------------------------------------------------------------------


async def serve_router(
    settings: RouterSettings,
    codec: TextCodec | None,
    lists: Sequence[EngineList],
    listener: socket.socket,
    drain: Drain,
) -> None:
    """Serves with the configured number of workers, until the router has drained: after SIGTERM, or
    when ``drain`` begins.

    Raises:
        WorkerDiedError: a worker ended before any worker has served.
    """
    loop, within_s = asyncio.get_running_loop(), settings.drain_timeout_s
    loop.add_signal_handler(signal.SIGTERM, drain.signalled, within_s)
    if settings.workers == 1:
        spans = Spans.from_environment("kvferry-router", _place(settings, listener))
        router = Router(settings, codec, lists, spans, drain=drain)
        await router.serve(listener)
        return
    with tempfile.TemporaryDirectory(prefix="kvferry-router-", dir=temporary_folder()) as folder:
        workers = Workers(settings, listener, Path(folder))
        router = Router(settings, codec, lists, workers=workers, drain=drain)
        inside, ended = socket.socket(socket.AF_UNIX), asyncio.Event()
        inside.bind(door(folder))
        serving = asyncio.create_task(web.serve(router.app(), inside, ended, ends_on_sigterm=False))
        try:
            await workers.run(router.members, drain)
        finally:
            ended.set()
            await serving


def serve_as_worker(settings: WorkerSettings) -> None:
    """Serves as a worker until SIGTERM, which drains; SIGINT ends the worker at once."""
    count_as_worker(settings.number)
    drain = Drain()
    mine, leader = settings.router, Leader(settings, drain)
    codec = TextCodec.open(mine.model_folder) if mine.model_folder is not None else None
    with contextlib.closing(SharedListener(fileno=settings.listener)) as listener:
        place = f"{_place(mine, listener)}-{settings.number}"
        spans = Spans.from_environment("kvferry-router", place)
        router = Router(mine, codec, spans=spans, leader=leader, drain=drain)

        async def serve() -> None:
            loop = asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGTERM, drain.begin, mine.drain_timeout_s)
            loop.add_signal_handler(signal.SIGINT, drain.cut)
            await router.serve(listener, takes_at_a_time=1)

        try:
            asyncio.run(serve())
        finally:
            leader.sweep()


def _place(settings: RouterSettings, listener: socket.socket) -> str:
    return join_address(settings.host, listener.getsockname()[1])
