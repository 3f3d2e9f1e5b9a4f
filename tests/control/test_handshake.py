"""Validation of one description, comparison of two."""

import dataclasses

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvferry.control.handshake import (
    MAX_PARTS,
    MAX_REGIONS,
    MAX_TENSORS,
    compare,
    unproved_heads,
    validate,
)
from kvferry.decoding import decode
from kvferry.errors import ProtocolError
from kvferry.layouts import CellStrides
from kvferry.topology.description import (
    MAX_GROUPS,
    MAX_RANKS,
    EngineDescription,
    tagged_groups,
)
from kvferry.topology.geometry import EngineGeometry
from kvferry.topology.group import GroupGeometry
from kvferry.topology.heads import HeadDigests
from kvferry.topology.pairing import pair_groups
from kvferry.topology.sharding import ParallelShape
from kvferry.topology.states import StateGeometry, state_part

replace = msgspec.structs.replace

#: A busy machine is no finding.
LAW = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def grouped_engines(draw):
    """The groups of an engine with three or four layers, by chance unlike those of another."""
    base = EngineGeometry(
        num_layers=draw(st.sampled_from([3, 3, 3, 4])),
        num_kv_heads=1,
        head_size=4,
        head_size_v=draw(st.sampled_from([None, None, 4, 8])),
        dtype=draw(st.sampled_from(["float32", "float32", "int32"])),
        block_size=draw(st.integers(1, 3)),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        parallel=ParallelShape(tp=draw(st.integers(1, 3))),
    )
    number = draw(st.integers(1, 3))
    of_layer = [draw(st.integers(0, number - 1)) for _ in range(base.num_layers)]
    kept = st.sampled_from([{}, {}, {"sliding_window": 4}, {"attention_chunk_size": 4}])
    return [
        dataclasses.replace(base, num_layers=len(layers), layer_indices=tuple(layers), **draw(kept))
        for group in range(number)
        if (layers := [layer for layer, at in enumerate(of_layer) if at == group])
    ]


def change(value, path, new):
    """A copy of nested structs, tuples and dicts with one place changed."""
    if not path:
        return new
    first, *rest = path
    if isinstance(value, msgspec.Struct):
        return replace(value, **{first: change(getattr(value, first), rest, new)})
    if isinstance(value, dict):
        return value | {first: change(value[first], rest, new)}
    changed = change(value[first], rest, new)
    return (*value[:first], changed, *value[first + 1 :])


def sent(description, *changes):
    """The bytes of a description with some places changed: (path, new value)."""
    # As plain data: there a group may say what no geometry can.
    plain = msgspec.msgpack.decode(msgspec.msgpack.encode(description))
    for path, new in changes:
        path = list(path)
        if path[0] == "groups" and len(path) > 2:
            path.insert(2, "geometry")
        if "parts" in path[:-1]:
            path[-1] = CellStrides._fields.index(path[-1])
        plain = change(plain, path, new)
    return msgspec.msgpack.encode(plain)


def receive(payload):
    """What a peer sent, decoded and judged.

    Raises:
        ProtocolError: it is refused.
    """
    decoder = msgspec.msgpack.Decoder(EngineDescription)
    description = decode(decoder, payload, "description")
    validate(description)
    return description


# ---- one description -----------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND", "BNHKD", "BLKNHD"])
@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (3, 2), (6, 1), (1, 5)])
def test_what_engines_describe_of_themselves_is_valid(describe, layout, tp, pp):
    validate(describe("e", tp=tp, pp=pp, layout=layout, block_size=24))


def test_cross_layer_memory_may_be_described_as_one_view_per_layer(describe):
    description = describe("e", layout="BLKNHD")
    memory = description.ranks[0].memory[0]
    (whole,) = memory.tensors
    stride = whole.parts["k"].layer
    views = tuple(
        replace(
            whole,
            name=f"layer.{layer}",
            offset=layer * stride,
            parts={name: part._replace(layer=0) for name, part in whole.parts.items()},
        )
        for layer in range(6)
    )
    validate(change(description, ["ranks", 0, "memory", 0, "tensors"], views))
    with pytest.raises(ProtocolError, match="missing"):
        validate(change(description, ["ranks", 0, "memory", 0, "tensors"], views[:-1]))


TENSOR = ["ranks", 1, "memory", 0, "tensors", 2]

