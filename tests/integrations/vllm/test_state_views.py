"""States of recurrent layers as vLLM's ranks have them, described and moved without its engines.

Which rank holds which channels is asked of what vLLM loads a rank's weights with, the shapes of
states and their places in a page of vLLM's own code.
"""

import dataclasses
import itertools
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.integrations.vllm.compat import release

if not release.serves_states:
    pytest.skip("older releases do not zero what a load leaves", allow_module_level=True)

import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.layers.mamba.mamba_mixer2 import mamba_v2_sharded_weight_loader
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MambaSpec

from kvferry.errors import ConfigError
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.caches import cache_groups, layer_caches, num_blocks_of, tensors_of
from kvferry.topology import group_mismatches, plan_transfer, run_copies

NUM_BLOCKS = 6
BLOCK_SIZE = 64
NUM_TOKENS = 130
"""Whose last token lies in the third block."""
LAYERS = ("model.layers.0.mixer", "model.layers.2.mixer")
PADDING = 96
"""Bytes at the end of a page."""
CONV_KERNEL = 4
DTYPES = (torch.bfloat16, torch.float32)


@dataclasses.dataclass(frozen=True)
class Mamba2:
    """Sizes of a model with Mamba2."""

    num_groups: int
    num_heads: int = 8
    head_size: int = 4
    state_size: int = 16
    kind: MambaAttentionBackendEnum = MambaAttentionBackendEnum.MAMBA2

    @property
    def num_channels(self):
        return self.num_heads * self.head_size + 2 * self.num_groups * self.state_size

    def shapes(self, tp):
        return mamba_utils.MambaStateShapeCalculator.mamba2_state_shape(
            tp, self.num_heads * self.head_size, self.num_groups, self.num_heads,
            self.head_size, self.state_size, CONV_KERNEL,
        )  # fmt: skip

    def sections(self, tp):
        """How vLLM's mixer has the weights of its convolution divided."""
        extra = 0 if self.num_groups % tp == 0 else tp - self.num_groups
        both = (self.num_groups + extra) * self.state_size
        group = (both, extra * self.state_size, self.num_groups == 1)
        return [(self.num_heads * self.head_size, 0, False), group, group]


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """Sizes of a model with gated delta nets."""

    num_key_heads: int = 4
    num_heads: int = 8
    key_size: int = 16
    head_size: int = 8
    kind: MambaAttentionBackendEnum = MambaAttentionBackendEnum.GDN_ATTN

    @property
    def num_channels(self):
        return 2 * self.num_key_heads * self.key_size + self.num_heads * self.head_size

    def shapes(self, tp):
        return mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape(
            tp, self.num_key_heads, self.num_heads, self.key_size, self.head_size, CONV_KERNEL
        )

    def sections(self, tp):
        """How vLLM's layer has the weights of its convolution divided."""
        keys = (self.num_key_heads * self.key_size, 0, False)
        return [keys, keys, (self.num_heads * self.head_size, 0, False)]


MODELS = {"one group": Mamba2(1), "four groups": Mamba2(4), "delta net": DeltaNet()}


