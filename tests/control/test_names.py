"""Addresses whose host is a name: looked up off the caller's thread, again after every failure."""

import socket
import threading

import pytest

from kvferry.control.client import ControlClient
from kvferry.control.options import ControlOptions
from kvferry.errors import CancelledError, PeerLostError
from kvferry.testing.waiting import WAIT_S, until

NAME = "prefill.cluster.test"


@pytest.fixture
def names(monkeypatch):
    """What the name server says: an address, an error, or an event to wait for first."""
    known: dict[str, str | OSError | threading.Event] = {}

    def look_up(host, *args, **kwargs):
        said = known.get(host, socket.gaierror(-2, "Name or service not known"))
        if isinstance(said, threading.Event):
            assert said.wait(WAIT_S)
            said = "127.0.0.1"
        if isinstance(said, OSError):
            raise said
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (said, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    return known


@pytest.fixture
def client():
    options = ControlOptions(request_timeout_s=5.0)
    with ControlClient(engine_id="d", incarnation="d1", options=options) as client:
        yield client


def test_a_name_that_is_unknown_says_so_and_is_tried_again(serve, names, client):
    served = serve()
    address = f"{NAME}:{served.server.port}"
    for _ in range(3):
        with pytest.raises(PeerLostError, match=f"cannot resolve '{NAME}'"):
            client.status(address).result(WAIT_S)
    names[NAME] = "127.0.0.1"
    assert client.status(address).result(WAIT_S).engine_id == served.description.engine_id


def test_a_slow_name_server_delays_nobody_else(serve, names, client):
    served, answers = serve(), threading.Event()
    names[NAME] = answers
    slow = client.status(f"{NAME}:{served.server.port}")
    assert client.status(served.address).result(WAIT_S).engine_id == served.description.engine_id
    assert not slow.done()
    with pytest.raises(PeerLostError, match=r"cannot resolve .* within request_timeout_s"):
        slow.result(WAIT_S)
    again = client.status(f"{NAME}:{served.server.port}")  # joins the look-up under way
    answers.set()
    assert again.result(WAIT_S).engine_id == served.description.engine_id


def test_a_name_that_moves_is_looked_up_again_when_the_connection_is_lost(serve, names, client):
    first = serve()
    names[NAME] = "127.0.0.1"
    address = f"{NAME}:{first.server.port}"
    assert client.status(address).result(WAIT_S).engine_id == first.description.engine_id
    first.server.close()
    names[NAME] = socket.gaierror(-3, "Temporary failure in name resolution")

    def is_looked_up_again():
        error = client.status(address).exception(WAIT_S)
        assert isinstance(error, PeerLostError)
        return "Temporary failure" in str(error)

    until(is_looked_up_again, what="another look-up")
    again = serve(port=first.server.port)
    names[NAME] = "127.0.0.1"
    assert client.status(address).result(WAIT_S).engine_id == again.description.engine_id


def test_a_client_that_is_closed_ends_what_waits_for_a_name(names):
    names[NAME] = threading.Event()
    client = ControlClient(engine_id="d", incarnation="d1")
    waiting = client.status(f"{NAME}:1")
    client.close()
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)
    names[NAME].set()