WRONG = {
    "a million layers": (["groups", 0, "num_layers"], 1 << 20, "allowed are 4096"),
    "an empty engine id": (["engine_id"], "", "engine_id: 0 characters"),
    "an endless engine id": (["engine_id"], "x" * 300, "engine_id: 300 characters"),
    "an empty incarnation": (["incarnation"], "", "incarnation: 0"),
    "a turned protocol range": (["protocol_max"], 0, "no range"),
    "no ranks": (["ranks"], (), "ranks: 0 described"),
    "no groups": (["groups"], (), "groups: 0 described"),
    "more ranks in tp": (["groups", 0, "parallel", "tp"], 4, "makes 8 ranks, 2 are described"),
    "more ranks in pcp": (["groups", 0, "parallel", "pcp"], 1 << 20, "2 are described"),
    "more ranks than any engine": (["groups", 0, "parallel", "tp"], 1 << 40, "tp: .* is more than"),
    "no ranks in tp": (["groups", 0, "parallel", "tp"], 0, "tp: 0 is less than 1"),
    "more stages than layers": (["groups", 0, "parallel", "pp"], 1 << 20, "lower pp"),
    "a block of nothing": (["groups", 0, "block_size"], 0, "block_size"),
    "a block of everything": (["groups", 0, "block_size"], 1 << 40, "block_size"),
    "an unknown layout": (["groups", 0, "layout", "order"], "XYZ", "unknown dim .*groups.0."),
    "an unknown dtype": (["groups", 0, "dtype"], "float7", "dtype"),
    "a split that does not add up": (["groups", 0, "layer_split"], (1, 1), "layer_split"),
    "too few layer names": (["groups", 0, "layer_names"], ("a",), "layer_names"),
    "ranks out of order": (["ranks", 1, "rank"], 0, "rank 1: describes itself as rank 0"),
    "no endpoints": (["ranks", 1, "endpoints"], {}, "rank 1: endpoints: none"),
    "no memory": (["ranks", 1, "memory"], (), "0 entries for 1 groups"),
    "no blocks": (["ranks", 1, "memory", 0, "num_blocks"], 0, "num_blocks: 0"),
    "more blocks than memory": (["ranks", 1, "memory", 0, "num_blocks"], 11, "spans bytes"),
    "a negative region": (["ranks", 1, "memory", 0, "region_bytes", 0], -1, "region 0: -1 bytes"),
    "a vast region": (["ranks", 1, "memory", 0, "region_bytes", 0], 1 << 63, "region 0"),
    "a region too small": (["ranks", 1, "memory", 0, "region_bytes", 2], 100, "has 100 bytes"),
    "a tensor missing": (["ranks", 1, "memory", 0, "tensors"], (), "missing: layer.3, layer.4"),
    "a tensor renamed": ([*TENSOR, "name"], "layer.0", "missing: layer.5"),
    "a tensor twice": ([*TENSOR, "name"], "layer.3", "missing: layer.5"),
    "a region that is not there": ([*TENSOR, "region"], 3, "region: 3, there are 3"),
    "a region before the first": ([*TENSOR, "region"], -1, "region: -1"),
    "a tensor before its region": ([*TENSOR, "offset"], -4, "spans bytes -4"),
    "a tensor behind its region": ([*TENSOR, "offset"], 4, "spans bytes"),
    "a part missing": ([*TENSOR, "parts"], {}, r"parts: \[\]"),
    "a stride too long": ([*TENSOR, "parts", "v", "block"], 1 << 40, "part v: spans"),
    "a stride backwards": ([*TENSOR, "parts", "k", "token"], -96, "part k: spans bytes -"),
    "cells on top of each other": ([*TENSOR, "parts", "k", "head"], 0, "stride of head: 0"),
    "a stride of 64 bits nobody uses": ([*TENSOR, "parts", "k", "layer"], 1 << 63, "layer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_validation_names(case, describe):
    path, value, message = WRONG[case]
    description = describe("e", pp=2)
    validate(description)
    with pytest.raises(ProtocolError, match=message):
        receive(sent(description, (path, value)))


def test_an_engine_with_too_many_ranks_is_refused_before_any_work(describe):
    description = describe("e")
    ranks = description.ranks * (MAX_RANKS + 1)
    with pytest.raises(ProtocolError, match=f"1 to {MAX_RANKS}"):
        validate(replace(description, ranks=ranks))


def large(what, describe, recurrent):
    """A description with more of something than is accepted, in a few megabytes at most."""
    base = recurrent("e") if what == "sections" else describe("e", num_layers=1)
    (rank,) = base.ranks
    (memory,) = rank.memory
    match what:
        case "groups":
            return replace(base, groups=base.groups * (MAX_GROUPS + 1))
        case "ranks times groups":
            return replace(base, groups=base.groups * 64, ranks=base.ranks * 129)
        case "tensors":
            memory = replace(memory, tensors=memory.tensors * (MAX_TENSORS + 1))
        case "parts":
            (tensor,) = memory.tensors
            parts = dict.fromkeys(map(str, range(MAX_PARTS + 1)), tensor.parts["k"])
            memory = replace(memory, tensors=(replace(tensor, parts=parts),))
        case "sections":
            (state,) = base.groups
            many = {f"{number}": (1, 1) for number in range(64)}
            states = (state_part("s", "int8", many),)
            geometry = dataclasses.replace(state.geometry, states=states, layout="B(s=HD)")
            none = replace(memory, tensors=())
            ranks = (replace(rank, memory=(none,)),) * 1024
            return replace(base, groups=tagged_groups([geometry] * 2), ranks=ranks)
        case "regions":
            memory = replace(memory, region_bytes=(1,) * (MAX_REGIONS + 1))
    return replace(base, ranks=(replace(rank, memory=(memory,)),))


@pytest.mark.parametrize(
    "what", ["groups", "ranks times groups", "tensors", "parts", "sections", "regions"]
)
def test_a_description_that_would_cost_too_much_is_refused_before_any_work(
    describe, recurrent, monkeypatch, what
):
    description = large(what, describe, recurrent)
    monkeypatch.setattr(GroupGeometry, "tensors", lambda *_: pytest.fail("it was judged"))
    with pytest.raises(ProtocolError, match=rf"{what}.*: \d+ described"):
        validate(description)


def test_lists_that_are_too_long_are_refused_before_they_are_decoded(describe, monkeypatch):
    description = describe("e")
    with pytest.raises(ProtocolError, match=r"length <= 1024 - at `\$.ranks`"):
        receive(sent(replace(description, ranks=description.ranks * (MAX_RANKS + 1))))
    payload = sent(replace(description, groups=description.groups * (MAX_GROUPS + 1)))
    monkeypatch.setattr(EngineGeometry, "__post_init__", lambda _: pytest.fail("it was made"))
    with pytest.raises(ProtocolError, match=r"length <= 64 - at `\$.groups`"):
        receive(payload)


@LAW
@given(data=st.data())
def test_whatever_numbers_a_peer_sends_it_is_valid_or_a_protocol_error(describe, data):
    """And if valid, no cell of any block lies outside its region."""
    description = describe("e", tp=2)
    numbers = st.one_of(
        st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-5, 5), st.sampled_from([8, 16, 4096])
    )
    changes = []
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(
            st.sampled_from(
                [
                    ["groups", 0, field]
                    for field in ("num_layers", "num_kv_heads", "head_size", "block_size")
                ]
                + [["groups", 0, "parallel", "tp"]]
                + [
                    ["ranks", 0, "memory", 0, "num_blocks"],
                    ["ranks", 0, "memory", 0, "region_bytes", 0],
                    ["ranks", 0, "memory", 0, "tensors", 0, "offset"],
                    ["ranks", 0, "memory", 0, "tensors", 0, "region"],
                ]
                + [
                    ["ranks", 0, "memory", 0, "tensors", 0, "parts", "k", field]
                    for field in ("offset", "layer", "block", "token", "head", "element")
                ]
            )
        )
        changes.append((path, data.draw(numbers)))
    try:
        description = receive(sent(description, *changes))
    except ProtocolError:
        return
    group, memory = description.geometries[0], description.ranks[0].memory[0]
    tensor = memory.tensors[0]
    k = tensor.parts["k"]
    heads = group.heads(0)
    extents = (memory.num_blocks, group.block_size, len(heads), group.head_size)
    corners = [
        tensor.offset
        + k.offset
        + sum(
            s * (n - 1) * bit
            for s, n, bit in zip((k.block, k.token, k.head, k.element), extents, bits, strict=True)
        )
        for bits in [(a, b, c, d) for a in (0, 1) for b in (0, 1) for c in (0, 1) for d in (0, 1)]
    ]
    assert min(corners) >= 0
    assert max(corners) + 4 <= memory.region_bytes[tensor.region]


# ---- one description of several groups -----------------------------------------------------

GROUPS = [
    {"layer_indices": (0, 2, 4), "sliding_window": 20, "layer_split": (3, 0)},
    {
        "layer_indices": (1, 3),
        "attention_chunk_size": 32,
        "layer_split": (1, 1),
        "layout": "BLKNHD",
    },
    {"layer_indices": (5,), "layer_split": (0, 1), "layout": "BLKNHD"},
]


def test_groups_may_lie_on_top_of_each_other_and_be_absent_from_a_stage(hybrid):
    description = hybrid("e", GROUPS, pp=2)
    validate(description)
    memory = description.ranks[1].memory
    assert [len(group.tensors) for group in memory] == [0, 1, 1]
    assert [group.region_bytes for group in memory[1:]] == [memory[1].region_bytes] * 2


WRONG_GROUPS = {
    "a layer in two groups": (["groups", 2, "layer_indices"], (4,), "layers 4 are in several"),
    "indices out of order": (["groups", 0, "layer_indices"], (2, 0, 4), "0 follows 2.*groups.0"),
    "an index twice": (["groups", 0, "layer_indices"], (0, 2, 2), "2 follows 2"),
    "an index below 0": (["groups", 0, "layer_indices"], (-1, 2, 4), "-1 is less than"),
    "too few indices": (["groups", 0, "layer_indices"], (0, 2), "2 indices for num_layers=3"),
    "too many indices": (
        ["groups", 0, "layer_indices"],
        tuple(range(4097)),
        "4097 indices for num_layers=3",
    ),
    "no indices": (["groups", 0, "layer_indices"], (), "0 indices for num_layers=3"),
    "an index beyond any model": (["groups", 2, "layer_indices"], (4096,), "allowed is 4095"),
    "a window of nothing": (["groups", 0, "sliding_window"], 0, "sliding_window: 0 is less"),
    "a window below 0": (["groups", 0, "sliding_window"], -4, "sliding_window: -4 is less"),
    "an endless window": (["groups", 0, "sliding_window"], 1 << 63, "sliding_window: .* is more"),
    "a chunk of nothing": (["groups", 1, "attention_chunk_size"], 0, "attention_chunk_size: 0 is"),
    "an endless chunk": (["groups", 1, "attention_chunk_size"], 1 << 62, "is more than"),
    "a window and a chunk": (["groups", 1, "sliding_window"], 4, "sliding_window=4 and .*groups.1"),
    "no split over the stages": (["groups", 0, "layer_split"], None, "layer_split: missing"),
    "a split below 0": (["groups", 0, "layer_split"], (4, -1), "layer_split: .* at least 0"),
    "a split over other stages": (["groups", 0, "layer_split"], (3, 0, 0), "over 2 stages"),
    "a zero in a split of all layers": (["groups", 0, "layer_indices"], None, "at least 1 layer"),
    "no layers in all": (["groups", 2, "num_layers"], 0, "num_layers: 0 is less than 1"),
    "another shape": (["groups", 1, "parallel", "tp"], 2, "makes 4 ranks, 2 are described"),
    "names for other layers": (["groups", 0, "layer_names"], ("a", "b"), "layer_names: 2 names"),
    "tensors of layers not there": (["groups", 0, "layer_split"], (2, 1), "rank 0: group 0: tens"),
    "memory of a group missing": (["ranks", 1, "memory"], (), "0 entries for 3 groups"),
}


@pytest.mark.parametrize("case", WRONG_GROUPS)
def test_validation_of_groups_names(case, hybrid):
    path, value, message = WRONG_GROUPS[case]
    with pytest.raises(ProtocolError, match=message):
        receive(sent(hybrid("e", GROUPS, pp=2), (path, value)))


def test_groups_on_different_ranks_are_refused(hybrid):
    description = hybrid("e", [{"layer_indices": (0, 1)}, {"layer_indices": (2, 3)}], tp=2)
    turned = dataclasses.replace(
        description.geometries[1], parallel=ParallelShape(pp=2), layer_split=(1, 1)
    )
    with pytest.raises(ProtocolError, match=r"group 1: .*pp=2.* group 0 has .*tp=2.*same ranks"):
        validate(change(description, ["groups", 1, "geometry"], turned))


@LAW
@given(data=st.data())
def test_whatever_groups_a_peer_sends_they_are_valid_or_a_protocol_error(hybrid, data):
    """And if valid, they pair with themselves."""
    description = hybrid("e", GROUPS, pp=2)
    numbers = st.one_of(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(-1, 6))
    values = {
        "layer_indices": st.none() | st.lists(numbers, max_size=5).map(tuple),
        "layer_split": st.none() | st.lists(numbers, max_size=3).map(tuple),
        "sliding_window": st.none() | numbers,
        "attention_chunk_size": st.none() | numbers,
        "num_layers": numbers,
        "layer_names": st.none() | st.lists(st.text(), max_size=4).map(tuple),
    }
    changes = []
    for _ in range(data.draw(st.integers(1, 3))):
        field = data.draw(st.sampled_from(sorted(values)))
        path = ["groups", data.draw(st.integers(0, 2)), field]
        changes.append((path, data.draw(values[field])))
    try:
        description = receive(sent(description, *changes))
    except ProtocolError:
        return
    assert compare(description, replace(description, engine_id="other")) == []


# ---- one description of states -------------------------------------------------------------


@pytest.fixture
def recurrent(describe):
    """The description of an engine with one group of recurrent layers, by its shape."""

    def made(engine_id, **shape):
        group = StateGeometry(
            num_layers=2,
            states=(
                state_part("conv", "bfloat16", {"x": (4, 3), "B": (1, 2)}, 3),
                state_part("ssm", "float32", {"heads": (4, 1)}, 5),
            ),
            block_size=16,
            parallel=ParallelShape(**shape),
        )
        base = describe(engine_id, num_layers=2, **shape)
        ranks = tuple(replace(rank, memory=(group.memory(rank.rank, 10),)) for rank in base.ranks)
        return replace(base, groups=tagged_groups([group]), ranks=ranks)

    return made


def test_an_engine_of_states_is_described_and_meets_its_like(recurrent):
    ours = receive(sent(recurrent("p", tp=2)))
    theirs = receive(sent(recurrent("d", pp=2)))
    assert compare(ours, theirs) == []


STATE = ["groups", 0, "states", 0]

WRONG_STATES = {
    "no states": (["groups", 0, "states"], (), "0 states of 0 sections"),
    "a state of nothing": ([*STATE, "sections"], (), "give each state one section"),
    "a section of no units": ([*STATE, "sections", 0, "num_units"], 0, "num_units: 0 is less"),
    "a section of everything": ([*STATE, "sections", 0, "unit_size"], 1 << 40, "is more than"),
    "a channel of nothing": ([*STATE, "channel_size"], -1, "conv: channel_size: -1"),
    "an unknown dtype": ([*STATE, "dtype"], "float7", "conv: dtype 'float7' is unknown"),
    "two states of one name": ([*STATE, "name"], "ssm", "a name of its own"),
    "a layout of tokens": (["groups", 0, "layout", "order"], "KBNHD", "BHD, or BDH"),
    "tokens over ranks": (["groups", 0, "parallel", "pcp"], 2, "not made of tokens"),
    "another size": (["groups", 0, "states", 1, "channel_size"], 50, "spans bytes"),
    "another kind of group": (["groups", 0], {"type": "windows"}, "Invalid value 'windows'"),
}


@pytest.mark.parametrize("case", WRONG_STATES)
def test_validation_of_states_names(case, recurrent):
    path, value, message = WRONG_STATES[case]
    with pytest.raises(ProtocolError, match=message):
        receive(sent(recurrent("e", tp=2), (path, value)))


def test_absurd_groups_are_refused_before_they_are_built(describe, recurrent):
    """However many they are: a geometry takes time only for the length of what is given."""
    for description in (describe("e"), recurrent("e")):
        wire = msgspec.msgpack.decode(sent(description))
        (group,) = wire["groups"]
        group["geometry"]["num_layers"] = 1 << 20
        group["geometry"]["parallel"] |= {"tp": 1 << 20, "pp": 1 << 20}
        payload = msgspec.msgpack.encode(wire | {"groups": [group] * 5000})
        with pytest.raises(ProtocolError, match="Expected `array` of length <= 64"):
            receive(payload)


# ---- a pair --------------------------------------------------------------------------------


def test_layout_block_size_tp_and_pp_are_no_mismatches(describe):
    ours = describe("p", tp=3, pp=1, block_size=16, layout="HND", num_blocks=50)
    theirs = describe("d", tp=1, pp=2, block_size=24, layout="NHD", num_blocks=7)
    assert compare(ours, theirs) == compare(theirs, ours) == []


def test_names_of_models_and_of_starts_are_no_mismatches(describe, fingerprint):
    theirs = describe("d", "another-start", model=fingerprint(name="alias"))
    assert compare(describe("p"), theirs) == []


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "MistralForCausalLM"),
        ("num_layers", 7),
        ("num_kv_heads", 4),
        ("head_size", 16),
        ("dtype", "int8"),
        ("rope", "theta=500000"),
        ("config_digest", "c1"),
        ("weights_digest", "w1"),
    ],
)
def test_every_field_of_the_model_is_compared_and_both_values_are_said(
    describe, fingerprint, field, value
):
    ours, theirs = describe("p"), describe("d", model=fingerprint(**{field: value}))
    (mismatch,) = compare(ours, theirs)
    said = " (tiny)" if field == "weights_digest" else ""  # what they are of
    own = getattr(ours.model, field)
    assert mismatch.startswith(f"model.{field}: engine 'p' has {own}{said}, ")
    assert f"engine 'd' has {value}{said}; " in mismatch
    assert len(mismatch.rpartition("; ")[2]) > 10, "no remedy"
    assert len(compare(theirs, ours)) == 1


