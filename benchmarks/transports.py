"""The transports against NIXL, and against the limit of each path, every contender in every round.

A **stage** is a pair of processes, source and reader. The stages differ in what is in their
environment or runs in their background, so that no contender's threads, settings or idle polling
touch another's figures: a stage runs only while it is its turn.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product

from benchmarks.cases import THREADS, CacheShape, Case, all_cases
from benchmarks.kvferry_side import BARE_VM, ENCRYPTED, KvferryReader, KvferrySource, Offer
from benchmarks.nixl_side import NixlReader, NixlSource
from benchmarks.remote import Remote
from benchmarks.report import Run, in_turn
from benchmarks.transport_page import TransportResults, TransportRow
from kvferry.layouts.copier import measure_stores

NIXL_TLS = {"shm": "all", "tcp": "tcp"}
"""``UCX_TLS``. Of all transports UCX takes cross memory attach for a READ on one host; given only
those of shared memory it finds none that reports a dead peer, and NIXL does not start."""


QUICK = CacheShape(layers=2, kv_heads=2, head_size=32, block_size=16, tokens=320)


def measure(run: Run, nixl_skipped: str | None) -> TransportResults:
    """Measures all contenders.

    Args:
        run: how many rounds, and whether the cache is tiny.
        nixl_skipped: why NIXL does not take part, or ``None``.

    Raises:
        WrongDataError: a contender moved something else than it should.
    """
    shape = QUICK if run.quick else CacheShape()
    cases = all_cases()
    nixl_threads = () if nixl_skipped else (0,) if run.quick else (0, 2)
    found: dict[Case, dict[str, tuple[float, ...]]] = {case: {} for case in cases}
    with ExitStack() as stack:
        stages = _start_stages(stack, run, shape, nixl_threads)
        run.say("checking the data")
        for case in cases:
            for stage, contender in _contenders(stages, case):
                stage.check(contender, case)
        for number in range(run.rounds):
            run.say(f"round {number + 1} of {run.rounds}")
            for case in cases:
                for stage, contender in in_turn(_contenders(stages, case), number):
                    before = found[case].get(contender, ())
                    found[case][contender] = (*before, stage.measure(contender, case))
    rows = (
        TransportRow(case=case, seconds=seconds, nbytes=shape.transfer_bytes)
        for case, seconds in found.items()
    )
    return run.results(
        TransportResults,
        shape=shape,
        nixl_skipped=nixl_skipped,
        stores=measure_stores(),
        rows=tuple(rows),
    )


@dataclass(frozen=True)
class Stage:
    """Two processes and the contenders that run in them. Suspended unless something is measured."""

    source: Remote
    reader: Remote
    contenders: tuple[str, ...]
    threads: tuple[int, ...]
    """Cases it takes part in, by their number of threads."""
    permutes: bool
    """Whether a change of layout is a pass of its own."""

    def suspend(self) -> None:
        """Stops both processes."""
        self.source.suspend()
        self.reader.suspend()

    def measure(self, contender: str, case: Case) -> float:
        """One transfer; seconds."""
        self.source.resume()
        self.reader.resume()
        seconds: float = self.reader.call("measure", contender, case)
        self.source.suspend()
        if self.permutes and case.mismatched:
            seconds += self.reader.call("permute", case)
        self.reader.suspend()
        return seconds

    def check(self, contender: str, case: Case) -> None:
        """Transfers once and compares every cell.

        Raises:
            WrongDataError: the contender moved something else than it should.
        """
        self.reader.resume()
        self.reader.call("clear")
        self.measure(contender, case)
        self.reader.resume()
        self.reader.call("check", contender, case)
        self.reader.suspend()


def _contenders(stages: Sequence[Stage], case: Case) -> list[tuple[Stage, str]]:
    """Who takes part in a case."""
    there = (stage for stage in stages if case.threads in stage.threads)
    return [(stage, contender) for stage in there for contender in stage.contenders]


def _start_stages(
    stack: ExitStack, run: Run, shape: CacheShape, nixl_threads: Sequence[int]
) -> list[Stage]:
    """Starts all processes, which end with the stack.

    Args:
        stack: holds the processes.
        run: is told what starts.
        shape: the cache.
        nixl_threads: each ``num_threads`` that NIXL is set up with; 0 for its own choice. With
            threads of its own it takes part only where everybody has as many.
    """

    def start(name: str, make: Callable[..., object], *arguments: object, **env: str) -> Remote:
        run.say(f"starting {name}")
        return stack.enter_context(Remote(name, make, *arguments, env=env))

    source = start("kvferry source", KvferrySource, shape, THREADS)
    offer: Offer = source.call("offer")
    reader = start("kvferry reader", KvferryReader, shape, offer, THREADS)
    contenders: tuple[str, ...] = ("memmove", "torch copy", *BARE_VM, "socket", "shm", "vm", "tcp")
    if "tls" in offer.bare:
        contenders += ("tls", ENCRYPTED)
    stages = [Stage(source, reader, contenders, THREADS, permutes=False)]
    for num_threads, path in product(nixl_threads, NIXL_TLS):
        name = f"nixl {path}" + (f", num_threads={num_threads}" if num_threads else "")
        env = {"UCX_TLS": NIXL_TLS[path], "NIXL_LOG_LEVEL": "ERROR"}
        stages[-1].suspend()  # it is not to be in the way of what starts
        source = start(f"{name} source", NixlSource, offer, num_threads, path == "tcp", **env)
        metadata = source.call("metadata")
        reader = start(f"{name} reader", NixlReader, shape, metadata, num_threads, **env)
        threads = (num_threads,) if num_threads else THREADS
        stages.append(Stage(source, reader, (name,), threads, permutes=True))
    stages[-1].suspend()
    return stages
