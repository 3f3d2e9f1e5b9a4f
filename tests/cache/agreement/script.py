"""A short list of operations, written out: for what a random workload would rarely meet."""

from typing import Any

import msgspec

from benchmarks.peers.peer import Allocation, CachePeer
from tests.cache.agreement.trace import Record, Recorder


class Admit(msgspec.Struct, frozen=True, tag="admit"):
    """Looks a new request up, and allocates for it."""

    request: str
    tokens: list[int]
    asked: Allocation
    """Its ``num_new_tokens`` and ``num_external_tokens`` come after the hit."""


class Grow(msgspec.Struct, frozen=True, tag="grow"):
    """Allocates for tokens after those that are computed, and takes them for computed then."""

    request: str
    num_tokens: int


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """A load has filled all blocks of the first ``num_tokens`` tokens that were to be filled."""

    request: str
    num_tokens: int


class Free(msgspec.Struct, frozen=True, tag="free"):
    """Gives a request's blocks back."""

    request: str


Step = Admit | Grow | Loaded | Free


def play(peer: CachePeer, steps: list[Step]) -> list[Record]:
    """Does the steps to a new manager; a record for each."""
    trace = Recorder(peer)
    requests: dict[str, Any] = {}
    for step in steps:
        if isinstance(step, Admit):
            request = requests[step.request] = peer.request(step.request, step.tokens)
            hit = peer.lookup(request)
            new = peer.allocate(request, step.asked, hit)
            request.num_computed_tokens = hit.num_tokens + step.asked.num_new_tokens
            trace.add("admit", request, hit=hit, asked=step.asked, new=new)
            continue
        request = requests[step.request]
        match step:
            case Grow(_, num_tokens):
                asked = Allocation(num_tokens)
                new = peer.allocate(request, asked)
                request.num_computed_tokens += num_tokens
                trace.add("grow", request, asked=asked, new=new)
            case Loaded(_, num_tokens):
                request.num_computed_tokens = num_tokens
                peer.cache(request, num_tokens)
                trace.add("loaded", request)
            case Free():
                peer.free(request)
                trace.add("free", request)
    return trace.records
