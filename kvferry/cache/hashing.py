"""Chained block hashes: the key of a block is the hash of everything before it and of its tokens.

The hash of block ``i`` is ``sha256(hash of block i-1, tokens of block i, images in block i)``;
block 0 follows a root that holds what else must agree (the cache salt, the LoRA adapter). Images
stand for multimodal inputs of any kind: all placeholder tokens look alike, so the blocks that one
overlaps also hash its identifier and where it begins. Equal hashes therefore mean equal prefixes,
and one comparison of 32 bytes stands for a comparison of all that came before.

The seed is a constant: every process of every engine computes the same hashes, without a setting.
A cryptographic hash is needed because the salt separates tenants, who must not be able to build
collisions; it needs no secret seed for that.
"""

import hashlib
import struct
from collections.abc import Sequence
from typing import Protocol

import msgspec

HASH_BYTES = 32
"""Size of a block hash."""

_DOMAIN = "kvferry.block-hash.1"  # change it when the input of the hash changes


class MultiModalSpan(Protocol):
    """Where a multimodal input lies in the prompt, and what it is."""

    @property
    def identifier(self) -> str:
        """Hash of the content: equal content, equal identifier, in every process."""

    @property
    def offset(self) -> int:
        """First token that stands for it."""

    @property
    def length(self) -> int:
        """Number of tokens that stand for it."""


class MultiModalInput(msgspec.Struct, frozen=True):
    """An image, a sound, a video in a prompt. See :class:`MultiModalSpan`."""

    identifier: str
    offset: int
    length: int


def chain_root(cache_salt: str | None = None, lora_name: str | None = None) -> bytes:
    """The hash that block 0 follows; requests of different roots share no block.

    >>> chain_root() == chain_root("tenant-a")
    False
    """
    return hashlib.sha256(msgspec.msgpack.encode((_DOMAIN, cache_salt, lora_name))).digest()


def overlapping(
    mm_inputs: Sequence[MultiModalSpan], first_token: int, last_token: int
) -> tuple[tuple[str, int], ...]:
    """The inputs that lie in part in the tokens ``[first_token, last_token)``.

    >>> overlapping([MultiModalInput("cat", 6, 8)], 8, 12)
    (('cat', -2),)

    Returns:
        Identifier and first token relative to ``first_token`` of each, in the order given.
    """
    return tuple(
        (each.identifier, each.offset - first_token)
        for each in mm_inputs
        if each.offset < last_token and each.offset + each.length > first_token
    )


def extend_chain(
    chain: list[bytes],
    root: bytes,
    token_ids: Sequence[int],
    block_size: int,
    mm_inputs: Sequence[MultiModalSpan] = (),
) -> None:
    """Appends the hashes of the full blocks of ``token_ids`` that ``chain`` does not cover yet.

    >>> chain = []
    >>> extend_chain(chain, chain_root(), [7, 8, 9, 10, 11], block_size=2)
    >>> len(chain)
    2

    Args:
        chain: hashes of the leading blocks, extended in place.
        root: :func:`chain_root` of the request.
        token_ids: all tokens of the request.
        block_size: tokens per block.
        mm_inputs: multimodal inputs of the request, always in the same order.

    Raises:
        ValueError: a token id is not an integer in ``[0, 2**32)``.
    """
    first = len(chain) * block_size
    last = len(token_ids) // block_size * block_size
    if first >= last:
        return
    try:
        data = memoryview(struct.pack(f"<{last - first}I", *token_ids[first:last]))
    except struct.error as error:
        raise ValueError(
            f"token ids {first} to {last - 1}: {error}; a token id is an integer in [0, 2**32)"
        ) from error
    parent = chain[-1] if chain else root
    sha256 = hashlib.sha256
    step = 4 * block_size
    images = _images_by_start(mm_inputs, first, last, block_size)
    if images:
        for start in range(0, len(data), step):
            content = data[start : start + step]
            parent = sha256(parent + content + images.get(start // 4 + first, b"")).digest()
            chain.append(parent)
        return
    for start in range(0, len(data), step):
        parent = sha256(parent + data[start : start + step]).digest()
        chain.append(parent)


def _images_by_start(
    mm_inputs: Sequence[MultiModalSpan], first: int, last: int, block_size: int
) -> dict[int, bytes]:
    """First token of a block → what its hash takes in of the inputs that overlap it.

    Tokens of a block take a fixed number of bytes, so what follows them needs no delimiter.
    """
    starts = {
        start
        for each in mm_inputs
        for start in range(
            max(first, each.offset // block_size * block_size),
            min(last, each.offset + each.length),
            block_size,
        )
    }
    return {
        start: msgspec.msgpack.encode(overlapping(mm_inputs, start, start + block_size))
        for start in starts
    }
