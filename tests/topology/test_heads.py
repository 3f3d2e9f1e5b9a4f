"""Digests of KV heads: equal wherever one head is held, and a wrong mapping is found by them."""

import dataclasses

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology import geometry as geometry_module
from kvferry.topology.heads import (
    DIGEST_BYTES,
    LATENT,
    HeadDigests,
    alike_heads,
    compare_heads,
    digest_heads,
    form_of,
    probed_columns,
    split_digests,
)
from kvferry.topology.sharding import split_heads

LAW = settings(max_examples=200, deadline=None)
WIDTH = 96


def geometry(heads, tp, *, layers=(0, 1), pp=1, **changes):
    return EngineGeometry(
        num_layers=len(layers),
        layer_indices=layers,
        layer_split=None if pp == 1 else [len(layers) - pp + 1, *[1] * (pp - 1)],
        num_kv_heads=heads,
        head_size=4,
        dtype="float32",
        block_size=16,
        layout="NHD",
        parallel=ParallelShape(tp=tp, pp=pp),
        **changes,
    )


def true_heads(rank, tp, heads):
    """The heads whose weights a TP rank loads: what vLLM's QKV projection does, spelt out."""
    if tp >= heads:
        return [rank * heads // tp]
    return list(range(rank * heads // tp, (rank + 1) * heads // tp))


def weights(layer, head):
    """Rows of K and V of one head: [head size, columns]."""
    rng = np.random.default_rng([layer, head])
    return rng.standard_normal((2, 4, WIDTH)).astype(np.float32)[..., probed_columns(WIDTH)]


def digest(rows, form="bfloat16"):
    """Of the heads of a layer, whose rows are [K and V, head, head size, columns]."""
    k, v = rows
    return digest_heads(k, v, form)[1]


def digests_of(group, true_count, form="bfloat16"):
    """What every rank of an engine tells, from the weights that it really holds."""
    told = []
    for rank in range(group.world_size):
        at = group.rank_coordinates(rank)
        heads = true_heads(at.tp, group.parallel.tp, true_count)
        rows = {layer: [weights(layer, head) for head in heads] for layer in group.layers(rank)}
        told.append(
            HeadDigests.of(
                {
                    layer: (form, digest(np.stack(each, axis=1), form))
                    for layer, each in rows.items()
                }
            )
        )
    return told


@given(st.data())
@LAW
def test_every_pair_of_shapes_of_one_model_agrees_and_is_proved(data):
    heads = data.draw(st.integers(1, 8))
    layers = tuple(sorted(data.draw(st.sets(st.integers(0, 9), min_size=3, max_size=5))))
    groups = [
        geometry(
            heads, data.draw(st.integers(1, 12)), layers=layers, pp=data.draw(st.integers(1, 3))
        )
        for _ in range(2)
    ]
    told = [digests_of(group, heads) for group in groups]
    for group, ranks in zip(groups, told, strict=True):
        for rank, each in enumerate(ranks):
            each.check([group], rank)
    found = compare_heads(groups[:1], told[0], groups[1:], told[1])
    assert not found.wrong
    assert not found.unproved


@pytest.mark.parametrize(
    ("claimed", "true", "tps"),
    [
        pytest.param(1, 2, (2, 4), id="one full and two windowed heads"),
        pytest.param(4, 8, (8, 16), id="MiMo-V2-Flash"),
    ],
)
def test_a_wrong_number_of_heads_on_both_sides_is_found(claimed, true, tps):
    source, target = (geometry(claimed, tp) for tp in tps)
    told = digests_of(source, true), digests_of(target, true)
    assert compare_heads([source], told[0], [target], told[1]).wrong


@pytest.mark.parametrize("tps", [(2, 4), (4, 2), (4, 8), (1, 4)])
def test_a_planner_that_takes_the_wrong_rank_is_found(monkeypatch, tps):
    source, target = geometry(4, tps[0]), geometry(4, tps[1])
    told = digests_of(source, 4), digests_of(target, 4)
    right = split_heads

    def shifted(heads, tp, num_kv_heads):
        for some, ranks in right(heads, tp, num_kv_heads):
            first = (ranks.start + 1) % tp
            yield some, range(first, first + 1)

    monkeypatch.setattr(geometry_module, "split_heads", shifted)
    found = compare_heads([source], told[0], [target], told[1])
    assert bool(found.wrong) == (tps[0] > 1)  # one rank cannot be taken for another


def test_a_wrong_head_is_named_with_both_ranks_and_all_its_layers():
    source, target = geometry(2, 2), geometry(2, 2)
    told = digests_of(source, 2), digests_of(target, 2)
    swapped = told[1][::-1]
    assert compare_heads([source], told[0], [target], swapped).wrong == {
        (0, 0): {0: (0, 1)},
        (1, 1): {1: (0, 1)},
    }


def test_one_checkpoint_in_float32_and_in_bfloat16_has_equal_digests():
    rounded = (weights(0, 0).view(np.uint32) & 0xFFFF0000).view(np.float32)  # a bfloat16 checkpoint
    wide = weights(0, 0)
    assert form_of("float32") == form_of("bfloat16")
    assert digest(rounded[:, None]) != digest(wide[:, None])
    # What an engine in bfloat16 makes of a checkpoint in float32: nearest, ties to even.
    low = wide.view(np.uint32)
    nearest = ((low + 0x7FFF + ((low >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    assert digest(nearest[:, None]) == digest(wide[:, None])


def test_minus_zero_is_zero_as_an_answer_of_a_kernel_makes_it():
    minus = np.full((1, 4, 8), -0.0, np.float32)
    for form in ("bfloat16", "float16"):
        assert digest_heads(minus, minus, form) == digest_heads(-minus, -minus, form)


def test_other_forms_and_layers_without_digests_are_unproved_and_say_why():
    source, target = geometry(2, 1), geometry(2, 2)
    ours = digests_of(source, 2)
    other = digests_of(target, 2, form="float16")
    quantised = [HeadDigests.of(dict.fromkeys((0, 1), ("fp8", b""))) for _ in range(2)]
    for theirs, reason in (
        (other, "digests of weights in bfloat16 and in float16 cannot be compared"),
        (quantised, "fp8"),
        ([None, None], "an engine, or a release, that digests no weights"),
    ):
        found = compare_heads([source], ours, [target], theirs)
        assert not found.wrong
        assert found.unproved == {reason: ((0, 0), (0, 1))}


def test_a_pair_is_proved_by_one_layer_that_both_digested():
    source, target = geometry(2, 1), geometry(2, 1)
    ours = digests_of(source, 2)
    theirs = [HeadDigests.of(ours[0].told() | {1: ("fp8", b"")})]
    found = compare_heads([source], ours, [target], theirs)
    assert (found.wrong, found.unproved) == ({}, {})


def test_a_layer_proves_nothing_of_layers_with_another_number_of_heads():
    full, windowed = geometry(1, 2, layers=(0,)), geometry(2, 2, layers=(1,))
    told = [
        HeadDigests.of(digests_of(full, 1)[rank].told() | {1: ("weights are quantised (X)", b"")})
        for rank in range(2)
    ]
    found = compare_heads([full, windowed], told, [full, windowed], told)
    assert not found.wrong
    assert list(found.unproved) == ["weights are quantised (X)"]
    assert (0, 0) in found.unproved["weights are quantised (X)"]


def test_an_indexer_has_nothing_to_prove_either():
    group = geometry(1, 2)  # one head, and no latent for all that the geometry says
    told = [HeadDigests.of(dict.fromkeys((0, 1), (LATENT, b""))) for _ in range(2)]
    assert not compare_heads([group], told, [group], told).unproved


def test_a_latent_has_nothing_to_prove():
    group = geometry(1, 2, use_mla=True)
    told = [HeadDigests.of(dict.fromkeys((0, 1), (LATENT, b""))) for _ in range(2)]
    for rank, each in enumerate(told):
        each.check([group], rank)
    found = compare_heads([group], told, [group], told)
    assert (found.wrong, found.unproved) == ({}, {})


def test_equal_heads_are_named_and_not_refused():
    same = weights(0, 0)[:, None].repeat(2, axis=1)
    digests = digest(same)
    told = [HeadDigests.of({0: ("bfloat16", digests), 1: ("bfloat16", digests)})]
    group = geometry(2, 1)
    assert alike_heads([group], told) == (0, 1)
    assert compare_heads([group], told, [group], told).wrong == {}
    # One of them on each of two ranks.
    apart = [HeadDigests.of({0: ("bfloat16", digests[:8]), 1: ("fp8", b"")}) for _ in range(2)]
    assert alike_heads([geometry(2, 2)], apart) == (0,)
    assert alike_heads([geometry(1, 2)], apart) == ()  # replicas
    assert alike_heads([geometry(2, 2)], [None, *apart[1:]]) == ()


def test_what_is_told_becomes_a_message_and_back():
    told = {0: ("bfloat16", b"x" * 16), 3: ("float16", b"y" * 8), 1: ("fp8", b""), 2: ("fp8", b"")}
    assert HeadDigests.of(told).told() == told
    assert split_digests(b"x" * 16) == [b"x" * DIGEST_BYTES] * 2


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({0: ("bfloat16", b"x" * 16)}, "layers 0 are told of, the rank holds 0-1"),
        (
            {0: ("bfloat16", b"x" * 16), 1: ("bfloat16", b"x" * 8)},
            "layer 1: 8 bytes of digests, expected 8 for each of its 2 heads",
        ),
        (dict.fromkeys((0, 1, 2), ("fp8", b"")), "layers 0-2 are told of, the rank holds 0-1"),
        (dict.fromkeys((0, 1), ("bell\x07", b"")), "is no text that can be printed"),
    ],
)
def test_a_rank_tells_of_each_of_its_layers_once_with_a_digest_per_head(told, message):
    with pytest.raises(ValueError, match=message):
        HeadDigests.of(told).check([geometry(2, 1)], 0)


def test_a_layer_that_is_told_of_twice_is_refused():
    one = {0: b"x" * 16, 1: b"x" * 16}
    twice = HeadDigests(digests={"bfloat16": one, "float16": {1: b"x" * 16}})
    with pytest.raises(ValueError, match="layer 1 is told of twice"):
        twice.check([geometry(2, 1)], 0)


def test_a_layer_with_digests_and_a_reason_is_refused():
    told = HeadDigests(
        digests={"bfloat16": {0: b"x" * 16, 1: b"x" * 16}}, untold={"fp8": (1,), "fp4": (1,)}
    )
    with pytest.raises(ValueError, match="layer 1 is told of twice"):
        told.check([geometry(2, 1)], 0)


@pytest.mark.parametrize(
    "told",
    [
        {"digests": {"x\n\x1b[2J forged": {0: b"x" * 8}}},
        {"digests": {}, "untold": {"long " * 100: (0,)}},
        {"digests": {}, "untold": {f"reason {number}": (number,) for number in range(17)}},
    ],
)
def test_forms_and_reasons_of_a_peer_are_bounded_by_the_schema(told):
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(told), type=HeadDigests)


def test_groups_of_recurrent_layers_and_other_stages_need_no_digests():
    groups = [geometry(2, 1, layers=(0, 1, 2), pp=2)]
    digests_of(groups[0], 2)[1].check(groups, 1)
    assert list(digests_of(groups[0], 2)[1].told()) == [2]
    assert dataclasses.replace(groups[0], sliding_window=4).layers(1) == (2,)
