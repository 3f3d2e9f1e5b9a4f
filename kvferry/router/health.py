"""Health of one engine: the engine's reports about itself, and whether it answers."""

import asyncio
import contextlib
import time
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from kvferry.config import printable
from kvferry.control.tickets import channel_address
from kvferry.engine.admission import DrainState
from kvferry.router import engine_client
from kvferry.router.engine_client import ClientError, EngineClient, SilentError
from kvferry.router.prefixes import SentPrompts
from kvferry.router.replies import EngineDownError, error_in, reason_of
from kvferry.serving.messages import (
    MOST_NAME_CHARACTERS,
    EngineAddress,
    KVEventsPlace,
    Role,
    without_credentials,
)
from kvferry.zeromq import join_address

T = TypeVar("T")

PROBE_INTERVAL_S = 1.0
"""Seconds between two health checks of an engine."""
CHANNEL_S = 1.0
"""Maximum number of seconds for the answer of a bootstrap server: the next health check asks
again."""
OURS = "kvferry"
"""Name of kvferry among the transfer backends of SGLang."""
NOT_REACHED = "not reached yet"
"""Error of an engine before the end of its first health check."""
_MOST_REASON_CHARACTERS = 4096
"""Maximum number of characters kept of an engine's error message."""
_MOST_PEERS = 64
"""Maximum number of silent peers kept per engine."""


class _Answer(msgspec.Struct):
    """Answer of a kvferry engine to a health check; other servers leave the fields out."""

    drain: DrainState | msgspec.UnsetType | None = msgspec.UNSET
    kv_role: str | None = None
    control: str | None = None
    silent_peers: tuple[str, ...] = ()
    kv_events: KVEventsPlace | None = None
    at_once: bool = False


class SGLangServer(msgspec.Struct, frozen=True, kw_only=True):
    """The facts about an SGLang server in its ``/server_info``."""

    version: str
    """Release of SGLang."""
    disaggregation_mode: str
    """``prefill``, ``decode``, or ``null`` for a server that does both."""
    disaggregation_transfer_backend: str
    """Name of the transfer backend."""
    disaggregation_bootstrap_port: int
    """TCP port of the bootstrap server, on a prefill server."""
    dp_size: int = 1
    """Number of data-parallel engines."""


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """Reports about an engine, from the engine itself or from an operator."""

    control: str = ""
    """``host:port`` of the engine's control channel, empty if unknown; see
    :mod:`kvferry.router.watch`."""
    kv_events: KVEventsPlace | None = None
    """Addresses of the KV cache events for the engine's prefix cache; ``None`` if unknown."""
    kv_role: str | None = None
    """Whether the engine lends KV and whether it loads KV; ``None`` if unknown."""
    at_once: bool = False
    """Whether the engine can get a request at the same time as the other engine of a pair."""
    is_ours: bool = False
    """Whether the engine is a kvferry engine and not a foreign engine."""
    sglang: SGLangServer | None = None
    """Facts about an SGLang server; ``None`` for any other engine."""
    max_model_len: int | None = None
    """Number of tokens of the longest sequence; ``None`` if unknown."""
    model: str | None = None
    """Name of the engine's (first) model; ``None`` if unknown."""
    owner: str = ""
    """Owner of this model, as the engine tells; servers name themselves. Empty if unknown."""
    tells_of_draining: bool = False
    """Whether the engine's health check reports draining, as kvferry engines do."""
    drain: DrainState | None = None
    """Last report about the engine's draining; ``None`` if the engine does not drain."""
    silent_peers: tuple[str, ...] = ()
    """Peers without an answer to this engine, as of its last health check; this engine loads no KV
    from them."""

    @property
    def is_known(self) -> bool:
        """Whether the engine has passed a health check, and so has told of which kind it is."""
        return self.max_model_len is not None

    @property
    def kind(self) -> str:
        """Serving engine: ``kvferry``, ``vllm``, or ``sglang`` with its release; empty if
        unknown.
        """
        return f"sglang {self.sglang.version}" if self.sglang is not None else self.owner

    @property
    def hears_words(self) -> bool:
        """Whether the engine is a foreign server with kvferry and with a known control channel: it
        takes KV back by a word (:mod:`kvferry.control.give_backs`).
        """
        return bool(self.control) and not self.is_ours

    @property
    def lends(self) -> bool:
        """Whether the engine can lend the cached part of a prompt."""
        return self.kv_role in ("kv_producer", "kv_both")

    @property
    def borrows(self) -> bool:
        """Whether the engine can load KV from another engine."""
        return self.kv_role in ("kv_consumer", "kv_both")


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """Whether an engine answers, at the last observation."""

    healthy: bool = False
    is_slow: bool = False
    """Whether the only problem is a health check without an answer in time. The engine took the
    connection, so it is not dead."""
    last_error: str = NOT_REACHED
    """Reason why the engine is not healthy; empty for a healthy engine."""
    seen_at: float = 0.0
    """Time of the last observation, in seconds on the monotonic clock."""
    down_since: float = msgspec.field(default_factory=time.monotonic)
    """Time at which the engine last became unhealthy, in seconds on the monotonic clock."""

    @property
    def is_new(self) -> bool:
        """Whether the engine's first health check has not ended yet."""
        return self.last_error == NOT_REACHED

    @property
    def lives(self) -> bool:
        """Whether the engine answers, or at least accepts connections."""
        return self.healthy or self.is_slow

    @property
    def down_s(self) -> float:
        """Seconds since the engine became unhealthy; 0 for a healthy engine."""
        return 0.0 if self.healthy else time.monotonic() - self.down_since


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """State of an engine, as the leader of a router sends it to the workers."""

    slot: int
    name: str
    role: Role
    url: str
    is_leaving: bool
    told: Told
    status: Status