def test_a_dtype_that_holds_every_value_of_the_sources_is_no_mismatch(describe, fingerprint):
    narrow = describe("p", dtype="bfloat16", model=fingerprint(dtype="bfloat16"))
    wide = describe("d")
    assert compare(narrow, wide) == []
    mismatches = compare(wide, narrow)
    assert len(mismatches) == 2  # of the model, and of the layers
    for mismatch in mismatches:
        assert "float32" in mismatch
        assert "bfloat16" in mismatch
    assert "convert_dtype" in mismatches[0]


def test_a_target_that_says_so_reads_a_dtype_that_it_rounds(describe, fingerprint):
    wide = describe("p")
    narrow = describe("d", dtype="bfloat16", model=fingerprint(dtype="bfloat16"))
    assert compare(wide, replace(narrow, convert_dtype=True)) == []
    assert compare(replace(wide, convert_dtype=True), narrow) != [], "the source has no say"
    other = describe("d", dtype="int32", model=fingerprint(dtype="int32"))
    refused = compare(wide, replace(other, convert_dtype=True))
    assert len(refused) == 2, "integers are no cells"
    assert not any("convert" in mismatch for mismatch in refused), "no key would help"


def test_two_checkpoints_of_one_shape_are_a_mismatch(describe, fingerprint):
    theirs = describe("d", model=fingerprint(weights_digest="w1"))
    (mismatch,) = compare(describe("p"), theirs)
    assert "load the same checkpoint" in mismatch


