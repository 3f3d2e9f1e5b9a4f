"""A KV cache in words that both managers understand."""

import math
from typing import Literal

import msgspec


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table."""

    kind: Literal["full", "window", "chunk", "mla", "mamba"]
    block_size: int
    """Tokens per block."""
    span: int = 0
    """Tokens of a window or of a chunk; of no meaning for the others."""


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """A cache and a manager over it."""

    groups: tuple[Group, ...]
    num_blocks: int
    """The null block included."""
    max_model_len: int
    """Tokens."""
    use_eagle: bool = False
    dcp_world_size: int = 1

    @property
    def hash_block_size(self) -> int:
        """Tokens per block hash."""
        return math.gcd(*self._block_sizes)

    @property
    def hit_block_size(self) -> int:
        """Hits are multiples of this many tokens."""
        return math.lcm(*self._block_sizes)

    @property
    def has_windows(self) -> bool:
        """Whether a group gives blocks back as a request moves on."""
        return any(group.span or group.kind == "mamba" for group in self.groups)

    @property
    def _block_sizes(self) -> list[int]:
        """Tokens of an entry of each group's block tables; a recurrent state is not divided."""
        return [
            group.block_size * (1 if group.kind == "mamba" else self.dcp_world_size)
            for group in self.groups
        ]
