"""Engines on the nodes of a Ray cluster, as a launcher sees them.

    launcher: RayProcess ──┬── RayAgent on node 1 ── process of an engine, with its first ranks
                           └── RayAgent on node 2 ── process of a further rank; one agent for each

An agent is a Ray actor. It has the model converted on its node, starts there what the launcher
would start on its own machine, and tells what that reports and writes to its log. Ray keeps the
CPUs free and knows which nodes are lost. All else the launcher does: it starts engines again, and
tells the router where they are.
"""

import itertools
import logging
import queue
import secrets
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeAlias

import msgspec

from kvferry.cluster.messages import (
    Bound,
    EngineSettings,
    Event,
    Failed,
    Loading,
    RankSettings,
    Ready,
)
from kvferry.cluster.preflight import with_host
from kvferry.cluster.process import GROUP_GRACE_S, TERM_GRACE_S, Child, ChildProcess, News
from kvferry.config import ClusterConfig, EngineConfig, ModelConfig
from kvferry.engine.messages import RanksElsewhere
from kvferry.errors import ConfigError, HostError, KVFerryError, WorkerDiedError
from kvferry.lifetimes import Closing
from kvferry.zeromq import is_loopback, join_address, split_address

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
"""Seconds for a Ray cluster to take a connection."""
LOG_INTERVAL_S = 0.5
"""Seconds between two looks at a log on a node."""
CONVERTING = 0.2
"""Part of an engine's start that the conversion of its model is, as its progress is shown."""
LOG_BYTES = 1 << 20
"""Bytes of a log that are sent at a time."""


class Ended(msgspec.Struct, frozen=True):
    """An agent's process has ended, or the agent is lost."""

    exit_code: int | None
    """``None`` for an agent that is lost."""
    lost: str = ""
    """Why it is."""


Told: TypeAlias = Event | Ended | bytes
"""What an agent tells; bytes are of the log."""


# ---- placement --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the Ray cluster."""

    id: str
    address: str
    hostname: str
    cpus: float
    """How many it has."""


def named_nodes(engine: EngineConfig) -> tuple[str, ...]:
    """The nodes that the cluster file names for an engine."""
    return engine.nodes or (() if is_loopback(engine.host) else (engine.host,))


