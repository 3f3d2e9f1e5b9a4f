"""A network that loses, repeats, reorders and delays messages, and breaks connections.

The product's client is given a :class:`SimNetwork`; a :class:`Port` stands for the server's ROUTER
socket. As over TCP, messages of one link arrive in order unless a fault says otherwise, and while a
path is cut they wait. As with ZeroMQ, a link whose far end is silent for :data:`SILENCE_S` is lost,
and nobody tells the sender of a message that was on its way.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

from kvferry.control.options import ControlOptions
from kvferry.control.server import ControlService
from kvferry.errors import PeerEndedError, PeerLostError
from kvferry.zeromq import is_address, split_address
from tests.control.simulation.world import Descriptor, Process, World

HEARTBEAT_S = ControlOptions().heartbeat_s
SILENCE_S = 3 * HEARTBEAT_S
"""Seconds without a heartbeat after which ZeroMQ gives a connection up."""
BURST = 64
RARE = 12
"""See :attr:`NetworkFaults.breaks_rarely`."""


@dataclass
class NetworkFaults:
    """How badly the network behaves, of all messages: probabilities."""

    loss: float = 0.0
    repeat: float = 0.0
    reorder: float = 0.0
    delay: float = 0.0
    breaks: float = 0.0
    """A message is lost with the connection on which it is on its way."""
    breaks_rarely: bool = False
    """Whether no client loses more than one of :data:`RARE` messages so."""
    names_fail: float = 0.0
    """Of all look-ups."""


Arrived = tuple[bytes, bytes, Callable[[bytes], None]]
"""A message, the name of its connection, and what takes the reply."""


class Port:
    """Where a server listens: messages wait here until its thread gets to run."""

    def __init__(
        self, process: Process, service: ControlService, watch: Callable[[bytes, bytes], None]
    ) -> None:
        self.process = process
        self.service = service
        self.watch = watch
        """Sees every request with its reply."""
        self._arrived: deque[Arrived] = deque()
        self._answers: dict[bytes, Callable[[bytes], None]] = {}
        self._is_awake = False

    def tell(self, connection: bytes, news: bytes) -> None:
        """The server says something unasked."""
        if connection in self._answers:
            self._answers[connection](news)

    def arrive(self, payload: bytes, connection: bytes, answer: Callable[[bytes], None]) -> None:
        """A message has come on a connection; ``answer`` takes the reply."""
        self._arrived.append((payload, connection, answer))
        self._answers[connection] = answer
        self._wake()

    def _wake(self) -> None:
        if not self._is_awake and self._arrived:
            self._is_awake = True
            self.process.run(0.0, self._serve)

    def _serve(self) -> None:
        self._is_awake = False
        for _ in range(min(BURST, len(self._arrived))):
            payload, connection, answer = self._arrived.popleft()
            try:
                reply = self.service.handle(payload, connection)
            except Exception as error:
                law = "bad messages harm only their sender"
                self.process.world.broken(law, f"{self.process.name}: {error!r}")
                return
            self.watch(payload, reply)
            answer(reply)
        self._wake()


class Internet:
    """All hosts: who listens where, what names mean, what is cut, and who overhears."""

    def __init__(self, world: World, faults: NetworkFaults) -> None:
        self.world = world
        self.faults = faults
        self.ports: dict[str, Port] = {}
        """By address."""
        self.names: dict[str, str] = {}
        self.links: list[SimLink] = []
        """Those that are not lost."""
        self.overheard: list[tuple[str, bytes]] = []
        """The address and the text of every request that was sent."""
        self.listener: Callable[[str, bytes], None] | None = None
        """Who is told of each of them at once."""
        self._known: dict[bytes, SimLink] = {}
        self._unbroken: dict[str, int] = {}
        """Process → messages since a connection of it broke under one."""
        self._cuts: dict[tuple[str, str], float] = {}

    def name(self, link: "SimLink") -> bytes:
        """How the server's socket names a new connection."""
        self.links.append(link)
        name = f"connection {len(self._known)}".encode()
        self._known[name] = link
        return name

    def lives(self, name: bytes) -> bool:
        """Whether a connection lives, as far as the server can tell."""
        link = self._known.get(name)
        return link is not None and link.is_up

    def breaks_now(self, client: Process) -> bool:
        """Whether a connection breaks under a message of this client, or to it."""
        if not self.faults.breaks:
            return False
        unbroken = self._unbroken.setdefault(client.name, self.world.dice.randrange(RARE)) + 1
        breaks = self.world.chance(self.faults.breaks)
        breaks &= not self.faults.breaks_rarely or unbroken >= RARE
        self._unbroken[client.name] = 0 if breaks else unbroken
        return breaks

    def vanish(self, host: str, seconds: float) -> None:
        """Who was connected with a process that is gone gets to know it."""
        for link in list(self.links):
            if host in (link.client.host, link.host):
                self.world.after(seconds, partial(link.lose, "the connection broke"))

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Nothing gets from one host to the other for a while; what is sent waits."""
        until = self.world.now + seconds
        self._cuts[one, other] = max(until, self._cuts.get((one, other), 0.0))
        if seconds > SILENCE_S:
            for link in list(self.links):
                if {link.client.host, link.host} == {one, other}:
                    self.world.after(SILENCE_S, partial(link.lose, "the connection broke"))

    def cut_until(self, one: str, other: str) -> float:
        """When the path is whole again; a time that has passed if it is whole."""
        return self._cuts.get((one, other), 0.0)

    def break_links(self, chosen: Callable[["SimLink"], bool]) -> None:
        """Some connections break, with what is on its way on them."""
        for link in list(self.links):
            if chosen(link):
                link.lose("the connection broke")

    def freeze(self, process: Process, seconds: float) -> None:
        """A process is stopped, its sockets too: who hears nothing from it gives it up."""
        process.stand_still(seconds, frozen=True)
        if seconds > SILENCE_S:
            for link in list(self.links):
                if link.client is process:  # it finds out when it goes on
                    self.world.after(SILENCE_S, link.give_up)
                    self.world.after(seconds + 0.001, partial(link.lose, "the connection broke"))
                elif link.server is process:
                    self.world.after(SILENCE_S, partial(link.lose, "the connection broke"))


class SimNetwork:
    """What a process reaches servers over."""

    def __init__(self, internet: Internet, process: Process) -> None:
        self._internet = internet
        self._process = process
        self._links: list[SimLink] = []

    def connect(self, address: str, host: str) -> "SimLink":
        link = SimLink(self._internet, self._process, host, split_address(address)[1])
        self._links.append(link)
        return link

    def look_up(self, host: str) -> "Future[str]":
        found: Future[str] = Future()
        world = self._internet.world

        def end() -> None:
            if host not in self._internet.names or world.chance(self._internet.faults.names_fail):
                found.set_exception(PeerLostError(f"cannot resolve {host!r}"))
            else:
                found.set_result(self._internet.names[host])

        is_slow = world.chance(self._internet.faults.names_fail / 2)
        self._process.run(world.between(0.5, 20.0) if is_slow else 0.002, end)
        return found

    def close(self) -> None:
        for link in self._links:
            link.close()


class SimLink:
    """One connection of a client to a server."""

    def __init__(self, internet: Internet, client: Process, host: str, port: int) -> None:
        assert is_address(host)
        self.descriptors = (Descriptor(), Descriptor())
        self.client = client
        self.host = host
        """The server's."""
        self._internet = internet
        self._world = internet.world
        self._address = f"{host}:{port}"
        self._port = internet.ports.get(self._address)
        self._came: deque[bytes] = deque()
        self._lost: PeerLostError | None = None
        self._is_closed = False
        self._last = {"there": 0.0, "back": 0.0}
        """When the last message of each direction arrives: the next one does not overtake it."""
        self.is_up = True
        """Whether the server takes it for alive."""
        self.name = internet.name(self)
        if self._port is None or self._port.process.is_dead:
            self._world.after(0.001, partial(self.lose, "nobody listens there", PeerEndedError))
        elif self._is_unreachable():
            self._world.after(HEARTBEAT_S, partial(self.lose, "the connection broke"))

    def send(self, payload: bytes) -> None:
        self._internet.overheard.append((self._address, payload))
        if self._internet.listener is not None:
            self._internet.listener(self._address, payload)
        self._carry("there", payload, self._arrive_there)

    def receive(self) -> bytes | None:
        return self._came.popleft() if self._came else None

    def why_lost(self) -> PeerLostError | None:
        return self._lost

    def give_up(self) -> None:
        """The server has not heard the client for long."""
        self.is_up = False

    def close(self) -> None:
        self._is_closed, self.is_up = True, False
        if self in self._internet.links:
            self._internet.links.remove(self)

    def lose(self, why: str, kind: type[PeerLostError] = PeerLostError) -> None:
        """Nothing gets through any more."""
        if self._lost or self._is_closed:
            return
        if self in self._internet.links:
            self._internet.links.remove(self)
        self._lost, self.is_up = kind(f"{self._address}: {why}"), False
        self._world.note(f"{self.client.name} -> {self._address}: {why}")
        self.descriptors[1].tell()

    def _is_unreachable(self) -> bool:
        cut, now = self._internet.cut_until, self._world.now
        here, there, server = self.client.host, self.host, self.server
        is_cut = max(cut(here, there), cut(there, here)) > now
        return is_cut or (server is not None and server.stands_still and server.is_frozen)

    @property
    def server(self) -> Process | None:
        """The process that it leads to; ``None`` if nobody listened there."""
        return None if self._port is None else self._port.process

    def _carry(self, way: str, payload: bytes, arrive: Callable[[bytes], None]) -> None:
        """A message sets out; faults may befall it."""
        world, faults = self._world, self._internet.faults
        if world.chance(faults.loss):
            world.note(f"{self.client.name}, {way}: a message is lost")
            return
        if self._internet.breaks_now(self.client):
            world.after(world.dice.random() / 500, partial(self.lose, "the connection broke"))
            return
        here, there = self.client.host, self.host
        path = (here, there) if way == "there" else (there, here)
        whole = max(world.now, self._internet.cut_until(*path))
        arrival = whole + 0.0005 + world.dice.random() / 500
        if world.chance(faults.delay):
            arrival += world.between(0.01, 60.0)
        if not world.chance(faults.reorder):
            arrival = max(arrival, self._last[way] + 1e-6)
            self._last[way] = arrival
        world.after(arrival - world.now, partial(arrive, payload))
        if world.chance(faults.repeat):
            again = arrival + world.between(0.001, 60.0)
            world.after(again - world.now, partial(arrive, payload))

    def _arrive_there(self, payload: bytes) -> None:
        if self._lost or self._is_closed or not self.is_up:
            return
        port = self._port
        listens = port is not None and self._internet.ports.get(self._address) is port
        if port is None or port.process.is_dead or not listens:
            self.lose("the connection broke")
        elif port.process.stands_still and port.process.is_frozen:
            rest = port.process.still_until - self._world.now
            self._world.after(rest + 0.001, partial(self._arrive_there, payload))
        else:
            port.arrive(payload, self.name, self._answered)

    def _answered(self, reply: bytes) -> None:
        self._carry("back", reply, self._arrive_back)

    def _arrive_back(self, reply: bytes) -> None:
        if not self._lost and not self._is_closed:
            self._came.append(reply)
            self.descriptors[0].tell()
