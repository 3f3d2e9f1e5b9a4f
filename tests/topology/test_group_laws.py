"""Laws 1 and 2 over engines that group their layers differently, with windows and stages."""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.errors import ProtocolError
from kvferry.topology import (
    EngineGeometry,
    ParallelShape,
    lowering,
    memory_of,
    pair_groups,
    pairing,
    plan_transfer,
    run_copies,
    split_of_group,
    token_digests,
)
from kvferry.topology.run import addresses_of
from kvferry.topology.windows import first_kept_token
from tests.topology.defects import (
    WRONG_BYTES,
    WRONG_COVER,
    assert_bytes,
    assert_cover,
    must_be_caught,
)

LAW = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclass
class Side:
    """One engine: an ``Engine`` of the worlds and a block table per group."""

    engines: list
    tables: list
    kept: list  # per model layer: what the engine keeps of it, as keyword arguments

    @property
    def geometries(self) -> list:
        return [engine.geometry for engine in self.engines]

    def keeps(self, layer, token, num_tokens) -> bool:
        """Whether the next token, or a later one, may attend to this one; by definition."""
        if window := self.kept[layer].get("sliding_window"):
            return num_tokens - token < window
        if chunk := self.kept[layer].get("attention_chunk_size"):
            return token // chunk == num_tokens // chunk
        return True


@dataclass
class GroupedCase:
    source: Side
    target: Side
    first_token: int
    num_tokens: int
    logical: list  # per model layer: part → array [layer, token, head, element]
    engine_id: str

    def moved(self, layer) -> list:
        """Tokens of one layer that a transfer must bring to every rank that holds it."""
        return [
            token
            for token in range(self.first_token, self.num_tokens)
            if self.source.keeps(layer, token, self.num_tokens)
            and self.target.keeps(layer, token, self.num_tokens)
        ]

    def copies(self):
        """(target group, target rank, source group, bound copies) of every plan of every pair."""
        for pair in pair_groups(self.source.geometries, self.target.geometries):
            target = self.target.geometries[pair.target_group]
            first = max(self.first_token, pair.first_kept_token(self.num_tokens))
            for rank in range(target.world_size):
                made = plan_transfer(
                    source=self.source.geometries[pair.source_group],
                    target=target,
                    target_rank=rank,
                    target_engine_id=self.engine_id,
                    layers=pair.layers,
                )
                bound = made.bind(
                    self.source.tables[pair.source_group],
                    self.target.tables[pair.target_group],
                    self.num_tokens,
                    first,
                )
                yield pair.target_group, rank, pair.source_group, bound


def draw_case(worlds, draw) -> GroupedCase:
    kinds = [worlds.model(draw) for _ in range(draw(st.integers(1, 2), label="kinds"))]
    keeps = [{}, {"sliding_window": draw(st.integers(1, 9))}]
    keeps.append({"attention_chunk_size": draw(st.integers(1, 9))})
    layers = draw(
        st.lists(
            st.tuples(st.integers(0, len(kinds) - 1), st.sampled_from(keeps)),
            min_size=1,
            max_size=5,
        ),
        label="kind and window of each layer",
    )
    num_tokens = draw(st.integers(0, 20), label="num_tokens")
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    source = draw_side(worlds, draw, rng, kinds, layers, num_tokens)
    target = draw_side(worlds, draw, rng, kinds, layers, num_tokens)
    of_kind = {}
    for side in (source, target):
        for engine, table in zip(side.engines, side.tables, strict=True):
            one = engine.geometry
            kind = layers[one.model_layers[0]][0]
            if kind not in of_kind:
                whole = EngineGeometry(
                    **kinds[kind] | {"num_layers": len(layers)},
                    block_size=max(num_tokens, 1),
                    layout="NHD",
                    parallel=ParallelShape(),
                )
                of_kind[kind] = worlds.logical(rng, whole, 1)
            if side is source:
                cells = {name: array[:, :num_tokens] for name, array in of_kind[kind].items()}
                worlds.fill(engine, table, cells)
    return GroupedCase(
        source,
        target,
        draw(st.integers(0, num_tokens), label="first_token"),
        num_tokens,
        [of_kind[kind] for kind, _ in layers],
        draw(st.sampled_from(["", "d0"])),
    )


