"""The queue of a router whose servers take a limited number of requests each.

A request waits until every server that it needs has room: a decode server, and a prefill server if
one should compute its prompt. So no request keeps KV while it waits::

    enter ──▶ waiting ──▶ admitted ──▶ sent: now the server counts the request
      └── the queue is full: 429

The request with the lowest priority number is admitted first, and of equal ones the request that
came first. But every :data:`OLDEST_EACH`-th request admitted is the one that has waited longest, so
that batch work gets on beside any number of urgent requests. Nobody overtakes the next request.

The processes of a router share one queue without a process in the middle: each publishes its first
and its oldest waiting request in the table of counts, and admits a request only if no other process
has one that comes before.
"""

import asyncio
import bisect
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import compress
from math import ceil
from operator import attrgetter
from typing import Any

import msgspec

from kvferry.observe.spans import RequestSpan
from kvferry.router.counts import QUEUE_COUNTS, CountTable
from kvferry.router.pace import Count
from kvferry.serving.messages import Role
from kvferry.serving.openai import ApiError, try_again

OLDEST_EACH = 8
"""One of this number of admitted requests is the one that has waited longest."""
LOOK_INTERVAL_S = 0.002
"""Seconds between two looks for room while a request waits."""
LONGEST_RETRY_S = 60
"""Maximum number of seconds after which a client that was turned away should try again."""
_INT64 = 1 << 63
_came = attrgetter("came")


def priority_of(headers: Mapping[str, str], body: Mapping[str, Any]) -> int:
    """The priority of a request as vLLM reads it: the header comes before the field of the body. A
    lower number goes first.

    >>> priority_of({"x-vllm-priority": "-2"}, {"priority": 5})
    -2
    >>> priority_of({"x-vllm-priority": "high"}, {"priority": 5})
    5
    """
    for value in (headers.get("x-vllm-priority"), body.get("priority")):
        if value is not None:
            with suppress(TypeError, ValueError):
                return max(-_INT64, min(int(value), _INT64 - 1))
    return 0


class QueueView(msgspec.Struct, kw_only=True):
    """The queue at one moment."""

    waiting: int
    """Number of requests that wait."""
    longest_s: float
    """Seconds for which the oldest of them has waited."""
    turned_away: int
    """Number of requests that found the queue full."""


@dataclass(slots=True, eq=False)
class QueuePlace:
    """The place of one request in the queue."""

    priority: int | None = None
    """Priority, a lower number first; ``None`` if the request waits for no room."""
    came: int = 0
    """Time at which the request came, in nanoseconds on the monotonic clock."""
    needs: set[Role] = field(default_factory=set)
    """Roles for which the queue counts the request, because no server counts it yet."""
    reserved: Mapping[Role, Count] = field(default_factory=dict)
    """Role → number of requests that the queue counts."""
    admitted: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def order(self) -> tuple[int, int]:
        """Key by which requests are admitted."""
        return self.priority or 0, self.came

    def sent(self, role: Role) -> None:
        """Notes that a server of this role gets the request, and counts the request itself from now
        on. The decode server is the last. Idempotent.
        """
        over = set(self.needs) if role == "decode" else self.needs & {role}
        self.needs -= over
        for each in over:
            self.reserved[each].add(-1)


