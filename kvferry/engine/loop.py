"""Runs an engine on a separate thread, for servers that must not block."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeVar

from kvferry.engine.admission import Admission, DrainState, NewRequest, OnOutput
from kvferry.engine.engine import IDLE_SLEEP_S, Engine
from kvferry.engine.messages import EngineOutput, SamplingParams
from kvferry.errors import EngineError, KVFerryError, StuckStepError
from kvferry.lifetimes import Closing
from kvferry.mailbox import Mailbox

logger = logging.getLogger(__name__)

T = TypeVar("T")

STUCK_STEP_S = 120.0
"""Seconds after which a running step counts as stuck. A stuck step is logged, the requests that
wait for the step are given up, and new requests are refused until the step ends. A rank that got no
CPU for a minute is only slow: its step ends before this time."""

_CHECK_INTERVAL_S = 1.0
"""Seconds between two checks of idle ranks; a dead idle rank is noticed within this time."""

_MAX_PAUSE_S = 0.01
"""Longest pause in seconds between steps that only wait for leases of ended requests."""


@dataclass(frozen=True, slots=True)
class StepState:
    """State of the engine's thread: the age of the current step, and the ranks it waits for."""

    age_s: float | None
    """Seconds since the start of the current step; ``None`` between steps."""
    waiting_for: tuple[int, ...] = ()
    """Ranks that have not answered the current step."""

    @property
    def is_stuck(self) -> bool:
        """Whether the step has run for longer than ``STUCK_STEP_S``."""
        return self.age_s is not None and self.age_s > STUCK_STEP_S

    def __str__(self) -> str:
        if self.age_s is None:
            return "no step is under way"
        text = f"the step has run for {self.age_s:.0f} s"
        if not self.waiting_for:
            return text
        ranks = " and ".join(map(str, self.waiting_for))
        return f"{text} and waits for rank{'s' * (len(self.waiting_for) > 1)} {ranks}"


