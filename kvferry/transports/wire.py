"""What the transports tcp and ucx share: served memory, and reads that come in chunks."""

import secrets
from typing import Any

from kvferry.layouts.tiles import Runs, Tiles
from kvferry.transports.base import (
    Addressing,
    ByteArray,
    Peer,
    Transfer,
    Transfers,
    Transport,
    Waitable,
)
from kvferry.transports.regions import Regions, private_memory
from kvferry.transports.tcp_wire import Endpoint, decode_endpoint, encode
from kvferry.transports.wire_reader import WirePeer, WireReader


class WireTransport(Transport):
    """A transport whose source packs chunks that the reader unpacks."""

    addressing = Addressing.PACKED
    fences = True

    _port: int
    """Of the data endpoint."""
    _reader: WireReader[Any, Any]

    def __init__(self, host: str) -> None:
        self._host = host
        self._token = secrets.token_bytes(16)
        self._regions = Regions()
        self._transfers = Transfers()

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """See :meth:`Transport.allocate`."""
        memory = private_memory(nbytes)
        return self.register(memory), memory

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """See :meth:`Transport.register`."""
        return self._regions.add(memory, serve=serve)

    def endpoint(self) -> bytes:
        """See :meth:`Transport.endpoint`."""
        return encode(
            Endpoint(
                transport=self.name,
                host=self._host,
                port=self._port,
                token=self._token,
                regions=self._regions.served_nbytes,
            )
        )

    def connect(self, endpoint: bytes) -> WirePeer[Any]:
        """Begins a connection and returns at once; where nobody is, reads fail.

        Raises:
            DecodeError: the endpoint does not decode.
        """
        peer: WirePeer[Any] = self._reader.connect(decode_endpoint(endpoint, self.name))
        return peer

    def read(
        self, peer: Peer, tiles: Tiles, runs: Runs, *, after: Waitable | None = None
    ) -> Transfer:
        """See :meth:`Transport.read`."""
        return self._reader.read(peer, tiles, runs, after)

    def poll(self) -> list[Transfer]:
        """See :meth:`Transport.poll`."""
        return self._transfers.poll()

    def cancel(self, transfer: Transfer) -> None:
        """See :meth:`Transport.cancel`; terminal once the chunks under way are unpacked."""
        self._transfers.cancel(transfer)
