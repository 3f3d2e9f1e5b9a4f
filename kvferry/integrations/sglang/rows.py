"""The rows that SGLang's prefill server hands to the decode server beside the KV cache.

A row has the first token of the answer, its log-probabilities, counts of cached tokens and, behind
them, the bootstrap room: SGLang's decode server takes a row only when the room is in it. A row
travels in the note of a lease, so it comes with the whole prompt. It is written when the load
counts, on the thread that looks for the room. The note of a server of another kind has only the
first token (:mod:`kvferry.integrations.first_token`).
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import msgspec

from kvferry.control.messages import MAX_NOTE_BYTES
from kvferry.errors import ConfigError, DecodeError, TransferError
from kvferry.integrations.first_token import FirstToken

_encode = msgspec.msgpack.encode
_decoder = msgspec.msgpack.Decoder(tuple[bytes, ...])
_HEADER_BYTES = 64
"""Number of bytes of a note beside the rows."""


class Rows:
    """The buffers of rows of one engine, all in host memory."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        """Args:
        addresses: address of each buffer, in SGLang's order.
        sizes: number of bytes of a row of each buffer.

        Raises:
            ConfigError: a row is too long for a note.
        """
        self._addresses = tuple(addresses)
        self._sizes = tuple(sizes)
        if sum(sizes) + _HEADER_BYTES > MAX_NOTE_BYTES:
            raise ConfigError(
                f"metadata buffers: a row has {sum(sizes)} bytes, and a note has at most "
                f"{MAX_NOTE_BYTES - _HEADER_BYTES}; leave optional buffers out"
            )

    def read(self, index: int) -> bytes:
        """The row ``index`` of all buffers, as a note."""
        parts = zip(self._addresses, self._sizes, strict=True)
        return _encode([ctypes.string_at(at + index * size, size) for at, size in parts])

    def check(self, note: bytes) -> tuple[bytes, ...]:
        """The parts of a note.

        Raises:
            DecodeError: the bytes are no note of this module.
            TransferError: the other server has other buffers.
        """
        try:
            parts = _decoder.decode(note)
        except msgspec.DecodeError as error:
            raise DecodeError(f"note: it holds no rows of metadata: {error}") from error
        theirs = tuple(len(part) for part in parts)
        if theirs != self._sizes:
            raise TransferError(
                f"metadata buffers: rows of prefill have {theirs} bytes, here they have "
                f"{self._sizes}; give both servers the same options "
                "(--disaggregation-enable-kv-checksum, SGLANG_ENABLE_DISAGG_SAMPLING_MASK)"
            )
        return parts

    def write(self, index: int, parts: Sequence[bytes]) -> None:
        """Writes the parts of a note into the row ``index``, in SGLang's order."""
        for at, size, part in zip(self._addresses, self._sizes, parts, strict=True):
            ctypes.memmove(at + index * size, part, size)


def write_first_token(buffers: Any, index: int, note: bytes, room: int) -> None:
    """Writes the row ``index`` for a prompt from a server of another kind.

    Args:
        buffers: SGLang's buffers of rows.
        index: index of the row.
        note: note of the lease, with the first token of the answer.
        room: number of the bootstrap room, written last.

    Raises:
        DecodeError: the note holds no first token.
    """
    buffers.output_ids[index, 0] = FirstToken.of(note).token_id
    buffers.cached_tokens[index] = 0
    buffers.bootstrap_room[index, 0] = room
