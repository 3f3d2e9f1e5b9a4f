"""``kvferry router list``, ``add``, ``remove`` and ``drain``."""

import time
from typing import Any

import msgspec
from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import make_console, print_json
from kvferry.cluster.messages import EngineAddress, KVEventsPlace
from kvferry.cluster.router_client import RouterClient
from kvferry.engine.loop import DrainState
from kvferry.errors import KVFerryError

POLL_S = 0.5
"""Seconds between two looks at an engine that drains."""


def list_engines(url: str, operator_key: str | None, as_json: bool) -> None:
    """Prints the engines of a router."""
    engines = RouterClient(url, operator_key).engines()
    if as_json:
        print_json(engines)
        return
    table = Table("role", "name", "state", "requests", "lent", "server", "last error")
    for engine in engines:
        table.add_row(
            engine["role"],
            escape(engine["name"]),
            engine["state"],
            str(engine["outstanding"]),
            str(engine["lent"]),
            escape(engine["url"]),
            escape(engine["last_error"] or _silence(engine)),
        )
    make_console().print(table)


def _silence(engine: dict[str, Any]) -> str:
    peers = engine["silent_peers"]
    return f"no answer from {', '.join(peers)}" if peers else ""


def add(
    role: str,
    url: str,
    name: str,
    control: str,
    kv_events: tuple[str, str],
    router: str,
    operator_key: str | None,
) -> None:
    """Enters an engine; ``kv_events`` are where it publishes its events, and replays them."""
    endpoint, replay = kv_events
    events = None
    try:
        name = EngineAddress.of("decode", url, name, control).name
        if endpoint or replay:
            events = KVEventsPlace(endpoint=endpoint, replay_endpoint=replay or None)
    except ValueError as error:
        raise KVFerryError(str(error)) from error
    client = RouterClient(router, operator_key)
    if client.put(role, name, url, control, events)["state"] in ("draining", "drained"):
        client.resume(role, name)
    make_console().print(f"{role} engine {escape(name)} is entered")


def remove(role: str, name: str, router: str, operator_key: str | None) -> None:
    """Forgets an engine."""
    engine = RouterClient(router, operator_key).delete(role, name)
    console = make_console()
    console.print(f"{role} engine {escape(name)} is forgotten")
    if engine["outstanding"] or engine["lent"]:
        console.print(f"it still works on {remaining(engine)}", style="yellow")


def drain(role: str, name: str, router: str, operator_key: str | None, timeout_s: float) -> None:
    """Has an engine drain, waits until it has, and has the router forget it.

    Raises:
        KVFerryError: it has not drained in time, and goes on; or somebody has entered it again.
    """
    client, console = RouterClient(router, operator_key), make_console()
    deadline = time.monotonic() + timeout_s
    engine = client.drain(role, name)
    told = ""
    while engine["state"] == "draining":
        if remaining(engine) != told:
            told = remaining(engine)
            console.print(f"draining: {told}", style="dim")
        if time.monotonic() > deadline:
            raise KVFerryError(
                f"{role} engine {name!r} has not drained within {timeout_s:g} s: {told}; it goes on"
            )
        time.sleep(POLL_S)
        found = [one for one in client.engines() if (one["role"], one["name"]) == (role, name)]
        if not found:
            break
        (engine,) = found
    else:
        if engine["state"] != "drained":
            raise KVFerryError(
                f"{role} engine {name!r} is {engine['state']}: somebody has entered it again while "
                "it drained; drain it once more"
            )
        client.delete(role, name)
    console.print(f"{role} engine {escape(name)} has drained; it can be stopped")


def remaining(engine: dict[str, Any]) -> str:
    """What an engine still has, in words."""
    parts = [f"{engine['outstanding']} requests of this router", f"{engine['lent']} loans of it"]
    if drain := engine["drain"]:
        parts.append(f"in all {msgspec.convert(drain, DrainState)}")
    return ", ".join(parts)
