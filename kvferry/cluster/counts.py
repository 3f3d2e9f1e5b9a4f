"""What engines have under way, where several processes of a router give them requests."""

import mmap
import os
from collections.abc import Collection

from kvferry.cluster.pace import COUNTS, Count

SLOTS = 2048
"""Engines that have counts: more than a router may have, as requests at some that it has forgotten
may go on."""
_BYTES = 8


class CountTable:
    """Counts in memory that the processes of a router share.

    Each process writes to cells of its own, and reads those of all::

        slot of an engine, one of its counts ──▶ process 0 │ process 1 │ process 2 │ ...

    A cell has the size of a machine word, so that nobody reads half of what another one writes.
    """

    def __init__(self, fd: int, processes: int, own: int) -> None:
        """In the memory behind a file descriptor of :meth:`make`; ``own`` is this process."""
        self._memory = mmap.mmap(fd, _size(processes))
        self._cells = memoryview(self._memory).cast("q")
        self._processes = processes
        self._own = own

    @staticmethod
    def make(processes: int) -> int:
        """The file descriptor of a new table; it has no name, and ends with its last process."""
        fd = os.memfd_create("kvferry-router")
        os.ftruncate(fd, _size(processes))
        return fd

    def counts(self, slot: int) -> list[Count]:
        """Those of the engine that has a slot."""
        firsts = [(slot * COUNTS + index) * self._processes for index in range(COUNTS)]
        return [Count(self._cells[first : first + self._processes], self._own) for first in firsts]

    def free(self, taken: Collection[int]) -> int:
        """A slot that no engine has, and in which nothing is under way."""
        free = [slot for slot in range(SLOTS) if slot not in taken]
        idle = (slot for slot in free if not any(count.total for count in self.counts(slot)))
        # Where each has something under way, an engine begins with what one before it still has.
        return next(idle, free[0])

    def clear(self, process: int) -> None:
        """A process has died, and what it had under way with it."""
        for first in range(0, len(self._cells), self._processes):
            self._cells[first + process] = 0


def _size(processes: int) -> int:
    return SLOTS * COUNTS * processes * _BYTES
