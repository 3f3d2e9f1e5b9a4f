"""``python -m benchmarks.scale``: what the control plane of one P and of one D carries.

The control server of P runs in a process of its own, as in an engine, and D's engines, or P's
addresses, are as many real connections. Nothing is moved: this is what a lease costs beside its KV.

``one P``
    Many engines shake hands at once, as after a restart; each takes ten leases, renews them, and
    confirms. Confirms are timed one at a time, and all at once.
``one D``
    The sources of a decode engine, as the PullConnector has them: it meets many, takes ten leases
    at each, and renews all of them at rest. All are one server under many addresses of this
    machine.

The cost per engine or lease is fitted to a power of their number over all sizes: an exponent of 0
says that one costs the same however many others there are.
"""

import math
import resource
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zmq

from benchmarks import report
from benchmarks.cases import CacheShape
from benchmarks.remote import Remote
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.pursuit import Pursuit, PursuitState
from kvferry.connectors.pull.sources import Sources
from kvferry.connectors.pull.tickets import AcceptedTickets
from kvferry.control import messages
from kvferry.control.client import ControlClient
from kvferry.control.leases import Lease, LeaseTable
from kvferry.control.messages import Finish, Finishes, Handshake, Renew
from kvferry.control.options import ControlOptions
from kvferry.control.proofs import prove
from kvferry.control.server import ControlServer
from kvferry.control.tickets import Ticket
from kvferry.observe.records import RequestRecord
from kvferry.topology.description import (
    EngineDescription,
    ModelFingerprint,
    RankDescription,
    tagged_groups,
)

SIZES = (10, 30, 100, 300, 1000)
QUICK_SIZES = (4, 8)
LEASES = 10
"""Per engine."""
CONFIRMS = 1000
"""Timed one at a time."""
REST_S = 5.0
"""Seconds for which a decode engine is watched at rest."""
OPTIONS = ControlOptions(max_peers=8192)
WAIT_S = 300.0


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure at one size."""

    side: str
    """``one P`` or ``one D``."""
    name: str
    unit: str
    engines: int
    values: list[float]
    """One per round."""

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.values)


class ScaleResults(report.Results, frozen=True, kw_only=True):
    """All of a run."""

    figures: list[Figure]


def _rss() -> int:
    """Bytes of memory that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


# ---- the process of P ---------------------------------------------------------------------------


def describe(engine_id: str) -> EngineDescription:
    """A small engine with one rank."""
    geometry = CacheShape().geometry("NHD")
    model = ModelFingerprint(
        name="benchmark",
        architecture="benchmark",
        num_layers=32,
        num_kv_heads=8,
        head_size=128,
        dtype="bfloat16",
        rope="",
        config_digest="",
        weights_digest="",
    )
    memory = geometry.memory(0, num_blocks=16)
    return EngineDescription(
        engine_id=engine_id,
        incarnation="benchmark",
        model=model,
        groups=tagged_groups([geometry]),
        ranks=(RankDescription(rank=0, endpoints={"shm": b""}, memory=(memory,)),),
    )


class Source:
    """A control server, and the leases that it answers for."""

    def __init__(self, host: str) -> None:
        self._leases = LeaseTable(max_blocks=1 << 40)
        self._server = ControlServer(
            engine_id="source",
            incarnation="benchmark",
            role="kv_producer",
            leases=self._leases,
            host=host,
            options=OPTIONS,
        )
        self._server.set_description(describe("source"))

    def port(self) -> int:
        """Where it listens."""
        return self._server.port

    def grant(self, count: int) -> dict[str, bytes]:
        """So many new leases: id → secret."""
        granted = [self._leases.grant(f"request-{index}", 128) for index in range(count)]
        ids = [lease.lease_id for lease in granted if isinstance(lease, Lease)]
        return {lease_id: self._server.secret(lease_id) for lease_id in ids}

    def cpu_s(self) -> float:
        """Seconds that the process has computed so far."""
        return time.process_time()

    def memory(self) -> int:
        """Bytes that the process holds."""
        return _rss()

    def expire(self) -> float:
        """Seconds of a look at all leases, at a time when none has expired."""
        return _seconds(partial(self._leases.expire, awake_s=1e9, lives=lambda _: True))

    def sweep(self) -> tuple[int, float]:
        """Takes away what has ended: how many leases, and the seconds that it took."""
        began = time.perf_counter()
        return len(self._leases.sweep()), time.perf_counter() - began

    def close(self) -> None:
        """Ends the server."""
        self._server.close()


