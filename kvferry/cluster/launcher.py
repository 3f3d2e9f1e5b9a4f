"""Starts a cluster or a single engine, on this machine or on Ray nodes; restarts dead engines."""

import contextlib
import logging
import queue
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from kvferry.cluster.preflight import (
    check_cluster,
    check_shapes,
    cluster_key,
    control_keys,
    with_cluster_key,
)
from kvferry.config import ClusterConfig, EngineConfig, ModelConfig, RouterConfig
from kvferry.engine.weights import load_model_config
from kvferry.errors import ConfigError, EngineError, KVFerryError, ModelError, PortInUseError
from kvferry.lifetimes import Closing
from kvferry.router.router_client import RouterClient
from kvferry.serving.messages import (
    Bound,
    EngineAddress,
    EngineSettings,
    Loading,
    Ready,
    Role,
    RouterSettings,
)
from kvferry.serving.process import (
    SPARE_PREFIX,
    TERM_GRACE_S,
    Child,
    ChildProcess,
    News,
    output_folder,
    temporary_folder,
)
from kvferry.transports.shm_segment import sweep_dead_segments
from kvferry.zeromq import join_address

if TYPE_CHECKING:
    from kvferry.cluster.ray_nodes import RayNodes

logger = logging.getLogger(__name__)

Progress: TypeAlias = Callable[[str, str, float], None]
"""Called with the name of a part, its current activity, and the fraction (0 to 1) done."""

START_TIMEOUT_S = 600.0
"""Seconds within which all engines must become ready."""
FIRST_BACK_OFF_S, LONGEST_BACK_OFF_S = 1.0, 60.0
"""Shortest and longest pause in seconds before an engine restarts; each failure doubles the
pause."""
STEADY_S = 60.0
"""Seconds of service after which the pause before a restart is again the shortest."""


@dataclass(slots=True, eq=False)
class RunningEngine:
    """An engine of a running cluster, with its process."""

    config: EngineConfig
    role: Role
    process: Child
    port: int = 0
    """TCP port of the engine's HTTP server; 0 until the engine reports its port."""
    control: str | None = None
    """``host:port`` of the engine's control channel, for ``kvferry status``."""
    is_ready: bool = False
    back_off_s: float = FIRST_BACK_OFF_S
    """Seconds between the engine's next failure and its restart."""
    starts_at: float | None = None
    """Time of the planned restart, in seconds of the monotonic clock; ``None`` if none is
    planned."""
    ready_at: float = 0.0
    """Time at which the engine became ready, in seconds of the monotonic clock."""
    known_url: str = ""
    """URL under which the router knows the engine."""
    not_entered: str = ""
    """Error of the last attempt to give the router the engine's URL; empty after a success."""

    @property
    def name(self) -> str:
        """Name of the engine in the cluster file."""
        return self.config.name

    @property
    def is_restarted(self) -> bool:
        """Whether the engine restarts after its end; not after an exit with code 0."""
        return self.config.restart == "on-failure" and self.process.exit_code != 0

    @property
    def url(self) -> str:
        """URL of the engine's HTTP server."""
        return f"http://{join_address(self.process.host or self.config.host, self.port)}"


