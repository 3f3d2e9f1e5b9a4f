"""Paged attention on CPU over a KV cache in any layout.

Legend of the dims::

    T  tokens of the step, over all requests     R  requests of a call
    B  blocks of the cache                       N  tokens in a block
    L  tokens of a call's longest sequence       H  KV heads of this rank
    G  query heads per KV head                   D  element of a head

Whatever the layout, the parts of each layer are seen as ``[B, N, H, D]`` through strides. A step
writes its tokens' cells by (block, offset), then gathers whole blocks by block table: torch copies
those several times faster than single tokens.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812

from kvferry.engine.attention_batch import AttentionCall, LayerBatch


def write_kv(cache: Sequence[torch.Tensor], batch: LayerBatch, *new_THD: torch.Tensor) -> None:
    """Puts the step's cells into their slots of one layer's cache.

    Args:
        cache: the layer's parts, ``[B, N, H, D]`` each.
        batch: the layer's part of the step.
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
    """Attention of every token over what it sees of its own sequence, the step's tokens included.

    Args:
        q_THD: queries ``[T, H * G, D]``, those of a KV head next to each other.
        cache: one layer's keys and values ``[B, N, H, D]``, the step's already written. The two
            may differ in D.
        batch: the layer's part of the step.
        scale: of the scores; ``D ** -0.5`` if left out.

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
            # The query heads of a KV head take the place of queries of one head, so that no key
            # is repeated.
            q_RHGD = q.view(call.num_requests, k_RHLD.shape[1], -1, q.shape[-1])
            out = F.scaled_dot_product_attention(
                q_RHGD, k_RHLD, v_RHLD, attn_mask=call.mask, scale=scale
            )
            out_THD[call.rows] = out.reshape(*q.shape[:2], -1)
    return out_THD


def _gather(cells_BNHD: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """The call's cells of one part as ``[R, H, L, D]``."""
    _, _, heads, size = cells_BNHD.shape
    found = cells_BNHD.index_select(0, call.blocks).reshape(call.num_requests, -1, heads, size)
    found = found[:, call.tokens]
    if call.padding is not None:
        # A masked score still multiplies the value by 0, and 0 times a stale NaN is NaN.
        found.view(-1, heads, size).index_fill_(0, call.padding, 0.0)
    return found.transpose(1, 2)
