"""Clients that keep asking while something happens to a cluster, and waiting for what must come."""

import http.client
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import httpx
import msgspec

from benchmarks.faults.load import Clients
from kvferry.testing.waiting import WAIT_S, until


def stop(pid: int) -> None:
    """Stops a process (SIGSTOP), and waits for each of its threads: a thread runs on until it sees
    the signal.
    """
    os.kill(pid, signal.SIGSTOP)
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    until(lambda: all("State:\tT" in (thread / "status").read_text() for thread in threads))


def tokens_in(lines: Iterable[str]) -> Iterator[int]:
    """The tokens of a streamed answer, from its lines as they come.

    Raises:
        AssertionError: the client is told of an error.
    """
    for line in lines:
        data = line.removeprefix("data: ")
        if data not in ("", "[DONE]"):
            assert '"error"' not in data, data
            for choice in msgspec.json.decode(data)["choices"]:
                yield from choice.get("token_ids") or []


class Load(Clients):
    """Clients that ask until the block ends; every answer is kept, and every error."""

    def __init__(
        self,
        ask: Callable[[int], list[int]],
        numbers: Iterator[int],
        *,
        clients: int,
        wait_s: float = WAIT_S,
    ) -> None:
        """Args:
        ask: the tokens of the answer to the prompt of a number; may be called by any thread.
        numbers: of the prompts; an iterator of ``itertools``, which any thread may ask.
        clients: how many ask at a time.
        wait_s: how long the load waits for what is bound to come.
        """
        self.answers: list[tuple[int, list[int]]] = []
        """Number and tokens, in the order of their ends."""
        self.errors: list[str] = []
        self._ask = ask
        self._numbers = numbers
        self._wait_s = wait_s
        self._under_way: dict[threading.Thread, object] = {}
        """Client → what stands for its request."""
        super().__init__(clients)

    def turn(self) -> None:
        """See :meth:`Clients.turn`."""
        number = next(self._numbers)
        self._under_way[threading.current_thread()] = object()
        try:
            self.answers.append((number, self._ask(number)))
        except (AssertionError, OSError, httpx.HTTPError, http.client.HTTPException) as error:
            self.errors.append(f"request {number}: {error!r}")

    def until_all_are_new(self) -> None:
        """Waits until every client asks something that it did not ask before, or for an error."""
        until(lambda: self.errors or len(self._under_way) == len(self._threads), self._wait_s)
        before = dict(self._under_way)

        def are_new() -> bool:
            return all(self._under_way[client] is not asked for client, asked in before.items())

        until(lambda: self.errors or are_new(), self._wait_s)

    def goes_on(self) -> None:
        """Waits until every client has the answer to something that it asks only now, or for an
        error.
        """
        self.until_all_are_new()
        self.until_all_are_new()

    def wrong(self, expected: Callable[[int], list[int]]) -> list[int]:
        """Numbers of the prompts with another answer than the expected one."""
        return [number for number, tokens in self.answers if tokens != expected(number)]
