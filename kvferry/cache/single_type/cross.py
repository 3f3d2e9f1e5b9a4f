"""Cross attention: the blocks hold an encoder's output, all of it, and nobody else's."""

from collections.abc import Sequence
from typing import ClassVar

from kvferry.cache.blocks import KVCacheBlock
from kvferry.cache.request import CacheRequest
from kvferry.cache.single_type.base import NEVER, GroupTable, Limits, Room, SingleTypeManager


class CrossAttentionManager(SingleTypeManager):
    """Room for the encoder's tokens, given once, and kept to the end of the request.

    Never shared: block hashes stand for the decoder's tokens, and say nothing of the encoder's
    input. For the same reason no other group of such a model has hits.
    """

    is_cacheable: ClassVar[bool] = False
    is_token_sharded: ClassVar[bool] = False

    def find_longest_hit(
        self, block_hashes: Sequence[bytes], max_tokens: int, num_known_tokens: int
    ) -> list[KVCacheBlock]:
        """None, ever."""
        return []

    def check_hits(
        self, hits: Sequence[KVCacheBlock], num_tokens: int, block_hashes: Sequence[bytes]
    ) -> None:
        """Refuses any hit.

        Raises:
            ValueError: there are some.
        """
        if hits:
            raise ValueError(
                f"new_computed_blocks: {len(hits)} blocks for the cross attention of group "
                f"{self.group_id}, which shares none; give what get_computed_blocks returned"
            )

    def count_missing(self, table: GroupTable, room: Room, num_hits: int) -> int:
        """New blocks for the encoder's tokens."""
        return max(0, self.num_required(room.num_encoder_tokens) - len(table.blocks))

    def count_missing_for_all(
        self, table: GroupTable, room: Room, num_hits: int, num_tokens: int, max_step_tokens: int
    ) -> int:
        """The same: they come at once."""
        return self.count_missing(table, room, num_hits)

    def add_hits(self, table: GroupTable, hits: Sequence[KVCacheBlock], room: Room) -> None:
        """Nothing: there are none."""

    def grow(self, table: GroupTable, room: Room) -> list[KVCacheBlock]:
        """Gives a table room for the encoder's tokens."""
        new_blocks = self.pool.get_new_blocks(self.count_missing(table, room, 0))
        table.blocks.extend(new_blocks)
        return new_blocks

    def cache_blocks(self, table: GroupTable, request: CacheRequest, num_tokens: int) -> None:
        """Nothing is ever cached."""

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """None for the decoder's tokens; the encoder's are asked for by their own number."""
        return 0

    def limits(self, table: GroupTable) -> Limits:
        """The decoder's tokens change nothing."""
        return Limits(NEVER, 0, NEVER, NEVER)
