"""``kvferry serve``."""

import signal
import sys

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import PartProgress, make_console
from kvferry.cli.options import ApiKey, ClusterFile, Logs, OperatorKey, RayAddress
from kvferry.cluster.launcher import Cluster
from kvferry.config import load_cluster


def serve(
    file: ClusterFile,
    logs: Logs = None,
    api_key: ApiKey = None,
    operator_key: OperatorKey = None,
    ray: RayAddress = None,
) -> None:
    """Runs the cluster until Ctrl-C or SIGTERM, or until the cluster can serve no more.

    Raises:
        KVFerryError: the cluster cannot be started.
        KeyboardInterrupt: Ctrl-C or SIGTERM came before the cluster served.
        SystemExit: 1 if the cluster can serve no more; the logs are kept.
    """
    console = make_console()
    config = load_cluster(file)
    end_by_interrupt()
    with PartProgress(console) as progress:
        cluster = Cluster.open(
            config,
            where=str(file),
            logs=logs,
            progress=progress,
            api_key=api_key,
            operator_key=operator_key,
            ray=ray,
        )
    with cluster:
        try:
            show(cluster, console)
            console.print(f"OpenAI API at [bold]{cluster.url}/v1[/] (Ctrl-C stops it)")
            console.print(f"the cluster at {cluster.url}/kvferry", style="dim")
            healthy = _watch(cluster, console)
        except KeyboardInterrupt:
            console.print("stopping", style="dim")
            healthy = True
    if not healthy:
        sys.exit(1)
    if logs is None:
        cluster.remove_logs()


def end_by_interrupt() -> None:
    """Makes a supervisor's SIGTERM act like Ctrl-C: everything is closed in order."""
    for number in (signal.SIGTERM, signal.SIGINT):
        # SIGINT too, because a shell starts background commands with SIGINT ignored.
        signal.signal(number, signal.default_int_handler)


def tell(cluster: Cluster, console: Console, timeout_s: float | None = None) -> None:
    """Waits until a part dies or the time is up; reports the death, and parts that serve again."""

    def progress(part: str, _doing: str, done: float) -> None:
        if done == 1.0:
            console.print(f"[green]serves again:[/] {escape(part)}")

    cluster.progress = progress
    if error := cluster.wait(timeout_s):
        console.print(f"[bold red]died:[/] {escape(str(error))}")


def _watch(cluster: Cluster, console: Console) -> bool:
    """Reports deaths; returns ``False`` when the cluster can serve no more."""
    while cluster.can_serve:
        tell(cluster, console)
    console.print("[bold red]the cluster cannot serve any more[/]")
    return False


def show(cluster: Cluster, console: Console) -> None:
    """Prints the engines and their addresses."""
    table = Table(
        "engine", "role", "shape", "block", "layout", "HTTP", "control channel", "runs as"
    )
    for column in table.columns:
        column.overflow = "fold"  # a cut address is useless
    for engine in cluster.engines:
        config = engine.config
        table.add_row(
            engine.name,
            engine.role,
            f"tp {config.tp}, pp {config.pp}",
            str(config.block_size),
            config.layout,
            engine.url,
            engine.control or "",
            engine.process.where,
        )
    console.print(table)
    console.print(f"logs: {cluster.logs}", style="dim")