def _seconds(call: Callable[[], object]) -> float:
    """Of the fastest of five calls."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        call()
        found.append(time.perf_counter() - began)
    return min(found)


# ---- one P --------------------------------------------------------------------------------------


class Engines:
    """The connections of many decode engines, and what is said on them."""

    def __init__(self, count: int, port: int) -> None:
        self._context: Any = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, 4 * count + 64)
        self._sockets = [self._context.socket(zmq.DEALER) for _ in range(count)]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            socket.connect(f"tcp://127.0.0.1:{port}")
            self._poller.register(socket, zmq.POLLIN)
        self._numbers = {socket: number for number, socket in enumerate(self._sockets)}

    def ask_all(self, requests: Sequence[msgspec.Struct]) -> tuple[float, list[float]]:
        """Every engine sends its request at once: seconds until all are answered, and of each."""
        payloads = [messages.encode(request) for request in requests]
        began = time.perf_counter()
        sent, took = [], [0.0] * len(payloads)
        for socket, payload in zip(self._sockets, payloads, strict=True):
            sent.append(time.perf_counter())
            socket.send(payload)
        left = len(payloads)
        while left:
            for socket, _ in self._poller.poll(int(WAIT_S * 1000)):
                number = self._numbers[socket]
                _check(socket.recv())
                took[number] = time.perf_counter() - sent[number]
                left -= 1
        return time.perf_counter() - began, took

    def ask(self, number: int, request: msgspec.Struct) -> float:
        """One engine asks, and nobody else does; seconds until it is answered."""
        payload = messages.encode(request)
        began = time.perf_counter()
        self._sockets[number].send(payload)
        reply = self._sockets[number].recv()
        seconds = time.perf_counter() - began
        _check(reply)
        return seconds

    def close(self) -> None:
        """Ends the connections."""
        self._context.destroy(linger=0)


def _check(reply: bytes) -> None:
    answer = messages.decode_reply(reply)
    refused = [text for text in ("Refused", "ErrorReply") if type(answer).__name__ == text]
    assert not refused, answer
    said = [*getattr(answer, "answers", ()), *getattr(answer, "states", {}).values()]
    assert set(said) <= {"held"}, answer


def _names(number: int) -> dict[str, str]:
    return {
        "engine_id": f"d{number}",
        "incarnation": "benchmark",
        "source_incarnation": "benchmark",
    }


def _renew(number: int, leases: dict[str, bytes]) -> Renew:
    said = _names(number).values()
    proofs = {id: prove(secret, "Renew", id, *said) for id, secret in leases.items()}
    return Renew(id=1, **_names(number), leases=proofs, grows=True)


def _finish(number: int, lease_id: str, secret: bytes) -> Finishes:
    nonce = secrets.token_bytes(8)
    proof = prove(secret, "Finish", lease_id, *_names(number).values(), 0, True, nonce)
    item = Finish(lease_id=lease_id, rank=0, ok=True, nonce=nonce, proof=proof)
    return Finishes(id=1, **_names(number), items=(item,))


Found = dict[tuple[str, str], float]
"""Name and unit → the figure."""


def one_source(count: int, confirms: int) -> Found:
    """One P with so many engines."""
    total, found = count * LEASES, Found()
    with Remote("P", Source, "127.0.0.1") as server:
        engines = Engines(count, server.call("port"))
        try:
            hello = [Handshake(id=1, description=describe(f"d{n}")) for n in range(count)]
            memory, cpu = server.call("memory"), server.call("cpu_s")
            seconds, _ = engines.ask_all(hello)
            found["handshakes", "per second"] = count / seconds
            found["CPU per handshake", "µs"] = (server.call("cpu_s") - cpu) / count * 1e6
            found["memory per engine", "bytes"] = (server.call("memory") - memory) / count

            memory = server.call("memory")
            granted = list(server.call("grant", total).items())
            own = [dict(granted[n * LEASES : (n + 1) * LEASES]) for n in range(count)]
            engines.ask_all([_renew(n, own[n]) for n in range(count)])  # takes them
            found["memory per lease", "bytes"] = (server.call("memory") - memory) / total
            cpu = server.call("cpu_s")
            seconds, _ = engines.ask_all([_renew(n, own[n]) for n in range(count)])
            found["renewed leases", "per second"] = total / seconds
            found["CPU per renewed lease", "µs"] = (server.call("cpu_s") - cpu) / total * 1e6
            found["look at all leases", "µs"] = server.call("expire") * 1e6

            more = list(server.call("grant", confirms).items())
            took = [
                engines.ask(index % count, _finish(index % count, *lease))
                for index, lease in enumerate(more)
            ]
            found["confirm alone, p50", "µs"] = float(np.percentile(took, 50)) * 1e6
            found["confirm alone, p99", "µs"] = float(np.percentile(took, 99)) * 1e6
            cpu, seconds, took = server.call("cpu_s"), 0.0, []
            for turn in range(LEASES):
                batch = [list(own[n].items())[turn] for n in range(count)]
                said = [_finish(n, *lease) for n, lease in enumerate(batch)]
                spent, each = engines.ask_all(said)
                seconds, took = seconds + spent, took + each
            found["confirms at once", "per second"] = total / seconds
            found["confirm at once, p99", "µs"] = float(np.percentile(took, 99)) * 1e6
            found["CPU per confirm", "µs"] = (server.call("cpu_s") - cpu) / total * 1e6
            swept, seconds = server.call("sweep")
            found["sweep per lease", "µs"] = seconds / swept * 1e6
        finally:
            engines.close()
    return found


# ---- one D --------------------------------------------------------------------------------------


class Decode:
    """What a decode engine has for its sources: the PullConnector's."""

    def __init__(self, count: int, server: Remote) -> None:
        self._server = server
        self._port = server.call("port")
        self._client = ControlClient(engine_id="d", incarnation="benchmark", options=OPTIONS)
        ours = describe("d")
        self.sources = Sources(
            self._client,
            AcceptedTickets(None, PullConfig()),
            groups=[tagged.geometry for tagged in ours.groups],
            addresses=(),
            renew_interval=lambda _ticket: REST_S,
            handshake_timeout_s=WAIT_S,
            progress_timeout_s=WAIT_S,
            note_error=lambda *_said: None,
        )
        self.sources.describe(ours)
        self._hosts = [f"127.1.{n // 250}.{n % 250 + 1}" for n in range(count)]

    def grant(self, count: int) -> Iterator[tuple[str, bytes]]:
        """So many new leases, and their secrets."""
        return iter(self._server.call("grant", count).items())

    def add(self, number: int, lease: tuple[str, bytes]) -> Pursuit:
        """A request comes with a ticket of one source."""
        ticket = Ticket(
            lease_id=lease[0],
            engine_id="source",
            incarnation="benchmark",
            secret=lease[1],
            host=self._hosts[number],
            port=self._port,
            request_id=lease[0],
            num_tokens=16,
            block_ids=((1,),),
            lease_duration_s=30.0,
        )
        record = RequestRecord(lease[0], "", True, {"arrived": time.monotonic()})
        return self.sources.pursuits.add(record, ticket)

    def step(self) -> None:
        """What every step of the engine does, but for what it says to its ranks."""
        self.sources.pursuits.stepped()
        self._client.pump()
        if self.sources.has_news:
            self.sources.take_news()

    def wait(self, pursuits: Sequence[Pursuit]) -> None:
        """Until the leases of all are had."""
        deadline = time.monotonic() + WAIT_S
        left = list(pursuits)
        while left:
            self.step()
            while left and not left[-1].awaits_source:
                left.pop()  # the waiting itself is to cost little
            assert time.monotonic() < deadline, "the leases were not had"
            if left:
                time.sleep(0.002)
        standings = [pursuit.standing for pursuit in pursuits]
        assert {each.state for each in standings} == {PursuitState.HELD}, standings[0].error

    def close(self) -> None:
        """Ends its threads and connections."""
        self.sources.close()
        self._client.close()


