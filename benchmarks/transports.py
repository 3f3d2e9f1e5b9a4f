"""The transports against NIXL, and against the limit of each path, every contender in every round.

A **stage** is a pair of processes, source and reader. The stages differ in what is in their
environment or runs in their background, so that no contender's threads, settings or idle polling
touch another's figures: a stage runs only while it is its turn.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks import nixl_side
from benchmarks.cases import CacheShape, Case
from benchmarks.figures import FAMILIES, CaseResult, Row, compare
from benchmarks.kvferry_side import BARE_VM, ENCRYPTED, KvferryReader, KvferrySource, Offer
from benchmarks.nixl_side import NixlReader, NixlSource
from benchmarks.nixl_ways_side import NixlWaysReader, NixlWaysSource
from benchmarks.remote import Remote
from benchmarks.samples import Sample
from kvferry.lifetimes import Closing

NIXL_TLS = {"shm": "all", "tcp": "tcp"}
"""``UCX_TLS``. Of all transports UCX takes cross memory attach for a READ on one host; given only
those of shared memory it finds none that reports a dead peer, and NIXL does not start."""


Cpu = tuple[float, float]
"""CPU seconds: a process's own code, the kernel for it."""


class Measured(NamedTuple):
    """One transfer, and what it took in the two processes."""

    sample: Sample
    source_cpu: Cpu
    reader_cpu: Cpu


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

    def measure(self, contender: str, case: Case) -> Measured:
        """One transfer."""
        self._resume()
        before = self.source.cpu(), self.reader.cpu()
        sample: Sample = self.reader.call("measure", contender, case)
        source_cpu = _less(self.source.cpu(), before[0])
        sample = self._permuted(case, sample)
        reader_cpu = _less(self.reader.cpu(), before[1])
        self.suspend()
        return Measured(sample, source_cpu, reader_cpu)

    def check(self, contender: str, case: Case) -> None:
        """Transfers once and compares every cell.

        Raises:
            WrongDataError: the contender moved something else than it should.
        """
        self._resume()
        self.reader.call("clear")
        self._permuted(case, self.reader.call("measure", contender, case))
        self.reader.call("check", contender, case)
        self.suspend()

    def _permuted(self, case: Case, sample: Sample) -> Sample:
        if not (self.permutes and case.mismatched):
            return sample
        self.source.suspend()
        seconds: float = self.reader.call("permute", case)
        return Sample(sample.seconds + seconds, seconds, sample.segments)

    def _resume(self) -> None:
        self.source.resume()
        self.reader.resume()


