"""Fixtures for pytest. Name this module in ``pytest_plugins`` of your root ``conftest.py``."""

from collections.abc import Iterator

import pytest

from kvferry.errors import HostError
from kvferry.testing.hosts import Network


@pytest.fixture
def network() -> Iterator[Network]:
    """A network without hosts; the test is skipped if the machine does not allow networks."""
    try:
        network = Network.open()
    except HostError as error:
        pytest.skip(str(error))
    with network:
        yield network
