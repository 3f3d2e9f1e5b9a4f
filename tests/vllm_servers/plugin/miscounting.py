"""Our connector with a planner that takes each KV head from the wrong TP rank.

A server loads it by its module's name. With ``WITHOUT_DIGESTS`` in the environment the handshake
does not compare the digests of the heads either.
"""

import os
from collections.abc import Iterator
from typing import Any

from kvferry.integrations.vllm import KVFerryConnector


def turn_heads_around() -> None:
    """Has plans read head h of n from the rank of head n - 1 - h. Idempotent: both halves of a
    connector may be in one process."""
    from kvferry.topology import geometry

    right: Any = vars(geometry)["split_heads"]
    if right.__name__ == "turned":
        return

    def turned(heads: range, tp: int, num_kv_heads: int) -> Iterator[tuple[range, range]]:
        for some, ranks in right(heads, tp, num_kv_heads):
            yield some, range(tp - ranks.stop, tp - ranks.start)

    geometry.split_heads = turned  # type: ignore[attr-defined]


class MiscountingConnector(KVFerryConnector):
    """See the module."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        turn_heads_around()
        if "WITHOUT_DIGESTS" in os.environ:
            from kvferry.control import handshake

            handshake._compare_heads = lambda source, target: iter(())
        super().__init__(vllm_config, role, kv_cache_config)
