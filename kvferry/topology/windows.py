"""Which tokens a layer with limited sight still needs. The one place for this arithmetic.

A layer with a sliding window of ``W`` lets token ``i`` attend to the tokens ``i - W + 1 .. i``; one
with chunks of ``C`` lets it attend to those of its own chunk, ``i // C * C .. i``. Once the tokens
``0 .. n - 1`` are computed, the next one is ``n``, and no later one looks further back than it:

    token     0 ......... first_kept_token(n) ............ n - 1 | n ...
              never needed again                still needed     | to come

Block managers free by it, geometries clip by it, connectors transfer by it.
"""

from collections.abc import Sequence


def first_kept_token(
    num_computed: int,
    *,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
) -> int:
    """The first token that token ``num_computed``, or a later one, may attend to.

    >>> first_kept_token(10, sliding_window=4)  # token 10 attends to 7, 8, 9 and itself
    7
    >>> first_kept_token(2, sliding_window=4)
    0
    >>> first_kept_token(10, attention_chunk_size=4)  # token 10 is in the chunk 8 .. 11
    8
    >>> first_kept_token(8, attention_chunk_size=4)
    8
    >>> first_kept_token(10)
    0

    Args:
        num_computed: tokens computed so far, 0 or more; token ``num_computed`` is the next.
        sliding_window: tokens that a token attends to, itself included; ``None`` for all.
        attention_chunk_size: tokens per chunk; ``None`` for no chunks.

    Returns:
        A position from 0 to ``num_computed``. Equal to it when nothing is needed any more: at the
        start of a chunk, or with a window of 1.

    Raises:
        ValueError: both a window and a chunk are given.
    """
    if sliding_window is not None:
        if attention_chunk_size is not None:
            raise ValueError(
                f"sliding_window={sliding_window} and attention_chunk_size="
                f"{attention_chunk_size}: a layer keeps by one of them; give only that one"
            )
        return max(0, num_computed - sliding_window + 1)
    if attention_chunk_size is not None:
        return num_computed // attention_chunk_size * attention_chunk_size
    return 0


def computed_to_forget(
    num_tokens: int,
    *,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
) -> int | None:
    """Fewest computed tokens after which the first ``num_tokens`` tokens are never needed again.

    The inverse of :func:`first_kept_token`.

    >>> computed_to_forget(7, sliding_window=4)
    10
    >>> computed_to_forget(7, attention_chunk_size=4)
    8

    Args:
        num_tokens: leading tokens, 0 or more.
        sliding_window: as in :func:`first_kept_token`.
        attention_chunk_size: likewise.

    Returns:
        The smallest ``n`` with ``first_kept_token(n) >= num_tokens``, or ``None`` if there is none.

    Raises:
        ValueError: both a window and a chunk are given.
    """
    first_kept_token(0, sliding_window=sliding_window, attention_chunk_size=attention_chunk_size)
    if num_tokens <= 0:
        return 0
    if sliding_window is not None:
        return num_tokens + sliding_window - 1
    if attention_chunk_size is not None:
        return -(-num_tokens // attention_chunk_size) * attention_chunk_size
    return None


def num_leading_nulls(block_ids: Sequence[int]) -> int:
    """How many null blocks a table begins with: those whose tokens were let go.

    >>> num_leading_nulls([0, 0, 7, 0, 9])
    2
    """
    return next((index for index, block in enumerate(block_ids) if block), len(block_ids))
