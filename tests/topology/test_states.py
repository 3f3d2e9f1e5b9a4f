"""Recurrent state: who holds which channels, laws 1 and 2 against slices and concatenations."""

import dataclasses
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.layouts.layout import Layout
from kvferry.topology import (
    EngineGeometry,
    ParallelShape,
    StateGeometry,
    binding,
    group_mismatches,
    mamba2_states,
    memory_of,
    pair_groups,
    plan,
    plan_transfer,
    run_copies,
    split_of_group,
    state_part,
    states,
    token_digests,
)
from kvferry.topology.description import TaggedGroup, tagged_groups
from tests.topology.defects import (
    WRONG_BYTES,
    WRONG_COVER,
    assert_bytes,
    assert_cover,
    count_writes,
    must_be_caught,
)

LAW = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])
UINTS: dict[str, Any] = {"float32": np.uint32, "bfloat16": np.uint16, "float64": np.uint64}


# ---- random engines with memory, as slow and plain as can be ------------------------------------


@dataclasses.dataclass
class Engine:
    """A group with real tensors on every rank, in one storage per layer as vLLM's pages are."""

    group: EngineGeometry
    tensors: dict  # rank → tensor name → array
    storages: dict  # rank → list of byte arrays


#: TP ranks of a source and of a target, at most.
MOST_TP = (7, 7)


def draw_states(draw):
    count = draw(st.integers(1, 3), label="states")
    made = []
    for number in range(count):
        sections = {
            name: (draw(st.integers(1, 6), label="units"), draw(st.integers(1, 3), label="size"))
            for name in "xBC"[: draw(st.integers(1, 3), label="sections")]
        }
        dtype = draw(st.sampled_from(sorted(UINTS)), label="dtype")
        made.append(state_part(f"s{number}", dtype, sections, draw(st.integers(1, 4))))
    return tuple(made)


