"""Messages between the launcher and its child processes: settings, addresses and events."""

import ssl
from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvferry.config import EngineConfig, KVRole, RouterConfig, shown, split_endpoint
from kvferry.control.options import CurveKeys
from kvferry.control.tickets import channel_address
from kvferry.engine.messages import RanksElsewhere
from kvferry.errors import ConfigError

Role = Literal["prefill", "decode"]

MOST_NAME_CHARACTERS = 256
"""Maximum length of an engine's name in characters."""


def without_credentials(url: str) -> str:
    """Removes user name and password from a URL, so that the URL may be shown.

    >>> without_credentials("http://user:secret@host:80")
    'http://host:80'
    """
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for the scheduler process of an engine."""

    engine: EngineConfig
    role: Role
    model_folder: str
    """Folder with the converted model."""
    model_name: str
    dtype: str
    api_key: str | None = None
    """Bearer token that the router must send."""
    elsewhere: RanksElsewhere | None = None
    """The engine's ranks on other hosts; ``None`` if all ranks are on this host."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings for a rank on another host than its scheduler process, which connects to the
    rank.
    """

    host: str
    """Address of the rank's host."""
    key: str
    """Secret that the scheduler process must know to connect to the rank."""
    model_folder: str
    """Folder with the converted model on the rank's host."""


class KVEventsPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Addresses at which an engine publishes its KV cache events."""

    endpoint: str
    """Address for subscribers, ``tcp://host:port``."""
    replay_endpoint: str | None = None
    """Address for requests of missed events, ``tcp://host:port``; ``None`` for no replay."""
    topic: str = ""
    """Beginning of the first frame of the engine's messages."""
    start: str = ""
    """Id of the engine's current start, empty if unknown. A new id makes all earlier events
    void."""

    def __post_init__(self) -> None:
        split_endpoint(self.endpoint)
        if self.replay_endpoint is not None:
            split_endpoint(self.replay_endpoint, "replay_endpoint")


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Name, role and addresses of an engine for the router."""

    name: str
    role: Role
    url: str
    """URL of the engine's HTTP server: ``http://host:port``, without a path."""
    control: str = ""
    """``host:port`` of the engine's control channel, for displays and for requests that a foreign
    engine receives at the same time as another engine. kvferry's engines report it themselves."""
    kv_events: KVEventsPlace | None = None
    """Addresses of the engine's KV cache events. kvferry's engines report them themselves."""
    kv_role: KVRole | None = None
    """Whether the engine lends and loads KV. kvferry's engines report their role themselves."""

    @classmethod
    def of(
        cls,
        role: Role,
        url: str,
        name: str = "",
        control: str = "",
        kv_events: KVEventsPlace | None = None,
        kv_role: KVRole | None = None,
    ) -> "EngineAddress":
        """Makes an address from a user's text; the default name is the URL's ``host:port``.

        Raises:
            ValueError: the URL is not the URL of a server, the name is not printable, or the
                control channel is not ``host:port`` or is too long for a transfer.
        """
        parts = urlsplit(url)
        is_plain = url.isprintable() and not (parts.query or parts.fragment)
        if parts.scheme not in ("http", "https") or not parts.hostname or not is_plain:
            raise ValueError(f"{url!r} is no URL of a server; write http://HOST:PORT")
        try:
            _ = parts.port
        except ValueError as error:
            raise ValueError(f"{url!r}: {error}; write http://HOST:PORT") from error
        name = name or parts.netloc.rpartition("@")[2]
        if not name.isprintable() or len(name) > MOST_NAME_CHARACTERS:
            raise ValueError(
                f"name: {shown(name)} is not printable text of 1 to {MOST_NAME_CHARACTERS} "
                "characters"
            )
        if control:
            control = channel_address(control)
        url = url.rstrip("/").removesuffix("/v1")
        return cls(
            name=name, role=role, url=url, control=control, kv_events=kv_events, kv_role=kv_role
        )


class Tls(msgspec.Struct, frozen=True, kw_only=True):
    """How a router checks the certificates of servers with ``https``."""

    ca: str = ""
    """File with the authorities' certificates; empty for the authorities of the system."""
    server_name: str = ""
    """Name that each server's certificate must have; empty for the host of the server's URL."""
    checks: bool = True
    """Whether certificates are checked at all."""

    def context(self) -> ssl.SSLContext | bool:
        """The value of aiohttp's ``ssl``.

        Raises:
            ConfigError: the file of authorities cannot be read, or has no certificate.
        """
        if not (self.checks and self.ca):
            return self.checks
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        try:
            context.load_verify_locations(cafile=self.ca)
        except ssl.SSLError as error:
            message = f"--tls-ca: {self.ca} has no certificate in PEM ({error.reason}); name a file"
            raise ConfigError(f"{message} of certificates of authorities") from error
        except OSError as error:
            raise ConfigError(f"--tls-ca: {self.ca} cannot be read: {error.strerror}") from error
        return context


class RouterSettings(RouterConfig, frozen=True, kw_only=True):
    """Settings for the router: the ``[router]`` table, and values from the launcher."""

    engines: tuple[EngineAddress, ...]
    model_folder: str | None = None
    """Folder with the tokenizer and the chat template; optional only with foreign engines."""
    model_name: str | None = None
    """Name that clients must write in ``model``; by default, the engines check the name."""
    foreign: bool = False
    """Whether the engines are foreign servers, such as vLLM's, with their own defaults. Foreign
    engines can also serve bodies that this router cannot parse."""
    api_key: str | None = None
    """Bearer token that clients must send, and that the router sends to the engines."""
    operator_key: str | None = None
    """Bearer token that permits changes to the list of engines; ``None`` forbids all changes."""
    port: int = 0
    tls: Tls = Tls()
    """Checks of the servers' certificates."""
    curve: CurveKeys | None = None
    """Keys of the engines' control channels, for displays of the cluster; ``None`` for no keys."""
    cluster_key: bytes | None = None
    """The engines' cluster key, which signs the transfers of requests sent to two engines at once;
    ``None`` for no key."""


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Progress of a child that is not ready yet."""

    doing: str
    done: float
    """Fraction of the start that is done, 0 to 1."""


class Bound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child listens on its HTTP port; requests wait until the child is ready."""

    port: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child serves, or has finished its conversion."""

    control: str | None = None
    """``host:port`` of an engine's control channel."""
    folder: str | None = None
    """Folder that a conversion wrote."""


class ChildFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child cannot continue and will end at once."""

    name: str
    """Class name of the error."""
    message: str


Event: TypeAlias = Loading | Bound | Ready | ChildFailed
