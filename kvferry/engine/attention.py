"""Paged attention on CPU over a KV cache in any layout.

Legend of the dims::

    T  tokens of the step, over all requests     R  requests of a group
    B  blocks of the cache                       N  tokens in a block
    L  tokens of the longest sequence            H  KV heads of this rank
    G  query heads per KV head                   D  element of a head

Whatever the layout, each layer's keys and values are seen as ``[B, N, H, D]`` through strides. A
step writes its tokens' keys and values by (block, offset), then gathers whole blocks by block
table: torch copies those several times faster than single tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812

from kvferry.engine.messages import ScheduledRequest
from kvferry.errors import BlockTableError
from kvferry.topology.description import PartStrides
from kvferry.topology.geometry import EngineGeometry

#: Decodes share one padded call as long as the shortest needs half of the longest one's blocks,
#: or no more than this many.
_SMALL_TABLE = 8


class PagedKVCache:
    """The KV cache of one rank: its tensors, and per layer the ``[B, N, H, D]`` views.

    Args:
        geometry: of the engine.
        rank: whose cache.
        num_blocks: blocks, the null block included.
        memory: at least ``geometry.nbytes(rank, num_blocks)`` bytes, aligned to the dtype.
    """

    def __init__(
        self, geometry: EngineGeometry, rank: int, num_blocks: int, memory: npt.NDArray[np.uint8]
    ) -> None:
        self.block_size = geometry.block_size
        dtype = getattr(torch, geometry.dtype)
        shape = geometry.cache_shape(rank, num_blocks)
        heads = len(geometry.heads(rank))
        placed = geometry.memory(rank, num_blocks)
        flat = torch.from_numpy(memory[: geometry.nbytes(rank, num_blocks)]).view(dtype)
        self.tensors: dict[str, torch.Tensor] = {}
        """By name, each shaped ``geometry.cache_shape(rank, num_blocks)``."""
        self._views: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        layers = geometry.layers(rank)
        for index, tensor in enumerate(placed.tensors):
            first = tensor.offset // geometry.itemsize
            size = int(np.prod(shape))
            self.tensors[tensor.name] = flat[first : first + size].view(shape)
            held = range(len(layers)) if geometry.layout.is_cross_layer else [0]
            for inside in held:
                extent = (num_blocks, self.block_size, heads, geometry.head_size)
                keys, values = (
                    _cells(flat, tensor.parts[part], first, inside, extent, geometry.itemsize)
                    for part in ("k", "v")
                )
                self._views[layers[index + inside]] = (keys, values)

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values ``[B, N, H, D]`` of one of the model's layers; views, not copies."""
        return self._views[layer]


