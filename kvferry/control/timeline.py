"""One request's life over several engines: what each of them tells, on one clock.

Clocks of two hosts differ. Each engine gives moments of its own wall clock, and what that clock
says now. From this is taken by how much it differs from this machine's; it can be wrong by half
the time that the answer took. A difference within that is taken for none.
"""

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future

import msgspec

from kvferry.control.client import ControlClient
from kvferry.control.messages import MAX_ID_CHARS, RequestTrace, TracePart, TraceReply
from kvferry.errors import KVFerryError, PeerLostError


class EngineAnswer(msgspec.Struct, kw_only=True):
    """What one engine said."""

    address: str
    engine_id: str = ""
    error: str = ""
    """Why it said nothing of use; empty if it did."""
    clock_ahead_s: float = 0.0
    """How much its wall clock is ahead of this machine's; 0 if that is within the next field."""
    clock_unsure_s: float = 0.0
    """By how much that may be wrong."""
    remembered: int = 0
    """Requests that it can tell of."""
    requests: list[RequestTrace] = msgspec.field(default_factory=list)
    """The request, or several of one id; times are of the engine's own clock."""


class Row(msgspec.Struct, frozen=True):
    """One part of a request's life, on this machine's clock."""

    engine: str
    started: float
    part: TracePart


def gather(client: ControlClient, addresses: Sequence[str], request_id: str) -> list[EngineAnswer]:
    """What engines know of a request, and of those whose KV it loaded; blocks.

    Each engine is asked once, and once more for each request that lent under another id.
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


_OLDER = "it runs an older kvferry, which does not know this question"


def _ask(client: ControlClient, answers: Sequence[EngineAnswer], request_id: str) -> None:
    """Adds what engines know of a request to their answers, and compares the clocks."""
    # All at once: those that do not answer are waited for together.
    asked = [_Question(client, answer.address, request_id) for answer in answers]
    for answer, question in zip(answers, asked, strict=True):
        came = question.came.result()
        try:
            reply = question.future.result()
        except KVFerryError as error:
            answer.error = _OLDER if _is_older(client, answer, error) else str(error)
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
    """A question to one engine, and when it was asked."""

    def __init__(self, client: ControlClient, address: str, request_id: str) -> None:
        self.came: Future[float] = Future()
        """When the answer came, on the monotonic clock; whoever waits may wake later."""
        self.wall, self.began = time.time(), time.monotonic()
        self.future: Future[TraceReply] = client.trace(address, request_id)
        self.future.add_done_callback(lambda _: self.came.set_result(time.monotonic()))


def _is_older(client: ControlClient, answer: EngineAnswer, error: KVFerryError) -> bool:
    """Whether an engine that did not answer this question answers another one."""
    if not isinstance(error, PeerLostError) or "no answer within" not in str(error):
        return False
    return client.status(answer.address).exception() is None


def rows_of(answers: Iterable[EngineAnswer]) -> list[Row]:
    """All parts of all requests, in the order in which they began."""
    rows = [
        Row(answer.engine_id, part.started - answer.clock_ahead_s, part)
        for answer in answers
        for request in answer.requests
        for part in request.parts
    ]
    return sorted(rows, key=lambda row: row.started)


class Stretch(msgspec.Struct, frozen=True):
    """One stretch of the hand-over: the time from the end of prefill to D's first token."""

    name: str
    owner: str
    """Who spent it."""
    seconds: float


_P_ENGINE, _D_ENGINE = "prefill engine", "decode engine"
_HANDOVER = (
    # Name, owner, and the part of D's that ends it. Each begins where the one before it ended.
    ("front", _D_ENGINE, "front"),
    ("handshake", "kvferry", "handshake"),
    ("ticket", "kvferry", "ticket"),
    ("lease", "kvferry", "lease"),
    ("wait", _D_ENGINE, "wait"),
    ("order", _D_ENGINE, "read"),  # it ends where the first read begins
    ("read", "kvferry", "read"),
    ("confirm", "kvferry", "confirm"),
    ("report", _D_ENGINE, "load"),
    ("first token", _D_ENGINE, "first token"),
)


def handover(answers: Sequence[EngineAnswer]) -> list[Stretch]:
    """What came between the end of prefill and D's first token; the stretches add up to all of it.

    What had ended before its turn, because it ran beside what is named above it, took no time of
    the hand-over: 0. Clocks of two hosts are as unsure as the answers say, and what seems to have
    ended before the stretch above it is 0 too.

    Returns:
        Nothing where no engine has loaded the request and drawn its first token, or where the
        engine that lent it does not tell of its prefill.
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
    """When the prompt of a request that was loaded had been computed, on this machine's clock."""
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
    """The stretches that D tells of, and when each ended on its clock."""
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
    """What lies between these ends, of which none may come before that above it."""
    found = []
    for name, owner, end in ends:
        found.append(Stretch(name, owner, max(0.0, end - begin)))
        begin = max(begin, end)
    return found
