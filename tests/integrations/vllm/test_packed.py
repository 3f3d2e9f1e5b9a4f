"""Caches that keep scales beside their values, as vLLM's ranks have them, described and moved.

No CPU has kernels for them. So specs, memory and views are made by vLLM's own code, and cells are
written where its kernels write them; what a decode engine has after a transfer is compared byte for
byte with what it would have written itself.
"""

import dataclasses
import functools
import zlib
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.integrations.vllm import KVFerryConnector, compat
from kvferry.integrations.vllm.compat import release

if not release.serves_packed:
    pytest.skip("how older releases pack scales was not compared", allow_module_level=True)

import numpy as np
import torch
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1 import kv_cache_interface
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend, TritonAttentionImpl
from vllm.v1.attention.ops import rocm_aiter_mla_sparse
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVQuantMode,
    UniformTypeKVCacheSpecs,
    get_kv_quant_mode,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

from kvferry.config import KVTransferConfig
from kvferry.errors import ConfigError
from kvferry.integrations.vllm.caches import cache_groups, layer_caches, tensors_of
from kvferry.testing.connector_conformance import open_pair
from kvferry.topology import group_mismatches, pair_groups, plan_transfer, run_copies

NUM_BLOCKS = 24
NUM_TOKENS = 140
MEMORY = 16 << 20
FILL = 77
"""What memory holds before anything is written."""


def kv_cache_config(config, group):
    """vLLM's plan of the memory of one group."""
    try:
        from vllm.v1.core.kv_cache_planning import DefaultKVCacheConfigBuilder
    except ImportError:  # before 0.33
        from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups

        return get_kv_cache_config_from_groups(config, [group], MEMORY)
    builder = DefaultKVCacheConfigBuilder()
    return builder.get_kv_cache_config_from_groups(config, [group], NUM_BLOCKS)


@functools.cache
def bytes_of(count, *key):
    """Bytes that no other cell has."""
    draw = torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=draw)


# ---- layers, as vLLM's models have them -------------------------------------------------------


class Latent:
    """A layer of latent attention."""

    def __init__(self, config, cache_dtype):
        self.layer = SimpleNamespace(
            kv_cache_dtype=cache_dtype,
            head_size=576,
            sliding_window=None,
            indexer=object(),
            non_causal_multi_token_decode=False,
            topk_buffer_width=None,
            get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASHMLA_SPARSE"),
        )
        self.spec = MLAAttention.get_kv_cache_spec(self.layer, config)

    def write(self, cache, name, block, slot, token, heads):
        """As its kernels do: a row per token."""
        row = cache.squeeze(1)[block, slot].view(torch.uint8)
        row.copy_(bytes_of(len(row), name, token))


class Indexer:
    """The keys by which DeepSeek-V3.2 chooses tokens: 128 values and a scale each."""

    def __init__(self, config):
        self.layer = SimpleNamespace(
            head_dim=132,
            dtype=torch.uint8,
            cache_config=config.cache_config,
            get_attn_backend=lambda: DeepseekV32IndexerBackend,
        )
        self.views = {}
        self.spec = DeepseekV32IndexerCache.get_kv_cache_spec(self.layer, config)

    def write(self, cache, name, block, slot, token, heads):
        """As vLLM's kernel does: see ``indexer_k_quant_and_cache`` in its ``cache_kernels.cu``."""
        if cache.data_ptr() not in self.views:
            DeepseekV32IndexerCache.bind_kv_cache(self.layer, cache)
            self.views[cache.data_ptr()] = quantised_views(self.layer.kv_cache)
        values_BC, scales_BN = self.views[cache.data_ptr()]
        value = bytes_of(128, name, token)
        values_BC[block, slot * 128 : (slot + 1) * 128].view(torch.uint8).copy_(value)
        scales_BN[block, slot] = bytes_of(4, name, token, "scale").view(torch.float32)[0]


