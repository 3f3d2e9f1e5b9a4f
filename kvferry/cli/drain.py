"""``kvferry drain``."""

import time
from typing import Annotated

import typer

from kvferry.cli.console import make_console
from kvferry.cli.options import Keys, load_keys, parse_address
from kvferry.control.client import fetch_status
from kvferry.control.messages import StatusReport
from kvferry.control.options import CurveKeys
from kvferry.errors import KVFerryError, PeerEndedError, PeerLostError

POLL_S = 0.5
"""Seconds between two questions to the engine."""
ANSWER_S = 10.0
"""Maximum number of seconds for an answer of the engine."""


def drain(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="An engine's control channel (kv_port).", show_default=False
        ),
    ],
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait until the engine may be stopped.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.0, help="Seconds to wait at most.")
    ] = 600.0,
    keys: Keys = None,
) -> None:
    """Tells whether the engine at ``address`` may be stopped. The engine gets no message to drain:
    first take the engine away from its routers.

    Raises:
        ConfigError: the address or the keys cannot be used.
        KVFerryError: the engine has ended, does not tell, or still has requests at the end of the
            time. Without ``wait``, also if it does not answer.
        typer.Exit: with 1; without ``wait``, the engine has requests.
    """
    host, port = parse_address(address)
    console, curve = make_console(), load_keys(keys)
    deadline = time.monotonic() + timeout_s
    told = ""
    while state := _state(host, port, curve, may_be_late=wait):
        if state != told:
            console.print(f"{address} {state}", highlight=False, markup=False)
            told = state
        if not wait:
            raise typer.Exit(1)
        if time.monotonic() > deadline:
            raise KVFerryError(f"{address} still {state} after {timeout_s:g} s; it goes on")
        time.sleep(POLL_S)
    console.print(f"{address} may be stopped: it loads and lends nothing", highlight=False)


def _state(host: str, port: int, curve: CurveKeys | None, *, may_be_late: bool) -> str:
    """Why the engine may not be stopped, as the end of a sentence; empty if it may be."""
    try:
        remaining = _remaining(fetch_status(host, port, ANSWER_S, curve))
    except PeerEndedError:
        raise
    except PeerLostError as error:
        if not may_be_late:
            raise
        return f"gives no answer ({error})"  # a busy engine, which may still have requests
    return f"has {remaining}" if remaining else ""


def _remaining(report: StatusReport) -> str:
    """What the engine still has, in words; empty if nothing.

    Raises:
        KVFerryError: the engine is of a release that does not tell.
    """
    if report.open_requests is None:
        raise KVFerryError(
            f"{report.engine_id}: does not tell its open requests: it still starts, or its kvferry "
            f"({report.release or 'unknown'}) is too old; `kvferry status` shows its leases"
        )
    counts = {
        "open request": report.open_requests,
        "lease": len(report.leases),
        "load": len(report.transfers),
    }
    return ", ".join(
        f"{count} {name}{'s' if count > 1 else ''}" for name, count in counts.items() if count
    )
