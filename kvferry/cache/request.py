"""The part of a request that the cache needs, and the chained hashes of its blocks.

The key of a block is a hash of the block's tokens and of everything before the block. The hash of
block ``i`` is ``sha256(hash of block i-1, tokens of block i, images in block i)``. Block 0 follows
a root hash of all other content that must agree (the cache salt, the LoRA adapter). "Images" means
multimodal inputs of any kind. All placeholder tokens are alike, so the hash of a block that
overlaps an input also contains the input's identifier and position. Therefore equal hashes mean
equal prefixes, and a comparison of 32 bytes replaces a comparison of all tokens before.

The seed is a constant, so that every process of every engine computes the same hashes without a
setting. The hash must be cryptographic, because the salt separates tenants, and tenants must not be
able to build collisions. This needs no secret seed.
"""

import hashlib
import operator
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, SupportsIndex

import msgspec

HASH_BYTES = 32
"""Number of bytes of a block hash."""

_DOMAIN = "kvferry.block-hash.1"  # change this when the input of the hash changes


class MultiModalInput(msgspec.Struct, frozen=True):
    """An image, a sound or a video in a prompt: its content and its position."""

    identifier: str
    """Hash of the content; equal content has an equal identifier in every process."""
    offset: int
    """Position of the first token of the input."""
    length: int
    """Number of tokens of the input."""


def chain_root(cache_salt: str | None = None, lora_name: str | None = None) -> bytes:
    """The hash that block 0 follows; requests with different roots share no block.

    >>> chain_root() == chain_root("tenant-a")
    False
    """
    return hashlib.sha256(msgspec.msgpack.encode((_DOMAIN, cache_salt, lora_name))).digest()


def overlapping(
    mm_inputs: Sequence[MultiModalInput], first_token: int, last_token: int
) -> tuple[tuple[str, int], ...]:
    """The inputs that overlap the tokens ``[first_token, last_token)``.

    >>> overlapping([MultiModalInput("cat", 6, 8)], 8, 12)
    (('cat', -2),)

    Returns:
        Identifier, and first token relative to ``first_token``, of each input, in the given order.
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
    """Appends the hashes of the full blocks of ``token_ids`` that ``chain`` does not contain yet.

    >>> chain = []
    >>> extend_chain(chain, chain_root(), [7, 8, 9, 10, 11], block_size=2)
    >>> len(chain)
    2

    Args:
        chain: hashes of the leading blocks, extended in place.
        root: :func:`chain_root` of the request.
        token_ids: all tokens of the request.
        block_size: number of tokens per block.
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
    """First token of a block → bytes of the overlapping inputs for the block's hash.

    The tokens of a block have a fixed number of bytes, so the bytes after them need no delimiter.
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
    """The members of a request that :class:`~kvferry.cache.KVCacheManager` needs.

    An engine's own request class may be any class with these members that compares by identity and
    allows weak references (the default of Python classes, but not of slotted classes or msgspec
    structs). :class:`Request` is a complete class to inherit from.
    """

    @property
    def request_id(self) -> str:
        """Id, unique among the requests with blocks of the same manager."""

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far, without drafts."""

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is in the cache; the scheduler maintains this number."""

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of prompt logprobs wanted. They need every prompt token computed, so no hit is
        used.
        """

    def hash_blocks(self, block_size: int) -> Sequence[bytes]:
        """Chained hashes of all full blocks of the tokens so far.

        Raises:
            ValueError: the request is hashed with another block size already.
        """

    # The other members are read only if KV cache events are enabled.

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens so far."""

    @property
    def lora_name(self) -> str | None:
        """Name of the LoRA adapter of the request."""

    @property
    def hash_block_size(self) -> int | None:
        """Number of tokens per block hash; ``None`` until the request is hashed."""

    def extra_keys(self, first_token: int, last_token: int) -> tuple[Any, ...] | None:
        """Content besides tokens in the hash of a block of these tokens; ``None`` if empty."""


class Request:
    """A sequence of tokens in progress: the prompt, the output so far, and their block hashes.

    Args:
        request_id: id, unique among the live requests of an engine.
        prompt_token_ids: the prompt, at least a single token.
        cache_salt: requests share blocks only with requests of the same salt.
        lora_name: name of the LoRA adapter; requests share blocks only with requests of the same
            adapter.
        mm_inputs: multimodal inputs, each with ``identifier``, ``offset`` and ``length``, see
            :class:`~kvferry.cache.MultiModalInput`. Requests with equal text share only the blocks
            before the first differing input.
        prompt_logprobs: number of logprobs wanted per prompt token; if given, the prefix cache is
            not read.
        hash_block_size: number of tokens per block hash. If given, blocks are hashed now and
            whenever tokens are appended; otherwise from the first use by a manager on.

    Raises:
        ValueError: the prompt is empty, the block size is below 1, a multimodal input lies outside
            the prompt or has no identifier, or a token id is not an integer in ``[0, 2**32)``
            (found when the token is hashed).
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
        """Multimodal inputs, sorted by offset."""
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
        """Number of prompt and output tokens so far."""
        return len(self._all_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of tokens of the prompt."""
        return len(self.prompt_token_ids)

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Prompt and output tokens so far; a live view; read only."""
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
        """Number of tokens per block hash; ``None`` until the request is hashed."""
        return self._hash_block_size

    def extra_keys(self, first_token: int, last_token: int) -> tuple[Any, ...] | None:
        """Content besides tokens in the hash of a block of these tokens; ``None`` if there is none.

        The form is the form of KV cache events: the LoRA adapter, (identifier, offset within the
        block) of each multimodal input, and the cache salt in the first block.
        """
        keys: list[Any] = [] if self.lora_name is None else [self.lora_name]
        keys += overlapping(self.mm_inputs, first_token, last_token)
        if first_token == 0 and self.cache_salt is not None:
            keys.append(self.cache_salt)
        return tuple(keys) or None

    def append_output_token_ids(self, token_ids: SupportsIndex | Iterable[int]) -> None:
        """Appends an output token, or several output tokens.

        Raises:
            ValueError: a token id is not an integer in ``[0, 2**32)`` (found when its block is
                hashed).
        """
        if isinstance(token_ids, int):
            self._all_token_ids.append(token_ids)
        elif isinstance(token_ids, Iterable):
            self._all_token_ids.extend(token_ids)
        else:
            self._all_token_ids.append(operator.index(token_ids))  # for example NumPy's integers
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
        # The usual call adds a token to a block that stays unfilled; this call must stay cheap.
        if len(self._all_token_ids) // block_size > len(self._block_hashes):
            root = chain_root(self.cache_salt, self.lora_name)
            extend_chain(self._block_hashes, root, self._all_token_ids, block_size, self.mm_inputs)


def _checked_inputs(
    request_id: str, mm_inputs: Sequence[MultiModalInput], num_prompt_tokens: int
) -> tuple[MultiModalInput, ...]:
    """The inputs sorted by offset, as own objects, because the caller may change the given objects.

    Raises:
        ValueError: an input does not lie within the prompt, or has no identifier.
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
