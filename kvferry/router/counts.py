"""Counts of the engines' current work, shared by several processes of a router."""

import fcntl
import mmap
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from kvferry.router.pace import COUNTS, Count

SLOTS = 2048
"""Number of engines with counts: more than a router may have, because requests at forgotten engines
may go on."""
_QUEUE_SLOTS = 2
"""Number of further slots, for the counts of the router's queue."""
QUEUE_COUNTS = _QUEUE_SLOTS * COUNTS
"""Number of counts of the router's queue."""
_BYTES = 8


class CountTable:
    """Counts in memory shared by the processes of a router.

    Each process writes to its own cells, and reads the cells of all processes::

        slot of an engine, one of its counts ──▶ process 0 │ process 1 │ process 2 │ ...

    A cell has the size of a machine word, so no process reads a half-written value.
    """

    def __init__(self, fd: int, processes: int, own: int) -> None:
        """Maps the memory behind a file descriptor from :meth:`make`; ``own`` is the index of this
        process.
        """
        self._fd = fd
        self._memory = mmap.mmap(fd, _size(processes))
        self._cells = memoryview(self._memory).cast("q")
        self._processes = processes
        self._own = own
        self._next = 0
        """Slot at which the next search for a free slot begins."""

    @staticmethod
    def make(processes: int) -> int:
        """Makes a new table and returns its file descriptor. The table has no name, and disappears
        with its last process.
        """
        fd = os.memfd_create("kvferry-router")
        os.ftruncate(fd, _size(processes))
        return fd

    def counts(self, slot: int) -> list[Count]:
        """The counts of the engine with this slot."""
        firsts = [(slot * COUNTS + index) * self._processes for index in range(COUNTS)]
        return [Count(self._cells[first : first + self._processes], self._own) for first in firsts]

    def of_queue(self) -> list[Count]:
        """The counts of the router's queue."""
        return [count for slot in range(SLOTS, SLOTS + _QUEUE_SLOTS) for count in self.counts(slot)]

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keeps the other processes waiting that open this context. The lock ends with its
        process.
        """
        fcntl.lockf(self._fd, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN)

    def free(self, taken: Collection[int]) -> int:
        """A slot without an engine, and preferably without current work. A slot is given again as
        late as possible: the tasks of its former engine read its counts for a moment more.
        """
        turn = (*range(self._next, SLOTS), *range(self._next))
        free = [slot for slot in turn if slot not in taken]
        idle = (slot for slot in free if not any(count.total for count in self.counts(slot)))
        # If every free slot has current work, the new engine begins with the work of the slot's
        # former engine.
        found: int = next(idle, free[0])
        self._next = (found + 1) % SLOTS
        return found

    def clear(self, process: int) -> None:
        """Sets the counts of a dead process to 0."""
        for first in range(0, len(self._cells), self._processes):
            self._cells[first + process] = 0


def _size(processes: int) -> int:
    return (SLOTS + _QUEUE_SLOTS) * COUNTS * processes * _BYTES
