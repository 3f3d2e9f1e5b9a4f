"""``kvferry router list``, ``add``, ``remove`` and ``drain``."""

import time
from typing import Any
from urllib.parse import quote

import httpx
from rich.markup import escape
from rich.table import Table

from kvferry.cli.console import make_console, print_json
from kvferry.errors import KVFerryError, PeerLostError

TIMEOUT_S = 20.0
"""Seconds for a router's answer."""
POLL_S = 0.5


class RouterClient:
    """Asks a router about its engines, and to change them."""

    def __init__(self, url: str, operator_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = {} if operator_key is None else {"authorization": f"Bearer {operator_key}"}

    def engines(self) -> list[dict[str, Any]]:
        """What it tells of each."""
        engines: list[dict[str, Any]] = self._ask("GET", "")["engines"]
        return engines

    def put(self, role: str, name: str, url: str) -> dict[str, Any]:
        """Enters an engine."""
        return self._ask("PUT", f"/{role}/{quote(name, safe='')}", {"url": url})

    def delete(self, role: str, name: str) -> dict[str, Any]:
        """Forgets an engine."""
        return self._ask("DELETE", f"/{role}/{quote(name, safe='')}")

    def drain(self, role: str, name: str) -> dict[str, Any]:
        """Has an engine drain."""
        return self._ask("POST", f"/{role}/{quote(name, safe='')}/drain")

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """Its answer.

        Raises:
            PeerLostError: it cannot be reached.
            KVFerryError: it refuses, with its words.
        """
        url = f"{self._url}/kvferry/engines{path}"
        try:
            with httpx.Client(trust_env=False, timeout=TIMEOUT_S, headers=self._headers) as client:
                response = client.request(method, url, json=body)
            answer: dict[str, Any] = response.json()
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PeerLostError(f"router {self._url}: {error}") from error
        except ValueError as error:
            raise KVFerryError(f"{self._url} is no router of kvferry: {error}") from error
        if response.status_code != 200:
            said = answer.get("error") or {}
            raise KVFerryError(f"router {self._url}: {said.get('message', response.status_code)}")
        return answer


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


def add(role: str, url: str, name: str, router: str, operator_key: str | None) -> None:
    """Enters an engine."""
    from kvferry.cluster.messages import EngineAddress

    try:
        name = EngineAddress.of("decode", url, name).name
    except ValueError as error:
        raise KVFerryError(str(error)) from error
    RouterClient(router, operator_key).put(role, name, url)
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
        KVFerryError: it has not drained in time; it goes on draining.
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
        client.delete(role, name)
    console.print(f"{role} engine {escape(name)} has drained; it can be stopped")


def remaining(engine: dict[str, Any]) -> str:
    """What an engine still has, in words."""
    parts = [f"{engine['outstanding']} requests of this router", f"{engine['lent']} loans of it"]
    if drain := engine["drain"]:
        parts.append(
            f"in all {drain['requests']} requests, {drain['loads']} loads, {drain['leases']} leases"
        )
    return ", ".join(parts)