def test_every_mismatch_is_listed_not_only_the_first(describe, fingerprint):
    theirs = describe(
        "p",
        model=fingerprint(rope="x", weights_digest="w1"),
        head_size=16,
        dtype="float16",
        transports=("rdma",),
        protocol_min=5,
        protocol_max=9,
    )
    mismatches = compare(describe("p"), theirs)
    assert [mismatch.partition(":")[0] for mismatch in mismatches] == [
        "engine_id",
        "protocol",
        "model.rope",
        "model.weights_digest",
        "head_size of layers 0-5",
        "head_size_v of layers 0-5",
        "dtype of layers 0-5",
        "transports",
    ]


def test_engines_of_one_name_are_a_mismatch(describe):
    (mismatch,) = compare(describe("p", "one"), describe("p", "two"))
    assert "both engines are named 'p'" in mismatch


def test_an_engine_that_reaches_itself_is_told_what_is_wrong_with_the_address(describe):
    (mismatch,) = compare(describe("p", "one"), describe("p", "one"))
    assert "engine 'p' is talking to itself" in mismatch
    assert "set host of the other engine" in mismatch


@pytest.mark.parametrize(
    ("theirs", "fits"),
    [((1, 1), False), ((1, 2), True), ((2, 3), True), ((4, 9), True), ((5, 9), False)],
)
def test_protocol_ranges_fit_if_they_share_a_version(describe, theirs, fits):
    ours = describe("p", protocol_min=2, protocol_max=4)
    mismatches = compare(ours, describe("d", protocol_min=theirs[0], protocol_max=theirs[1]))
    assert (mismatches == []) == fits
    if not fits:
        assert f"versions 2 to 4, engine 'd' has versions {theirs[0]} to" in mismatches[0]


