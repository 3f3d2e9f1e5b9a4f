"""Runs engines on the nodes of a Ray cluster, for the launcher.

    launcher: RayProcess ──┬── RayAgent on node 1 ── process of an engine, with its first ranks
                           └── RayAgent on node 2 ── process of a further rank; one agent for each

An agent is a Ray actor. The agent converts the model on its node, starts the same process there
that the launcher would start on its own machine, and sends events and log lines of this process to
the launcher. Ray reserves the CPUs and knows the lost nodes. The launcher does all else: it
restarts engines and tells the router their addresses.
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

from kvferry.cluster.preflight import with_host
from kvferry.config import ClusterConfig, EngineConfig, ModelConfig
from kvferry.engine.messages import RanksElsewhere
from kvferry.errors import ConfigError, HostError, KVFerryError, WorkerDiedError
from kvferry.lifetimes import Closing
from kvferry.serving.messages import (
    Bound,
    ChildFailed,
    EngineSettings,
    Event,
    Loading,
    RankSettings,
    Ready,
)
from kvferry.serving.process import GROUP_GRACE_S, TERM_GRACE_S, Child, ChildProcess, News
from kvferry.zeromq import is_loopback, join_address, split_address

logger = logging.getLogger(__name__)

ANSWER_TIMEOUT_S = 10.0
"""Seconds within which a Ray cluster must accept a connection."""
LOG_INTERVAL_S = 0.5
"""Seconds between two reads of a log on a node."""
CONVERTING = 0.2
"""Share of the conversion in the displayed progress of an engine's start, 0 to 1."""
LOG_BYTES = 1 << 20
"""Maximum number of bytes in a message with log lines."""


class Ended(msgspec.Struct, frozen=True):
    """The end of an agent's process, or the loss of the agent."""

    exit_code: int | None
    """Exit code of the process; ``None`` for a lost agent."""
    lost: str = ""
    """Reason of the loss; empty if the agent is not lost."""


Told: TypeAlias = Event | Ended | bytes
"""A message of an agent; bytes are lines of the log."""


# ---- placement --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the Ray cluster."""

    id: str
    address: str
    hostname: str
    cpus: float
    """Number of CPUs of the node."""


def named_nodes(engine: EngineConfig) -> tuple[str, ...]:
    """Addresses or hostnames of the nodes that the cluster file names for an engine."""
    return engine.nodes or (() if is_loopback(engine.host) else (engine.host,))


def place(
    engine: EngineConfig, nodes: Sequence[Node], free: Mapping[str, float]
) -> tuple[Node, ...]:
    """Chooses the node of each rank of an engine; ranks on the same node are consecutive.

    If the engine names no nodes, all ranks are on the node with most free CPUs. If this node has
    too few free CPUs, the ranks are on as few nodes as possible.

    Args:
        engine: the engine, possibly with names of nodes.
        nodes: all live nodes.
        free: node id → number of free CPUs.

    Raises:
        ConfigError: a named node is not in the cluster, or too few CPUs are free.
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
    """The nodes of a Ray cluster, and the CPUs that each engine has there."""

    def __init__(self, config: ClusterConfig) -> None:
        """Use :meth:`open`."""
        self._engines = {engine.name: engine for engine in config.engines}
        self._places: dict[str, tuple[Node, ...]] = {}

    @classmethod
    def open(cls, address: str, config: ClusterConfig) -> "RayNodes":
        """Connects to a Ray cluster and finds places for all engines. This machine must be a node.

        Raises:
            ConfigError: Ray is not installed, an engine names a node that is not in the cluster,
                or an engine has no room.
            HostError: the address has no Ray cluster, or this machine is not a node of the cluster.
        """
        _connect(address)
        nodes = cls(config)
        try:
            # Place engines with named nodes first, then large engines before small engines.
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
        """Starts an engine at its place, or on other nodes if a node of its place is gone.

        Args:
            settings: settings of the engine; the process adds all values that depend on the place.
            model: the model, which each node converts for itself.
            log: file for the output of the engine's processes.
            news: queue for the engine's events; gets a failure if the engine has no room.
        """
        places: tuple[Node, ...] = ()
        problem = None
        try:
            nodes = _alive()
            places = self._place(_without_lost(self._engines[settings.engine.name], nodes), nodes)
        except KVFerryError as error:
            problem = ChildFailed(name=type(error).__name__, message=str(error))
        process = RayProcess(settings, model, places, log, problem)
        process.follow(news)
        return process

    def _place(self, engine: EngineConfig, nodes: Sequence[Node]) -> tuple[Node, ...]:
        """Reserves CPUs for an engine, after a release of its previous CPUs."""
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
    """A copy of ``engine`` without named nodes, if a named node is gone; else ``engine``."""
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
        # Ray itself would try for a minute, with a less helpful error.
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
    except Exception as error:  # Ray raises many kinds
        raise HostError(
            f"--ray: this machine cannot use the Ray cluster at {address}: {error}; is it a node "
            f"of it (`ray start --address={address}`), with its releases of Ray and Python?"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # undo: Ray installs its own handler


def _alive() -> list[Node]:
    """The nodes that Ray has not declared lost.

    Raises:
        HostError: the head of the Ray cluster does not answer.
    """
    import ray

    try:
        found = ray.nodes()
    except Exception as error:  # Ray raises many kinds
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


# ---- launcher side ----------------------------------------------------------------------------

ENGINE = 0
"""Number of the agent with the engine's process; the number of any other agent is its rank."""


