"""Ports of the loopback interface."""

import contextlib
import socket


def free_port() -> int:
    """A port that nothing listens on now; another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def free_ports(number: int) -> int:
    """The first of so many ports in a row that nothing listens on now."""
    while True:
        first = free_port()
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError, OverflowError):
            for port in range(first, first + number):
                probe = stack.enter_context(socket.socket())
                probe.bind(("127.0.0.1", port))
            return first