def place(
    engine: EngineConfig, nodes: Sequence[Node], free: Mapping[str, float]
) -> tuple[Node, ...]:
    """The node of each rank of an engine, those of a node in a row.

    The ranks of an engine that names no nodes are together on the node with most room, or, if it
    has not enough, on as few as possible.

    Args:
        engine: with the nodes that it names, if it names some.
        nodes: those that live.
        free: node id → CPUs that nobody has.

    Raises:
        ConfigError: a node that the engine names is not there, or there is no room.
    """
    ranks = engine.tp * engine.pp
    named = [_find(engine, name, nodes) for name in named_nodes(engine)]
    if named:
        placed = tuple(named[rank * len(named) // ranks] for rank in range(ranks))
        fits = all(placed.count(node) * engine.threads <= free[node.id] for node in named)
    else:
        roomy = sorted(nodes, key=lambda node: -free[node.id])
        seats = (node for node in roomy for _ in range(int(free[node.id] // engine.threads)))
        placed = tuple(itertools.islice(seats, ranks))
        fits = len(placed) == ranks
    if not fits:
        room = ", ".join(
            f"{free[node.id]:g} of {node.cpus:g} on {node.address}" for node in named or nodes
        )
        raise ConfigError(
            f"engine {engine.name!r} needs {ranks * engine.threads} CPUs, {engine.threads} for "
            f"each of {ranks} ranks; free are {room}: add nodes, or lower tp, pp or threads"
        )
    return placed


def _find(engine: EngineConfig, name: str, nodes: Sequence[Node]) -> Node:
    for node in nodes:
        if name in (node.address, node.hostname):
            return node
    there = ", ".join(f"{node.address} ({node.hostname})" for node in nodes)
    raise ConfigError(
        f"engine {engine.name!r}: node {name} is not in the Ray cluster; there are {there}"
    )


class RayNodes(Closing):
    """The nodes of a Ray cluster, and which engines have which of their CPUs."""

    def __init__(self, config: ClusterConfig) -> None:
        """Use :meth:`open`."""
        self._engines = {engine.name: engine for engine in config.engines}
        self._places: dict[str, tuple[Node, ...]] = {}

    @classmethod
    def open(cls, address: str, config: ClusterConfig) -> "RayNodes":
        """Connects to a Ray cluster of which this machine is a node, and finds a place for all.

        Raises:
            ConfigError: Ray is not installed, an engine names a node that is not there, or there
                is no room for an engine.
            HostError: there is no such Ray cluster, or this machine is no node of it.
        """
        _connect(address)
        nodes = cls(config)
        try:
            # Those that have no choice first, then large ones.
            for engine in sorted(
                config.engines, key=lambda one: (not named_nodes(one), -_num_cpus(one))
            ):
                nodes._place(engine, _alive())
        except BaseException:
            nodes.close()
            raise
        return nodes

    def start(
        self, settings: EngineSettings, model: ModelConfig, log: Path, news: "queue.Queue[News]"
    ) -> "RayProcess":
        """Starts an engine where it has its place, or on other nodes if that is gone.

        Args:
            settings: of the engine; what has to do with its place is filled in.
            model: what each node converts for itself.
            log: file that gets what its processes write.
            news: gets its events; a failure if there is no room for it.
        """
        places: tuple[Node, ...] = ()
        problem = None
        try:
            nodes = _alive()
            places = self._place(_without_lost(self._engines[settings.engine.name], nodes), nodes)
        except KVFerryError as error:
            problem = Failed(name=type(error).__name__, message=str(error))
        process = RayProcess(settings, model, places, log, problem)
        process.follow(news)
        return process

    def _place(self, engine: EngineConfig, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Takes CPUs for an engine, and gives back those that it had."""
        self._places.pop(engine.name, None)
        free = {node.id: node.cpus for node in nodes}
        for name, places in self._places.items():
            for node in places:
                if node.id in free:
                    free[node.id] -= self._engines[name].threads
        self._places[engine.name] = place(engine, nodes, free)
        return self._places[engine.name]

    def close(self) -> None:
        """Disconnects. Idempotent."""
        import ray

        ray.shutdown()


def _without_lost(engine: EngineConfig, nodes: Sequence[Node]) -> EngineConfig:
    """``engine``, naming no nodes if one of those that it names is gone."""
    there = {name for node in nodes for name in (node.address, node.hostname)}
    lost = [name for name in named_nodes(engine) if name not in there]
    if not lost:
        return engine
    logger.warning(
        "engine %r: its node %s is gone; it is placed where there is room",
        engine.name,
        ", ".join(lost),
    )
    return msgspec.structs.replace(engine, nodes=(), host="127.0.0.1")


def _num_cpus(engine: EngineConfig) -> int:
    return engine.tp * engine.pp * engine.threads


def _connect(address: str) -> None:
    try:
        import ray
    except ImportError as error:
        raise ConfigError("--ray: Ray is not installed here; pip install 'kvferry[ray]'") from error
    try:
        # Ray itself tries for a minute, and says less.
        socket.create_connection(split_address(address), ANSWER_TIMEOUT_S).close()
    except ValueError as error:
        raise ConfigError(f"--ray: {error}, as `ray start --head` prints it") from error
    except OSError as error:
        raise HostError(
            f"--ray: no Ray cluster answers at {address} ({error}); `ray start --head` starts one"
        ) from error
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # of many kinds
        raise HostError(
            f"--ray: this machine cannot use the Ray cluster at {address}: {error}; is it a node "
            f"of it (`ray start --address={address}`), with its releases of Ray and Python?"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray has one of its own


def _alive() -> list[Node]:
    """The nodes that Ray has not declared lost.

    Raises:
        HostError: Ray's head does not answer.
    """
    import ray

    try:
        found = ray.nodes()
    except Exception as error:  # of many kinds
        raise HostError(f"the head of the Ray cluster does not answer: {error}") from error
    return [
        Node(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["NodeManagerHostname"],
            node["Resources"].get("CPU", 0.0),
        )
        for node in found
        if node["Alive"]
    ]


# ---- the launcher's end -----------------------------------------------------------------------

ENGINE = 0
"""Number of the agent that has the engine's process; the others are numbered by their ranks."""


class RayProcess(Child):
    """An engine on one node or several."""

    def __init__(
        self,
        settings: EngineSettings,
        model: ModelConfig,
        places: tuple[Node, ...],
        log: Path,
        problem: Failed | None = None,
    ) -> None:
        """Use :meth:`RayNodes.start`; ``problem`` says why there are no places."""
        super().__init__(settings.engine.name, log, log.stat().st_size if log.exists() else 0)
        self.host = places[0].address if places else ""
        self._settings = settings
        self._model = model
        self._places = places
        self._problem = problem
        self._told: queue.Queue[tuple[int, Event | Ended | signal.Signals]] = queue.Queue()
        self._away = [rank for rank, node in enumerate(places) if node != places[0]]
        self._key = secrets.token_hex(32)
        self._ranks: dict[int, str] = {}
        self._agents: dict[int, Any] = {}
        self._ended_code: int | None = None
        self._log_lock = threading.Lock()

    @property
    def where(self) -> str:
        """Its nodes."""
        addresses = list(dict.fromkeys(node.address for node in self._places))
        return f"node{'s' if len(addresses) > 1 else ''} {', '.join(addresses)}"

    def terminate(self) -> None:
        """By SIGTERM to the engine's process."""
        self._told.put((ENGINE, signal.SIGTERM))

    def _kill(self) -> None:
        self._told.put((ENGINE, signal.SIGKILL))

    def _wait(self) -> int | None:
        return self._ended_code

    def _events(self) -> Iterator[Event]:
        if self._problem is not None:
            yield self._problem
            return
        yield Loading(doing=f"waiting for Ray on {self.where}", done=0.0)
        for rank in self._away:
            host = self._places[rank].address
            settings = RankSettings(host=host, key=self._key, model_folder="")
            self._run(rank, "rank", settings, 1)
        if not self._away:
            self._run_engine(None)
        while True:
            agent, told = self._told.get()
            if isinstance(told, Ended) and told.lost:
                # Of a rank too: an engine that waits for it in a step would not know.
                yield Failed(name=WorkerDiedError.__name__, message=told.lost)
                return
            if isinstance(told, Ended | signal.Signals):
                if self._is_over(agent, told):
                    return
            elif isinstance(told, Bound) and agent != ENGINE:
                self._note_rank(agent, told.port)
            elif agent == ENGINE or (isinstance(told, Failed) and ENGINE not in self._agents):
                yield told

    def _is_over(self, agent: int, told: Ended | signal.Signals) -> bool:
        """Whether nothing more is to be waited for."""
        if ENGINE not in self._agents:
            return True
        if isinstance(told, Ended):
            if agent == ENGINE:
                self._ended_code = told.exit_code
            return agent == ENGINE  # which knows by itself of a rank that has ended
        if told == signal.SIGTERM:
            self._agents[ENGINE].terminate.remote()
        return told != signal.SIGTERM

    def _note_rank(self, rank: int, port: int) -> None:
        """A rank elsewhere waits for the engine, which is started when all of them do."""
        self._ranks[rank] = join_address(self._places[rank].address, port)
        if len(self._ranks) == len(self._away):
            addresses = tuple(self._ranks[rank] for rank in self._away)
            self._run_engine(RanksElsewhere(host=self.host, addresses=addresses, key=self._key))

    def _run_engine(self, elsewhere: RanksElsewhere | None) -> None:
        settings = msgspec.structs.replace(
            self._settings,
            engine=with_host(self._settings.engine, self.host),
            elsewhere=elsewhere,
        )
        self._run(ENGINE, "engine", settings, self._places.count(self._places[0]))

    def _run(
        self, agent: int, what: str, settings: EngineSettings | RankSettings, ranks: int
    ) -> None:
        """Has an agent start a process, for ``ranks`` ranks, and takes in what it tells."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node, threads = self._places[agent], self._settings.engine.threads
        name = self.name if agent == ENGINE else f"{self.name}-rank{agent}"
        actor = (
            ray.remote(RayAgent)
            .options(
                num_cpus=ranks * threads,
                max_concurrency=2,  # it is told to end while it runs
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            .remote()
        )
        self._agents[agent] = actor
        stream = actor.run.options(num_returns="streaming").remote(
            name, what, settings, self._model, threads
        )
        threading.Thread(
            target=self._take_in, args=(agent, stream), name=f"kvferry-{name}-told", daemon=True
        ).start()

    def _take_in(self, agent: int, stream: Any) -> None:
        import ray

        try:
            for one in stream:
                told: Told = ray.get(one)
                if isinstance(told, bytes):
                    with self._log_lock, self.log.open("ab") as log:
                        log.write(told)
                else:
                    self._told.put((agent, told))
        except ray.exceptions.RayError as error:
            reason = str(error).partition("\n")[0]
            lost = f"lost on node {self._places[agent].address}: {reason}"
            self._told.put((agent, Ended(None, lost)))

    def _end_group(self) -> None:
        """Gives ranks elsewhere a moment to end and to be heard, then ends all that is left."""
        import ray

        deadline = time.monotonic() + (0.0 if self._killed else GROUP_GRACE_S)
        left = set(self._agents) - {ENGINE}
        with suppress(queue.Empty):
            while left:
                agent, told = self._told.get(timeout=max(0.0, deadline - time.monotonic()))
                if isinstance(told, Ended):
                    left.discard(agent)
        for actor in self._agents.values():
            ray.kill(actor)


# ---- a node's end -----------------------------------------------------------------------------


class RayAgent:
    """Runs a process of an engine on its node; a Ray actor. What it has started ends with it."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None
        self._is_ending = False

    def run(
        self,
        name: str,
        what: str,
        settings: EngineSettings | RankSettings,
        model: ModelConfig,
        threads: int,
    ) -> Iterator[Told]:
        """Converts the model, then runs the process; tells all that is to be told of both."""
        news: queue.Queue[News] = queue.Queue()
        with tempfile.TemporaryDirectory(prefix="kvferry-") as folder:
            log = Path(folder) / "log"
            log.touch()
            with log.open("rb") as lines:
                model_folder = ""
                convert = ChildProcess.start(f"{name}-model", "convert", model, log, news)
                for told in self._tell(convert, news, lines):
                    if isinstance(told, Ready):
                        model_folder = told.folder or ""
                    elif isinstance(told, Loading):  # the engine itself is far from ready
                        yield msgspec.structs.replace(told, done=CONVERTING * told.done)
                    elif not (isinstance(told, Ended) and model_folder):
                        yield told
                if model_folder:
                    settings = msgspec.structs.replace(settings, model_folder=model_folder)
                    process = ChildProcess.start(name, what, settings, log, news, threads)
                    yield from self._tell(process, news, lines)

    def _tell(
        self, child: ChildProcess, news: "queue.Queue[News]", lines: IO[bytes]
    ) -> Iterator[Told]:
        self._child = child
        if self._is_ending:
            child.terminate()
        while True:
            event: Event | Ended | None = None
            with suppress(queue.Empty):
                event = news.get(timeout=LOG_INTERVAL_S).event or Ended(child.exit_code)
            if isinstance(event, Ended):
                child.reap(TERM_GRACE_S)
            while text := lines.read(LOG_BYTES):
                yield text
            if event is not None:
                yield event
            if isinstance(event, Ended):
                return

    def terminate(self) -> None:
        """Asks what it runs to end."""
        self._is_ending = True
        if self._child is not None:
            self._child.terminate()
