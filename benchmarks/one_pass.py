"""What memory itself allows: a kernel that does nothing but pass over it."""

from typing import Any

from kvferry.layouts.compiled import kernel


@kernel
def rewrite(words: Any) -> None:
    """Reads and writes each word of an int64 array once, where it lies."""
    for index in range(len(words)):
        words[index] ^= 1
