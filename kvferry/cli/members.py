"""``kvferry router list``, ``add``, ``remove`` and ``drain``."""

import time
from contextlib import suppress
from ipaddress import IPv6Address
from typing import Annotated, Any

import msgspec
import typer
from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import make_console, print_json
from kvferry.cli.options import ROUTER_URL, AsJson, OperatorKey
from kvferry.engine.admission import DrainState
from kvferry.errors import KVFerryError, PeerLostError
from kvferry.router.router_client import RouterClient
from kvferry.serving.messages import EngineAddress, KVEventsPlace, Role
from kvferry.zeromq import join_address, split_address

POLL_S = 0.5
"""Seconds between two checks of a draining engine."""


RouterUrl = Annotated[
    str, typer.Option("--router", metavar="URL", envvar="KVFERRY_ROUTER", help="The router's URL.")
]
EngineRole = Annotated[Role, typer.Argument(help="The engine's role for this router.")]


def router_name(name: str) -> str:
    """The router's name of an engine; an IPv6 address with a port gets the brackets of the URL.

    >>> router_name("fd77::5:8200")
    '[fd77::5]:8200'
    """
    with suppress(ValueError):  # any other name
        host, port = split_address(name)
        if not name.startswith("["):
            return join_address(str(IPv6Address(host)), port)
    return name


EngineName = Annotated[
    str,
    typer.Argument(
        help="The engine's name in `kvferry router list`.",
        callback=router_name,
        show_default=False,
    ),
]


def list_engines(
    router: RouterUrl = ROUTER_URL, operator_key: OperatorKey = None, as_json: AsJson = False
) -> None:
    """Show the engines of a router."""
    engines = RouterClient(router, operator_key).engines()
    if as_json:
        print_json(engines)
        return
    table = Table("role", "name", "kind", "state", "requests", "lent", "server", "last error")
    for engine in engines:
        table.add_row(
            engine["role"],
            escape(engine["name"]),
            escape(engine["kind"]),
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
    role: EngineRole,
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The engine's URL.", show_default=False)
    ],
    name: Annotated[
        str,
        typer.Option(
            help="Name of the engine in lists, logs and metrics.",
            show_default="the URL's host:port",
        ),
    ] = "",
    control: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Control channel (kv_port) of the engine, for the router's page and for "
            "--at-once. A reference engine reports its own.",
            show_default=False,
        ),
    ] = "",
    kv_events: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Endpoint of the engine's KV cache events, tcp://host:port. A reference engine "
            "reports its own.",
            show_default=False,
        ),
    ] = "",
    kv_events_replay: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Endpoint that replays missed KV cache events.",
            show_default=False,
        ),
    ] = "",
    router: RouterUrl = ROUTER_URL,
    operator_key: OperatorKey = None,
) -> None:
    """Enter an engine, or return a drained or draining engine to service."""
    events = None
    try:
        name = EngineAddress.of("decode", url, name, control).name
        if kv_events or kv_events_replay:
            events = KVEventsPlace(endpoint=kv_events, replay_endpoint=kv_events_replay or None)
    except ValueError as error:
        raise KVFerryError(str(error)) from error
    client = RouterClient(router, operator_key)
    if client.put(role, name, url, control, events)["state"] in ("draining", "drained"):
        client.resume(role, name)
    make_console().print(f"{role} engine {escape(name)} is entered")


def remove(
    role: EngineRole,
    name: EngineName,
    router: RouterUrl = ROUTER_URL,
    operator_key: OperatorKey = None,
) -> None:
    """Forget an engine at once; its running requests go on."""
    engine = RouterClient(router, operator_key).delete(role, name)
    console = make_console()
    console.print(f"{role} engine {escape(name)} is forgotten")
    if engine["outstanding"] or engine["lent"]:
        console.print(f"it still works on {remaining(engine)}", style="yellow")


def drain(
    role: EngineRole,
    name: EngineName,
    router: RouterUrl = ROUTER_URL,
    operator_key: OperatorKey = None,
    timeout_s: Annotated[
        float,
        typer.Option("--timeout", min=0.0, help="Seconds to wait until the engine has drained."),
    ] = 600.0,
) -> None:
    """Give an engine no new requests, and wait until its requests have ended. Then stop it."""
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
        try:
            found = [one for one in client.engines() if (one["role"], one["name"]) == (role, name)]
        except PeerLostError:
            continue  # a busy router, or one that is started again, still drains the engine
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
    """Text about the requests and leases that an engine still has."""
    parts = [f"{engine['outstanding']} requests of this router", f"{engine['lent']} loans of it"]
    if drain := engine["drain"]:
        parts.append(f"in all {msgspec.convert(drain, DrainState)}")
    return ", ".join(parts)
