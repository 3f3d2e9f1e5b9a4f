"""One run: two sources, three targets, a router, faults, strangers; decided by one seed.

:data:`FAULTS` names what can happen. A run has some of them, none in one of five runs but slowness
that the product promises to bear. They are over at :data:`QUIET_AT`, and at :data:`END_AT` every
load and every lease must have ended.
"""

import logging
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from kvferry.control import messages
from kvferry.control.give_backs import WORD
from kvferry.control.messages import (
    Ask,
    Finish,
    Finishes,
    Handshake,
    Release,
    Renew,
    StatusRequest,
)
from kvferry.control.options import ControlOptions
from kvferry.control.proofs import prove
from kvferry.control.tickets import TransferId, verify
from tests.control.simulation.engines import Cluster, Start
from tests.control.simulation.network import SILENCE_S, Internet, NetworkFaults
from tests.control.simulation.oracle import DROPPED, PROBE, Oracle
from tests.control.simulation.shapes import KEY, Build, Shape, Want, word_of
from tests.control.simulation.world import Defects, World

SHAPES = (
    Shape("p1", "10.0.0.1", "p1.cluster", block_size=4, tp=2, lends=True),
    Shape("p2", "10.0.0.2", "10.0.0.2", block_size=8, tp=1, pp=2, lends=True),
    Shape(
        "d1",
        "10.0.1.1",
        "10.0.1.1",
        block_size=4,
        tp=1,
        peers=("p1.cluster:14579",),
        early_load="now",
    ),
    Shape("d2", "10.0.1.2", "10.0.1.2", block_size=8, tp=2, early_load="late"),
    Shape("d3", "10.0.1.3", "10.0.1.3", block_size=16, tp=3),
)
SOURCES, TARGETS = SHAPES[:2], SHAPES[2:]

REQUESTS = 12
LAST_REQUEST_AT = 45.0
QUIET_AT = 60.0
WELL_AT = QUIET_AT + 120.0
"""By now every peer knows again who lives, and the next load must succeed."""
END_AT = QUIET_AT + 240.0
"""The quiet time holds, one after the other: the end of what stands still, the wait for a lease
(``handshake_timeout_s``, 30 s), a read that stalls (10 s), the confirm (three times 5 s and what
passes between them), a lease that nobody renews (30 s). After :data:`WELL_AT` it holds the time of
a shared lease (90 s)."""
LONGEST_STOP_S = 60.0
SLOWNESS = "slowness"
SHORT_STOP_S = 2.0
IMPATIENT = ControlOptions(request_timeout_s=20.0)
"""The options of runs in which messages are lost though their connection lives, as if their
receiver hung; the product's own wait for two minutes."""


@dataclass
class Run:
    """Everything of one run."""

    world: World
    cluster: Cluster
    engines: dict[str, Start]
    """The present start of each engine, by name."""
    starts: dict[str, int]
    """How often each engine was started."""

    def choose(self, shapes: tuple[Shape, ...]) -> Start:
        return self.engines[self.world.dice.choice(shapes).name]


Fault = Callable[[Run], None]


def stop(run: Run, longest: float = LONGEST_STOP_S, shortest: float = 0.05) -> None:
    """A process gets no CPU, while ZeroMQ's own threads run."""
    process = run.world.dice.choice(run.choose(SHAPES).processes)
    if process.still_until and run.world.now < process.still_until + longest:
        return  # it is to have run for a while
    seconds = run.world.between(shortest, longest)
    run.world.note(f"{process.name} stands still for {seconds:.3f} s")
    process.stand_still(seconds, frozen=False)


def freeze(run: Run) -> None:
    """A process is stopped altogether: a signal, a suspended machine."""
    process = run.world.dice.choice(run.choose(SHAPES).processes)
    seconds = min(run.world.between(0.05, LONGEST_STOP_S), QUIET_AT - run.world.now)
    run.world.note(f"{process.name} is frozen for {seconds:.3f} s")
    run.cluster.internet.freeze(process, seconds)


