"""Caches as vLLM's GPU backends hand them over, described without a GPU.

Which rank writes which token where is asked of vLLM's own kernels, read as Python.
"""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.integrations.vllm.compat import release

if release.lacks:
    pytest.skip("the kernels of older releases take other arguments", allow_module_level=True)

import numpy as np
import torch
from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MLAAttentionSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.worker.block_table import ComputeSlotMappingKernel
from vllm.v1.worker.gpu.block_table import _compute_slot_mappings_kernel

from kvferry.errors import ConfigError
from kvferry.integrations.vllm.caches import cache_groups, layer_caches
from kvferry.topology import plan_transfer, run_copies

ATTENTION = "model.layers.0.self_attn.attn"
DRAFTS = ("draft_model.model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn")
"""What vLLM calls a layer of a draft model, and the first one of MTP or EAGLE."""
NUM_BLOCKS = 24
NUM_TOKENS = 45
PAD = -1
KERNELS = {"slots": ComputeSlotMappingKernel.kernel}
"""Where vLLM does not look: its first engine replaces every attribute of a module that is this
kernel by one that knows no DCP."""


def latent(block_size=64, **changes):
    values = {"num_kv_heads": 1, "head_size": 576, "dtype": torch.bfloat16, "max_tp_shards": 1}
    return MLAAttentionSpec(block_size=block_size, **values | changes)


def engine(*, tp=1, dcp=1, turn=1, owners=()):
    """The parts of vLLM's config that are looked at.

    ``owners``: layer → the layer whose cache it reads.
    """
    layer = SimpleNamespace(get_attn_backend=lambda: SimpleNamespace(get_name=lambda: "FLASHMLA"))
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=1,
            decode_context_parallel_size=dcp,
            cp_kv_cache_interleave_size=turn,
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        compilation_config=SimpleNamespace(
            static_forward_context=dict.fromkeys((ATTENTION, *DRAFTS), layer)
            | {
                name: SimpleNamespace(kv_sharing_target_layer_name=owner, **vars(layer))
                for name, owner in dict(owners).items()
            }
        ),
    )


def projection(total, tp):
    """The numbers of a QKV projection whose ranks share ``total`` KV heads."""
    return SimpleNamespace(total_num_kv_heads=total, num_kv_heads=max(1, total // tp))


def describe(config, specs, *, kernel_block=None, totals=()):
    """Our groups of an engine with one KV cache group of these layers.

    ``totals``: layer → KV heads that its projection says all ranks have.
    """
    tp = config.parallel_config.tensor_parallel_size
    projections = {name: projection(total, tp) for name, total in dict(totals).items()}
    first = next(iter(specs.values()))
    spec = first if len(specs) == 1 else UniformTypeKVCacheSpecs(first.block_size, specs)
    caches = {name: cache_of(each, kernel_block) for name, each in specs.items()}
    theirs = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(list(specs), spec)])
    return cache_groups([layer_caches(config, theirs, caches, projections)], config)


def cache_of(spec, kernel_block=None, dtype=torch.float32):
    """[B, H, N, C], in which a kernel may see a block as several."""
    tokens = kernel_block or spec.block_size
    blocks = NUM_BLOCKS * spec.block_size // tokens
    return torch.zeros(
        blocks, spec.num_kv_heads, tokens, spec.head_size + spec.head_size_v, dtype=dtype
    )


# ---- latent attention -------------------------------------------------------------------------


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_the_latent_is_one_part_that_every_tp_rank_holds(tp):
    (group,) = describe(engine(tp=tp), {ATTENTION: latent()})
    geometry = group.geometry
    assert (geometry.use_mla, geometry.head_size, geometry.dtype) == (True, 576, "bfloat16")
    assert (str(geometry.layout), geometry.packing, group.split) == ("BHNC", "", 1)
    assert [list(geometry.heads(rank)) for rank in range(tp)] == [[0]] * tp
    assert geometry.cache_shape(0, NUM_BLOCKS) == (NUM_BLOCKS, 1, 64, 576)


