"""Times every call that vLLM makes to a connector, by engine step."""

import functools
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

_LAYER_ROUNDS = 1000
_EMPTY = "wait_for_save"
"""A method that does nothing, in our connector as in the base class; called once a step."""
_PER_LAYER = ("has_connector_metadata", "wait_for_layer_load", "save_kv_layer")
"""Methods that vLLM calls for every layer: a clock around each would cost more than the calls."""

Clock = Literal["wall", "cpu"]
"""``wall`` includes what other threads and processes took meanwhile, ``cpu`` is the main thread's
own time. One at a time, as each disturbs the other."""
_CLOCKS: dict[Clock, Callable[[], int]] = {
    "wall": time.perf_counter_ns,
    "cpu": time.thread_time_ns,
}


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """The connector's calls of one engine step, in microseconds by one clock."""

    scheduler: float
    worker: float
    """Those for every layer included, see :meth:`Meter.time_layer_calls`."""
    calls: int
    """Those for every layer not counted."""

    empty: float
    """One call of a method that does nothing."""

    @property
    def total(self) -> float:
        """Both halves, which run in one thread where an engine has one rank, as they were timed."""
        return self.scheduler + self.worker


class _Call(NamedTuple):
    method: str
    half: str
    nanoseconds: int


class Meter:
    """Wraps the public methods of an engine's two connector instances.

    What a clock itself takes, with the step's cold caches, is what it says of an empty method that
    vLLM calls in the same steps; :class:`StepCost` does not have it subtracted.
    Calls that a connector makes to itself count once, with the call that vLLM made.
    """

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._within = False
        self._clock: Clock = "wall"
        self.layer_calls = 0.0
        """Microseconds of what is called for every layer, of all layers together."""

    def watch(self, connector: Any, half: str) -> None:
        """From now on the calls to this instance are timed."""
        kind = type(connector)
        for name in dir(kind):
            # Class methods and properties are for the time before the first step.
            is_method = callable(_defined(kind, name))
            if is_method and not name.startswith("_") and name not in _PER_LAYER:
                self._wrap(connector, name, half)

    def time_layer_calls(self, worker: Any, layers: int) -> None:
        """Times what is called for every layer, many times in a row; each step is charged it."""
        checks, waits, saves = (getattr(worker, name) for name in _PER_LAYER)
        began = time.thread_time_ns()
        for _ in range(_LAYER_ROUNDS * layers):
            checks()
            waits("model.layers.0.self_attn.attn")
            saves("model.layers.0.self_attn.attn", None, None)
        self.layer_calls = (time.thread_time_ns() - began) / _LAYER_ROUNDS / 1e3

    def step(self, step: Callable[[], object], clock: Clock) -> StepCost:
        """Runs one engine step; its calls."""
        calls = self._run(step, clock)
        spent = {"scheduler": 0.0, "worker": self.layer_calls}
        for call in calls:
            spent[call.half] += call.nanoseconds / 1e3
        empty = sum(call.nanoseconds for call in calls if call.method == _EMPTY) / 1e3
        return StepCost(**spent, calls=len(calls), empty=empty)

    def by_method(self, work: Callable[[], object]) -> dict[str, list[float]]:
        """Runs steps; method → CPU microseconds of each call."""
        found: dict[str, list[float]] = defaultdict(list)
        for call in self._run(work, "cpu"):
            found[call.method].append(call.nanoseconds / 1e3)
        return found

    def _run(self, work: Callable[[], object], clock: Clock) -> Sequence[_Call]:
        self._clock = clock
        self._take()
        work()
        return self._take()

    def _take(self) -> list[_Call]:
        calls, self._calls = self._calls, []
        return calls

    def _wrap(self, target: Any, name: str, half: str) -> None:
        method = getattr(target, name)

        @functools.wraps(method)
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return method(*args, **kwargs)
            self._within = True
            clock = _CLOCKS[self._clock]
            began = clock()
            try:
                return method(*args, **kwargs)
            finally:
                took = clock() - began
                self._within = False
                self._calls.append(_Call(name, half, took))

        setattr(target, name, timed)


def _defined(kind: type, name: str) -> object:
    """What a class or one of its bases defines under a name, not bound to anything."""
    return next(vars(base)[name] for base in kind.__mro__ if name in vars(base))