def cut(run: Run) -> None:
    """A path is cut, in one direction or both."""
    one, other = run.choose(SOURCES).shape.host, run.choose(TARGETS).shape.host
    seconds = min(run.world.between(0.1, 40.0), QUIET_AT - run.world.now)
    both = run.world.chance(0.5)
    run.world.note(f"cut for {seconds:.3f} s: {one} {'<' if both else ''}-> {other}")
    run.cluster.internet.cut(one, other, seconds)
    if both:
        run.cluster.internet.cut(other, one, seconds)


def break_connections(run: Run) -> None:
    """Connections to a source break."""
    host = run.choose(SOURCES).shape.host
    run.cluster.internet.break_links(lambda link: link.host == host and run.world.chance(0.5))


def restart(run: Run, shapes: tuple[Shape, ...]) -> None:
    """An engine dies and is started again."""
    old = one_at_work(run, shapes)
    if old.is_dead:
        return
    hand_on(run, old)
    old.die()
    # If its machine has vanished, nobody is told.
    tells = run.world.chance(0.7)
    run.cluster.internet.vanish(old.shape.host, 0.001 if tells else SILENCE_S)
    run.world.after(run.world.between(0.05, 8.0), partial(start, run, old.shape))


def one_at_work(run: Run, shapes: tuple[Shape, ...]) -> Start:
    """An engine that is loading, if there is one."""
    engines = [run.engines[shape.name] for shape in shapes]
    busy = [one for one in engines if any(want.state == "loading" for want in one.wants.values())]
    return run.world.dice.choice(busy or engines)


def start(run: Run, shape: Shape) -> None:
    """Starts an engine, once more or for the first time."""
    run.starts[shape.name] += 1
    run.engines[shape.name] = Start(run.cluster, shape, run.starts[shape.name])


def hand_on(run: Run, old: Start) -> None:
    """The router takes a target for dead, and gives what it had to others, or to its next start."""
    for want in list(old.wants.values()):
        if want.outcome != "lent" and want.state != "computing" and run.world.chance(0.7):
            tokens, params = want.prompt_token_ids, want.kv_transfer_params
            again = Want(f"{want.request_id}-again", tokens, params)
            run.world.after(run.world.between(0.01, 10.0), partial(carry, run, again, old.shape))


def nap(run: Run) -> None:
    """An engine lets its caches go, and registers them again."""
    engine = one_at_work(run, SHAPES)
    if not engine.is_dead:
        engine.process.run(0.0, engine.nap)


def twin(run: Run) -> None:
    """A target that only looked dead is started again: two starts of it run."""
    old = one_at_work(run, TARGETS)
    if not old.is_dead:
        run.world.note(f"{old.incarnation} looks dead")
        for process in old.processes:
            process.stand_still(run.world.between(0.05, 30.0), frozen=False)
        hand_on(run, old)
        start(run, old.shape)


def forge(run: Run) -> None:
    """A stranger, who knows every name and has no ticket, speaks for somebody."""
    dice, source = run.world.dice, run.choose(SOURCES)
    known = list(run.cluster.oracle.leases.values())[-4:]
    if not known:
        return
    lent, (engine, start) = dice.choice(known), run.choose(TARGETS).target
    who: dict[str, Any] = {"engine_id": engine, "incarnation": start}
    who["source_incarnation"] = source.incarnation
    said = (engine, start, source.incarnation)
    lease_id, wrong = lent.ticket.lease_id, bytes(16)
    message: Renew | Release | Finishes | Ask
    match dice.randrange(4):
        case 0:
            leases = {lease_id: prove(wrong, "Renew", lease_id, *said)}
            message = Renew(id=1, **who, leases=leases)
        case 1:
            leases = {lease_id: prove(wrong, "Release", lease_id, *said, False)}
            message = Release(id=1, **who, leases=leases, keep=False)
        case 2:
            transfers = list(run.cluster.oracle.lent_as) or [f"{lease_id}@{source.shape.address}"]
            message = Ask(id=1, **who, transfer_id=dice.choice(transfers[-4:]), proof=wrong)
        case _:
            rank, nonce = dice.randrange(3), b"forged"
            proof = prove(wrong, "Finish", lease_id, *said, rank, True, nonce)
            item = Finish(lease_id=lease_id, rank=rank, ok=True, nonce=nonce, proof=proof)
            message = Finishes(id=1, **who, items=(item,))
    payload = messages.encode(message)
    run.cluster.oracle.forged.add(payload)
    say(run, source, payload, f"a stranger forges {type(message).__name__} of {lent.name}")