def draw_group(draw, parts, num_layers, most_tp):
    pp = draw(st.integers(1, min(3, num_layers)), label="pp")
    inner = {part.name: draw(st.sampled_from(["HD", "DH"])) for part in parts}
    order = ",".join(f"{name}={dims}" for name, dims in inner.items())
    group = StateGeometry(
        num_layers=num_layers,
        states=parts,
        block_size=draw(st.integers(1, 9), label="block_size"),
        parallel=ParallelShape(tp=draw(st.integers(1, most_tp), label="tp"), pp=pp),
        layout=draw(st.sampled_from(["BHD", "BDH", f"B({order})"]), label="layout"),
    )
    if draw(st.booleans(), label="padded"):
        most = max(page_bytes(group, rank) for rank in range(group.world_size))
        padded = -(-most // 8) * 8 + 8 * draw(st.integers(0, 2))
        group = dataclasses.replace(group, page_size_padded=padded)
    return group


def held(part, section, tp_rank, tp):
    """Channels of one section on a rank, by the rule of KV heads written out."""
    units = section.num_units
    first = tp_rank * units // tp
    end = max(first + 1, (tp_rank + 1) * units // tp)
    return range(first * section.unit_size, end * section.unit_size)


def channels(group, part, rank):
    tp = group.parallel.tp
    return sum(len(held(part, section, rank % tp, tp)) for section in part.sections)


def page_bytes(group, rank):
    end = 0
    for part in group.states:
        itemsize = np.dtype(UINTS[part.dtype]).itemsize
        end = -(-end // itemsize) * itemsize
        end += channels(group, part, rank) * part.channel_size * itemsize
    align = max(np.dtype(UINTS[part.dtype]).itemsize for part in group.states)
    return -(-end // align) * align


def open_engine(rng, group, num_blocks):
    """Tensors as vLLM makes them: all states of a layer in its pages, one after the other."""
    engine = Engine(group, {}, {})
    for rank in range(group.world_size):
        tensors, storages = {}, []
        page = group.page_size_padded or page_bytes(group, rank)
        for layer in group.layers(rank):
            storage = rng.integers(0, 256, page * num_blocks, dtype=np.uint8)
            storages.append(storage)
            offset = 0
            for part in group.states:
                dtype = np.dtype(UINTS[part.dtype])
                offset = -(-offset // dtype.itemsize) * dtype.itemsize
                order = group.layout.inner_orders.get(part.name) or group.layout.order[1:]
                extents = {"H": channels(group, part, rank), "D": part.channel_size}
                shape = [extents[dim] for dim in order]
                array = np.ndarray(
                    (num_blocks, *shape),
                    dtype,
                    storage,
                    offset,
                    (page, shape[1] * dtype.itemsize, dtype.itemsize),
                )
                tensors[f"layer.{layer}.{part.name}"] = array
                offset += math.prod(shape) * dtype.itemsize
        engine.tensors[rank], engine.storages[rank] = tensors, storages
    return engine


def write(engine, rank, layer, logical, block):
    """Writes the model's state into one block of a rank: slices of every section, concatenated."""
    group, tp = engine.group, engine.group.parallel.tp
    for part in group.states:
        slices, first = [], 0
        for section in part.sections:
            ours = held(part, section, rank % tp, tp)
            slices.append(logical[layer, part.name][first + ours.start : first + ours.stop])
            first += section.num_units * section.unit_size
        cells = np.concatenate(slices)  # [channel, element]
        order = group.layout.inner_orders.get(part.name) or group.layout.order[1:]
        tensor = engine.tensors[rank][f"layer.{layer}.{part.name}"]
        tensor[block] = cells if order == "HD" else cells.T


def draw_logical(rng, parts, layers):
    return {
        (layer, part.name): rng.integers(
            0,
            np.iinfo(UINTS[part.dtype]).max,
            (part.num_channels, part.channel_size),
            UINTS[part.dtype],
            endpoint=True,
        )
        for layer in layers
        for part in parts
    }


def draw_table(draw, group, num_tokens):
    """Only the block of the last token is there; a source may have let go of the others."""
    blocks = -(-num_tokens // group.block_size)
    ids = list(draw(st.permutations(range(1, blocks + 3)), label="block ids"))[:blocks]
    return ids if draw(st.booleans(), label="all kept") else [0] * (blocks - 1) + ids[-1:]


@dataclasses.dataclass
class Case:
    source: Engine
    target: Engine
    rank: int
    tables: tuple
    span: tuple
    logical: dict

    @property
    def last_blocks(self):
        last = self.span[1] - 1
        sides = zip((self.source, self.target), self.tables, strict=True)
        return [table[last // engine.group.block_size] for engine, table in sides]

    def copies(self):
        made = plan_transfer(
            source=self.source.group,
            target=self.target.group,
            target_rank=self.rank,
            target_engine_id="d",
        )
        source_table, target_table = self.tables
        return made.bind(source_table, target_table, self.span[1], self.span[0])


def draw_case(data):
    draw = data.draw
    parts, num_layers = draw_states(draw), draw(st.integers(1, 4), label="layers")
    groups = [draw_group(draw, parts, num_layers, most_tp) for most_tp in MOST_TP]
    num_tokens = draw(st.integers(1, 25), label="num_tokens")
    tables = tuple(draw_table(draw, group, num_tokens) for group in groups)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1), label="seed"))
    source, target = (
        open_engine(rng, group, max(table) + 1) for group, table in zip(groups, tables, strict=True)
    )
    case = Case(
        source,
        target,
        draw(st.integers(0, groups[1].world_size - 1), label="target rank"),
        tables,
        (draw(st.integers(0, num_tokens - 1), label="first_token"), num_tokens),
        draw_logical(rng, parts, range(num_layers)),
    )
    for rank in range(groups[0].world_size):
        for layer in groups[0].layers(rank):
            write(source, rank, layer, case.logical, case.last_blocks[0])
    return case


def snapshot(engine):
    return {r: [one.copy() for one in storages] for r, storages in engine.storages.items()}


# ---- the laws -----------------------------------------------------------------------------------


def check_plan_equals_oracle(data):
    """Law 2, and of law 1 that nothing else changes: every byte of every rank is compared."""
    case = draw_case(data)
    copies = case.copies()
    sources, expected = snapshot(case.source), snapshot(case.target)
    run_copies(copies, case.source.tensors, case.target.tensors[case.rank])
    found = snapshot(case.target)
    for rank, storages in expected.items():
        for storage, before in zip(case.target.storages[rank], storages, strict=True):
            storage[:] = before
    for layer in case.target.group.layers(case.rank):
        write(case.target, case.rank, layer, case.logical, case.last_blocks[1])
    for wanted, got in ((snapshot(case.target), found), (sources, snapshot(case.source))):
        for rank, storages in wanted.items():
            for one, two in zip(storages, got[rank], strict=True):
                assert_bytes(two, one)
    layers = len(case.target.group.layers(case.rank))
    unpadded = sum(
        channels(case.target.group, part, case.rank)
        * part.channel_size
        * np.dtype(UINTS[part.dtype]).itemsize
        for part in case.target.group.states
    )
    assert copies.nbytes == layers * unpadded


def check_exact_cover(data):
    """Law 1: how often every byte of the target is written."""
    case = draw_case(data)
    copies = case.copies()
    memory, regions = memory_of(case.target.group, case.rank, case.target.tensors[case.rank])
    memories = {
        rank: memory_of(case.source.group, rank, tensors)[0]
        for rank, tensors in case.source.tensors.items()
    }
    writes = count_writes(copies.segments(memories, memory), regions)
    for region in regions:
        region[:] = 0
    for cells in case.logical.values():
        cells[...] = np.iinfo(cells.dtype).max
    for layer in case.target.group.layers(case.rank):
        write(case.target, case.rank, layer, case.logical, case.last_blocks[1])
    for region, count in zip(regions, writes, strict=True):
        assert_cover(count, region == 255)


CHECKS = pytest.mark.parametrize("check", [check_plan_equals_oracle, check_exact_cover])


@CHECKS
def test_the_laws_hold_for_states(check):
    @LAW
    @given(st.data())
    def law(data):
        check(data)

    law()


@pytest.mark.slow
@CHECKS
def test_the_laws_hold_for_many_more_states(check):
    @settings(LAW, max_examples=400, database=None)
    @given(st.data())
    def law(data):
        check(data)

    law()


def sections_begin_where_the_first_begins(monkeypatch):
    monkeypatch.setattr(states, "accumulate", lambda counts, initial: [initial] * len(counts))


def units_taken_for_channels(monkeypatch):
    monkeypatch.setattr(states.StateSection, "channels_of", lambda section, units: units)


def all_tokens_of_the_span_bound(monkeypatch):
    monkeypatch.setattr(StateGeometry, "first_bound_token", lambda self, first, last: first)


def first_rank_of_the_source_gives_all(monkeypatch):
    right = plan._layer_pieces
    monkeypatch.setitem(globals(), "MOST_TP", (7, 1))  # so that several ranks give

    def from_first(source, layer, share, context, choice):
        pieces = list(right(source, layer, share, context, choice))
        return [dataclasses.replace(piece, source_rank=pieces[0].source_rank) for piece in pieces]

    monkeypatch.setattr(plan, "_layer_pieces", from_first)


def state_of_the_first_block(monkeypatch):
    right = binding.shared_spans

    def first_block(*given):
        spans = right(*given)
        return spans._replace(target=spans.target * 0)

    monkeypatch.setattr(binding, "shared_spans", first_block)


def a_section_lost(monkeypatch):
    right = plan._layer_pieces
    monkeypatch.setattr(
        plan,
        "_layer_pieces",
        lambda source, layer, share, *more: (
            () if share.part.endswith(".C") else right(source, layer, share, *more)
        ),
    )


@pytest.mark.parametrize(
    ("defect", "check", "says"),
    [
        (sections_begin_where_the_first_begins, check_plan_equals_oracle, WRONG_BYTES),
        (units_taken_for_channels, check_plan_equals_oracle, WRONG_BYTES),
        (all_tokens_of_the_span_bound, check_exact_cover, WRONG_COVER),
        (first_rank_of_the_source_gives_all, check_plan_equals_oracle, WRONG_BYTES),
        (state_of_the_first_block, check_plan_equals_oracle, WRONG_BYTES),
        (a_section_lost, check_exact_cover, WRONG_COVER),
    ],
)
def test_a_defect_is_caught(monkeypatch, defect, check, says):
    defect(monkeypatch)
    must_be_caught(check, says)


# ---- examples -----------------------------------------------------------------------------------


def granite(tp=1, pp=1, **more):
    parts = mamba2_states(
        num_heads=48, head_size=64, state_size=128, num_groups=1, conv_kernel=4, dtype="bfloat16"
    )
    return StateGeometry(
        **{
            "num_layers": 4,
            "states": parts,
            "block_size": 4096,
            "parallel": ParallelShape(tp=tp, pp=pp),
            "layout": "B(conv=DH,ssm=HD)",
            **more,
        }
    )


def test_heads_are_divided_and_groups_replicated():
    group = granite(tp=4)
    assert [group.heads(rank, "ssm.heads") for rank in (0, 3)] == [range(12), range(36, 48)]
    assert [group.heads(rank, "conv.x") for rank in (0, 3)] == [range(768), range(2304, 3072)]
    assert {group.heads(rank, "conv.B") for rank in range(4)} == {range(128)}
    # (x + B + C) channels of three inputs each.
    assert group.cache_shape(1, 7, "conv") == (7, 3, 768 + 128 + 128)
    assert group.cache_shape(1, 7, "ssm") == (7, 12, 64 * 128)


def test_replicas_of_a_group_are_read_in_turn():
    made = plan_transfer(source=granite(tp=4), target=granite(tp=1), target_engine_id="d")
    givers = {piece.layer: piece.source_rank for piece in made.pieces if piece.part == "conv.B"}
    assert sorted(givers.values()) == [0, 1, 2, 3]
    heads = [piece.source_rank for piece in made.pieces if piece.part == "ssm.heads"]
    assert heads == [0, 1, 2, 3] * 4


def test_tp_3_to_tp_2_splits_sections_where_either_side_does():
    made = plan_transfer(source=granite(tp=3), target=granite(tp=2), target_rank=1)
    pieces = [piece for piece in made.pieces if piece.layer == 0 and piece.part == "ssm.heads"]
    assert [(piece.source_rank, piece.heads) for piece in pieces] == [
        (1, range(24, 32)),
        (2, range(32, 48)),
    ]


def test_plans_of_many_channels_are_small():
    # One unit per channel, as in Mamba1: the plan splits at ranks, not at channels.
    parts = (state_part("conv", "bfloat16", {"x": (8192, 1)}, 3),)
    source = granite(tp=3, states=parts, layout="BHD")
    made = plan_transfer(source=source, target=granite(tp=2, states=parts, layout="BDH"))
    assert len(made.pieces) == 4 * 2
    assert sum(len(piece.heads) for piece in made.pieces) == 4 * 4096


def test_a_state_moves_once_whatever_the_tokens_and_block_sizes():
    source = granite(tp=2, block_size=16)
    copies = plan_transfer(source=source, target=granite()).bind([0, 0, 7], [3], 47)
    assert [copies.runs_of(rank).tolist() for rank in (0, 1)] == [[(7, 14, 3, 46, 1, 1, 1)]] * 2
    assert copies.nbytes == 4 * (3 * (3072 + 256) + 48 * 64 * 128) * 2


def test_pages_are_shared_by_the_states_of_a_layer_and_may_be_padded():
    group = granite(tp=2, page_size_padded=1 << 20)
    conv, ssm = group.memory(0, num_blocks=5).tensors[2:4]
    assert (conv.name, ssm.name) == ("layer.1.conv", "layer.1.ssm")
    assert conv.parts["conv.x"].block == ssm.parts["ssm.heads"].block == 1 << 20
    conv_bytes = 3 * (1536 + 256) * 2
    assert ssm.offset - conv.offset == conv_bytes
    assert conv.parts["conv.C"].offset == (1536 + 128) * 2
    assert group.nbytes(0, 5) == 4 * 5 << 20
    apart = group.memory(0, 5, region_per_tensor=True)
    assert [tensor.region for tensor in apart.tensors] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_description_gives_the_group_back_over_the_wire():
    group = granite(tp=3, pp=2, page_size_padded=1 << 21)
    wire = msgspec.msgpack.encode(tagged_groups([group])[0])
    again = msgspec.msgpack.decode(wire, type=TaggedGroup).geometry
    assert again == group
    assert again.memory(2, 9) == group.memory(2, 9)


def test_the_digest_does_not_depend_on_sharding_layout_or_blocks():
    rng = np.random.default_rng(3)
    parts = (
        state_part("conv", "bfloat16", {"x": (5, 3), "B": (2, 2)}, 3),
        state_part("ssm", "float32", {"heads": (5, 1)}, 6),
    )
    logical = draw_logical(rng, parts, range(3))
    sums = set()
    for tp, pp, block_size, layout in ((1, 1, 64, "BHD"), (3, 2, 8, "BDH"), (7, 1, 16, "BHD")):
        group = StateGeometry(
            num_layers=3,
            states=parts,
            block_size=block_size,
            parallel=ParallelShape(tp=tp, pp=pp),
            layout=Layout(layout),
        )
        engine = open_engine(rng, group, 9)
        total = 0
        for rank in range(group.world_size):
            for layer in group.layers(rank):
                write(engine, rank, layer, logical, 5)
            memory, regions = memory_of(group, rank, engine.tensors[rank])
            table = [0] * (-(-40 // block_size) - 1) + [5]
            addresses = [region.ctypes.data for region in regions]
            total += int(token_digests(group, rank, memory, addresses, table, 40).sum())
        sums.add(total % 2**64)
    assert len(sums) == 1


def test_groups_of_states_meet_by_layer_and_other_states_are_named():
    hybrid = [
        granite(layer_indices=(0, 2, 3, 5)),
        EngineGeometry(
            num_layers=2,
            num_kv_heads=4,
            head_size=128,
            dtype="bfloat16",
            block_size=16,
            layout="NHD",
            parallel=ParallelShape(),
            layer_indices=(1, 4),
        ),
    ]
    split = [
        granite(num_layers=2, layer_indices=(0, 5)),
        hybrid[1],
        granite(num_layers=2, layer_indices=(2, 3), block_size=64),
    ]
    assert [(pair.source_group, pair.layers) for pair in pair_groups(hybrid, split)] == [
        (0, (0, 5)),
        (1, (1, 4)),
        (0, (2, 3)),
    ]
    assert pair_groups(hybrid, split)[0].first_kept_token(100) == 99
    parts = mamba2_states(
        num_heads=48, head_size=64, state_size=128, num_groups=1, conv_kernel=4, dtype="float32"
    )
    (text,) = group_mismatches([granite()], [granite(states=parts)])
    assert text.startswith("recurrent_state of layers 0-3: source has conv bfloat16 (x 48*64")
    texts = group_mismatches([granite(num_layers=2, layer_indices=(1, 4))], [hybrid[1]])
    assert any(text.startswith("recurrent_state of layers 1, 4") for text in texts)


def test_stages_may_have_none_of_the_recurrent_layers():
    split = split_of_group([4, 5, 6, 7], [4, 4])
    group = granite(pp=2, layer_indices=(4, 5, 6, 7), layer_split=split)
    assert group.tensor_names(0) == ()
    assert memory_of(group, 0, {})[0].tensors == ()
    made = plan_transfer(source=group, target=granite(layer_indices=(4, 5, 6, 7)))
    assert made.source_ranks == (1,)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": ()}, "0 states of 0 sections; give each"),
        ({"layout": "NHD"}, "channels and their elements, BHD, or BDH, not KBNHD"),
        ({"layout": "B(conv=DH)"}, "give each one its order"),
        ({"page_size_padded": 64}, "page_size_padded: 64 bytes; the states of a layer need"),
        ({"page_size_padded": (1 << 20) + 1}, "a whole number of elements of 2"),
        ({"parallel": ParallelShape(tp=96, dcp=2)}, "dcp"),
        ({"parallel": ParallelShape(pcp=2)}, "a recurrent state is not made of tokens"),
        ({"layer_split": (2, 3)}, "layer_split: .* does not split 4 layers"),
    ],
)
def test_what_makes_no_group_of_states_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(granite(), **change)


@pytest.mark.parametrize(
    ("name", "dtype", "sections", "size", "message"),
    [
        ("conv", "bf16", {"x": (1, 1)}, 1, "dtype"),
        ("conv", "bfloat16", {}, 1, "give each state one section"),
        ("conv", "bfloat16", {"x": (0, 1)}, 1, "conv.x: num_units: 0 is less than 1"),
        ("conv", "bfloat16", {"x": (1, -1)}, 1, "conv.x: unit_size: -1 is less than 1"),
        ("conv", "bfloat16", {"x": (1, 1)}, 0, "conv: channel_size: 0 is less than 1"),
        ("conv", "bfloat16", {f"s{i}": (1, 1) for i in range(65)}, 1, "64 in all at most"),
    ],
)
def test_what_makes_no_state_is_refused(name, dtype, sections, size, message):
    with pytest.raises(ValueError, match=message):
        state_part(name, dtype, sections, size)


def test_two_states_of_one_name_are_refused():
    one = state_part("conv", "bfloat16", {"x": (2, 1)})
    with pytest.raises(ValueError, match="a name of its own"):
        granite(states=(one, one), layout="BHD")


@pytest.mark.parametrize("field", ["num_kv_heads", "head_size", "dtype", "scale_dtype"])
def test_a_group_of_states_has_no_fields_of_heads(field):
    assert not hasattr(granite(), field)
    with pytest.raises(TypeError, match=field):
        dataclasses.replace(granite(), **{field: 1})
