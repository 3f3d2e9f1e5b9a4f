"""What a converted model folder is made of, for those who write one and those who read it."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec

from kvferry.errors import ModelError

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"

Progress: TypeAlias = Callable[[str, float], None]
"""Called with what is being done now, and the fraction (0 to 1) of the whole that is done."""


class TinyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A small random Llama for tests: large enough to choose tokens, small enough to be instant.

    The same values give the same weights on every machine. Weights are float64; a rank rounds
    them to its own dtype.
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


def read_json(path: Path) -> dict[str, object]:
    """A JSON object from a model folder.

    Raises:
        ModelError: the file is missing or holds something else.
    """
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, object])
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ModelError(f"{path}: {error}") from error
