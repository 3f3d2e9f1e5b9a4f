"""Engines as the router sees them: an HTTP address, a count of outstanding requests, a health.

Nothing here is particular to the reference engine: the fields on the wire are those of vLLM's
``/v1/completions`` (``return_token_ids``, ``kv_transfer_params``), plus ``seed_offset``.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import msgspec

from kvferry.cluster import engine_client, web
from kvferry.cluster.engine_client import (
    NO_HEAD,
    UNSENT,
    ClientError,
    EngineClient,
    KeptConnectionError,
    Response,
    SilentError,
)
from kvferry.cluster.headers import Head
from kvferry.cluster.messages import KVEventsPlace, Role, without_credentials
from kvferry.cluster.openai import ApiError
from kvferry.cluster.pace import Pace
from kvferry.cluster.prefixes import SentPrompts
from kvferry.config import printable
from kvferry.control.tickets import channel_address
from kvferry.control.tracing import RequestSpan
from kvferry.engine.loop import DrainState
from kvferry.errors import DrainingError, TransferError

PROBE_INTERVAL_S = 1.0
"""Seconds between two health checks of an engine."""
NEW_CONNECTIONS_S = 60.0
"""Seconds for which an engine that closes kept connections under requests is sent those that must
not come twice over new ones."""


class EngineDownError(ApiError):
    """An engine cannot be reached or went away; another one may serve the request."""

    def __init__(self, engine: str, reason: str, *, reached: bool, is_well: bool = False) -> None:
        self.reached = reached
        """Whether the engine may have seen the request."""
        self.is_well = is_well
        """Whether it answers others: only the connection broke."""
        super().__init__(503, f"{engine}: {reason}", code="engine_unavailable")


class EngineRefusedError(EngineDownError):
    """An engine answers 503 to a request, and that it is well to its health check: it does not take
    this request now, and another engine may.
    """

    def __init__(
        self, engine: str, error: "_Error", content: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        # A draining engine of ours has looked at nothing. A paused one of vLLM's has its connector
        # give back what the request was to load.
        super().__init__(engine, error.message, reached=error.code != DrainingError.__name__)
        self.code = _code(error) or self.code
        self.content, self.headers = content, headers


VLLM_LOAD_FAILED = "Internal server error"
"""All that a server of vLLM says of a load that failed under its policy ``fail``."""

NOT_REACHED = "not reached yet"
"""What there is to say of an engine before its first health check has ended."""

_REST_S = 1.0
"""Seconds in which an answer must end of which nobody wants to hear more."""
EVENT_END = b"\n\n"
"""What ends an event of a stream."""

# Characters of what an engine tells that are kept.
_NAME_LENGTH = 256
_REASON_LENGTH = 4096
_PEERS = 64
"""Silent peers of an engine that are kept."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Error(msgspec.Struct):
    message: str = ""
    code: int | str | None = None


class _Health(msgspec.Struct):
    """What an engine of ours tells with its health; other servers tell nothing."""

    drain: DrainState | msgspec.UnsetType | None = msgspec.UNSET
    kv_role: str | None = None
    control: str | None = None
    silent_peers: tuple[str, ...] = ()
    kv_events: KVEventsPlace | None = None
    at_once: bool = False


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """What the leader of a router with workers tells them of an engine; see :class:`Engine`."""

    slot: int
    name: str
    role: Role
    url: str
    control: str
    kv_events: KVEventsPlace | None
    kv_role: str | None
    at_once: bool
    is_ours: bool
    healthy: bool
    is_slow: bool
    last_error: str
    seen_at: float
    down_since: float
    max_model_len: int | None
    model: str | None
    is_leaving: bool
    tells_of_draining: bool
    drain: DrainState | None
    silent_peers: tuple[str, ...]