class EngineHealth:
    """Knowledge about one engine, and the health checks from which the router gains it."""

    def __init__(self, name: str, url: str, role: Role, client: EngineClient) -> None:
        self.url = url
        self.title = f"{role} engine {name!r}"
        """Role and name of the engine in error messages."""
        self.told = Told()
        self._given: dict[str, Any] = {"control": "", "kv_events": None, "kv_role": None}
        """Reports about the engine from an operator, a list or this worker's leader."""
        self.status = Status()
        self.sent = SentPrompts()
        """Prompts that the engine should have in its cache, for a router with ``assume_cached``."""
        self.is_leaving = False
        """Whether the router sends no new requests, because an operator or a list asked for
        this."""
        self._role = role
        self._client = client
        self._probing: asyncio.Task[None] | None = None
        self._is_met = False
        """Whether the engine has told of its model and kind since it last came."""
        self._draining = asyncio.Lock()
        """Lock held during a request to drain or to resume: the engine gets these requests in
        order."""

    @property
    def is_staying(self) -> bool:
        """Whether the engine is neither leaving nor draining."""
        return not self.is_leaving and self.told.drain is None

    @property
    def shown_url(self) -> str:
        """URL of the engine without credentials, for everyone to see."""
        return without_credentials(self.url)

    # ---- reports about the engine -----------------------------------------------------------

    def enter(self, address: EngineAddress) -> None:
        """Takes over the entry of an operator or a list, which may come again and again."""
        self.is_leaving = self.is_leaving and self.told.tells_of_draining
        given = {name: value for name in self._given if (value := getattr(address, name))}
        self._given |= given
        self._tell(**given)

    def follow(self, state: EngineState) -> None:
        """Takes the state from this worker's leader; the newer status of the two remains. A leader
        that has not met the engine yet has no word on what this worker has heard from the engine.
        """
        self.is_leaving = state.is_leaving
        is_newer = state.status.seen_at > self.status.seen_at
        if is_newer or state.told.is_known or not self.told.is_known:
            self.told = state.told
            self._given = {name: getattr(state.told, name) for name in self._given}
        if not is_newer:
            return  # this worker's own observation is newer
        if self.status.healthy and not state.status.healthy:
            self.sent.forget()
            self._is_met = False
        self.status = state.status

    def _tell(self, **told: Any) -> None:
        self.told = msgspec.structs.replace(self.told, **told)

    def _take_in(self, answer: _Answer) -> str:
        """Takes the engine's answer to a health check. Returns the reason why the engine cannot
        fill its role, empty if it can.
        """
        if not self._is_met:  # its reports of before may hold no longer
            self._tell(**self._given)
        drain = None if answer.drain is msgspec.UNSET else answer.drain
        if self.told.drain is not None and drain is None:
            self.is_leaving = False  # restarted, or resumed by an operator
        is_ours = answer.kv_role is not None
        is_placed = bool(answer.control) and _is_place(answer.control or "")
        control = (answer.control if is_placed else None) or self.told.control
        self._tell(
            tells_of_draining=answer.drain is not msgspec.UNSET,
            drain=drain,
            control=control,
            is_ours=is_ours,
            # A foreign engine reports nothing. But its control channel, named by an operator,
            # proves that the engine uses kvferry.
            at_once=answer.at_once or (not is_ours and bool(control)),
            # The report of a kvferry engine is complete.
            kv_role=answer.kv_role if is_ours else self.told.kv_role,
            kv_events=answer.kv_events if is_ours else self.told.kv_events,
            silent_peers=tuple(
                printable(peer[:MOST_NAME_CHARACTERS]) for peer in answer.silent_peers[:_MOST_PEERS]
            ),
        )
        wanted = "kv_producer" if self._role == "prefill" else "kv_consumer"
        if answer.kv_role in (None, "kv_both", wanted):
            return ""
        return f"its kv_role is {answer.kv_role!r}; a {self._role} engine needs {wanted} or kv_both"

    # ---- whether the engine answers ---------------------------------------------------------

    def up(self) -> None:
        """Notes that the engine has just answered well."""
        now, since = time.monotonic(), self.status.down_since
        self.status = Status(healthy=True, last_error="", seen_at=now, down_since=since)

    def down(self, reason: str, *, reached: bool, is_slow: bool = False) -> EngineDownError:
        """Notes that the engine is not healthy; returns the error to raise."""
        now = time.monotonic()
        self.sent.forget()
        self._is_met = False
        self.status = Status(
            is_slow=is_slow,
            last_error=printable(reason[:_MOST_REASON_CHARACTERS], keep="\n"),
            seen_at=now,
            down_since=now if self.status.healthy else self.status.down_since,
        )
        return self.error(self.status.last_error, reached=reached)

    def lost(self, error: ClientError, *, reached: bool = True) -> EngineDownError:
        """Notes that the engine could not be reached, or went away; returns the error to raise."""
        return self.down(reason_of(error), reached=reached)

    def error(self, reason: str, *, reached: bool, is_well: bool = False) -> EngineDownError:
        """The error to raise for a request that the engine did not serve."""
        return EngineDownError(self.title, reason, reached=reached, is_well=is_well)

    async def probe(self) -> None:
        """Checks the engine's health; if the engine has just come or come back, also asks for the
        engine's model and kind. Never raises.
        """
        try:
            response = await self._client.ask("GET", f"{self.url}/health")
            if response.status != 200:
                said = error_in(response.content).message
                self.down(said or f"its health check says {response.status}", reached=True)
                return
            unfit = self._take_in(_decoded(response.content, _Answer) or _Answer())
            if not unfit and not self._is_met:
                unfit = "" if self.told.is_ours else await self._ask_for_sglang()
                unfit = unfit or await self._ask_for_model()
            if unfit:
                self._tell(max_model_len=None)
                self.down(unfit, reached=True)
                return
            await self._ask_for_control()
        except SilentError:
            silent_s = engine_client.CONNECT_TIMEOUT_S
            self.down(f"it has not answered for {silent_s:g} s", reached=False, is_slow=True)
        except ClientError as error:
            self.lost(error, reached=False)
        except RecursionError:
            self.down("what it tells of itself is nested too deeply", reached=True)
        else:
            self._is_met = True
            self.up()

    async def _ask_for_sglang(self) -> str:
        """Learns whether a foreign engine that has just come is an SGLang server, and the facts
        about the server. Returns the reason why the server cannot fill its role, empty if it can.
        """
        answer = await self._client.ask("GET", f"{self.url}/server_info")
        server = _decoded(answer.content, SGLangServer) if answer.status == 200 else None
        self._tell(sglang=server)
        if server is None or server.disaggregation_mode == self._role:
            return ""
        return (
            f"its --disaggregation-mode is {server.disaggregation_mode!r}; a {self._role} engine "
            f"needs {self._role}"
        )

    async def _ask_for_control(self) -> None:
        """Learns the control channel of a prefill server with kvferry's backend, from the server's
        bootstrap server, which may come later than the server. Until the answer the channel stays
        unknown, and each health check asks again.
        """
        server = self.told.sglang if self._role == "prefill" and not self.told.control else None
        if server is None or server.disaggregation_transfer_backend != OURS:
            return
        host, port = urlsplit(self.url).hostname or "", server.disaggregation_bootstrap_port
        with contextlib.suppress(ClientError, TimeoutError):
            async with asyncio.timeout(CHANNEL_S):
                answer = await self._client.ask("GET", f"http://{join_address(host, port)}/kvferry")
            control = (_decoded(answer.content, dict[str, str]) or {}).get("0", "")
            if _is_place(control):
                self._tell(control=control)

    async def _ask_for_model(self) -> str:
        """Learns the model of an engine that has just come, after its kind. Returns the reason why
        the router cannot use the engine, empty if it can.
        """
        models = await self._client.ask("GET", f"{self.url}/v1/models")
        if models.status != 200:
            said = error_in(models.content).message
            return f"its /v1/models answers {models.status}: {said}"
        try:
            model = msgspec.json.decode(models.content)["data"][0]
            max_model_len = int(model["max_model_len"])
            if max_model_len < 1:  # this would limit all engines
                raise ValueError(f"{max_model_len} is less than 1")
            name = printable(str(model["id"])[:MOST_NAME_CHARACTERS])
            owner = printable(str(model.get("owned_by", ""))[:MOST_NAME_CHARACTERS])
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            return f"its /v1/models does not name a max_model_len ({error!r})"
        if owner == "sglang" and self.told.sglang is None:
            return "its /server_info does not tell the facts of an SGLang server"
        self._tell(model=name, owner=owner, max_model_len=max_model_len)
        return ""

    def probing(self) -> asyncio.Task[None]:
        """The current health check, or a new health check."""
        if self._probing is None or self._probing.done():
            self._probing = asyncio.create_task(self.probe())
        return self._probing

    async def probe_anew(self) -> None:
        """Waits for a health check that begins now: a current check may have asked too early."""
        if self._probing is not None:
            await asyncio.wait((self._probing,))
        await asyncio.wait((self.probing(),))  # shared with others, so never cancelled

    async def aclose(self) -> None:
        """Ends the current health check. A connection made after the client's end would stay
        open.
        """
        if self._probing is not None:
            self._probing.cancel()
            await asyncio.wait((self._probing,))

    # ---- leaving ----------------------------------------------------------------------------

    async def leave(self) -> None:
        """Stops new requests to the engine, and asks the engine to take no new requests from others
        either.
        """
        self.is_leaving = True
        await self.remind()

    async def remind(self) -> None:
        """Asks a leaving engine to drain, if the engine has not reported draining."""
        async with self._draining:
            if self.is_leaving and self.told.drain is None:
                await self._tell_of_draining("POST")

    async def resume(self) -> None:
        """Undoes :meth:`leave`."""
        self.is_leaving = False
        async with self._draining:
            if not self.is_leaving:
                await self._tell_of_draining("DELETE")

    async def _tell_of_draining(self, method: str) -> None:
        # Foreign servers do not know this path; an engine out of reach has left already.
        with contextlib.suppress(ClientError):
            await self._client.ask(method, f"{self.url}/kvferry/drain")
            await self.probe_anew()


def _decoded(content: bytes, kind: type[T]) -> T | None:
    """The content of an answer; ``None`` if the answer is of another kind."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(content, type=kind)
    return None


def _is_place(address: str) -> bool:
    """Whether transfers may name this address as ``host:port``."""
    with contextlib.suppress(ValueError):
        return channel_address(address).isprintable()
    return False
