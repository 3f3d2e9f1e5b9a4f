"""Clients that ask without a pause, and what is made of their answers."""

import http.client
import itertools
import socket
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import msgspec

from kvferry.testing.hosts import Host

EVENT_TIMEOUT_S = 150.0
"""Seconds without a byte after which a client gives up; longer than every fault."""
MOST_ERRORS = 5
"""Different errors that a cell quotes."""
_ERROR_LENGTH = 400


class RequestFailedError(Exception):
    """A client got no whole answer."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An HTTP server on a host, asked from another host."""

    client: Host
    address: str
    port: int
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """For other hosts."""
        return f"http://{self.address}:{self.port}"

    def ask(
        self, method: str, path: str, body: object = None, timeout_s: float = EVENT_TIMEOUT_S
    ) -> tuple[int, bytes]:
        """Status and content of an answer.

        Raises:
            OSError, http.client.HTTPException: there is none.
        """
        connection = self._connect(timeout_s)
        try:
            content = None if body is None else msgspec.json.encode(body)
            headers = {**self.headers, "content-type": "application/json"}
            connection.request(method, path, content, headers)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def stream(self, body: Mapping[str, Any]) -> Iterator[list[int]]:
        """The tokens of a completion as they come; returns when the server said that it is over.

        Raises:
            RequestFailedError: refused, failed or broken off.
        """
        connection = self._connect_to_stream()
        try:
            headers = {**self.headers, "content-type": "application/json"}
            whole = {**body, "stream": True}
            connection.request("POST", "/v1/completions", msgspec.json.encode(whole), headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RequestFailedError(f"HTTP {response.status}: {response.read().decode()}")
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if data:
                    yield _tokens_in(data)
        except (OSError, http.client.HTTPException) as error:
            raise RequestFailedError(repr(error)) from error
        finally:
            connection.close()
        raise RequestFailedError("the stream broke off")

    def _connect_to_stream(self) -> http.client.HTTPConnection:
        try:
            return self._connect(EVENT_TIMEOUT_S)
        except OSError as error:
            raise RequestFailedError(repr(error)) from error

    def _connect(self, timeout_s: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(self.address, self.port)
        connection.sock = self.client.connect(self.address, self.port, timeout_s)
        # A host that has died says nothing: this is how its clients get to know.
        connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return connection


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: Any = None


def _tokens_in(data: bytes) -> list[int]:
    event = msgspec.json.decode(data, type=_Event)
    if event.error is not None:
        raise RequestFailedError(data.decode())
    return [token for choice in event.choices for token in choice.token_ids or []]


@dataclass(slots=True)
class Answer:
    """What one client got."""

    prompt: int
    """Index of its prompt."""
    began: float
    """On the monotonic clock, as all times here."""
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    error: str = ""
    """Why it is not whole; empty if it is."""
    stall_s: float = 0.0
    """The longest time in which the client got no token."""

    def end(self, last: float, error: str = "") -> Self:
        """Notes that nothing more comes."""
        self.ended = time.monotonic()
        self.stall_s = max(self.stall_s, self.ended - last)
        self.error = error
        return self


@dataclass(frozen=True, slots=True)
class Prompts:
    """What is asked, and what one undivided engine answers."""

    prompts: Sequence[Sequence[int]]
    expected: Sequence[Sequence[int]]

    @property
    def max_tokens(self) -> int:
        """Of every answer."""
        return len(self.expected[0])

    def body(self, index: int) -> dict[str, Any]:
        """The request for a prompt."""
        return {
            "prompt": list(self.prompts[index]),
            "max_tokens": self.max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def is_wrong(self, answer: Answer) -> bool:
        """Whether a client took other tokens for the answer. Of an answer that broke off, those
        that came count.
        """
        expected = list(self.expected[answer.prompt])
        if answer.error:
            return answer.tokens != expected[: len(answer.tokens)]
        return answer.tokens != expected


def ask(endpoint: Endpoint, prompts: Prompts, index: int, **fields: Any) -> Answer:
    """One streamed answer; an error of any kind is one too."""
    last = time.monotonic()
    answer = Answer(index, last)
    try:
        for tokens in endpoint.stream({**prompts.body(index), **fields}):
            now = time.monotonic()
            answer.stall_s = max(answer.stall_s, now - last)
            last = now
            answer.tokens += tokens
    except (RequestFailedError, msgspec.DecodeError) as error:
        return answer.end(last, str(error)[:_ERROR_LENGTH])
    return answer.end(last)


class Clients(ABC):
    """Threads that call :meth:`turn` again and again until this is closed. A context manager."""

    def __init__(self, number: int) -> None:
        """They start with the block."""
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(number)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.turn()

    @abstractmethod
    def turn(self) -> None:
        """Asks once."""


class Load(Clients):
    """Clients that ask one prompt after the other until this is closed."""

    def __init__(self, endpoint: Endpoint, prompts: Prompts, clients: int, first: int = 0) -> None:
        """Begins with the prompt ``first``, so that cells do not find each other's in caches."""
        self.answers: list[Answer] = []
        """Those that have ended."""
        self._endpoint = endpoint
        self._prompts = prompts
        self._next = itertools.count(first)
        super().__init__(clients)

    def turn(self) -> None:
        """See :meth:`Clients.turn`."""
        index = next(self._next) % len(self._prompts.prompts)
        answer = ask(self._endpoint, self._prompts, index)
        self.answers.append(answer)
        if answer.error:
            # Nobody asks a cluster that refuses everything a thousand times a second.
            self._stop.wait(0.2)


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """What the clients of a cell saw."""

    requests: int
    wrong: int
    """Answers with other tokens than an undivided engine's."""
    failed: int
    """HTTP errors, and streams that broke off."""
    stall_s: float
    """The longest time in which some client got no token."""
    back_s: float | None
    """Seconds until throughput was back; ``None``: never."""
    errors: tuple[str, ...] = ()
    """Some of the failures' words."""


def count(answers: Sequence[Answer], prompts: Prompts, began: float, over: float) -> Counts:
    """Judges the answers of a cell.

    Args:
        answers: all of them.
        prompts: what was asked.
        began: when the fault came; before it all was well.
        over: the time from which it counts how long throughput needs.
    """
    ended = sorted(answer.ended for answer in answers if not answer.error)
    errors = dict.fromkeys(answer.error for answer in answers if answer.error)
    return Counts(
        requests=len(answers),
        wrong=sum(map(prompts.is_wrong, answers)),
        failed=sum(bool(answer.error) for answer in answers),
        stall_s=round(max((answer.stall_s for answer in answers), default=0.0), 2),
        back_s=seconds_until_back(ended, began, over),
        errors=tuple(errors)[:MOST_ERRORS],
    )


def seconds_until_back(ended: Sequence[float], began: float, over: float) -> float | None:
    """Seconds from ``over`` until answers end at half the rate of before, or faster.

    >>> seconds_until_back([0, 1, 2, 3, 4, 5, 9, 10, 11, 12, 13, 14, 15, 16, 17], 5, 6)
    3.0

    Args:
        ended: when good answers ended, in order.
        began: when the fault came.
        over: when it was over.
    """
    before = [when for when in ended if when <= began]
    if len(before) < 2:
        return None
    rate = (len(before) - 1) / max(before[-1] - before[0], 1e-3)
    wanted = max(4, round(rate / 2))
    window = 2 * wanted / rate
    after = [when for when in ended if when > over]
    for first, last in zip(after, after[wanted - 1 :], strict=False):
        if last - first <= window:
            return round(max(0.0, first - over), 2)
    return None
