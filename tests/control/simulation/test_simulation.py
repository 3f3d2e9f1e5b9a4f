"""The control protocol in virtual time: a thousand seeds, and defects that they must find.

A failure shows the seed and the trace of what led there; ``play(seed)`` runs it again, the same in
every event. To add a fault, write a function of a :class:`Run` and enter it in ``play.FAULTS``; to
add an invariant, enter its name in ``oracle.LAWS`` and call ``Oracle.require`` where it is judged,
and put a defect into ``defects.DEFECTS`` that it must find.
"""

import hashlib
import subprocess
import sys
from collections import Counter

import pytest

from kvferry.control.options import ControlOptions
from kvferry.control.server import ControlService
from kvferry.errors import HandshakeNeededError
from tests.control.simulation.defects import DEFECTS
from tests.control.simulation.engines import Cluster, Start
from tests.control.simulation.network import Internet, NetworkFaults
from tests.control.simulation.oracle import LAWS, Oracle
from tests.control.simulation.play import SHAPES, SLOWNESS, play
from tests.control.simulation.shapes import Build, Want
from tests.control.simulation.world import BrokenError, World

BATCH = 50
SLOW, SOAK = pytest.mark.slow, pytest.mark.soak
PART = 50
"""Runs of a long test: so few that a slow machine ends them in time."""
SEEDS = [
    pytest.param(0, BATCH, id="short"),
    *(
        pytest.param(first, PART, id=f"long-{first}", marks=SLOW)
        for first in range(BATCH, 500, PART)
    ),
    # A hundred thousand.
    *(
        pytest.param(first, PART, id=f"soak-{first}", marks=SOAK)
        for first in range(500, 100_000, PART)
    ),
]
MOST_SEEDS = 200
"""Runs in which a defect must have been found."""


@pytest.mark.parametrize(("first", "count"), SEEDS)
def test_the_laws_hold_whatever_happens(first, count):
    for seed in range(first, first + count):
        play(seed)


@pytest.mark.parametrize(
    ("first", "count"),
    [
        pytest.param(0, BATCH, id="short"),
        *(
            pytest.param(first, PART, id=f"long-{first}", marks=SLOW)
            for first in range(BATCH, 350, PART)
        ),
        *(
            pytest.param(first, PART, id=f"soak-{first}", marks=SOAK)
            for first in range(350, 5050, PART)
        ),
    ],
)
def test_no_load_fails_while_processes_stand_still_for_up_to_a_minute(first, count):
    for seed in range(first, first + count):
        play(seed, certain=(SLOWNESS,))


@pytest.mark.slow
@pytest.mark.parametrize("build", DEFECTS, ids=lambda build: build.name)
def test_a_defect_is_found_by_the_invariant_that_it_breaks(build):
    law, certain = DEFECTS[build]
    found: Counter[str] = Counter()
    for seed in range(MOST_SEEDS):
        try:
            play(seed, build, certain=certain)
        except BrokenError as broken:
            found[broken.law] += 1
        if found[law]:
            return
    pytest.fail(f"{build.name}: found by {found}, not by {law!r}")


def test_every_invariant_belongs_to_a_law():
    assert set(LAWS.values()) == {0, 3, 4, 5, 6, 7}


class ForgetsEverybody(ControlService):
    """Shakes hands, and then says that it has not."""

    def _target(self, request):
        raise HandshakeNeededError("handshake again")


def test_a_source_that_always_wants_a_handshake_is_asked_a_few_times_a_second():
    world = World(seed=1)
    build = Build(service=ForgetsEverybody)
    internet = Internet(world, NetworkFaults())
    cluster = Cluster(world, internet, Oracle(world), build, ControlOptions())
    source, target = Start(cluster, SHAPES[1], 1), Start(cluster, SHAPES[3], 1)
    prompt = tuple(range(20))
    target.decode(Want("r", (*prompt, 0), source.prefill("r", prompt)))
    world.run(20.0)
    assert 2 < source.server.status().counters["requests.Handshake"] < 60


TRACE = """
import hashlib
from tests.control.simulation.play import play

print(hashlib.sha256("\\n".join(play({seed}, keeps_trace=True).trace).encode()).hexdigest())
"""


@pytest.mark.parametrize("seed", [0, 5, 7])
def test_a_run_is_the_same_in_every_process(seed):
    trace = "\n".join(play(seed, keeps_trace=True).trace)
    assert len(trace) > 1000
    script = [sys.executable, "-c", TRACE.format(seed=seed)]
    there = subprocess.run(script, capture_output=True, text=True, check=True, timeout=280)
    assert there.stdout.strip() == hashlib.sha256(trace.encode()).hexdigest()
