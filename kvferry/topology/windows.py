"""The tokens that a layer with limited sight still needs. All this arithmetic is in this module.

In a layer with a sliding window of ``W``, token ``i`` attends to the tokens ``i - W + 1 .. i``. In
a layer with chunks of ``C``, token ``i`` attends to the tokens of its own chunk, ``i // C * C ..
i``. After the tokens ``0 .. n - 1`` are computed, the next token is ``n``, and no later token
attends to an earlier token than token ``n`` does:

    token     0 ......... first_kept_token(n) ............ n - 1 | n ...
              never needed again                still needed     | to come

Block managers free blocks, geometries clip spans and connectors choose tokens with this arithmetic.
"""

from collections.abc import Sequence


def first_kept_token(
    num_computed: int,
    *,
    sliding_window: int | None = None,
    attention_chunk_size: int | None = None,
) -> int:
    """The first token to which token ``num_computed``, or a later token, may attend.

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
        num_computed: number of tokens computed so far, 0 or more; token ``num_computed`` is next.
        sliding_window: number of tokens to which a token attends, including itself; ``None`` for
            all.
        attention_chunk_size: number of tokens per chunk; ``None`` for no chunks.

    Returns:
        A position from 0 to ``num_computed``. It equals ``num_computed`` if no computed token is
        needed any more: at the start of a chunk, or with a window of 1.

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
    """The least number of computed tokens after which the first ``num_tokens`` tokens are never
    needed.

    The inverse of :func:`first_kept_token`.

    >>> computed_to_forget(7, sliding_window=4)
    10
    >>> computed_to_forget(7, attention_chunk_size=4)
    8

    Args:
        num_tokens: number of leading tokens, 0 or more.
        sliding_window: as in :func:`first_kept_token`.
        attention_chunk_size: as in :func:`first_kept_token`.

    Returns:
        The smallest ``n`` with ``first_kept_token(n) >= num_tokens``; ``None`` if there is no such
        ``n``.

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
    """Number of null blocks at the start of a table: blocks whose tokens were freed.

    >>> num_leading_nulls([0, 0, 7, 0, 9])
    2
    """
    return next((index for index, block in enumerate(block_ids) if block), len(block_ids))