def quantised_views(kv_cache_BNC):
    """Values and scales of an indexer's blocks, by the code of vLLM's that looks for them."""
    seen: list[Any] = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda k, values, scales, *rest, **settings: seen.extend((values, scales))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rocm_aiter_mla_sparse, "_indexer_k_quant_and_cache_kernel", Kernel())
        rocm_aiter_mla_sparse.indexer_k_quant_and_cache_triton(
            torch.zeros(1, 128), kv_cache_BNC, torch.zeros(1), 128, "ue8m0"
        )
    return seen


class Heads:
    """A layer of attention with a scale per token and head, of K and of V."""

    def __init__(self, config, cache_dtype, num_heads):
        self.mode = get_kv_quant_mode(cache_dtype)
        self.layer = SimpleNamespace(
            impl=self._impl(), get_attn_backend=lambda: TritonAttentionBackend
        )
        self.views = {}
        plain = FullAttentionSpec(
            block_size=config.cache_config.block_size,
            num_kv_heads=num_heads,
            head_size=64,
            dtype=STR_DTYPE_TO_TORCH_DTYPE[cache_dtype],
            kv_quant_mode=self.mode,
        )
        self.spec = TritonAttentionBackend.customize_spec(plain)

    def _impl(self):
        impl = TritonAttentionImpl.__new__(TritonAttentionImpl)
        impl._kv_quant_mode, impl.fp8_dtype = self.mode, torch.float8_e4m3fn
        return impl

    def write(self, cache, name, block, slot, token, heads):
        """As its kernel does, into vLLM's own views of values and scales."""
        if cache.data_ptr() not in self.views:
            before, impl = cache.clone(), self._impl()
            views = impl._pth_key_value_caches(cache), (impl._k_scale_cache, impl._v_scale_cache)
            cache.copy_(before)  # it sets all scales to 1
            self.views[cache.data_ptr()] = views
        for part, (values, scales) in enumerate(zip(*self.views[cache.data_ptr()], strict=True)):
            for index, head in enumerate(heads):
                row = values[block, slot, index].view(torch.uint8)[:-4]
                row.copy_(bytes_of(len(row), name, token, head, part))
                scale = bytes_of(4, name, token, head, part, "scale")
                scales[block, slot, index] = scale.view(torch.float32)[0]


# ---- engines ----------------------------------------------------------------------------------