def replay(run: Run) -> None:
    """A stranger says again what he has overheard, to whom he likes."""
    if overheard := run.cluster.internet.overheard:
        address, payload = run.world.dice.choice(overheard[-40:])
        for source in run.engines.values():
            if source.shape.address == address or run.world.chance(0.1):
                say(run, source, payload, "a stranger repeats")


def alter(run: Run) -> None:
    """From now on a stranger says what he overhears, but for one thing, with the same proof."""
    run.cluster.internet.listener = partial(say_altered, run)


def say_altered(run: Run, address: str, payload: bytes) -> None:
    dice, message = run.world.dice, messages.decode_request(payload)
    if dice.random() > (0.3 if isinstance(message, Finishes) else 0.05):
        return
    others = [lent.ticket.lease_id for lent in run.cluster.oracle.leases.values()]
    altered: Finishes | Renew
    if isinstance(message, Finishes):
        item, what = message.items[0], dice.choice(("rank", "rank", "ok", "nonce", "id"))
        false = {"rank": item.rank + 1, "ok": not item.ok, "nonce": b"altered"}
        change = {what: false[what]} if what in false else {"lease_id": dice.choice(others)}
        false_item = msgspec.structs.replace(item, **change)
        if false_item == item:
            return
        altered = msgspec.structs.replace(message, items=(false_item,))
    elif isinstance(message, Renew):
        engine, start = run.choose(TARGETS).target
        altered = msgspec.structs.replace(message, engine_id=engine, incarnation=start)
        if altered == message:
            return
    else:
        return
    said, what = messages.encode(altered), f"a stranger alters {type(message).__name__}"
    run.cluster.oracle.forged.add(said)
    for source in run.engines.values():
        if source.shape.address == address:
            run.world.after(run.world.between(0.0005, 0.05), partial(say, run, source, said, what))


def pretend(run: Run) -> None:
    """A stranger shakes hands under the name of a target, or of its start, with other ranks."""
    described = run.choose(TARGETS).description
    names = {"engine_id": described.engine_id, "incarnation": described.incarnation}
    if run.world.chance(0.5):
        names["incarnation"] = "a stranger's"
    false = msgspec.structs.replace(described, ranks=described.ranks[:1], **names)
    payload = messages.encode(Handshake(id=1, description=false))
    say(run, run.choose(SOURCES), payload, f"a stranger shakes hands as {names['incarnation']}")


def babble(run: Run) -> None:
    """A stranger sends noise, or half a message, or asks for the status."""
    dice, overheard = run.world.dice, run.cluster.internet.overheard
    payload = dice.randbytes(dice.randrange(60))
    if overheard and run.world.chance(0.5):
        payload = dice.choice(overheard[-40:])[1]
        payload = payload[: dice.randrange(len(payload))]
    elif run.world.chance(0.3):
        payload = messages.encode(StatusRequest(id=1))
    say(run, run.choose(SOURCES), payload, "a stranger babbles")


def see(run: Run) -> None:
    """Somebody who saw a ticket reports in the place of a rank: that load may fail."""
    known = list(run.cluster.oracle.leases.values())[-3:]
    if not known:
        return
    lent, target = run.world.dice.choice(known), run.choose(TARGETS)
    rank, nonce, ticket = run.world.dice.randrange(target.shape.world_size), b"seen", lent.ticket
    said = (*target.target, ticket.incarnation, rank, True, nonce)
    proof = prove(ticket.secret, "Finish", ticket.lease_id, *said)
    item = Finish(lease_id=ticket.lease_id, rank=rank, ok=True, nonce=nonce, proof=proof)
    engine, start = target.target
    message = Finishes(
        id=1,
        engine_id=engine,
        incarnation=start,
        source_incarnation=ticket.incarnation,
        items=(item,),
    )
    lent.reported.add((target.target, rank))
    source, payload = run.engines[ticket.engine_id], messages.encode(message)
    say(run, source, payload, f"somebody reports {lent.name} as rank {rank} of {target.target}")


