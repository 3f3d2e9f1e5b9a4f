"""The geometry that tests change one thing of."""

from typing import Any

from kvferry.topology import EngineGeometry, ParallelShape


def geometry(**changes):
    """One rank, 2 layers and 2 KV heads of 4 float32 elements, blocks of 4 tokens, NHD."""
    values: dict[str, Any] = {
        "num_layers": 2,
        "num_kv_heads": 2,
        "head_size": 4,
        "dtype": "float32",
        "block_size": 4,
        "layout": "NHD",
        "parallel": ParallelShape(),
    }
    return EngineGeometry(**values | changes)
