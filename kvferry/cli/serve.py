"""``kvferry serve``."""

import signal
import sys
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import PartProgress, make_console
from kvferry.cluster.launcher import Cluster
from kvferry.config import load_cluster


def serve(file: Path, logs: Path | None) -> None:
    """Runs the cluster until Ctrl-C or SIGTERM, or until it can serve no more.

    Raises:
        KVFerryError: it cannot be started.
    """
    console = make_console()
    config = load_cluster(file)
    # A supervisor's SIGTERM ends as Ctrl-C does: by closing everything in order.
    for number in (signal.SIGTERM, signal.SIGINT):
        # SIGINT too: a shell starts background commands with it ignored.
        signal.signal(number, signal.default_int_handler)
    try:
        with PartProgress(console) as progress:
            cluster = Cluster.open(config, where=str(file), logs=logs, progress=progress)
    except KeyboardInterrupt:
        console.print("stopping", style="dim")
        return
    with cluster:
        _show(cluster, console)
        try:
            healthy = _watch(cluster, console)
        except KeyboardInterrupt:
            console.print("stopping", style="dim")
            healthy = True
    if not healthy:
        sys.exit(1)
    if logs is None:
        cluster.remove_logs()


def _watch(cluster: Cluster, console: Console) -> bool:
    """Reports deaths; returns ``False`` once nothing can be served any more."""
    while cluster.can_serve:
        error = cluster.wait()
        console.print(f"[bold red]died:[/] {escape(str(error))}")
    console.print("[bold red]the cluster cannot serve any more[/]")
    return False


def _show(cluster: Cluster, console: Console) -> None:
    table = Table("engine", "role", "shape", "block", "layout", "HTTP", "control channel", "pid")
    for column in table.columns:
        column.overflow = "fold"  # a cut address is of no use
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
            str(engine.process.pid),
        )
    console.print(table)
    console.print(f"logs: {cluster.logs}", style="dim")
    console.print(f"OpenAI API at [bold]{cluster.url}/v1[/] (Ctrl-C stops it)")
