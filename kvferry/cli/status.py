"""``kvferry status``."""

import datetime as dt
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from kvferry.cli.console import add_plain_row, make_console, plain, print_json, seconds_text
from kvferry.cli.options import AsJson, Keys, Timeout, load_keys, parse_address
from kvferry.control.client import fetch_status
from kvferry.control.messages import StatusReport
from kvferry.errors import PeerLostError, ProtocolError
from kvferry.explain.sentences import bytes_text


def status(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="An engine's control channel (kv_port).", show_default=False
        ),
    ],
    keys: Keys = None,
    timeout_s: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Prints the report of the engine at ``address``.

    Raises:
        ConfigError: the address or the keys cannot be used.
        PeerLostError, ProtocolError: see :func:`~kvferry.control.client.fetch_status`.
    """
    host, port = parse_address(address)
    try:
        report = fetch_status(host, port, timeout_s, load_keys(keys))
    except (PeerLostError, ProtocolError) as error:
        raise type(error)(f"{error}; is {port} the engine's kv_port?") from error
    if as_json:
        print_json(report)
    else:
        show(report, make_console())


def show(report: StatusReport, console: Console) -> None:
    """Prints a report for people."""
    ready = "ready" if report.ready else "starting"
    is_other = report.serving_engine not in ("", "kvferry")
    inside = f" in {plain(report.serving_engine)}" if is_other else ""
    console.print(
        f"[bold]{plain(report.engine_id)}[/] ({plain(report.role)}), {ready}, "
        f"up {seconds_text(report.uptime_s)}, incarnation {plain(report.incarnation[:8])}, "
        f"kvferry {plain(report.release) or 'of a release that it does not tell'}"
        f"{inside}",
        highlight=False,
    )
    for table, empty in (
        (_peers(report), "no peers"),
        (_leases(report), "no leases"),
        (_transfers(report), "no transfers"),
        (_errors(report), "no errors"),
    ):
        if table.row_count:
            console.print(table)
        else:
            console.print(f"[dim]{empty}[/]")
    if report.counters:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(report.counters.items()))
        console.print(f"[dim]counters:[/] {plain(counts)}", highlight=False)


def _peers(report: StatusReport) -> Table:
    table = Table("peer", "state", "ranks", "known", "last message", "last error", title="Peers")
    for peer in report.peers:
        add_plain_row(
            table,
            peer.engine_id,
            peer.state,
            str(peer.ranks),
            seconds_text(peer.age_s),
            f"{seconds_text(peer.last_seen_s)} ago",
            peer.last_error,
        )
    return table


def _leases(report: StatusReport) -> Table:
    table = Table("lease", "request", "blocks", "age", "expires in", "target", "ranks done")
    table.title = "Leases on this engine's blocks"
    for lease in report.leases:
        add_plain_row(
            table,
            lease.lease_id[:12],
            lease.request_id,
            str(lease.num_blocks),
            seconds_text(lease.age_s),
            seconds_text(lease.remaining_s),
            lease.target or "nobody yet",
            ", ".join(map(str, lease.ranks_done)) or "none",
        )
    return table


def _transfers(report: StatusReport) -> Table:
    table = Table("request", "from", "done", "of", "", "age", "last progress")
    table.title = "Transfers into this engine"
    for transfer in report.transfers:
        share = transfer.bytes_done / transfer.bytes_total if transfer.bytes_total else 0.0
        add_plain_row(
            table,
            transfer.request_id,
            transfer.peer,
            bytes_text(transfer.bytes_done),
            bytes_text(transfer.bytes_total),
            f"{share:.0%}",
            seconds_text(transfer.age_s),
            f"{seconds_text(transfer.progress_s)} ago",
        )
    return table


def _errors(report: StatusReport) -> Table:
    table = Table("time", "error", title="Last errors")
    for error in report.errors:
        moment = dt.datetime.fromtimestamp(error.time, dt.UTC).astimezone()
        add_plain_row(table, moment.strftime("%H:%M:%S"), error.message)
    return table