def test_one_shared_transport_is_enough_but_every_rank_must_serve_it(describe):
    ours = describe("p", transports=("shm", "tcp"))
    assert compare(ours, describe("d", transports=("tcp", "rdma"))) == []
    (mismatch,) = compare(ours, describe("d", transports=("rdma",)))
    assert "transports: engine 'p' has shm, tcp, engine 'd' has rdma" in mismatch
    uneven = describe("d", tp=2)
    uneven = change(uneven, ["ranks", 1, "endpoints"], {"rdma": b""})
    (mismatch,) = compare(ours, uneven)
    assert "none on every rank" in mismatch


def test_layers_that_the_groups_do_not_cover_are_a_mismatch(describe):
    (mismatch,) = compare(describe("p", num_layers=6), describe("d", num_layers=8))
    assert mismatch == (
        "layers: engine 'p' has 0-5, engine 'd' has 0-7; let the groups of both cover the same "
        "layers"
    )


@LAW
@given(ours=grouped_engines(), theirs=grouped_engines())
def test_groups_mismatch_exactly_where_the_planner_would_refuse(describe, ours, theirs):
    one, two = (
        replace(describe(name), groups=tagged_groups(groups))
        for name, groups in (("p", ours), ("d", theirs))
    )
    mismatches = compare(one, two)
    assert len(mismatches) == len(compare(two, one))
    try:
        pair_groups(ours, theirs)
    except ValueError:
        assert mismatches
    else:
        assert not mismatches


