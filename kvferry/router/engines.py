"""Engines as the router calls them: HTTP requests to an engine, and the engine's current work.

No code here depends on the reference engine: the fields on the wire are the fields of vLLM's
``/v1/completions`` (``return_token_ids``, ``kv_transfer_params``), plus ``seed_offset``.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from urllib.parse import quote

import msgspec

from kvferry.control.give_backs import WORD, WORD_BYTES
from kvferry.decoding import UNDECODED
from kvferry.errors import KVFerryError
from kvferry.observe.spans import RequestSpan
from kvferry.router import engine_client
from kvferry.router.apis import OTHER, Api
from kvferry.router.engine_client import (
    NO_HEAD,
    UNSENT,
    ClientError,
    EngineClient,
    KeptConnectionError,
    Response,
)
from kvferry.router.headers import Head
from kvferry.router.health import EngineHealth, Status, Told
from kvferry.router.pace import Pace
from kvferry.router.replies import (
    EngineDownError,
    EngineFailedError,
    EngineRefusedError,
    Forwarded,
    Refusal,
    Reply,
    beginning,
    code_of,
    error_in,
    is_stream,
    reason_of,
    status_of,
)
from kvferry.serving import web
from kvferry.serving.messages import Role
from kvferry.serving.openai import ApiError

NEW_CONNECTIONS_S = 60.0
"""Seconds of caution after an engine has closed a kept connection under a request. In this time,
requests that must not arrive twice use new connections."""
_OF_ERROR = [(b"content-type", b"application/json")]
"""Headers of the answer made of an error that was the first event of a stream."""
_KEY = secrets.token_bytes(32)
"""Key of this process for the words with which it gives loans back."""
_REST_S = 2.0
"""Seconds after which the rest of an answer that no caller reads any more is dropped."""


@dataclass(slots=True, eq=False)
class Engine:
    """One engine behind the router."""

    name: str
    url: str
    role: Role
    client: EngineClient
    pace: Pace = field(default_factory=Pace)
    """Current work of the engine, and its measured speed."""
    slot: int = 0
    """Slot of the engine's counts in the table shared by the router's processes."""
    health: EngineHealth = field(init=False)
    """Knowledge about the engine from its health checks."""
    _new_connections_until: float = 0.0
    """End of the time in :data:`NEW_CONNECTIONS_S`, in seconds on the monotonic clock."""
    _waits: set[asyncio.Timeout] = field(default_factory=set)
    """Timeouts of the requests without any answer yet."""
    _beside: set[asyncio.Task[None]] = field(default_factory=set)
    """Background tasks for which no caller waits."""

    def __post_init__(self) -> None:
        self.health = EngineHealth(self.name, self.url, self.role, self.client)

    @property
    def told(self) -> Told:
        """The engine's reports about itself."""
        return self.health.told

    @property
    def status(self) -> Status:
        """Whether the engine answers."""
        return self.health.status

    @property
    def needs_room(self) -> bool:
        """Whether the engine is an SGLang server, which works on a prompt only beside another
        engine, joined by a room.
        """
        return self.told.sglang is not None

    @property
    def outstanding(self) -> int:
        """Number of this router's requests at the engine."""
        return self.pace.requests.total

    @property
    def lent(self) -> int:
        """Number of this router's prompts whose KV the engine lends and no other engine has fetched
        yet.
        """
        return self.pace.lent.total

    @property
    def state(self) -> str:
        """``ready``, ``slow``, ``down``, ``draining``, or ``drained``. A drained engine can be
        ended without harm.

        For a server without reports about draining, only this router's requests count.
        """
        if self.health.is_staying:
            status = self.status
            return "ready" if status.healthy else "slow" if status.is_slow else "down"
        is_over = self.outstanding == self.lent == 0
        if self.told.drain is not None:
            is_over = is_over and self.told.drain.is_over
        elif self.status.lives and (self.told.tells_of_draining or not self.told.is_known):
            is_over = False  # not told to drain yet; others may use it
        return "drained" if is_over else "draining"

    @property
    def is_leaving(self) -> bool:
        """Whether an operator or a list has asked the router to send no new requests to the
        engine.
        """
        return self.health.is_leaving

    async def complete(
        self, body: Mapping[str, Any], request_id: str, span: RequestSpan, head: Head = NO_HEAD
    ) -> Reply:
        """Runs a completion, as a part of ``span``, and waits for the whole answer.

        Raises:
            EngineDownError: the engine cannot be reached, went away or answers 503.
            ApiError: the engine refused or failed the request.
        """
        async with self._working(span) as (_, trace):
            asked = {**body, "stream": False}
            response = await self._send("/v1/completions", asked, request_id, trace, head)
            try:
                content = await response.read()
            finally:
                response.close()
            await self._raise_for_status(response, content)
            reply = self._checked(content, response)
            if reply.error is not None:
                status = status_of(reply.error)
                raise await self._failure(status, reply.error, content, response.headers)
            return reply

    async def stream(
        self, body: Mapping[str, Any], request_id: str, span: RequestSpan, head: Head = NO_HEAD
    ) -> AsyncGenerator[Reply, None]:
        """Runs a completion, as a part of ``span``, and yields the chunks as they come.

        Raises:
            EngineDownError: the engine cannot be reached, went away or answers 503.
            ApiError: the engine refused or failed the request.
        """
        async with self._working(span) as (wait, trace):
            asked = {**body, "stream": True}
            response = await self._send("/v1/completions", asked, request_id, trace, head)
            began = ended = False
            try:
                if response.status != 200:
                    await self._raise_for_status(response, await response.read())
                async for payload in web.sse_payloads(response.lines()):
                    self._waits.discard(wait)
                    if payload == b"[DONE]":
                        ended = True
                        break
                    reply = self._checked(payload, response)
                    if (error := reply.error) is not None:
                        if not began:
                            raise await self._failure(status_of(error), error, payload, _OF_ERROR)
                        raise ApiError(500, self._attribute(error.message), code=code_of(error))
                    began = True
                    # The caller may stop after the finish reason.
                    ended = reply.finish_reason is not None
                    yield reply
                    ended = False
            finally:
                if ended:
                    self._go_on_with(self._read_rest(response))
                else:
                    response.close()
            if not ended:
                raise self.health.down("its stream broke off", reached=True)

    async def forward(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        request_id: str,
        span: RequestSpan,
        head: Head = NO_HEAD,
        method: str = "POST",
        *,
        once: bool = False,
        api: Api = OTHER,
    ) -> Forwarded:
        """Sends a body unchanged, as a part of ``span``, and waits for the first bytes of the
        answer, which may be a refusal; of a stream, for the first events that ``api`` names. The
        caller must close the answer. With ``once`` the request must not arrive twice.

        Raises:
            EngineDownError: the engine cannot be reached, went away, answers 503 or is not well.
            EngineFailedError: the engine failed the request and is well.
        """
        async with self._working(span) as (_, trace):
            response = await self._send(path, body, request_id, trace, head, method, once=once)
            try:
                if response.status >= 500:
                    await self._raise_for_status(response, await response.read())
                try:
                    first, error = await beginning(response, api.events)
                except ClientError as broken:
                    if not (api.breaks_off and is_stream(response)):
                        raise
                    failed = ApiError(500, f"its stream broke off: {reason_of(broken)}")
                    first, error = b"", msgspec.json.encode(failed.body())
                if error is not None:
                    said = error_in(error)
                    raise await self._failure(status_of(said), said, error, _OF_ERROR)
                return Forwarded(response, first, self.pace.requests, self.health.lost)
            except BaseException:
                response.close()
                raise

    def take_back(
        self,
        kv_transfer_params: Mapping[str, Any],
        request_id: str,
        otherwise: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Gives KV back to the engine, because no request will read it. Does not wait; never
        raises.

        Args:
            kv_transfer_params: the parameters that lend the KV; empty if they were not read.
            request_id: id of the request for which the engine lends KV, or would lend it.
            otherwise: what is done if the engine has not taken the KV back.
        """

        async def take_back() -> None:
            is_back = await self._take_back(kv_transfer_params, request_id)
            if not is_back and otherwise is not None:
                await otherwise()

        self._go_on_with(take_back())

    def let_end(self, work: asyncio.Task[Any]) -> None:
        """Cancels a task for which no caller waits, unless the task ends by itself in a moment:
        then its connection is kept.
        """
        self._go_on_with(_let_end(work))

    def _go_on_with(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a background task."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _take_back(self, kv_transfer_params: Mapping[str, Any], request_id: str) -> bool:
        """Returns whether the engine has taken the KV back."""
        if self.needs_room:
            return True  # an SGLang server frees KV together with the request that was given up
        ids = [request_id, request_id + engine_client.AGAIN]
        body = {"kv_transfer_params": kv_transfer_params, "request_ids": ids}
        with contextlib.suppress(ClientError, KVFerryError, TimeoutError):
            async with asyncio.timeout(engine_client.CONNECT_TIMEOUT_S):
                if self.told.hears_words:
                    taking = self.client.control.take_back(self.told.control, _word(request_id))
                    # Only an engine without the loan that a ticket names leaves it to others.
                    return await asyncio.wrap_future(taking) or "ticket" not in kv_transfer_params
                url = f"{self.url}/kvferry/take_back"
                response = await self.client.send(url, body, f"{request_id}-back", once=False)
                response.close()
                return response.status == 200
        return False

    async def aclose(self) -> None:
        """Ends all background tasks and health checks. A connection made after the client's end
        would stay open.
        """
        for task in self._beside:
            task.cancel()
        await asyncio.gather(*self._beside, self.health.aclose(), return_exceptions=True)

    async def _send(
        self,
        path: str,
        body: Mapping[str, Any] | bytes,
        request_id: str,
        traceparent: str,
        head: Head,
        method: str = "POST",
        *,
        once: bool = False,
    ) -> Response:
        # KV to load serves one request: an engine refuses the second arrival of the request.
        fields: Mapping[str, Any] = {} if isinstance(body, bytes) else body
        params = fields.get("kv_transfer_params") or {}
        if params.get("do_remote_decode") and self.told.hears_words:
            body = {**fields, "kv_transfer_params": {**params, WORD: _word(request_id).hex()}}
        # A transfer or a room stands for one computation: if one of two computations ended, the
        # other would lose the transfer.
        once = once or bool(
            params.get("do_remote_prefill")
            or "transfer" in params
            or "bootstrap_room" in fields
            or (params and self.role == "decode")
        )
        anew = once and time.monotonic() < self._new_connections_until
        try:
            response = await self.client.send(
                f"{self.url}{quote(path)}",
                body,
                request_id,
                once=once,
                new_connection=anew,
                traceparent=traceparent,
                method=method,
                head=head,
            )
        except KeptConnectionError as error:
            raise await self._dropped(str(error)) from error
        if response.status == 200 and self.told.is_known:
            self.health.up()
        return response

    async def _dropped(self, reason: str) -> EngineDownError:
        """The error for a request that must not arrive twice and may have arrived. If the engine
        answers a health check now, the request has not killed the engine.
        """
        self._new_connections_until = time.monotonic() + NEW_CONNECTIONS_S
        await self.health.probe_anew()
        if not self.status.healthy:
            return self.health.down(reason, reached=True)
        return self.health.error(f"a connection broke: {reason}", reached=True, is_well=True)

    @contextlib.asynccontextmanager
    async def _working(self, span: RequestSpan) -> AsyncIterator[tuple[asyncio.Timeout, str]]:
        """Counts a request as current work, as a part of ``span``.

        Yields:
            The request's timeout and the ``traceparent`` for the engine. :meth:`give_up` may end
            the request while its timeout is in ``_waits``.
        """
        self.pace.requests.add(1)
        wait = asyncio.timeout(None)
        self._waits.add(wait)
        try:
            with span.part(self.role, self.name) as traceparent:
                async with wait:
                    yield wait, traceparent
        except ClientError as error:  # before TimeoutError: some of these errors are both
            # If a request may be sent twice, only the errors in `UNSENT` prove that it never
            # arrived. But such a request holds no lease either.
            raise self.health.lost(error, reached=not isinstance(error, UNSENT)) from error
        except TimeoutError:
            raise self.health.error(self.status.last_error, reached=True) from None
        finally:
            self._waits.discard(wait)
            self.pace.requests.add(-1)

    def give_up(self) -> None:
        """Ends all requests without any answer yet: other engines may serve these requests."""
        for wait in self._waits:
            wait.reschedule(0.0)
        self._waits.clear()

    async def _raise_for_status(self, response: Response, content: bytes) -> None:
        if response.status != 200:
            error = error_in(content)
            raise await self._failure(response.status, error, content, response.headers)

    async def _failure(
        self, status: int, error: Refusal, content: bytes, headers: list[tuple[bytes, bytes]]
    ) -> ApiError:
        """The error for an answer that is an error from its beginning. Only the engine's health
        check shows whether a failure (5xx) concerns this request alone.
        """
        if status < 500:
            told = ApiError(status, error.message, code=code_of(error))
            if not self.told.is_ours:
                told.content, told.headers = content, headers
            return told
        await self.health.probe_anew()
        if not self.status.healthy:
            return self.health.down(error.message or f"says {status}", reached=True)
        if status == 503:
            return EngineRefusedError(self.health.title, error, content, headers)
        return EngineFailedError(self.health.title, status, error, content, headers)

    def _checked(self, payload: bytes, response: Response) -> Reply:
        try:
            own = None if self.told.is_ours else msgspec.json.decode(payload, type=dict[str, Any])
            reply = msgspec.convert(own, Reply) if own else msgspec.json.decode(payload, type=Reply)
            reply.own, reply.headers = own, response.headers
        except UNDECODED as error:
            raise ApiError(502, self._attribute(f"its answer does not decode: {error}")) from error
        return reply

    async def _read_rest(self, response: Response) -> None:
        """Reads the rest of an answer that no caller needs any more, to keep the connection."""
        try:
            with contextlib.suppress(ClientError, TimeoutError):
                async with asyncio.timeout(_REST_S):
                    await response.read()
        finally:
            response.close()

    def _attribute(self, message: str) -> str:
        """Adds the engine's name to the message of an engine's fault."""
        return f"{self.health.title}: {message}"


def _word(request_id: str) -> bytes:
    """The word with which this router gives back what a request lends."""
    return blake2b(request_id.encode(), key=_KEY, digest_size=WORD_BYTES).digest()


async def _let_end(work: asyncio.Task[Any]) -> None:
    with contextlib.suppress(Exception):  # no caller waits for the result or the error
        await asyncio.wait_for(work, _REST_S)
