"""Chains of loans: who has borrowed the beginning of a prompt computes the rest and lends it all.

Every hop goes to an engine of another shape: TP, PP, block size, layout, and how layers are grouped
and what each group keeps. The fake engines compare every cell that arrives, bit for bit.
"""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.connectors.pull import borrower, groups, lender
from kvferry.control.tickets import prompt_digest, verify
from kvferry.errors import KVFerryError
from kvferry.testing.connector_conformance import (
    NUM_LAYERS,
    WINDOW,
    WINDOWED,
    hybrid_group,
    small_geometry,
)
from kvferry.testing.fake_engine import FakeEngine, Groups, run
from kvferry.testing.fake_rank import FakeRequest, Stage
from kvferry.testing.waiting import WAIT_S
from kvferry.topology.group import GroupGeometry
from tests.connectors.engines import KEY, pull_config
from tests.connectors.test_pull_states import RECURRENT, attention, recurrent

TOKENS = tuple(range(1000, 1100))
LAYOUTS = ("NHD", "HND", "BLKNHD", "BHKND")
LENDS = {"do_remote_decode": True}

Choose = Callable[[Sequence[Any]], Any]
"""Draws one of several: Hypothesis, or a seeded generator."""


@dataclass(frozen=True)
class Hop:
    """One request of a chain."""

    engine: int
    num_tokens: int
    """Of its prompt."""
    hit_blocks: int
    """Local hit, in blocks of the engine; less where the prompt is too short for it."""
    only_cached: bool
    """Whether what the hit has is lent, and nothing is loaded or computed."""


@dataclass(frozen=True)
class Chain:
    """Engines, and how a prompt grows on its way over them."""

    engines: tuple[Groups, ...]
    windows: dict[int, int]
    hops: tuple[Hop, ...]


def plain(choose: Choose) -> Groups:
    return small_geometry(
        choose(LAYOUTS), choose((2, 3, 4, 6, 8)), tp=choose((1, 2, 3)), pp=choose((1, 2))
    )


def hybrid(choose: Choose) -> Groups:
    """Layers with a window in one group or in two, before or after the one that sees all."""
    layout, size, tp = choose(LAYOUTS), choose((3, 4, 5, 8)), choose((1, 2, 3))
    more = {"tp": tp, "stage_layers": choose(((NUM_LAYERS,), (2, 3)))}
    windowed = choose(((WINDOWED,), ((0, 4), (1, 2))))
    made = [hybrid_group(layers, layout, size, window=WINDOW, **more) for layers in windowed]
    made.insert(choose((0, len(made))), hybrid_group([3], layout, size, **more))
    return tuple(made)


def with_states(choose: Choose) -> Groups:
    """Recurrent layers in one group or in two; a state per block, so that hits have one."""
    size, tp = choose((4, 8)), choose((1, 2, 4))
    layers = choose(((RECURRENT,), ((0, 3), (2,))))
    made: list[GroupGeometry] = [
        recurrent(choose(("BHD", "BDH")), size, tp=tp, layers=each) for each in layers
    ]
    made.insert(choose((0, len(made))), attention(choose(("NHD", "HND")), size, tp=tp))
    return tuple(made)


FAMILIES = {"plain": (plain, {}), "hybrid": (hybrid, dict.fromkeys(WINDOWED, WINDOW))}
FAMILIES["states"] = (with_states, {})


def drawn(choose: Choose, family: str) -> Chain:
    """A chain of up to five hops over up to four engines."""
    shape, windows = FAMILIES[family]
    engines = tuple(shape(choose) for _ in range(choose((2, 3, 4))))
    hops: list[Hop] = []
    num_tokens = choose((1, 5, 13, 16, 22))
    for _ in range(choose((2, 3, 4, 5))):
        others = [i for i in range(len(engines)) if not hops or i != hops[-1].engine]
        only_cached = choose((False, False, False, True))
        hops.append(Hop(choose(others), num_tokens, choose((0, 0, 0, 1, 2)), only_cached))
        # A state cannot be cut back, so a prompt with states must grow.
        num_tokens += choose((1, 2, 5, 13) if family == "states" else (0, 1, 5, 13))
        # What is cached of a prompt never has its last token, so the next prompt is longer.
        num_tokens += hops[-1].only_cached
    return Chain(engines, dict(windows), tuple(hops))