def say(run: Run, source: Start, payload: bytes, what: str) -> None:
    """A stranger's message arrives; nobody sees the answer but he."""
    run.world.note(f"{what} to {source.incarnation}")
    if not source.is_dead:
        source.port.arrive(payload, b"a stranger's", lambda reply: None)


def abort(run: Run) -> None:
    """A client goes away."""
    engine = run.choose(SHAPES)
    wants = [want for want in engine.wants.values() if want.outcome != "lent"]
    if wants and not engine.process.stands_still:
        engine.abort(run.world.dice.choice(wants))


FAULTS: dict[str, tuple[float, Fault]] = {
    "stop": (4.0, stop),
    "freeze": (3.0, freeze),
    "cut": (3.0, cut),
    "break": (4.0, break_connections),
    "restart a source": (1.5, partial(restart, shapes=SOURCES)),
    "restart a target": (1.5, partial(restart, shapes=TARGETS)),
    "twin": (3.0, twin),
    "forge": (15.0, forge),
    "alter": (2.0, alter),
    "replay": (15.0, replay),
    "pretend": (6.0, pretend),
    "babble": (6.0, babble),
    "see": (3.0, see),
    "abort": (4.0, abort),
    "nap": (3.0, nap),
}
"""What happens now and then: how often in a run, and what."""


def play(
    seed: int,
    build: Build | None = None,
    *,
    certain: tuple[str, ...] = (),
    keeps_trace: bool = False,
) -> World:
    """Plays one run to its end.

    Args:
        seed: decides everything.
        build: the classes under test.
        certain: faults and rates that this run has, whatever the seed says; :data:`SLOWNESS` for
            a run that has nothing else.
        keeps_trace: whether the world keeps its whole trace.

    Raises:
        BrokenError: an invariant does not hold; the message is the trace of what led there.
    """
    world = World(seed, keeps_trace=keeps_trace)
    internet = Internet(world, NetworkFaults())
    is_slow = SLOWNESS in certain or (seed % 10 == 0 and not certain)
    options = ControlOptions() if is_slow or (seed % 5 == 0 and not certain) else IMPATIENT
    cluster = Cluster(world, internet, Oracle(world), build or Build(), options)
    internet.names["p1.cluster"] = SHAPES[0].host
    run = Run(world, cluster, {}, dict.fromkeys((shape.name for shape in SHAPES), 0))
    with swallowed_defects(world):
        for shape in SHAPES:
            start(run, shape)
        plan_requests(run)
        if is_slow:
            plan_slowness(run)
        elif seed % 10 == 5 and not certain:
            plan_broken_connections(run)
        else:
            plan_faults(run, certain)
        world.after(QUIET_AT, partial(be_quiet, run))
        world.after(WELL_AT, partial(probe, run, PROBE))
        world.after(WELL_AT + 10.0, partial(drop, run))
        world.run(END_AT)
        cluster.oracle.check_end(list(cluster.starts.values()))
        world.check()
    return world


