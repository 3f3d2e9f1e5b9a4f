"""Arithmetic on the KV heads of a model: which TP ranks hold which of them.

With more heads than ranks, neighbouring heads share a rank; with more ranks than heads,
neighbouring ranks hold replicas of one head, and context parallelism spreads its tokens over them.
"""

from collections.abc import Iterator


def heads_of(tp_rank: int, tp: int, num_kv_heads: int) -> range:
    """The heads of one TP rank; never empty.

    >>> [heads_of(rank, 2, 3) for rank in range(2)]
    [range(0, 1), range(1, 3)]
    """
    first = tp_rank * num_kv_heads // tp
    return range(first, max(first + 1, (tp_rank + 1) * num_kv_heads // tp))


def replicas_of(head: int, tp: int, num_kv_heads: int) -> range:
    """The TP ranks that hold a head.

    >>> [replicas_of(head, 5, 2) for head in range(2)]
    [range(0, 3), range(3, 5)]
    """
    if tp <= num_kv_heads:
        first = ((head + 1) * tp - 1) // num_kv_heads
        return range(first, first + 1)
    return range(-(-head * tp // num_kv_heads), -(-(head + 1) * tp // num_kv_heads))


def split_heads(heads: range, tp: int, num_kv_heads: int) -> Iterator[tuple[range, range]]:
    """Splits heads at the borders between TP ranks: some heads, and the ranks that hold them.

    >>> list(split_heads(range(1, 4), 2, 4))
    [(range(1, 2), range(0, 1)), (range(2, 4), range(1, 2))]
    >>> list(split_heads(range(0, 2), 5, 2))
    [(range(0, 1), range(0, 3)), (range(1, 2), range(3, 5))]
    """
    first = heads.start
    while first < heads.stop:
        replicas = replicas_of(first, tp, num_kv_heads)
        stop = min(heads.stop, heads_of(replicas.start, tp, num_kv_heads).stop)
        yield range(first, stop), replicas
        first = stop


def query_heads_of(tp_rank: int, tp: int, num_kv_heads: int, num_query_heads: int) -> range:
    """The query heads that one TP rank computes; may be empty.

    They follow their KV head. Where that is replicated, its group of query heads is divided
    contiguously over the replicas.

    >>> [query_heads_of(rank, 3, 1, 4) for rank in range(3)]
    [range(0, 1), range(1, 2), range(2, 4)]

    Raises:
        ValueError: ``num_query_heads`` is not a multiple of the KV heads.
    """
    group, remainder = divmod(num_query_heads, num_kv_heads)
    if remainder or group < 1:
        raise ValueError(
            f"num_query_heads: {num_query_heads} is not a multiple of the {num_kv_heads} KV heads"
        )
    heads = heads_of(tp_rank, tp, num_kv_heads)
    if tp <= num_kv_heads:
        return range(heads.start * group, heads.stop * group)
    replicas = replicas_of(heads.start, tp, num_kv_heads)
    index, count, first = tp_rank - replicas.start, len(replicas), heads.start * group
    return range(first + index * group // count, first + (index + 1) * group // count)


def check_dcp(dcp: int, tp: int, num_kv_heads: int) -> None:
    """Checks that decode context parallelism divides the replicas of every head.

    Raises:
        ValueError: it does not; the message says how many replicas there are.
    """
    most, remainder = divmod(tp, num_kv_heads) if tp > num_kv_heads else (1, 0)
    if dcp > 1 and (remainder or most % dcp):
        counts = f"{most} or {most + 1}" if remainder else f"{most}"
        raise ValueError(
            f"parallel: dcp={dcp} does not divide the {counts} TP ranks that hold each of the "
            f"{num_kv_heads} KV heads with tp={tp}; its ranks are replicas of one head"
        )