class RayProcess(Child):
    """An engine on Ray nodes; the launcher's side of the agents."""

    def __init__(
        self,
        settings: EngineSettings,
        model: ModelConfig,
        places: tuple[Node, ...],
        log: Path,
        problem: ChildFailed | None = None,
    ) -> None:
        """Use :meth:`RayNodes.start`; ``problem`` is the reason for an engine without a place."""
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
        """The addresses of the engine's nodes, as text."""
        addresses = list(dict.fromkeys(node.address for node in self._places))
        return f"node{'s' if len(addresses) > 1 else ''} {', '.join(addresses)}"

    def terminate(self) -> None:
        """Sends SIGTERM to the engine's process."""
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
                # Also for a lost rank: an engine that waits for this rank would not notice the
                # loss.
                yield ChildFailed(name=WorkerDiedError.__name__, message=told.lost)
                return
            if isinstance(told, Ended | signal.Signals):
                if self._is_over(agent, told):
                    return
            elif isinstance(told, Bound) and agent != ENGINE:
                self._note_rank(agent, told.port)
            elif agent == ENGINE or (isinstance(told, ChildFailed) and ENGINE not in self._agents):
                yield told

    def _is_over(self, agent: int, told: Ended | signal.Signals) -> bool:
        """Whether no further event is to be awaited."""
        if ENGINE not in self._agents:
            return True
        if isinstance(told, Ended):
            if agent == ENGINE:
                self._ended_code = told.exit_code
            return agent == ENGINE  # the engine itself notices the end of a rank
        if told == signal.SIGTERM:
            self._agents[ENGINE].terminate.remote()
        return told != signal.SIGTERM

    def _note_rank(self, rank: int, port: int) -> None:
        """Notes that a remote rank waits; starts the engine when all remote ranks wait."""
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
        """Makes an agent start a process for ``ranks`` ranks, and follows the agent's messages."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        node, threads = self._places[agent], self._settings.engine.threads
        name = self.name if agent == ENGINE else f"{self.name}-rank{agent}"
        actor = (
            ray.remote(RayAgent)
            .options(
                num_cpus=ranks * threads,
                max_concurrency=2,  # terminate() is called during run()
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
        """Waits shortly for the end of remote ranks, then kills all agents."""
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


# ---- node side --------------------------------------------------------------------------------


class RayAgent:
    """A Ray actor that runs a process of an engine on its node; the process ends with the actor."""

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
        """Converts the model, then runs the process; yields the events and the logs of both."""
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
                    elif isinstance(told, Loading):  # only a share of the engine's own start
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
        """Sends SIGTERM to the current process, and to any process started later."""
        self._is_ending = True
        if self._child is not None:
            self._child.terminate()
