"""Layers that look back a bounded way: blocks are given back as the request moves on."""

from collections.abc import Sequence
from math import gcd

from kvferry.cache.blocks import KVCacheBlock
from kvferry.cache.single_type.base import NEVER, SingleTypeManager
from kvferry.cache.specs import KVCacheSpec
from kvferry.cache.specs_local import ChunkedLocalAttentionSpec, SlidingWindowSpec
from kvferry.topology.windows import computed_to_forget, first_kept_token


class WindowedManager(SingleTypeManager):
    """A window or a chunk, of one of which the subclass sets the size.

    A hit needs only the blocks that hold a token of its last window; null blocks stand for those
    before. Where the window needs no token at all (at the start of a chunk, or a window of 1), a
    hit needs no block either. The field finds the same hits, except where it is wrong or misses
    some: a chunk that begins within a block is a hit there although a part of it is missing, and
    with a window of 1 one cached block is asked for.
    """

    sliding_window: int | None = None
    attention_chunk_size: int | None = None

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
        """See :meth:`SingleTypeManager.find_longest_hit`. Right to left, window by window.

        After a miss the next candidate ends at the first block that its window lacks: windows of
        shorter hits begin no later, so every hit that ends beyond needs the missing block too.
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

        The shortest hit that holds the block needs most of the blocks so far back.
        """
        size, alignment = self.block_size, self._rules.alignment
        shortest = -(-(index + 1) * size // alignment) * alignment
        # A hit of no tokens needs no proof.
        is_after_hit = bool(index and self._num_beyond) and index * size % alignment == 0
        return is_after_hit or self.first_kept(shortest) // size <= index


class SlidingWindowManager(WindowedManager):
    """A token needs the ``sliding_window - 1`` tokens before it."""

    def _adopt(self, spec: KVCacheSpec) -> None:
        assert isinstance(spec, SlidingWindowSpec)
        self.sliding_window = spec.sliding_window

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """See :meth:`SingleTypeManager.peak_blocks`.

        At worst the window before a step begins with the last token of a block: that block, and
        the blocks of the ``sliding_window - 2 + max_step_tokens`` tokens after it.
        """
        assert self.sliding_window is not None
        after_first = self.sliding_window - 2 + max_step_tokens
        return min(self.num_required(num_tokens), 1 + -(-after_first // self.block_size))


class ChunkedLocalAttentionManager(WindowedManager):
    """A token needs those before it in its chunk."""

    def _adopt(self, spec: KVCacheSpec) -> None:
        assert isinstance(spec, ChunkedLocalAttentionSpec)
        self.attention_chunk_size = spec.attention_chunk_size

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """See :meth:`SingleTypeManager.peak_blocks`.

        At worst all of a chunk but its last token is computed before a step, and the chunk begins
        as late in a block as chunks can.
        """
        assert self.attention_chunk_size is not None
        latest_start = self.block_size - gcd(self.attention_chunk_size, self.block_size)
        span = latest_start + self.attention_chunk_size - 1 + max_step_tokens
        return min(self.num_required(num_tokens), -(-span // self.block_size))