def test_engines_may_group_their_layers_differently_and_keep_more_or_less(hybrid):
    whole = hybrid("p", [{}])
    windows = {"layer_indices": (0, 2, 4), "sliding_window": 20}
    rest = {"layer_indices": (1, 3, 5)}
    for theirs in (
        hybrid("d", [windows, rest]),
        hybrid("d", [rest, windows | {"block_size": 24}], tp=2),
        hybrid("d", [{"layer_indices": (layer,)} for layer in range(6)]),
    ):
        assert compare(whole, theirs) == compare(theirs, whole) == []


def test_what_both_keep_by_different_windows_is_a_mismatch_that_names_the_layers(hybrid):
    windows = {"layer_indices": (0, 1, 4), "sliding_window": 20}
    rest = {"layer_indices": (2, 3, 5)}
    (mismatch,) = compare(
        hybrid("p", [windows, rest]), hybrid("d", [windows | {"sliding_window": 21}, rest])
    )
    assert mismatch == (
        "kept tokens of layers 0-1, 4: engine 'p' has sliding_window 20, engine 'd' has "
        "sliding_window 21; serve the same model on both"
    )
    chunks = {"layer_indices": (0, 1, 4), "attention_chunk_size": 20}
    (mismatch,) = compare(hybrid("p", [windows, rest]), hybrid("d", [rest, chunks]))
    assert "has sliding_window 20, engine 'd' has attention_chunk_size 20" in mismatch


