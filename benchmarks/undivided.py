"""One engine of one rank, without a connector, in this process: what it answers is right."""

from pathlib import Path
from typing import Any

import torch

from kvferry.config import EngineConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.engine import Engine


def undivided(model: Path, dtype: str, *, keeps_prefixes: bool = True, **config: Any) -> Engine:
    """Starts the engine, on one thread.

    Args:
        model: a converted folder.
        dtype: of weights, activations and KV cache.
        keeps_prefixes: whether it has a prefix cache.
        config: more fields of its :class:`~kvferry.config.EngineConfig`.
    """
    torch.set_num_threads(1)
    return build_engine(
        EngineConfig(name="undivided", kv_transfer_config={}, **config),
        model,
        dtype=dtype,
        executor="inprocess",
        connect=False,
        enable_prefix_caching=keeps_prefixes,
    )
