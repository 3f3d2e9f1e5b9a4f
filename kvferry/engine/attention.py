"""Paged attention on CPU over a KV cache in any layout.

First, the requests of a step become index tensors: an order of tokens for all layers, and a block
table per group. Then each layer writes and reads its cache with these tensors. The window of a
layer bounds the blocks that the layer gathers. Blocks entirely before the window are never read,
because their entries may be null blocks with arbitrary content.

In any layout, strided views show the parts of each layer as ``[B, N, H, D]``. A step writes the
cells of its tokens by (block, offset), then gathers whole blocks by block table: torch copies whole
blocks several times faster than single tokens.

Legend of the dims::

    T  tokens of the step, over all requests     R  requests of a call
    B  blocks of the cache                       N  tokens in a block
    L  tokens of a call's longest sequence, from its first gathered on
    H  KV heads of this rank                     G  query heads per KV head
    D  element of a head
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812

from kvferry.cache.block_table import BlockTable, IntArray
from kvferry.engine.messages import ScheduledRequest
from kvferry.errors import BlockTableError
from kvferry.topology.geometry import EngineGeometry

#: Decodes share a padded call if the shortest block table has at least half the blocks of the
#: longest, or if the longest has at most this many blocks.
_SMALL_TABLE = 8


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """A call of the attention kernel: for the chunk of a request, or for many decodes."""

    rows: torch.Tensor | slice
    """Rows of the call among the step's tokens."""
    blocks: torch.Tensor
    """int64 ``[R * blocks per request]``, tables padded with the null block."""
    num_requests: int
    tokens: slice
    """Range of the gathered tokens of each request that the call attends to."""
    mask: torch.Tensor | None
    """Mask that is added to the scores: ``[R, 1, 1, L]`` for decodes, ``[T, L]`` for a chunk."""
    padding: torch.Tensor | None
    """Flat indices into ``[R * L]`` of the tokens that are hidden from every query."""
    causal: bool
    """Whether a chunk starts its sequence within the window, so that no mask must be stored."""