def plan_faults(run: Run, certain: tuple[str, ...]) -> None:
    """Decides what befalls this run, and when."""
    dice, faults = run.world.dice, run.cluster.internet.faults
    for name, (times, fault) in FAULTS.items():
        if dice.random() < 0.4 or name in certain:
            for _ in range(round(times * dice.uniform(0.5, 2.0))):
                run.world.after(dice.uniform(0.0, QUIET_AT), partial(fault, run))
            run.world.note(f"in this run: {name}")
    for what, name, most in (
        (faults, "loss", 0.1),
        (faults, "repeat", 0.3),
        (faults, "reorder", 0.3),
        (faults, "delay", 0.1),
        (faults, "breaks", 0.05),
        (faults, "names_fail", 0.5),
        (run.cluster, "slow_reads", 0.8),
        (run.cluster, "stutter", 0.5),
        (run.cluster, "preempts", 0.8),
        (run.cluster, "lateness", 0.02),
    ):
        if dice.random() < 0.3 or name in certain:
            setattr(what, name, dice.uniform(0.0, most))
            run.world.note(f"in this run: {name}")


def plan_slowness(run: Run) -> None:
    """Processes stand still for up to a minute, most of them for long; nothing else happens."""
    run.cluster.oracle.must_load = True
    for number in range(20):
        shortest = 0.05 if number % 4 == 0 else LONGEST_STOP_S / 12
        at = run.world.dice.uniform(0.0, QUIET_AT)
        run.world.after(at, partial(stop, run, shortest=shortest))


def plan_broken_connections(run: Run) -> None:
    """Connections break while something is on its way on them; processes stand still for a bit."""
    run.cluster.oracle.must_load = True
    run.cluster.internet.faults = NetworkFaults(breaks=0.8, breaks_rarely=True)
    for _ in range(40):
        run.world.after(run.world.dice.uniform(0.0, QUIET_AT), partial(stop, run, SHORT_STOP_S))


def plan_requests(run: Run) -> None:
    """Decides when requests come; a router gives each to a source, and then to a target."""
    for number in range(REQUESTS):
        at = run.world.dice.uniform(0.0, LAST_REQUEST_AT)
        run.world.after(at, partial(prefill, run, f"r{number}"))


def prefill(run: Run, request_id: str) -> None:
    """The first half of a request, or both halves."""
    dice, source = run.world.dice, run.choose(SOURCES)
    prompt = tuple(range(dice.randint(2, 60)))
    if dice.random() < 0.5:
        both(run, source.shape, request_id, prompt)
        return
    source.process.run(0.0, partial(prefilled, run, source, request_id, prompt))


def prefilled(run: Run, source: Start, request_id: str, prompt: tuple[int, ...]) -> None:
    """Its ticket goes to a target; to none, sometimes, or to two; a shared one to many."""
    world = run.world
    params = source.prefill(request_id, prompt)
    if params is None:
        return
    by_word = partial(source.give_back, request_id)
    if world.chance(0.05):
        back = by_word if world.chance(0.5) else partial(source.take_back, params)
        source.process.run(world.between(0.1, 40.0), back)
        return
    if world.chance(0.05):
        return
    is_late = world.chance(0.1) and not run.cluster.oracle.must_load
    seconds = world.between(1.0, 45.0) if is_late else 0.005
    want = Want(request_id, (*prompt, 0), params)
    world.after(seconds, partial(carry, run, want, world.dice.choice(TARGETS)))
    if world.chance(0.1) and not run.cluster.oracle.must_load:
        source.process.run(seconds + world.between(0.001, 2.0), by_word)  # its client has left
    if verify(params["ticket"], KEY.encode()).shared:
        for number in range(world.dice.randint(1, 3)):
            more = Want(f"{request_id}-more-{number}", (*prompt, 0), params)
            soon = world.between(0.005, 5.0)
            world.after(soon, partial(carry, run, more, world.dice.choice(TARGETS)))
    elif world.chance(0.25) and not run.cluster.oracle.must_load:
        again = Want(f"{request_id}-twice", (*prompt, 0), params)
        shape = world.dice.choice(TARGETS)
        world.after(world.between(0.01, 40.0), partial(carry, run, again, shape))


