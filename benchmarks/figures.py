"""What is made of the measurements: medians, ratios, goals."""

import statistics
from collections.abc import Mapping, Sequence

import msgspec

from benchmarks.cases import Case
from benchmarks.samples import Sample

FAMILIES: Mapping[str, str] = {
    "memmove": "memcpy",
    "torch copy": "memcpy",
    "shm": "shm",
    "process_vm_readv": "process_vm_readv",
    "process_vm_readv, shared out": "process_vm_readv",
    "process_vm_readv, blocks": "process_vm_readv, blocks",
    "vm": "vm",
    "socket": "socket",
    "tcp": "tcp",
    "tls": "tls",
    "tcp encrypted": "tcp encrypted",
    "nixl shm": "nixl shm",
    "nixl shm, num_threads=2": "nixl shm",
    "nixl tcp": "nixl tcp",
    "nixl tcp, num_threads=2": "nixl tcp",
    "nixl (placed) shm": "nixl (placed) shm",
    "nixl (placed) tcp": "nixl (placed) tcp",
    "nixl (staged) shm": "nixl (staged) shm",
    "nixl (staged) tcp": "nixl (staged) tcp",
}
"""Contender → family. Ways to do the same thing are a family: its fastest member counts."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one case."""

    contender: str
    family: str
    samples: tuple[Sample, ...]
    """One per round."""
    source_cpu: tuple[float, float]
    """CPU seconds of a transfer in the source's process, mean: its own code, the kernel for it."""
    reader_cpu: tuple[float, float]
    """The same in the reader's process."""

    @property
    def seconds(self) -> float:
        """Median of a transfer."""
        return statistics.median(sample.seconds for sample in self.samples)

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of a transfer, both processes together."""
        return sum(self.source_cpu) + sum(self.reader_cpu)

    @property
    def kernel_seconds(self) -> float:
        """The part of it that the kernel took."""
        return self.source_cpu[1] + self.reader_cpu[1]


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """How many times faster ours is: the median over the rounds of each round's ratio."""

    ours: str
    theirs: str
    median: float
    low: float
    high: float
    goal: float

    @property
    def met(self) -> bool:
        """Whether the goal is met."""
        return self.median >= self.goal


class CaseResult(msgspec.Struct, frozen=True, kw_only=True):
    """One case: its contenders and how they compare."""

    case: Case
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]

    def best(self, family: str) -> Row | None:
        """The fastest of a family, by its median; ``None`` if it did not take part."""
        rows = [row for row in self.rows if row.family == family]
        return min(rows, key=lambda row: row.seconds, default=None)

    def ratio(self, ours: str, theirs: str) -> Ratio | None:
        """The comparison of two families, if it was made."""
        for ratio in self.ratios:
            if (ratio.ours, ratio.theirs) == (ours, theirs):
                return ratio
        return None


def goal_of(case: Case, ours: str, theirs: str) -> float:
    """How many times faster ours is meant to be.

    >>> goal_of(Case("NHD", "NHD", shuffled=True, threads=2), "shm", "nixl shm")
    3.0
    """
    if theirs == "tls":
        return 0.8
    if theirs == "socket":
        return 0.6 if case.mismatched else 0.85
    if theirs == "memcpy":
        return 0.85 if case.threads == 1 else 0.9
    if theirs.startswith("process_vm_readv"):
        return 0.7 if case.mismatched else 0.9
    if "placed" in ours:
        return 0.9  # the same READ, with its request made while the clock runs
    if ours == "tcp":
        return 2.0
    if ours == "vm" and not case.mismatched:
        return 1.5
    if case.mismatched:
        return 4.0
    if case.threads == 1:
        return 2.5 if case.shuffled else 1.5
    return 3.0 if case.shuffled else 2.5


COMPARISONS = (
    ("shm", "memcpy"),
    ("shm", "nixl shm"),
    ("vm", "process_vm_readv"),
    ("vm", "process_vm_readv, blocks"),
    ("vm", "nixl shm"),
    ("tcp", "socket"),
    ("tcp", "nixl tcp"),
    ("tcp encrypted", "tls"),
    ("nixl (placed) shm", "nixl shm"),
    ("nixl (placed) tcp", "nixl tcp"),
)


def compare(case: Case, rows: Sequence[Row]) -> CaseResult:
    """Sets the families of one case against each other."""
    result = CaseResult(case=case, rows=tuple(rows), ratios=())
    ratios = []
    for ours, theirs in COMPARISONS:
        mine, other = result.best(ours), result.best(theirs)
        if mine is None or other is None:
            continue
        each = [
            his.seconds / my.seconds for my, his in zip(mine.samples, other.samples, strict=True)
        ]
        ratios.append(
            Ratio(
                ours=ours,
                theirs=theirs,
                median=statistics.median(each),
                low=min(each),
                high=max(each),
                goal=goal_of(case, ours, theirs),
            )
        )
    return CaseResult(case=case, rows=tuple(rows), ratios=tuple(ratios))
