"""Moves bytes between registered regions; knows nothing of layers, heads or requests.

:mod:`kvferry.transports.base` holds the contract; the other modules implement the contract.
Importing this package loads no transport; :func:`open_transport` loads only the requested
transport.
"""

from kvferry.layouts.arrays import ByteArray
from kvferry.transports.base import (
    Addressing,
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
