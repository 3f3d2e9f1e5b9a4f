"""The faults, a row of the matrix each."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Literal

from benchmarks.faults import hostile
from benchmarks.faults.load import Answer
from benchmarks.faults.system import STEPS, Member, Role, Step, System

STOP_S = 12.0
"""Seconds for which a member is stopped."""
LASTING_S = 8.0
"""Seconds of a fault whose length does not matter much."""
CLOCK_BACK_S = -3600
SPINNERS_PER_CORE = 8
MOVING: tuple[Step, ...] = ("lent", "loading", "decoding")
"""The steps at which a link between P and D matters."""


@dataclass(slots=True)
class Scene:
    """Where a fault happens."""

    system: System
    asides: list[Answer]
    """Answers to hostile requests."""

    def first(self, role: Role) -> Member:
        """The member that is hurt."""
        return self.system.of(role)[0]


Act = Callable[[Scene], AbstractContextManager[None]]
Way = Literal["both", "from prefill", "from decode", "slow", "lossy"]
"""What links between P and D do."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One row."""

    name: str
    title: str
    """For people."""
    act: Act
    """The fault lasts from its enter to its exit."""
    lasts_s: float = 0.0
    """Seconds between the two."""
    victim: Role | None = None
    """Whose member is hurt, the first one."""
    steps: tuple[Step | Literal["any"], ...] = ("any",)
    """Where a request must stand when it comes."""
    since: Literal["begin", "end"] = "end"
    """From when it counts how long throughput needs to be back."""


def _on(role: Role, hurt: Callable[[Member], object]) -> Act:
    """Something is done to the first member of a role, and that was it."""

    @contextlib.contextmanager
    def act(scene: Scene) -> Iterator[None]:
        hurt(scene.first(role))
        yield

    return act


def _while(role: Role, hurt: Callable[[Member], AbstractContextManager[None]]) -> Act:
    """Something is the matter with the first member of a role for a while."""
    return lambda scene: hurt(scene.first(role))


@contextlib.contextmanager
def _stopped(member: Member) -> Iterator[None]:
    member.host.pause()
    yield
    member.host.resume()


def _restart(role: Role) -> Act:
    @contextlib.contextmanager
    def act(scene: Scene) -> Iterator[None]:
        scene.system.restart(scene.first(role))
        yield

    return act


def _links(way: Way) -> Act:
    @contextlib.contextmanager
    def act(scene: Scene) -> Iterator[None]:
        network = scene.system.network
        for prefill, decode in scene.system.pairs():
            match way:
                case "both":
                    network.cut(prefill, decode)
                case "from prefill":
                    network.cut(prefill, decode, one_way=True)
                case "from decode":
                    network.cut(decode, prefill, one_way=True)
                case "slow":
                    network.slow(prefill, decode, delay_s=0.1, bytes_per_s=1e6)
                case "lossy":
                    network.lose(prefill, decode, 0.1)
        yield
        scene.system.mend_links()

    return act


@contextlib.contextmanager
def _starved(_: Scene) -> Iterator[None]:
    """Every core has processes that never sleep."""
    with ExitStack() as stack:
        for _number in range(SPINNERS_PER_CORE * len(os.sched_getaffinity(0))):
            spinner = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
            stack.callback(spinner.wait)
            stack.callback(spinner.kill)
        yield


@contextlib.contextmanager
def _memory_full(scene: Scene) -> Iterator[None]:
    with ExitStack() as stack:
        for member in scene.system.members:
            stack.enter_context(member.full("/dev/shm"))
        yield


@contextlib.contextmanager
def _disk_full(scene: Scene) -> Iterator[None]:
    """With the links cut, so that there is something to write to logs."""
    with ExitStack() as stack:
        for member in scene.system.members:
            stack.enter_context(member.full(member.folder))
        stack.enter_context(_links("both")(scene))
        yield


def _drained(role: Role) -> Act:
    @contextlib.contextmanager
    def act(scene: Scene) -> Iterator[None]:
        victim = scene.first(role)
        scene.system.drain(victim)
        victim.kill()
        yield

    return act


def _scaled_in(role: Role) -> Act:
    """An engine of ours drains on SIGTERM; a vLLM server is drained first. Then it comes back."""

    @contextlib.contextmanager
    def act(scene: Scene) -> Iterator[None]:
        victim = scene.first(role)
        scene.system.scale_in(victim)
        yield
        scene.system.mend()

    return act


def _hostile(ask: Callable[[System], Iterator[Answer]]) -> Act:
    @contextlib.contextmanager
    def act(scene: Scene) -> Iterator[None]:
        scene.asides += ask(scene.system)
        yield

    return act


def _both(name: str, title: str, make: Callable[[Role], Act], **keys: object) -> list[Fault]:
    """A row for a prefill member, and one for a decode member."""
    return [
        Fault(f"{name}-{letter}", f"{title} {letter.upper()}", make(role), victim=role, **keys)  # type: ignore[arg-type]
        for letter, role in (("p", "prefill"), ("d", "decode"))
    ]


_ONE_WAY: Mapping[str, Way] = {"from-p": "from prefill", "from-d": "from decode"}

FAULTS: tuple[Fault, ...] = (
    *_both("kill", "kill -9 of", lambda role: _on(role, Member.kill), steps=STEPS, since="begin"),
    *_both(
        "stop",
        f"stop for {STOP_S:g} s of",
        lambda role: _while(role, _stopped),
        steps=STEPS,
        lasts_s=STOP_S,
    ),
    *_both("restart", "kill -9 and restart of", _restart, steps=STEPS, since="begin"),
    *(
        Fault(f"cut-{seconds}", f"cut of {seconds} s", _links("both"), seconds, steps=MOVING)
        for seconds in (2, 8, 40)
    ),
    *(
        Fault(
            f"one-way-{name}",
            f"one-way cut of {LASTING_S:g} s, {name}",
            _links(way),
            LASTING_S,
            steps=MOVING,
        )
        for name, way in _ONE_WAY.items()
    ),
    Fault("slow", "slow link: 0.1 s, 1 MB/s", _links("slow"), LASTING_S),
    Fault("lossy", "lossy link: one packet in ten", _links("lossy"), LASTING_S),
    Fault("starved", f"{SPINNERS_PER_CORE} spinning processes per core", _starved, LASTING_S),
    Fault("shm-full", "/dev/shm full", _memory_full, LASTING_S),
    Fault("disk-full", "disk full, links cut", _disk_full, LASTING_S),
    *_both(
        "files",
        "no file can be opened by",
        lambda role: _while(role, Member.few_files),
        lasts_s=LASTING_S,
    ),
    *_both(
        "clock",
        "clock set back an hour of",
        lambda role: _while(role, lambda member: member.clock_off(CLOCK_BACK_S)),
        lasts_s=LASTING_S,
    ),
    *_both("drain", "drain of", _drained, since="begin"),
    *_both("scale-in", "scale-in and out of", _scaled_in, since="begin", lasts_s=1.0),
    Fault("incomplete", "incomplete kv_transfer_params", _hostile(hostile.incomplete)),
    Fault("list", "lists of prompts with kv_transfer_params", _hostile(hostile.lists)),
    Fault("size", "a tp_size of a billion", _hostile(hostile.sizes)),
    Fault("stale", "stale references", _hostile(hostile.stale)),
)