def test_a_kernel_may_see_a_block_as_several():
    (group,) = describe(engine(), {ATTENTION: latent(128)}, kernel_block=64)
    assert (group.split, group.geometry.block_size) == (2, 64)
    assert group.block_ids([[3, 0, 5]]) == [6, 7, 0, 0, 10, 11]


# ---- speculative decoding ---------------------------------------------------------------------


@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_heads_of_a_draft_are_divided_as_its_own_projection_says(draft, tp):
    totals = {ATTENTION: 4, draft: 2}
    groups = describe(engine(tp=tp), specs_of(totals, tp), totals=totals)
    heads = {group.geometry.layer_names: group.geometry.num_kv_heads for group in groups}
    assert heads == {(ATTENTION,): 4, (draft,): 2}


# ---- layers whose heads differ -----------------------------------------------------------------


def layer(index):
    return f"model.layers.{index}.self_attn.attn"


def specs_of(totals, tp):
    """What a rank's caches hold of layers with these KV heads, as vLLM divides them."""
    return {
        name: FullAttentionSpec(
            block_size=16, num_kv_heads=max(1, total // tp), head_size=64, dtype=torch.bfloat16
        )
        for name, total in totals.items()
    }


def named_layers(tp, totals):
    config = engine(tp=tp)
    config.compilation_config.static_forward_context |= dict.fromkeys(
        totals, config.compilation_config.static_forward_context[ATTENTION]
    )
    return describe(config, specs_of(totals, tp), totals=totals)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])
@pytest.mark.parametrize(
    "totals",
    [
        pytest.param((1, 2), id="the smallest"),
        pytest.param((4, 8), id="MiMo-V2-Flash"),
        pytest.param((2, 8), id="Gemma 4 26B-A4B"),
        pytest.param((4, 16), id="Gemma 4 31B"),
    ],
)
def test_heads_of_each_layer_are_those_of_its_own_projection(tp, totals):
    totals = {layer(index): total for index, total in enumerate(totals)}
    found = {
        group.geometry.layer_names: group.geometry.num_kv_heads
        for group in named_layers(tp, totals)
    }
    assert found == {(name,): total for name, total in totals.items()}


@pytest.mark.parametrize(
    ("totals", "tps", "expected"),
    [
        ((1, 2), (2, 4), {0: [0], 1: [0], 2: [1], 3: [1]}),
        ((4, 8), (8, 16), {0: [0], 1: [0], 2: [1], 15: [7]}),
        ((4, 8), (8, 4), {0: [0, 1], 1: [2, 3], 3: [6, 7]}),
    ],
)
def test_windowed_layers_are_read_from_the_ranks_that_hold_their_heads(totals, tps, expected):
    """Target rank → the source ranks from which it reads the layer with more heads."""
    totals = {layer(index): total for index, total in enumerate(totals)}
    (_, source), (_, target) = (named_layers(tp, totals) for tp in tps)
    found = {
        rank: list(
            plan_transfer(
                source=source.geometry, target=target.geometry, target_rank=rank
            ).source_ranks
        )
        for rank in expected
    }
    assert found == expected


def test_one_head_on_a_rank_of_several_without_a_projection_is_refused_by_its_layer():
    specs = specs_of({ATTENTION: 1}, 4)
    with pytest.raises(ConfigError, match=rf"KV cache of {ATTENTION}: 1 KV head on this rank of 4"):
        describe(engine(tp=4), specs)


@pytest.mark.parametrize(("tp", "on_rank"), [(1, 1), (1, 3), (4, 2)])
def test_where_the_number_on_a_rank_says_it_no_projection_is_needed(tp, on_rank):
    specs = {
        ATTENTION: FullAttentionSpec(
            block_size=16, num_kv_heads=on_rank, head_size=64, dtype=torch.bfloat16
        )
    }
    (group,) = describe(engine(tp=tp), specs)
    assert group.geometry.num_kv_heads == on_rank * tp


