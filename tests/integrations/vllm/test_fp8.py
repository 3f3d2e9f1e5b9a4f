"""Cells of an fp8 cache are scaled, so engines that have one pair with their like only."""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.integrations.vllm.fingerprint import fingerprint
from kvferry.topology import EngineGeometry, ParallelShape


def engine(*dtypes):
    """The fingerprint of an engine whose KV cache groups have these dtypes."""
    config = SimpleNamespace(to_dict=lambda: {"layers": 2})
    model = SimpleNamespace(
        model="tiny",
        hf_config=config,
        hf_text_config=config,
        architectures=["LlamaForCausalLM"],
        get_total_num_hidden_layers=lambda: 2,
        quantization=None,
        seed=0,
    )
    sizes: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 1,
        "head_size": 8,
        "block_size": 16,
        "layout": "NHD",
    }
    groups: Any = tuple(
        SimpleNamespace(geometry=EngineGeometry(**sizes, dtype=dtype, parallel=ParallelShape()))
        for dtype in dtypes
    )
    settings = SimpleNamespace(
        model_config=model,
        speculative_config=None,
        load_config=SimpleNamespace(load_format="dummy"),
    )
    return fingerprint(settings, groups)


@pytest.mark.parametrize("fp8", [("float8_e4m3fn",), ("bfloat16", "float8_e5m2")])
@pytest.mark.parametrize("other", ["bfloat16", "float16", "float32"])
def test_fp8_is_not_converted_for_its_scales_would_be_lost(fp8, other):
    # Here, not above: a Numba that is loaded before vLLM's first engine keeps it from starting.
    from kvferry.layouts.convert import is_convertible

    assert not is_convertible(engine(*fp8).dtype, engine(other).dtype)


def test_two_engines_with_the_same_fp8_have_one_fingerprint():
    assert engine("float8_e4m3fn") == engine("float8_e4m3fn")
    assert engine("float8_e4m3fn").dtype != engine("float8_e5m2").dtype
