"""Full attention: every block is kept to the end."""

from collections.abc import Sequence

from kvferry.cache.blocks import KVCacheBlock
from kvferry.cache.single_type.base import SingleTypeManager
from kvferry.cache.specs import KVCacheSpec


class FullAttentionManager(SingleTypeManager):
    """Every token needs all before it: a hit is an unbroken run from the first block on."""

    def find_longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, num_known_tokens: int
    ) -> list[KVCacheBlock]:
        """See :meth:`SingleTypeManager.find_longest_hit`. Left to right, up to the first miss."""
        stride = self._hash_stride
        most = max_tokens // self.block_size
        end = min(most + self._num_beyond, num_known_tokens // self.block_size)
        get = self.pool.cached_blocks(self.group_id).get
        # Calls `get` for one hash after the other until it returns None; no step in Python.
        lookups = map(get, block_hashes[stride - 1 : end * stride : stride])
        hits = list(iter(lookups.__next__, None))
        del hits[self._aligned(max(0, min(most, len(hits) - self._num_beyond))) :]
        return hits


class SinkFullAttentionManager(FullAttentionManager):
    """Full attention over learnt tokens (sinks) before every request's own.

    The sinks' blocks are the first that the pool hands out: the attention finds them at the ids
    1, 2, ... They are nobody's, so they are in no table and never given back.
    """

    def _adopt(self, spec: KVCacheSpec) -> None:
        self.sink_blocks = self.pool.get_new_blocks(spec.num_reserved_blocks)
