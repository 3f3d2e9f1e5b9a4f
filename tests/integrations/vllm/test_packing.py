"""The order of cells in a block is found out by writing one."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")


import torch

from kvferry.errors import ConfigError
from kvferry.integrations.vllm.compat import v0_28, write_cpu_block
from kvferry.integrations.vllm.packing import TRANSPOSED_K
from kvferry.integrations.vllm.packing import probe_packing as probe


def probe_packing(*args):
    return probe(*args, name="test")


def pack(order_k, order_v):
    """A writer that stores cells in given orders of the flat index."""
    return lambda k, v: torch.cat([k.flatten()[order_k], v.flatten()[order_v]])


def test_rows_of_tokens_are_known():
    cells = torch.arange(4 * 8)
    packing = probe_packing(pack(cells, cells), torch.float32, 4, 8)
    assert (packing.layout, packing.name) == ("BH(k=ND,v=ND)", "")


def test_a_transposed_k_is_known():
    cells = torch.arange(4 * 8)
    packing = probe_packing(pack(cells.view(4, 8).T.flatten(), cells), torch.float16, 4, 8)
    assert (packing.layout, packing.name) == (TRANSPOSED_K, "")


def test_any_other_order_is_opaque_and_told_from_others():
    cells = torch.arange(4 * 8)
    one, two = (
        probe_packing(pack(cells.roll(shift), cells), torch.float32, 4, 8) for shift in (1, 2)
    )
    assert one.name
    assert two.name
    assert one != two


def test_a_place_without_a_cell_is_no_known_order():
    cells = torch.arange(4 * 8)

    def write(k, v):
        block = pack(cells, cells)(k, v)
        block[5] = 0
        return block

    assert probe_packing(write, torch.float32, 4, 8).name


@pytest.mark.parametrize("block_size", [32, 64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_vllms_own_operation_keeps_k_transposed(dtype, block_size):
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(dtype, block_size, 64)
    packing = probe_packing(lambda k, v: write_cpu_block(isa, k, v, "auto"), dtype, block_size, 64)
    assert (packing.layout, packing.name) == (TRANSPOSED_K, "")


def test_known_data_lies_where_the_layout_says():
    import numpy as np

    from kvferry.layouts import Layout
    from kvferry.layouts.layout import Box

    k, v = torch.randn(64, 32), torch.randn(64, 32)
    block = write_cpu_block("vec", k, v, "auto").numpy()
    box = Box(1, 1, 64, 1, (("k", 32), ("v", 32)))
    places = Layout.parse(TRANSPOSED_K).strides(box, (block.size, block.size, 1))
    for part, cells in (("k", k), ("v", v)):
        at = places[part]
        n, d = np.meshgrid(np.arange(64), np.arange(32), indexing="ij")
        assert np.array_equal(block[at.offset + at.token * n + at.element * d], cells.numpy())


def test_of_vllm_0_28_latents_get_a_dim_of_heads_and_other_shapes_are_refused():
    release = v0_28.Release()
    spec = SimpleNamespace(num_kv_heads=2, head_size=8, head_size_v=8)
    latents, usual = torch.arange(60).view(3, 4, 5), torch.zeros(3, 2, 4, 16)
    assert release.cache_view("layer", spec, latents).shape == (3, 1, 4, 5)
    assert release.cache_view("layer", spec, usual) is usual
    for shape in ((3, 4, 2, 16), (3, 2, 4, 8), (2, 3, 4, 2, 8)):
        with pytest.raises(ConfigError, match=r"KV cache of layer: shape .* vLLM 0\.29 or later"):
            release.cache_view("layer", spec, torch.zeros(shape))
