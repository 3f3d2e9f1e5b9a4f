"""``kvferry top``."""

import contextlib
import datetime as dt
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Annotated

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvferry.cli.console import add_plain_row, make_console, print_json, seconds_text
from kvferry.cli.options import ROUTER_URL, ApiKey
from kvferry.config import printable
from kvferry.errors import PeerLostError
from kvferry.explain.sentences import bytes_text
from kvferry.router.router_client import RouterClient
from kvferry.router.snapshot import EngineView, PairView, Snapshot

UNTOLD = "–"
"""Text in place of an unknown value."""
MOST_SNAPSHOTS = 5
"""Number of snapshots to wait for, at most, before a single snapshot is shown."""
AGAIN_S = 2.0
"""Seconds before a router that has gone is asked again."""
_STYLES = {"ready": "green", "slow": "yellow", "down": "red"}


def top(
    router: Annotated[
        str, typer.Argument(metavar="ROUTER", envvar="KVFERRY_ROUTER", help="The router's URL.")
    ] = ROUTER_URL,
    once: Annotated[
        bool, typer.Option("--once", help="Print the cluster once, for scripts.")
    ] = False,
    api_key: ApiKey = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the cluster once, as JSON.")
    ] = False,
) -> None:
    """Shows the cluster behind a router, until Ctrl-C or once.

    Raises:
        KVFerryError: the router refuses, or cannot be reached at the start.
    """
    client = RouterClient(router, api_key)
    if once or as_json:
        snapshot = _settled(client.watch())
        if as_json:
            print_json(snapshot)
        else:
            make_console().print(picture(snapshot))
        return
    console = Console(highlight=False, emoji=False)
    snapshots = client.watch()
    first = next(snapshots)
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(_screen(first, console), console=console, screen=True, auto_refresh=False) as live,
    ):
        while True:
            try:
                for snapshot in snapshots:
                    live.update(_screen(snapshot, console), refresh=True)
            except PeerLostError as error:
                live.update(Text(str(error), style="red"), refresh=True)
                time.sleep(AGAIN_S)
                snapshots = client.watch()


def _settled(snapshots: Iterator[Snapshot]) -> Snapshot:
    """The first snapshot with all rates, which early snapshots lack; or else the last of a few."""
    snapshot = next(snapshots)
    for snapshot in islice(snapshots, MOST_SNAPSHOTS - 1):
        if all(pair.bytes_per_s is not None for pair in snapshot.pairs):
            break
    return snapshot


def _screen(snapshot: Snapshot, console: Console) -> RenderableType:
    """The lines that fit into the terminal; lines at the end may be left out."""
    lines = console.render_lines(picture(snapshot), pad=False)
    shown = lines[: max(1, console.height - 1)]
    return Group(*(Text.assemble(*((one.text, one.style or "") for one in line)) for line in shown))


def picture(snapshot: Snapshot) -> RenderableType:
    """Drawing of a snapshot for people."""
    moment = dt.datetime.fromtimestamp(snapshot.time, dt.UTC).astimezone()
    parts: list[RenderableType] = [Text(f"{moment:%H:%M:%S}", style="dim"), _engines(snapshot)]
    if (queue := snapshot.queue) is not None:
        longest = f", the oldest for {seconds_text(queue.longest_s)}" if queue.waiting else ""
        words = f"queue: {queue.waiting} requests wait{longest}; {queue.turned_away} turned away"
        parts.append(Text(words))
    notes = [note for engine in snapshot.engines for note in _notes(engine)]
    parts += [Text(note, style="dim") for note in notes]
    for name, table in (
        ("pairs", _pairs(snapshot)),
        ("leases", _leases(snapshot)),
        ("loads", _loads(snapshot)),
        ("failures", _failures(snapshot)),
        ("requests", _requests(snapshot)),
    ):
        parts.append(table if table.row_count else Text(f"no {name}", style="dim"))
        if left_out := snapshot.left_out.get(name):
            parts.append(Text(f"and {left_out} more {name}", style="dim"))
    return Group(*parts)