class Cluster(Closing):
    """A running cluster. Close it, or use it as a context manager."""

    def __init__(
        self,
        config: ClusterConfig,
        logs: Path,
        progress: Progress,
        *,
        is_whole: bool,
        api_key: str | None,
        operator_key: str | None,
        nodes: "RayNodes | None" = None,
    ) -> None:
        """Use :meth:`open`."""
        self.config = config
        self.progress = progress
        """Called with the progress of every part; after the start, also when an engine is ready
        again."""
        self._is_whole = is_whole
        self._cluster_key = secrets.token_hex(32) if is_whole else None
        self.logs = logs
        """Folder with one log file per process."""
        self.engines: tuple[RunningEngine, ...] = ()
        self.model_folder = ""
        self._nodes = nodes
        self._router: Child | None = None
        self._router_port = 0
        self.api_key = api_key
        """Bearer token that clients must send to the router and the engines; ``None`` for no
        check."""
        self._operator_key = operator_key or secrets.token_hex(32)
        self._news: queue.Queue[News] = queue.Queue()
        self._processes: list[Child] = []
        self._closing = threading.Lock()

    @classmethod
    def open(
        cls,
        config: ClusterConfig,
        *,
        only: str | None = None,
        ray: str | None = None,
        api_key: str | None = None,
        operator_key: str | None = None,
        where: str = "",
        logs: str | Path | None = None,
        progress: Progress = lambda _part, _doing, _done: None,
        timeout_s: float = START_TIMEOUT_S,
    ) -> "Cluster":
        """Converts the model, starts the engines and the router, and returns when all serve.

        Args:
            config: the cluster.
            only: name of a single engine to start, without a router. This engine signs tickets
                with the cluster key that its table names, if any.
            ray: address of the Ray cluster whose nodes run the engines; by default, the engines
                run on this machine.
            api_key: bearer token that clients must send to the router and the engines.
            operator_key: bearer token that permits changes to the router's list of engines; by
                default, a random token.
            where: name of the cluster file, for error messages.
            logs: folder for the logs; by default, a new temporary folder.
            progress: called from the caller's thread with the progress of every part.
            timeout_s: seconds within which the engines must become ready.

        Raises:
            KVFerryError: the error that a part reported, with the name of the part (a port in use,
                a model that cannot be used, ...), or a :class:`WorkerDiedError` with the exit code
                and the last log lines. All processes that were started have ended by then.
        """
        is_whole = only is None
        if only is not None:
            config = config.only(only)
        check_cluster(config, where, api_key=api_key, router=is_whole, is_here=ray is None)
        nodes = None
        if ray is not None:
            from kvferry.cluster.ray_nodes import RayNodes

            nodes = RayNodes.open(ray, config)
        temporary = temporary_folder()  # engines need a temporary folder too
        if logs:
            folder = output_folder(Path(logs), "--logs")
        else:
            folder = Path(tempfile.mkdtemp(prefix="kvferry-", dir=temporary))
        cluster = cls(
            config,
            folder,
            progress,
            is_whole=is_whole,
            api_key=api_key,
            operator_key=operator_key,
            nodes=nodes,
        )
        try:
            cluster._start(time.monotonic() + timeout_s, where)
        except BaseException as error:
            nothing_started = not cluster._processes
            cluster.close()
            if logs is None and (nothing_started or _says_it_all(error)):
                cluster.remove_logs()
            else:
                error.add_note(f"logs: {folder}")
            raise
        return cluster

    @property
    def url(self) -> str:
        """URL of the router; OpenAI's API is below ``/v1``."""
        host = self.config.router.host
        here = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - wildcard addresses
        return f"http://{join_address(here.get(host, host), self._router_port)}"

    @property
    def deaths(self) -> list[KVFerryError]:
        """Errors of the parts that have ended; empty while all parts run."""
        return [process.error() for process in self._processes if not process.is_running]

    @property
    def can_serve(self) -> bool:
        """Whether the router runs, and enough engines run or will be restarted. Decode engines
        alone are enough if ``decode_only`` is ``fallback``.
        """
        alive = {
            engine.role
            for engine in self.engines
            if engine.process.is_running or engine.is_restarted
        }
        if not self._is_whole:
            return bool(alive)
        if self.config.router.decode_only == "fallback":
            alive.add("prefill")
        return self._router is not None and self._router.is_running and len(alive) == 2

    def wait(self, timeout_s: float | None = None) -> KVFerryError | None:
        """Waits until a part of the cluster ends by itself, and restarts engines meanwhile.

        A restarted engine is also entered at the router again.

        Returns:
            The error of the part that ended, each error once; ``None`` after ``timeout_s``.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            self._start_again()
            # In short waits: an endless wait for a queue would block Ctrl-C.
            left = 0.5 if deadline is None else min(0.5, deadline - time.monotonic())
            try:
                news = self._news.get(timeout=max(0.0, left))
            except queue.Empty:
                if deadline is not None and time.monotonic() >= deadline:
                    return None
                continue
            if news.child not in self._processes:
                continue
            if news.event is None:
                self._has_ended(news.child)
                return news.child.error()
            self._note(news)

    def change_router(self, router: RouterConfig, timeout_s: float = START_TIMEOUT_S) -> None:
        """Replaces the router by a new router with other settings; the engines keep running.

        Args:
            router: the new settings; :attr:`url` may change with them.
            timeout_s: seconds within which the new router must reach the engines.

        Raises:
            KVFerryError: the new router ended or does not reach the engines. The old router has
                ended by then.
        """
        deadline = time.monotonic() + timeout_s
        assert self._router is not None  # only a whole cluster has a router
        old, self._router = self._router, None
        self._processes.remove(old)
        old.terminate()
        old.reap(TERM_GRACE_S + self.config.router.drain_timeout_s)
        self.config = msgspec.structs.replace(self.config, router=router)
        self._router_port = 0
        self._start_router(deadline)
        self._await_router(deadline)

    def close(self) -> None:
        """Ends all processes, the router first, and kills any that is late. Idempotent."""
        with self._closing:
            processes, self._processes = self._processes, []
            router = [process for process in processes if process is self._router]
            engines = [process for process in processes if process is not self._router]
            for group, drain_s in ((router, self.config.router.drain_timeout_s), (engines, 0.0)):
                deadline = time.monotonic() + drain_s + TERM_GRACE_S
                for process in group:
                    process.terminate()
                for process in group:
                    process.reap(deadline - time.monotonic())
            if self._nodes is not None:
                self._nodes.close()
        # A killed rank could not remove its shared memory.
        sweep_dead_segments()
        spare = Path(self.model_folder).parent.parent
        if spare.name.startswith(SPARE_PREFIX):
            shutil.rmtree(spare, ignore_errors=True)

    def remove_logs(self) -> None:
        """Deletes the folder with the logs."""
        shutil.rmtree(self.logs, ignore_errors=True)

    # ---- start --------------------------------------------------------------------------------

    def _start(self, deadline: float, where: str) -> None:
        folder = self._convert(self.config.model, deadline)
        check_shapes(self.config, load_model_config(folder), where)
        # All engines start at the same time; none waits for another, so the order is irrelevant.
        self.engines = tuple(
            RunningEngine(engine, role, self._start_engine(engine, role))
            for engine, role in _roles(self.config)
        )
        while not all(engine.port for engine in self.engines):
            self._take(deadline)
        if self._is_whole:  # the router loads its tokenizer meanwhile
            self._start_router(deadline)
        while not all(engine.is_ready for engine in self.engines):
            self._take(deadline)
        if self._is_whole:
            self._await_router(deadline)

    def _convert(self, model: ModelConfig, deadline: float) -> str:
        process = self._spawn("model", "convert", model)
        while not self.model_folder:
            self._take(deadline)
        process.reap(TERM_GRACE_S)
        self._processes.remove(process)
        return self.model_folder

    def _start_engine(self, engine: EngineConfig, role: Role) -> Child:
        if self._cluster_key is not None:
            engine = with_cluster_key(engine, self._cluster_key)
        settings = EngineSettings(
            engine=engine,
            role=role,
            model_folder=self.model_folder,
            model_name=self.config.model.source,
            dtype=self.config.model.dtype,
            api_key=self.api_key,
        )
        if self._nodes is None:
            return self._spawn(engine.name, "engine", settings, engine.threads)
        log = self.logs / f"{engine.name}.log"
        process = self._nodes.start(settings, self.config.model, log, self._news)
        self._processes.append(process)
        return process

    def _start_router(self, deadline: float) -> None:
        settings = RouterSettings(
            **msgspec.structs.asdict(self.config.router),
            engines=tuple(
                EngineAddress(name=engine.name, role=engine.role, url=engine.url)
                for engine in self.engines
            ),
            model_folder=self.model_folder,
            model_name=self.config.model.source,
            api_key=self.api_key,
            operator_key=self._operator_key,
            curve=control_keys(self.config),
            cluster_key=cluster_key(self.config, self._cluster_key),
        )
        for engine in self.engines:
            engine.known_url = engine.url
        self._router = self._spawn("router", "router", settings)
        while not self._router_port:
            self._take(deadline)

    def _await_router(self, deadline: float) -> None:
        import httpx

        with httpx.Client(trust_env=False, timeout=2.0) as client:
            while True:
                with contextlib.suppress(httpx.HTTPError):
                    if client.get(f"{self.url}/health").json()["status"] == "ok":
                        return
                with contextlib.suppress(queue.Empty):
                    self._note(self._news.get(timeout=0.05))
                if time.monotonic() > deadline:
                    raise EngineError("the router does not reach its engines in time")

    def _spawn(self, name: str, what: str, settings: msgspec.Struct, threads: int = 1) -> Child:
        process = ChildProcess.start(
            name, what, settings, self.logs / f"{name}.log", self._news, threads
        )
        self._processes.append(process)
        return process

    def _take(self, deadline: float) -> None:
        """Handles one event of the starting processes.

        Raises:
            EngineError: no event came before ``deadline``.
            KVFerryError: a process ended.
        """
        while True:
            try:
                self._note(self._news.get(timeout=0.5))
                return
            except queue.Empty:
                if time.monotonic() > deadline:
                    parts = [engine.name for engine in self.engines if not engine.is_ready]
                    raise EngineError(
                        "the cluster did not start in time; not ready: "
                        f"{', '.join(parts) or 'the model'} (logs: {self.logs})"
                    ) from None

    def _note(self, news: News) -> None:
        """Handles one event of a process.

        Raises:
            KVFerryError: the process ended.
        """
        engine = next((one for one in self.engines if one.process is news.child), None)
        match news.event:
            case None:
                if news.child in self._processes:
                    raise news.child.error()
            case Loading(doing=doing, done=done):
                self.progress(news.child.name, doing, done)
            case Ready(folder=str(folder)):
                self.model_folder = folder
            case Bound(port=port) if engine is not None:
                engine.port = port
            case Bound(port=port):
                self._router_port = port
            case Ready(control=control) if engine is not None:
                engine.control = control
                engine.is_ready = True
                engine.ready_at = time.monotonic()
                self.progress(engine.name, "ready", 1.0)

    # ---- start again --------------------------------------------------------------------------

    def _has_ended(self, child: Child) -> None:
        """Plans the restart of an engine that failed; the pause doubles with each failure."""
        engine = next((one for one in self.engines if one.process is child), None)
        if engine is None or not engine.is_restarted:
            return
        now = time.monotonic()
        if engine.is_ready and now - engine.ready_at > STEADY_S:
            engine.back_off_s = FIRST_BACK_OFF_S
        engine.starts_at = now + engine.back_off_s
        engine.back_off_s = min(2 * engine.back_off_s, LONGEST_BACK_OFF_S)
        engine.is_ready = False

    def _start_again(self) -> None:
        for engine in self.engines:
            if engine.starts_at is not None and time.monotonic() >= engine.starts_at:
                engine.starts_at = None
                self._processes.remove(engine.process)
                engine.process = self._start_engine(engine.config, engine.role)
            elif self._is_whole and engine.is_ready and engine.known_url != engine.url:
                self._enter(engine)

    def _enter(self, engine: RunningEngine) -> None:
        """Tells the router the current URL of an engine."""
        client = RouterClient(self.url, self._operator_key)
        try:
            client.put(engine.role, engine.name, engine.url)
        except KVFerryError as error:
            if str(error) != engine.not_entered:  # log each error once; the caller retries
                engine.not_entered = str(error)
                logger.warning("engine %r is not entered yet: %s", engine.name, error)
        else:
            engine.known_url, engine.not_entered = engine.url, ""


def _says_it_all(error: BaseException) -> bool:
    """Whether an error explains a failed start without the logs; interrupts by the user count."""
    return isinstance(
        error, ConfigError | PortInUseError | ModelError | KeyboardInterrupt | SystemExit
    )


def _roles(config: ClusterConfig) -> Iterator[tuple[EngineConfig, Role]]:
    for engine in config.prefill:
        yield engine, "prefill"
    for engine in config.decode:
        yield engine, "decode"