def travel(chain: Chain) -> list[int]:
    """Sends a prompt over its engines; returns how many tokens each hop loaded.

    Raises:
        AssertionError: a cell, a count or a ticket is wrong, or a block does not come back.
    """
    with ExitStack() as stack:
        engines = []
        for index, shape in enumerate(chain.engines):
            config = pull_config("kv_both", f"e{index}", lease_duration_s=600.0)
            engine = FakeEngine.open(config, shape, num_blocks=128, layer_windows=chain.windows)
            stack.callback(engine.close)
            engines.append(engine)
        loaded, last = _sent(engines, chain.hops)
        last()
        run(engines, lambda: all(e.is_idle for e in engines), timeout_s=WAIT_S, what="the end")
        for engine in engines:
            assert engine.num_free_blocks == engine.num_blocks - 1
            engine.check_memory()
        return loaded


def is_finished(request: FakeRequest) -> bool:
    return request.stage is Stage.FINISHED


def _sent(
    engines: Sequence[FakeEngine], hops: Sequence[Hop]
) -> tuple[list[int], Callable[[], object]]:
    """The tokens that each hop loaded, and what gives the last loan back."""
    params: dict[str, Any] = {}
    give_back: Callable[[], object] = lambda: None  # noqa: E731
    num_lent, loaded = 0, []
    for number, hop in enumerate(hops):
        engine, tokens = engines[hop.engine], TOKENS[: hop.num_tokens]
        hit = min(hop.hit_blocks, (hop.num_tokens - 1) // engine.block_size)
        num_local = hit * engine.block_size
        if hop.only_cached:
            give_back()  # nobody comes for the loan before
            wanted = LENDS | {"only_cached": True}
        else:
            wanted = params | LENDS
        request = engine.add(f"r{number}", tokens, wanted, local_blocks=hit)
        run(
            engines,
            partial(is_finished, request),
            timeout_s=WAIT_S,
            what=f"hop {number}",
        )
        assert request.error is None
        assert not request.failed
        if not hop.only_cached:
            expected = max(0, min(num_lent, hop.num_tokens - 1) - num_local)
            assert request.external_tokens == expected
        loaded.append(request.external_tokens)
        assert request.response_params is not None
        params = request.response_params
        num_lent = num_local if hop.only_cached else hop.num_tokens
        assert params["remote_num_tokens"] == num_lent
        if num_lent:
            ticket = verify(params["ticket"], KEY.encode())
            assert ticket.num_tokens == num_lent
            assert ticket.prompt_digest == prompt_digest(TOKENS[:num_lent])
        give_back = partial(engine.scheduler.take_back, params)
    return loaded, give_back


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_chain_has_the_cells_of_its_first_engine(family: str) -> None:
    shape, windows = FAMILIES[family]
    engines = tuple(shape(random.Random(seed).choice) for seed in range(3))
    hops = (Hop(0, 22, 0, False), Hop(1, 27, 1, False), Hop(2, 40, 0, False), Hop(0, 41, 0, False))
    first, second, *others = travel(Chain(engines, dict(windows), hops))
    assert first == 0
    assert 0 < second < 22, "the hit is not loaded"
    assert others == [27, 40]


@pytest.mark.slow
@pytest.mark.parametrize("family", list(FAMILIES))
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_chain_has_the_cells_of_its_first_engine(family: str, data: st.DataObject) -> None:
    travel(drawn(lambda options: data.draw(st.sampled_from(options)), family))


def windowed(block_size: int) -> Groups:
    """Layers with a window, and one that sees all."""
    return (
        hybrid_group([3], "NHD", block_size),
        hybrid_group(WINDOWED, "NHD", block_size, window=WINDOW),
    )


WITHIN_A_BLOCK = Chain(
    (windowed(3), windowed(4), windowed(4)),
    dict.fromkeys(WINDOWED, WINDOW),
    (Hop(0, 13, 0, False), Hop(1, 13, 0, False), Hop(2, 14, 0, False)),
)
"""The second engine gets a window from token 6 on, in a block that begins with token 4."""


def test_a_window_that_begins_within_a_block_is_lent_on() -> None:
    assert travel(WITHIN_A_BLOCK) == [0, 12, 13]


def test_what_a_window_has_never_had_is_not_lent_on(
    caplog: pytest.LogCaptureFixture, open_engine: Callable[..., FakeEngine]
) -> None:
    windows = dict.fromkeys(WINDOWED, WINDOW)
    whole = hybrid_group(range(NUM_LAYERS), "NHD", 4)
    engines = [
        open_engine(name, each, role="kv_both", layer_windows=windows)
        for name, each in zip("ab", (windowed(4), whole), strict=True)
    ]
    params: dict[str, Any] | None = {}
    for number, engine in enumerate(engines):
        assert params is not None
        request = engine.add(f"r{number}", TOKENS[: 40 + number], params | LENDS)
        run(
            engines,
            partial(is_finished, request),
            timeout_s=WAIT_S,
            what="its end",
        )
        params = request.response_params
    assert request.external_tokens == 40
    assert params is None
    (line,) = [r.getMessage() for r in caplog.records if "is not lent" in r.getMessage()]
    assert "KV cache groups [0] keep all tokens, and were loaded from an engine that keeps" in line


# ---- defects that must be caught ----------------------------------------------------------------


def lends_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that it has what its load left out of the block in which a window begins."""
    nothing_left_out = property(lambda filled: (0,) * len(filled.starts))
    monkeypatch.setattr(groups.Filled, "first_tokens", nothing_left_out)


def loads_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the whole prompt for lent where only its beginning is."""
    monkeypatch.setattr(borrower, "_num_loadable", lambda load, request: request.num_tokens - 1)


def frees_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lends on, and lets the blocks go."""
    finished = lender.Lender._finished

    def let_go(self: Any, *args: Any) -> tuple[bool, Any]:
        keep, params = finished(self, *args)
        return keep and params is None, params

    monkeypatch.setattr(lender.Lender, "_finished", let_go)


def looks_less_far_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the first token of a window out."""
    needed = groups.first_needed_token

    def one_later(pair: Any, first_token: int, num_tokens: int) -> int:
        return min(num_tokens, needed(pair, first_token, num_tokens) + 1)

    monkeypatch.setattr(groups, "first_needed_token", one_later)


def lends_the_hit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lends what was here before its load, and no more."""
    lend = lender.Lender._lend

    def lent(self: Any, request: Any, *args: Any) -> Any:
        computed, request.num_computed_tokens = request.num_computed_tokens, request.local_tokens
        try:
            return lend(self, request, *args)
        finally:
            request.num_computed_tokens = computed

    monkeypatch.setattr(lender.Lender, "_lend", lent)


@pytest.mark.parametrize(
    ("defect", "family"),
    [
        (lends_more, "hybrid"),
        (loads_more, "plain"),
        (frees_early, "plain"),
        (looks_less_far_back, "hybrid"),
        (lends_the_hit_alone, "plain"),
    ],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_a_chain_finds_defects(
    defect: Callable[[pytest.MonkeyPatch], None], family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains = [drawn(random.Random(seed).choice, family) for seed in range(50)]
    defect(monkeypatch)
    for chain in (WITHIN_A_BLOCK, *chains):
        try:
            travel(chain)
        except (AssertionError, KVFerryError):
            return
    pytest.fail("no chain has found it")
