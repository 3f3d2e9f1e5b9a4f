"""What the serving sides of tcp and ucx share: who may read, what is refused, and why."""

import hmac
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from kvferry.errors import KVFerryError, ProtocolError, TransferError
from kvferry.transports.regions import Regions
from kvferry.transports.tcp_chunks import ChunkPlan, check_chunks
from kvferry.transports.tcp_wire import (
    VERSION_MAX,
    VERSION_MIN,
    Hello,
    Read,
    Refused,
    decode_read,
    encode,
)

logger = logging.getLogger(__name__)

MAX_READS = 64
"""Reads under way per reader; a reader keeps back what is more."""


@dataclass(slots=True, eq=False, kw_only=True)
class ServedReader:
    """One connection of a reader."""

    reads: dict[int, Any] = field(default_factory=dict)
    """Reads under way, by the number that the reader gave them."""
    heard: float = field(default_factory=time.monotonic)
    """``time.monotonic()`` of its last message."""


ReaderT = TypeVar("ReaderT", bound=ServedReader)


class WireServer:
    """Serves regions to readers. All of it belongs to one thread."""

    def __init__(self, regions: Regions, token: bytes, max_readers: int) -> None:
        self.refused = 0
        """Messages that were refused."""
        self._regions = regions
        self._token = token
        self._max_readers = max_readers

    def _check_hello(self, hello: Hello) -> None:
        """Raises ProtocolError: it knows another start of this rank, or speaks other versions."""
        if not hmac.compare_digest(hello.token, self._token):
            raise ProtocolError(
                "the endpoint is of another rank, or of an earlier start of this one"
            )
        if hello.version_min > VERSION_MAX or hello.version_max < VERSION_MIN:
            raise ProtocolError(
                f"the reader speaks versions {hello.version_min} to {hello.version_max}, "
                f"this server {VERSION_MIN} to {VERSION_MAX}; upgrade the older side"
            )

    def _plan(self, reader: ServedReader, message: Read) -> ChunkPlan:
        """What a reader asks for, checked.

        Raises:
            ProtocolError, TransferError: it may not be served.
        """
        if message.transfer in reader.reads:
            raise ProtocolError(f"transfer {message.transfer} is under way already")
        if len(reader.reads) >= MAX_READS:
            raise TransferError(f"{MAX_READS} reads of this reader are under way already")
        return check_chunks(*decode_read(message), self._regions.served_nbytes)

    def _silent_longest(self, readers: Iterable[ReaderT]) -> ReaderT:
        """Who goes when another one comes: whoever reads nothing, and was heard of last."""
        return min(readers, key=lambda known: (bool(known.reads), known.heard))

    def _refusal(self, transfer: int | None, error: KVFerryError) -> bytes:
        """Counts a refusal; returns the message that says so."""
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th …: no flood of log lines
            logger.warning("refused message number %d: %s", self.refused, error)
        return encode(Refused(transfer, type(error).__name__, str(error)[:2000]))
