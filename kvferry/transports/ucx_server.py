"""The serving side of the ucx transport: packs the chunks that readers want, in turns."""

import logging
import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvferry.decoding import decode
from kvferry.errors import KVFerryError, ProtocolError, TransferError
from kvferry.layouts.copier import copy_tiles
from kvferry.transports.base import ByteArray
from kvferry.transports.regions import Regions
from kvferry.transports.ucx_link import Link, Request
from kvferry.transports.wire import ServedReader, WireServer
from kvferry.transports.wire_chunks import ChunkPlan
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
"""Chunks on their way to one reader."""
MAX_WANTS = 1024
"""Chunks that a reader may want at a time."""
_REFUSED_S = 1.0
"""How long a reader that was refused may take to leave; ending the connection at once would often
be quicker than the message that says why."""


@dataclass(slots=True, eq=False)
class _Reader(ServedReader):
    """A reader, with what it wants and what is on its way to it."""

    link: Link
    welcome: bool = False
    """Whether it has shown the token."""
    wants: deque[Want] = field(default_factory=deque)
    sending: list[Request] = field(default_factory=list)
    """Chunks that have not left yet."""
    refused: float | None = None
    """When it was refused altogether. Nothing that it says counts any more."""


class UcxServer(WireServer):
    """Serves regions to readers. Belongs to the service's thread."""

    def __init__(self, regions: Regions, token: bytes, max_readers: int) -> None:
        super().__init__(regions, token, max_readers)
        self._readers: list[_Reader] = []

    def accept(self, links: list[Link]) -> None:
        """Takes in connections that others have begun."""
        for link in links:
            if len(self._readers) >= self._max_readers:
                self._forget(self._silent_longest(self._readers))
            self._readers.append(_Reader(link))

    def round(self) -> bool:
        """One look at every reader; whether anything went on."""
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
            except (ProtocolError, TransferError) as error:
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
        """Sends the next chunk that a reader wants, if the last ones have left."""
        before = len(reader.sending)
        reader.sending = [each for each in reader.sending if not each.completed]
        progressed = len(reader.sending) < before
        if reader.wants and len(reader.sending) < _SENDS_AHEAD:
            want = reader.wants.popleft()
            buffer = self._pack(reader.reads.get(want.transfer), want)
            reader.sending.append(reader.link.send_buffer(want.tag, buffer))
            progressed = True
        return progressed

    def _pack(self, plan: ChunkPlan | None, want: Want) -> ByteArray:
        """A chunk and its tag; only the tag where there is no such read, or no such chunk."""
        known = plan is not None and 0 <= want.chunk < len(plan.chunks)
        nbytes = int(plan.nbytes[want.chunk]) if plan is not None and known else 0
        buffer = np.empty(nbytes + TAG_BYTES, dtype=np.uint8)
        if plan is not None and known:
            copy_tiles(self._regions.addresses, [buffer.ctypes.data], *plan.pack(want.chunk))
        buffer[nbytes:].view("<u8")[0] = want.tag
        return buffer

    def _refuse(self, reader: _Reader, transfer: int | None, error: KVFerryError) -> None:
        answer = encode(self._refusal(transfer, error))
        try:
            reader.link.send(answer)
        except KVFerryError as lost:
            logger.debug("a reader is gone: %s", lost)

    def _forget(self, reader: _Reader) -> None:
        self._readers.remove(reader)
        reader.link.close()


def _has_lingered(reader: _Reader) -> bool:
    return reader.refused is not None and time.monotonic() - reader.refused > _REFUSED_S
