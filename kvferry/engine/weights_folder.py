"""File names, settings and readers for converted model folders."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

import msgspec

from kvferry.decoding import UNDECODED
from kvferry.errors import ModelError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

Progress: TypeAlias = Callable[[str, float], None]
"""Called with the current activity, and the fraction (0 to 1) of the whole work that is done."""


class TinyLatent(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of latent attention in a tiny model; see :class:`~.model_config.DeepseekConfig`."""

    kv_lora_rank: int = 24
    q_lora_rank: int | None = None
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 12


class TinyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A small random model for tests: large enough to choose tokens, small enough to be instant.

    Equal values give equal weights on every machine. Weights are float64; each rank rounds them to
    its own dtype.
    """

    seed: int = 0
    num_layers: int = 4
    num_heads: int = 6
    num_kv_heads: int = 3
    head_size: int = 16
    hidden_size: int = 96
    intermediate_size: int = 130
    vocab_size: int = 320
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 8192
    sliding_window: int | None = None
    """Number of tokens that a sliding layer attends to; ``None`` for full attention everywhere."""
    full_attention_every: int = 2
    """Every ``n``-th layer attends to all tokens, if ``sliding_window`` is set; 0 for no layer."""
    latent: TinyLatent | None = None
    """Sizes of latent attention, which does not use ``num_kv_heads`` and ``head_size``."""


TINY_MODELS: Mapping[str, TinyConfig] = {
    "tiny": TinyConfig(),
    # Two groups of sliding layers and a group of full layers, similar to Gemma but smaller.
    "tiny-hybrid": TinyConfig(num_layers=6, sliding_window=24, full_attention_every=3),
    "tiny-mla": TinyConfig(latent=TinyLatent()),
}
"""Name of a random model → its shape."""


def read_json(path: Path) -> dict[str, object]:
    """Reads a JSON object from a model folder.

    Raises:
        ModelError: the file is missing or does not hold a JSON object.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except UNDECODED as error:
        raise ModelError(f"{path}: {error}") from error
