"""The first token of an answer, for the engine that samples the others.

An engine that computes the last token of a prompt itself needs no such token. An engine that cannot
compute a prompt needs the first token beside the KV. If the source is a server of another kind, the
source writes the token into the note of the lease; so the token comes with the whole prompt.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

from kvferry.control.tickets import NOTE_PARAMETER
from kvferry.decoding import decode


class FirstToken(msgspec.Struct, frozen=True, kw_only=True, tag="first_token"):
    """The first token of an answer, as a note of a lease."""

    token_id: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    """Id of the token that the source has sampled."""

    @classmethod
    def of(cls, note: bytes) -> "FirstToken":
        """Decodes a note.

        Raises:
            DecodeError: the bytes are no note of this kind.
        """
        return decode(_decoder, note, "note of a first token")

    @property
    def note(self) -> bytes:
        """The bytes of the note."""
        return _encode(self)


def is_wanted(kv_transfer_params: Mapping[str, Any] | None) -> bool:
    """Whether the target of a request needs the first token of the answer from the source."""
    return bool((kv_transfer_params or {}).get(NOTE_PARAMETER))


_encode = msgspec.msgpack.encode
_decoder: msgspec.msgpack.Decoder[FirstToken] = msgspec.msgpack.Decoder(FirstToken)
