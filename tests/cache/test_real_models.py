"""Specs, groups and memory of models that people serve, against the published formulas.

Shapes are those of the models' ``config.json``. Numbers on the right are worked out by hand from
what vLLM publishes (``vllm/v1/kv_cache_interface.py``, ``vllm/v1/core/kv_cache_utils.py`` and
``vllm/model_executor/layers/mamba/mamba_utils.py``, version 0.32), never by calling the code
under test:

- page of attention: block size × KV heads × (key + value elements) × bytes per element;
  of MLA: block size × latent elements × bytes; of a state: the sum over its tensors;
- blocks of one request: full ⌈L / b⌉; window ⌈min(W − 1 + S, L) / b⌉ + 1; chunk
  ⌈min(C + S, L) / b⌉; state 1, or ⌈S / b⌉ + 1 if states are kept for hits; cross ⌈E / b⌉, for L
  tokens of the model, S of a step, E of the encoder, b of a block.
"""

from dataclasses import dataclass

import pytest

from kvferry.cache import (
    CacheLimits,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    build_kv_cache_config,
    group_layers,
)

BF16 = "bfloat16"


@dataclass(frozen=True)
class Model:
    """A model, one longest request of it, and what the formulas say of both."""

    name: str
    layers: list[KVCacheSpec]
    limits: CacheLimits
    page: int
    """Bytes of a page, after pages were unified."""
    groups: list[tuple[str, int, int, int]]
    """Of each group: kind, layers, tokens per block, blocks of the request."""

    def specs(self):
        return {f"layer.{index}": spec for index, spec in enumerate(self.layers)}


def full(heads, head_size, dtype=BF16):
    return FullAttentionSpec(16, heads, head_size, dtype)


def gemma_3_27b():
    window = SlidingWindowSpec(16, 16, 128, BF16, sliding_window=1024)
    return Model(
        "Gemma-3 27B, every sixth of 62 layers full",
        [full(16, 128) if index % 6 == 5 else window for index in range(62)],
        CacheLimits(131072, max_num_batched_tokens=8192),
        16 * 16 * 2 * 128 * 2,
        # 52 windowed layers in ⌈52 / 10⌉ groups; ⌈(1023 + 8192) / 16⌉ + 1 = 577.
        [
            *[("SlidingWindowSpec", layers, 16, 577) for layers in (9, 9, 9, 9, 8, 8)],
            ("FullAttentionSpec", 10, 16, 8192),
        ],
    )