class Engine:
    """What the ranks of a vLLM engine have."""

    def __init__(
        self,
        make_layers,
        *,
        tp=1,
        dcp=1,
        block_size=64,
        kernel_block=None,
        layout="LBNHC",
        cache_dtype="auto",
        num_kv_heads=1,
        host_resident=False,
    ):
        self.tp, self.num_kv_heads = tp, num_kv_heads
        self.config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp,
                pipeline_parallel_size=1,
                decode_context_parallel_size=dcp,
                cp_kv_cache_interleave_size=1,
            ),
            cache_config=SimpleNamespace(
                block_size=block_size,
                cache_dtype=cache_dtype,
                get_resolved_kv_cache_layout=lambda: KVCacheLayout[layout],
                num_gpu_blocks_override=NUM_BLOCKS,
                prefix_cache_retention_interval=None,
            ),
            speculative_config=None,
            attention_config=SimpleNamespace(hisparse_config=None),
            model_config=SimpleNamespace(dtype=torch.bfloat16),
        )
        self.layers = make_layers(self)
        self.config.compilation_config = SimpleNamespace(
            static_forward_context={name: each.layer for name, each in self.layers.items()}
        )
        specs = {name: each.spec for name, each in self.layers.items()}
        spec = UniformTypeKVCacheSpecs.from_specs(specs)
        self.theirs = kv_cache_config(self.config, KVCacheGroupSpec(list(specs), spec))
        self.ranks = [
            allocate_kv_cache(
                self.theirs,
                torch.device("cpu"),
                KVCacheLayout[layout],
                [kernel_block or block_size],
            )
            for _ in range(tp)
        ]
        self.theirs.kv_cache_groups[0].host_resident = host_resident
        projection = SimpleNamespace(
            total_num_kv_heads=num_kv_heads, num_kv_heads=max(1, num_kv_heads // tp)
        )
        projections = dict.fromkeys(self.layers, projection)
        described = [
            cache_groups([layer_caches(self.config, self.theirs, caches, projections)], self.config)
            for caches in self.ranks
        ]
        assert all(each == described[0] for each in described)
        self.groups = described[0]
        for caches in self.ranks:
            memory_of(caches).fill_(FILL)

    @property
    def geometries(self):
        return [group.geometry for group in self.groups]

    def write(self, table, num_tokens=NUM_TOKENS):
        """Writes the cells of a request's tokens into the blocks of its table, on every rank."""
        for rank, caches in enumerate(self.ranks):
            for group in self.groups:
                geometry, ids = group.geometry, group.block_ids([table])
                shard = geometry.token_shard(rank)
                tokens = np.arange(num_tokens)
                tokens = tokens[shard.holds(tokens)]
                for token, place in zip(tokens.tolist(), shard.slots(tokens).tolist(), strict=True):
                    block, slot = divmod(place, geometry.block_size)
                    for name in geometry.layer_names or ():
                        self.layers[name].write(
                            caches[name], name, ids[block], slot, token, geometry.heads(rank)
                        )


def memory_of(caches):
    """The bytes that a rank's caches lie in."""
    storage = next(iter(caches.values())).untyped_storage()
    return torch.tensor([], dtype=torch.uint8).set_(storage)


def move(source, target, tables, num_tokens=NUM_TOKENS):
    """Moves a request from one engine's blocks into another's."""
    for pair in pair_groups(source.geometries, target.geometries):
        ours, theirs = target.groups[pair.target_group], source.groups[pair.source_group]
        for rank in range(target.tp):
            plan = plan_transfer(source=theirs.geometry, target=ours.geometry, target_rank=rank)
            ids = theirs.block_ids([tables[0]]), ours.block_ids([tables[1]])
            copies = plan.bind(*ids, num_tokens)
            sources = {
                each: tensors_of([theirs], caches) for each, caches in enumerate(source.ranks)
            }
            run_copies(copies, sources, tensors_of([ours], target.ranks[rank]))


def table_of(engine, num_tokens=NUM_TOKENS):
    """Blocks for a request, in no order."""
    group = engine.groups[0]
    size = group.geometry.virtual_block_size * group.split
    return [1 + 7 * index % (NUM_BLOCKS - 1) for index in range(-(-num_tokens // size))]


def assert_moves(make_layers, prefill, decode):
    source, target, expected = (Engine(make_layers, **each) for each in (prefill, decode, decode))
    tables = table_of(source), table_of(target)
    source.write(tables[0])
    move(source, target, tables)
    expected.write(tables[1])
    for found, wanted in zip(target.ranks, expected.ranks, strict=True):
        assert torch.equal(memory_of(found), memory_of(wanted))
        assert (memory_of(found) != FILL).any()


# ---- sparse attention -------------------------------------------------------------------------


def sparse(cache_dtype):
    """Two layers of DeepSeek-V3.2."""

    def make(engine):
        found: dict[str, Any] = {}
        for number in range(2):
            found[f"model.layers.{number}.self_attn.attn"] = Latent(engine.config, cache_dtype)
            found[f"model.layers.{number}.self_attn.indexer.k_cache"] = Indexer(engine.config)
        return found

    return make


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla"])
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {}),
        ({}, {"tp": 2}),
        ({"tp": 4}, {"tp": 2, "layout": "BLNHC"}),
        ({"block_size": 128, "kernel_block": 64}, {}),
        ({"block_size": 16}, {"block_size": 64, "layout": "BLHNC"}),
        ({"block_size": 64}, {"block_size": 48}),
        ({"tp": 2, "dcp": 2}, {}),
        ({}, {"tp": 4, "dcp": 2}),
    ],
    ids=str,
)
def test_latents_and_indexers_move_between_ranks_and_blocks_of_any_size(
    cache_dtype, prefill, decode
):
    dtype = {"cache_dtype": cache_dtype}
    assert_moves(sparse(cache_dtype), prefill | dtype, decode | dtype)


def test_an_indexers_block_is_values_and_then_scales():
    groups: Any = Engine(sparse("fp8_ds_mla"), tp=8, cache_dtype="fp8_ds_mla").groups
    latent, indexer = (group.geometry for group in groups)
    assert (latent.use_mla, latent.head_size, str(latent.layout)) == (True, 656, "BHNC")
    assert (indexer.head_size, indexer.head_size_v) == (128, 4)
    assert indexer.cache_shape(5, 10) == (10, 1, 64 * 132)
    assert str(indexer.layout) == "BH(k=ND,v=ND)"
    assert [group.table for group in groups] == [0, 0]


# ---- a scale per token and head ---------------------------------------------------------------

PER_TOKEN_HEAD = ["int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"]


def with_heads(engine):
    """Two layers of attention."""
    config, num_heads = engine.config, max(1, engine.num_kv_heads // engine.tp)
    dtype = config.cache_config.cache_dtype
    return {f"model.layers.{i}.self_attn.attn": Heads(config, dtype, num_heads) for i in range(2)}


@pytest.mark.parametrize("cache_dtype", PER_TOKEN_HEAD)
@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ({}, {}),
        ({}, {"tp": 2, "layout": "LBHNC"}),
        ({"tp": 4, "layout": "BLNHC"}, {"tp": 2}),
        ({"tp": 2, "layout": "BLHNC"}, {"tp": 8}),
        ({"block_size": 16}, {"block_size": 64, "kernel_block": 32, "tp": 2}),
        ({"block_size": 48, "tp": 2}, {"block_size": 32, "layout": "BHLNC"}),
        ({"tp": 8, "dcp": 2}, {"tp": 2}),
    ],
    ids=str,
)
def test_values_move_with_their_scales(cache_dtype, prefill, decode):
    both = {"cache_dtype": cache_dtype, "num_kv_heads": 4}
    assert_moves(with_heads, prefill | both, decode | both)


