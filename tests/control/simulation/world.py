"""Virtual time: everything that happens is an event, and one seed decides all of it.

Nothing here knows the protocol. A :class:`Process` runs events unless it is dead or stands still; a
:class:`SimMailbox` takes the turns of a product's thread as such events. Threads of one process
take turns at random, one event at a time: what they do to each other within an event (locks, races)
is not simulated.
"""

import heapq
import itertools
import logging
import math
import random
import select
from collections import deque
from collections.abc import Callable

from kvferry.mailbox import Mailbox, Task

TRACE_LINES = 120
"""Lines of the trace that a failure shows."""


class BrokenError(AssertionError):
    """An invariant does not hold."""

    def __init__(self, law: str, text: str) -> None:
        super().__init__(text)
        self.law = law
        """The invariant, by its name in :mod:`tests.control.simulation.oracle`."""


class World:
    """The clock, the dice, what is to happen, and what has happened."""

    def __init__(self, seed: int, *, keeps_trace: bool = False) -> None:
        self.seed = seed
        self.now = 0.0
        """Seconds since the beginning."""
        self.step = 0
        """Number of the event under way: of two, the earlier one is the smaller one."""
        self.dice = random.Random(seed)
        self.trace: deque[str] = deque(maxlen=None if keeps_trace else TRACE_LINES)
        self._events: list[tuple[float, int, Task]] = []
        self._numbers = itertools.count()
        self._broken: BrokenError | None = None

    def after(self, seconds: float, event: Task) -> None:
        """Has something happen later."""
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), event))

    def run(self, until: float) -> None:
        """Lets everything happen up to a time.

        Raises:
            BrokenError: an invariant does not hold.
        """
        while self._events and self._events[0][0] <= until:
            self.now, _, event = heapq.heappop(self._events)
            self.step += 1
            try:
                event()
            except Exception as error:
                raise self.broken("no defect of ours", repr(error)) from error
            self.check()
        self.now = until

    def check(self) -> None:
        """Raises BrokenError if an invariant does not hold."""
        if self._broken is not None:
            raise self._broken

    def note(self, text: str) -> None:
        """Adds a line to the trace."""
        self.trace.append(f"{self.now:9.3f}  {text}")

    def broken(self, law: str, text: str) -> BrokenError:
        """An invariant does not hold; :meth:`run` raises the first such error, whatever swallows
        it here.
        """
        if self._broken is None:
            self.note(f"BROKEN  {law}: {text}")
            story = "\n".join(self.trace)
            self._broken = BrokenError(law, f"seed {self.seed}: {law}: {text}\n{story}")
        return self._broken

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return probability > 0 and self.dice.random() < probability

    def between(self, low: float, high: float) -> float:
        """Some number of seconds: as often 1 to 2 as 10 to 20."""
        return low * math.exp(self.dice.random() * math.log(high / low))


class Defects(logging.Handler):
    """Takes an exception that the product only logs for a defect of ours."""

    def __init__(self, world: World) -> None:
        super().__init__(logging.ERROR)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self._world.broken("no defect of ours", self.format(record))


class Process:
    """A process of an engine: it may stand still, and it may die."""

    def __init__(self, world: World, name: str, host: str, lateness: Callable[[], float]) -> None:
        self.world = world
        self.lateness = lateness
        """How often one of its threads gets to run late, of all times."""
        self.name = name
        self.host = host
        """The address of its machine."""
        self.is_dead = False
        self.still_until = 0.0
        """When it goes on."""
        self.is_frozen = False
        """Whether not even ZeroMQ's own threads run while it stands still."""
        self._offset = world.dice.uniform(0.0, 1e5)
        self._drift = world.dice.uniform(0.999, 1.001)

    def clock(self) -> float:
        """Its monotonic clock: as every machine's, another one's and not quite as fast."""
        return self._offset + self.world.now * self._drift

    @property
    def stands_still(self) -> bool:
        return self.world.now < self.still_until

    def stand_still(self, seconds: float, *, frozen: bool) -> None:
        """Nothing of it runs for a while; ``frozen``, nor does what answers heartbeats for it."""
        self.is_frozen = frozen or (self.is_frozen and self.stands_still)
        self.still_until = max(self.still_until, self.world.now + seconds)

    def run(self, seconds: float, event: Task) -> None:
        """One of its threads does something after so many seconds, or as soon as it can."""
        dice = self.world.dice
        seconds += dice.random() * 0.001
        if self.world.chance(self.lateness()):
            seconds += self.world.between(0.05, 20.0)
        self.world.after(seconds, lambda: self._run(event))

    def _run(self, event: Task) -> None:
        if self.is_dead:
            return
        if self.stands_still:
            rest = self.still_until - self.world.now
            self.world.after(rest + self.world.dice.random() * 0.01, lambda: self._run(event))
        else:
            event()


class Descriptor:
    """What a mailbox watches: whoever has news calls :meth:`tell`."""

    def __init__(self) -> None:
        self.told: Callable[[Descriptor], None] = lambda _: None
        """Set by the mailbox that watches it."""
        self.has_news = False

    def tell(self) -> None:
        """There is something to be had."""
        self.has_news = True
        self.told(self)


class SimMailbox(Mailbox):
    """The product's mailbox without a thread: its rounds are events of its process."""

    def __init__(
        self,
        process: Process,
        name: str,
        turn: Callable[[], float | None] = lambda: None,
        *,
        poller: object = None,
        survives: bool = True,
    ) -> None:
        super().__init__(name, turn, survives=survives, clock=process.clock)
        self._process = process
        self._to_do: deque[Task] = deque()
        self._ready: dict[Descriptor, None] = {}
        self._round_number = 0
        """Rounds planned before the last one do not take place."""
        self._round_at = math.inf
        self._running = False

    def start(self) -> "SimMailbox":
        self._plan(0.0)
        return self

    def post(self, task: Task) -> None:
        self._to_do.append(task)
        self._plan(0.0)

    def close(self) -> None:
        self._closed = True

    def watch(self, socket: Descriptor, handler: Task, flags: int = select.POLLIN) -> None:
        self._handlers[socket] = handler
        socket.told = self._told
        if socket.has_news:
            self._told(socket)

    def unwatch(self, socket: Descriptor) -> None:
        self._handlers.pop(socket, None)
        self._ready.pop(socket, None)

    def _told(self, socket: Descriptor) -> None:
        self._ready[socket] = None
        self._plan(0.0)

    def _plan(self, seconds: float) -> None:
        """A round takes place in so many seconds, or earlier."""
        at = self._process.world.now + seconds
        if self._running or at >= self._round_at:
            return
        self._round_at = at
        self._round_number += 1
        number = self._round_number
        self._process.run(seconds, lambda: self._round_of(number))

    def _round_of(self, number: int) -> None:
        if number != self._round_number or self.defect is not None:
            return
        self._running = True
        while self._ready:
            socket = next(iter(self._ready))
            del self._ready[socket]
            socket.has_news = False
            if (handler := self._handlers.get(socket)) is not None:
                self._guarded(handler)
        while self._to_do:
            self._guarded(self._to_do.popleft())
        self._running, self._round_at = False, math.inf
        if not self._closed:
            pause = self._take_turn()
            if pause is not None:
                self._plan(pause)
            if self._to_do or self._ready:
                self._plan(0.0)