class EngineLoop(Closing):
    """Steps an engine while there is work; any thread may submit requests and calls.

    The loop owns the engine and closes it. If the engine cannot continue, the loop answers every
    live request with an error and calls ``on_failure`` once, on the engine's thread.
    """

    def __init__(self, engine: Engine, on_failure: Callable[[KVFerryError], object]) -> None:
        self._engine = engine
        self._on_failure = on_failure
        self._live: dict[str, NewRequest] = {}
        """Request id → the request with this id that the engine computes."""
        self._arriving: dict[NewRequest, NewRequest] = {}
        """Requests that the engine's thread has not looked at yet. Each is its own key, so that one
        thread alone can take it out.
        """
        self._stuck_step: float | None = None
        """Start time of the step that was last found stuck, on the monotonic clock."""
        self._lock = threading.Lock()
        self._closing = False
        self.admission = Admission()
        """Whether the engine takes new requests; other threads may read its fields."""
        self._failure: KVFerryError | None = None
        self._step_started: float | None = None
        self._pause_s = 0.0
        self._ended = threading.Event()
        self._mailbox = Mailbox("engine", self._turn)
        self._watcher = threading.Thread(target=self._watch, name="kvferry-watch", daemon=True)

    @classmethod
    def open(
        cls, engine: Engine, on_failure: Callable[[KVFerryError], object] = lambda _error: None
    ) -> Self:
        """Starts the threads of the loop."""
        loop = cls(engine, on_failure)
        loop._mailbox.start()
        loop._watcher.start()
        return loop

    @property
    def failure(self) -> KVFerryError | None:
        """The error after which the engine cannot continue; ``None`` while there is no error."""
        return self._failure

    def step_state(self) -> StepState:
        """State of the current step, with its age on the monotonic clock. Never waits."""
        started = self._step_started
        if started is None:
            return StepState(None)
        return StepState(time.monotonic() - started, self._engine.waiting_for())

    @property
    def silent_peers(self) -> tuple[str, ...]:
        """Engines from which nothing is loaded until they answer. Never waits."""
        return self._engine.silent_peers()

    def drain(self) -> Future[DrainState]:
        """Refuses new requests from now on; existing requests go on. Idempotent.

        Existing requests may still lend their KV and load KV from other engines.

        Returns:
            A future of the remaining work; the future ends after the current step.

        Raises:
            KVFerryError: the engine is closed, or cannot continue.
        """
        with self._lock:
            self.admission.is_draining = True
        return self.call(self.admission.look)

    def pause(self) -> Future[DrainState]:
        """Holds new requests back from now on, until :meth:`resume`; existing requests go on.

        Returns:
            A future that ends when the engine has no work left: no request, no load, no lease.

        Raises:
            KVFerryError: the engine is closed, or cannot continue.
        """
        with self._lock:
            self.admission.is_paused = True
        waiter: Future[DrainState] = Future()
        # Requests of earlier calls reach the engine before this task.
        self.call(partial(self.admission.wait, waiter))
        return waiter

    def resume(self) -> Future[object]:
        """Ends :meth:`drain` and :meth:`pause`. Idempotent.

        Returns:
            A future that ends after the current step. From then on, the requests that
            waited are in the engine.

        Raises:
            KVFerryError: the engine is closed, or cannot continue.
        """
        with self._lock:
            self.admission.is_draining = self.admission.is_paused = False
            held = self.admission.release()
        for task in held:
            self._post(task)
        return self.call(self.admission.look)

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
    ) -> NewRequest:
        """Hands a request to the engine, and returns what :meth:`abort` takes.

        ``on_output`` is called for each step with new outputs; the last call has a
        ``finish_reason``. A refused request gets a single call: ``error``, with the reason and
        the type of the refusal.

        Raises:
            DrainingError: the engine drains and takes no new requests.
            StuckStepError: a step is stuck.
            KVFerryError: the engine is closed, or cannot continue.
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
        new = NewRequest(request_id, on_output)
        self._arriving[new] = new
        try:
            self._post(lambda: self._add(new, add), new=new)
        except KVFerryError:
            self._arriving.pop(new, None)
            raise
        return new

    def abort(self, which: str | NewRequest) -> None:
        """Ends a request with ``abort``; if the request has just ended otherwise, takes back the
        blocks that it lends.

        Does nothing after the end of the engine, because there are no requests any more.

        Args:
            which: the id of the request; or the value that :meth:`submit` returned, so that another
                request with the same id goes on.
        """
        with self._lock:
            held = self.admission.release(which)
        try:
            for task in held:
                self._post(task)
            self._post(partial(self._abort, which))
        except KVFerryError:
            logger.debug("abort of %r: the engine has ended", which)

    def call(self, function: Callable[[Engine], T]) -> Future[T]:
        """Runs ``function``, for example ``Engine.stats``, on the engine's thread between two
        steps.

        Raises:
            KVFerryError: the engine is closed, or cannot continue.
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
        """Ends the threads, answers live requests with an error, closes the engine. Idempotent."""
        self._end(EngineError("the engine was closed"), failed=False)
        self._mailbox.close()
        self._watcher.join()

    def _post(self, task: Callable[[], None], *, new: NewRequest | None = None) -> None:
        """Hands a task to the engine's thread; ``new`` is the request that it adds."""
        # The lock ensures that no task follows the final task ``_wind_up``, and that no new request
        # follows the start of drain() or pause().
        with self._lock:
            if new is not None and self._step_started == self._stuck_step is not None:
                raise StuckStepError(f"{self.step_state()}; no new requests until it ends")
            if self._failure is not None:
                raise self._failure
            if self._closing:
                raise EngineError("the engine is closed")
            if new is None or not self.admission.holds(new, task):
                self._mailbox.post(task)

    def _end(self, error: KVFerryError, *, failed: bool) -> None:
        """Refuses further tasks; the tasks in the mailbox still run before the final task."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
            self._failure = error if failed else None
            for task in self.admission.release():
                self._mailbox.post(task)
            self._mailbox.post(partial(self._wind_up, error))

    def _watch(self) -> None:
        """Looks for stuck steps; runs on the watcher thread."""
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
            # If this process did not run for a minute, its ranks did not run either.
            if looks_s >= STUCK_STEP_S / 2:
                self._stuck_step = started
                logger.warning("%s; its requests are given up", state)
                self._give_up(StuckStepError(f"{state}; the request is given up"))

    def _give_up(self, error: KVFerryError) -> None:
        """Answers all requests with an error while the engine's thread is in a step."""
        waiting = [self._arriving.pop(new, None) for new in list(self._arriving)]
        for request_id in list(self._live):
            # The thread that removes a request calls its listener: the step may end at this moment.
            request = self._live.pop(request_id, None)
            if request is not None:
                waiting.append(request)
                self.abort(request)
        for request in filter(None, waiting):
            self._tell(request, _error_output(request.request_id, error))

    # -- on the engine's thread ---------------------------------------------------------------

    def _turn(self) -> float | None:
        """Makes a step; returns the pause before the next step in seconds."""
        if self._ended.is_set():
            return None
        with self._failing():
            self._pause_s = self._serve()
        if self.admission.is_watched:
            self.admission.look(self._engine)
        return self._pause_s

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Ends the loop as failed if its body raises an error."""
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
        if self._live:
            return IDLE_SLEEP_S  # a request waits for its load
        return min(max(2 * self._pause_s, IDLE_SLEEP_S), _MAX_PAUSE_S)

    def _step(self) -> list[EngineOutput]:
        self._step_started = time.monotonic()
        try:
            return self._engine.step()
        finally:
            self._step_started = None

    def _add(self, new: NewRequest, add: Callable[[], None]) -> None:
        if self._arriving.pop(new, None) is None:
            return  # the request was given up meanwhile
        try:
            add()
        except Exception as error:
            # Any error of a client or a plugin in this request must not end the engine.
            if not isinstance(error, KVFerryError | ValueError | TypeError):
                logger.exception("request %r could not be added", new.request_id)
            self._tell(new, _error_output(new.request_id, error))
            return
        new.is_taken = True
        self._live[new.request_id] = new

    def _abort(self, which: str | NewRequest) -> None:
        with self._failing():
            if isinstance(which, str):
                self._engine.abort(which)
            # The engine may know the id of a request as that of another, which lives or lends.
            elif which.end is not None:
                if which.end.kv_transfer_params:
                    self._engine.take_back(which.end.kv_transfer_params)
            elif which.is_taken and self._live.get(which.request_id, which) is which:
                self._engine.abort(which.request_id)

    def _deliver(self, output: EngineOutput) -> None:
        ended = output.finish_reason is not None
        take = self._live.pop if ended else self._live.get
        request = take(output.request_id, None)
        if request is not None:
            request.end = output if ended else None
            self._tell(request, output)

    def _tell(self, request: NewRequest, output: EngineOutput) -> None:
        try:
            request.on_output(output)
        except Exception:
            # A failing listener of a client must not end the engine of the other clients.
            logger.exception("the listener of request %r failed", output.request_id)

    def _wind_up(self, error: KVFerryError) -> None:
        """The final task: answers all requests with an error, and closes the engine."""
        self._ended.set()
        for request_id, request in list(self._live.items()):
            self._tell(request, _error_output(request_id, error))
        self._live.clear()
        self.admission.fail(error)
        try:
            self._engine.close()
        except Exception:  # a plugin may raise anything; the failure must be told all the same
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
