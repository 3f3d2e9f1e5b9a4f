"""What other threads ask of a thread that waits for several things at once."""

import contextlib
import os
import queue
import threading
from collections.abc import Callable


class Tasks:
    """Tasks for one thread, which waits for :attr:`event_fd` beside its other descriptors."""

    def __init__(self) -> None:
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        """Readable once something was posted, until :meth:`quiet`."""
        self._posted: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def post(self, task: Callable[[], object]) -> None:
        """Has the thread call ``task``; from any thread. After ``close`` nothing happens."""
        self._posted.put(task)
        with self._lock:  # once closed, the descriptor may be somebody else's
            if self.event_fd >= 0:
                os.eventfd_write(self.event_fd, 1)

    def quiet(self) -> None:
        """Makes the descriptor unreadable; what was posted before is for the next :meth:`run`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event_fd)

    def run(self) -> bool:
        """Calls what was posted; whether there was anything."""
        ran = False
        while not self._posted.empty():  # nobody else takes from it
            self._posted.get()()
            ran = True
        return ran

    def close(self) -> None:
        """Gives the descriptor back, after the thread has ended."""
        with self._lock:
            os.close(self.event_fd)
            self.event_fd = -1
