"""The HTTP server of an engine, in the engine's scheduler process.

The server implements the part of vLLM's ``/v1/completions`` that a router between prefill and
decode engines needs: token ids in, token ids out, ``kv_transfer_params`` in both directions. The
router converts between text and tokens. The server trusts every client that sends the API key;
without an API key, only the router may be able to reach the server.
"""

import asyncio
import logging
import socket
import time
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar, runtime_checkable

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvferry.cluster.engine_operations import EngineOperations, answered, unavailable
from kvferry.config import EngineConfig, shown, split_endpoint
from kvferry.engine.admission import NewRequest
from kvferry.engine.builder import build_engine
from kvferry.engine.engine import Engine, EngineStats
from kvferry.engine.loop import EngineLoop
from kvferry.engine.messages import EngineOutput, ModelName, SamplingParams, Temperature, TokenId
from kvferry.engine.ranks import rank_logger
from kvferry.engine.weights import load_model_config
from kvferry.errors import DrainingError, KVFerryError, StuckStepError
from kvferry.observe.records import TransferRecord
from kvferry.serving import web
from kvferry.serving.messages import EngineSettings, KVEventsPlace, Ready
from kvferry.serving.metrics import EngineMetrics, Records, RequestSummary
from kvferry.serving.openai import ApiError, StreamOptions, parse_body
from kvferry.serving.process import Reporter
from kvferry.zeromq import tcp_address

logger = logging.getLogger(__name__)

T = TypeVar("T")

REMEMBERED_REQUESTS = 4096
"""Number of ended requests that ``/kvferry/records`` reports."""
REMEMBERED_RECORDS = 65_536
"""Number of transfer records that ``/kvferry/records`` reports."""
MAX_ID_LENGTH = 256
"""Maximum length of a request id in characters."""
SNAPSHOT_WAIT_S = 1.0
"""Seconds for which ``/metrics`` and ``/kvferry/records`` wait for the end of a step; after that,
they answer with the last known values."""

#: Errors of the engine that the client can correct. All other errors are the server's fault, also
#: ticket errors: the router removes any ticket that a client sends.
_CLIENT_ERRORS = frozenset(
    {
        "ValueError",
        "TypeError",
        "RequestError",
        "OutOfBlocksError",
    }
)