def test_a_difference_is_said_once_however_many_groups_have_it(hybrid):
    each = [{"layer_indices": (layer,)} for layer in range(6)]
    theirs = hybrid("d", [group | {"dtype": "bfloat16"} for group in each])
    (mismatch,) = compare(hybrid("p", each), theirs)
    assert mismatch.startswith("dtype of layers 0-5: engine 'p' has float32, engine 'd' has bfl")


def test_what_a_peer_writes_at_length_is_cut_short_in_messages(describe, fingerprint):
    (mismatch,) = compare(describe("p"), describe("d", model=fingerprint(rope="x" * 100_000)))
    assert len(mismatch) < 1000
    description = describe("e")
    with pytest.raises(ProtocolError) as raised:
        receive(sent(description, (["groups", 0, "layout", "order"], "X" * 100_000)))
    assert len(str(raised.value)) < 2000


def test_every_scale_has_a_tensor_that_stays_inside_its_region(describe):
    one = describe("p0", dtype="float8_e4m3fn", scale_dtype="float32")
    validate(one)
    memory = one.ranks[0].memory[0]
    *tensors, last = memory.tensors
    assert last.name == "layer.5.v_scale"
    far = replace(last, offset=1)
    for changed, says in (
        (tensors, "missing: layer.5.v_scale"),
        ([*tensors, far], r"layer\.5\.v_scale: part v_scale: spans bytes"),
    ):
        bad = replace(memory, tensors=tuple(changed))
        rank = replace(one.ranks[0], memory=(bad,))
        with pytest.raises(ProtocolError, match=says):
            validate(replace(one, ranks=(rank, *one.ranks[1:])))


