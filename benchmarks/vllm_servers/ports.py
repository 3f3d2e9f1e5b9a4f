"""Ports of the loopback interface."""

import socket


def free_port() -> int:
    """A port that nothing listens on now; another process may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
