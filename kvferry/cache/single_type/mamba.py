"""Recurrent layers: a block holds the state after its last token."""

from collections.abc import Sequence
from typing import ClassVar

from kvferry.cache.blocks import KVCacheBlock
from kvferry.cache.request import CacheRequest
from kvferry.cache.single_type.base import GroupTable, Limits
from kvferry.cache.single_type.windowed import WindowedManager
from kvferry.cache.specs import KVCacheSpec
from kvferry.cache.specs_mamba import MambaSpec


class MambaManager(WindowedManager):
    """A token needs the state after the token before it, so it is a window of two tokens.

    Entry ``i`` of a table is the state after the last token of block ``i``, or after the last
    token so far; the last ``num_speculative_blocks`` entries take the states of drafts. A step
    writes the state at the end of each block that it fills; all but the last are given back in
    the next step, and stay hits. A hit needs the last state alone. (vLLM's mode ``all``. In mode
    ``none`` one block holds a whole request, so its state is updated in place.)
    """

    is_token_sharded: ClassVar[bool] = False
    sliding_window = 2

    def _adopt(self, spec: KVCacheSpec) -> None:
        assert isinstance(spec, MambaSpec)
        self._num_speculative = spec.num_speculative_blocks
        self._num_beyond = 0  # drafters have no recurrent layers
        self._unwritten: set[KVCacheBlock] | None = None
        """States that the step under way writes; ``None`` if nobody says when steps begin."""

    def new_step_starts(self) -> None:
        """What was hashed so far is written by now.

        A step computes keys and values of all requests before any is read, but a recurrent layer
        reads its first state before another request's are written. So a state cannot be a hit in
        the step that writes it; the request then goes on from an older one.
        """
        self._unwritten = set()

    def num_required(self, num_slots: int) -> int:
        """Entries of a table with room for ``num_slots`` tokens, the drafts' states included."""
        return -(-num_slots // self.block_size) + self._num_speculative

    def peak_blocks(self, num_tokens: int, max_step_tokens: int) -> int:
        """See :meth:`SingleTypeManager.peak_blocks`: the last state, and those of a step."""
        in_step = 1 + -(-max_step_tokens // self.block_size) + self._num_speculative
        return min(self.num_required(num_tokens), in_step)

    def first_whole_block(self, first_token: int) -> int:
        """First block that a load from ``first_token`` on fills: a state is loaded whole."""
        return first_token // self.block_size

    def cache_blocks(self, table: GroupTable, request: CacheRequest, num_tokens: int) -> None:
        """Makes the states at the ends of full blocks hits for later requests."""
        first = table.num_cached
        super().cache_blocks(table, request, num_tokens)
        if self._unwritten is not None:
            self._unwritten.update(table.blocks[first : table.num_cached])

    def limits(self, table: GroupTable) -> Limits:
        """Until when nothing is to be done to a table."""
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
