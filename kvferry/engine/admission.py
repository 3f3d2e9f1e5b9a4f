"""Whether an engine takes new requests: at once, later, or not at all.

A *paused* engine lets new requests wait, and a *draining* engine refuses them. In both states the
requests that the engine has go on to their end.
"""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from kvferry.engine.engine import Engine
from kvferry.engine.messages import EngineOutput
from kvferry.errors import DrainingError

OnOutput = Callable[[EngineOutput], object]
"""Takes the outputs of a request; called on the engine's thread, so it must not block."""


@dataclass(eq=False, slots=True)
class NewRequest:
    """A request that was submitted to an engine. Its id may be that of other requests too."""

    request_id: str
    on_output: OnOutput
    is_taken: bool = False
    """Whether the engine has taken the request, and not refused it. The engine's thread writes and
    reads this field."""
    end: EngineOutput | None = None
    """The output that ended the request; ``None`` before. The engine's thread writes and reads this
    field."""


class DrainState(msgspec.Struct, frozen=True, kw_only=True):
    """Remaining work of an engine that drains or pauses."""

    requests: int
    """Number of requests that are computed or wait for their computation."""
    loads: int
    """Number of requests that wait for KV of other engines."""
    leases: int
    """Number of ended requests whose KV other engines may still read."""
    is_over: bool
    """Whether no work is left, so that the engine may be ended or changed."""

    @classmethod
    def of(cls, engine: Engine) -> "DrainState":
        """The remaining work of an engine; only the engine's thread may ask."""
        stats = engine.stats().scheduler
        return cls(
            requests=stats.running + stats.waiting,
            loads=stats.loading,
            leases=stats.lent,
            is_over=not engine.has_work(),
        )

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.loads} loads, {self.leases} leases"


class Admission:
    """The gate before an engine.

    The owner calls :meth:`holds` and :meth:`release` under a lock, and the other methods on the
    engine's thread.
    """

    def __init__(self) -> None:
        self.is_draining = False
        self.is_paused = False
        self.drain_state: DrainState | None = None
        """The remaining work after the last step of an engine that drains; else ``None``."""
        self._held: list[tuple[NewRequest, Callable[[], None]]] = []
        """Requests that wait for the end of a pause, each with the task that adds it."""
        self._waiters: list[Future[DrainState]] = []
        """Futures that end when the engine has no work left."""

    def holds(self, new: NewRequest, task: Callable[[], None]) -> bool:
        """Takes the task that adds a request, if the request has to wait.

        Raises:
            DrainingError: the engine drains and takes no new requests.
        """
        if self.is_draining:
            raise DrainingError("the engine is draining and takes no new requests")
        if self.is_paused:
            self._held.append((new, task))
        return self.is_paused

    def release(self, which: str | NewRequest | None = None) -> list[Callable[[], None]]:
        """The tasks of the requests that wait, or of those with an id, or of one request; they wait
        no longer.
        """
        released = [one for one in self._held if which in (None, one[0], one[0].request_id)]
        self._held = [one for one in self._held if one not in released]
        return [task for _, task in released]

    def wait(self, waiter: Future[DrainState], engine: Engine) -> None:
        """Ends ``waiter`` as soon as the engine has no work left."""
        self._waiters.append(waiter)
        self.look(engine)

    def look(self, engine: Engine) -> DrainState:
        """Looks at the remaining work after a step, and ends the waits that are over."""
        state = DrainState.of(engine)
        self.drain_state = state if self.is_draining else None
        while state.is_over and self._waiters:
            waiter = self._waiters.pop()
            if waiter.set_running_or_notify_cancel():  # the caller may have gone
                waiter.set_result(state)
        return state

    def fail(self, error: Exception) -> None:
        """Ends the waits of an engine that has ended."""
        while self._waiters:
            waiter = self._waiters.pop()
            if waiter.set_running_or_notify_cancel():
                waiter.set_exception(error)

    @property
    def is_watched(self) -> bool:
        """Whether :meth:`look` is needed after the next step."""
        return self.is_draining or bool(self._waiters)
