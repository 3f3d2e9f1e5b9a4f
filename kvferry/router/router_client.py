"""Client for programs that read or change the engines of a router."""

from collections.abc import Generator
from typing import Any
from urllib.parse import quote

import httpx
import msgspec

from kvferry.decoding import UNDECODED
from kvferry.errors import KVFerryError, PeerLostError
from kvferry.router.snapshot import Snapshot
from kvferry.serving import web
from kvferry.serving.messages import KVEventsPlace

TIMEOUT_S = 20.0
"""Maximum number of seconds for a router's answer, and between two snapshots."""


class _Reason(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    """A router's answer to a refused request."""

    error: _Reason


class RouterClient:
    """Client of a router's API about engines and the cluster."""

    def __init__(self, url: str, key: str | None) -> None:
        """``key`` is the operator's key; the API key is enough to read."""
        self._url = url.rstrip("/").removesuffix("/v1")
        self._headers = web.bearer(key)

    def engines(self) -> list[dict[str, Any]]:
        """The router's description of each engine."""
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
        """Adds an engine. For a foreign engine, ``control`` is ``host:port`` of the control
        channel, and ``kv_events`` has the addresses of the KV cache events.
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
        """Drains an engine."""
        return self._ask("POST", f"/{role}/{quote(name, safe='')}/drain")

    def resume(self, role: str, name: str) -> dict[str, Any]:
        """Makes a draining engine serve again."""
        return self._ask("DELETE", f"/{role}/{quote(name, safe='')}/drain")

    def watch(self) -> Generator[Snapshot, None, None]:
        """Yields snapshots of the cluster, about one per second, as long as the router sends them.
        ``close`` of the generator ends the stream.

        Raises:
            PeerLostError: the router cannot be reached, or its stream ended.
            KVFerryError: the router refuses, with its message, or the server is not a kvferry
                router.
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
        except UNDECODED as error:
            raise KVFerryError(f"router {self._url}: it tells something else: {error}") from error
        raise PeerLostError(f"router {self._url}: it tells no more")

    def _refusal(self, content: bytes, status: int) -> KVFerryError:
        """The error to raise for a refusal."""
        try:
            refusal = msgspec.json.decode(content, type=_Refusal)
        except UNDECODED as error:
            return self._no_router(status, error)
        return KVFerryError(f"router {self._url}: {refusal.error.message}")

    def _no_router(self, status: int, error: Exception) -> KVFerryError:
        return KVFerryError(f"{self._url} is no router of kvferry: it answers {status}, {error}")

    def _ask(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """The router's answer.

        Raises:
            PeerLostError: the router cannot be reached.
            KVFerryError: the router refuses, with its message.
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
        except UNDECODED as error:
            raise self._no_router(response.status_code, error) from error
