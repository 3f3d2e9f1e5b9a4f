"""Lists of engines that somebody else keeps: a file, or the addresses behind a name."""

import asyncio
import socket
import tomllib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvferry.cluster.messages import EngineAddress, KVEventsPlace, Role
from kvferry.config import KVRole
from kvferry.errors import ConfigError
from kvferry.zeromq import join_address

EngineList: TypeAlias = Callable[[], Coroutine[Any, Any, list[EngineAddress]]]
"""Looks at a list; raises ``ConfigError`` where it cannot be used."""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine of a file."""

    url: str
    name: str = ""
    control: str = ""
    """``host:port`` of its control channel."""
    kv_events: KVEventsPlace | None = None
    """Where it publishes its KV cache events."""
    kv_role: KVRole | None = None
    """Whether it lends and loads."""

    def address(self, role: Role) -> EngineAddress:
        """Where the router finds it."""
        return EngineAddress.of(
            role, self.url, self.name, self.control, self.kv_events, self.kv_role
        )


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The file."""

    prefill: list[_Entry] = []
    decode: list[_Entry] = []


def engines_in(path: Path) -> EngineList:
    """The engines of a TOML file of ``[[prefill]]`` and ``[[decode]]`` tables.

    Each table has a ``url``, and a ``name`` unless the URL's ``host:port`` will do. That of a
    foreign engine may tell what one of ours tells itself: its ``control`` channel, for people who
    look at the cluster and for ``at_once``, the table ``kv_events``, where it publishes what its
    cache holds, and its ``kv_role``, whether it lends that.
    """

    async def look() -> list[EngineAddress]:
        try:
            tables = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _File)
            return [
                *(one.address("prefill") for one in tables.prefill),
                *(one.address("decode") for one in tables.decode),
            ]
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
        except (msgspec.ValidationError, ValueError) as error:
            raise ConfigError(f"{path}: {error}") from error

    return look


def engines_behind(role: Role, url: str) -> EngineList:
    """The engines at all addresses that the name in an ``http`` URL has.

    Raises:
        ConfigError: the URL is of another scheme: no address has the name's certificate.
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
