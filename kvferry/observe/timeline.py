"""The life of a request over several engines: the records of all engines, on the same clock.

The clocks of two hosts differ. Each engine reports times of its own wall clock, and the present
reading of this clock. From the reading, this module computes the difference to the clock of this
machine. The difference can be wrong by half the time that the answer took. A difference within this
error counts as 0.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

import msgspec

from kvferry.control.client import ControlClient
from kvferry.control.messages import MAX_ID_CHARS, RequestTrace, TracePart, TraceReply
from kvferry.errors import KVFerryError


class EngineAnswer(msgspec.Struct, kw_only=True):
    """The answer of an engine."""

    address: str
    engine_id: str = ""
    error: str = ""
    """Reason why the engine gave no useful answer; empty if it did."""
    clock_ahead_s: float = 0.0
    """Seconds by which the engine's wall clock is ahead of this machine's clock; 0 if the
    difference is within ``clock_unsure_s``."""
    clock_unsure_s: float = 0.0
    """Largest error of ``clock_ahead_s``, in seconds."""
    remembered: int = 0
    """Number of requests in the engine's memory."""
    requests: list[RequestTrace] = msgspec.field(default_factory=list)
    """The request, or several requests with the same id; times are of the engine's own clock."""


class Row(msgspec.Struct, frozen=True):
    """A part of a request's life, on this machine's clock."""

    engine: str
    started: float
    part: TracePart


def gather(client: ControlClient, addresses: Sequence[str], request_id: str) -> list[EngineAnswer]:
    """Collects the engines' records of a request, and of the requests whose KV it loaded; blocks.

    Each engine is asked once, and again for each request that lent blocks under another id.
    """
    answers = [EngineAnswer(address=address) for address in addresses]
    _ask(client, answers, request_id)
    heard = [answer for answer in answers if not answer.error]
    lenders = {
        request.peer_request_id
        for answer in heard
        for request in answer.requests
        if 0 < len(request.peer_request_id) <= MAX_ID_CHARS
    }
    for lender in sorted(lenders - {request_id}):
        _ask(client, [answer for answer in heard if not answer.error], lender)
    return answers


def _ask(client: ControlClient, answers: Sequence[EngineAnswer], request_id: str) -> None:
    """Adds the engines' records of a request to their answers, and compares the clocks."""
    # Ask all engines at once: the silent engines are waited for together.
    asked = [_Question(client, answer.address, request_id) for answer in answers]
    for answer, question in zip(answers, asked, strict=True):
        came = question.came.result()
        try:
            reply = question.future.result()
        except KVFerryError as error:
            answer.error = str(error)
            continue
        unsure = (came - question.began) / 2
        if not answer.engine_id or unsure < answer.clock_unsure_s:
            ahead = reply.now - (question.wall + unsure)
            answer.clock_ahead_s = ahead if abs(ahead) > unsure else 0.0
            answer.clock_unsure_s = unsure
        answer.engine_id, answer.remembered = reply.engine_id, reply.remembered
        known = {request.request_id for request in answer.requests}
        answer.requests += [one for one in reply.requests if one.request_id not in known]


class _Question:
    """A question to an engine, with its time."""

    def __init__(self, client: ControlClient, address: str, request_id: str) -> None:
        self.came: Future[float] = Future()
        """Monotonic clock reading when the answer came; a waiting thread may wake later."""
        self.wall, self.began = time.time(), time.monotonic()
        self.future: Future[TraceReply] = client.trace(address, request_id)
        self.future.add_done_callback(lambda _: self.came.set_result(time.monotonic()))


def rows_of(answers: Iterable[EngineAnswer]) -> list[Row]:
    """All parts of all requests, in the order in which the parts began."""
    rows = [
        Row(answer.engine_id, part.started - answer.clock_ahead_s, part)
        for answer in answers
        for request in answer.requests
        for part in request.parts
    ]
    return sorted(rows, key=lambda row: row.started)


class Stretch(msgspec.Struct, frozen=True):
    """A part of the hand-over: the time from the end of prefill to D's first token."""

    name: str
    owner: str
    """The component that used this time."""
    seconds: float


_P_ENGINE, _D_ENGINE = "prefill engine", "decode engine"
_HANDOVER = (
    # Name, owner, and the part of D that ends the stretch. Each stretch begins at the end of the
    # stretch before.
    ("front", _D_ENGINE, "front"),
    ("handshake", "kvferry", "handshake"),
    ("ticket", "kvferry", "ticket"),
    ("lease", "kvferry", "lease"),
    ("wait", _D_ENGINE, "wait"),
    ("order", _D_ENGINE, "read"),  # ends when the first read begins
    ("read", "kvferry", "read"),
    ("confirm", "kvferry", "confirm"),
    ("report", _D_ENGINE, "load"),
    ("first token", _D_ENGINE, "first token"),
)


def handover(answers: Sequence[EngineAnswer]) -> list[Stretch]:
    """The parts of the time between the end of prefill and D's first token; their sum is all of it.

    A stretch has length 0 if it ended before the stretch above it did, because both ran at the same
    time. Clocks of two hosts are only as exact as the answers say; a stretch that seems to end
    before the stretch above it also has length 0.

    Returns:
        The stretches. Empty if no engine has loaded the request and sampled its first token, or if
        the prefill engine has no record of its prefill.
    """
    for answer in answers:
        for request in answer.requests:
            parts = [part for part in request.parts if not part.is_open and not part.error]
            prefilled = _end_of_prefill(answers, request)
            if prefilled is not None and {"load", "first token"} <= {part.name for part in parts}:
                ends = _ends(request.started, parts)
                return _stretches(prefilled + answer.clock_ahead_s, ends)
    return []


def _end_of_prefill(answers: Iterable[EngineAnswer], loaded: RequestTrace) -> float | None:
    """The end of the prefill of a loaded request, on this machine's clock."""
    ends = [
        part.started + part.seconds - answer.clock_ahead_s
        for answer in answers
        if answer.engine_id == loaded.peer
        for lent in answer.requests
        if lent.request_id == loaded.peer_request_id
        for part in lent.parts
        if part.name == "prefill" and not part.is_open
    ]
    return max(ends, default=None)


def _ends(arrived: float, parts: Sequence[TracePart]) -> Iterator[tuple[str, str, float]]:
    """The stretches in D's record, and the end of each on D's clock."""
    routed = [part.started for part in parts if part.name == "router"]
    if routed:
        yield "answer", _P_ENGINE, max(routed)
        yield "router", "router", arrived
    else:
        yield "answer and router", f"{_P_ENGINE}, router", arrived
    for name, owner, part_name in _HANDOVER:
        found = [part for part in parts if part.name == part_name]
        if not found:
            continue
        if name == "order":
            end = min(part.started for part in found)
        else:
            end = max(part.started + part.seconds for part in found)
        yield name, owner, end


def _stretches(begin: float, ends: Iterable[tuple[str, str, float]]) -> list[Stretch]:
    """The stretches between these ends; no end may come before the end above it."""
    found = []
    for name, owner, end in ends:
        found.append(Stretch(name, owner, max(0.0, end - begin)))
        begin = max(begin, end)
    return found
