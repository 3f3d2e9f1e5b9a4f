"""The connection between an executor and a rank on another host.

Any host of the network can reach a rank's port. So both ends prove to each other that they know a
key before anything else. Each proof has a time limit, because a stranger may send nothing.
"""

import logging
import os
import socket
import threading
import time
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from kvferry.zeromq import split_address, tune_tcp

logger = logging.getLogger(__name__)

PROOF_S = 60.0
"""Seconds in which a connection to a rank must prove that it is of the rank's engine."""

REFUSALS = (AuthenticationError, EOFError, OSError)
"""Errors of a connection that has not proved to know the key."""


def connect(address: str, key: str, limit_s: float) -> Connection:
    """Connects to a rank.

    Args:
        address: ``host:port`` of the rank.
        key: secret that both ends must know.
        limit_s: seconds for the connection and the proofs.

    Raises:
        AuthenticationError, EOFError, OSError: the rank cannot be reached, or has not proved within
            ``limit_s`` that it knows the key.
    """
    deadline = time.monotonic() + limit_s
    tcp = socket.create_connection(split_address(address), limit_s)
    tcp.settimeout(None)
    connection = Connection(tcp.detach())
    _prove(connection, key, deadline - time.monotonic(), accepted=False)
    return connection


def accept(listener: socket.socket, key: str) -> Connection:
    """Accepts connections until one of them proves to know the key; no connection delays another.

    The listener then accepts no more connections.
    """
    proved: list[Connection] = []

    def greet(connection: Connection) -> None:
        try:
            _prove(connection, key, PROOF_S, accepted=True)
        except REFUSALS as error:
            logger.warning("a connection that is not our engine's: %r", error)
        else:
            proved.append(connection)
            listener.shutdown(socket.SHUT_RDWR)  # ends the wait for a further connection

    while True:
        try:
            connection = Connection(listener.accept()[0].detach())
        except OSError as error:
            if proved:
                return proved[0]
            logger.warning("accepting connections: %r", error)
            time.sleep(0.1)
        else:
            threading.Thread(
                target=greet, args=(connection,), name="kvferry-greet", daemon=True
            ).start()


def _prove(connection: Connection, key: str, limit_s: float, *, accepted: bool) -> None:
    """Both ends prove to each other that they know the key; closes the connection otherwise."""
    late = threading.Event()
    tune_tcp(connection.fileno())
    with socket.socket(fileno=os.dup(connection.fileno())) as tcp:

        def end() -> None:
            late.set()
            with suppress(OSError):  # the connection has just broken
                tcp.shutdown(socket.SHUT_RDWR)  # ends a read that waits, even inside a message

        timer = threading.Timer(limit_s, end)
        timer.start()
        proofs = (deliver_challenge, answer_challenge)
        try:
            for prove in proofs if accepted else reversed(proofs):
                prove(connection, key.encode())
        except (*REFUSALS, AssertionError) as error:
            connection.close()
            if late.is_set():
                raise TimeoutError(f"no proof of the key within {limit_s:.3g} s") from error
            if isinstance(error, AssertionError):  # Python 3.11: the first message is no challenge
                raise AuthenticationError(str(error)) from error
            raise
        finally:
            timer.cancel()
            timer.join()