def _cells(
    flat: torch.Tensor,
    part: PartStrides,
    first: int,
    layer: int,
    extent: tuple[int, int, int, int],
    itemsize: int,
) -> torch.Tensor:
    """One part of one layer as ``[B, N, H, D]``; ``first`` is its tensor's first element."""
    strides = [stride // itemsize for stride in (part.block, part.token, part.head, part.element)]
    offset = first + (part.offset + layer * part.layer) // itemsize
    return flat.as_strided(extent, strides, flat.storage_offset() + offset)


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """Requests whose attention is one call: one request's chunk, or many decodes."""

    rows: torch.Tensor | slice
    """Which of the step's tokens."""
    blocks: torch.Tensor
    """int64 ``[R * blocks per request]``, tables padded with the null block."""
    num_requests: int
    length: int
    """L."""
    mask: torch.Tensor | None
    """Added to the scores, ``[R, 1, 1, L]`` for decodes and ``[T, L]`` for a chunk."""
    padding: torch.Tensor | None
    """Flat indices into ``[R * L]`` of the tokens that are no one's."""
    causal: bool
    """Whether a chunk starts its sequence, so that no mask need be stored."""


@dataclass(frozen=True, slots=True)
class StepBatch:
    """One step's requests as tensors; the same for every layer."""

    tokens: torch.Tensor
    """int64 ``[T]``."""
    positions: torch.Tensor
    """int64 ``[T]``."""
    slots: tuple[torch.Tensor, torch.Tensor]
    """Block and offset of each token, int64 ``[T]`` each."""
    groups: tuple[AttentionGroup, ...]
    sampled: torch.Tensor
    """int64 rows of the tokens whose logits are asked for, in the order of the requests."""


def build_batch(
    requests: Sequence[ScheduledRequest], block_size: int, dtype: torch.dtype
) -> StepBatch:
    """Turns a step's requests into index tensors.

    Args:
        requests: at least one, each with at least one token.
        block_size: tokens per block.
        dtype: of the masks, which is the model's.

    Raises:
        BlockTableError: a block table does not cover its request's tokens.
    """
    tokens: list[int] = []
    sampled: list[int] = []
    positions: list[npt.NDArray[np.int64]] = []
    blocks: list[npt.NDArray[np.int64]] = []
    groups: list[AttentionGroup] = []
    decodes: list[_Decode] = []
    for request in requests:
        row, count = len(tokens), len(request.token_ids)
        length = request.first_position + count
        table = _table(request, length, block_size)
        span = np.arange(request.first_position, length, dtype=np.int64)
        positions.append(span)
        blocks.append(table[span // block_size])
        tokens.extend(request.token_ids)
        if request.sample is not None:
            sampled.append(row + count - 1)
        if count == 1:
            decodes.append(_Decode(row, length, table))
        else:
            groups.append(_chunk_group(row, request.first_position, count, table, dtype))
    where = np.concatenate(positions)
    groups.extend(_decode_groups(decodes, block_size, dtype))
    return StepBatch(
        tokens=torch.tensor(tokens, dtype=torch.int64),
        positions=torch.from_numpy(where),
        slots=(torch.from_numpy(np.concatenate(blocks)), torch.from_numpy(where % block_size)),
        groups=tuple(groups),
        sampled=torch.tensor(sampled, dtype=torch.int64),
    )


@dataclass(frozen=True, slots=True)
class _Decode:
    row: int
    length: int
    table: npt.NDArray[np.int64]


def _table(request: ScheduledRequest, length: int, block_size: int) -> npt.NDArray[np.int64]:
    needed = -(-length // block_size)
    table = request.block_ids[0]
    if len(table) < needed:
        raise BlockTableError(
            f"request {request.request_id!r}: {length} tokens need {needed} blocks of "
            f"{block_size}, its table has {len(table)}"
        )
    return np.asarray(table[:needed], dtype=np.int64)


def _chunk_group(
    row: int, context: int, count: int, table: npt.NDArray[np.int64], dtype: torch.dtype
) -> AttentionGroup:
    length = context + count
    mask = None
    if context:
        hidden = torch.ones(count, length, dtype=torch.bool).triu(context + 1)
        mask = torch.zeros(count, length, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return AttentionGroup(
        rows=slice(row, row + count),
        blocks=torch.from_numpy(table),
        num_requests=1,
        length=length,
        mask=mask,
        padding=None,
        causal=not context,
    )


def _decode_groups(
    decodes: Sequence[_Decode], block_size: int, dtype: torch.dtype
) -> list[AttentionGroup]:
    """Joins decodes of similar length, so that padding at most doubles the work."""
    joined: list[list[_Decode]] = []
    for decode in sorted(decodes, key=lambda decode: -decode.length):
        size = max(2 * len(decode.table), _SMALL_TABLE)
        if joined and size >= len(joined[-1][0].table):
            joined[-1].append(decode)
        else:
            joined.append([decode])
    return [_decode_group(members, block_size, dtype) for members in joined]


def _decode_group(
    members: Sequence[_Decode], block_size: int, dtype: torch.dtype
) -> AttentionGroup:
    lengths = np.array([member.length for member in members])
    width = len(members[0].table)
    tables = np.zeros((len(members), width), dtype=np.int64)
    for row, member in enumerate(members):
        tables[row, : len(member.table)] = member.table
    mask = padding = None
    length = width * block_size
    if len(members) == 1:
        length = int(lengths[0])
    else:
        hidden = np.arange(length) >= lengths[:, None]
        padding = torch.from_numpy(np.flatnonzero(hidden))
        mask = torch.zeros(hidden.shape, dtype=dtype)
        mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
        mask = mask[:, None, None, :]
    return AttentionGroup(
        rows=torch.tensor([member.row for member in members]),
        blocks=torch.from_numpy(tables.reshape(-1)),
        num_requests=len(members),
        length=length,
        mask=mask,
        padding=padding,
        causal=False,
    )


def write_kv(
    cache: tuple[torch.Tensor, torch.Tensor],
    batch: StepBatch,
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
) -> None:
    """Puts the step's keys and values into their slots of one layer's cache."""
    for cells_BNHD, new_THD in zip(cache, (k_THD, v_THD), strict=True):
        cells_BNHD[batch.slots] = new_THD


def attend(
    q_THD: torch.Tensor, cache: tuple[torch.Tensor, torch.Tensor], batch: StepBatch
) -> torch.Tensor:
    """Attention of every token over its own sequence, the step's tokens included.

    Args:
        q_THD: queries ``[T, H * G, D]``, those of a KV head next to each other.
        cache: one layer's keys and values ``[B, N, H, D]``, the step's already written.
        batch: the step.

    Returns:
        ``[T, H * G, D]``, contiguous.
    """
    out_THD = torch.empty_like(q_THD)
    for group in batch.groups:
        k_RHLD, v_RHLD = (_gather(cells_BNHD, group) for cells_BNHD in cache)
        q = q_THD[group.rows]
        if isinstance(group.rows, slice):
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k_RHLD,
                v_RHLD,
                attn_mask=group.mask,
                is_causal=group.causal,
                enable_gqa=True,
            )
            out_THD[group.rows] = out[0].transpose(0, 1)
        else:
            # The query heads of a KV head take the place of queries of one head, so that no key
            # is repeated.
            heads, size = k_RHLD.shape[1], q.shape[-1]
            q_RHGD = q.view(group.num_requests, heads, -1, size)
            out = F.scaled_dot_product_attention(q_RHGD, k_RHLD, v_RHLD, attn_mask=group.mask)
            out_THD[group.rows] = out.reshape(q.shape)
    return out_THD


def _gather(cells_BNHD: torch.Tensor, group: AttentionGroup) -> torch.Tensor:
    """The group's keys or values as ``[R, H, L, D]``."""
    _, _, heads, size = cells_BNHD.shape
    found = cells_BNHD.index_select(0, group.blocks).reshape(group.num_requests, -1, heads, size)
    found = found[:, : group.length]
    if group.padding is not None:
        # A masked score still multiplies the value by 0, and 0 times a stale NaN is NaN.
        found.view(-1, heads, size).index_fill_(0, group.padding, 0.0)
    return found.transpose(1, 2)
