"""From what layers keep and how much memory there is to the KV cache of an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from kvferry.cache.grouping import group_layers
from kvferry.cache.kv_cache_config import KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from kvferry.cache.specs import CacheLimits, KVCacheSpec
from kvferry.cache.specs_mamba import MambaSpec


@dataclass(frozen=True, slots=True)
class _PageSlot:
    """The page at one place of every block."""

    nbytes: int
    layer_names: tuple[str, ...]
    """At most one layer of each group."""


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
        specs: what each layer keeps on one rank, in the model's order.
        available_bytes: memory of that rank for the KV cache.
        limits: of one request; the pool must hold it.
        num_blocks: blocks of the pool, the null block included, whatever ``available_bytes`` and
            ``limits`` say.
        hybrid: see :func:`~kvferry.cache.group_layers`.
        one_allocation: whether the pages of a block lie side by side, in one allocation, instead
            of each tensor in its own.

    Raises:
        ValueError: no layer keeps anything, the layers make no groups, a recurrent state has
            blocks too short for the way it is kept, or one request does not fit; the message then
            has the bytes wanted, the bytes there are, and the largest model length that fits.
    """
    groups = _require_groups(specs, hybrid)
    _check_bytes(available_bytes)
    _check_states(specs, limits)
    slots = _page_slots(groups)
    block_bytes = sum(slot.nbytes for slot in slots)
    if num_blocks is not None and num_blocks < 2:
        raise ValueError(
            f"num_blocks: {num_blocks} leaves nothing beside the null block; take 2 or more"
        )
    if num_blocks is None:
        needed = _needed_blocks(groups, limits)
        num_blocks = available_bytes // block_bytes
        if num_blocks < needed:
            longest = _largest_model_len(groups, num_blocks, limits)
            raise ValueError(
                f"available_bytes: {available_bytes}, but one request of max_model_len="
                f"{limits.max_model_len} needs {needed * block_bytes} ({needed} blocks of "
                f"{block_bytes}, those that no request owns included); {_advise(longest)}"
            )
    return KVCacheConfig(num_blocks, _tensors(slots, num_blocks, one_allocation), groups)


def largest_model_len(
    specs: Mapping[str, KVCacheSpec],
    available_bytes: int,
    limits: CacheLimits,
    *,
    hybrid: bool = True,
) -> int:
    """The longest sequence, at most ``limits.max_model_len`` tokens, that fits into the memory.

    Args:
        specs: see :func:`build_kv_cache_config`.
        available_bytes: see :func:`build_kv_cache_config`.
        limits: of one request.
        hybrid: see :func:`~kvferry.cache.group_layers`.

    Returns:
        Tokens; 0 if not even one fits.

    Raises:
        ValueError: no layer keeps anything, or the layers make no groups.
    """
    groups = _require_groups(specs, hybrid)
    _check_bytes(available_bytes)
    block_bytes = sum(slot.nbytes for slot in _page_slots(groups))
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


def _page_slots(groups: Sequence[KVCacheGroupSpec]) -> list[_PageSlot]:
    slots = []
    for index in range(max(len(group.layer_names) for group in groups)):
        members = [
            (group.layer_names[index], group) for group in groups if index < len(group.layer_names)
        ]
        nbytes = max(group.layer_spec(name).page_size_bytes for name, group in members)
        slots.append(_PageSlot(nbytes, tuple(name for name, _ in members)))
    return slots


def _tensors(
    slots: Sequence[_PageSlot], num_blocks: int, one_allocation: bool
) -> list[KVCacheTensor]:
    if not one_allocation:
        return [KVCacheTensor(num_blocks * slot.nbytes, slot.layer_names) for slot in slots]
    stride = sum(slot.nbytes for slot in slots)
    tensors = []
    offset = 0
    for slot in slots:
        tensors.append(KVCacheTensor(num_blocks * stride, slot.layer_names, offset, stride))
        offset += slot.nbytes
    return tensors


def _needed_blocks(groups: Sequence[KVCacheGroupSpec], limits: CacheLimits) -> int:
    """Blocks of a pool that holds one request: its own in all groups, and those of no request."""
    num_blocks = 1  # the null block
    for group in groups:
        spec = group.kv_cache_spec
        num_blocks += spec.num_reserved_blocks
        num_blocks += -(-spec.max_memory_usage_bytes(limits) // spec.page_size_bytes)
    return num_blocks


def _largest_model_len(
    groups: Sequence[KVCacheGroupSpec], num_blocks: int, limits: CacheLimits
) -> int:
    # Bisection: a longer request never needs fewer blocks.
    fits, too_long = 0, limits.max_model_len + 1
    while too_long - fits > 1:
        middle = (fits + too_long) // 2
        if _needed_blocks(groups, replace(limits, max_model_len=middle)) <= num_blocks:
            fits = middle
        else:
            too_long = middle
    return fits


def _advise(longest: int) -> str:
    if longest:
        return f"give more memory, or set max_model_len to {longest} or less"
    return "give more memory: no request fits, however short"
