"""What a test process and the keeper of its hosts tell each other: one message, one answer."""

from typing import TypeAlias

import msgspec


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """What one direction between two hosts does to packets; nothing, unless told."""

    is_cut: bool = False
    """Nothing arrives, and nobody is told."""
    delay_s: float = 0.0
    """Seconds from one host to the other."""
    bytes_per_s: float | None = None
    """Bytes that pass in a second; what waits for longer than a second is dropped."""
    loss: float = 0.0
    """The part of the packets that never arrive, 0 to 1."""

    def __post_init__(self) -> None:
        if self.delay_s < 0:
            raise ValueError(f"delay_s: {self.delay_s} s is negative")
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ValueError(
                f"bytes_per_s: {self.bytes_per_s} is not above 0; cut the link instead"
            )
        if not 0 <= self.loss <= 1:
            raise ValueError(f"loss: {self.loss} is not between 0 and 1")


class StartHost(msgspec.Struct, frozen=True, tag=True):
    """Make a host's namespaces, and plug it in."""

    index: int
    name: str
    ipv4: str
    ipv6: str


class KillHost(msgspec.Struct, frozen=True, tag=True):
    """Unplug a host, then kill all its processes."""

    index: int


class SetLink(msgspec.Struct, frozen=True, tag=True):
    """What packets from one host to another meet from now on."""

    source: int
    target: int
    link: Link


class Run(msgspec.Struct, frozen=True, tag=True):
    """Start a process in a host. Stdin, stdout and stderr come along as descriptors.

    The answer's value is an id for :class:`ExitCode`; a pidfd comes along.
    """

    index: int
    argv: list[str]
    env: dict[str, str]
    cwd: str


class ExitCode(msgspec.Struct, frozen=True, tag=True):
    """How a process ended; negative for a signal. The answer has no value while it runs."""

    process: int


class OpenSocket(msgspec.Struct, frozen=True, tag=True):
    """Make a socket in a host's network. Its descriptor comes along with the answer."""

    index: int
    family: int
    kind: int


Message: TypeAlias = StartHost | KillHost | SetLink | Run | ExitCode | OpenSocket


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """To a message; the first one says whether there can be hosts at all."""

    value: int | None = None
    errno: int | None = None
    """Of the ``OSError`` because of which nothing was done."""
    error: str = ""
    """In words."""