def draw_side(worlds, draw, rng, kinds, layers, num_tokens) -> Side:
    kv_heads = [kind["num_kv_heads"] for kind in kinds]
    shape = worlds.parallel(draw, kv_heads, most_tp=4, pp=draw(st.integers(1, 3)))
    cuts = sorted(draw(st.integers(0, len(layers))) for _ in range(shape.pp - 1))
    stage_layers = [b - a for a, b in itertools.pairwise([0, *cuts, len(layers)])]
    keeps_windows = draw(st.booleans(), label="keeps windows")
    kept = [window if keeps_windows else {} for _, window in layers]
    grouped: dict[Any, list[int]] = {}
    for layer, (kind, _) in enumerate(layers):
        split = draw(st.integers(0, 1), label="group of equals")
        grouped.setdefault((kind, *kept[layer].items(), split), []).append(layer)
    engines, tables = [], []
    for key in draw(st.permutations(sorted(grouped, key=str)), label="order of the groups"):
        indices = grouped[key]
        one = EngineGeometry(
            **kinds[key[0]] | {"num_layers": len(indices)},
            block_size=worlds.block_size(draw, shape),
            layout=worlds.layout(draw, "latent" if kinds[key[0]]["use_mla"] else None),
            parallel=shape,
            layer_indices=indices,
            layer_split=split_of_group(indices, stage_layers),
            **kept[indices[0]],
        )
        one = worlds.padded(draw, one)
        table = worlds.table(draw, one, num_tokens)
        engines.append(worlds.engine(draw, rng, one, max(table, default=0) + 1))
        nulls = draw(st.booleans(), label="null blocks below the window")
        below = one.first_kept_token(num_tokens) // one.virtual_block_size if nulls else 0
        tables.append([0] * below + table[below:])
    return Side(engines, tables, kept)


def each_storage(side):
    for engine in side.engines:
        for storages in engine.storages.values():
            yield from storages


def expect(worlds, case) -> None:
    """What the transfer must do, done slowly on the target's own memory."""
    for engine, table in zip(case.target.engines, case.target.tables, strict=True):
        one = engine.geometry
        for rank in range(one.world_size):
            heads = one.heads(rank)
            for layer in one.layers(rank):
                tokens = case.moved(layer)
                for part, cells in case.logical[layer].items():
                    wanted = cells[layer][tokens][:, heads.start : heads.stop]
                    worlds.write(engine, rank, layer, part, table, tokens, wanted)


def check_plans_equal_oracle(worlds, data):
    """Law 2 over all groups: every byte of every storage of both sides is compared."""
    case = draw_case(worlds, data.draw)
    sources = [storage.copy() for storage in each_storage(case.source)]
    before = [storage.copy() for storage in each_storage(case.target)]
    expect(worlds, case)
    expected = [storage.copy() for storage in each_storage(case.target)]
    for storage, old in zip(each_storage(case.target), before, strict=True):
        storage[:] = old
    for target_group, rank, source_group, bound in case.copies():
        tensors = case.target.engines[target_group].tensors[rank]
        run_copies(bound, case.source.engines[source_group].tensors, tensors)
    for side, wanted in ((case.source, sources), (case.target, expected)):
        for found, want in zip(each_storage(side), wanted, strict=True):
            assert_bytes(found, want)


def count_writes(case, places):
    """Place → region → how often each byte is written by the plans of all pairs."""
    writes = {
        place: [np.zeros(len(region), dtype=np.int64) for region in regions]
        for place, (_, regions) in places.items()
    }
    for target_group, rank, source_group, bound in case.copies():
        source = case.source.engines[source_group]
        memories = {r: memory_of(source.geometry, r, t)[0] for r, t in source.tensors.items()}
        segments = bound.segments(memories, places[target_group, rank][0])
        for row in itertools.chain(*segments.values()):
            first = int(row["target_offset"])
            counts = writes[target_group, rank][int(row["target_region"])]
            counts[first : first + int(row["nbytes"])] += 1
    return writes


def check_exact_cover(worlds, data):
    """Law 1 over all groups: how often every byte of the target is written by all pairs' plans."""
    case = draw_case(worlds, data.draw)
    places = {
        (group, rank): memory_of(engine.geometry, rank, tensors)
        for group, engine in enumerate(case.target.engines)
        for rank, tensors in engine.tensors.items()
    }
    writes = count_writes(case, places)
    for region in itertools.chain(*(regions for _, regions in places.values())):
        region[:] = 0
    # The oracle writes a 1 into every byte that the span covers.
    for cells in itertools.chain(*(logical.values() for logical in case.logical)):
        cells[...] = np.iinfo(cells.dtype).max
    expect(worlds, case)
    for place, (_, regions) in places.items():
        for region, count in zip(regions, writes[place], strict=True):
            assert_cover(count, region == 255)


CHECKS = [check_plans_equal_oracle, check_exact_cover]


@pytest.mark.parametrize("check", CHECKS)
def test_the_plans_of_all_pairs_bring_every_kept_cell_exactly_once(worlds, check):
    @LAW
    @given(st.data())
    def law(data):
        check(worlds, data)

    law()


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_the_laws_hold_for_many_more_groupings(worlds, check):
    @settings(LAW, max_examples=300, database=None)
    @given(st.data())
    def law(data):
        check(worlds, data)

    law()