def both(run: Run, shape: Shape, request_id: str, prompt: tuple[int, ...]) -> None:
    """A source and a target are sent a request at once, in any order; or one of them never is."""
    world, is_well = run.world, run.cluster.oracle.must_load
    lends, loads = at_once(shape, request_id, prompt)

    def seconds() -> float:
        is_late = world.chance(0.2) and not is_well
        return world.between(0.5, 45.0) if is_late else world.between(0.0005, 0.05)

    if is_well or not world.chance(0.05):
        world.after(seconds(), partial(begin, run, lends, shape))
    chosen = world.dice.choice(TARGETS)
    if is_well or not world.chance(0.1):
        world.after(seconds(), partial(carry, run, loads, chosen))
    else:
        world.after(seconds(), partial(take_back, run, lends, shape))
    if not is_well and world.chance(0.2):
        again = Want(f"{request_id}-twice", loads.prompt_token_ids, loads.kv_transfer_params)
        another = world.dice.choice(TARGETS)
        world.after(world.between(0.01, 40.0), partial(carry, run, again, another))


def at_once(shape: Shape, request_id: str, prompt: tuple[int, ...]) -> tuple[Want, Want]:
    """What a router sends to a source, and to a target."""
    transfer = TransferId.begin(f"{shape.advertised}:14579", KEY.encode()).text
    word = word_of(request_id).hex()
    lends = {"do_remote_decode": True, "transfer": transfer, WORD: word}
    loads = {"do_remote_prefill": True, "transfer": transfer}
    return Want(request_id, prompt, lends), Want(request_id, (*prompt, 0), loads)


def begin(run: Run, want: Want, shape: Shape) -> None:
    """A request reaches a source, which is to compute and lend it."""
    source = run.engines[shape.name]
    if not source.is_dead:
        source.process.run(0.0, partial(source.compute, want))


def take_back(run: Run, want: Want, shape: Shape) -> None:
    """The router will not have it fetched."""
    source, params = run.engines[shape.name], want.kv_transfer_params
    assert params is not None
    back = partial(source.take_back, params)
    if run.world.chance(0.5):
        back = partial(source.give_back, want.request_id)
    if not source.is_dead:
        source.process.run(0.0, back)


def carry(run: Run, want: Want, shape: Shape) -> None:
    """A request reaches a target."""
    target = run.engines[shape.name]
    if not target.is_dead:
        target.process.run(0.0, partial(target.decode, want))


def probe(run: Run, name: str) -> None:
    """Every target loads from every source."""
    for shape in SOURCES:
        for target in TARGETS:
            request_id, prompt = f"{shape.name}-{target.name}-{name}", tuple(range(20))
            if run.world.chance(0.5):
                lends, loads = at_once(shape, request_id, prompt)
                begin(run, lends, shape)
                carry(run, loads, target)
                continue
            params = run.engines[shape.name].prefill(request_id, prompt)
            if params is not None:
                want = Want(request_id, (*prompt, 0), params)
                run.engines[target.name].decode(want)


def drop(run: Run) -> None:
    """Every target asks a source, and is then told that nobody wants it; sooner or later."""
    for target in TARGETS:
        shape = run.world.dice.choice(SOURCES)
        lends, loads = at_once(shape, f"{shape.name}-{target.name}-{DROPPED}", tuple(range(8)))
        run.world.after(run.world.between(0.01, 3.0), partial(begin, run, lends, shape))
        carry(run, loads, target)
        abort_it = partial(run.engines[target.name].abort, loads)
        run.world.after(run.world.between(0.1, 3.0), abort_it)


def be_quiet(run: Run) -> None:
    """No fault happens any more."""
    run.world.note("the faults are over")
    run.cluster.internet.faults = NetworkFaults()
    run.cluster.slow_reads = run.cluster.stutter = run.cluster.lateness = 0.0
    run.cluster.preempts = 0.0
    run.cluster.internet.listener = None


@contextmanager
def swallowed_defects(world: World) -> Any:
    """Finds what the product, or a future, logs in place of raising it."""
    handler = Defects(world)
    loggers = [logging.getLogger(name) for name in ("kvferry", "concurrent.futures")]
    levels = [(logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
        logger.addHandler(handler)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, (level, propagate) in zip(loggers, levels, strict=True):
            logger.setLevel(level)
            logger.removeHandler(handler)
            logger.propagate = propagate
