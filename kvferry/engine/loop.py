"""Runs an engine on a thread of its own, for servers that must not block."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

import msgspec

from kvferry.engine.engine import IDLE_SLEEP_S, Engine
from kvferry.engine.messages import EngineOutput, SamplingParams
from kvferry.errors import DrainingError, EngineError, KVFerryError, StuckStepError
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox

logger = logging.getLogger(__name__)

OnOutput = Callable[[EngineOutput], object]
"""Told the news of one request, on the engine's thread; must not block."""

T = TypeVar("T")

STUCK_STEP_S = 120.0
"""A step that runs for longer is reported. The requests that wait for it are given up, and until it
ends new ones are refused. A rank that got no CPU for a minute is slow, and its step ends sooner."""

_CHECK_INTERVAL_S = 1.0
"""Pause between two looks at idle ranks: a rank that dies then is noticed within it."""

_MAX_PAUSE_S = 0.01
"""Longest pause between steps that only wait for leases of ended requests."""


@dataclass(frozen=True, slots=True)
class StepState:
    """What the engine's thread is at."""

    age_s: float | None
    """For how long the step under way has run; ``None`` between steps."""
    waiting_for: tuple[int, ...] = ()
    """Ranks that have not answered it."""

    @property
    def is_stuck(self) -> bool:
        """Whether it has run for longer than ``STUCK_STEP_S``."""
        return self.age_s is not None and self.age_s > STUCK_STEP_S

    def __str__(self) -> str:
        if self.age_s is None:
            return "no step is under way"
        text = f"the step has run for {self.age_s:.0f} s"
        if not self.waiting_for:
            return text
        ranks = " and ".join(map(str, self.waiting_for))
        return f"{text} and waits for rank{'s' * (len(self.waiting_for) > 1)} {ranks}"


