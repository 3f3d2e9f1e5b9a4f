"""Moves bytes between registered regions; knows nothing of layers, heads or requests.

:mod:`kvferry.transports.base` is the contract; ``shm``, ``vm`` and ``tcp`` fulfil it. Importing
this package loads no transport; :func:`open_transport` loads the one it is asked for.
"""

from kvferry.transports.base import (
    ByteArray,
    Peer,
    Transfer,
    TransferState,
    Transport,
    TransportOptions,
    Waitable,
)
from kvferry.transports.registry import open_transport, transport_class

__all__ = [
    "ByteArray",
    "Peer",
    "Transfer",
    "TransferState",
    "Transport",
    "TransportOptions",
    "Waitable",
    "open_transport",
    "transport_class",
]