def test_digests_of_the_moved_layers_agree_whatever_the_grouping(worlds):
    """Per layer, so that each is summed over its own span."""

    def digests(side, layer, first, case):
        total: Any = 0
        for engine, table in zip(side.engines, side.tables, strict=True):
            if layer not in engine.geometry.model_layers:
                continue
            for rank, tensors in engine.tensors.items():
                memory, regions = memory_of(engine.geometry, rank, tensors)
                place = (engine.geometry, rank, memory, addresses_of(regions), table)
                total += token_digests(*place, case.num_tokens, first, [layer])
        return total

    @LAW
    @given(st.data())
    def law(data):
        case = draw_case(worlds, data.draw)
        for target_group, rank, source_group, bound in case.copies():
            tensors = case.target.engines[target_group].tensors[rank]
            run_copies(bound, case.source.engines[source_group].tensors, tensors)
        for layer in range(len(case.logical)):
            tokens = case.moved(layer)
            first = tokens[0] if tokens else case.num_tokens
            one, two = (digests(side, layer, first, case) for side in (case.source, case.target))
            np.testing.assert_array_equal(one, two)
            assert len(one) == len(tokens)
            assert one.all()

    law()


# ---- defects that the laws must catch ----------------------------------------------------------


def a_layer_of_a_pair_lost(monkeypatch):
    right = pairing._shared
    monkeypatch.setattr(
        pairing,
        "_shared",
        lambda *sides: {key: layers[:1] for key, layers in right(*sides).items()},
    )


def a_window_one_token_short(monkeypatch):
    right = first_kept_token
    monkeypatch.setattr(
        pairing, "first_kept_token", lambda n, **kept: min(right(n, **kept) + (n > 3), n)
    )


def a_window_one_token_long(monkeypatch):
    right = first_kept_token
    monkeypatch.setattr(pairing, "first_kept_token", lambda n, **kept: max(right(n, **kept) - 1, 0))


def the_sources_window_ignored(monkeypatch):
    monkeypatch.setattr(
        pairing.GroupPair,
        "first_kept_token",
        lambda self, n: (
            0
            if self.is_partial
            else first_kept_token(
                n,
                sliding_window=self.sliding_window,
                attention_chunk_size=self.attention_chunk_size,
            )
        ),
    )


def stages_without_layers_overlooked(monkeypatch):
    right = EngineGeometry.stage_of

    def overlooked(self, layer):
        return right(self, layer) - sum(n == 0 for n in self.stage_layers[: right(self, layer)])

    monkeypatch.setattr(EngineGeometry, "stage_of", overlooked)


def the_models_index_taken_inside_a_cross_layer_tensor(monkeypatch):
    right = lowering.Places._tensor

    def wrong(self, layer, suffix):
        tensor, index = right(self, layer, suffix)
        held = len(self._layers)
        is_cross = tensor.name.startswith("layers")
        return tensor, (layer - self._layers[0]) % held if is_cross else index

    monkeypatch.setattr(lowering.Places, "_tensor", wrong)


BOTH_LAWS = pytest.mark.parametrize(
    ("check", "says"),
    [(check_plans_equal_oracle, WRONG_BYTES), (check_exact_cover, WRONG_COVER)],
    ids=["plans equal oracle", "exact cover"],
)


@BOTH_LAWS
@pytest.mark.parametrize(
    "defect",
    [
        a_layer_of_a_pair_lost,
        a_window_one_token_short,
        a_window_one_token_long,
        the_sources_window_ignored,
    ],
)
def test_a_defect_in_the_arithmetic_of_groups_is_caught(worlds, monkeypatch, defect, check, says):
    defect(monkeypatch)
    must_be_caught(functools.partial(check, worlds), says)


@BOTH_LAWS
def test_a_wrong_index_inside_a_cross_layer_tensor_is_caught(worlds, monkeypatch, check, says):
    monkeypatch.setattr(worlds, "often_cross_layer", True)
    the_models_index_taken_inside_a_cross_layer_tensor(monkeypatch)
    must_be_caught(functools.partial(check, worlds), says)


@pytest.mark.parametrize("check", CHECKS)
def test_a_wrong_stage_is_named_as_one_that_lacks_the_layer(worlds, monkeypatch, check):
    # Ranks of another stage have no memory of the layer, so nothing wrong can be read there.
    stages_without_layers_overlooked(monkeypatch)
    must_be_caught(functools.partial(check, worlds), "has no tensor 'layer", ProtocolError)
