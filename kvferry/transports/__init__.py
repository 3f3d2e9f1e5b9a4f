"""Moves bytes between registered regions; knows nothing of layers, heads or requests.

:mod:`kvferry.transports.base` is the contract; the other modules fulfil it. Importing
this package loads no transport; :func:`open_transport` loads the one it is asked for.
"""

from kvferry.transports.base import (
    Addressing,
    ByteArray,
    Peer,
    Transfer,
    Transfers,
    TransferState,
    Transport,
    TransportOptions,
    Waitable,
)
from kvferry.transports.registry import open_transport, transport_class

__all__ = [
    "Addressing",
    "ByteArray",
    "Peer",
    "Transfer",
    "TransferState",
    "Transfers",
    "Transport",
    "TransportOptions",
    "Waitable",
    "open_transport",
    "transport_class",
]
