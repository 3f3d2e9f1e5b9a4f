"""What memory itself allows: kernels that do nothing but pass over it."""

from typing import Any

from kvferry.layouts.compiled import kernel
from kvferry.layouts.intrinsics import fence, stream_64


@kernel
def stream(target: int, source: int, nbytes: int) -> None:
    """Copies with stores past the cache, so that no line of the target is read.

    Args:
        target: address, a multiple of 64.
        source: address.
        nbytes: a multiple of 64.
    """
    for at in range(0, nbytes, 64):
        stream_64(target + at, source + at)
    fence()


@kernel
def rewrite(words: Any) -> None:
    """Reads and writes each word of an int64 array once, where it lies."""
    for index in range(len(words)):
        words[index] ^= 1
