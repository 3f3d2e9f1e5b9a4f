"""How programs ask a router about its engines, and change them."""

from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from kvferry.cluster import web
from kvferry.cluster.messages import KVEventsPlace
from kvferry.cluster.snapshot import Snapshot
from kvferry.errors import KVFerryError, PeerLostError

TIMEOUT_S = 20.0
"""Seconds for a router's answer, and between two snapshots of one."""


class _Reason(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """What a router answers to what it does not do."""

    error: _Reason


class RouterClient:
    """Asks a router about its engines and its cluster, and to change the engines."""

    def __init__(self, url: str, key: str | None) -> None:
        """``key`` is the operator's, or the API key of who only looks."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = web.bearer(key)

    def engines(self) -> list[dict[str, Any]]:
        """What it tells of each."""
        engines: list[dict[str, Any]] = self._ask("GET", "")["engines"]
        return engines

    def put(
        self,
        role: str,
        name: str,
        url: str,
        control: str = "",
        kv_events: KVEventsPlace | None = None,
    ) -> dict[str, Any]:
        """Enters an engine. Of a foreign one it tells ``host:port`` of its control channel, and
        where it publishes its KV cache events.
        """
        place: dict[str, Any] = {"url": url}
        if control:
            place["control"] = control
        if kv_events is not None:
            place["kv_events"] = msgspec.to_builtins(kv_events)
        return self._ask("PUT", f"/{role}/{quote(name, safe='')}", place)

    def delete(self, role: str, name: str) -> dict[str, Any]:
        """Forgets an engine."""
        return self._ask("DELETE", f"/{role}/{quote(name, safe='')}")

    def drain(self, role: str, name: str) -> dict[str, Any]:
        """Has an engine drain."""
        return self._ask("POST", f"/{role}/{quote(name, safe='')}/drain")

    def resume(self, role: str, name: str) -> dict[str, Any]:
        """Has an engine that drains serve again."""
        return self._ask("DELETE", f"/{role}/{quote(name, safe='')}/drain")

    def watch(self) -> Iterator[Snapshot]:
        """What the cluster does, about once per second, for as long as the router tells.

        Raises:
            PeerLostError: it cannot be reached, or tells no more.
            KVFerryError: it refuses, with its words, or is no router.
        """
        url = f"{self._url}/kvferry/watch"
        try:
            with (
                httpx.Client(trust_env=False, timeout=TIMEOUT_S, headers=self._headers) as client,
                client.stream("GET", url) as response,
            ):
                if response.status_code != 200:
                    raise self._refusal(response.read(), response.status_code)
                for line in response.iter_lines():
                    if line.startswith("data:"):
                        yield msgspec.json.decode(line[5:], type=Snapshot)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PeerLostError(f"router {self._url}: {error}") from error
        except msgspec.DecodeError as error:
            raise KVFerryError(f"router {self._url}: it tells something else: {error}") from error
        raise PeerLostError(f"router {self._url}: it tells no more")

    def _refusal(self, content: bytes, status: int) -> KVFerryError:
        """What to raise for an answer that is none."""
        try:
            refusal = msgspec.json.decode(content, type=_Refusal)
        except msgspec.DecodeError as error:
            return self._no_router(status, error)
        return KVFerryError(f"router {self._url}: {refusal.error.message}")

    def _no_router(self, status: int, error: msgspec.DecodeError) -> KVFerryError:
        return KVFerryError(f"{self._url} is no router of kvferry: it answers {status}, {error}")

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
                raise self._refusal(response.content, response.status_code)
            return msgspec.json.decode(response.content, type=dict[str, Any])
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PeerLostError(f"router {self._url}: {error}") from error
        except msgspec.DecodeError as error:
            raise self._no_router(response.status_code, error) from error
