"""The messages between a test process and the keeper of its hosts; each message has one answer."""

from typing import TypeAlias

import msgspec


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Effects of one direction between two hosts on packets; by default there are none."""

    is_cut: bool = False
    """Whether no packet arrives; neither side gets an error."""
    delay_s: float = 0.0
    """Seconds that a packet takes from one host to the other."""
    bytes_per_s: float | None = None
    """Number of bytes that pass in a second; packets that would wait for longer than a second are
    dropped."""
    loss: float = 0.0
    """Share of lost packets, 0 to 1."""

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
    """Make a host's namespaces, and plug the host in."""

    index: int
    name: str
    ipv4: str
    ipv6: str


class KillHost(msgspec.Struct, frozen=True, tag=True):
    """Unplug a host, then kill all its processes."""

    index: int


class SetLink(msgspec.Struct, frozen=True, tag=True):
    """Set the effects on later packets from one host to another."""

    source: int
    target: int
    link: Link


class Run(msgspec.Struct, frozen=True, tag=True):
    """Start a process in a host. Stdin, stdout and stderr are sent along as descriptors.

    The answer's value is an id for :class:`ExitCode`; a pidfd is sent along with the answer.
    """

    index: int
    argv: list[str]
    env: dict[str, str]
    cwd: str


class ExitCode(msgspec.Struct, frozen=True, tag=True):
    """Ask for the exit code of a process; negative for a signal. No value while the process
    runs.
    """

    process: int


class OpenSocket(msgspec.Struct, frozen=True, tag=True):
    """Make a socket in a host's network. The answer carries the descriptor."""

    index: int
    family: int
    kind: int


Message: TypeAlias = StartHost | KillHost | SetLink | Run | ExitCode | OpenSocket


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """Answer to a message; the first answer says whether hosts are possible at all."""

    value: int | None = None
    errno: int | None = None
    """Number of the ``OSError`` of a failed action."""
    error: str = ""
    """Text of the error."""