def one_target(count: int, takes: int) -> Found:
    """One D with so many sources."""
    total, found = count * LEASES, Found()
    with Remote("P", Source, "*") as server:
        decode = Decode(count, server)
        try:
            leases = decode.grant(total + takes)
            memory, cpu, began = _rss(), time.process_time(), time.perf_counter()
            decode.wait([decode.add(n, next(leases)) for n in range(count)])
            found["sources met", "per second"] = count / (time.perf_counter() - began)
            found["CPU per source met", "µs"] = (time.process_time() - cpu) / count * 1e6
            found["memory per source", "bytes"] = (_rss() - memory) / count

            cpu, began = time.process_time(), time.perf_counter()
            more = [decode.add(n, next(leases)) for _ in range(LEASES - 1) for n in range(count)]
            decode.wait(more)
            found["leases taken", "per second"] = len(more) / (time.perf_counter() - began)
            found["CPU per lease taken", "µs"] = (time.process_time() - cpu) / len(more) * 1e6

            took = []
            for index in range(takes):
                began = time.perf_counter()
                pursuit = decode.add(index * 7 % count, next(leases))
                while pursuit.awaits_source:
                    decode.step()
                took.append(time.perf_counter() - began)
                decode.sources.pursuits.release(pursuit)
            found["lease alone, p50", "µs"] = float(np.percentile(took, 50)) * 1e6
            found["lease alone, p99", "µs"] = float(np.percentile(took, 99)) * 1e6
            found["step", "µs"] = _seconds(decode.step) * 1e6

            cpu = time.process_time()
            time.sleep(2 * REST_S)
            spent = (time.process_time() - cpu) / (2 * REST_S)
            found["CPU at rest per lease held", "µs per second"] = spent / total * 1e6
        finally:
            decode.close()
    return found


