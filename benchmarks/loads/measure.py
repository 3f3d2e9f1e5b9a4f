"""Measures short loads beside the commit before and beside a bare READ of NIXL.

Every contender is a pair of processes, see :mod:`benchmarks.loads.process`. Those of one transport
and one cache are open at the same time and take turns in every round; NIXL's, which poll when they
are idle, are suspended while it is not their turn.
"""

import itertools
import shlex
import statistics
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.loads.process import ROOT, Pair, Side, install
from benchmarks.loads.shared import Cache, Loads, rounds_of
from benchmarks.machine import Machine, load_average

CACHES = (Cache(4, 2, 64), Cache(32, 8, 128))
TOKENS = (16, 256, 1000)
TRANSPORTS = {
    "shm": ("shm", "shm"),
    "vm": ("vm", "shm"),
    "nixl": ("nixl", "shm"),
    "tcp": ("tcp", "tcp"),
    "nixl over TCP": ("nixl", "tcp"),
}
"""Row → kvferry's transport, and the path over which NIXL goes beside it."""
_NIXL = {"shm": {"NIXL": False}, "tcp": {"NIXL": False, "NIXL, progress thread": True}}
"""Path → contenders, and whether the reader has a progress thread. Over shared memory a READ ends
while it is posted, so that a thread only takes a core from it."""
SLICE_S = 1e-3
"""Seconds of Python between two looks of a busy rank."""


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one row. Times are seconds."""

    rounds: tuple[float, ...]
    """Median of each round."""
    median: float
    """Over all loads."""
    p99: float
    loads: int
    called: float
    """Median until ``start_load_kv``, or NIXL's post, returned."""
    in_place: float
    """Median until the rank knew that all bytes are in place, as its transfer record says."""


class LoadsRow(msgspec.Struct, frozen=True, kw_only=True):
    """One transport, cache, size and state of the main thread."""

    transport: str
    cache: str
    tokens: int
    nbytes: int
    busy: bool
    """Whether the rank's main thread runs Python between two looks."""
    timings: dict[str, Timing]
    """By contender: ``kvferry``, ``before``, and NIXL's."""

    @property
    def nixl(self) -> Timing | None:
        """NIXL's faster way, by its median."""
        names = self.timings.keys() - {"kvferry", "before"}
        return min((self.timings[name] for name in names), key=lambda t: t.median, default=None)

    @property
    def before(self) -> Timing | None:
        """The commit before."""
        return self.timings.get("before")

    def ratios(self, other: Timing) -> list[float]:
        """How many times faster ours is, by round."""
        ours = self.timings["kvferry"].rounds
        return [theirs / mine for mine, theirs in zip(ours, other.rounds, strict=True)]

    def ratio(self, other: Timing) -> float:
        """The median of these."""
        return statistics.median(self.ratios(other))


class LoadsResults(msgspec.Struct, frozen=True, kw_only=True):
    """All that one run measured."""

    command: str
    rounds: int
    machine: Machine
    load_after: float
    base: str | None
    """The commit before."""
    quick: bool
    """Whether this was only a test of the benchmark."""
    rows: tuple[LoadsRow, ...]


def loads_per_round(tokens: int, nbytes: int) -> int:
    """Enough of the shortest for a p99 in ten rounds, few where a load is long."""
    if tokens == min(TOKENS):
        return 20
    return 10 if nbytes < 4 << 20 else 4 if nbytes < 64 << 20 else 2


