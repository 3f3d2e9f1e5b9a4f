"""Requests, as far as the cache core knows them, and the chained hashes of their blocks.

The key of a block is the hash of everything before it and of its tokens.
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
from numbers import Integral
from typing import Any, Protocol

import msgspec

HASH_BYTES = 32
"""Size of a block hash."""

_DOMAIN = "kvferry.block-hash.1"  # change it when the input of the hash changes


class MultiModalInput(msgspec.Struct, frozen=True):
    """An image, a sound, a video in a prompt: where it lies, and what it is."""

    identifier: str
    """Hash of the content: equal content, equal identifier, in every process."""
    offset: int
    """First token that stands for it."""
    length: int
    """Number of tokens that stand for it."""


def chain_root(cache_salt: str | None = None, lora_name: str | None = None) -> bytes:
    """The hash that block 0 follows; requests of different roots share no block.

    >>> chain_root() == chain_root("tenant-a")
    False
    """
    return hashlib.sha256(msgspec.msgpack.encode((_DOMAIN, cache_salt, lora_name))).digest()


def overlapping(
    mm_inputs: Sequence[MultiModalInput], first_token: int, last_token: int
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
    mm_inputs: Sequence[MultiModalInput] = (),
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
    mm_inputs: Sequence[MultiModalInput], first: int, last: int, block_size: int
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


class CacheRequest(Protocol):
    """What :class:`~kvferry.cache.KVCacheManager` needs of a request.

    An engine's own request class may be anything with these members that compares by identity
    and takes weak references (the default of Python classes, but not of slotted ones or msgspec
    structs). :class:`Request` is a complete one to inherit from.
    """

    @property
    def request_id(self) -> str:
        """Unique among the requests that hold blocks of one manager."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far; drafts excluded."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in the cache; the scheduler keeps it."""

    @property
    def prompt_logprobs(self) -> int | None:
        """Prompt logprobs wanted; they need every prompt token computed, so no hit is used."""

    def hash_blocks(self, block_size: int) -> Sequence[bytes]:
        """Chained hashes of all full blocks of the tokens so far.

        Raises:
            ValueError: the request is hashed with another block size already.
        """

    # The rest is read only when KV cache events are wanted.

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens so far."""

    @property
    def lora_name(self) -> str | None:
        """LoRA adapter that it runs with."""

    @property
    def hash_block_size(self) -> int | None:
        """Tokens per block hash; ``None`` until it is hashed."""

    def extra_keys(self, first_token: int, last_token: int) -> tuple[Any, ...] | None:
        """What the hash of a block of these tokens holds beside tokens; ``None`` if nothing."""


