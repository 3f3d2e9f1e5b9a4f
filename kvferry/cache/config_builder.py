"""Builds the KV cache config of an engine from the specs of its layers and the size of its memory.

First the layers are grouped: the layers of a group share a block table. All groups take blocks from
a common pool, so a block of any group needs the same number of bytes: pages of equal size, and
about the same number of layers in every group. The rules are the rules of vLLM
(``vllm/v1/core/kv_cache_utils.py``, version 0.32), except that pages which are not multiples of
each other are an error here instead of being padded silently.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, zip_longest

from kvferry.cache.kv_cache_config import (
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    UniformTypeKVCacheSpecs,
)
from kvferry.cache.specs import (
    AttentionSpec,
    CacheLimits,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MLAAttentionSpec,
)
from kvferry.cache.specs_local import ChunkedLocalAttentionSpec, MambaSpec, SlidingWindowSpec

Specs = Mapping[str, KVCacheSpec]


def group_layers(specs: Specs, *, hybrid: bool = True) -> tuple[KVCacheGroupSpec, ...]:
    """Puts layers into groups that share a block table.

    Layers whose specs merge make a group. Layers of the same type whose pages differ in size also
    make a group. Any other model is hybrid: its layers are distributed over groups of the same
    kind, with equal page size and with as equal a number of layers as possible.

    >>> full = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    >>> window = SlidingWindowSpec(16, 8, 128, "bfloat16", sliding_window=1024)
    >>> specs = {f"layer.{i}": full if i % 3 == 2 else window for i in range(6)}
    >>> [group.layer_names for group in group_layers(specs)]
    [('layer.0', 'layer.3'), ('layer.1', 'layer.4'), ('layer.2', 'layer.5')]
    >>> group_layers(specs, hybrid=False)[0].kv_cache_spec.sliding_window
    1024

    Args:
        specs: spec of each layer of the model on a rank, in the model's order. Layers of encoders,
            which keep nothing, are in no group.
        hybrid: whether layers may be in several groups. If not, windows and chunks are computed,
            but the blocks of all tokens are kept.

    Raises:
        ValueError: the layers make no group; the message names two layers that disagree, their
            values, and the value to change.
    """
    for name, spec in specs.items():
        if not isinstance(spec, KVCacheSpec):
            raise ValueError(f"specs: {name!r} has {spec!r}, which is no KVCacheSpec")
    kept = {
        name: spec for name, spec in specs.items() if not isinstance(spec, EncoderOnlyAttentionSpec)
    }
    if not kept:
        return ()
    group = _one_group(kept)
    if group is None and not hybrid:
        kept = {name: _keep_all_tokens(spec) for name, spec in kept.items()}
        group = _one_group(kept)
        if group is None:
            raise ValueError(_why_not_one_group(kept))
    if group is not None:
        return (group,)
    return tuple(
        KVCacheGroupSpec(names, _merge([unified[name] for name in names]))
        for unified in (unify_page_sizes(kept),)
        for names in _deal_out(_layers_by_kind(unified))
    )


def _merge(specs: Sequence[KVCacheSpec]) -> KVCacheSpec:
    return type(specs[0]).merge(specs)


def _is_mergeable(specs: Sequence[KVCacheSpec]) -> bool:
    try:
        _merge(specs)
    except ValueError:
        return False
    return True


def _one_group(specs: Specs) -> KVCacheGroupSpec | None:
    values = list(specs.values())
    if _is_mergeable(values):
        return KVCacheGroupSpec(list(specs), _merge(values))
    uniform = UniformTypeKVCacheSpecs.from_specs(specs)
    return None if uniform is None else KVCacheGroupSpec(list(specs), uniform)


def _keep_all_tokens(spec: KVCacheSpec) -> KVCacheSpec:
    """The spec of a layer that computes within its window or chunk but keeps all blocks."""
    if not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec):
        return spec
    kind = MLAAttentionSpec if spec.use_mla else FullAttentionSpec
    return kind(
        spec.block_size,
        spec.num_kv_heads,
        spec.head_size,
        spec.dtype,
        spec.use_mla,
        spec.page_size_padded,
        spec.head_size_v,
        sliding_window=spec.sliding_window if isinstance(spec, SlidingWindowSpec) else None,
        attention_chunk_size=(
            spec.attention_chunk_size if isinstance(spec, ChunkedLocalAttentionSpec) else None
        ),
    )


def _why_not_one_group(specs: Specs) -> str:
    (first, wanted), *others = specs.items()
    for name, spec in others:
        if spec.block_size != wanted.block_size:
            return (
                f"block_size: layer {name!r} has {spec.block_size}, layer {first!r} has "
                f"{wanted.block_size}; give both the same, or allow hybrid groups (hybrid=True)"
            )
        if spec.slot_rule != wanted.slot_rule:
            break
    return (
        f"layer {name!r} is a {type(spec).__name__}, layer {first!r} a {type(wanted).__name__}: "
        "they do not keep the same tokens and cannot share a block table; allow hybrid groups "
        "(hybrid=True)"
    )


def unify_page_sizes(specs: Specs) -> dict[str, KVCacheSpec]:
    """Gives all layers pages of the same size.

    Attention layers get larger blocks, by a whole factor; recurrent states are padded.

    >>> small = SlidingWindowSpec(16, 4, 128, "bfloat16", sliding_window=1024)
    >>> large = FullAttentionSpec(16, 8, 128, "bfloat16")
    >>> unified = unify_page_sizes({"a": small, "b": large})
    >>> [(spec.block_size, spec.page_size_bytes) for spec in unified.values()]
    [(32, 65536), (16, 65536)]

    Raises:
        ValueError: the page of an attention layer is not a multiple of the page of another.
    """
    states = [s.page_size_bytes for s in specs.values() if isinstance(s, MambaSpec)]
    pages = {n: s.page_size_bytes for n, s in specs.items() if not isinstance(s, MambaSpec)}
    page = max(pages.values(), default=1)
    for name, small in pages.items():
        if page % small:
            largest = max(pages, key=lambda other: pages[other])
            raise ValueError(_why_not_one_page(name, largest, specs))
    # If a state is larger than a page, the pages of attention grow until the state fits.
    page *= -(-max(states, default=1) // page)
    return {
        name: replace(spec, page_size_padded=page if page > spec.real_page_size_bytes else None)
        if isinstance(spec, MambaSpec)
        else spec.copy_with_new_block_size(spec.block_size * (page // spec.page_size_bytes))
        for name, spec in specs.items()
    }


def _why_not_one_page(name: str, largest: str, specs: Specs) -> str:
    spec, wanted = specs[name], specs[largest]
    remedies = ["choose block sizes whose pages are multiples of each other"]
    if isinstance(spec, AttentionSpec):
        remedies.append(f"set page_size_padded={wanted.page_size_bytes} for {name!r}")
    if _one_group({other: _keep_all_tokens(each) for other, each in specs.items()}):
        remedies.append("keep the blocks of all tokens (hybrid=False)")
    return (
        f"page_size_bytes: a page of layer {largest!r} ({type(wanted).__name__}) has "
        f"{wanted.page_size_bytes} bytes, which is no multiple of the {spec.page_size_bytes} of "
        f"layer {name!r} ({type(spec).__name__}), so their groups cannot share one pool; "
        f"{', or '.join(remedies)}"
    )


def _layers_by_kind(specs: Specs) -> list[list[str]]:
    """Names of layers whose specs merge, in the order in which the kinds first appear."""
    kinds: list[tuple[list[KVCacheSpec], list[str]]] = []
    for name, spec in specs.items():
        for merged, names in kinds:
            if spec in merged or _is_mergeable([*merged, spec]):
                if spec not in merged:
                    merged.append(spec)
                names.append(name)
                break
        else:
            kinds.append(([spec], [name]))
    return [names for _, names in kinds]


def _deal_out(kinds: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Splits the layers of each kind into groups with about the same number of layers.

    A group with fewer layers than the largest group leaves part of each of its blocks unused.
    Groups are as large as the rarest kind. But if no kind has one and a half times as many layers
    as the rarest kind, groups are as large as the most frequent kind: a few unused pages cost less
    than a second, nearly empty group.
    """
    counts = [len(names) for names in kinds]
    size = max(counts) if 2 * max(counts) < 3 * min(counts) else min(counts)
    groups: list[Sequence[str]] = []
    for names in kinds:
        num_groups = -(-len(names) // size)
        # Every n-th layer, not runs of layers: each pipeline stage then has layers of all groups.
        groups.extend(names[index::num_groups] for index in range(num_groups))
    return groups


def build_kv_cache_config(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    limits: CacheLimits,
    *,
    num_blocks: int | None = None,
    hybrid: bool = True,
    one_allocation: bool = False,
) -> KVCacheConfig:
    """Groups the layers, and gives the pool as many blocks as fit into the memory.

    The j-th layers of all groups share a tensor.

    >>> from kvferry.cache import FullAttentionSpec
    >>> spec = FullAttentionSpec(16, num_kv_heads=8, head_size=128, dtype="bfloat16")
    >>> specs = {f"layer.{i}": spec for i in range(32)}
    >>> build_kv_cache_config(specs, 8 << 30, CacheLimits(8192)).num_blocks
    4096

    Args:
        specs: spec of each layer on a rank, in the model's order.
        available_bytes: number of bytes for the KV cache on this rank.
        limits: limits of a request; the pool must hold such a request.
        num_blocks: number of blocks of the pool, including the null block; overrides
            ``available_bytes`` and ``limits``.
        hybrid: see :func:`~kvferry.cache.group_layers`.
        one_allocation: whether the pages of a block are neighbours in a common allocation;
            otherwise each tensor has its own allocation.

    Raises:
        ValueError: no layer keeps anything; the layers make no groups; the blocks of a recurrent
            state are too short for its cache mode; or a request does not fit. In the last case the
            message contains the bytes needed, the bytes available, and the largest model length
            that fits.
    """
    groups = _require_groups(specs, hybrid)
    _check_bytes(available_bytes)
    _check_states(specs, limits)
    pages = _pages(groups)
    block_bytes = sum(nbytes for nbytes, _ in pages)
    if num_blocks is not None and num_blocks < 2:
        raise ValueError(
            f"num_blocks: {num_blocks} leaves nothing beside the null block; take 2 or more"
        )
    if num_blocks is None:
        needed = _needed_blocks(groups, limits)
        num_blocks = available_bytes // block_bytes
        if num_blocks < needed:
            longest = _largest_model_len(groups, num_blocks, limits)
            advice = "give more memory: no request fits, however short"
            if longest:
                advice = f"give more memory, or set max_model_len to {longest} or less"
            raise ValueError(
                f"available_bytes: {available_bytes}, but one request of max_model_len="
                f"{limits.max_model_len} needs {needed * block_bytes} ({needed} blocks of "
                f"{block_bytes}, those that no request owns included); {advice}"
            )
    return KVCacheConfig(num_blocks, _tensors(pages, num_blocks, one_allocation), groups)


def largest_model_len(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    limits: CacheLimits,
    *,
    hybrid: bool = True,
) -> int:
    """The longest sequence that fits into the memory, at most ``limits.max_model_len`` tokens.

    Args:
        specs: see :func:`build_kv_cache_config`.
        available_bytes: see :func:`build_kv_cache_config`.
        limits: limits of a request.
        hybrid: see :func:`~kvferry.cache.group_layers`.

    Returns:
        Number of tokens; 0 if not even a single token fits.

    Raises:
        ValueError: no layer keeps anything, or the layers make no groups.
    """
    groups = _require_groups(specs, hybrid)
    _check_bytes(available_bytes)
    block_bytes = sum(nbytes for nbytes, _ in _pages(groups))
    return _largest_model_len(groups, available_bytes // block_bytes, limits)


def _check_bytes(available_bytes: object) -> None:
    if not isinstance(available_bytes, int):
        raise ValueError(f"available_bytes: {available_bytes!r} is not a whole number")


def _require_groups(specs: Mapping[str, KVCacheSpec], hybrid: bool) -> tuple[KVCacheGroupSpec, ...]:
    groups = group_layers(specs, hybrid=hybrid)
    if not groups:
        raise ValueError(
            f"specs: none of {len(specs)} layers keeps anything; a model without layers that do "
            "needs no KV cache"
        )
    return groups


def _check_states(specs: Mapping[str, KVCacheSpec], limits: CacheLimits) -> None:
    for name, spec in specs.items():
        if (
            isinstance(spec, MambaSpec)
            and spec.mamba_cache_mode == "none"
            and spec.block_size < limits.max_model_len
        ):
            raise ValueError(
                f"block_size: {spec.block_size} tokens of layer {name!r}, whose one state per "
                f"request (mamba_cache_mode='none') stands for all max_model_len="
                f"{limits.max_model_len}; raise it to that, or take mamba_cache_mode='all'"
            )


def _pages(groups: Sequence[KVCacheGroupSpec]) -> list[tuple[int, list[str]]]:
    """The pages of every block: bytes, and the layers in the page, at most one per group."""
    pages = []
    for names in zip_longest(*(group.layer_names for group in groups)):
        sizes = [
            group.layer_spec(name).page_size_bytes
            for group, name in zip(groups, names, strict=True)
            if name is not None
        ]
        pages.append((max(sizes), [name for name in names if name is not None]))
    return pages


def _tensors(
    pages: Sequence[tuple[int, list[str]]], num_blocks: int, one_allocation: bool
) -> list[KVCacheTensor]:
    if not one_allocation:
        return [KVCacheTensor(num_blocks * nbytes, names) for nbytes, names in pages]
    offsets = [0, *accumulate(nbytes for nbytes, _ in pages)]
    stride = offsets.pop()
    return [
        KVCacheTensor(num_blocks * stride, names, offset, stride)
        for (_, names), offset in zip(pages, offsets, strict=True)
    ]


def _needed_blocks(groups: Sequence[KVCacheGroupSpec], limits: CacheLimits) -> int:
    """Blocks of a pool that holds a single request: the request's blocks and reserved blocks."""
    num_blocks = 1  # the null block
    for group in groups:
        spec = group.kv_cache_spec
        num_blocks += spec.num_reserved_blocks
        num_blocks += -(-spec.max_memory_usage_bytes(limits) // spec.page_size_bytes)
    return num_blocks


def _largest_model_len(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int, limits: CacheLimits
) -> int:
    def needed(max_model_len: int) -> int:
        return _needed_blocks(groups, replace(limits, max_model_len=max_model_len))

    # A longer request never needs fewer blocks.
    return bisect_right(range(1, limits.max_model_len + 1), num_blocks, key=needed)
