"""Conversion against torch: every code of the narrow formats, and float32 of all magnitudes."""

import itertools

import numpy as np
import pytest
import torch

from kvferry.layouts.convert import _FORMATS, convert, is_convertible, is_lossless

DTYPES = tuple(_FORMATS)
PAIRS = [pair for pair in itertools.product(DTYPES, DTYPES) if pair[0] != pair[1]]


def itemsize(dtype):
    return getattr(torch, dtype).itemsize


def samples(dtype):
    """Every code of a narrow format; of a wide one random codes, random values and all ties."""
    if itemsize(dtype) <= 2:
        return np.arange(256 ** itemsize(dtype), dtype=f"u{itemsize(dtype)}").view(np.uint8)
    rng = np.random.default_rng(0)
    spread = rng.standard_normal(60_000) * 10 ** rng.uniform(-42, 39, 60_000)
    narrow = rng.standard_normal(60_000) * 10 ** rng.uniform(-9, 6, 60_000)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16 | 0x8000).view(np.float32)
    special = [0.0, -0.0, np.inf, -np.inf, np.nan, 2.0**-126, 2.0**-149, 3.4028235e38]
    with np.errstate(all="ignore"):
        values = np.concatenate([spread, narrow, ties, special]).astype(dtype)
    codes = rng.integers(0, 256, 60_000 * itemsize(dtype), dtype=np.uint8)
    return np.concatenate([values.view(np.uint8), codes])


def converted(source, source_dtype, target_dtype):
    count = source.nbytes // itemsize(source_dtype)
    target = np.zeros(count * itemsize(target_dtype), dtype=np.uint8)
    convert(source, source_dtype, target, target_dtype)
    return target


def values_of(codes, dtype):
    return torch.from_numpy(codes.copy()).view(getattr(torch, dtype)).double()


def assert_same(found, wanted):
    different = (found != wanted) & ~(found.isnan() & wanted.isnan())
    different |= (found == 0) & (torch.signbit(found) != torch.signbit(wanted))
    assert not different.any(), (found[different][:3], wanted[different][:3])


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_results_are_torchs(source, target):
    given_ = samples(source)
    wanted = torch.from_numpy(given_).view(getattr(torch, source)).to(getattr(torch, target))
    assert_same(values_of(converted(given_, source, target), target), wanted.double())


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_lossless_is_what_comes_back_as_it_was(source, target):
    given_ = samples(source)
    values = values_of(given_, source)
    back = values_of(converted(given_, source, target), target)
    same = (values == back) & (torch.signbit(values) == torch.signbit(back))
    assert is_lossless(source, target) == bool((same | (values.isnan() & back.isnan())).all())


def test_elements_that_lie_unaligned_are_converted():
    whole = np.zeros(1 + 4 * 6, dtype=np.uint8)
    source, target = whole[1:9], np.zeros(17, dtype=np.uint8)[1:]
    source[:] = np.array([1.5, -3.0], dtype=np.float32).view(np.uint8)
    convert(source, "float32", target[:4], "bfloat16")
    convert(target[:4], "bfloat16", target[8:], "float32")
    assert target[8:].tobytes() == source.tobytes()


def test_integers_are_lossless_to_themselves_only():
    assert is_lossless("int8", "int8")
    assert not is_convertible("int8", "float32")
    assert not is_lossless("int8", "float32")
    with pytest.raises(ValueError, match="'int8' cannot be converted; known are float64"):
        convert(np.zeros(1, np.uint8), "int8", np.zeros(4, np.uint8), "float32")


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="6 bytes of float32 for 4 bytes of bfloat16"):
        convert(np.zeros(4, np.uint8), "bfloat16", np.zeros(6, np.uint8), "float32")
    with pytest.raises(ValueError, match="for 3 bytes of bfloat16"):
        convert(np.zeros(3, np.uint8), "bfloat16", np.zeros(4, np.uint8), "float32")