def test_a_layer_whose_ranks_all_hold_all_of_several_heads_is_refused():
    specs = specs_of({ATTENTION: 2}, 1)  # two heads on each of two ranks
    config = engine(tp=2)
    theirs = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(list(specs), specs[ATTENTION])])
    undivided = {ATTENTION: projection(2, 1)}
    with pytest.raises(ConfigError, match="2 KV heads on this rank, but its QKV projection has 2"):
        layer_caches(config, theirs, {ATTENTION: cache_of(specs[ATTENTION])}, undivided)


def test_a_layer_that_reads_the_cache_of_another_has_none_of_its_own():
    totals = {ATTENTION: 2, DRAFTS[1]: 2}
    config = engine(owners={DRAFTS[1]: ATTENTION})
    (group,) = describe(config, specs_of(totals, 1))
    assert group.geometry.layer_names == (ATTENTION,)


# ---- decode context parallelism ---------------------------------------------------------------


class Pointer:
    """A place in memory, or several."""

    def __init__(self, memory, at=0):
        self.memory = memory
        self.at = torch.as_tensor(at)

    def __add__(self, distance):
        return Pointer(self.memory, self.at + distance)


class Language:
    """What vLLM's kernels of slots need of Triton's language."""

    int32, int64, constexpr = torch.int32, torch.int64, None
    arange, where, range = staticmethod(torch.arange), staticmethod(torch.where), range

    def program_id(self, axis):
        return 0

    def num_programs(self, axis):
        return 2  # one request, and one that pads

    def load(self, pointer, mask=None, other=0):
        found = pointer.memory[pointer.at.clamp(0, len(pointer.memory) - 1)]
        return found if mask is None else torch.where(mask, found, other)

    def store(self, pointer, value, mask):
        pointer.memory[pointer.at[mask]] = value[mask]


def slots_of_first_runner(monkeypatch, spec, ids, dcp, dcp_rank, turn):
    monkeypatch.setattr("vllm.v1.worker.block_table.tl", Language())
    slots = torch.full((64,), PAD)
    KERNELS["slots"](
        NUM_TOKENS,
        64,
        Pointer(torch.tensor([0, NUM_TOKENS])),
        Pointer(torch.arange(NUM_TOKENS)),
        Pointer(torch.tensor(ids)),
        len(ids),
        Pointer(slots),
        spec.block_size,
        dcp,
        dcp_rank,
        turn,
        PAD,
        64,
    )
    return slots[:NUM_TOKENS].tolist()


def slots_of_second_runner(monkeypatch, spec, ids, dcp, dcp_rank, turn):
    monkeypatch.setattr("vllm.v1.worker.gpu.block_table.tl", Language())
    tables = Pointer(torch.tensor(ids))
    monkeypatch.setattr("vllm.v1.worker.gpu.block_table._load_ptr", lambda at, dtype: tables)
    slots = torch.full((64,), PAD)
    _compute_slot_mappings_kernel(
        64,
        Pointer(torch.tensor([0])),
        Pointer(torch.tensor([0, NUM_TOKENS])),
        Pointer(torch.arange(NUM_TOKENS)),
        Pointer(torch.tensor([0])),
        Pointer(torch.tensor([len(ids)])),
        Pointer(torch.tensor([spec.block_size])),
        Pointer(torch.tensor([True])),
        Pointer(torch.tensor([spec.dcp_sharded])),
        Pointer(slots),
        64,
        dcp_rank,
        dcp,
        turn,
        PAD,
        64,
    )
    return slots[:NUM_TOKENS].tolist()


RUNNERS = {"first": slots_of_first_runner, "second": slots_of_second_runner}
MODELS = {
    # KV heads of the model, spec of a rank
    "latents": (1, MLAAttentionSpec),
    "heads": (2, FullAttentionSpec),
}


