"""Conversions of floating-point formats as Numba kernels on bits."""

from typing import Any

from kvferry.layouts.compiled import kernel


@kernel
def encode(
    bits: Any,
    codes: Any,
    fraction: int,
    bias: int,
    largest: int,
    beyond: int,
    nan: int,
    signed_zero: bool,
) -> None:
    """Rounds to nearest, ties to even.

    Args:
        bits: int32[n], the bits of float32 values.
        codes: uint8[n] or uint16[n], written: a sign, an exponent and a fraction.
        fraction: number of bits of the target's fraction.
        bias: bias of the target's exponent.
        largest: code of the target's largest finite value, without the sign.
        beyond: code of values above the largest.
        nan: code of NaN.
        signed_zero: whether zero has a sign; if not, NaN and ``beyond`` have no sign either.
    """
    sign_at = 15 if largest > 255 else 7
    cut = 23 - fraction
    for index in range(len(bits)):
        word = int(bits[index])
        sign = 1 << sign_at if word < 0 else 0
        word &= 0x7FFFFFFF
        exponent = (word >> 23) - 127 + bias
        if word > 0x7F800000:
            code = nan
        else:
            # A carry out of the fraction goes on into the exponent. With float32's own bias,
            # subnormal values have no leading 1 either, and are cut like normal values.
            if exponent >= 1 or bias == 127:
                code = ((word + (1 << (cut - 1)) - 1 + (word >> cut & 1)) >> cut) - (
                    (127 - bias) << fraction
                )
            else:  # subnormal: write out the leading 1, and cut more of the fraction
                more = min(cut + 1 - exponent, 25)
                whole = word & 0x7FFFFF | 0x800000
                code = (whole + (1 << (more - 1)) - 1 + (whole >> more & 1)) >> more
            if code > largest:
                code = beyond
        # `in` with a set would build the set for each element.
        unsigned = not signed_zero and (code == 0) | (code == nan)
        codes[index] = code if unsigned else code | sign


@kernel
def look_up(codes: Any, table: Any, found: Any) -> None:
    """``found[i] = table[codes[i]]``, for unsigned codes."""
    for index in range(len(codes)):
        found[index] = table[codes[index]]
