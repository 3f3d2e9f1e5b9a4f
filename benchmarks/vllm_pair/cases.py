"""Which prompts are measured, and who takes part."""

from collections.abc import Mapping

import msgspec

from benchmarks.vllm_servers.connectors import KVFerry, Nixl
from benchmarks.vllm_servers.models import Model
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig

_FAT = TinyConfig(
    num_layers=8,
    num_heads=4,
    num_kv_heads=4,
    head_size=64,
    hidden_size=256,
    intermediate_size=384,
    vocab_size=1024,
)


def fat_model() -> Model:
    """Little to compute and much to move: 16 KiB of KV a token in float32."""
    return Model("fat", prepare_model("tiny", tiny=_FAT), _FAT.vocab_size)


class Case(msgspec.Struct, frozen=True):
    """Requests that are sent together."""

    tokens: int
    """Of each prompt."""
    concurrency: int
    """Requests under way at once."""
    beside: int = 0
    """Other answers that the decode server draws meanwhile."""

    def __str__(self) -> str:
        beside = f", beside {self.beside} answers" if self.beside else ""
        return f"{self.tokens:,} tokens, {self.concurrency} at a time{beside}"


REQUESTS = 8
"""In one round of a case."""
_TOKENS = (256, 1000, 2000, 4000)
CASES = (
    *(Case(tokens, 1) for tokens in _TOKENS),
    Case(1000, 1, beside=4),
    *(Case(tokens, 8) for tokens in _TOKENS),
)
QUICK_CASES = (Case(256, 1), Case(256, 1, beside=1), Case(256, 8))

KEY = "a key of the servers of one benchmark, and of nobody else"
#: Who is compared with whom, and by how much ours is meant to be faster.
GROUPS: Mapping[str, tuple[KVFerry, Nixl]] = {
    "one host": (KVFerry(extra={"cluster_key": KEY}), Nixl()),
    "TCP": (
        KVFerry("kvferry tcp", {"cluster_key": KEY, "transport": "tcp"}),
        Nixl("nixl tcp", "tcp"),
    ),
}
GOALS: Mapping[str, float] = {"one host": 1.0, "TCP": 1.5}
LOW_GOAL = 0.9
"""No row's whole interval may lie below this."""
REST_GOAL_S = 0.010
"""Of the hand-over of one request at a time, beside the transfer and one step of D."""