class Engine:
    """What ranks of vLLM have of a model's recurrent layers."""

    def __init__(self, monkeypatch, model, tp, layout, **changes):
        monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: layout)
        monkeypatch.setattr(compat, "undivided_state_shapes", lambda config: list(model.shapes(1)))
        self.model, self.tp, self.shapes = model, tp, model.shapes(tp)
        self.is_dim_first = layout == "DS"
        page = sum(
            torch.Size(shape).numel() * dtype.itemsize
            for shape, dtype in zip(self.shapes, DTYPES, strict=True)
        )
        spec = MambaSpec(
            **{
                "block_size": BLOCK_SIZE,
                "shapes": self.shapes,
                "dtypes": DTYPES,
                "page_size_padded": page + PADDING,
                "mamba_type": model.kind,
                "mamba_cache_mode": "align",
                **changes,
            }
        )
        self.config = SimpleNamespace(
            parallel_config=SimpleNamespace(
                tensor_parallel_size=tp,
                pipeline_parallel_size=1,
                decode_context_parallel_size=1,
                cp_kv_cache_interleave_size=1,
            ),
            speculative_config=None,
        )
        self.ranks = [self._pages(page) for _ in range(tp)]
        theirs = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(list(LAYERS), spec)])
        caches = layer_caches(self.config, theirs, self.ranks[0], {})
        (self.group,) = cache_groups([caches], self.config)

    def _pages(self, page):
        """Layer → int8[blocks, 1, 1, bytes of its states], with padding between the blocks."""
        storage = torch.full((len(LAYERS), NUM_BLOCKS, page + PADDING), 77, dtype=torch.int8)
        pages = storage[:, :, None, None, :page]
        return dict(zip(LAYERS, pages, strict=True))

    def tensors(self, rank):
        return tensors_of([self.group], self.ranks[rank])

    def states(self, rank, layer):
        """vLLM's own views of a layer's pages: the convolution's state and the recurrent one."""
        mixer = SimpleNamespace(get_state_shape=lambda: self.shapes, get_state_dtype=lambda: DTYPES)
        MambaBase.bind_kv_cache(mixer, self.ranks[rank][layer])
        return mixer.kv_cache

    def write(self, block, seed):
        """Writes the model's state into a block of every layer and rank."""
        for number, layer in enumerate(LAYERS):
            draw = torch.Generator().manual_seed(seed + number)
            conv_CI = torch.randn(self.model.num_channels, CONV_KERNEL - 1, generator=draw)
            heads = self.model.shapes(1)[1]
            recurrent = torch.randn(*heads, generator=draw)
            for rank in range(self.tp):
                conv, own = self.states(rank, layer)
                part_CI = self._own_channels(rank, conv_CI)
                conv[block] = part_CI if self.is_dim_first else part_CI.T
                own[block] = recurrent.chunk(self.tp)[rank]

    def _own_channels(self, rank, conv_CI):
        """What vLLM loads on a rank of a weight that has as many channels."""
        sections = self.model.sections(self.tp)
        own = torch.zeros(sum(full // self.tp for full, *_ in sections), conv_CI.shape[1])
        mamba_v2_sharded_weight_loader(sections, self.tp, rank)(own, conv_CI)
        return own

    def bytes(self):
        return [{layer: pages.clone() for layer, pages in ranks.items()} for ranks in self.ranks]


SHAPES = [
    (p_tp, d_tp, *layouts)
    for p_tp, d_tp in ((1, 1), (1, 2), (2, 1), (2, 4), (4, 1), (2, 2))
    for layouts in itertools.product(("SD", "DS"), repeat=2)
]


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize(("p_tp", "d_tp", "p_layout", "d_layout"), SHAPES)
def test_every_rank_gets_its_own_of_the_state_after_the_last_token_and_nothing_else_changes(
    monkeypatch, model, p_tp, d_tp, p_layout, d_layout
):
    prefill = Engine(monkeypatch, model, p_tp, p_layout)
    decode = Engine(monkeypatch, model, d_tp, d_layout)
    for block in range(1, NUM_BLOCKS):
        prefill.write(block, seed=10 * block)  # a state of another request's, or of an earlier time
    prefill.write(4, seed=1)
    found = decode.bytes()
    for rank in range(d_tp):
        plan = plan_transfer(
            source=prefill.group.geometry, target=decode.group.geometry, target_rank=rank
        )
        copies = plan.bind([0, 0, 4], [0, 0, 2], NUM_TOKENS)
        sources = {source: prefill.tensors(source) for source in range(p_tp)}
        run_copies(copies, sources, decode.tensors(rank))
    moved = decode.bytes()
    for rank in range(d_tp):  # back to what was there, to write it as vLLM would
        for layer in LAYERS:
            decode.ranks[rank][layer].copy_(found[rank][layer])
    decode.write(2, seed=1)
    for rank, layer in itertools.product(range(d_tp), LAYERS):
        assert torch.equal(moved[rank][layer], decode.ranks[rank][layer])


def test_a_state_is_one_group_with_the_block_of_the_last_token(monkeypatch):
    group = Engine(monkeypatch, Mamba2(1), 2, "SD").group
    assert (group.geometry.is_recurrent, group.geometry.virtual_block_size) == (True, BLOCK_SIZE)
    assert group.block_ids([[0, 0, 7]]) == [0, 0, 7]
    assert str(group.geometry.layout) == "B(conv=DH,ssm=HD)"
    assert num_blocks_of([group], 10) == 10


def test_a_group_that_every_rank_has_is_not_the_same_as_one_per_rank(monkeypatch):
    one, two = (Engine(monkeypatch, Mamba2(groups), 2, "SD") for groups in (1, 2))
    assert one.shapes == two.shapes
    mismatches = group_mismatches([one.group.geometry], [two.group.geometry])
    assert len(mismatches) == 1
    assert "B 1*16" in mismatches[0]
    assert "B 2*16" in mismatches[0]


def test_matrices_of_a_cpu_do_not_go_to_kernels_that_hold_them_the_other_way_round(monkeypatch):
    monkeypatch.setattr(compat, "delta_order", lambda: "vk")
    there = Engine(monkeypatch, DeltaNet(), 1, "SD").group.geometry
    monkeypatch.setattr(compat, "delta_order", lambda: "kv")
    here = Engine(monkeypatch, DeltaNet(), 1, "SD").group.geometry
    (mismatch,) = group_mismatches([here], [there])
    assert "delta_kv" in mismatch
    assert "delta_vk" in mismatch


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mamba_type": MambaAttentionBackendEnum.SHORT_CONV}, "of the kind SHORT_CONV"),
        ({"num_speculative_blocks": 2}, "states of drafts"),
        ({"shapes": ((3, 64),), "dtypes": DTYPES[:1]}, "with 1 states"),
        ({"shapes": ((3, 60), (8, 4, 16))}, r"the state conv has the shape \(3, 60\)"),
    ],
)
def test_what_is_not_served_is_refused_at_start(monkeypatch, changes, told):
    with pytest.raises(ConfigError, match=told):
        Engine(monkeypatch, Mamba2(1), 1, "SD", **changes)


def test_releases_that_do_not_zero_the_end_of_a_loaded_block_are_refused(monkeypatch):
    monkeypatch.setattr(release, "serves_states", False)
    with pytest.raises(ConfigError, match=r"0\.32 or later"):
        Engine(monkeypatch, Mamba2(1), 1, "SD")
