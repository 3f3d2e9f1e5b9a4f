"""``kvferry engine``."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import msgspec
from rich.console import Console
from rich.markup import escape

from kvferry.cli.console import PartProgress, make_console
from kvferry.cli.serve import end_by_interrupt, show, tell
from kvferry.cluster import web
from kvferry.cluster.launcher import Cluster, RunningEngine
from kvferry.cluster.router_client import RouterClient
from kvferry.config import load_cluster
from kvferry.engine.loop import DrainState
from kvferry.errors import KVFerryError

ENTER_INTERVAL_S = 5.0
"""Seconds between two times that an engine enters itself: a router may be a new one."""
POLL_S = 0.5
"""Seconds between two looks at what an engine that drains still has."""


class _Routers:
    """The routers that an engine enters itself at."""

    def __init__(self, urls: Sequence[str], operator_key: str | None, console: Console) -> None:
        self._clients = {url: RouterClient(url, operator_key) for url in urls}
        self._console = console
        self._told: dict[str, str] = {}

    def enter(self, engine: RunningEngine) -> None:
        """Tells all of them where the engine is."""

        def enter(url: str, client: RouterClient) -> None:
            try:
                client.put(engine.role, engine.name, engine.url)
                said = f"entered at {url}"
            except KVFerryError as error:
                said = f"not entered: {error}"
            if self._told.get(url) != said:
                self._told[url] = said
                self._console.print(escape(said), style="dim")

        self._at_once(enter)

    def drain(self, engine: RunningEngine) -> None:
        """Has all of them give the engine nothing new."""

        def drain(_url: str, client: RouterClient) -> None:
            with contextlib.suppress(KVFerryError):  # it is not there, or does not know us
                client.drain(engine.role, engine.name)

        self._at_once(drain)

    def leave(self, engine: RunningEngine) -> None:
        """Has all of them forget the engine."""

        def leave(_url: str, client: RouterClient) -> None:
            with contextlib.suppress(KVFerryError):
                client.delete(engine.role, engine.name)

        self._at_once(leave)

    def _at_once(self, tell: Callable[[str, RouterClient], None]) -> None:
        """Tells them all at the same time: one that cannot be reached takes its time."""
        if self._clients:
            with ThreadPoolExecutor(len(self._clients)) as threads:
                list(threads.map(tell, self._clients, self._clients.values()))


def engine(
    file: Path,
    name: str,
    router_urls: Sequence[str],
    logs: Path | None,
    drain_timeout_s: float,
    api_key: str | None,
    operator_key: str | None,
) -> None:
    """Runs one engine of a cluster file until Ctrl-C or SIGTERM, on which it drains.

    Raises:
        KVFerryError: it cannot be started.
        SystemExit: 1, it has failed and is not to be started again; its logs are kept.
    """
    console = make_console()
    config = load_cluster(file)
    end_by_interrupt()
    with PartProgress(console) as progress:
        cluster = Cluster.open(
            config, only=name, where=str(file), logs=logs, progress=progress, api_key=api_key
        )
    routers = _Routers(router_urls, operator_key, console)
    with cluster:
        show(cluster, console)
        (running,) = cluster.engines
        has_failed = False
        try:
            while cluster.can_serve:
                if running.is_ready:
                    routers.enter(running)
                tell(cluster, console, ENTER_INTERVAL_S)
            has_failed = running.process.exit_code != 0
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):  # a second one: at once
                _drain(running, routers, api_key, console, drain_timeout_s)
        routers.leave(running)
    if has_failed:
        sys.exit(1)
    if logs is None:
        cluster.remove_logs()


def _drain(
    running: RunningEngine,
    routers: _Routers,
    api_key: str | None,
    console: Console,
    timeout_s: float,
) -> None:
    """Waits until nobody needs the engine any more, or time is up."""
    console.print(f"draining, {timeout_s:g} s at most (once more to stop at once)", style="dim")
    routers.drain(running)
    deadline = time.monotonic() + timeout_s
    told = ""
    with httpx.Client(trust_env=False, timeout=timeout_s, headers=web.bearer(api_key)) as client:
        while time.monotonic() < deadline:
            try:
                answer = client.post(f"{running.url}/kvferry/drain")
                left = msgspec.json.decode(answer.raise_for_status().content, type=DrainState)
            except httpx.HTTPError as error:
                console.print(f"cannot drain: {escape(str(error))}", style="yellow")
                return
            if left.is_over:
                console.print("drained", style="dim")
                return
            if str(left) != told:
                told = str(left)
                console.print(f"draining: {told}", style="dim")
            time.sleep(POLL_S)
    console.print(f"not drained in time: {told}", style="yellow")
