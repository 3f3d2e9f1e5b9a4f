"""Engines come and go while requests go on: what those that stay keep of all that levels off.

In virtual time, see :mod:`world`. What is remembered for a while by design is remembered for less
here, so that a short run shows whether it is ever forgotten.
"""

from collections import Counter, deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from kvferry.connectors import aggregator
from kvferry.connectors.pull import sources
from kvferry.control import peers
from kvferry.control.options import ControlOptions
from kvferry.observe import records
from tests.control.simulation.engines import Cluster, Start
from tests.control.simulation.network import Internet, NetworkFaults
from tests.control.simulation.oracle import Oracle
from tests.control.simulation.play import at_once, swallowed_defects
from tests.control.simulation.shapes import Build, Shape, Want
from tests.control.simulation.world import World

LIMIT = 64
"""Ended things that are remembered, of each kind."""
KEPT_S = 20.0
"""Seconds for which engines are remembered that are gone."""
REPLACED_S = 1.25
"""Seconds between two replacements of a source, and of a target."""
REQUESTS_PER_S = 4
PAIRS = 2
"""Sources and targets that come and go, at any time; one of each stays."""

_CONTAINERS = (dict, list, set, deque)


@pytest.fixture
def forgetful(monkeypatch):
    """Nothing is remembered for long."""
    monkeypatch.setattr(sources, "NAMED_S", KEPT_S)
    monkeypatch.setattr(peers, "KEPT_S", KEPT_S)
    monkeypatch.setattr(peers, "LOOK_S", 5.0)
    monkeypatch.setattr(records, "REMEMBERED", LIMIT)
    monkeypatch.setattr(aggregator, "REMEMBERED", LIMIT)


