"""``kvferry engine``."""

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated

import httpx
import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from kvferry.cli.console import PartProgress, make_console
from kvferry.cli.options import ApiKey, ClusterFile, Logs, OperatorKey
from kvferry.cli.serve import end_by_interrupt, show, tell
from kvferry.cluster.launcher import Cluster, RunningEngine
from kvferry.config import load_cluster
from kvferry.engine.admission import DrainState
from kvferry.errors import KVFerryError
from kvferry.router.router_client import RouterClient
from kvferry.serving import web

ENTER_INTERVAL_S = 5.0
"""Seconds between two entries of an engine at the routers, because a router may have restarted."""
POLL_S = 0.5
"""Seconds between two checks of a draining engine."""


class Routers:
    """The routers at which an engine enters itself."""

    def __init__(self, urls: Sequence[str], operator_key: str | None, console: Console) -> None:
        self._clients = {url: RouterClient(url, operator_key) for url in urls}
        self._console = console
        self._told: dict[str, str] = {}

    def enter(self, engine: RunningEngine) -> None:
        """Tells all routers the address of the engine."""

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
        """Asks all routers to send the engine nothing new."""

        def drain(_url: str, client: RouterClient) -> None:
            with contextlib.suppress(KVFerryError):  # the router is down or does not know us
                client.drain(engine.role, engine.name)

        self._at_once(drain)

    def leave(self, engine: RunningEngine) -> None:
        """Asks all routers to forget the engine."""

        def leave(_url: str, client: RouterClient) -> None:
            with contextlib.suppress(KVFerryError):
                client.delete(engine.role, engine.name)

        self._at_once(leave)

    def _at_once(self, tell: Callable[[str, RouterClient], None]) -> None:
        """Calls all routers at the same time, as a router that is down takes long to fail."""
        if self._clients:
            with ThreadPoolExecutor(len(self._clients)) as threads:
                list(threads.map(tell, self._clients, self._clients.values()))


def engine(
    file: ClusterFile,
    name: Annotated[str, typer.Argument(help="The engine's name in the file.", show_default=False)],
    routers: Annotated[
        list[str] | None,
        typer.Option(
            "--router",
            metavar="URL",
            help="URL of a router that gets the engine. May be repeated.",
            show_default=False,
        ),
    ] = None,
    logs: Logs = None,
    drain_timeout_s: Annotated[
        float,
        typer.Option(
            "--drain-timeout",
            min=0.0,
            help="Seconds to drain after Ctrl-C or SIGTERM.",
        ),
    ] = 60.0,
    api_key: ApiKey = None,
    operator_key: OperatorKey = None,
) -> None:
    """Runs one engine of a cluster file until Ctrl-C or SIGTERM, then drains the engine.

    Raises:
        KVFerryError: the engine cannot be started.
        SystemExit: 1 if the engine has failed and will not be restarted; the logs are kept.
    """
    console = make_console()
    config = load_cluster(file)
    end_by_interrupt()
    with PartProgress(console) as progress:
        cluster = Cluster.open(
            config, only=name, where=str(file), logs=logs, progress=progress, api_key=api_key
        )
    entered = Routers(routers or [], operator_key, console)
    with cluster:
        show(cluster, console)
        (running,) = cluster.engines
        has_failed = False
        try:
            while cluster.can_serve:
                if running.is_ready:
                    entered.enter(running)
                tell(cluster, console, ENTER_INTERVAL_S)
            has_failed = running.process.exit_code != 0
        except KeyboardInterrupt:
            with contextlib.suppress(KeyboardInterrupt):  # a second Ctrl-C: stop at once
                _drain(running, entered, api_key, console, drain_timeout_s)
        entered.leave(running)
    if has_failed:
        sys.exit(1)
    if logs is None:
        cluster.remove_logs()


def _drain(
    running: RunningEngine,
    routers: Routers,
    api_key: str | None,
    console: Console,
    timeout_s: float,
) -> None:
    """Waits until the engine has drained, or the time is up."""
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
