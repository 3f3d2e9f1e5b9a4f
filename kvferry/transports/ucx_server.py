"""The serving side of the ucx transport: packs the chunks that readers want, in turns.

For a cache on a device, the device packs a chunk piece by piece
(:mod:`~kvferry.transports.packing`). Each piece is copied once more, into the buffer that UCX
sends, because UCX may need the buffer for as long as the reader likes.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvferry.decoding import decode
from kvferry.errors import KVFerryError, NotReadyError, ProtocolError, TransferError
from kvferry.layouts.arrays import ByteArray, bytes_at
from kvferry.layouts.copier import copy_tiles
from kvferry.transports.packing import PackedPiece
from kvferry.transports.regions import Regions
from kvferry.transports.ucx_link import Request, UcxLink
from kvferry.transports.wire import ServedReader, WireServer
from kvferry.transports.wire_messages import (
    TAG_BYTES,
    UCX_REQUESTS,
    Cancel,
    Hello,
    Read,
    UcxRequest,
    Want,
    encode,
)

logger = logging.getLogger(__name__)

_SENDS_AHEAD = 4
"""Largest number of chunks packed or sent to one reader at a time."""
MAX_WANTS = 1024
"""Largest number of chunks that a reader may want at a time."""
_REFUSED_S = 1.0
"""Seconds that a refused reader has to leave. A connection that is ended at once would often end
before the message with the reason arrives."""


@dataclass(slots=True, eq=False)
class _Packing:
    """A chunk that a device packs."""

    want: Want
    buffer: ByteArray
    """Buffer of the chunk and its tag, filled as far as pieces have come."""
    pieces: deque[PackedPiece]
    """Pieces that have not come yet, in order."""


@dataclass(slots=True, eq=False)
class _Reader(ServedReader):
    """A reader, with its wanted chunks and the chunks on their way to the reader."""

    link: UcxLink
    welcome: bool = False
    """Whether the reader has shown the token."""
    wants: deque[Want] = field(default_factory=deque)
    packing: deque["_Packing"] = field(default_factory=deque)
    """Chunks that a device packs."""
    sending: list[Request] = field(default_factory=list)
    """Chunks that have not left yet."""
    refused: float | None = None
    """``time.monotonic()`` of the refusal of the whole connection; later messages are ignored."""


class UcxServer(WireServer):
    """Serves regions to readers. Belongs to the transport's thread."""

    def __init__(
        self, regions: Regions, token: bytes, max_readers: int, wake: Callable[[], object]
    ) -> None:
        """``wake`` makes the transport's thread look at every reader soon; any thread calls it."""
        super().__init__(regions, token, max_readers)
        self._wake = wake
        self._readers: list[_Reader] = []

    def accept(self, links: list[UcxLink]) -> None:
        """Adds connections begun by readers."""
        for link in links:
            if len(self._readers) >= self._max_readers:
                self._forget(self._silent_longest(self._readers))
            self._readers.append(_Reader(link))

    def round(self) -> bool:
        """Looks once at every reader; returns whether there was progress."""
        progressed = False
        for reader in list(self._readers):
            try:
                if reader.refused is None:
                    progressed |= self._receive(reader) | self._serve(reader)
                gone = not reader.link.alive or _has_lingered(reader)
            except ProtocolError as error:
                self._refuse(reader, None, error)
                reader.refused = time.monotonic()
                gone = False
            except KVFerryError as error:
                logger.debug("a reader is gone: %s", error)
                gone = True
            if gone:
                self._forget(reader)
                progressed = True
        return progressed

    def close(self) -> None:
        """Ends the connections."""
        for reader in list(self._readers):
            self._forget(reader)

    def _receive(self, reader: _Reader) -> bool:
        frame = reader.link.receive()
        if frame is None:
            return False
        reader.heard = time.monotonic()
        self._handle(reader, decode(UCX_REQUESTS, frame, "request"))
        return True

    def _handle(self, reader: _Reader, message: UcxRequest) -> None:
        if isinstance(message, Hello):
            self._check_hello(message)
            reader.welcome = True
        elif not reader.welcome:
            raise ProtocolError(f"{type(message).__name__} came before Hello; connect again")
        elif isinstance(message, Read):
            try:
                reader.reads[message.transfer] = self._plan(reader, self._readers, message)
            except (ProtocolError, TransferError, NotReadyError) as error:
                self._refuse(reader, message.transfer, error)
        elif isinstance(message, Cancel):
            reader.reads.pop(message.transfer, None)
        else:
            if len(reader.wants) >= MAX_WANTS:
                raise ProtocolError(f"more than {MAX_WANTS} chunks are wanted at a time")
            if not 0 <= message.tag < 1 << 64:
                raise ProtocolError(f"tag {message.tag} has more than 64 bits")
            reader.wants.append(message)

    def _serve(self, reader: _Reader) -> bool:
        """Sends the next chunk that a reader wants, if the last chunks have left."""
        before = len(reader.sending)
        reader.sending = [each for each in reader.sending if not each.completed]
        progressed = len(reader.sending) < before
        if reader.packing:
            progressed |= self._take_pieces(reader, reader.packing[0])
        if reader.wants and len(reader.sending) + len(reader.packing) < _SENDS_AHEAD:
            self._begin(reader, reader.wants.popleft())
            progressed = True
        return progressed

    def _begin(self, reader: _Reader, want: Want) -> None:
        """Packs a chunk and sends the chunk with its tag.

        If there is no such read or no such chunk, sends only the tag.
        """
        plan = reader.reads.get(want.transfer)
        if plan is None or not 0 <= want.chunk < len(plan.chunks):
            self._send(reader, want, np.empty(TAG_BYTES, dtype=np.uint8))
            return
        buffer = np.empty(int(plan.nbytes[want.chunk]) + TAG_BYTES, dtype=np.uint8)
        tables, packer = plan.pack(want.chunk), self._regions.packer
        if packer is None:
            copy_tiles(self._regions.addresses, [buffer.ctypes.data], *tables)
            self._send(reader, want, buffer)
            return
        pieces = deque(PackedPiece(*piece, ready=self._wake) for piece in packer.pieces(*tables))
        reader.packing.append(_Packing(want, buffer, pieces))
        for piece in pieces:
            packer.pack(piece, self._regions.addresses, str(id(reader)))

    def _take_pieces(self, reader: _Reader, packing: _Packing) -> bool:
        """Takes packed pieces of a chunk, and sends the chunk once complete.

        Returns:
            Whether any piece was taken.

        Raises:
            TransferError: the device could not pack a piece.
        """
        packer, progressed = self._regions.packer, False
        assert packer is not None  # the packer has packed the pieces
        while packing.pieces and (piece := packing.pieces[0]).address:
            packed = bytes_at(piece.address, piece.nbytes)
            packing.buffer[piece.first_byte : piece.first_byte + piece.nbytes] = packed
            packer.release(packing.pieces.popleft())
            progressed = True
        if not packing.pieces:
            reader.packing.popleft()
            self._send(reader, packing.want, packing.buffer)
        elif (error := packing.pieces[0].error) is not None:
            logger.warning("a reader is served no more: %s", error)
            self._refuse(reader, packing.want.transfer, TransferError(str(error)))
            raise error
        return progressed

    def _send(self, reader: _Reader, want: Want, buffer: ByteArray) -> None:
        buffer[-TAG_BYTES:].view("<u8")[0] = want.tag
        reader.sending.append(reader.link.send_buffer(want.tag, buffer))

    def _refuse(self, reader: _Reader, transfer: int | None, error: KVFerryError) -> None:
        answer = encode(self._refusal(transfer, error))
        try:
            reader.link.send(answer)
        except KVFerryError as lost:
            logger.debug("a reader is gone: %s", lost)

    def _forget(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        for packing in reader.packing:
            for piece in packing.pieces:
                assert self._regions.packer is not None  # the packer packs the pieces
                self._regions.packer.release(piece)
        reader.link.close()


def _has_lingered(reader: _Reader) -> bool:
    return reader.refused is not None and time.monotonic() - reader.refused > _REFUSED_S
