"""A rank's KV cache in any geometry, every cell of which is known from the tokens.

A cell's bits are a hash of its layer, part, head, element and of all tokens up to its own, as a
real K or V depends on the whole prefix. So whether a block table holds exactly the KV of a token
sequence can be decided by looking, and a block that nobody may touch can be told from one that
somebody touched.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvferry.topology.group import CROSS_LAYER_NAME, GroupGeometry
from kvferry.topology.sharding import Int64s
from kvferry.topology.tensors import Part, RankMemory

ByteArray = npt.NDArray[np.uint8]
UintArray = npt.NDArray[np.unsignedinteger]

NO_TOKENS = 1
"""The prefix state of no tokens."""

_SPOILT = 0xA5
"""Every byte of a block that nobody holds."""


class KnownCache:
    """The cells of one rank.

    Args:
        geometry: of the engine's KV cache group.
        rank: whose cache.
        num_blocks: blocks per tensor, the null block included.
        memory: ``geometry.nbytes(rank, num_blocks)`` bytes, for example those of a connector's
            ``allocate``. The tensors lie in them one after the other.
    """

    def __init__(
        self, geometry: GroupGeometry, rank: int, num_blocks: int, memory: ByteArray
    ) -> None:
        self.geometry = geometry
        self.rank = rank
        self.tensors: dict[str, UintArray] = {}
        """Tensor name → array, of ``geometry.cache_shape(rank, num_blocks)`` if it is a layer's
        own; unsigned integers of the dtype's size, because NumPy lacks some dtypes and bits are all
        that counts."""
        memory[:] = _SPOILT
        described = geometry.memory(rank, num_blocks)
        kinds = geometry.tensors(rank)
        for tensor in described.tensors:
            kind = kinds[tensor.name]
            shape = kind.layout.shape(geometry.box(rank, num_blocks, kind))
            self.tensors[tensor.name] = np.ndarray(
                shape,
                dtype=f"u{kind.itemsize}",
                buffer=memory.data,
                offset=tensor.offset,
                strides=kind.strides(shape),
            )
        self._views = {
            (layer, part.name): self._view(described, layer, part, memory)
            for layer in geometry.layers(rank)
            for part in geometry.parts
        }

    def _view(self, described: RankMemory, layer: int, part: Part, memory: ByteArray) -> UintArray:
        """The cells of one layer and part, shape ``[blocks, tokens, heads, elements]``."""
        geometry = self.geometry
        cross = geometry.layout.is_cross_layer
        owner = CROSS_LAYER_NAME if cross else geometry.layer_name(layer)
        owners = {owner + kind.suffix for kind in geometry.tensor_kinds}
        tensor = next(
            tensor
            for tensor in described.tensors
            if part.name in tensor.parts and tensor.name in owners
        )
        strides = tensor.parts[part.name]
        offset = tensor.offset + strides.offset
        if cross:
            offset += geometry.layers(self.rank).index(layer) * strides.layer
        heads = len(geometry.heads(self.rank, part.name))
        # A recurrent state has one place per block, whatever its number of tokens.
        tokens = 1 if geometry.is_recurrent else geometry.block_size
        return np.ndarray(
            (described.num_blocks, tokens, heads, part.head_size),
            dtype=f"u{part.itemsize}",
            buffer=memory.data,
            offset=offset,
            strides=(strides.block, strides.token, strides.head, strides.element),
        )

    def registered(self, *, by_layer: bool = False) -> dict[str, npt.NDArray[Any]]:
        """The tensors as a connector gets them: of the geometry's dtype where NumPy has it.

        Args:
            by_layer: a view per layer under the layer's name, also where one tensor holds all, as
                engines with several groups register them.
        """
        tensors = dict(self.tensors)
        dtypes: dict[str, str] = {}
        for name, kind in self.geometry.tensors(self.rank).items():
            names = [name]
            if by_layer and self.geometry.layout.is_cross_layer:
                dim = kind.layout.dims(kind.part_sizes).index("L")
                views = np.moveaxis(tensors.pop(name), dim, 0)
                layers = map(self.geometry.layer_name, self.geometry.layers(self.rank))
                names = [layer + kind.suffix for layer in layers]
                tensors |= dict(zip(names, views, strict=True))
            dtypes |= dict.fromkeys(names, kind.parts[0].dtype)
        return {
            name: tensor.view(dtypes[name]) if hasattr(np, dtypes[name]) else tensor
            for name, tensor in tensors.items()
        }

    def write(
        self, table: Sequence[int], tokens: Sequence[int], first: int, end: int, salt: int = 0
    ) -> None:
        """Writes the cells of the tokens ``[first, end)``, as a model would.

        Args:
            table: the block table, token 0 first; nothing is written where it has the null block.
            tokens: the sequence, ``end`` tokens at least.
            first: position of the first token.
            end: position after the last one.
            salt: cells of different salts differ.
        """
        held, blocks, slots = self._places(table, first, end)
        kept = blocks != 0
        for key, view in self._views.items():
            view[blocks[kept], slots[kept]] = self._expected(key, tokens, held[kept], salt)

    def wrong_cells(
        self,
        table: Sequence[int],
        tokens: Sequence[int],
        first: int,
        end: int,
        salt: int = 0,
        layers: Collection[int] | None = None,
    ) -> list[str]:
        """Where the cells of the tokens ``[first, end)`` are not what :meth:`write` writes.

        With ``layers``, only those of some of the model's layers. The null block has no right
        cells.

        Returns:
            One line per layer and part that has wrong cells; empty if all are right.
        """
        held, blocks, slots = self._places(table, first, end)
        lines = []
        for (layer, part), view in self._views.items():
            if layers is not None and layer not in layers:
                continue
            expected = self._expected((layer, part), tokens, held, salt)
            wrong = np.argwhere(view[blocks, slots] != expected)
            if len(wrong):
                token, head, element = wrong[0]
                lines.append(
                    f"rank {self.rank}, layer {layer}, {part}: {len(wrong)} of {expected.size} "
                    f"cells, first token {held[token]}, head {head}, element {element}"
                )
        return lines

    def is_spoilt(self, table: Sequence[int], first: int, end: int) -> bool:
        """Whether nobody wrote to the cells of the tokens ``[first, end)`` since they were spoilt.

        Null blocks have none.
        """
        _, blocks, slots = self._places(table, first, end)
        kept = blocks != 0
        cells = [view[blocks[kept], slots[kept]] for view in self._views.values()]
        return all(bool((np.ascontiguousarray(c).view(np.uint8) == _SPOILT).all()) for c in cells)

    def spoil(self, blocks: Iterable[int]) -> None:
        """Fills blocks with a pattern that :meth:`touched` looks for."""
        ids = list(blocks)
        for view in self._views.values():
            view[ids] = np.frombuffer(bytes([_SPOILT] * view.itemsize), dtype=view.dtype)[0]

    def touched(self, blocks: Iterable[int]) -> list[int]:
        """Those of the blocks that somebody wrote to since they were spoilt."""
        return [
            block
            for block in blocks
            if any(
                (np.ascontiguousarray(view[block]).view(np.uint8) != _SPOILT).any()
                for view in self._views.values()
            )
        ]

    def _places(self, table: Sequence[int], first: int, end: int) -> tuple[Int64s, Int64s, Int64s]:
        """Those of the tokens that the rank holds, the blocks and the slots where they lie.

        Of a recurrent state, the last token of each block: the others leave no cells.
        """
        positions = np.arange(first, end)
        shard = self.geometry.token_shard(self.rank)
        held = positions[shard.holds(positions)]
        blocks, slots = np.divmod(shard.slots(held), self.geometry.block_size)
        if self.geometry.is_recurrent:
            is_last = np.append(blocks[1:] != blocks[:-1], True)[: len(blocks)]
            held, blocks, slots = held[is_last], blocks[is_last], slots[is_last] * 0
        return held, np.asarray(table, dtype=np.int64)[blocks], slots

    def _expected(
        self, key: tuple[int, str], tokens: Sequence[int], positions: Int64s, salt: int
    ) -> UintArray:
        layer, part = key
        parts = {known.name: known for known in self.geometry.parts}
        last = int(positions.max(initial=-1))
        state = np.array(prefix_states(tokens[: last + 1]), dtype=np.uint64)
        state = state[positions][:, None, None]
        heads = np.array(self.geometry.heads(self.rank, part), dtype=np.uint64)[None, :, None]
        elements = np.arange(parts[part].head_size, dtype=np.uint64)[None, None, :]
        place = np.uint64((salt * 64 + layer) * 64 + list(parts).index(part))
        bits = _mix(state ^ _mix((place << np.uint64(32)) + (heads << np.uint64(16)) + elements))
        return bits.astype(f"u{parts[part].itemsize}")


def prefix_states(tokens: Sequence[int], state: int = NO_TOKENS) -> list[int]:
    """For each token, 61 bits that depend on all tokens up to it.

    >>> prefix_states([5, 7])[0] == prefix_states([5, 8])[0]
    True
    >>> prefix_states([7], prefix_states([5])[0]) == prefix_states([5, 7])[1:]
    True

    Args:
        tokens: those to go on with.
        state: what stands for all tokens before them.
    """
    states = []
    for token in tokens:
        state = (state * 6_364_136_223_846_793_005 + token + 1) % ((1 << 61) - 1)
        states.append(state)
    return states


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit moves every other."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
