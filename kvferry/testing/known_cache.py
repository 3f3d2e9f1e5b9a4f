"""A rank's KV cache in any geometry, with cells known from the tokens.

A cell's bits are a hash of the layer, part, head and element of the cell, and of all tokens up to
the cell's token, as a real K or V depends on the whole prefix. So a look at the cells decides
whether a block table holds exactly the KV of a token sequence, and whether a free block was
touched.
"""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import ArrayView, ByteArray, MemorySpan, view_of
from kvferry.topology.group import CROSS_LAYER_NAME, GroupGeometry
from kvferry.topology.sharding import Int64s
from kvferry.topology.tensors import RankMemory, TensorPart

UintArray = npt.NDArray[np.unsignedinteger]

NO_TOKENS = 1
"""State of the empty prefix."""

_SPOILT = 0xA5
"""Value of every byte in a free block."""


class Cells(Protocol):
    """An array of unsigned integers in any memory, indexed like a NumPy array."""

    @property
    def dtype(self) -> "np.dtype[Any]":
        """Dtype of the elements."""

    def __getitem__(self, index: Any, /) -> Any:
        """A copy of elements, or a view of elements."""

    def __setitem__(self, index: Any, values: Any, /) -> None:
        """Overwrites elements, in order with the engine's other work on the device."""


class CacheDevice(ABC):
    """A device for the caches of fake engines; the host reaches the caches only through this
    class.
    """

    @abstractmethod
    def allocate(self, nbytes: int) -> MemorySpan:
        """Memory of the device, which lives as long as this object."""

    @abstractmethod
    def cells(self, view: ArrayView) -> Cells:
        """The elements of an array in the device's memory."""

    @abstractmethod
    def tensor(self, view: ArrayView) -> Any:
        """The array in the form in which an engine would register it."""


class KnownCache:
    """The cells of one rank, each with a known value.

    Args:
        geometry: geometry of the engine's KV cache group.
        rank: owner of the cache.
        num_blocks: blocks per tensor, including the null block.
        memory: ``geometry.nbytes(rank, num_blocks)`` bytes, for example from a connector's
            ``allocate``. The tensors lie in this memory one after the other.
        device: device of the memory; ``None`` for host memory.
    """

    def __init__(
        self,
        geometry: GroupGeometry,
        rank: int,
        num_blocks: int,
        memory: ByteArray | MemorySpan,
        device: CacheDevice | None = None,
    ) -> None:
        self.geometry = geometry
        self.rank = rank
        self._device = device
        if not isinstance(memory, np.ndarray):
            # Arrays in host memory describe the places in device memory; no byte of them is
            # touched.
            self._span, memory = memory, np.empty(memory.nbytes, dtype=np.uint8)
        self._first = memory.ctypes.data
        self.tensors: dict[str, UintArray] = {}
        """Tensor name → array, of ``geometry.cache_shape(rank, num_blocks)`` for the tensor of a
        single layer. The elements are unsigned integers of the dtype's size, because NumPy lacks
        some dtypes and only bits count. For a cache on a device, the arrays only describe the
        shapes."""
        self._cells(memory)[:] = np.uint8(_SPOILT)
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
            (layer, part.name): self._cells(self._view(described, layer, part, memory))
            for layer in geometry.layers(rank)
            for part in geometry.parts
        }

    def _view(
        self, described: RankMemory, layer: int, part: TensorPart, memory: ByteArray
    ) -> UintArray:
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
        # A recurrent state has one place per block, for any number of tokens.
        tokens = 1 if geometry.is_recurrent else geometry.block_size
        return np.ndarray(
            (described.num_blocks, tokens, heads, part.head_size),
            dtype=f"u{part.itemsize}",
            buffer=memory.data,
            offset=offset,
            strides=(strides.block, strides.token, strides.head, strides.element),
        )

    def _cells(self, array: UintArray) -> Cells:
        return array if self._device is None else self._device.cells(self._on_device(array))

    def _on_device(self, array: npt.NDArray[Any]) -> ArrayView:
        """Place of the device array that the given array stands for."""
        view, span = view_of(array), self._span
        return replace(
            view,
            address=view.address - self._first + span.address,
            storage=(span.address, span.nbytes),
            device=span.device,
        )

    def registered(self, *, by_layer: bool = False) -> dict[str, Any]:
        """The tensors as a connector gets them, with the geometry's dtype if NumPy has this dtype.

        Args:
            by_layer: whether each layer gets a view under the layer's name, even if one tensor
                holds all layers. Engines with several groups register such views.
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
        typed = {
            name: tensor.view(dtypes[name]) if hasattr(np, dtypes[name]) else tensor
            for name, tensor in tensors.items()
        }
        if self._device is None:
            return typed
        return {name: self._device.tensor(self._on_device(each)) for name, each in typed.items()}

    def write(
        self, table: Sequence[int], tokens: Sequence[int], first: int, end: int, salt: int = 0
    ) -> None:
        """Writes the cells of the tokens ``[first, end)``, as a model would.

        Args:
            table: the block table, from token 0; nothing is written to null blocks.
            tokens: the sequence, at least ``end`` tokens.
            first: position of the first token.
            end: position after the last token.
            salt: number mixed into all cells.
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
        """Cells of the tokens ``[first, end)`` that differ from the values of :meth:`write`.

        ``layers`` restricts the check to some of the model's layers. The null block has no right
        cells.

        Returns:
            One line per layer and part with wrong cells; empty if all cells are right.
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
        """Whether the cells of the tokens ``[first, end)`` were not written to since they were
        spoilt.

        Null blocks have no cells.
        """
        _, blocks, slots = self._places(table, first, end)
        kept = blocks != 0
        places = blocks[kept], slots[kept]
        return all(bool((view[places] == _spoilt(view)).all()) for view in self._views.values())

    def spoil(self, blocks: Iterable[int]) -> None:
        """Fills blocks with the pattern that :meth:`touched` looks for."""
        ids = list(blocks)
        for view in self._views.values():
            view[ids] = _spoilt(view)

    def touched(self, blocks: Iterable[int]) -> list[int]:
        """The blocks that were written to since they were spoilt."""
        ids = np.array(list(blocks), dtype=np.int64)
        changed = np.zeros(len(ids), dtype=bool)
        for view in self._views.values():
            changed |= (view[ids] != _spoilt(view)).any(axis=(1, 2, 3))
        return [int(block) for block in ids[changed]]

    def _places(self, table: Sequence[int], first: int, end: int) -> tuple[Int64s, Int64s, Int64s]:
        """The tokens that the rank holds, with the blocks and the slots of their cells.

        For a recurrent state, only the last token of each block counts: other tokens leave no
        cells.
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


def _spoilt(view: Cells) -> Any:
    """Value of a cell in a spoilt block."""
    return np.frombuffer(bytes([_SPOILT] * view.dtype.itemsize), dtype=view.dtype)[0]


def prefix_states(tokens: Sequence[int], state: int = NO_TOKENS) -> list[int]:
    """For each token, 61 bits that depend on all tokens up to this token.

    >>> prefix_states([5, 7])[0] == prefix_states([5, 8])[0]
    True
    >>> prefix_states([7], prefix_states([5])[0]) == prefix_states([5, 7])[1:]
    True

    Args:
        tokens: the following tokens.
        state: state of all earlier tokens.
    """
    states = []
    for token in tokens:
        state = (state * 6_364_136_223_846_793_005 + token + 1) % ((1 << 61) - 1)
        states.append(state)
    return states


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014): every bit changes every other
    bit.
    """
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