class RequestQueue:
    """Requests that wait for room at the servers."""

    def __init__(
        self,
        room: Mapping[Role, Callable[[], int | None]],
        most_waiting: int,
        table: CountTable | None = None,
    ) -> None:
        """Makes an empty queue.

        Args:
            room: for each role, the number of requests that its servers would still take; ``None``
                if a request should not wait for them.
            most_waiting: maximum number of requests that wait, in all processes together.
            table: counts shared by the router's processes; ``None`` for a single process.
        """
        self._room = room
        self._most_waiting = most_waiting
        counts = [Count() for _ in range(QUEUE_COUNTS)] if table is None else table.of_queue()
        self._num_waiting, self._priority, self._came, self._oldest, *others = counts
        self._admitted, self._turned_away, in_prefill, in_decode = others
        self._reserved: dict[Role, Count] = {"prefill": in_prefill, "decode": in_decode}
        """Role → admitted requests that no server of the role counts yet."""
        self._lock: Callable[[], AbstractContextManager[object]]
        self._lock = nullcontext if table is None else table.locked
        self._waiting: list[QueuePlace] = []
        """Waiting requests of this process, in their order."""
        self._looking: asyncio.Task[None] | None = None

    def view(self) -> QueueView:
        """The queue of all processes."""
        now = time.monotonic_ns()
        longest_s = max((now - oldest for _, _, oldest in self._published()), default=0) / 1e9
        return QueueView(
            waiting=self._num_waiting.total,
            longest_s=longest_s,
            turned_away=self._turned_away.total,
        )

    @asynccontextmanager
    async def waited(
        self, place: QueuePlace, needs: Collection[Role], span: RequestSpan
    ) -> AsyncIterator[float]:
        """Waits for room, as a part of ``span``, and yields the seconds of the wait; the request
        keeps its place until the context ends, or servers of all roles in ``needs`` have got the
        request.

        Raises:
            ApiError: 429, too many requests wait.
        """
        place.came, place.needs, place.reserved = time.monotonic_ns(), set(needs), self._reserved
        try:
            with span.waiting() as wait:
                self._enter(place)
                await place.admitted.wait()
            yield wait.seconds
        finally:
            if place in self._waiting:
                self._remove(place)
            else:
                place.sent("decode")

    def _enter(self, place: QueuePlace) -> None:
        bisect.insort(self._waiting, place, key=lambda each: each.order)
        self._publish()
        self._admit()
        if place not in self._waiting:
            return
        if self._num_waiting.total > self._most_waiting:
            self._turned_away.add(1)
            raise self._full()
        if self._looking is None or self._looking.done():
            self._looking = asyncio.create_task(self._look())

    def _full(self) -> ApiError:
        message = (
            f"{self._most_waiting} requests wait for a server already (--max-queued-requests, "
            "max_queued_requests); send the request again later"
        )
        after_s = max(1, min(ceil(self.view().longest_s), LONGEST_RETRY_S))
        return try_again(message, "queue_full", status=429, after_s=after_s)

    async def _look(self) -> None:
        """Admits requests as servers get room, as long as a request waits. Servers come and go, and
        other processes end requests without a word: so the look is by the clock.
        """
        while self._waiting:
            await asyncio.sleep(LOOK_INTERVAL_S)
            self._admit()

    def _admit(self) -> None:
        """Admits requests of this process while it is their turn and there is room."""
        with self._lock():
            while (place := self._next()) is not None and self._has_room(place):
                self._remove(place)
                self._admitted.add(1)
                for role in place.needs:
                    self._reserved[role].add(1)
                place.admitted.set()

    def _has_room(self, place: QueuePlace) -> bool:
        rooms = {role: self._room[role]() for role in place.needs}
        return all(
            room is None or room > self._reserved[role].total for role, room in rooms.items()
        )

    def _next(self) -> QueuePlace | None:
        """The next request of all; ``None`` if no request waits, or the next one waits in another
        process.
        """
        if not self._waiting:
            return None
        if self._admitted.total % OLDEST_EACH == OLDEST_EACH - 1:
            oldest = min(self._waiting, key=_came)
            is_next = oldest.came <= min(came for _, _, came in self._published())
            return oldest if is_next else None
        first = self._waiting[0]
        return first if first.order <= min((a, b) for a, b, _ in self._published()) else None

    def _remove(self, place: QueuePlace) -> None:
        self._waiting.remove(place)
        self._publish()

    def _published(self) -> Iterator[tuple[int, int, int]]:
        """The order of the first request and the time of the oldest one, of each process in which
        requests wait.
        """
        cells = (count.cells for count in (self._priority, self._came, self._oldest))
        return compress(zip(*cells, strict=True), self._num_waiting.cells)

    def _publish(self) -> None:
        """Shows the other processes the requests that wait in this process."""
        self._num_waiting.put(len(self._waiting))
        if self._waiting:
            priority, came = self._waiting[0].order
            self._priority.put(priority)
            self._came.put(came)
            self._oldest.put(min(map(_came, self._waiting)))