@pytest.mark.parametrize(
    ("make_layers", "cache_dtype"),
    [(sparse("fp8_ds_mla"), "fp8_ds_mla"), (with_heads, "int8_per_token_head")],
    ids=["sparse", "heads"],
)
def test_engines_of_these_caches_shake_hands_and_load(make_layers, cache_dtype):
    # What lies where is the tests' own here: what they describe goes through the connector.
    both = {"cache_dtype": cache_dtype, "num_kv_heads": 4}
    source = Engine(make_layers, tp=2, block_size=16, **both)
    target = Engine(make_layers, tp=4, block_size=64, kernel_block=32, **both)

    def config(role):
        return KVTransferConfig(
            kv_connector="PullConnector",
            kv_role=role,
            engine_id=role,
            kv_port=0,
            kv_connector_extra_config={"cluster_key": "k" * 32, "transport": "tcp"},
        )

    configs = config("kv_producer"), config("kv_consumer")
    with open_pair(configs, (source.geometries, target.geometries)) as pair:
        request = pair.decode(pair.prefill("packed", 77))
        pair.finish(request)
        assert (request.error, request.failed, request.external_tokens) == (None, False, 77)
        pair.settle()


def test_a_layers_first_step_leaves_loaded_scales_alone():
    # vLLM's layer sets all scales of its cache to 1 when it first looks for them.
    engine = Engine(with_heads, cache_dtype="fp8_per_token_head")
    engine.write(table_of(engine))
    memory = memory_of(engine.ranks[0])
    before = memory.clone()
    for name, each in engine.layers.items():
        each.layer.impl._pth_key_value_caches(engine.ranks[0][name])
    assert torch.equal(memory, before)


@pytest.mark.parametrize(("num_groups", "left_as_they_are"), [(1, (0,)), (2, ())])
def test_blocks_are_zeroed_before_loads_where_groups_share_memory(num_groups, left_as_they_are):
    # vLLM skips the zeroing of these groups' blocks, and does so by itself where nothing is mixed.
    config = SimpleNamespace(kv_cache_groups=[None] * num_groups)
    connector: Any = SimpleNamespace(_kv_cache_config=config)
    found = KVFerryConnector.get_loaded_kv_cache_group_ids(connector, None)
    assert found == left_as_they_are