def measure(
    command: str,
    machine: Machine,
    rounds: int,
    quick: bool,
    say: Callable[[str], object],
    *,
    base: Path | None,
    nixl: bool,
    transports: Sequence[str] = tuple(TRANSPORTS),
) -> LoadsResults:
    """Runs all transports and caches, one after the other, in ``rounds`` rounds each.

    Args:
        command: what a user wrote.
        machine: where this runs.
        rounds: in each, every contender does some loads of every size.
        quick: the small cache, the short loads, two loads a round.
        say: told what is going on.
        base: a checkout of the commit before; ``None`` compares with none.
        nixl: whether NIXL is installed and takes part.
        transports: names of :data:`TRANSPORTS`.

    Raises:
        LoadsError: a process failed, or a load left wrong bytes.
    """
    work_rounds = rounds_of(SLICE_S)
    commit = None if base is None else commit_of(base)
    rows: list[LoadsRow] = []
    with tempfile.TemporaryDirectory() as folder:
        checkouts = {"kvferry": install(ROOT, Path(folder, "now"))}
        if base is not None:
            checkouts["before"] = install(base, Path(folder, "before"))
            command = command.replace(shlex.quote(str(base)), f"CHECKOUT_OF_{commit}")
        chosen = [name for name in transports if nixl or TRANSPORTS[name][0] != "nixl"]
        for cache, transport in product(CACHES[:1] if quick else CACHES, chosen):
            with ExitStack() as stack:
                say(f"starting loads over {transport}, {cache_text(cache)}")
                pairs = _open(stack, checkouts, transport, cache, nixl)
                rows += _measure_group(pairs, transport, cache, rounds, quick, work_rounds, say)
    return LoadsResults(
        command=command,
        rounds=rounds,
        machine=machine,
        load_after=load_average(),
        base=commit,
        quick=quick,
        rows=tuple(rows),
    )


def _open(
    stack: ExitStack, checkouts: dict[str, Path], transport: str, cache: Cache, nixl: bool
) -> dict[str, Pair]:
    """All contenders of one transport and one cache, by name."""
    name, path = TRANSPORTS[transport]

    def start(checkout: str, kind: str, *arguments: Any) -> Side:
        side = Side(checkouts[checkout], path, kind, *arguments)
        stack.callback(side.close)
        return side

    # All at once: what they import takes a second each.
    engines = {
        checkout: (start(checkout, "Prefill", name, cache), start(checkout, "Decode", name, cache))
        for checkout in checkouts
    }
    sources = {
        contender: start("kvferry", "NixlSource", path, cache)
        for contender in (_NIXL[path] if nixl else ())
    }
    for side in (*itertools.chain(*engines.values()), *sources.values()):
        side.wait_until_open()
    pairs = {checkout: Pair(*sides) for checkout, sides in engines.items()}
    for contender, source in sources.items():
        described = source.call("describe")
        target = start("kvferry", "NixlTarget", _NIXL[path][contender], cache, described)
        target.wait_until_open()
        pairs[contender] = Pair(source, target, suspended=True)
    return pairs


def _measure_group(
    pairs: dict[str, Pair],
    transport: str,
    cache: Cache,
    rounds: int,
    quick: bool,
    work_rounds: int,
    say: Callable[[str], object],
) -> Iterator[LoadsRow]:
    cases = list(product(TOKENS[:2] if quick else TOKENS, (False, True)))
    measured: dict[tuple[int, bool, str], list[Loads]] = defaultdict(list)
    for number in range(rounds + 1):  # the first one warms up
        say(f"loads over {transport}, {cache_text(cache)}: round {number} of {rounds}")
        # Another one begins each time: none is always behind the same neighbour.
        names = list(pairs)
        turn = number % len(names)
        for (tokens, busy), name in product(cases, names[turn:] + names[:turn]):
            full = loads_per_round(tokens, cache.load_bytes(tokens))
            count = 2 if quick or number == 0 else full
            loads = pairs[name].load(tokens, count, work_rounds if busy else 0)
            if number > 0:
                measured[tokens, busy, name].append(loads)
    for tokens, busy in cases:
        yield LoadsRow(
            transport=transport,
            cache=cache_text(cache),
            tokens=tokens,
            nbytes=cache.load_bytes(tokens),
            busy=busy,
            timings={name: timing(measured[tokens, busy, name]) for name in pairs},
        )


def timing(rounds: Sequence[Loads]) -> Timing:
    """What is kept of a contender's loads, given by round."""
    seconds, called, in_place = zip(*(load for loads in rounds for load in loads), strict=True)
    return Timing(
        rounds=tuple(statistics.median(load[0] for load in loads) for loads in rounds),
        median=statistics.median(seconds),
        p99=float(np.percentile(seconds, 99)),
        loads=len(seconds),
        called=statistics.median(called),
        in_place=statistics.median(in_place),
    )


def cache_text(cache: Cache) -> str:
    """The second cell of a row."""
    return f"{cache.layers} × {cache.heads} × {cache.head_size}"


def commit_of(checkout: Path) -> str:
    """The commit that is checked out, shortened; ``unknown`` outside of a repository."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(command, check=False, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"