def _engines(snapshot: Snapshot) -> Table:
    table = _table(
        "engine", "kind", "role", "state", title="Engines", numbers=("requests", "running")
    )
    for name in ("waiting", "loading", "lent", "free blocks"):
        table.add_column(name, justify="right")
    for engine in snapshot.engines:
        blocks = (
            UNTOLD if engine.free_blocks is None else f"{engine.free_blocks} of {engine.blocks}"
        )
        counts = (engine.running, engine.waiting, engine.loading, engine.lent)
        table.add_row(
            Text(_name(engine)),
            Text(printable(engine.kind) or UNTOLD),
            engine.role,
            Text(engine.state, style=_STYLES.get(engine.state, "")),
            str(engine.outstanding),
            *(UNTOLD if count is None else str(count) for count in counts),
            blocks,
        )
    return table


def _name(engine: EngineView) -> str:
    """The router's name of an engine, with the engine id if the id differs."""
    is_other = engine.engine_id and engine.engine_id != engine.name
    return printable(f"{engine.name} ({engine.engine_id})" if is_other else engine.name)


def _notes(engine: EngineView) -> list[str]:
    """Further notes about an engine."""
    notes = [engine.problem, f"draining: {engine.drain}" if engine.drain else "", *engine.untold]
    return [printable(f"{engine.name}: {note}") for note in notes if note]


def _pairs(snapshot: Snapshot) -> Table:
    table = _table("from", "to", "transport", title="Pairs", numbers=("per second", "loaded"))
    for pair in snapshot.pairs:
        add_plain_row(
            table,
            pair.source or UNTOLD,
            pair.target,
            pair.transport or UNTOLD,
            _rate(pair),
            bytes_text(pair.loaded_bytes),
        )
    return table


def _rate(pair: PairView) -> str:
    return UNTOLD if pair.bytes_per_s is None else f"{bytes_text(pair.bytes_per_s)}/s"


def _leases(snapshot: Snapshot) -> Table:
    table = _table("engine", "request", "held by", title="Leases", numbers=("blocks", "age"))
    for name in ("ends in", "ranks done"):
        table.add_column(name, justify="right")
    for lease in snapshot.leases:
        add_plain_row(
            table,
            lease.engine,
            lease.request_id,
            lease.target or "nobody yet",
            str(lease.num_blocks),
            seconds_text(lease.age_s),
            seconds_text(lease.remaining_s),
            str(lease.ranks_done),
        )
    return table


def _loads(snapshot: Snapshot) -> Table:
    table = _table("engine", "request", "from", title="Loads", numbers=("done", "of", "age"))
    table.add_column("last progress", justify="right")
    for load in snapshot.loads:
        add_plain_row(
            table,
            load.engine,
            load.request_id,
            load.source,
            bytes_text(load.bytes_done),
            bytes_text(load.bytes_total),
            seconds_text(load.age_s),
            f"{seconds_text(load.progress_s)} ago",
        )
    return table


def _failures(snapshot: Snapshot) -> Table:
    table = _table("time", "engine", "what failed", title="Last failures")
    for failure in snapshot.failures:
        add_plain_row(table, _clock(failure.time), failure.engine or "router", failure.message)
    return table


def _requests(snapshot: Snapshot) -> Table:
    numbers = ("waited", "took") if snapshot.queue is not None else ("took",)
    table = _table("time", "request", "engines", title="Last requests", numbers=numbers)
    table.add_column("how")
    for request in snapshot.requests:
        add_plain_row(
            table,
            _clock(request.started),
            request.request_id,
            " → ".join(request.engines),
            *([seconds_text(request.waited_s)] if snapshot.queue is not None else []),
            seconds_text(request.seconds),
            "goes on" if request.is_open else request.error or "over",
        )
    return table


def _clock(moment: float) -> str:
    return f"{dt.datetime.fromtimestamp(moment, dt.UTC).astimezone():%H:%M:%S}"


def _table(*names: str, title: str, numbers: Sequence[str] = ()) -> Table:
    table = Table(*names, title=title, title_justify="left")
    for name in numbers:
        table.add_column(name, justify="right")
    return table
