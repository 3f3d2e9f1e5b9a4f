"""Chained block hashes: the key of a block is the hash of everything before it and of its tokens.

The hash of block ``i`` is ``sha256(hash of block i-1, tokens of block i)``; block 0 follows a root
that holds what else must agree (the cache salt, the LoRA adapter). Equal hashes therefore mean
equal prefixes, and one comparison of 32 bytes stands for a comparison of all tokens so far.

Nothing random goes in: every process of every engine computes the same hashes. A cryptographic
hash is needed because the salt separates tenants, who must not be able to build collisions.
"""

import hashlib
import struct
from collections.abc import Sequence

import msgspec

HASH_BYTES = 32
"""Size of a block hash."""

_DOMAIN = "kvferry.block-hash.1"  # change it when the input of the hash changes


def chain_root(cache_salt: str | None = None, lora_name: str | None = None) -> bytes:
    """The hash that block 0 follows; requests of different roots share no block.

    >>> chain_root() == chain_root("tenant-a")
    False
    """
    return hashlib.sha256(msgspec.msgpack.encode((_DOMAIN, cache_salt, lora_name))).digest()


def extend_chain(
    chain: list[bytes], root: bytes, token_ids: Sequence[int], block_size: int
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
    for start in range(0, len(data), step):
        parent = sha256(parent + data[start : start + step]).digest()
        chain.append(parent)