@dataclass(frozen=True, slots=True)
class LayerBatch:
    """Index tensors of a step for a layer; layers with equal group and window share an object."""

    slots: tuple[torch.Tensor, torch.Tensor]
    """Block and offset of each token, each int64 ``[T]``."""
    calls: tuple[AttentionCall, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The requests of a step as tensors."""

    tokens: torch.Tensor
    """Token ids, int64 ``[T]``."""
    positions: torch.Tensor
    """Position of each token in its sequence, int64 ``[T]``."""
    sampled: torch.Tensor
    """Rows of the tokens whose logits are needed, in the order of the requests; int64."""
    layers: Mapping[int, LayerBatch]
    """Model layer → the layer's index tensors."""


def build_batch(
    requests: Sequence[ScheduledRequest],
    groups: Sequence[EngineGeometry],
    dtype: torch.dtype,
    layer_windows: Mapping[int, int] | None = None,
) -> StepBatch:
    """Turns the requests of a step into index tensors.

    Args:
        requests: at least one request, each with at least one token.
        groups: geometries of the engine's KV cache groups, in the order of the block tables.
        dtype: dtype of the masks, which is the model's dtype.
        layer_windows: model layer → number of tokens that a token of this layer attends to,
            including itself; by default, all tokens that the layer's group keeps.

    Raises:
        BlockTableError: the number of a request's block tables differs from the number of groups,
            or a table lacks a block that a layer needs.
    """
    for request in requests:
        if len(request.block_ids) != len(groups):
            raise BlockTableError(
                f"request {request.request_id!r}: {len(request.block_ids)} block tables for "
                f"{len(groups)} KV cache groups"
            )
    firsts = np.array([request.first_position for request in requests], dtype=np.int64)
    counts = np.array([len(request.token_ids) for request in requests], dtype=np.int64)
    rows, positions = BlockTable.expand_spans(firsts, counts)
    layers: dict[int, LayerBatch] = {}
    for index, geometry in enumerate(groups):
        table = BlockTable.from_lists(
            geometry.block_size, [request.block_ids[index] for request in requests]
        )
        windows = {
            layer: (layer_windows or {}).get(layer, geometry.sliding_window)
            for layer in geometry.model_layers
        }
        sights = {window: _Sight(table, window, firsts, counts) for window in windows.values()}
        for sight in sights.values():
            _check_tables(requests, sight)
        blocks, offsets = table.locate(rows, positions)
        slots = (torch.from_numpy(blocks), torch.from_numpy(offsets))
        calls = {window: _calls(sight, dtype) for window, sight in sights.items()}
        layers |= {layer: LayerBatch(slots, calls[window]) for layer, window in windows.items()}
    asked = [request.sample is not None for request in requests]
    return StepBatch(
        tokens=torch.tensor(
            list(chain.from_iterable(request.token_ids for request in requests)), dtype=torch.int64
        ),
        positions=torch.from_numpy(positions),
        sampled=torch.from_numpy((np.cumsum(counts) - 1)[asked]),
        layers=layers,
    )


class _Sight:
    """The visible range of each request for layers with equal group and window, as arrays."""

    def __init__(
        self, table: BlockTable, window: int | None, firsts: IntArray, counts: IntArray
    ) -> None:
        self.table = table
        self.window = window
        self.counts = counts
        """Number of tokens to compute."""
        self.starts = np.cumsum(counts) - counts
        """Row of the first token to compute among the step's tokens."""
        self.lengths = firsts + counts
        """Number of tokens in the sequence after the step."""
        self.kept = np.zeros_like(firsts)
        """First position that the first token to compute may see."""
        if window is not None:
            # A copy of topology.windows.first_kept_token for all requests at once.
            self.kept = np.maximum(firsts - window + 1, 0)
        self.first_blocks = self.kept // table.block_size
        """Index of the first block to gather."""
        self.end_blocks = -(-self.lengths // table.block_size)
        """Index after the last block to gather."""


def _calls(sight: _Sight, dtype: torch.dtype) -> tuple[AttentionCall, ...]:
    chunks = [
        _chunk_call(sight, request, dtype) for request in np.flatnonzero(sight.counts > 1).tolist()
    ]
    return (*chunks, *_decode_calls(sight, np.flatnonzero(sight.counts == 1), dtype))


def _check_tables(requests: Sequence[ScheduledRequest], sight: _Sight) -> None:
    """Checks that every block to be written or gathered is in its table.

    A null block is also a legal padding of shorter tables. So reading a null block in place of a
    token would raise no error, but give a wrong answer.
    """
    table = sight.table
    for request in np.flatnonzero(sight.end_blocks > table.num_blocks).tolist():
        raise BlockTableError(
            f"request {requests[request].request_id!r}: {sight.lengths[request]} tokens need "
            f"{sight.end_blocks[request]} blocks of {table.block_size}, its table has "
            f"{table.num_blocks[request]}"
        )
    index = np.arange(table.block_ids.shape[1])
    needed = (index >= sight.first_blocks[:, None]) & (index < sight.end_blocks[:, None])
    for request, block in np.argwhere(needed & (table.block_ids == 0)).tolist():
        raise BlockTableError(
            f"request {requests[request].request_id!r}: entry {block} of its table is the null "
            f"block, but tokens from {sight.kept[request]} on are needed, in blocks of "
            f"{table.block_size}"
        )


def _chunk_call(sight: _Sight, request: int, dtype: torch.dtype) -> AttentionCall:
    row, count = int(sight.starts[request]), int(sight.counts[request])
    kept, length, window = int(sight.kept[request]), int(sight.lengths[request]), sight.window
    first_block, end_block = int(sight.first_blocks[request]), int(sight.end_blocks[request])
    above = first_block * sight.table.block_size  # position of the first gathered token
    first = length - count
    causal = not first and (window is None or length <= window)
    mask = None
    if not causal:
        query, key = torch.arange(first, length)[:, None], torch.arange(kept, length)
        hidden = key > query
        if window is not None:
            hidden |= key <= query - window
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
    return AttentionCall(
        rows=slice(row, row + count),
        blocks=torch.from_numpy(sight.table.block_ids[request, first_block:end_block]),
        num_requests=1,
        tokens=slice(kept - above, length - above),
        mask=mask,
        padding=None,
        causal=causal,
    )


def _decode_calls(sight: _Sight, requests: IntArray, dtype: torch.dtype) -> list[AttentionCall]:
    """Joins decodes of similar length, so that padding at most doubles the work."""
    widths = (sight.end_blocks - sight.first_blocks)[requests]
    joined: list[list[int]] = []
    widest = 0
    for index in np.argsort(-widths, kind="stable").tolist():
        if joined and max(2 * int(widths[index]), _SMALL_TABLE) >= widest:
            joined[-1].append(int(requests[index]))
        else:
            widest = int(widths[index])
            joined.append([int(requests[index])])
    return [_decode_call(sight, np.array(members), dtype) for members in joined]


def _decode_call(sight: _Sight, members: IntArray, dtype: torch.dtype) -> AttentionCall:
    block_size = sight.table.block_size
    firsts = sight.first_blocks[members]
    tables = sight.table.between(members, firsts, sight.end_blocks[members] - firsts)
    # From here on, positions count from the first gathered token of each sequence.
    begins = sight.kept[members] - firsts * block_size
    ends = sight.lengths[members] - firsts * block_size
    mask = padding = None
    tokens = slice(int(begins[0]), int(ends[0]))
    if len(members) > 1:
        length = tables.shape[1] * block_size
        tokens = slice(0, length)
        position = np.arange(length)
        hidden = (position < begins[:, None]) | (position >= ends[:, None])
        padding = torch.from_numpy(np.flatnonzero(hidden))
        mask = torch.zeros(hidden.shape, dtype=dtype)
        mask.masked_fill_(torch.from_numpy(hidden), float("-inf"))
        mask = mask[:, None, None, :]
    return AttentionCall(
        rows=torch.from_numpy(sight.starts[members]),
        blocks=torch.from_numpy(tables.reshape(-1)),
        num_requests=len(members),
        tokens=tokens,
        mask=mask,
        padding=padding,
        causal=False,
    )


def write_kv(cache: Sequence[torch.Tensor], batch: LayerBatch, *new_THD: torch.Tensor) -> None:
    """Writes the step's cells into their slots in the cache of a layer.

    Args:
        cache: the layer's parts, each ``[B, N, H, D]``.
        batch: the layer's index tensors for the step.
        new_THD: the step's cells of each part.
    """
    for cells_BNHD, cells_THD in zip(cache, new_THD, strict=True):
        cells_BNHD[batch.slots] = cells_THD


def attend(
    q_THD: torch.Tensor,
    cache: tuple[torch.Tensor, torch.Tensor],
    batch: LayerBatch,
    scale: float | None = None,
) -> torch.Tensor:
    """Attention of every token over the visible part of its sequence, including the step's tokens.

    Args:
        q_THD: queries ``[T, H * G, D]``; the queries of a KV head are next to each other.
        cache: keys and values of a layer, each ``[B, N, H, D]``, with the step's tokens already
            written. Keys and values may differ in D.
        batch: the layer's index tensors for the step.
        scale: factor of the scores; by default, ``D ** -0.5``.

    Returns:
        ``[T, H * G, D]`` with the D of the values, contiguous.
    """
    out_THD = q_THD.new_empty(*q_THD.shape[:2], cache[1].shape[-1])
    for call in batch.calls:
        k_RHLD, v_RHLD = (_gather(cells_BNHD, call) for cells_BNHD in cache)
        q = q_THD[call.rows]
        if isinstance(call.rows, slice):
            out = F.scaled_dot_product_attention(
                q.transpose(0, 1)[None],
                k_RHLD,
                v_RHLD,
                attn_mask=call.mask,
                is_causal=call.causal,
                scale=scale,
                enable_gqa=True,
            )
            out_THD[call.rows] = out[0].transpose(0, 1)
        else:
            # The query heads of a KV head take the place of several queries of a single head, so no
            # key is repeated.
            q_RHGD = q.view(call.num_requests, k_RHLD.shape[1], -1, q.shape[-1])
            out = F.scaled_dot_product_attention(
                q_RHGD, k_RHLD, v_RHLD, attn_mask=call.mask, scale=scale
            )
            out_THD[call.rows] = out.reshape(*q.shape[:2], -1)
    return out_THD


def _gather(cells_BNHD: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """The call's cells of a part as ``[R, H, L, D]``."""
    _, _, heads, size = cells_BNHD.shape
    found = cells_BNHD.index_select(0, call.blocks).reshape(call.num_requests, -1, heads, size)
    found = found[:, call.tokens]
    if call.padding is not None:
        # A masked score still multiplies the value by 0, and 0 times a stale NaN is NaN.
        found.view(-1, heads, size).index_fill_(0, call.padding, 0.0)
    return found.transpose(1, 2)