class TransportBenchmark(Closing):
    """The processes of all contenders. A context manager."""

    def __init__(
        self,
        shape: CacheShape,
        cases: Sequence[Case],
        *,
        say: Callable[[str], object],
        nixl_threads: Sequence[int],
    ) -> None:
        """Starts the processes.

        Args:
            shape: the cache.
            cases: the cases, in the order of the table.
            say: told what is going on.
            nixl_threads: each ``num_threads`` that NIXL is set up with; 0 for its own choice. None
                at all if it does not take part.
        """
        self._shape = shape
        self._cases = list(cases)
        self._say = say
        self._stack = ExitStack()
        self._measured: dict[tuple[Case, str], list[Measured]] = defaultdict(list)
        self.stages: list[Stage] = []
        try:
            offer = self._add_kvferry()
            for num_threads in nixl_threads:
                for transport in NIXL_TLS:
                    self._add_nixl(offer, transport, num_threads)
            for transport in NIXL_TLS if nixl_threads else ():
                self._add_nixl_ways(offer, transport)
        except BaseException:
            self._stack.close()
            raise

    def run(self, rounds: int) -> list[CaseResult]:
        """Checks every contender once in every case, then measures ``rounds`` rounds.

        Raises:
            WrongDataError: a contender moved something else than it should.
        """
        for case in self._cases:
            self._say(f"checking the data: {case}")
            for stage, contender in self._contenders(case):
                stage.check(contender, case)
        for number in range(rounds):
            for case in self._cases:
                self._say(f"round {number + 1} of {rounds}: {case}")
                # Another one begins each time: none is always behind the same neighbour.
                contenders = list(self._contenders(case))
                first = number % len(contenders)
                for stage, contender in contenders[first:] + contenders[:first]:
                    self._measured[case, contender].append(stage.measure(contender, case))
        return [compare(case, self._rows(case)) for case in self._cases]

    def close(self) -> None:
        """Ends the processes. Idempotent."""
        self._stack.close()

    def _contenders(self, case: Case) -> Iterator[tuple[Stage, str]]:
        for stage in self.stages:
            if case.threads in stage.threads:
                for contender in stage.contenders:
                    # Segments of one head of one token are not what anybody places; blocks in
                    # order are no more than a few long spans.
                    placed = "placed" in contender and case.mismatched
                    if not placed and not ("blocks" in contender and not case.shuffled):
                        yield stage, contender

    def _rows(self, case: Case) -> list[Row]:
        return [
            Row(
                contender=contender,
                family=FAMILIES[contender],
                samples=tuple(each.sample for each in measured),
                source_cpu=_mean([each.source_cpu for each in measured]),
                reader_cpu=_mean([each.reader_cpu for each in measured]),
            )
            for (of, contender), measured in self._measured.items()
            if of == case
        ]

    def _add_kvferry(self) -> Offer:
        threads = self._threads()
        self._say("starting kvferry's source and reader")
        source = self._start("kvferry source", KvferrySource, self._shape, threads, env={})
        offer: Offer = source.call("offer")
        reader = self._start("kvferry reader", KvferryReader, self._shape, offer, threads, env={})
        contenders: tuple[str, ...] = ("memmove", "torch copy", *BARE_VM, "socket")
        contenders += ("shm", "vm", "tcp")
        if offer.encrypted:
            contenders += ("tls", ENCRYPTED)
        self._add(Stage(source, reader, contenders, threads, permutes=False))
        return offer

    def _add_nixl(self, offer: Offer, transport: str, num_threads: int) -> None:
        """With threads of its own it takes part only where everybody has as many."""
        name = f"nixl {transport}" + (f", num_threads={num_threads}" if num_threads else "")
        threads = (num_threads,) if num_threads else self._threads()
        env = {"UCX_TLS": NIXL_TLS[transport], "NIXL_LOG_LEVEL": "ERROR"}
        self._say(f"starting {name}")
        source = self._start(
            f"{name} source", NixlSource, offer, num_threads, transport == "tcp", env=env
        )
        metadata = source.call("metadata")
        reader = self._start(
            f"{name} reader", NixlReader, self._shape, metadata, num_threads, env=env
        )
        self._add(Stage(source, reader, (name,), threads, permutes=True))

    def _add_nixl_ways(self, offer: Offer, transport: str) -> None:
        """Our transport over NIXL, by both ways."""
        name = f"kvferry nixl {transport}"
        env = {"UCX_TLS": NIXL_TLS[transport], "NIXL_LOG_LEVEL": "ERROR"}
        threads = self._threads()
        self._say(f"starting {name}")
        source = self._start(f"{name} source", NixlWaysSource, offer, env=env)
        endpoint = source.call("endpoint")
        reader = self._start(
            f"{name} reader", NixlWaysReader, self._shape, endpoint, threads, env=env
        )
        contenders = (f"nixl (placed) {transport}", f"nixl (staged) {transport}")
        self._add(Stage(source, reader, contenders, threads, permutes=False))

    def _start(
        self, name: str, make: Callable[..., object], *arguments: object, env: Mapping[str, str]
    ) -> Remote:
        return self._stack.enter_context(Remote(name, make, *arguments, env=env))

    def _add(self, stage: Stage) -> None:
        stage.suspend()
        self.stages.append(stage)

    def _threads(self) -> tuple[int, ...]:
        return tuple(sorted({case.threads for case in self._cases}))


def why_no_nixl() -> str | None:
    """Why NIXL cannot take part, or ``None``."""
    return nixl_side.why_missing()


def _less(after: Cpu, before: Cpu) -> Cpu:
    return after[0] - before[0], after[1] - before[1]


def _mean(pairs: Sequence[Cpu]) -> Cpu:
    first, second = zip(*pairs, strict=True)
    return sum(first) / len(pairs), sum(second) / len(pairs)
