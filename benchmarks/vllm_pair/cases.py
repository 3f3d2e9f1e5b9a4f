"""Which prompts are measured, and who takes part."""

from collections.abc import Mapping

import msgspec

from benchmarks.vllm_servers.connectors import KVFerry, Nixl
from benchmarks.vllm_servers.models import Model
from benchmarks.vllm_servers.pair import Shape
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
QUICK_CASES = (Case(256, 1), Case(256, 1, beside=1), Case(256, 8))


def _cases(*tokens: int) -> tuple[Case, ...]:
    one, eight = ([Case(each, concurrency) for each in tokens] for concurrency in (1, 8))
    return (*one, Case(1000, 1, beside=4), *eight)


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where the caches of the servers are, and what is measured there."""

    name: str
    """For people."""
    groups: Mapping[str, tuple[KVFerry, Nixl]]
    """Who is compared with whom."""
    cases: tuple[Case, ...]
    max_model_len: int
    shape: Shape = Shape()
    cache_gib: int = 1
    """Of a server: eight of the longest prompts fit twice."""
    prefill_cache_gib: int = 3
    """Of a prefill server: the prompts of all cases fit, so that each is computed once."""
    results: str = "vllm"
    """Name of the files with the results."""


KEY = "a key of the servers of one benchmark, and of nobody else"
ON_CPUS = Place(
    name="CPUs",
    groups={
        "one host": (KVFerry(extra={"cluster_key": KEY}), Nixl()),
        "TCP": (
            KVFerry("kvferry tcp", {"cluster_key": KEY, "transport": "tcp"}),
            Nixl("nixl tcp", "tcp"),
        ),
    },
    cases=_cases(256, 1000, 2000, 4000),
    max_model_len=8192,
)
_TUNED = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
"""What lets UCX read memory of a GPU over CUDA IPC where it sees no NVLink."""
ON_A_GPU = Place(
    name="a GPU",
    groups={
        "one GPU": (KVFerry(extra={"cluster_key": KEY}), Nixl(device="cuda")),
        "one GPU, NIXL tuned": (
            KVFerry(extra={"cluster_key": KEY}),
            Nixl("nixl tuned", device="cuda", variables=_TUNED),
        ),
        "one GPU, both over NIXL": (
            KVFerry(
                "kvferry nixl",
                {
                    "cluster_key": KEY,
                    "transport": "nixl",
                    "transport_config": {"nixl": {"device_memory": True}},
                },
            ),
            Nixl("nixl tuned", device="cuda", variables=_TUNED),
        ),
        "one GPU, TCP": (
            KVFerry("kvferry tcp", {"cluster_key": KEY, "transport": "tcp"}),
            Nixl("nixl tcp", "tcp,cuda_copy", device="cuda"),
        ),
    },
    cases=_cases(128, 1000, 4000, 12_000),
    max_model_len=16_384,
    # The backend that computes in float32 on a GPU: tokens are equal however they are batched.
    shape=Shape(block_size=16, arguments=("--attention-backend", "TRITON_ATTN")),
    cache_gib=4,
    prefill_cache_gib=6,
    results="vllm_gpu",
)
GOALS: Mapping[str, float] = {"TCP": 1.5}
"""Group → by how much ours is meant to be faster; 1 unless it stands here."""
REST_GOAL_S = 0.010
"""Of the hand-over of one request at a time, beside the transfer and one step of D."""