# ---- the whole ----------------------------------------------------------------------------------


def exponent(figures: Sequence[Figure]) -> float:
    """The power of the number of engines with which a figure grows, by least squares.

    >>> def at(engines, value):
    ...     return Figure(side="", name="", unit="", engines=engines, values=[value])
    >>> exponent([at(10, 3.0), at(100, 30.0), at(1000, 300.0)])
    1.0
    """
    seen = [figure for figure in figures if figure.median > 0]  # memory comes in pages
    if len({figure.engines for figure in seen}) < 2:
        return math.nan
    sizes = np.log([figure.engines for figure in seen])
    values = np.log([figure.median for figure in seen])
    return round(float(np.polyfit(sizes, values, 1)[0]), 2) + 0.0  # never -0.0


def measure(run: report.Run) -> list[Figure]:
    """All figures at all sizes, in interleaved rounds."""
    found: dict[tuple[str, str, str, int], list[float]] = {}
    sides: dict[str, Callable[[int], Found]] = {
        "one P": partial(one_source, confirms=20 if run.quick else CONFIRMS),
        "one D": partial(one_target, takes=20 if run.quick else CONFIRMS),
    }
    for turn in range(run.rounds):
        for side, one in sides.items():
            for engines in QUICK_SIZES if run.quick else SIZES:
                run.say(f"round {turn + 1}: {side}, {engines} engines")
                for (name, unit), value in one(engines).items():
                    found.setdefault((side, name, unit, engines), []).append(value)
    return [
        Figure(
            side=side,
            name=name,
            unit=unit,
            engines=engines,
            values=values,
        )
        for (side, name, unit, engines), values in found.items()
    ]


def cells(results: ScaleResults, side: str) -> Iterator[tuple[str, ...]]:
    """The table of one side, its header first."""
    figures = [figure for figure in results.figures if figure.side == side]
    sizes = sorted({figure.engines for figure in figures})
    yield ("", "unit", *(f"{size:,}" for size in sizes), "exponent")
    for name in dict.fromkeys(figure.name for figure in figures):
        row = sorted((one for one in figures if one.name == name), key=lambda one: one.engines)
        values = (f"{one.median:,.0f}" if one.median >= 10 else f"{one.median:.2g}" for one in row)
        yield (name, row[0].unit, *values, f"{exponent(row):.2f}")


def page(results: ScaleResults) -> str:
    """The page for people."""
    lines: list[str] = []
    for side, others in (("one P", "decode engines"), ("one D", "prefill engines")):
        title = f"## O{side[1:]} with so many {others}, and {LEASES} leases with each"
        lines += [title, "", *report.table(cells(results, side), left=2), ""]
    note = (
        "The exponent is that of the number of engines with which a row grows: about 0 for what "
        "one engine or lease costs says that all of them together cost in proportion to their "
        "number. `look at all leases` is what the server does once a second; it is to grow with "
        "1. What waits at once for one server waits for all before it, so its p99 grows with 1."
    )
    return report.page(
        "The control plane at scale",
        results,
        "Medians of the rounds. The engines that ask run on the same cores.",
        [*lines, note, "", "![scale](scale.png)"],
    )


def draw(results: ScaleResults, path: Path) -> None:
    """Draws what takes time over the number of engines, a panel per side; all axes logarithmic."""
    shown = [figure for figure in results.figures if figure.unit == "µs"]
    sides = list(dict.fromkeys(figure.side for figure in shown))
    with report.picture(path, 1, len(sides), (6.5 * len(sides), 4.6)) as grid:
        for axes, side in zip(grid[0], sides, strict=True):
            own = [figure for figure in shown if figure.side == side]
            for name in dict.fromkeys(figure.name for figure in own):
                line = [(each.engines, each.median) for each in own if each.name == name]
                axes.loglog(*zip(*sorted(line), strict=True), marker="o", label=f"{name} (µs)")
            axes.set_title(f"{side}, by the number of engines")
            axes.legend(fontsize=7, frameon=False)


def main(
    rounds: report.Rounds = 5, out: report.Out = report.RESULTS, quick: report.Quick = False
) -> None:
    """Measures what the control plane of one P, and of one D, costs with up to 1,000 engines."""
    run = report.Run("benchmarks.scale", out, rounds=1 if quick else rounds, quick=quick)
    results = run.results(ScaleResults, figures=measure(run))
    run.publish("scale", results, page, draw)


if __name__ == "__main__":
    report.start(main)