# ---- what is not served -----------------------------------------------------------------------


def test_caches_of_other_packings_do_not_fit_each_other():
    int8, fp8, int4 = (
        Engine(with_heads, cache_dtype=each, num_kv_heads=4).geometries for each in PER_TOKEN_HEAD
    )
    assert "dtype of layers 0-1: source has int8, target has float8_e4m3fn" in str(
        group_mismatches(int8, fp8, convert=True)
    )
    assert "head_size of layers 0-1: source has 68, target has 36" in str(
        group_mismatches(fp8, int4, convert=True)
    )
    plain, packed = (
        Engine(sparse(each), cache_dtype=each).geometries for each in ("fp8", "fp8_ds_mla")
    )
    assert "head_size of layers 0, 2: source has 576, target has 656" in str(
        group_mismatches(plain, packed, convert=True)
    )


def changed(**changes):
    """An indexer with a spec of these changes, and what else its engine has."""

    def make(engine):
        indexer = Indexer(engine.config)
        indexer.spec = dataclasses.replace(indexer.spec, **changes)
        return {"model.layers.0.self_attn.indexer.k_cache": indexer}

    return make


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"tokens_per_state": 4}, "tokens_per_state=4"),
        ({"head_size": 68}, "head_size=68"),
        ({"state_content_bytes": 584, "cache_dtype_str": "fp8_ds_mla", "head_size": 512}, "=584"),
        ({"kv_quant_mode": KVQuantMode.NVFP4}, "kv_quant_mode=NVFP4"),
        ({"kv_quant_mode": KVQuantMode.INT8_PER_TOKEN_HEAD}, "INT8_PER_TOKEN_HEAD"),
    ],
)
def test_what_is_not_served_is_refused_at_start(changes, told):
    with pytest.raises(ConfigError, match=told):
        Engine(changed(**changes))


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("SlidingWindowMLASpec", {"sliding_window": 64}),
        ("HiddenStateCacheSpec", {}),
        ("CrossAttentionSpec", {}),
        ("SinkFullAttentionSpec", {"sink_len": 4}),
        ("RSWASpec", {"rswa_window": 64}),
        ("CircularBufferSpec", {}),
    ],
)
def test_kinds_that_are_not_served_are_refused_at_start(kind, more):
    spec = getattr(kv_cache_interface, kind)(
        block_size=64, num_kv_heads=1, head_size=64, dtype=torch.bfloat16, **more
    )
    theirs = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layers.0.attn"], spec)])
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context={"layers.0.attn": None})
    )
    with pytest.raises(ConfigError, match=f"layers.0.attn: {kind} with"):
        layer_caches(config, theirs, {"layers.0.attn": torch.zeros(NUM_BLOCKS, 1, 64, 128)}, {})


def test_an_indexer_that_only_its_backend_knows_is_refused(monkeypatch):
    monkeypatch.setattr(DeepseekV32IndexerBackend, "get_name", staticmethod(lambda: "OTHER"))
    with pytest.raises(ConfigError, match="OTHER with kv_quant_mode=NONE"):
        Engine(changed())


def test_an_indexer_whose_values_lie_in_tiles_is_refused(monkeypatch):
    monkeypatch.setattr(compat, "shuffles_indexers", lambda: True)
    with pytest.raises(ConfigError, match="DEEPSEEK_V32_INDEXER"):
        Engine(sparse("auto"))


@pytest.mark.parametrize(
    ("make", "told"), [(sparse("auto"), "several precisions"), (changed(), "0.32 or later")]
)
def test_releases_whose_packing_was_not_compared_are_refused(monkeypatch, make, told):
    monkeypatch.setattr(release, "serves_packed", False)
    with pytest.raises(ConfigError, match=told):
        Engine(make)


def test_blocks_of_a_pool_in_host_memory_are_refused():
    with pytest.raises(ConfigError, match="HiSparse"):
        Engine(sparse("auto"), host_resident=True)