class Request:
    """A sequence of tokens under way: the prompt, the output so far, and their block hashes.

    Args:
        request_id: unique among the live requests of an engine.
        prompt_token_ids: the prompt, at least one token.
        cache_salt: requests share blocks only with requests of the same salt.
        lora_name: name of the LoRA adapter; likewise.
        mm_inputs: multimodal inputs, each with ``identifier``, ``offset`` and ``length``, see
            :class:`~kvferry.cache.MultiModalInput`. Requests of equal text share only the blocks
            before the first input in which they differ.
        prompt_logprobs: number of logprobs wanted per prompt token; with it the prefix cache is
            not read.
        hash_block_size: tokens per block hash. When given, blocks are hashed here and now and as
            tokens are appended; otherwise from the first use by a manager on.

    Raises:
        ValueError: an empty prompt, a block size below 1, a multimodal input that is not within
            the prompt or has no identifier, or a token id that is not an integer in
            ``[0, 2**32)`` (found when it is hashed).
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        cache_salt: str | None = None,
        lora_name: str | None = None,
        mm_inputs: Sequence[MultiModalInput] = (),
        prompt_logprobs: int | None = None,
        hash_block_size: int | None = None,
    ) -> None:
        if not len(prompt_token_ids):
            raise ValueError(
                f"request {request_id!r}: the prompt is empty; give at least one token"
            )
        self.request_id = request_id
        self.prompt_token_ids: Sequence[int] = list(prompt_token_ids)
        self.cache_salt = cache_salt
        self.lora_name = lora_name
        self.mm_inputs = _checked_inputs(request_id, mm_inputs, len(prompt_token_ids))
        """By offset."""
        self.prompt_logprobs = prompt_logprobs
        self.num_computed_tokens = 0
        self._all_token_ids = list(prompt_token_ids)
        self._hash_block_size: int | None = None
        self._block_hashes: list[bytes] = []
        if hash_block_size is not None:
            self.hash_blocks(hash_block_size)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.request_id!r}, tokens={self.num_tokens}, "
            f"computed={self.num_computed_tokens})"
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self._all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens so far; a live view, not to be written."""
        return self._all_token_ids

    @property
    def output_token_ids(self) -> Sequence[int]:
        """Output tokens so far, as a copy."""
        return self._all_token_ids[len(self.prompt_token_ids) :]

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Hashes of the full blocks; empty until the request is hashed. A live view."""
        return self._block_hashes

    @property
    def hash_block_size(self) -> int | None:
        """Tokens per block hash; ``None`` until it is hashed."""
        return self._hash_block_size

    def extra_keys(self, first_token: int, last_token: int) -> tuple[Any, ...] | None:
        """What the hash of a block of these tokens holds beside tokens; ``None`` if nothing.

        The form that KV cache events have: the LoRA adapter, (identifier, offset within the
        block) of each multimodal input, the cache salt in the first block.
        """
        keys: list[Any] = [] if self.lora_name is None else [self.lora_name]
        keys += overlapping(self.mm_inputs, first_token, last_token)
        if first_token == 0 and self.cache_salt is not None:
            keys.append(self.cache_salt)
        return tuple(keys) or None

    def append_output_token_ids(self, token_ids: int | Integral | Sequence[int]) -> None:
        """Appends one output token, or several.

        Raises:
            ValueError: a token id is not an integer in ``[0, 2**32)`` (found when its block is
                hashed).
        """
        if isinstance(token_ids, int):
            self._all_token_ids.append(token_ids)
        elif isinstance(token_ids, Integral):  # NumPy's integers, for one
            self._all_token_ids.append(int(token_ids))
        else:
            self._all_token_ids.extend(token_ids)
        if self._hash_block_size is not None:
            self._extend_hashes(self._hash_block_size)

    def hash_blocks(self, block_size: int) -> Sequence[bytes]:
        """See :meth:`CacheRequest.hash_blocks`. The first call fixes the block size."""
        if self._hash_block_size != block_size:
            self._start_hashing(block_size)
        return self._block_hashes

    def _start_hashing(self, block_size: int) -> None:
        if self._hash_block_size is not None:
            raise ValueError(
                f"request {self.request_id!r}: hashed per {self._hash_block_size} tokens, and the "
                f"manager's block size is {block_size}; create it with "
                f"hash_block_size={block_size} or without one"
            )
        if block_size < 1:
            raise ValueError(f"hash_block_size: {block_size} is less than 1")
        self._extend_hashes(block_size)
        self._hash_block_size = block_size

    def _extend_hashes(self, block_size: int) -> None:
        # The common call, one token into a block that it does not fill, must stay cheap.
        if len(self._all_token_ids) // block_size > len(self._block_hashes):
            root = chain_root(self.cache_salt, self.lora_name)
            extend_chain(self._block_hashes, root, self._all_token_ids, block_size, self.mm_inputs)


def _checked_inputs(
    request_id: str, mm_inputs: Sequence[MultiModalInput], num_prompt_tokens: int
) -> tuple[MultiModalInput, ...]:
    """The inputs by offset, as values of our own: the caller's objects may change.

    Raises:
        ValueError: an input cannot lie where it says.
    """
    for each in mm_inputs:
        end = each.offset + each.length
        if not each.identifier or not 0 <= each.offset < end <= num_prompt_tokens:
            raise ValueError(
                f"request {request_id!r}: mm_inputs: {each.identifier!r} at tokens "
                f"[{each.offset}, {end}) of a prompt of {num_prompt_tokens}; give a non-empty "
                "identifier, and tokens of the prompt, one at least"
            )
    return tuple(
        MultiModalInput(each.identifier, each.offset, each.length)
        for each in sorted(mm_inputs, key=lambda each: (each.offset, each.identifier))
    )