class EngineRequestBody(SamplingParams, frozen=True, kw_only=True):
    """The body of ``POST /v1/completions`` at an engine."""

    prompt: list[TokenId]
    temperature: Temperature = 1.0
    stream: bool = False
    return_token_ids: bool = True
    """Accepted for compatibility with vLLM, and ignored: answers have ids and no text."""
    stream_options: StreamOptions | None = None
    """Accepted for compatibility with vLLM, and ignored: answers always have the usage."""
    kv_transfer_params: dict[str, Any] | None = None
    model: ModelName | None = None

    def sampling(self) -> SamplingParams:
        """The sampling parameters without the other fields."""
        return SamplingParams(
            **{name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        )


class TakeBackBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /kvferry/take_back``: a request whose answer has no reader, or the
    parameters of an answer that will not be used.
    """

    kv_transfer_params: dict[str, Any] = {}
    request_ids: Annotated[list[str], msgspec.Meta(max_length=16)] = []
    """Ids under which the request may have arrived; it may not have ended."""


class _Run:
    """A request in progress: passes the engine's outputs to the event loop."""

    def __init__(self, request_id: str, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.answer = EngineOutput(request_id=request_id)
        """All outputs of the engine so far, joined."""
        self.submitted: NewRequest
        """The request in the engine, from the submission on."""
        self.is_told = False
        """Whether the client was still connected when the end of the answer was sent."""
        self._loop = asyncio.get_running_loop()
        self._outputs: asyncio.Queue[EngineOutput] = asyncio.Queue()

    def on_output(self, output: EngineOutput) -> None:
        """Takes an output; called from the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._outputs.put_nowait, output)
        except RuntimeError:
            # The server has ended while the engine still steps: the output has no reader.
            if not self._loop.is_closed():
                raise

    async def next(self) -> EngineOutput:
        """Waits for the next output of the engine and returns it."""
        output = await self._outputs.get()
        # In place: a copy of all earlier tokens at each step would cost quadratic time.
        self.answer.token_ids.extend(output.token_ids)
        self.answer.gaps.extend(output.gaps)
        self.answer = msgspec.structs.replace(
            output, token_ids=self.answer.token_ids, gaps=self.answer.gaps
        )
        return output

    @property
    def is_over(self) -> bool:
        """Whether the engine has ended the request."""
        return self.answer.finish_reason is not None

    def usage(self) -> dict[str, object]:
        """The usage so far, in the format of OpenAI."""
        drawn = len(self.answer.token_ids)
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": drawn,
            "total_tokens": self.prompt_tokens + drawn,
            "prompt_tokens_details": {"cached_tokens": self.answer.num_cached_tokens},
        }

    def summary(self) -> RequestSummary:
        """The record of the request for ``/kvferry/records`` and the metrics."""
        answer = self.answer
        return RequestSummary(
            request_id=answer.request_id,
            prompt_tokens=self.prompt_tokens,
            token_ids=answer.token_ids,
            gaps=answer.gaps,
            finish_reason=answer.finish_reason or "abort",
            error=answer.error,
            num_cached_tokens=answer.num_cached_tokens,
            num_external_tokens=answer.num_external_tokens,
            timings=answer.timings,
        )


def api_error(name: str, message: str) -> ApiError:
    """The HTTP answer to an error that ended a request, by the error's class name."""
    status = 400 if name in _CLIENT_ERRORS else 503 if name == StuckStepError.__name__ else 500
    return ApiError(status, message, code=name)


class EngineServer:
    """The HTTP endpoints of an engine."""

    def __init__(
        self,
        engine: EngineLoop,
        *,
        name: str,
        kv_role: str,
        model_name: str,
        max_model_len: int,
        api_key: str | None = None,
        control: str | None = None,
        kv_events: KVEventsPlace | None = None,
        at_once: bool = False,
    ) -> None:
        """Holds the values that the endpoints report.

        Args:
            engine: the loop that runs the engine.
            name: name of the engine in the cluster file.
            kv_role: role of the engine in transfers.
            model_name: name of the model for clients.
            max_model_len: maximum length of a sequence in tokens.
            api_key: bearer token that clients must send; ``None`` for no check.
            control: ``host:port`` of the connector's control channel, if there is such a channel.
            kv_events: addresses of the engine's KV cache events, if the engine publishes events.
            at_once: whether the connector accepts requests with a ``transfer``.
        """
        self._engine = engine
        self._name = name
        self._kv_role = kv_role
        self._api_key = api_key
        self._control = control
        self._kv_events = kv_events
        self._at_once = at_once
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._bodies = web.BodyReader()
        self._metrics = EngineMetrics()
        self._transfers: deque[TransferRecord] = deque(maxlen=REMEMBERED_RECORDS)
        self._requests: deque[RequestSummary] = deque(maxlen=REMEMBERED_REQUESTS)
        self._stats: EngineStats | None = None
        self._overdue: asyncio.Task[None] | None = None

    def app(self) -> Starlette:
        """The ASGI application."""
        guarded = {
            "/v1/completions": (self._complete, "POST"),
            "/v1/models": (self._models, "GET"),
            "/kvferry/records": (self._tell_records, "GET"),
            "/kvferry/take_back": (self._take_back, "POST"),
        }
        routes = [
            Route(path, self._guarded(answer), methods=[method])
            for path, (answer, method) in guarded.items()
        ]
        for path, method, answer in EngineOperations(self._engine, self._bodies).routes():
            routes.append(Route(path, self._guarded(answer), methods=[method]))
        routes += [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/metrics", self._render_metrics),
        ]
        return Starlette(routes=routes, exception_handlers=web.EXCEPTION_HANDLERS)

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        async def endpoint(request: Request) -> Response:
            if self._api_key is not None:
                web.check_bearer(request, self._api_key, "this engine, KVFERRY_API_KEY")
            return await answer(request)

        return endpoint

    async def _complete(self, request: Request) -> Response:
        body = parse_body(EngineRequestBody, await self._bodies.json(request))
        request_id = request.headers.get("x-request-id") or f"cmpl-{uuid.uuid4().hex}"
        if not request_id.isprintable() or len(request_id) > MAX_ID_LENGTH:
            raise ApiError(
                400,
                f"x-request-id: {shown(request_id)} is not printable text of 1 to "
                f"{MAX_ID_LENGTH} characters",
            )
        run = self._submit(request_id, body, request.headers.get("traceparent", ""))
        # The first output is awaited before the status is sent. Therefore a request that fails at
        # once, for example because of a failed load, is never answered with status 200.
        try:
            first = await web.until_disconnect(request.receive, self._next(run))
        except BaseException:
            self._end(run)
            raise
        if body.stream:
            events = self._events(run, first)
            return web.EventStream(
                events, {"x-request-id": request_id}, on_end=lambda: self._end(run)
            )
        try:
            await web.until_disconnect(request.receive, self._rest(run))
            run.is_told = True
        finally:
            self._end(run)
        return web.json_response(self._reply(run, run.answer.token_ids, run.usage()))

    async def _next(self, run: _Run) -> EngineOutput:
        """Waits for the next output of a request.

        Raises:
            ApiError: the request failed.
        """
        output = await run.next()
        if output.finish_reason == "error":
            if self._engine.failure is not None:
                raise ApiError(503, output.error, code=output.error_type)
            raise api_error(output.error_type, output.error)
        if output.finish_reason == "abort":
            raise ApiError(500, "the engine aborted the request", code="aborted")
        return output

    async def _rest(self, run: _Run) -> None:
        while not run.is_over:
            await self._next(run)

    def _submit(self, request_id: str, body: EngineRequestBody, traceparent: str) -> _Run:
        run = _Run(request_id, len(body.prompt))
        try:
            run.submitted = self._engine.submit(
                request_id,
                body.prompt,
                body.sampling(),
                run.on_output,
                kv_transfer_params=body.kv_transfer_params,
                arrival=time.time(),  # now, since the engine's thread may take the request later
                traceparent=traceparent,
            )
        except KVFerryError as error:
            raise unavailable(error) from error
        return run

    def _end(self, run: _Run) -> None:
        """Ends a request: the client has the whole answer, or is gone."""
        if not run.is_over or (run.answer.kv_transfer_params and not run.is_told):
            self._engine.abort(run.submitted)  # not its id, which may be that of another request
        summary = run.summary()
        self._requests.append(summary)
        self._metrics.count(summary)

    async def _take_back(self, request: Request) -> Response:
        body = parse_body(TakeBackBody, await self._bodies.json(request))
        for request_id in body.request_ids:
            self._engine.abort(request_id)
        if params := body.kv_transfer_params:
            await answered(lambda: self._engine.call(lambda engine: engine.take_back(params)))
        return web.json_response({})

    async def _events(self, run: _Run, first: EngineOutput) -> AsyncGenerator[bytes, None]:
        output = first
        while True:
            if output.token_ids or run.is_over:
                # The first event of a stream also has the number of cached prompt tokens.
                usage = run.usage() if output is first else None
                yield web.sse_event(self._reply(run, output.token_ids, usage))
            if run.is_over:
                run.is_told = True
                break
            output = await self._next(run)
        yield web.sse_event({**self._head(run), "choices": [], "usage": run.usage()})
        yield web.SSE_DONE

    def _reply(
        self, run: _Run, token_ids: Sequence[int], usage: Mapping[str, object] | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "text": "",
            "token_ids": token_ids,
            "logprobs": None,
            "finish_reason": run.answer.finish_reason,
        }
        return {
            **self._head(run),
            "choices": [choice],
            "usage": usage,
            "kv_transfer_params": run.answer.kv_transfer_params,
        }

    def _head(self, run: _Run) -> dict[str, Any]:
        return {
            "id": run.answer.request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": self._model_name,
        }

    async def _models(self, _: Request) -> Response:
        return web.models_response(self._model_name, self._max_model_len)

    async def _health(self, _: Request) -> Response:
        failure = self._engine.failure
        if failure is not None:
            raise unavailable(failure)
        step = self._engine.step_state()
        told = {
            "engine": self._name,
            "step_age_s": round(step.age_s or 0.0, 3),
            "waiting_for_ranks": step.waiting_for,
            "kv_role": self._kv_role,
            "control": self._control,
            "kv_events": self._kv_events,
            "at_once": self._at_once,
            "drain": self._engine.admission.drain_state,
            "silent_peers": self._engine.silent_peers,
        }
        if step.is_stuck:
            stuck = ApiError(503, str(step), code=StuckStepError.__name__)
            return web.json_response({**stuck.body(), "status": "stuck", **told}, stuck.status)
        status = "paused" if self._engine.admission.is_paused else "ok"
        if self._engine.admission.drain_state is not None:
            status = "draining"
        return web.json_response({"status": status, **told})

    async def _ready(self, request: Request) -> Response:
        """Reports whether the engine accepts new requests; ``/health`` reports its health alone."""
        if self._engine.admission.drain_state is not None:
            raise unavailable(DrainingError("the engine is draining and takes no new requests"))
        return await self._health(request)

    async def _render_metrics(self, _: Request) -> Response:
        await self._refresh()
        text = self._metrics.render(
            self._stats,
            self._engine.step_state().age_s or 0.0,
            silent_peers=self._engine.silent_peers,
        )
        return Response(text, media_type="text/plain; version=0.0.4")

    async def _tell_records(self, _: Request) -> Response:
        await self._refresh()
        return web.json_response(
            Records(
                engine=self._name,
                transfers=list(self._transfers),
                requests=list(self._requests),
            )
        )

    async def _refresh(self) -> None:
        """Takes a snapshot; keeps the previous snapshot if the current step takes too long.

        Raises:
            ApiError: 503, the engine has ended.
        """
        # While a snapshot waits for a long step, no second snapshot is requested. The late snapshot
        # must still be processed, because the engine reports each record only once.
        task = self._overdue
        if task is None or task.done():
            task = asyncio.create_task(self._take_snapshot())
        done, _ = await asyncio.wait({task}, timeout=SNAPSHOT_WAIT_S)
        if done:
            await task
        else:
            self._overdue = task
            task.add_done_callback(lambda late: late.cancelled() or late.exception())

    async def _take_snapshot(self) -> None:
        records, stats = await answered(lambda: self._engine.call(_snapshot))
        self._stats = stats
        for record in records:
            self._transfers.append(record)
            self._metrics.count_transfer(record)


def _snapshot(engine: Engine) -> tuple[list[TransferRecord], EngineStats]:
    """The new records and the statistics; called on the engine's thread between two steps."""
    return engine.records(), engine.stats()


def run_engine(settings: EngineSettings, listener: socket.socket, report: Reporter) -> None:
    """Runs an engine and its HTTP server until SIGTERM or a fatal error of the engine.

    Raises:
        KVFerryError: the engine could not start, or could not continue.
    """
    config = settings.engine
    report.loading(f"starting {config.tp * config.pp} ranks", 0.2)
    with report.telling(rank_logger, "kvferry.layouts.compiled: "):
        engine = build_engine(
            config, settings.model_folder, dtype=settings.dtype, elsewhere=settings.elsewhere
        )
    failure = asyncio.run(_run(engine, settings, listener, report))
    if failure is not None:
        raise failure


@runtime_checkable
class _ListensForPeers(Protocol):
    """A scheduler half of a connector with a control channel."""

    @property
    def address(self) -> str:
        """``host:port`` at which peers reach the control channel."""


def _control_address(engine: Engine) -> str | None:
    """Address of the engine for ``kvferry status``; ``None`` if the connector does not listen."""
    connector = engine.connector
    if not isinstance(connector, _ListensForPeers):
        return None
    return connector.address


def _events_place(engine: Engine, config: EngineConfig) -> KVEventsPlace | None:
    """Addresses of the KV cache events that a router on any machine can reach."""
    events, told = config.kv_events, engine.events
    if events is None or told is None:
        return None
    return KVEventsPlace(
        endpoint=_reached(told.endpoint, events.endpoint, config.host),
        replay_endpoint=told.replay_endpoint
        and _reached(told.replay_endpoint, events.replay_endpoint or "", config.host),
        topic=events.topic,
        start=uuid.uuid4().hex,
    )


def _reached(endpoint: str, configured: str, host: str) -> str:
    """The endpoint with ``host`` if it listens on all addresses; else the endpoint unchanged."""
    if split_endpoint(configured)[0] != "*":
        return endpoint
    return tcp_address(host, split_endpoint(endpoint)[1])


async def _run(
    engine: Engine, settings: EngineSettings, listener: socket.socket, report: Reporter
) -> KVFerryError | None:
    """Serves until the end; returns the error if the engine ended by itself."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_failure(error: KVFerryError) -> None:
        logger.error("the engine cannot go on: %s", error)
        loop.call_soon_threadsafe(ended.set)

    model = load_model_config(settings.model_folder)
    control = _control_address(engine)
    engine_loop = EngineLoop.open(engine, on_failure)
    try:
        server = EngineServer(
            engine_loop,
            name=settings.engine.name,
            kv_role=settings.engine.transfer_config().kv_role,
            api_key=settings.api_key,
            control=control,
            kv_events=_events_place(engine, settings.engine),
            at_once=engine.connector is not None and engine.connector.takes_transfers,
            model_name=settings.model_name,
            max_model_len=min(settings.engine.max_model_len, model.max_position_embeddings),
        )
        report.send(Ready(control=control))
        await web.serve(server.app(), listener, ended)
    finally:
        await asyncio.to_thread(engine_loop.close)
    return engine_loop.failure
