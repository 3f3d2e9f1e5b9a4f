"""Conversion of dense floating-point elements, with the base dependencies alone.

Every conversion goes through float32, which holds each value of the narrower formats exactly.
Results equal the results of torch's ``to`` (2.13), even if rounding happens twice (float64 to a
narrow format) and beyond the largest value. A NaN stays a NaN; its bits are not specified.

================  ====  ========  ========  =========  ==================
dtype             bits  exponent  fraction  infinity   beyond the largest
================  ====  ========  ========  =========  ==================
float64           64    11        52        yes        infinity
float32           32    8         23        yes        infinity
bfloat16          16    8         7         yes        infinity
float16           16    5         10        yes        infinity
float8_e5m2       8     5         2         yes        infinity
float8_e4m3fn     8     4         3         no         the largest value
float8_e5m2fnuz   8     5         2         no         NaN
float8_e4m3fnuz   8     4         3         no         NaN
================  ====  ========  ========  =========  ==================

The library ml_dtypes (0.6) was measured and not taken: its float8_e4m3fn becomes NaN beyond the
largest value, and all conversions from and to 8 bits took 8 to 100 times as long.

The formats of 8 bits come from *FP8 Formats for Deep Learning* (Micikevicius and others, 2022) and
from *8-bit Numerical Formats for Deep Neural Networks* (Noune and others, 2022; ``fnuz``: no
infinity, a single zero, a single NaN).
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class _Format(NamedTuple):
    """A binary floating-point format; the exponent's bias decides its range."""

    itemsize: int
    fraction: int
    """Number of bits of the fraction, after the point."""
    bias: int
    largest: int
    """Code of the largest finite value, without its sign."""
    beyond: int
    """Code of values above the largest."""
    nan: int
    signed_zero: bool = True

    @property
    def smallest_exponent(self) -> int:
        """Exponent of the smallest normal value, as a power of two."""
        return 1 - self.bias

    @property
    def largest_exponent(self) -> int:
        return (self.largest >> self.fraction) - self.bias

    @property
    def has_infinity(self) -> bool:
        return self.beyond not in (self.largest, self.nan)


_FORMATS = {
    "float64": _Format(8, 52, 1023, 0x7FEF_FFFF_FFFF_FFFF, 0x7FF << 52, 0x7FF8 << 48),
    "float32": _Format(4, 23, 127, 0x7F7F_FFFF, 0x7F80_0000, 0x7FC0_0000),
    "bfloat16": _Format(2, 7, 127, 0x7F7F, 0x7F80, 0x7FC0),
    "float16": _Format(2, 10, 15, 0x7BFF, 0x7C00, 0x7E00),
    "float8_e5m2": _Format(1, 2, 15, 0x7B, 0x7C, 0x7F),
    "float8_e4m3fn": _Format(1, 3, 7, 0x7E, 0x7E, 0x7F),
    "float8_e5m2fnuz": _Format(1, 2, 16, 0x7F, 0x80, 0x80, signed_zero=False),
    "float8_e4m3fnuz": _Format(1, 3, 8, 0x7F, 0x80, 0x80, signed_zero=False),
}

_CODES: dict[int, type[np.unsignedinteger[Any]]] = {
    1: np.uint8,
    2: np.uint16,
    4: np.uint32,
    8: np.uint64,
}


def is_convertible(source: str, target: str) -> bool:
    """Whether :func:`convert` knows both dtypes, or they are equal."""
    return source == target or (source in _FORMATS and target in _FORMATS)


def is_lossless(source: str, target: str) -> bool:
    """Whether every value of one dtype is a value of another.

    >>> is_lossless("bfloat16", "float32"), is_lossless("bfloat16", "float16")
    (True, False)

    Args:
        source: bare name of a dtype, as ``EngineGeometry.dtype``.
        target: bare name of a dtype.
    """
    if source == target:
        return True
    if not is_convertible(source, target):
        return False
    one, two = _FORMATS[source], _FORMATS[target]
    finest = [form.smallest_exponent - form.fraction for form in (one, two)]
    return (
        one.fraction <= two.fraction
        and finest[0] >= finest[1]
        and _maximum(one) <= _maximum(two)
        and one.has_infinity <= two.has_infinity
        and one.signed_zero <= two.signed_zero
    )


