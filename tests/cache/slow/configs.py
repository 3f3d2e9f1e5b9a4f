"""Random KV cache configs of every kind, each with what it means to the slow model."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from kvferry.cache import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from tests.cache.slow.model import Group

MAX_MODEL_LEN = 24

# Small pages, padded to one size so that groups of any block sizes may share memory.
SHAPE: dict[str, Any] = {
    "num_kv_heads": 1,
    "head_size": 1,
    "dtype": "float32",
    "page_size_padded": 4096,
}


@dataclass(frozen=True)
class Setup:
    """A manager's arguments."""

    specs: tuple[KVCacheSpec, ...]
    groups: tuple[Group, ...]
    num_blocks: int
    enable_caching: bool = True
    use_eagle: bool = False
    with_events: bool = False
    dcp: int = 1
    pcp: int = 1

    @property
    def config(self) -> KVCacheConfig:
        """A layer or two per group, and no tensors."""
        groups = []
        for index, spec in enumerate(self.specs):
            names = [f"layer.{index}"]
            if isinstance(spec, UniformTypeKVCacheSpecs):
                names = list(spec.kv_cache_specs)
            groups.append(KVCacheGroupSpec(names, spec))
        return KVCacheConfig(self.num_blocks, [], groups)


Member = tuple[KVCacheSpec, Group]


def full(draw: st.DrawFn, size: int) -> Member:
    spec = FullAttentionSpec(size, **SHAPE)
    # Windows that are computed but not kept change nothing here.
    kept: list[dict[str, Any]] = [{}, {"sliding_window": 2}, {"attention_chunk_size": 2}]
    return replace(spec, **draw(st.sampled_from(kept))), Group("full", size)


def mla(draw: st.DrawFn, size: int) -> Member:
    return MLAAttentionSpec(size, **SHAPE), Group("full", size)


def sink(draw: st.DrawFn, size: int) -> Member:
    count = draw(st.integers(1, 3))
    spec = SinkFullAttentionSpec(size, **SHAPE, sink_len=count * size)
    return spec, Group("full", size, reserved=count)


def window(draw: st.DrawFn, size: int) -> Member:
    reach = draw(st.integers(1, 9))
    return SlidingWindowSpec(size, **SHAPE, sliding_window=reach), Group("window", size, reach)


def chunk(draw: st.DrawFn, size: int) -> Member:
    reach = draw(st.integers(1, 9))
    spec = ChunkedLocalAttentionSpec(size, **SHAPE, attention_chunk_size=reach)
    return spec, Group("chunk", size, reach)


def state(draw: st.DrawFn, size: int, mode: str = "all") -> Member:
    spare = draw(st.sampled_from([0, 0, 1, 2]))
    spec = MambaSpec(
        size,
        shapes=[(2, 2)],
        dtypes=["float32"],
        page_size_padded=4096,
        num_speculative_blocks=spare,
        mamba_cache_mode=mode,
    )
    return spec, Group("state", size, spare=spare)


def only_state(draw: st.DrawFn, size: int) -> Member:
    """One block stands for all tokens, so nothing is a hit."""
    return state(draw, MAX_MODEL_LEN, mode="none")


def cross(draw: st.DrawFn, size: int) -> Member:
    return CrossAttentionSpec(size, **SHAPE), Group("cross", size)


def uniform(draw: st.DrawFn, size: int) -> Member:
    """Layers with pages of different sizes and one block table."""
    spec, group = draw(st.sampled_from([full, mla, sink, window, chunk, state]))(draw, size)
    assert isinstance(spec, AttentionSpec | MambaSpec)
    specs = {f"uniform.{i}": replace(spec, page_size_padded=4096 * (i + 1)) for i in range(2)}
    return UniformTypeKVCacheSpecs(spec.block_size, specs), group


Kind = Callable[[st.DrawFn, int], Member]


@st.composite
def setups(
    draw: st.DrawFn,
    *kinds: tuple[Kind, ...],
    sizes: tuple[int, ...] = (1, 2, 3, 4),
    shards: tuple[int, ...] = (1,),
) -> Setup:
    """A config of one group per argument, which lists the kinds that the group may be of."""
    dcp, pcp = draw(st.sampled_from(shards)), draw(st.sampled_from(shards))
    members = [draw(st.sampled_from(kind))(draw, draw(st.sampled_from(sizes))) for kind in kinds]
    specs = tuple(spec for spec, _ in members)
    groups = tuple(
        # A rank holds some tokens of a block, but all of a state and of an encoder's output.
        group
        if group.kind in {"state", "cross"}
        else replace(group, block_size=group.block_size * dcp * pcp)
        for _, group in members
    )
    reserved = sum(group.reserved for group in groups)
    return Setup(
        specs,
        groups,
        reserved + draw(st.integers(4, 6 + 12 * len(groups))),
        enable_caching=draw(st.sampled_from([True, True, True, False])),
        use_eagle=draw(st.booleans()),
        with_events=draw(st.booleans()),
        dcp=dcp,
        pcp=pcp,
    )
