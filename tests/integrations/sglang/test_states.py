"""The states of recurrent layers: what is described of SGLang's pools, what moves, and when."""

import dataclasses
import math
from unittest.mock import Mock

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

import torch
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.layers.attention.mamba import mamba
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.runtime_context import get_parallel

from kvferry.errors import ConfigError
from kvferry.integrations.sglang.caches import cache_groups
from kvferry.integrations.sglang.model import head_digests
from kvferry.layouts import Layout
from kvferry.topology import (
    ParallelShape,
    StateGeometry,
    gated_delta_net_states,
    mamba2_states,
    plan_transfer,
    run_copies,
)
from kvferry.topology.pairing import group_mismatches
from tests.integrations.sglang import engines as engines_of
from tests.integrations.sglang import recurrent, test_ranks, test_rooms
from tests.integrations.sglang.conftest import until
from tests.integrations.sglang.engines import SLOTS as SLOT
from tests.integrations.sglang.engines import engines  # noqa: F401 (a fixture)
from tests.integrations.sglang.recurrent import GROUPS, KINDS, SLOTS, model_of, pool_of

LONGEST = 4096


@pytest.fixture(autouse=True)
def as_on_gpus(monkeypatch):
    """SGLang divides weights as on GPUs: on CPUs it adds zeros to groups that ranks share."""
    monkeypatch.setattr(mamba, "is_cpu", lambda: False)


def groups_of(kind, tp=1, pool=None, model=None):
    return cache_groups(
        pool or pool_of(kind, tp),
        ["mamba"],
        ParallelShape(tp=tp),
        12,
        window=0,
        model=model or model_of(kind, tp),
        longest=LONGEST,
        gather=lambda layers: [layers],
    )


@pytest.mark.parametrize("kind", KINDS)
def test_recurrent_layers_are_a_group_of_their_own(kind):
    attention, states = groups_of(kind)
    assert tuple(attention.geometry.model_layers) == attention.layers == recurrent.ATTENDING
    assert tuple(states.geometry.model_layers) == states.layers == recurrent.RECURRENT
    assert (attention.state, states.state) == (None, 0)
    assert states.num_blocks == SLOTS
    assert states.table([torch.tensor(7).numpy()], num_tokens=LONGEST) == [7]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 2)], ids=str)
def test_states_move_between_any_two_numbers_of_ranks(kind, ranks):
    """Byte for byte as SGLang divides the weights that make the states."""
    whole = recurrent.whole_states(kind)
    pools = [[pool_of(kind, tp) for _ in range(tp)] for tp in ranks]
    described = [
        [groups_of(kind, tp, pool)[1] for pool in side]
        for tp, side in zip(ranks, pools, strict=True)
    ]
    for rank, pool in enumerate(pools[0]):
        recurrent.write(pool.mamba_pool, 3, recurrent.shard_of(kind, whole, ranks[0], rank))
    for rank, target in enumerate(described[1]):
        source = described[0][0].geometry
        plan = plan_transfer(source=source, target=target.geometry, target_rank=rank)
        sources = {each: dict(described[0][each].tensors) for each in plan.source_ranks}
        copies = plan.bind([3], [5], 50, first_token=49)
        run_copies(copies, sources=sources, target=dict(target.tensors))
    for rank, pool in enumerate(pools[1]):
        found, others = pool.mamba_pool, [slot for slot in range(SLOTS) if slot != 5]
        right = recurrent.shard_of(kind, whole, ranks[1], rank)
        assert recurrent.equal(recurrent.read(found, 5), right)
        assert not any(each.any() for each in recurrent.read(found, others))


STAGES: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = {
    1: [(recurrent.ATTENDING, recurrent.RECURRENT)],
    2: [((1,), (0,)), ((4,), (2, 3))],
    3: [((1,), (0, 2)), ((4,), ()), ((), (3,))],
}
"""Number of pipeline stages → layers of each stage that attend, and its recurrent layers."""