class DrainState(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine that drains still has."""

    requests: int
    """Requests that it computes, or that wait for that."""
    loads: int
    """Requests that wait for KV of other engines."""
    leases: int
    """Ended requests whose KV other engines may still read."""
    is_over: bool
    """Whether nothing is left, and it can be ended."""

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.loads} loads, {self.leases} leases"


class EngineLoop(Closing):
    """Steps an engine while it has work; requests and questions come from any thread.

    Owns the engine and closes it. When the engine cannot go on, every live request is answered
    with an error and ``on_failure`` is told, once, on the engine's thread.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[KVFerryError], object]) -> None:
        self._engine = engine
        self._on_failure = on_failure
        self._listeners: dict[str, OnOutput] = {}
        self._arriving: dict[object, tuple[str, OnOutput]] = {}
        """Requests that the engine's thread has not taken in, and who is told of them."""
        self._stuck_step: float | None = None
        """When the step began that was found stuck last."""
        self._lock = threading.Lock()
        self._closing = False
        self._draining = False
        self._failure: KVFerryError | None = None
        self._drain_state: DrainState | None = None
        self._step_started: float | None = None
        self._pause_s = 0.0
        self._ended = threading.Event()
        self._mailbox = Mailbox("engine", self._turn)
        self._watcher = threading.Thread(target=self._watch, name="kvferry-watch", daemon=True)

    @classmethod
    def open(
        cls, engine: Engine, on_failure: Callable[[KVFerryError], object] = lambda _error: None
    ) -> Self:
        """Starts the thread."""
        loop = cls(engine, on_failure)
        loop._mailbox.start()
        loop._watcher.start()
        return loop

    @property
    def failure(self) -> KVFerryError | None:
        """Why the engine cannot go on; ``None`` while it can."""
        return self._failure

    def step_state(self) -> StepState:
        """How the step under way stands; never waits. The age is of the monotonic clock."""
        started = self._step_started
        if started is None:
            return StepState(None)
        return StepState(time.monotonic() - started, self._engine.waiting_for())

    @property
    def silent_peers(self) -> tuple[str, ...]:
        """Engines that nothing is loaded from until they answer; never waits."""
        return self._engine.silent_peers()

    @property
    def drain_state(self) -> DrainState | None:
        """What is left since :meth:`drain`, as it was after the last step; ``None`` unless it
        drains. Never waits.
        """
        return self._drain_state

    def drain(self) -> Future[DrainState]:
        """Refuses new requests from now on, and goes on with those that it has. Idempotent.

        Requests that it has may still lend their KV, and load it from others.

        Returns:
            A future of what it has, which ends with the step under way.

        Raises:
            KVFerryError: the engine is closed, or cannot go on.
        """
        with self._lock:
            self._draining = True
        return self.call(lambda _engine: self._note_drain())

    def resume(self) -> Future[object]:
        """Takes new requests again, where it drained. Idempotent.

        Returns:
            A future that ends with the step under way; from then on :attr:`drain_state` is
            ``None``.

        Raises:
            KVFerryError: the engine is closed, or cannot go on.
        """
        with self._lock:
            self._draining = False
        return self.call(lambda _engine: self._note_drain())

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        on_output: OnOutput,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        arrival: float | None = None,
        traceparent: str = "",
    ) -> None:
        """Hands a request to the engine.

        ``on_output`` is called once per step with news; the last call has a ``finish_reason``. A
        request that is refused gets one call: ``error``, with the refusal and its type.

        Raises:
            DrainingError: it takes no new requests.
            StuckStepError: a step is stuck.
            KVFerryError: the engine is closed, or cannot go on.
        """
        add = partial(
            self._engine.add_request,
            request_id,
            prompt_token_ids,
            sampling,
            kv_transfer_params=kv_transfer_params,
            cache_salt=cache_salt,
            arrival=arrival,
            traceparent=traceparent,
        )
        place = object()
        self._arriving[place] = request_id, on_output
        try:
            self._post(lambda: self._add(place, add), is_new=True)
        except KVFerryError:
            self._arriving.pop(place, None)
            raise

    def abort(self, request_id: str) -> None:
        """Ends a request; it is answered with ``abort`` unless it has just ended otherwise.

        Does nothing once the engine is closed or has failed: there are no requests then.
        """
        try:
            self._post(lambda: self._abort(request_id))
        except KVFerryError:
            logger.debug("abort of %r: the engine has ended", request_id)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs ``function`` on the engine's thread, between two steps; ``Engine.stats``, say.

        Raises:
            KVFerryError: the engine is closed, or cannot go on.
        """
        future: Future[T] = Future()

        def answer() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._engine))
            except Exception as error:
                future.set_exception(error)

        self._post(answer)
        return future

    def close(self) -> None:
        """Ends the thread, answers live requests with an error, closes the engine. Idempotent."""
        self._end(EngineError("the engine was closed"), failed=False)
        self._mailbox.close()
        self._watcher.join()

    def _post(self, task: Callable[[], None], *, is_new: bool = False) -> None:
        # Under the lock, nothing is posted after the task that winds everything up, and no new
        # request after drain() has begun.
        with self._lock:
            if is_new and self._draining:
                raise DrainingError("the engine is draining and takes no new requests")
            if is_new and self._step_started == self._stuck_step is not None:
                raise StuckStepError(f"{self.step_state()}; no new requests until it ends")
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise EngineError("the engine is closed")
            self._mailbox.post(task)

    def _end(self, error: KVFerryError, *, failed: bool) -> None:
        """Lets nobody post any more; what was posted gets its answer before all is wound up."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._failure = error if failed else None
            self._mailbox.post(partial(self._wind_up, error))

    def _watch(self) -> None:
        """Looks for stuck steps, on a thread of its own."""
        seen, looks_s = None, 0.0
        while not self._ended.wait(_CHECK_INTERVAL_S):
            started, state = self._step_started, self.step_state()
            if self._stuck_step is not None and started != self._stuck_step:
                logger.info("the step that was stuck has ended")
                self._stuck_step = None
            looks_s = looks_s + _CHECK_INTERVAL_S if started == seen else 0.0
            seen = started
            if started is None or not state.is_stuck or self._stuck_step is not None:
                continue
            # While this process did not get to run for a minute, its ranks did not either.
            if looks_s >= STUCK_STEP_S / 2:
                self._stuck_step = started
                logger.warning("%s; its requests are given up", state)
                self._give_up(StuckStepError(f"{state}; the request is given up"))

    def _give_up(self, error: KVFerryError) -> None:
        """Answers all requests with an error while the engine's thread is in a step."""
        waiting = [self._arriving.pop(place, None) for place in list(self._arriving)]
        for request_id in list(self._listeners):
            # Whoever takes the listener out tells it of the end: the step may end just now.
            listener = self._listeners.pop(request_id, None)
            if listener is not None:
                waiting.append((request_id, listener))
                self.abort(request_id)
        for request_id, listener in filter(None, waiting):
            self._tell(listener, _error_output(request_id, error))

    # -- on the engine's thread ---------------------------------------------------------------

    def _turn(self) -> float | None:
        """One step; returns the pause before the next, in seconds."""
        if self._ended.is_set():
            return None
        with self._failing():
            self._pause_s = self._serve()
        if self._drain_state is not None:
            self._note_drain()
        return self._pause_s

    def _note_drain(self) -> DrainState:
        stats = self._engine.stats().scheduler
        state = DrainState(
            requests=stats.running + stats.waiting,
            loads=stats.loading,
            leases=stats.lent,
            is_over=not self._engine.has_work(),
        )
        self._drain_state = state if self._draining else None
        return state

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """The engine cannot go on after whatever is raised in here."""
        try:
            yield
        except KVFerryError as error:
            self._end(error, failed=True)
        except Exception as error:
            logger.exception("the engine's step failed")
            reason = f"the engine's step failed: {type(error).__name__}: {error}"
            self._end(EngineError(reason), failed=True)

    def _serve(self) -> float:
        if not self._engine.has_work():
            self._engine.check()
            return _CHECK_INTERVAL_S
        for output in self._step():
            self._deliver(output)
        if self._engine.is_computing:
            return 0.0
        if self._listeners:
            return IDLE_SLEEP_S  # somebody waits for a load
        return min(max(2 * self._pause_s, IDLE_SLEEP_S), _MAX_PAUSE_S)

    def _step(self) -> list[EngineOutput]:
        self._step_started = time.monotonic()
        try:
            return self._engine.step()
        finally:
            self._step_started = None

    def _add(self, place: object, add: Callable[[], None]) -> None:
        arrived = self._arriving.pop(place, None)
        if arrived is None:
            return  # it was given up
        request_id, on_output = arrived
        try:
            add()
        except Exception as error:
            # Whatever a client or a plugin made of this request, the others' engine goes on.
            if not isinstance(error, KVFerryError | ValueError | TypeError):
                logger.exception("request %r could not be added", request_id)
            self._tell(on_output, _error_output(request_id, error))
            return
        self._listeners[request_id] = on_output

    def _abort(self, request_id: str) -> None:
        with self._failing():
            self._engine.abort(request_id)

    def _deliver(self, output: EngineOutput) -> None:
        ended = output.finish_reason is not None
        take = self._listeners.pop if ended else self._listeners.get
        listener = take(output.request_id, None)
        if listener is not None:
            self._tell(listener, output)

    def _tell(self, listener: OnOutput, output: EngineOutput) -> None:
        try:
            listener(output)
        except Exception:
            # One client's listener must not end the others' engine.
            logger.exception("the listener of request %r failed", output.request_id)

    def _wind_up(self, error: KVFerryError) -> None:
        """The last task."""
        self._ended.set()
        for request_id, listener in list(self._listeners.items()):
            self._tell(listener, _error_output(request_id, error))
        self._listeners.clear()
        try:
            self._engine.close()
        except KVFerryError:
            logger.exception("closing the engine")
        if self._failure is not None:
            self._on_failure(self._failure)


def _error_output(request_id: str, error: Exception) -> EngineOutput:
    return EngineOutput(
        request_id=request_id,
        finish_reason="error",
        error=str(error),
        error_type=type(error).__name__,
    )