@pytest.mark.parametrize("field", ["engine_id", "incarnation", "model"])
def test_names_that_would_write_on_a_terminal_are_refused(describe, fingerprint, field):
    said = "decode-0\x1b[2J\n| forged | ready |"
    names = {"engine_id": "d", "incarnation": "one", "model": fingerprint()}
    names |= {field: fingerprint(name=said) if field == "model" else said}
    with pytest.raises(ProtocolError, match="characters that do not print") as refused:
        validate(describe(**names))
    assert str(refused.value).isprintable()


# ---- KV heads, by their weights ----------------------------------------------------------------


def with_heads(description, told):
    """A description whose ranks tell of their heads: rank → layer → what is told."""
    ranks = tuple(
        replace(rank, heads=HeadDigests.of(told(rank.rank))) for rank in description.ranks
    )
    return replace(description, ranks=ranks)


def one_head_per_rank(heads):
    """What the ranks of three heads with TP 3 tell of six layers: the heads in this order."""
    return lambda rank: dict.fromkeys(range(6), ("bfloat16", f"-head {heads[rank]}-".encode()))


def all_heads(rank):
    return dict.fromkeys(range(6), ("bfloat16", b"-head 0--head 1--head 2-"))


def test_heads_with_equal_weights_fit(describe):
    source = with_heads(describe("p", tp=3), one_head_per_rank([0, 1, 2]))
    target = with_heads(describe("d"), all_heads)
    for description in (source, target):
        validate(description)
    assert compare(source, target) == compare(target, source) == []
    assert unproved_heads(source, target) == []


def test_heads_with_other_weights_are_refused_with_both_ranks_and_the_layers(describe):
    source = with_heads(describe("p", tp=3), one_head_per_rank([0, 2, 1]))
    target = with_heads(describe("d"), all_heads)
    assert [message.partition(",")[0] for message in compare(source, target)] == [
        "KV heads: rank 1 of engine 'p' and rank 0 of engine 'd' both have a head 1 in layers 0-5",
        "KV heads: rank 2 of engine 'p' and rank 0 of engine 'd' both have a head 2 in layers 0-5",
    ]


def test_many_pairs_with_wrong_heads_are_counted_and_not_all_named(describe):
    source = with_heads(describe("p", tp=3), one_head_per_rank([1, 2, 0]))
    wrong = lambda rank: dict.fromkeys(range(6), ("bfloat16", b"-other -"))  # noqa: E731
    target = with_heads(describe("d", tp=12), wrong)
    messages = compare(source, target)
    assert len(messages) == 9
    assert messages[-1] == "KV heads: 4 more pairs of ranks differ in this way"


def test_heads_that_nobody_proved_are_named_with_the_reason(describe):
    source = describe("p", tp=3)
    target = with_heads(describe("d"), all_heads)
    assert compare(source, target) == []
    (message,) = unproved_heads(source, target)
    assert message == (
        "KV heads of 3 pairs of ranks between engines 'p' and 'd' are not proved by their weights "
        "(ranks 0 and 0, for one): an engine, or a release, that digests no weights"
    )


def test_digests_of_layers_that_a_rank_does_not_hold_are_refused(describe):
    told = with_heads(describe("p"), lambda rank: {7: ("bfloat16", b"x" * 8)})
    with pytest.raises(ProtocolError, match="rank 0: heads: layers 7 are told of, the rank holds"):
        validate(told)