class Reply(msgspec.Struct):
    """A completion of an engine, whole or one chunk of it; unknown fields are ignored."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    error: _Error | None = None
    own: dict[str, Any] | None = None
    """All that a foreign engine says in it. This field and the next one are never the wire's."""
    headers: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)
    """What of the head of its answer is for the client."""

    @classmethod
    def ended(cls, finish_reason: str) -> "Reply":
        """The end of an answer, without another token."""
        return cls([_Choice([], finish_reason)])

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return (self.choices[0].token_ids or []) if self.choices else []

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, once it has."""
        return self.choices[0].finish_reason if self.choices else None

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that the engine had in its cache; ``None`` where it does not tell.
        vLLM's servers do so only with ``--enable-prompt-tokens-details``, or where they lend.
        """
        details = (self.usage or {}).get("prompt_tokens_details") or {}
        told = details.get("cached_tokens")
        if told is None:
            told = (self.kv_transfer_params or {}).get("remote_prefill_cached_tokens")
        return told if isinstance(told, int) else None

    def cached_or(self, expected: int) -> int:
        """The same, or what was expected where it does not tell."""
        told = self.cached_tokens
        return expected if told is None else told


class Forwarded:
    """An engine's answer to a body that was not taken apart; closed once its bytes are out."""

    def __init__(self, engine: "Engine", response: Response, first: bytes) -> None:
        self.status = response.status
        self.headers = response.headers
        """What of its head is for the client."""
        self.is_stream = response.content_type.startswith("text/event-stream")
        """Whether events come one after the other."""
        self._engine = engine
        self._response = response
        self._first = first
        self._open = True
        engine.pace.requests.add(1)

    async def has_failed(self, events: int) -> bool:
        """Whether it says that the engine failed: by its status, or in the first ``events`` of a
        stream, which are waited for.

        Raises:
            EngineDownError: the engine went away.
        """
        if not self.is_stream:
            return self.status >= 500
        try:
            while self._first.count(EVENT_END) < events and (more := await self._response.some()):
                self._first += more
        except ClientError as error:
            raise self._engine.down(_reason(error), reached=True) from error
        first = self._first.split(EVENT_END)[:events]
        return any(_said_error(event.removeprefix(b"data:")) is not None for event in first)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The answer as it comes.

        Raises:
            EngineDownError: the engine went away.
        """
        yield self._first
        try:
            async for chunk in self._response.chunks():
                yield chunk
        except ClientError as error:
            raise self._engine.down(_reason(error), reached=True) from error

    async def read(self) -> bytes:
        """All of it, and closes it.

        Raises:
            EngineDownError: the engine went away.
        """
        try:
            return self._first + await self._response.read()
        except ClientError as error:
            raise self._engine.down(_reason(error), reached=True) from error
        finally:
            self.close()

    def close(self) -> None:
        """Drops the connection, unless the answer was read; the engine then ends the request.

        Idempotent.
        """
        if self._open:
            self._open = False
            self._engine.pace.requests.add(-1)
            self._response.close()


@dataclass(slots=True, eq=False)
class Engine:
    """One engine behind the router."""

    name: str
    url: str
    role: Role
    client: EngineClient
    control: str = ""
    """``host:port`` of its control channel, where it is known; see :mod:`kvferry.cluster.watch`."""
    kv_events: KVEventsPlace | None = None
    """Where it publishes what its prefix cache holds, where it is known."""
    kv_role: str | None = None
    """What it told of itself, or an operator of it."""
    at_once: bool = False
    """Whether it can be sent a request at the same time as the other engine of a pair."""
    is_ours: bool = False
    """Whether it told that it is an engine of ours, and no foreign one."""
    pace: Pace = field(default_factory=Pace)
    """What it has under way, and how fast it was seen to be."""
    slot: int = 0
    """Which counts are its own, where processes share them."""
    sent: SentPrompts = field(default_factory=SentPrompts)
    """What it should have, where the router goes by that."""
    healthy: bool = False
    is_slow: bool = False
    """Whether it is not healthy only because its last health check was not answered in time. It
    took the connection, so it is not dead."""
    last_error: str = NOT_REACHED
    """Why it is not healthy."""
    max_model_len: int | None = None
    """Longest sequence in tokens, once it told."""
    model: str | None = None
    """The name of its (first) model, once it told."""
    down_since: float = field(default_factory=time.monotonic)
    """Since when it is not healthy, on the monotonic clock."""
    seen_at: float = 0.0
    """When it was last seen to be well, or not to be; on the monotonic clock."""
    is_leaving: bool = False
    """Whether this router sends it nothing new because somebody asked for that."""
    tells_of_draining: bool = False
    """Whether its health check tells of its draining, as that of an engine of ours."""
    drain: DrainState | None = None
    """What it told last of its draining; ``None`` unless it drains."""
    silent_peers: tuple[str, ...] = ()
    """Engines that did not answer it when it was last asked: it loads nothing from them."""
    new_connections_until: float = 0.0
    """See :data:`NEW_CONNECTIONS_S`; on the monotonic clock."""
    _waits: set[asyncio.Timeout] = field(default_factory=set)
    """Of requests for which it has sent nothing yet."""
    _probing: asyncio.Task[None] | None = None
    _beside: set[asyncio.Task[None]] = field(default_factory=set)
    """What is under way and nobody waits for."""
    _draining: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is told to drain, or not to: it hears both in their order."""

    async def complete(
        self, body: Mapping[str, Any], request_id: str, span: RequestSpan, head: Head = NO_HEAD
    ) -> Reply:
        """Runs a completion, as a part of ``span``, and waits for the whole of it.

        Raises:
            EngineDownError: it cannot be reached, went away or says 503.
            ApiError: it refused or failed the request.
        """
        async with self._working(span) as (_, trace):
            asked = {**body, "stream": False}
            response = await self._send("/v1/completions", asked, request_id, trace, head)
            try:
                content = await response.read()
            finally:
                response.close()
            await self._raise_for_status(response, content)
            return self._checked(content, response)

    async def stream(
        self, body: Mapping[str, Any], request_id: str, span: RequestSpan, head: Head = NO_HEAD
    ) -> AsyncGenerator[Reply, None]:
        """Runs a completion, as a part of ``span``, and yields its chunks as they come.

        Raises:
            EngineDownError: it cannot be reached, went away or says 503.
            ApiError: it refused or failed the request.
        """
        async with self._working(span) as (wait, trace):
            asked = {**body, "stream": True}
            response = await self._send("/v1/completions", asked, request_id, trace, head)
            ended = False
            try:
                if response.status != 200:
                    await self._raise_for_status(response, await response.read())
                async for payload in web.sse_payloads(response.lines()):
                    self._waits.discard(wait)
                    if payload == b"[DONE]":
                        ended = True
                        break
                    reply = self._checked(payload, response)
                    # Whoever has heard why it ended may want to hear no more.
                    ended = reply.finish_reason is not None
                    yield reply
                    ended = False
            finally:
                if ended:
                    self._go_on_with(self._read_rest(response))
                else:
                    response.close()
            if not ended:
                raise self.down("its stream broke off", reached=True)

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
    ) -> Forwarded:
        """Sends a body as it is, and waits for the first bytes of the answer, which may be a
        refusal: a part of ``span``. The caller closes it. With ``once`` it must not come twice.

        Raises:
            EngineDownError: it cannot be reached, went away or says 503.
        """
        async with self._working(span) as (_, trace):
            response = await self._send(path, body, request_id, trace, head, method, once=once)
            try:
                if response.status == 503:
                    await self._raise_for_status(response, await response.read())
                return Forwarded(self, response, await response.some())
            except BaseException:
                response.close()
                raise

    def take_back(self, kv_transfer_params: Mapping[str, Any], request_id: str) -> None:
        """Tells it, without waiting, that nobody will use what it lent; never raises."""
        self._go_on_with(self._take_back(kv_transfer_params, request_id))

    def let_end(self, work: asyncio.Task[Any]) -> None:
        """Ends what nobody waits for any more, unless it ends by itself in a moment, so that its
        connection is kept.
        """
        self._go_on_with(_let_end(work))

    def _go_on_with(self, work: Coroutine[Any, Any, None]) -> None:
        """Does what nobody waits for."""
        task = asyncio.create_task(work)
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)

    async def _take_back(self, kv_transfer_params: Mapping[str, Any], request_id: str) -> None:
        body = {"kv_transfer_params": kv_transfer_params}
        # An engine that is gone has no leases left; another kind of server lets them expire.
        with contextlib.suppress(ClientError, TimeoutError):
            async with asyncio.timeout(engine_client.CONNECT_TIMEOUT_S):
                url = f"{self.url}/kvferry/take_back"
                response = await self.client.send(url, body, request_id, once=False)
                response.close()

    async def probe(self) -> None:
        """Asks for its health, and the first time for its longest sequence. Never raises."""
        try:
            response = await self.client.ask("GET", f"{self.url}/health")
            if response.status != 200:
                said = _error_in(response.content).message
                self.down(said or f"its health check says {response.status}", reached=True)
                return
            if not self._take_in(_health_in(response.content)):
                return
            if self.max_model_len is None:
                models = await self.client.ask("GET", f"{self.url}/v1/models")
                model = msgspec.json.decode(models.content)["data"][0]
                max_model_len = int(model["max_model_len"])
                if max_model_len < 1:  # it would limit the requests of all others
                    raise ValueError(f"{max_model_len} is less than 1")
                self.model = printable(str(model["id"])[:_NAME_LENGTH])
                self.max_model_len = max_model_len
        except SilentError:
            self.down(
                f"it has not answered for {engine_client.CONNECT_TIMEOUT_S:g} s", reached=False
            )
            self.is_slow = True
        except ClientError as error:
            self.down(_reason(error), reached=False)
        except RecursionError:
            self.down("what it tells of itself is nested too deeply", reached=True)
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            self.down(f"its /v1/models does not name a max_model_len ({error!r})", reached=True)
        else:
            self.up()

    def _take_in(self, health: _Health) -> bool:
        """Notes what it told; whether it can do what it is here for."""
        self.tells_of_draining = health.drain is not msgspec.UNSET
        drain = None if health.drain is msgspec.UNSET else health.drain
        if self.drain is not None and drain is None:
            self.is_leaving = False  # it was started again, or somebody wants it back
        self.drain = drain
        if health.control and _is_place(health.control):
            self.control = health.control
        self.is_ours = health.kv_role is not None
        # A foreign one tells nothing; an operator has named its channel, which only kvferry has.
        self.at_once = health.at_once or (not self.is_ours and bool(self.control))
        if health.kv_role is not None:  # it is one of ours, and tells all that there is
            self.kv_role, self.kv_events = health.kv_role, health.kv_events
        self.silent_peers = tuple(
            printable(peer[:_NAME_LENGTH]) for peer in health.silent_peers[:_PEERS]
        )
        wanted = "kv_producer" if self.role == "prefill" else "kv_consumer"
        if health.kv_role in (None, "kv_both", wanted):
            return True
        self.down(
            f"its kv_role is {health.kv_role!r}; a {self.role} engine needs {wanted} or kv_both",
            reached=True,
        )
        return False

    def follow(self, told: EngineState) -> None:
        """Takes over what the leader of this worker tells of it; of its health, what is newer."""
        self.control, self.kv_events, self.kv_role = told.control, told.kv_events, told.kv_role
        self.at_once, self.is_ours = told.at_once, told.is_ours
        self.model = told.model or self.model
        self.max_model_len = told.max_model_len or self.max_model_len
        self.is_leaving, self.drain = told.is_leaving, told.drain
        self.tells_of_draining, self.silent_peers = told.tells_of_draining, told.silent_peers
        if told.seen_at <= self.seen_at:
            return  # this worker's own requests know better
        if self.healthy and not told.healthy:
            self.sent.forget()
        self.healthy, self.is_slow, self.last_error = told.healthy, told.is_slow, told.last_error
        self.seen_at, self.down_since = told.seen_at, told.down_since

    @property
    def outstanding(self) -> int:
        """Requests that it works on for this router."""
        return self.pace.requests.total

    @property
    def lent(self) -> int:
        """Prompts of this router that it computed, and no decode engine has fetched yet."""
        return self.pace.lent.total

    @property
    def lends(self) -> bool:
        """Whether it may be asked for what is cached of a prompt."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def borrows(self) -> bool:
        """Whether it may load what another engine lends."""
        return self.kv_role in ("kv_consumer", "kv_both")

    @property
    def is_new(self) -> bool:
        """Whether no health check of it has ended yet."""
        return self.last_error == NOT_REACHED

    @property
    def is_staying(self) -> bool:
        """Whether it is not about to leave."""
        return not self.is_leaving and self.drain is None

    @property
    def lives(self) -> bool:
        """Whether it answers, or at least takes connections."""
        return self.healthy or self.is_slow

    @property
    def down_s(self) -> float:
        """Seconds for which it has not been healthy."""
        return 0.0 if self.healthy else time.monotonic() - self.down_since

    @property
    def shown_url(self) -> str:
        """Where it is, for everybody to see."""
        return without_credentials(self.url)

    @property
    def state(self) -> str:
        """``ready``, ``slow``, ``down``, ``draining``, or ``drained``: it can be ended, and harms
        nobody.

        Of a server that tells nothing of its draining we know what we have given it.
        """
        if self.is_staying:
            return "ready" if self.healthy else "slow" if self.is_slow else "down"
        is_over = self.outstanding == self.lent == 0
        if self.drain is not None:
            is_over = is_over and self.drain.is_over
        elif self.tells_of_draining and self.lives:
            is_over = False  # it has not been told yet, and others may use it
        return "drained" if is_over else "draining"

    async def leave(self) -> None:
        """Gives it nothing new, and tells it to take nothing new from others either."""
        self.is_leaving = True
        await self.remind()

    async def remind(self) -> None:
        """Tells it to drain, if it is about to leave and has not said that it drains."""
        async with self._draining:
            if self.is_leaving and self.drain is None:
                await self._tell_of_draining("POST")

    async def resume(self) -> None:
        """Undoes :meth:`leave`."""
        self.is_leaving = False
        async with self._draining:
            if not self.is_leaving:
                await self._tell_of_draining("DELETE")

    async def _tell_of_draining(self, method: str) -> None:
        # Other servers than ours do not know what that means; one that is gone has left.
        with contextlib.suppress(ClientError):
            await self.client.ask(method, f"{self.url}/kvferry/drain")
            await self._probe_anew()

    @contextlib.contextmanager
    def lending(self) -> Iterator[None]:
        """While a prompt that it computed is not fetched."""
        self.pace.lent.add(1)
        try:
            yield
        finally:
            self.pace.lent.add(-1)

    def probing(self) -> asyncio.Task[None]:
        """The probe under way, or a new one."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self.probe())
        return self._probing

    async def _probe_anew(self) -> None:
        """Waits for a probe that begins now: one under way may have asked too early."""
        if self._probing is not None:
            await asyncio.wait((self._probing,))
        await asyncio.wait((self.probing(),))  # others wait for it too: it is not cancelled

    async def aclose(self) -> None:
        """Asks and tells it nothing more: a connection made after the client's end stays open."""
        tasks = [*self._beside, *([self._probing] if self._probing is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

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
        # What an engine is told to load serves one request: brought twice, it is refused.
        params = {} if isinstance(body, bytes) else body.get("kv_transfer_params") or {}
        # A transfer stands for one computation: the end of one would deny it to the other.
        once = once or bool(
            params.get("do_remote_prefill")
            or "transfer" in params
            or (params and self.role == "decode")
        )
        anew = once and time.monotonic() < self.new_connections_until
        try:
            response = await self.client.send(
                f"{self.url}{quote(path)}",
                body,
                request_id,
                once=once,
                anew=anew,
                traceparent=traceparent,
                method=method,
                head=head,
            )
        except KeptConnectionError as error:
            raise await self._dropped(str(error)) from error
        if response.status == 200:
            self.up()
        return response

    async def _dropped(self, reason: str) -> EngineDownError:
        """The error to raise for a request that must not come twice, and may have come: an engine
        that answers a health check now has not died of it.
        """
        self.new_connections_until = time.monotonic() + NEW_CONNECTIONS_S
        await self._probe_anew()
        if not self.healthy:
            return self.down(reason, reached=True)
        return self._error(f"a connection broke: {reason}", reached=True, is_well=True)

    @contextlib.asynccontextmanager
    async def _working(self, span: RequestSpan) -> AsyncIterator[tuple[asyncio.Timeout, str]]:
        """A request under way, which :meth:`give_up` may end while its wait is among ours; gives
        that, and the ``traceparent`` for the engine.
        """
        self.pace.requests.add(1)
        wait = asyncio.timeout(None)
        self._waits.add(wait)
        try:
            with span.part(self.role, self.name) as traceparent:
                async with wait:
                    yield wait, traceparent
        except ClientError as error:  # before TimeoutError, which some of them are as well
            # Of a request that may be sent twice an error proves nothing more than `UNSENT`, but
            # it holds no lease either.
            raise self.down(_reason(error), reached=not isinstance(error, UNSENT)) from error
        except TimeoutError:
            raise self._error(self.last_error, reached=True) from None
        finally:
            self._waits.discard(wait)
            self.pace.requests.add(-1)

    def up(self) -> None:
        """Notes that it has just answered well."""
        self.healthy = True
        self.is_slow = False
        self.last_error = ""
        self.seen_at = time.monotonic()

    def down(self, reason: str, *, reached: bool) -> EngineDownError:
        """Notes that it is not healthy; returns the error to raise."""
        self.seen_at = time.monotonic()
        if self.healthy:
            self.down_since = self.seen_at
        self.healthy = False
        self.is_slow = False
        self.sent.forget()
        self.last_error = printable(reason[:_REASON_LENGTH], keep="\n")
        return self._error(self.last_error, reached=reached)

    def _error(self, reason: str, *, reached: bool, is_well: bool = False) -> EngineDownError:
        name = f"{self.role} engine {self.name!r}"
        return EngineDownError(name, reason, reached=reached, is_well=is_well)

    def give_up(self) -> None:
        """Ends all requests for which it has sent nothing yet: other engines may serve them."""
        for wait in self._waits:
            wait.reschedule(0.0)
        self._waits.clear()

    async def _raise_for_status(self, response: Response, content: bytes) -> None:
        status = response.status
        if status == 200:
            return
        error = _error_in(content)
        if status == 503:
            await self._probe_anew()  # whether that concerns this request alone only it can say
            if self.healthy:
                name = f"{self.role} engine {self.name!r}"
                raise EngineRefusedError(name, error, content, response.headers)
            raise self.down(error.message or "says 503", reached=True)
        told = ApiError(status, self._attribute(error.message, status), code=_code(error))
        if status < 500 and not self.is_ours:
            told.content, told.headers = content, response.headers
        raise told

    def _checked(self, payload: bytes, response: Response) -> Reply:
        try:
            own = None if self.is_ours else msgspec.json.decode(payload, type=dict[str, Any])
            reply = msgspec.convert(own, Reply) if own else msgspec.json.decode(payload, type=Reply)
            reply.own, reply.headers = own, response.headers
        except msgspec.DecodeError as error:
            raise ApiError(502, self._attribute(f"its answer does not decode: {error}")) from error
        if reply.error is not None:
            raise ApiError(500, self._attribute(reply.error.message), code=_code(reply.error))
        return reply

    async def _read_rest(self, response: Response) -> None:
        """Reads the end of an answer of which nobody wants to hear more, so that its connection is
        kept.
        """
        try:
            with contextlib.suppress(ClientError, TimeoutError):
                async with asyncio.timeout(_REST_S):
                    await response.read()
        finally:
            response.close()

    def _attribute(self, message: str, status: int = 500) -> str:
        """A fault of the engine names it; a fault of the request speaks for itself."""
        return message if status < 500 else f"{self.role} engine {self.name!r}: {message}"


async def _let_end(work: asyncio.Task[Any]) -> None:
    with contextlib.suppress(Exception):  # whatever it is, nobody waits for it
        await asyncio.wait_for(work, _REST_S)


def _said_error(content: bytes) -> _Error | None:
    """What it says is wrong, in OpenAI's form; ``None`` where it does not."""
    try:
        return msgspec.json.decode(content, type=Reply).error
    except msgspec.DecodeError:
        return None


def _error_in(content: bytes) -> _Error:
    """What an engine's answer says is wrong: OpenAI's form, or its first words."""
    return _said_error(content) or _Error(message=content[:200].decode(errors="replace"))


def _health_in(content: bytes) -> _Health:
    try:
        return msgspec.json.decode(content, type=_Health)
    except msgspec.DecodeError:
        return _Health()


def _is_place(address: str) -> bool:
    """Whether transfers may name this as ``host:port``."""
    with contextlib.suppress(ValueError):
        return channel_address(address).isprintable()
    return False


def _code(error: _Error) -> str | None:
    """The name of an engine's error, if it has one."""
    if error.message == VLLM_LOAD_FAILED:
        return TransferError.__name__
    return printable(error.code[:_NAME_LENGTH]) if isinstance(error.code, str) else None


def _reason(error: ClientError) -> str:
    return str(error) or type(error).__name__