def stage_groups(kind, number):
    """Pools and groups of each pipeline stage."""
    sorts = [[list(stage[sort]) for stage in STAGES[number]] for sort in (0, 1)]
    for layers in STAGES[number]:
        pool = pool_of(kind, attending=layers[0], recurrent=layers[1])
        yield (
            pool,
            cache_groups(
                pool,
                ["mamba"],
                ParallelShape(pp=number),
                12,
                window=0,
                model=model_of(kind, 1),
                longest=LONGEST,
                gather=Mock(side_effect=sorts),  # of the layers that attend, then of the others
            ),
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("numbers", [(1, 2), (2, 1), (2, 3), (3, 2), (3, 1)], ids=str)
def test_states_and_cells_move_between_any_two_numbers_of_stages(kind, numbers):
    whole = recurrent.whole_states(kind)
    source, target = (list(stage_groups(kind, number)) for number in numbers)
    for (pool, groups), (_, layers) in zip(source, STAGES[numbers[0]], strict=True):
        own = [recurrent.RECURRENT.index(layer) for layer in layers]
        if own:
            states = tuple(each[own] for each in whole)
            recurrent.write(pool.mamba_pool, 3, recurrent.shard_of(kind, states, 1, 0))
        for layer, buffer in zip(groups[0].layers, pool.full_kv_pool.k_buffer, strict=True):
            buffer.fill_(layer)
    for number, last in ((0, 0), (1, 49)):
        for rank, (_, groups) in enumerate(target):
            geometry = groups[number].geometry
            if not geometry.layers(rank):
                continue
            plan = plan_transfer(
                source=source[0][1][number].geometry, target=geometry, target_rank=rank
            )
            copies = plan.bind([3], [5], 4 if number == 0 else 50, first_token=last)
            run_copies(
                copies,
                sources={each: dict(source[each][1][number].tensors) for each in plan.source_ranks},
                target=dict(groups[number].tensors),
            )
    for (pool, groups), (_, layers) in zip(target, STAGES[numbers[1]], strict=True):
        own = [recurrent.RECURRENT.index(layer) for layer in layers]
        if own:
            right = recurrent.shard_of(kind, tuple(each[own] for each in whole), 1, 0)
            assert recurrent.equal(recurrent.read(pool.mamba_pool, 5), right)
        for layer, buffer in zip(groups[0].layers, pool.full_kv_pool.k_buffer, strict=True):
            assert (buffer[20:24] == layer).all()
            assert not buffer[:20].any()


@pytest.mark.parametrize("shapes", ["1 to 2", "2 to 1"])
@pytest.mark.parametrize("kind", [*GROUPS, "gdn"])
def test_prompts_move_with_their_states(engines, kind, shapes):  # noqa: F811
    prompt = engines_of.Prompt(*engines(*test_ranks.SHAPES[shapes], kind=kind, heads=12))
    whole = recurrent.whole_states(kind)
    prompt.begin()
    for rank, each in enumerate(prompt.prefill.ranks):
        states = recurrent.shard_of(kind, whole, len(prompt.senders), rank)
        recurrent.write(each.pool.mamba_pool, SLOT[0], states)
    prompt.send(16)
    prompt.until_read()
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.has_moved()
    for rank, each in enumerate(prompt.decode.ranks):
        right = recurrent.shard_of(kind, whole, len(prompt.receivers), rank)
        assert recurrent.equal(recurrent.read(each.pool.mamba_pool, SLOT[1]), right)
    prompt.clear()
    assert engines_of.open_leases(prompt.prefill) == 0


def states(rank, slot):
    return recurrent.read(rank.pool.mamba_pool, slot)


def filled(prompt, value):
    """The prefill server has computed a part of a prompt: its slot has other states again."""
    for each in states(prompt.prefill, test_rooms.SLOTS[0]):
        each.fill_(value)


def test_a_state_moves_once_the_prompt_is_whole(pair):
    """The slot holds the state after the last chunk; the states between chunks are of no use."""
    prompt = test_rooms.Prompt(pair(8, 12, kind="gdn", heads=12))
    ours = states(prompt.decode, test_rooms.SLOTS[1])
    prompt.allocate()
    prompt.begin()
    for end in (16, 40):
        filled(prompt, end)
        prompt.send(end)
        until(lambda: prompt.receiver.poll() == KVPoll.Transferring, "the read to begin")
        assert not any(each.any() for each in ours)
    filled(prompt, 50)
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.moved()
    assert all((each == 50).all() for each in ours)


@pytest.mark.parametrize("prefix", [24, 48])
def test_a_state_moves_whatever_a_prefix_cache_holds(pair, prefix):
    """A decode server with all tokens of a prompt has no state after the last of them."""
    prompt = test_rooms.Prompt(pair(8, 8, kind="mamba2", heads=12), tokens=list(range(48)))
    before = [each.clone() for each in prompt.decode.cells(prompt.pages[1])]
    prompt.allocate(prefix=prefix)
    prompt.begin()
    filled(prompt, 3)
    prompt.send(48)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert all((each == 3).all() for each in states(prompt.decode, test_rooms.SLOTS[1]))
    after, source = prompt.decode.cells(prompt.pages[1]), prompt.prefill.cells(prompt.pages[0])
    for old, new, right in zip(before, after, source, strict=True):
        assert torch.equal(new[:prefix], old[:prefix])
        assert torch.equal(new[prefix:], right[prefix:])


def test_an_abort_while_a_prompt_is_computed_brings_no_state(pair):
    prompt = test_rooms.Prompt(pair(8, 12, kind="mamba2", heads=12))
    prompt.allocate()
    prompt.begin()
    prompt.send(16)
    until(lambda: prompt.receiver.poll() == KVPoll.Transferring, "the read to begin")
    prompt.sender.abort()
    filled(prompt, 9)  # SGLang gives the slot to another request
    until(lambda: prompt.receiver.poll() == KVPoll.Failed, "the load to fail")
    assert not any(each.any() for each in states(prompt.decode, test_rooms.SLOTS[1]))


def test_layers_that_attend_and_recur_count_as_two():
    """As the adapter of vLLM counts such layers (Falcon-H1)."""
    pool = pool_of("mamba2", attending=(0, 1, 2), recurrent=(0, 1, 2))
    attention, states = groups_of("mamba2", pool=pool)
    assert tuple(states.geometry.model_layers) == (0, 2, 4)
    assert tuple(attention.geometry.model_layers) == (1, 3, 5)
    assert attention.layers == states.layers == (0, 1, 2)


def test_the_heads_of_such_layers_are_proved():
    with get_parallel().override(tp_size=1, tp_rank=0, attn_tp_size=1, attn_tp_rank=0):
        projection = QKVParallelLinear(8, 8, 12, 12, bias=False, params_dtype=torch.float32)
    projection.weight.data.copy_(torch.rand(projection.weight.shape))
    model = torch.nn.ModuleList([projection, RadixAttention(12, 8, 1.0, 12, 1)])
    for recurrent_layer, number in ((1, 3), (0, 1)):
        pool = pool_of("mamba2", attending=(1,), recurrent=(recurrent_layer,))
        groups = groups_of("mamba2", pool=pool)
        assert tuple(groups[0].geometry.model_layers) == (number,)
        assert "no QKV projection" not in str(head_digests(model, groups, 0))


def test_states_of_other_dtypes_are_refused_by_name(pair):
    kinds = {"kind": "gdn", "other": f"gdn{recurrent.IN_FLOAT32}"}
    prompt = test_rooms.Prompt(pair(8, 8, **kinds, heads=12))
    prompt.allocate()
    until(lambda: prompt.receiver.poll() == KVPoll.Failed, "the refusal")
    text = test_rooms.why(prompt.receiver)
    assert "recurrent_state of layers 0, 2-3: " in text
    for dtype in ("bfloat16", "float32"):
        assert f"conv {dtype} (q 36*1, k 36*1, v 12*4) of 3; delta_kv float32" in text
    assert "with the same dtypes of states, on the same kind of device" in text


@pytest.mark.parametrize("kind", ["gdn", "mamba2"])
def test_states_of_vllm_are_the_same_cells(kind):
    """As the adapter of vLLM describes them: both states in a padded page, inputs before channels.

    On CPUs, both engines keep the matrices of a gated delta net in the same order.
    """
    if kind == "gdn":
        theirs = gated_delta_net_states(
            num_heads=12,
            head_size=4,
            key_head_size=6,
            key_size=36,
            conv_kernel=4,
            dtype="bfloat16",
            delta_dtype="float32",
            order="kv",
        )
    else:
        theirs = mamba2_states(
            num_heads=12,
            head_size=4,
            state_size=6,
            num_groups=6,
            conv_kernel=4,
            dtype="bfloat16",
            ssm_dtype="float32",
        )
    source = StateGeometry(
        num_layers=3,
        layer_indices=recurrent.RECURRENT,
        states=theirs,
        block_size=32,
        layout=Layout.parse(f"B(conv=DH,{theirs[1].name}=HD)"),
        parallel=ParallelShape(),
        page_size_padded=4096,
    )
    pool = pool_of(kind)
    _, target = groups_of(kind, pool=pool)
    assert group_mismatches([source], [target.geometry]) == []
    whole = recurrent.whole_states(kind)
    pages = {}
    for number, layer in enumerate(recurrent.RECURRENT):
        raw = torch.zeros(6, 4096, dtype=torch.uint8)
        start = 0
        for part, states in zip(theirs, (whole[0].transpose(1, 2), whole[1]), strict=True):
            dtype = getattr(torch, part.dtype)
            shape = source.cache_shape(0, 6, part.name)
            stop = start + math.prod(shape[1:]) * dtype.itemsize
            view = raw[:, start:stop].view(dtype).view(shape)
            view[4] = states[number].reshape(shape[1:])
            pages[f"layer.{layer}.{part.name}"] = view
            start = stop
    plan = plan_transfer(source=source, target=target.geometry, target_rank=0)
    copies = plan.bind([0, 4], [5], 50, first_token=49)
    run_copies(copies, sources={0: pages}, target=dict(target.tensors))
    assert recurrent.equal(recurrent.read(pool.mamba_pool, 5), whole)


def has_conv(pool, *convs):
    pool.mamba_cache = dataclasses.replace(pool.mamba_cache, conv=list(convs))


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("gdn", lambda pool: pool.register_slot_state(object()), "states of other kinds"),
        ("gdn", lambda pool: setattr(pool, "enable_linear_replayssm", True), "rings of inputs"),
        ("mamba2", lambda pool: has_conv(pool), r"the shapes \[\(12, 4, 6\)\]"),
        (
            "mamba2",
            lambda pool: has_conv(pool, torch.zeros(3, 9, 0, 3)),
            r"\[\(0, 3\), \(12, 4, 6\)\]",
        ),
        (
            "mamba2",
            lambda pool: has_conv(pool, torch.zeros(3, 9, 99, 3)),
            r"conv has the shape \(99, 3\)",
        ),
        (
            "gdn",
            lambda pool: setattr(pool, "conv_shard_groups", [36, 40, 48]),
            "says how TP divides",
        ),
        ("gdn", lambda pool: setattr(pool, "conv_shard_groups", None), "says how TP divides"),
    ],
)
def test_other_states_are_refused_by_name(kind, change, message):
    pool = pool_of(kind)
    change(pool.mamba_pool)
    with pytest.raises(ConfigError, match=f"states of recurrent layers: .*{message}"):
        groups_of(kind, pool=pool)


def test_states_of_drafts_are_refused_by_name():
    pool = pool_of("gdn", speculative_num_draft_tokens=3)
    with pytest.raises(ConfigError, match="states of drafts beside them; leave --speculative"):
        groups_of("gdn", pool=pool)


def test_mamba2_without_its_mixers_is_refused_by_name():
    with pytest.raises(ConfigError, match="neither SGLang's pool nor the Module says how TP"):
        groups_of("mamba2", model=torch.nn.Module())


def test_a_model_of_recurrent_layers_alone_is_refused():
    with pytest.raises(ConfigError, match="every layer is recurrent"):
        groups_of("mamba2", pool=pool_of("mamba2", attending=()))
