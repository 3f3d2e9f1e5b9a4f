"""How programs ask a router about its engines, and change them."""

from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from kvferry.cluster import web
from kvferry.errors import KVFerryError, PeerLostError

TIMEOUT_S = 20.0
"""Seconds for a router's answer."""


class _Reason(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """What a router answers to what it does not do."""

    error: _Reason


class RouterClient:
    """Asks a router about its engines, and to change them."""

    def __init__(self, url: str, operator_key: str | None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = web.bearer(operator_key)

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

    def resume(self, role: str, name: str) -> dict[str, Any]:
        """Has an engine that drains serve again."""
        return self._ask("DELETE", f"/{role}/{quote(name, safe='')}/drain")

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
            if response.status_code != 200:
                refusal = msgspec.json.decode(response.content, type=_Refusal)
                raise KVFerryError(f"router {self._url}: {refusal.error.message}")
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PeerLostError(f"router {self._url}: {error}") from error
        except msgspec.DecodeError as error:
            raise KVFerryError(
                f"{self._url} is no router of kvferry: it answers {response.status_code}, {error}"
            ) from error
