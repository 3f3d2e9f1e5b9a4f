"""Ports of the loopback interface."""

import contextlib
import secrets
import socket

_FIRST, _END = 20_000, 32_000
"""Linux gives none of these to connections, which may take any other port at any time."""


_given: set[int] = set()
"""Ports that this process was given: their servers may listen later than the next one asks."""


def free_port() -> int:
    """A port that nothing listens on now; another process may take it before the caller does."""
    return free_ports(1)


def free_ports(number: int) -> int:
    """The first of so many ports in a row that nothing listens on now."""
    while True:
        first = _FIRST + secrets.randbelow(_END - _FIRST - number)
        ports = range(first, first + number)
        if not _given.isdisjoint(ports):
            continue
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for port in ports:
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            _given.update(ports)
            return first