class Changing:
    """A cluster of which all engines but two are replaced again and again."""

    def __init__(self, seed: int) -> None:
        self.world = World(seed)
        self.internet = Internet(self.world, NetworkFaults())
        self.oracle = Oracle(self.world)
        # There are few errors, and the first half of them must fill what is remembered.
        options = ControlOptions(remembered_leases=LIMIT, remembered_errors=LIMIT // 4)
        self.cluster = Cluster(self.world, self.internet, self.oracle, Build(), options)
        self.started = 0
        self.outcomes: Counter[str] = Counter()
        self.source = self.start(lends=True)
        self.target = self.start(lends=False)
        self.sources = [self.source, *(self.start(lends=True) for _ in range(PAIRS))]
        self.targets = [self.target, *(self.start(lends=False) for _ in range(PAIRS))]

    def start(self, *, lends: bool) -> Start:
        """An engine of which nobody has heard, on a machine of its own."""
        self.started += 1
        number = self.started
        kind, host = "p" if lends else "d", f"10.{number // 250}.{number % 250}.1"
        size = self.world.dice.choice((4, 8))
        modes = ("off", "now", "late")
        early = self.world.dice.choice(modes)
        shape = Shape(f"{kind}{number}", host, host, size, tp=1, lends=lends, early_load=early)  # type: ignore[arg-type]
        start = Start(self.cluster, shape, 1)
        tickets: Any = start.sources.pursuits.tickets
        tickets.seen.limit = LIMIT
        if not lends:  # as the product's server does on every engine
            start.look_at_leases()
        return start

    def replace(self, engines: list[Start], *, lends: bool) -> None:
        """One of the engines that do not stay is gone for good, and another one comes."""
        old = engines.pop(1)
        old.die()
        self.internet.vanish(old.shape.host, 0.001)
        engines.append(self.start(lends=lends))
        self.world.after(60.0, partial(self.cluster.starts.pop, old.incarnation))

    def request(self, name: str) -> None:
        """One request; some are aborted, and some are never fetched."""
        dice = self.world.dice
        source, target = dice.choice(self.sources), dice.choice(self.targets)
        prompt = tuple(range(dice.randint(2, 40)))
        if dice.random() < 0.5:
            lends, loads = at_once(source.shape, name, prompt)
            if dice.random() < 0.95:
                source.compute(lends)
        else:
            params = source.prefill(name, prompt)
            if params is None or dice.random() < 0.02:
                return
            loads = Want(name, (*prompt, 0), params)
        target.decode(loads)
        if dice.random() < 0.1:
            self.world.after(dice.random() * 2.0, partial(target.abort, loads))

    def run(self, requests: int) -> None:
        """Some more requests, and as many engines as come and go meanwhile."""
        seconds = requests / REQUESTS_PER_S
        now = self.world.now
        for number in range(requests):
            at = self.world.dice.uniform(0.0, seconds)
            self.world.after(at, partial(self.request, f"r{now:.0f}-{number}"))
        for number in range(int(seconds / REPLACED_S)):
            lends = number % 2 == 0
            engines = self.sources if lends else self.targets
            self.world.after(number * REPLACED_S, partial(self.replace, engines, lends=lends))
        self.world.run(now + seconds)
        self._forget()

    def _forget(self) -> None:
        """What the tests keep of the past is not the product's."""
        self.outcomes += Counter(want.outcome for want in self.oracle.wants if want.outcome)
        self.oracle.wants = [want for want in self.oracle.wants if not want.outcome]
        over = [id for id, lent in self.oracle.leases.items() if lent.kept.freed is not None]
        for lease_id in over[:-500]:
            del self.oracle.leases[lease_id]
        self.internet.overheard.clear()


def kept(start: Start) -> Counter[str]:
    """What an engine's classes keep: class and attribute → the number of elements."""
    found: Counter[str] = Counter()
    seen: set[int] = set()
    ranks = [(rank.worker, rank.loads) for rank in start.ranks]
    left: list[Any] = [start.scheduler, start.aggregator, *(one for pair in ranks for one in pair)]
    while left:
        one = left.pop()
        if id(one) in seen or not _is_ours(one):
            continue
        seen.add(id(one))
        for name, value in _attributes(one):
            if isinstance(value, _CONTAINERS):
                found[f"{type(one).__name__}.{name}"] += len(value)
                left += value.values() if isinstance(value, dict) else value
                left += [pair for pair in value if isinstance(pair, tuple)]
            else:
                left.append(value)
    return found


def _is_ours(one: object) -> bool:
    kinds = type(one).__mro__
    return not isinstance(one, type) and any(
        kind.__module__.startswith("kvferry") for kind in kinds
    )


def _attributes(one: object) -> Iterator[tuple[str, Any]]:
    yield from vars(one).items() if hasattr(one, "__dict__") else ()
    for kind in type(one).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if hasattr(one, name):
                yield name, getattr(one, name)


@pytest.mark.usefixtures("forgetful")
@pytest.mark.parametrize(
    ("seed", "requests"),
    [
        pytest.param(0, 1_000, id="short"),
        pytest.param(1, 10_000, id="long", marks=pytest.mark.slow),
        # A million.
        *(
            pytest.param(seed, 10_000, id=f"soak-{seed}", marks=pytest.mark.soak)
            for seed in range(2, 102)
        ),
    ],
)
def test_what_is_kept_of_requests_and_engines_that_are_gone_levels_off(seed, requests):
    changing = Changing(seed)
    most: list[Counter[str]] = []
    with swallowed_defects(changing.world):
        for _ in range(10):
            changing.run(requests // 10)
            now = kept(changing.source) + kept(changing.target)
            most.append(now)
    # The first half fills what is remembered; it holds more requests and engines than that.
    before = most[1] | most[2] | most[3] | most[4]
    after = most[5] | most[6] | most[7] | most[8] | most[9]
    grown = {name: (before[name], n) for name, n in after.items() if n > 1.3 * before[name] + 16}
    assert not grown
    assert changing.started > requests / REQUESTS_PER_S / REPLACED_S / 2
    assert changing.outcomes["loaded"] > requests / 2
