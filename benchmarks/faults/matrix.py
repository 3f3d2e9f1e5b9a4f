"""Runs one fault at one step under load: a cell."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import msgspec

from benchmarks.faults.faults import FAULTS, Fault, Scene
from benchmarks.faults.load import Answer, Counts, Load, count
from benchmarks.faults.system import Step, System, SystemFailedError

BEFORE_S = 3.0
"""Seconds that clients ask before a fault comes, at least."""
AFTER_S = 90.0
"""Seconds after a fault in which throughput must be back."""


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """What a fault at a step did to a system."""

    system: str
    fault: str
    """Its name."""
    step: str
    """Where a request stood when it came; ``any``: at all of them, as chance had it."""
    counts: Counts
    """Of ordinary clients; wrong answers to hostile requests are in it as well."""
    hostile: int = 0
    """Hostile requests that were sent."""
    refused: int = 0
    """Of them, those that got an error."""
    stranded: int = 0
    """KV blocks that are never given back."""
    died: tuple[str, ...] = ()
    """Members that ended though nobody ended them."""
    seconds: float = 0.0
    """That the cell took."""

    @property
    def key(self) -> tuple[str, str, str]:
        """Which cell it is."""
        return (self.system, self.fault, self.step)

    @property
    def is_good(self) -> bool:
        """Whether nobody lost anything but time."""
        counts = self.counts
        is_back = counts.back_s is not None
        return is_back and not (counts.wrong or counts.failed or self.stranded or self.died)


def cells_of(
    faults: Sequence[Fault], *, at_every_step: bool
) -> Iterator[tuple[Fault, Step | Literal["any"]]]:
    """The cells of a matrix, in order."""
    any_step: tuple[Literal["any"]] = ("any",)
    for fault in faults:
        for step in fault.steps if at_every_step else any_step:
            yield fault, step


def faults_named(names: Sequence[str]) -> list[Fault]:
    """The faults of these names, or whose names begin with one and a hyphen; all for none.

    Raises:
        ValueError: a name is none's.
    """
    found = [
        fault
        for fault in FAULTS
        if not names
        or any(fault.name == name or fault.name.startswith(f"{name}-") for name in names)
    ]
    for name in names:
        if not any(fault.name == name or fault.name.startswith(f"{name}-") for fault in found):
            raise ValueError(f"{name!r} is no fault; there are {[one.name for one in FAULTS]}")
    return found


def run_cell(system: System, fault: Fault, step: Step | Literal["any"], first: int) -> Cell:
    """Runs one cell; the system is well before and after.

    Args:
        system: a system that is up.
        fault: what happens to it.
        step: where a request must stand then, or ``any``.
        first: the first prompt to ask.

    Raises:
        SystemFailedError: the system cannot be brought back.
    """
    started = time.monotonic()
    if held := system.stranded():
        raise SystemFailedError(f"{system.name}: {held} blocks are held before the fault")
    asides: list[Answer] = []
    victim = system.of(fault.victim)[0] if fault.victim is not None else None
    with Load(system.router, system.prompts, system.clients, first) as load:
        _until_rate_is_known(load, system.clients)
        if step != "any":
            system.await_step(step, victim)
        began = time.monotonic()
        with fault.act(Scene(system, asides)):
            time.sleep(fault.lasts_s)
        over = began if fault.since == "begin" else time.monotonic()
        _until_back(load, system, began, over)
    died = [member.name for member in system.members if member.must_run and not member.is_up()]
    system.mend()
    counts = count(load.answers, system.prompts, began, over)
    wrong = counts.wrong + sum(map(system.prompts.is_wrong, asides))
    return Cell(
        system=system.name,
        fault=fault.name,
        step=step,
        counts=msgspec.structs.replace(counts, wrong=wrong),
        hostile=len(asides),
        refused=sum(bool(answer.error) for answer in asides),
        stranded=system.stranded(),
        died=tuple(died),
        seconds=round(time.monotonic() - started, 1),
    )


def _until_rate_is_known(load: Load, clients: int) -> None:
    began = time.monotonic()
    while time.monotonic() < began + BEFORE_S or len(load.answers) < 2 * clients:
        if any(answer.error for answer in load.answers):
            raise SystemFailedError(f"before the fault: {load.answers[-1].error}")
        if time.monotonic() > began + AFTER_S:
            raise SystemFailedError("hardly any request is answered before the fault")
        time.sleep(0.05)


def _until_back(load: Load, system: System, began: float, over: float) -> None:
    deadline = max(over, time.monotonic()) + AFTER_S
    while time.monotonic() < deadline:
        counts = count(tuple(load.answers), system.prompts, began, over)
        if counts.back_s is not None and counts.requests >= system.requests:
            return
        time.sleep(0.2)


def run_cells(
    system: System,
    faults: Sequence[Fault],
    known: set[tuple[str, str, str]],
    store: Callable[[Cell], object],
    *,
    at_every_step: bool,
) -> None:
    """Runs the cells that are not known yet; each is stored as soon as it is measured."""
    for number, (fault, step) in enumerate(cells_of(faults, at_every_step=at_every_step)):
        if (system.name, fault.name, step) in known:
            continue
        if fault.name.startswith("clock") and not system.clock_can_be_set:
            continue
        first = number * 2 * system.requests
        cell = run_cell(system, fault, step, first)
        if not cell.is_good:
            system.save_logs(f"{fault.name}-{step}")
        store(cell)
