"""What is described of SGLang's pools, and what is refused by name."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvferry.errors import ConfigError
from kvferry.integrations.sglang.caches import cache_groups
from kvferry.topology import ParallelShape, plan_transfer, run_copies

ON_CPU = {"dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
PAGES = 20
WINDOW = 20


def mha(page_size, **more):
    shape = {"head_num": 2, "head_dim": 4, "layer_num": 2} | more
    size = (PAGES - 1) * page_size
    return MHATokenToKVPool(size=size, page_size=page_size, **ON_CPU, **shape)


def mla(page_size):
    return MLATokenToKVPool(
        size=(PAGES - 1) * page_size,
        page_size=page_size,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        layer_num=2,
        **ON_CPU,
    )


def windowed(page_size):
    """Layers 0 and 2 have a window, layer 1 keeps all tokens."""
    return SWAKVPool(
        size=(PAGES - 1) * page_size,
        size_swa=(PAGES - 1) * page_size,
        page_size=page_size,
        dtype=torch.float32,
        head_num=2,
        head_dim=4,
        swa_attention_layer_ids=[0, 2],
        full_attention_layer_ids=[1],
        device="cpu",
    )


def groups_of(pool, states=(), heads=2):
    return cache_groups(
        pool,
        list(states),
        ParallelShape(),
        heads,
        window=WINDOW,
        model=None,
        longest=4096,
        gather=lambda layers: [layers],
    )


def buffers(pool):
    if isinstance(pool, MLATokenToKVPool):
        return pool.kv_buffer
    return [*pool.k_buffer, *pool.v_buffer]


def slots(table, page_size, tokens):
    return torch.tensor([table[t // page_size] * page_size + t % page_size for t in tokens])


@pytest.mark.parametrize("make", [mha, mla], ids=["heads", "latent"])
@pytest.mark.parametrize("pages", [(4, 6), (1, 4), (6, 4)], ids=str)
def test_cells_move_between_pools_of_any_two_page_sizes(make, pages):
    source, target = (make(size) for size in pages)
    for each in buffers(source):
        each.copy_(torch.rand(each.shape))
    (one,), (two,) = groups_of(source), groups_of(target)
    assert (one.geometry.block_size, one.num_blocks) == (pages[0], PAGES)
    num_tokens = 11
    tables = [list(range(3, 3 + -(-num_tokens // size)))[::-1] for size in pages]
    plan = plan_transfer(source=one.geometry, target=two.geometry, target_rank=0)
    copies = plan.bind(tables[0], tables[1], num_tokens, first_token=0)
    run_copies(copies, sources={0: dict(one.tensors)}, target=dict(two.tensors))
    places = [
        slots(table, size, range(num_tokens)) for table, size in zip(tables, pages, strict=True)
    ]
    for before, after in zip(buffers(source), buffers(target), strict=True):
        assert torch.equal(before[places[0]], after[places[1]])


def test_layers_of_a_stage_have_the_numbers_of_the_model():
    (group,) = groups_of(mha(4, start_layer=6))
    assert tuple(group.geometry.model_layers) == (6, 7)
    assert set(group.tensors) == {"layer.6.k", "layer.6.v", "layer.7.k", "layer.7.v"}


def test_values_may_have_another_size_than_keys():
    (group,) = groups_of(mha(4, v_head_dim=6))
    assert dict(group.geometry.cells)["head_size_v"] == 6


def test_a_pool_with_windows_makes_two_groups():
    whole, window = groups_of(windowed(4), ["swa"])
    assert (tuple(whole.geometry.model_layers), whole.state) == ((1,), None)
    assert (tuple(window.geometry.model_layers), window.state) == ((0, 2), 0)
    assert whole.geometry.sliding_window is None
    # SGLang does not count the token itself.
    assert window.geometry.sliding_window == WINDOW + 1
    assert window.geometry.first_kept_token(50) == 50 - WINDOW


def test_the_pages_of_a_window_are_the_last_of_a_prompt():
    whole, window = groups_of(windowed(4), ["swa"])
    assert whole.table([5, 6, 7], num_tokens=11) == [5, 6, 7]
    assert whole.table([6, 7], num_tokens=11, first_token=4) == [0, 6, 7]
    assert window.table([8, 9, 2], num_tokens=41) == [0] * 8 + [8, 9, 2]


@pytest.mark.parametrize("states", [["mamba"], ["swa", "dsa"]], ids=str)
def test_other_states_are_refused(states):
    with pytest.raises(ConfigError, match=f"with states {states[-1]}; this backend serves"):
        groups_of(windowed(4), states)


def test_other_pools_are_refused():
    pool = SimpleNamespace()
    with pytest.raises(ConfigError, match="KV cache: SimpleNamespace with states none"):
        groups_of(pool)


@pytest.mark.parametrize(
    ("attribute", "value", "message"),
    [
        ("kv_cache_layout", "hnd", "its slots are kept as hnd"),
        ("k_scale_buffer", [torch.ones(1)], "with scales of its own"),
        ("store_dtype", torch.uint8, "kept as torch.uint8 for torch.float32"),
    ],
)
def test_other_orders_and_scales_are_refused(attribute, value, message):
    pool = mha(4)
    setattr(pool, attribute, value)
    with pytest.raises(ConfigError, match=message):
        groups_of(pool)


def test_heads_that_ranks_do_not_share_are_refused():
    with pytest.raises(ConfigError, match="2 KV heads on this rank of 1, but the model has 4"):
        groups_of(mha(4), heads=4)


def test_a_model_of_windows_alone_is_refused():
    pool = windowed(4)
    pool.layers_mapping = {0: (0, True), 1: (1, True)}
    with pytest.raises(ConfigError, match="every layer has a sliding window"):
        groups_of(pool, ["swa"])