def _maximum(form: _Format) -> tuple[int, int]:
    """The largest finite value: exponent, and fraction in units of 2 to the -52."""
    fraction = form.largest & ((1 << form.fraction) - 1)
    return form.largest_exponent, fraction << (52 - form.fraction)


def convert(source: Bytes, source_dtype: str, target: Bytes, target_dtype: str) -> None:
    """Converts dense elements, rounding to nearest, ties to even.

    >>> target = np.zeros(2, dtype=np.uint8)
    >>> convert(np.array([1.5], dtype=np.float32).view(np.uint8), "float32", target, "bfloat16")
    >>> target.tobytes().hex()  # 0x3fc0, little-endian
    'c03f'

    Args:
        source: uint8[n * source itemsize], contiguous.
        source_dtype: bare name of a floating-point dtype.
        target: uint8[n * target itemsize], contiguous; written. The two arrays must not overlap.
        target_dtype: bare name of a floating-point dtype.

    Raises:
        ValueError: a dtype is not a floating-point dtype, or sizes do not fit.
    """
    for dtype in (source_dtype, target_dtype):
        if dtype not in _FORMATS:
            raise ValueError(
                f"dtype: {dtype!r} cannot be converted; known are {', '.join(_FORMATS)}"
            )
    count, rest = divmod(source.nbytes, _FORMATS[source_dtype].itemsize)
    if rest or target.nbytes != count * _FORMATS[target_dtype].itemsize:
        raise ValueError(
            f"target: {target.nbytes} bytes of {target_dtype} for {source.nbytes} bytes of "
            f"{source_dtype}; give as many elements"
        )
    if source_dtype == target_dtype:
        target[:] = source
        return
    with np.errstate(over="ignore", invalid="ignore"):  # a cast of a signalling NaN is invalid
        if source_dtype == "float16" or _FORMATS[source_dtype].itemsize == 1:
            from kvferry.layouts.convert_kernels import look_up

            codes = source.view(_codes(source_dtype))
            look_up(codes, _table(source_dtype, target_dtype), target.view(_codes(target_dtype)))
        else:
            _encode(_decode(source, source_dtype), target, target_dtype)


def _codes(dtype: str) -> type[np.unsignedinteger[Any]]:
    return _CODES[_FORMATS[dtype].itemsize]


def _decode(source: Bytes, dtype: str) -> npt.NDArray[np.float32]:
    if dtype == "bfloat16":
        return (source.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    return source.view(dtype).astype(np.float32, copy=False)


def _encode(values: npt.NDArray[np.float32], target: Bytes, dtype: str) -> None:
    if dtype in ("float64", "float32"):
        target.view(dtype)[:] = values
        return
    from kvferry.layouts.convert_kernels import encode

    form = _FORMATS[dtype]
    encode(
        values.view(np.int32),
        target.view(_codes(dtype)),
        form.fraction,
        form.bias,
        form.largest,
        form.beyond,
        form.nan,
        form.signed_zero,
    )


@functools.cache
def _table(source_dtype: str, target_dtype: str) -> npt.NDArray[Any]:
    """Code in the target's format for each code of a narrow source."""
    if source_dtype == "float16":
        values = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
    else:
        values = _values_of_8_bits(_FORMATS[source_dtype])
    target = np.empty(len(values), dtype=_codes(target_dtype))
    _encode(values, target.view(np.uint8), target_dtype)
    return target


def _values_of_8_bits(form: _Format) -> npt.NDArray[np.float32]:
    codes = np.arange(128)
    exponent, fraction = codes >> form.fraction, codes & ((1 << form.fraction) - 1)
    whole = np.where(exponent > 0, 1 << form.fraction, 0) + fraction
    scale = np.maximum(exponent, 1) - form.bias - form.fraction
    values = np.ldexp(whole.astype(np.float32), scale)
    if form.has_infinity:
        values[form.beyond] = np.inf
    values[codes > (form.beyond if form.has_infinity else form.largest)] = np.nan
    both = np.concatenate([values, -values])
    if not form.signed_zero:
        both[form.nan] = np.nan
    return both
