"""Requests with LoRA adapters: two servers serve them if both have the same adapter."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

import torch
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.layers.linear import QKVParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.lora.layers import BaseLayerWithLoRA
from sglang.srt.lora.lora import LoRAAdapter
from sglang.srt.lora.lora_config import LoRAConfig
from sglang.srt.lora.lora_registry import LoRARef
from sglang.srt.runtime_context import get_parallel

from kvferry.errors import ConfigError
from kvferry.integrations.sglang.caches import cache_groups
from kvferry.integrations.sglang.model import head_digests
from kvferry.integrations.sglang.requests import LoadedAdapters
from kvferry.topology import ParallelShape
from tests.integrations.sglang.conftest import request, until
from tests.integrations.sglang.test_pools import mha
from tests.integrations.sglang.test_rooms import TOKENS, Prompt, why

CONFIG = {
    "base_model_name_or_path": "here",
    "lora_alpha": 8,
    "peft_type": "LORA",
    "r": 2,
    "target_modules": ["q_proj", "v_proj"],
}
NAME = "base_model.model.model.layers.{}.self_attn.{}_proj.lora_{}.weight"
WEIGHTS = {
    NAME.format(layer, part, side): torch.arange(8.0).view(2, 4).to(torch.bfloat16) + layer
    for layer in (0, 1)
    for part in "qv"
    for side in "AB"
}


def manager(weights=WEIGHTS, modules=("qkv_proj",), name="sql", **config):
    """SGLang's manager of adapters with one adapter, and SGLang's id of it."""
    ref = LoRARef(lora_name=name, lora_path="anywhere")
    model = SimpleNamespace(num_hidden_layers=2)
    adapter = LoRAAdapter(
        ref.lora_id, LoRAConfig.from_dict(CONFIG | config), model, LoadConfig(), None
    )
    adapter.initialize_weights_from_tensors(dict(weights))
    made = SimpleNamespace(
        loras={ref.lora_id: adapter}, lora_refs={ref.lora_id: ref}, target_modules=set(modules)
    )
    return made, ref.lora_id


def key(check="sample", **more):
    made, lora_id = manager(**more)
    return LoadedAdapters(SimpleNamespace(lora_manager=made), check).key(lora_id)


@pytest.mark.parametrize("check", ["sample", "full", "config"])
def test_an_adapter_has_one_key_on_every_server(check):
    assert key(check) == key(check, base_model_name_or_path="there", modules=("qkv_proj", "o_proj"))
    assert key(check).startswith("sql ")


@pytest.mark.parametrize(
    "other",
    [
        {"lora_alpha": 16},
        {"weights": {name: each + 1 for name, each in WEIGHTS.items()}},
        {"weights": {name: each.float() for name, each in WEIGHTS.items()}},
        {"name": "other"},
    ],
    ids=["config", "weights", "dtype", "name"],
)
def test_another_adapter_has_another_key(other):
    assert key(**other) != key()


def test_without_a_check_of_weights_only_the_name_counts():
    assert key("config", lora_alpha=16) == key("config")
    assert key("config", name="other") != key("config")


def test_modules_that_the_server_chooses_count():
    """An adapter of all modules works on those of ``--lora-target-modules``."""
    whole = {"target_modules": "all-linear"}
    assert key(**whole) == key(**whole)
    assert key(**whole) != key(**whole, modules=("qkv_proj", "o_proj"))


def test_an_adapter_that_is_not_there_is_refused_by_name():
    for found in (None, manager()[0]):
        with pytest.raises(ConfigError, match="lora_id: nobody is no adapter of this server"):
            LoadedAdapters(SimpleNamespace(lora_manager=found), "sample").key("nobody")


def test_heads_are_proved_behind_the_layers_of_adapters():
    with get_parallel().override(tp_size=1, tp_rank=0, attn_tp_size=1, attn_tp_rank=0):
        projection = QKVParallelLinear(8, 4, 4, 2, bias=False, params_dtype=torch.float32)
    projection.weight.data.copy_(torch.rand(projection.weight.shape))
    groups = cache_groups(
        mha(4, layer_num=1),
        [],
        ParallelShape(),
        2,
        window=0,
        model=None,
        longest=64,
        gather=lambda layers: [layers],
    )
    found = [
        head_digests(
            torch.nn.Sequential(torch.nn.ModuleList([layer, RadixAttention(4, 4, 1.0, 2, 0)])),
            groups,
            0,
        )
        for layer in (projection, BaseLayerWithLoRA(projection, None))
    ]
    assert found[0] == found[1]
    assert "no QKV projection" not in str(found)


def prompt_of(pair, **other):
    """A prompt of a pair whose servers have an adapter each."""
    ranks = pair(8, 12)
    ids = []
    for rank, more in zip(ranks, ({}, other), strict=True):
        rank.runner.lora_manager, found = manager(**more)
        ids.append(found)
    return Prompt(ranks, mine={"lora_id": ids[0]}, lora_id=ids[1])


def test_a_request_with_the_adapter_of_both_servers_is_served(pair):
    prompt = prompt_of(pair)
    prompt.allocate()
    prompt.begin()
    prompt.send(prompt.length)
    assert prompt.settle() == (KVPoll.Success, KVPoll.Success)
    assert prompt.moved()


def test_a_request_with_another_adapter_of_that_name_is_refused(pair):
    prompt = prompt_of(pair, lora_alpha=16)
    prompt.allocate()
    prompt.begin()
    prompt.send(prompt.length)
    until(lambda: prompt.receiver.poll() == KVPoll.Failed, "the refusal")
    assert "(lora: prefill had sql " in why(prompt.receiver)


def test_a_request_with_an_adapter_that_is_gone_is_refused(pair):
    prefill, _ = pair(8, 8)
    sender = prefill.room(7, request("p", TOKENS, lora_id="gone"))
    assert sender.poll() == KVPoll.Failed
    assert "lora_id: gone is no adapter of this server" in why(sender)
