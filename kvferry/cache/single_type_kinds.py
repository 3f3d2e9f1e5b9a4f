"""The differences between kinds of layers: a manager per KV cache group.

::

    full attention, MLA, sinks    all tokens are kept
    sliding windows and chunks    passed blocks are freed
    recurrent layers              the last state is kept
    cross attention               the encoder's output is kept
"""

from collections.abc import Sequence
from math import gcd
from typing import ClassVar

from kvferry.cache.block_pool import KVCacheBlock
from kvferry.cache.kv_cache_config import UniformTypeKVCacheSpecs
from kvferry.cache.request import CacheRequest
from kvferry.cache.single_type import NEVER, GroupTable, Limits, Room, SingleTypeManager
from kvferry.cache.specs import CrossAttentionSpec, FullAttentionSpec, KVCacheSpec
from kvferry.cache.specs_local import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec
from kvferry.topology.windows import computed_to_forget, first_kept_token


class FullAttentionManager(SingleTypeManager):
    """Every token needs all tokens before it: a hit is an unbroken run from the first block on."""

    def find_longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, num_known_tokens: int
    ) -> list[KVCacheBlock]:
        """See :meth:`SingleTypeManager.find_longest_hit`. Searches from left to right, up to the
        first miss.
        """
        stride = self._hash_stride
        most = max_tokens // self.block_size
        end = min(most + self._num_beyond, num_known_tokens // self.block_size)
        get = self.pool.cached_blocks(self.group_id).get
        # Calls `get` for each hash in turn until it returns None, without a Python loop.
        lookups = map(get, block_hashes[stride - 1 : end * stride : stride])
        hits = list(iter(lookups.__next__, None))
        del hits[self._aligned(max(0, min(most, len(hits) - self._num_beyond))) :]
        return hits


class WindowedManager(SingleTypeManager):
    """A token needs the tokens before it in its window, or in its chunk.

    A hit needs only the blocks with a token of its last window; null blocks represent the blocks
    before. If the window needs no token at all (at the start of a chunk, or with a window of 1), a
    hit needs no block either. Other managers of the field find the same hits, with two exceptions.
    They count a chunk that begins within a block as a hit although a part of it is missing; and
    they require a cached block for a window of 1, so they miss hits.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

    def _adopt(self, spec: KVCacheSpec) -> None:
        if isinstance(spec, ChunkedLocalAttentionSpec):
            self.attention_chunk_size = spec.attention_chunk_size
        else:
            assert isinstance(spec, SlidingWindowSpec)
            self.sliding_window = spec.sliding_window

    def first_kept(self, num_computed: int) -> int:
        """See :func:`~kvferry.topology.windows.first_kept_token`."""
        return first_kept_token(
            num_computed,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )

    def forgets_at(self, num_tokens: int) -> int:
        """See :func:`~kvferry.topology.windows.computed_to_forget`."""
        num_computed = computed_to_forget(
            num_tokens,
            sliding_window=self.sliding_window,
            attention_chunk_size=self.attention_chunk_size,
        )
        return NEVER if num_computed is None else num_computed

    def find_longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, num_known_tokens: int
    ) -> list[KVCacheBlock]:
        """See :meth:`SingleTypeManager.find_longest_hit`. Searches from right to left, window by
        window.

        After a miss, the next candidate ends at the first block that its window lacks. Windows of
        shorter hits begin no later, so every hit that ends after the missing block also needs this
        block.
        """
        size, beyond = self.block_size, self._num_beyond
        end = self._aligned(max(0, min(max_tokens // size, num_known_tokens // size - beyond)))
        while end > 0:
            first = self.first_kept(end * size) // size
            found = self._look_up(block_hashes, first, end + beyond)
            if None not in found:
                hits = [self.pool.null_block] * first
                hits += [block for block in found[: end - first] if block is not None]
                return hits
            end = self._aligned(max(0, first + found.index(None) - beyond))
        return []

    def _look_up(
        self, block_hashes: Sequence[bytes], first: int, end: int
    ) -> list[KVCacheBlock | None]:
        """The cached blocks of the table entries ``first`` to ``end - 1``."""
        stride = self._hash_stride
        get = self.pool.cached_blocks(self.group_id).get
        return list(map(get, block_hashes[(first + 1) * stride - 1 : end * stride : stride]))

    def is_reachable(self, index: int) -> bool:
        """Whether any hit could need the block ``index`` of a table.

        Of all hits that contain the block, the shortest hit needs the most blocks so far back.
        """
        size, alignment = self.block_size, self._rules.alignment
        shortest = -(-(index + 1) * size // alignment) * alignment
        # A hit without tokens needs no proof.
        is_after_hit = bool(index and self._num_beyond) and index * size % alignment == 0
        return is_after_hit or self.first_kept(shortest) // size <= index

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """See :meth:`SingleTypeManager.peak_blocks`.

        In the worst case, the window before a step begins with the last token of a block. The
        request then needs this block and the blocks of the ``sliding_window - 2 + max_step_tokens``
        tokens after it. With chunks, in the worst case all tokens of a chunk but the last are
        computed before the step, and the chunk begins as late in a block as chunks can.
        """
        size = self.block_size
        if self.attention_chunk_size is not None:
            latest_start = size - gcd(self.attention_chunk_size, size)
            span = latest_start + self.attention_chunk_size - 1 + max_step_tokens
        else:
            assert self.sliding_window is not None
            span = size + self.sliding_window - 2 + max_step_tokens
        return min(self.num_required(num_tokens), -(-span // size))


class MambaManager(WindowedManager):
    """A token needs the state after the token before it, which corresponds to a window of two
    tokens.

    Entry ``i`` of a table is the state after the last token of block ``i``, or after the last token
    so far. The last ``num_speculative_blocks`` entries take the states of drafts. A step writes the
    state at the end of each block that it fills. The next step gives back all these states but the
    last; they stay hits. A hit needs only the last state. (This is vLLM's mode ``all``. In mode
    ``none``, a single block holds a whole request, so its state is updated in place.)
    """

    is_token_sharded: ClassVar[bool] = False
    sliding_window = 2

    def _adopt(self, spec: KVCacheSpec) -> None:
        assert isinstance(spec, MambaSpec)
        self._num_speculative = spec.num_speculative_blocks
        self._num_beyond = 0  # drafters have no recurrent layers
        self._unwritten: set[KVCacheBlock] | None = None
        """States that the current step writes; ``None`` if no caller reports when steps begin."""

    def new_step_starts(self) -> None:
        """Records that all states hashed so far are written.

        A step computes keys and values of all requests before it reads any. But a recurrent layer
        reads its first state before another request's states are written. Therefore a state cannot
        be a hit in the step that writes it; another request then continues from an older state.
        """
        self._unwritten = set()

    def num_required(self, num_slots: int) -> int:
        """Number of entries of a table for ``num_slots`` tokens and the states of drafts."""
        return -(-num_slots // self.block_size) + self._num_speculative

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """See :meth:`SingleTypeManager.peak_blocks`: the last state, and the states of a step."""
        in_step = 1 + -(-max_step_tokens // self.block_size) + self._num_speculative
        return min(self.num_required(num_tokens), in_step)

    def first_whole_block(self, first_token: int) -> int:
        """First block that a load from ``first_token`` on fills: a state is always loaded whole."""
        return first_token // self.block_size

    def cache_blocks(self, table: GroupTable, request: CacheRequest, num_tokens: int) -> None:
        """Makes the states at the ends of full blocks hits for later requests."""
        first = table.num_cached
        super().cache_blocks(table, request, num_tokens)
        if self._unwritten is not None:
            self._unwritten.update(table.blocks[first : table.num_cached])

    def limits(self, table: GroupTable) -> Limits:
        """The limits within which a table does not change."""
        limits = super().limits(table)
        num_slots = (len(table.blocks) - self._num_speculative) * self.block_size
        return limits._replace(num_slots=num_slots)

    def _look_up(
        self, block_hashes: Sequence[bytes], first: int, end: int
    ) -> list[KVCacheBlock | None]:
        found = super()._look_up(block_hashes, first, end)
        if not self._unwritten:
            return found
        return [None if block in self._unwritten else block for block in found]


class CrossAttentionManager(SingleTypeManager):
    """Room for the encoder's tokens, given once, and kept to the end of the request.

    These blocks are never shared: block hashes cover the decoder's tokens, but not the encoder's
    input. For the same reason, no other group of such a model has hits.
    """

    is_cacheable: ClassVar[bool] = False
    is_token_sharded: ClassVar[bool] = False

    def find_longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, num_known_tokens: int
    ) -> list[KVCacheBlock]:
        """Always empty: this kind has no hits."""
        return []

    def check_hits(
        self, hits: Sequence[KVCacheBlock], num_tokens: int, block_hashes: Sequence[bytes]
    ) -> None:
        """Refuses any hit.

        Raises:
            ValueError: there are hits.
        """
        if hits:
            raise ValueError(
                f"new_computed_blocks: {len(hits)} blocks for the cross attention of group "
                f"{self.group_id}, which shares none; give what get_computed_blocks returned"
            )

    def count_missing(self, table: GroupTable, room: Room, num_hits: int) -> int:
        """Number of new blocks for the encoder's tokens."""
        return max(0, self.num_required(room.num_encoder_tokens) - len(table.blocks))

    def count_missing_for_all(
        self, table: GroupTable, room: Room, num_hits: int, num_tokens: int, max_step_tokens: int
    ) -> int:
        """See :meth:`count_missing`: the encoder's tokens get all blocks at once."""
        return self.count_missing(table, room, num_hits)

    def grow(self, table: GroupTable, room: Room) -> list[KVCacheBlock]:
        """Gives a table room for the encoder's tokens."""
        new_blocks = self.pool.get_new_blocks(self.count_missing(table, room, 0))
        table.blocks.extend(new_blocks)
        return new_blocks

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """Always 0: the decoder's tokens need no blocks, and the encoder's tokens are counted
        separately.
        """
        return 0

    def limits(self, table: GroupTable) -> Limits:
        """Infinite limits: the decoder's tokens change nothing."""
        return Limits(NEVER, 0, NEVER, NEVER)


MANAGERS: dict[type[KVCacheSpec], type[SingleTypeManager]] = {
    FullAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: WindowedManager,
    ChunkedLocalAttentionSpec: WindowedManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
}
"""Class of a spec → manager for specs of this class and of its subclasses."""


def layer_spec(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec that decides which blocks a group's requests hold; the same for all its layers."""
    return spec.first_spec if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def manager_kind(spec: KVCacheSpec, group_id: int) -> type[SingleTypeManager]:
    """The manager class for a group with layers of this spec.

    Raises:
        ValueError: no manager serves this kind of spec.
    """
    for base in type(spec).__mro__:
        kind = MANAGERS.get(base)
        if kind is not None:
            return kind
    raise ValueError(
        f"kv_cache_groups: group {group_id} has a {type(spec).__name__}, which no manager "
        f"serves; supported: {', '.join(known.__name__ for known in MANAGERS)}. Layers that keep "
        "nothing, as encoder-only attention, belong to no group"
    )