def llama_4_scout():
    chunk = ChunkedLocalAttentionSpec(16, 8, 128, BF16, attention_chunk_size=8192)
    return Model(
        "Llama-4 Scout, every fourth of 48 layers full",
        [full(8, 128) if index % 4 == 3 else chunk for index in range(48)],
        CacheLimits(131072, max_num_batched_tokens=8192),
        16 * 8 * 2 * 128 * 2,
        [
            *[("ChunkedLocalAttentionSpec", 12, 16, (8192 + 8192) // 16)] * 3,
            ("FullAttentionSpec", 12, 16, 8192),
        ],
    )


def qwen3_next_80b():
    # Gated delta net: 16 key and 32 value heads of 128, a convolution over 4 tokens.
    state = MambaSpec(262144, [(2 * 16 * 128 + 32 * 128, 4 - 1), (32, 128, 128)], [BF16, BF16])
    assert state.page_size_bytes == 8192 * 3 * 2 + 32 * 128 * 128 * 2 == 1097728
    return Model(
        "Qwen3-Next 80B, every fourth of 48 layers full",
        [full(2, 256) if index % 4 == 3 else state for index in range(48)],
        CacheLimits(262144, max_num_batched_tokens=8192),
        # 2048 bytes per token: ⌈1097728 / 2048 / 16⌉ × 16 = 544 tokens, which vLLM's log says too.
        544 * 2 * 2 * 256 * 2,
        [
            *[("MambaSpec", 12, 262144, 1)] * 3,
            ("FullAttentionSpec", 12, 544, 482),  # ⌈262144 / 544⌉
        ],
    )


def jamba_v01():
    # Mamba 1: 2 × 4096 channels, a state of 16, a convolution over 4 tokens.
    state = MambaSpec(64, [(8192, 4 - 1), (8192, 16)], [BF16, BF16], mamba_cache_mode="all")
    assert state.page_size_bytes == 8192 * 19 * 2 == 311296
    return Model(
        "Jamba v0.1, 4 of 32 layers full",
        [full(8, 128) if index % 8 == 4 else state for index in range(32)],
        CacheLimits(262144, max_num_batched_tokens=8192),
        # 4096 bytes per token: ⌈311296 / 4096 / 16⌉ × 16 = 80 tokens.
        80 * 8 * 2 * 128 * 2,
        [
            # Prefixes may be hits: a state every 64 tokens of a step, and the one before it.
            *[("MambaSpec", 4, 64, 129)] * 7,
            ("FullAttentionSpec", 4, 80, 3277),  # ⌈262144 / 80⌉
        ],
    )


def whisper_large_v3():
    encoder = [EncoderOnlyAttentionSpec(16, 20, 64, "float16")] * 32
    decoder = [full(20, 64, "float16"), CrossAttentionSpec(16, 20, 64, "float16")] * 32
    return Model(
        "Whisper large v3",
        encoder + decoder,
        CacheLimits(448, max_num_encoder_tokens=1500),
        16 * 20 * 2 * 64 * 2,
        [("FullAttentionSpec", 32, 16, 28), ("CrossAttentionSpec", 32, 16, 94)],
    )


MODELS = [
    Model(
        "Llama-3 8B",
        [full(8, 128)] * 32,
        CacheLimits(8192),
        16 * 8 * 2 * 128 * 2,
        [("FullAttentionSpec", 32, 16, 512)],
    ),
    Model(
        "Llama-3 70B, a rank of 8",
        [full(1, 128)] * 80,
        CacheLimits(8192),
        16 * 1 * 2 * 128 * 2,
        [("FullAttentionSpec", 80, 16, 512)],
    ),
    Model(
        "Mistral 7B v0.1",
        [SlidingWindowSpec(16, 8, 128, BF16, sliding_window=4096)] * 32,
        CacheLimits(32768, max_num_batched_tokens=2048),
        16 * 8 * 2 * 128 * 2,
        [("SlidingWindowSpec", 32, 16, 385)],  # ⌈(4095 + 2048) / 16⌉ + 1
    ),
    gemma_3_27b(),
    Model(
        "DeepSeek-V3",
        [MLAAttentionSpec(64, 1, 512 + 64, BF16)] * 61,
        CacheLimits(163840),
        64 * (512 + 64) * 2,
        [("MLAAttentionSpec", 61, 64, 2560)],
    ),
    Model(
        "DeepSeek-V3, packed FP8 cache, decode context parallel over 8 ranks",
        [MLAAttentionSpec(64, 1, 512 + 64, "uint8", cache_dtype_str="fp8_ds_mla")] * 61,
        CacheLimits(163840, dcp_world_size=8),
        64 * 656,
        [("MLAAttentionSpec", 61, 64, 320)],  # ⌈163840 / 8 / 64⌉
    ),
    llama_4_scout(),
    qwen3_next_80b(),
    jamba_v01(),
    whisper_large_v3(),
]


@pytest.fixture(params=MODELS, ids=lambda model: model.name)
def model(request):
    return request.param


def test_groups_are_those_of_the_published_rules(model):
    groups = group_layers(model.specs())
    found = [
        (type(spec).__name__, len(group.layer_names), spec.block_size)
        for group in groups
        for spec in [group.kv_cache_spec]
    ]
    assert found == [expected[:3] for expected in model.groups]
    assert {group.kv_cache_spec.page_size_bytes for group in groups} == {model.page}


def test_one_request_takes_the_published_amount(model):
    for group, (*_, num_blocks) in zip(group_layers(model.specs()), model.groups, strict=True):
        bound = group.kv_cache_spec.max_memory_usage_bytes(model.limits)
        assert bound == num_blocks * model.page


def test_smallest_pool_holds_one_request_and_the_null_block(model):
    num_tensors = max(layers for _, layers, _, _ in model.groups)
    num_blocks = 1 + sum(blocks for *_, blocks in model.groups)
    smallest = num_blocks * num_tensors * model.page
    config = build_kv_cache_config(model.specs(), smallest, model.limits)
    assert config.num_blocks == num_blocks
    assert [tensor.size for tensor in config.kv_cache_tensors] == (
        [num_blocks * model.page] * num_tensors
    )
    with pytest.raises(ValueError, match="max_model_len"):
        build_kv_cache_config(model.specs(), smallest - 1, model.limits)


@pytest.mark.parametrize(
    ("name", "block_size", "field", "size"),
    [
        ("Gemma-3 27B, every sixth of 62 layers full", 16, "sliding_window", 1024),
        ("Llama-4 Scout, every fourth of 48 layers full", 16, "attention_chunk_size", 8192),
    ],
)
def test_without_hybrid_groups_a_hybrid_model_keeps_every_token(name, block_size, field, size):
    (model,) = (model for model in MODELS if model.name == name)
    (group,) = group_layers(model.specs(), hybrid=False)
    spec = group.kv_cache_spec
    assert type(spec) is FullAttentionSpec
    assert (getattr(spec, field), spec.block_size) == (size, block_size)
    assert spec.max_memory_usage_bytes(model.limits) == 8192 * model.page