def filled(spec, kernel_block, slots, head):
    """A rank's cache in which a token's cells hold its number and head."""
    cache = cache_of(spec, kernel_block)
    rows = cache.view(-1, cache.shape[-1])  # one head
    for token, slot in enumerate(slots):
        if slot != PAD:
            rows[slot] = 1 + token + 1000 * head
    return cache


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("tp", "dcp", "turn", "block_size", "kernel_block", "sharded"),
    [
        (4, 2, 1, 8, 8, True),
        (4, 2, 4, 8, 4, True),
        (8, 4, 2, 8, 4, True),
        (8, 4, 8, 8, 8, True),
        (4, 2, 1, 8, 4, False),
    ],
)
def test_tokens_are_spread_as_vllm_spreads_them(
    monkeypatch, runner, model, tp, dcp, turn, block_size, kernel_block, sharded
):
    if not sharded and runner == "first":
        pytest.skip("only the second runner keeps caches that DCP ranks do not share")
    num_kv_heads, kind = MODELS[model]
    spec = kind(
        block_size=block_size,
        num_kv_heads=1,
        head_size=4,
        dtype=torch.float32,
        dcp_sharded=sharded,
    )
    spread = engine(tp=tp, dcp=dcp, turn=turn)
    totals = {ATTENTION: num_kv_heads}
    (group,) = describe(spread, {ATTENTION: spec}, kernel_block=kernel_block, totals=totals)
    ids = [5, 2, 7, 3, 11, 9][: -(-NUM_TOKENS // (block_size * (dcp if sharded else 1)))]
    caches = {}
    for rank in range(tp):
        # Ranks that follow each other are one group of vLLM's, and hold one head.
        slots = RUNNERS[runner](monkeypatch, spec, ids, dcp, rank % dcp, turn)
        caches[rank] = filled(spec, kernel_block, slots, rank * num_kv_heads // tp)

    one = engine()
    whole = kind(block_size=16, num_kv_heads=num_kv_heads, head_size=4, dtype=torch.float32)
    (single,) = describe(one, {ATTENTION: whole})
    expected = cache_of(whole)
    for token in range(NUM_TOKENS):
        block, slot = (1, 4, 6)[token // 16], token % 16
        for head in range(num_kv_heads):
            expected[block, head, slot] = 1 + token + 1000 * head

    tables = group.block_ids([ids]), [1, 4, 6]
    found = cache_of(whole)
    copies = plan_transfer(source=group.geometry, target=single.geometry).bind(*tables, NUM_TOKENS)
    sources = {rank: {ATTENTION: cache.numpy()} for rank, cache in caches.items()}
    run_copies(copies, sources=sources, target={ATTENTION: found.numpy()})
    assert torch.equal(found, expected)

    for rank in range(tp):
        plan = plan_transfer(source=single.geometry, target=group.geometry, target_rank=rank)
        found = cache_of(spec, kernel_block)
        copies = plan.bind(tables[1], tables[0], NUM_TOKENS)
        run_copies(
            copies, sources={0: {ATTENTION: expected.numpy()}}, target={ATTENTION: found.numpy()}
        )
        assert torch.equal(found, caches[rank]), rank


@pytest.mark.parametrize("turn", [1, 2, 8])
@pytest.mark.parametrize("num_tokens", [0, 1, 7, 16, 45])
def test_a_rank_has_as_many_tokens_as_vllm_says(turn, num_tokens):
    (group,) = describe(engine(tp=4, dcp=4, turn=turn), {ATTENTION: latent(8)})
    shape = group.geometry.parallel
    for rank in range(4):
        theirs = get_dcp_local_seq_lens(torch.tensor([num_tokens]), 4, rank, turn)
        assert shape.token_shard(rank).slots(np.array([num_tokens])).tolist() == theirs.tolist()


def test_a_turn_longer_than_a_kernels_block_is_refused():
    with pytest.raises(ConfigError, match="interleave_size=8 does not divide block_size=4"):
        describe(engine(tp=2, dcp=2, turn=8), {ATTENTION: latent(8)}, kernel_block=4)
