"""What a cell is made of: its parts and their dtypes."""

from dataclasses import dataclass
from typing import Any

#: Bytes per element of every dtype a KV cache may have.
ITEMSIZES = {
    **dict.fromkeys(("float64", "int64", "uint64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16", "uint16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"), 1),
    **dict.fromkeys(("int8", "uint8"), 1),
}


def dtype_name(dtype: Any) -> str:
    """The bare name of a torch or NumPy dtype, or of a name.

    >>> dtype_name("torch.bfloat16"), dtype_name("float32")
    ('bfloat16', 'float32')

    Raises:
        ValueError: not a dtype that a KV cache may have.
    """
    text = dtype.__name__ if isinstance(dtype, type) else str(dtype)
    name = text.removeprefix("torch.")
    if name not in ITEMSIZES:
        raise ValueError(f"dtype: {dtype!r} is unknown; known dtypes: {', '.join(ITEMSIZES)}")
    return name


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of content of a cell."""

    name: str
    """``k`` and ``v``, or ``latent`` for MLA; ``k_scale`` and so on for the scales of one."""
    head_size: int
    """Elements per head."""
    dtype: str
    itemsize: int
    """Bytes per element."""
