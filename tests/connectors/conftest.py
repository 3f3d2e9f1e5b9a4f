"""Fixtures of the connector tests."""

import socket

import pytest


@pytest.fixture
def free_port() -> int:
    """A TCP port that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
