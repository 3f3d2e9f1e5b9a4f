"""Blocks, and the block lists that a scheduler sees."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, overload


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """One block of the pool. Written by :class:`~kvferry.cache.BlockPool` alone."""

    block_id: int
    """Index into the KV cache tensors; 0 is the null block."""
    ref_cnt: int = 0
    """Block tables that hold it; the null block keeps 1."""
    block_hash: bytes | None = None
    """Chained hash of its content once it is full and may be shared."""
    group_id: int = 0
    """KV cache group whose content it holds; read only while it is hashed."""
    prev: "KVCacheBlock" = field(init=False, repr=False)
    """Older neighbour in the free list; of meaning only while the block is hashed and free."""
    next: "KVCacheBlock" = field(init=False, repr=False)
    """Younger neighbour, likewise."""

    @property
    def is_null(self) -> bool:
        """Whether this is the null block, which stands for "no block"."""
        return self.block_id == 0


@dataclass(frozen=True, slots=True)
class KVCacheBlocks:
    """Blocks of one request, one list per KV cache group, in token order."""

    blocks: tuple[Sequence[KVCacheBlock], ...]

    def __add__(self, other: "KVCacheBlocks") -> "KVCacheBlocks":
        """These blocks, then those of ``other``, group by group.

        Raises:
            ValueError: the numbers of groups differ.
        """
        if len(self.blocks) != len(other.blocks):
            raise ValueError(
                f"blocks of {len(self.blocks)} and of {len(other.blocks)} KV cache groups cannot "
                "be added; both must come from one manager"
            )
        return KVCacheBlocks(
            tuple([*mine, *theirs] for mine, theirs in zip(self.blocks, other.blocks, strict=True))
        )

    @overload
    def get_block_ids(self, allow_none: Literal[False] = False) -> tuple[list[int], ...]: ...

    @overload
    def get_block_ids(self, allow_none: bool) -> tuple[list[int], ...] | None: ...

    def get_block_ids(self, allow_none: bool = False) -> tuple[list[int], ...] | None:
        """Block ids, one list per group; with ``allow_none``, ``None`` when there are none."""
        if allow_none and not any(self.blocks):
            return None
        return tuple([block.block_id for block in group] for group in self.blocks)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks without a hash: those whose content is still to come. No null blocks.

        Raises:
            ValueError: there is more than one group.
        """
        if len(self.blocks) != 1:
            raise ValueError(
                f"get_unhashed_block_ids: works on one KV cache group, not on {len(self.blocks)}; "
                "call get_unhashed_block_ids_all_groups"
            )
        return self.get_unhashed_block_ids_all_groups()[0]

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        """Likewise, one list per group."""
        return tuple(
            [block.block_id for block in group if block.block_hash is None and not block.is_null]
            for group in self.blocks
        )

    def new_empty(self) -> "KVCacheBlocks":
        """No blocks, for the same groups."""
        return KVCacheBlocks(((),) * len(self.blocks))
