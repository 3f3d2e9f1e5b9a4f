"""What the launcher tells the processes it starts, and what they tell it."""

from typing import Literal, TypeAlias
from urllib.parse import urlsplit

import msgspec

from kvferry.config import EngineConfig, KVRole, RouterConfig, shown, split_endpoint
from kvferry.control.options import CurveKeys
from kvferry.control.tickets import channel_address
from kvferry.engine.messages import RanksElsewhere

Role = Literal["prefill", "decode"]

MOST_NAME_CHARACTERS = 256
"""Of an engine's name."""


def without_credentials(url: str) -> str:
    """A URL as others may see it.

    >>> without_credentials("http://user:secret@host:80")
    'http://host:80'
    """
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """For the scheduler process of an engine."""

    engine: EngineConfig
    role: Role
    model_folder: str
    """The converted model."""
    model_name: str
    dtype: str
    api_key: str | None = None
    """Bearer token that the router must show."""
    elsewhere: RanksElsewhere | None = None
    """Its ranks on other hosts, if it has any."""


class RankSettings(msgspec.Struct, frozen=True, kw_only=True):
    """For a rank on another host than the scheduler process of its engine, which connects to it."""

    host: str
    """Address of the rank's host."""
    key: str
    """What the engine must know."""
    model_folder: str
    """The converted model, on that host."""


class KVEventsPlace(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where an engine publishes its KV cache events."""

    endpoint: str
    """``tcp://host:port`` to subscribe at."""
    replay_endpoint: str | None = None
    """Likewise, to ask for what was missed."""
    topic: str = ""
    """What the first frame of its messages begins with."""
    start: str = ""
    """Another one after each start of the engine, if it tells: then nothing of before holds."""

    def __post_init__(self) -> None:
        split_endpoint(self.endpoint)
        if self.replay_endpoint is not None:
            split_endpoint(self.replay_endpoint, "replay_endpoint")


class EngineAddress(msgspec.Struct, frozen=True, kw_only=True):
    """Where the router finds an engine."""

    name: str
    role: Role
    url: str
    """``http://host:port``, without a path."""
    control: str = ""
    """``host:port`` of its control channel, for people who look at the cluster, and for requests
    that a foreign engine gets at once with another; an engine of ours tells it itself."""
    kv_events: KVEventsPlace | None = None
    """Where it publishes its KV cache events, likewise."""
    kv_role: KVRole | None = None
    """Whether it lends and loads, likewise."""

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
        """An address as people write it; the name is the URL's ``host:port`` unless given.

        Raises:
            ValueError: the URL is none of a server, the name cannot be shown, or the control
                channel has no ``host:port``, or a longer one than transfers hold.
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


class RouterSettings(RouterConfig, frozen=True, kw_only=True):
    """For the router: what its table says, and what the launcher knows."""

    engines: tuple[EngineAddress, ...]
    model_folder: str | None = None
    """Folder with the tokenizer and the chat template; only foreign engines can do without."""
    model_name: str | None = None
    """The name that clients write in ``model``; unless given, the engines judge it."""
    foreign: bool = False
    """Whether the engines are servers of another kind, such as vLLM's: with defaults of their own,
    and able to serve bodies that this router cannot take apart."""
    api_key: str | None = None
    """Bearer token that clients must show, and engines are shown."""
    operator_key: str | None = None
    """Bearer token of who may change the engines; without one nobody can."""
    port: int = 0
    curve: CurveKeys | None = None
    """Keys of the engines' control channels, where they have some: for people who look at the
    cluster."""
    cluster_key: bytes | None = None
    """The engines' cluster key, if they have one, which signs what both of a pair are sent."""


class Loading(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What the child does before it is ready."""

    doing: str
    done: float
    """Fraction of the whole, 0 to 1."""


class Bound(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child listens on its HTTP port; requests wait until it is ready."""

    port: int


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child serves, or has done what it was started for."""

    control: str | None = None
    """``host:port`` of an engine's control channel."""
    folder: str | None = None
    """What a conversion made."""


class Failed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The child cannot go on and is about to end."""

    name: str
    """Class name of the error."""
    message: str


Event: TypeAlias = Loading | Bound | Ready | Failed
