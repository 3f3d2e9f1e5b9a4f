"""Lists of engines kept outside of the router: a file, or the addresses behind a name."""

import asyncio
import socket
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvferry.config import KVRole
from kvferry.errors import ConfigError
from kvferry.serving.messages import EngineAddress, KVEventsPlace, Role
from kvferry.zeromq import join_address

EngineList: TypeAlias = Callable[[], Coroutine[Any, Any, list[EngineAddress]]]
"""A function that reads a list; raises ``ConfigError`` if the list cannot be used."""


class EnginePlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An operator's entry for an engine."""

    url: str
    control: str = ""
    """``host:port`` of the engine's control channel."""
    kv_events: KVEventsPlace | None = None
    """Addresses of the engine's KV cache events."""
    kv_role: KVRole | None = None
    """Whether the engine lends KV and whether it loads KV."""

    def address(self, role: Role, name: str) -> EngineAddress:
        """The engine's address for the router.

        Raises:
            ValueError: see :meth:`EngineAddress.of`.
        """
        return EngineAddress.of(role, self.url, name, self.control, self.kv_events, self.kv_role)


class _Entry(EnginePlace, frozen=True, kw_only=True):
    """One engine of a file."""

    name: str = ""


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A whole file."""

    prefill: list[_Entry] = []
    decode: list[_Entry] = []


def engines_in(path: Path) -> EngineList:
    """The engines of a TOML file of ``[[prefill]]`` and ``[[decode]]`` tables.

    Each table has a ``url``, and may have a ``name``; the default name is the URL's ``host:port``.
    For a foreign engine the table may also contain facts that a kvferry engine reports itself: its
    ``control`` channel, for the cluster page and for ``at_once``; the table ``kv_events``, with the
    addresses of its KV cache events; and its ``kv_role``, for the question whether it lends cached
    KV.
    """

    async def look() -> list[EngineAddress]:
        try:
            tables = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
            return [
                *(one.address("prefill", one.name) for one in tables.prefill),
                *(one.address("decode", one.name) for one in tables.decode),
            ]
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error

    return look


def engines_behind(role: Role, url: str) -> EngineList:
    """The engines at all addresses of the host name in an ``http`` URL.

    Raises:
        ConfigError: the URL has another scheme: no single address has the name's certificate.
    """
    parts = urlsplit(url)
    if parts.scheme != "http":
        raise ConfigError(
            f"{url}: all addresses of a name are reached over http; write http://HOST:PORT, or "
            "leave out --all-addresses"
        )
    host, port = parts.hostname, parts.port or 80

    async def look() -> list[EngineAddress]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"cannot resolve {host}: {error}") from error
        addresses = sorted({str(entry[4][0]) for entry in found})
        return [EngineAddress.of(role, f"http://{join_address(at, port)}") for at in addresses]

    return look
