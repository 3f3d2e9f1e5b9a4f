"""Layers whose KV heads differ or share a cache, and digests of the weights behind each head."""

import hashlib
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

import torch
from safetensors.torch import load_file

from benchmarks.vllm_servers.checkpoints import write_gemma4
from kvferry.integrations.vllm import compat, heads
from kvferry.integrations.vllm.compat import release
from kvferry.integrations.vllm.compat.projections import kv_weights, qkv_projections
from kvferry.topology.description import RankDescription
from kvferry.topology.heads import HeadDigests, split_digests
from tests.integrations.vllm.conftest import assert_all_arrived, tokens

HEAD = 32
"""Elements of a head of the tiny Llama."""
LENGTHS = (5, 99, 101, 164, 229, 400, 900)


def told(engine):
    """Layer → what the engine's only rank tells of its heads."""
    handshake = engine.worker.get_handshake_metadata().handshake
    heads = msgspec.msgpack.decode(handshake, type=RankDescription).heads
    assert heads is not None
    return heads.told()


def digests_of_checkpoint(model, layer, dtype=torch.float32):
    """The digests of a layer's heads, made anew from the files of a Llama."""
    tensors = load_file(model / "model.safetensors")
    prefix = f"model.layers.{layer}.self_attn."
    k, v = (tensors[f"{prefix}{name}_proj.weight"].to(dtype) for name in "kv")
    width = k.shape[1]
    columns = [width * index // 8 for index in range(8)]
    form = torch.float16 if dtype == torch.float16 else torch.bfloat16
    found = []
    for rows in range(0, len(k), HEAD):
        digest = hashlib.blake2b(digest_size=8)
        for part in (k, v):
            values = part[rows : rows + HEAD, columns].to(form) + 0
            digest.update(values.contiguous().view(torch.int16).numpy().tobytes())
        found.append(digest.digest())
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_rank_digests_the_heads_of_the_checkpoint(start, make_model, dtype):
    # With biases, which are no part of a row.
    model = make_model(attention_bias=True)
    engine = start("kv_producer", model, dtype=dtype)
    for layer in range(3):
        form, digests = told(engine)[layer]
        assert form == ("float16" if dtype == "float16" else "bfloat16")
        expected = digests_of_checkpoint(model, layer, getattr(torch, dtype))
        assert split_digests(digests) == expected
        assert len(set(expected)) == 4


def test_weights_in_a_parameter_and_in_a_kernel_have_equal_digests(start, tiny_llama, monkeypatch):
    engine = start("kv_producer", tiny_llama)
    (projection, attention) = projection_and_layer(engine)
    asked = kv_weights(projection, attention)
    width, rows = projection.input_size, projection.output_size_per_partition
    weight = projection.quant_method.apply(projection, torch.eye(width), None).t().contiguous()
    plain = SimpleNamespace(
        **{name: getattr(projection, name) for name in ("num_heads", "num_kv_heads", "head_size")},
        v_head_size=projection.v_head_size,
        quant_method=projection.quant_method,
        input_size=width,
        weight=torch.nn.Parameter(weight),
    )
    assert weight.shape == (rows, width)
    for one, two in zip(asked, kv_weights(plain, attention), strict=True):
        assert isinstance(one, torch.Tensor)
        assert isinstance(two, torch.Tensor)
        assert torch.equal(one, two)


def projection_and_layer(engine):
    """The QKV projection of the first layer, and its attention layer."""
    found = []

    def look(worker):
        config, name = worker.vllm_config, "model.layers.0.self_attn.attn"
        projections = qkv_projections(config, compat.models_of(worker).values(), [name])
        found.append((projections[name], compat.attention_layer(config, name)))

    engine.llm.collective_rpc(look)
    return found[0]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"quant_method": object()}, "weights are quantised (object)"),
        ({"weight": torch.empty(0, device="meta")}, "weights are being replaced"),
    ],
)
def test_weights_that_cannot_be_read_say_why(start, tiny_llama, change, reason):
    projection, attention = projection_and_layer(start("kv_producer", tiny_llama))
    values = {name: getattr(projection, name) for name in ("quant_method", "weight")}
    assert kv_weights(SimpleNamespace(**values | change), attention) == reason


def test_dummy_weights_are_exempt(start, tiny_llama):
    engine = start("kv_producer", tiny_llama, load_format="dummy")
    assert set(told(engine).values()) == {("weights are dummies, and each rank drew its own", b"")}


def test_adapters_leave_the_digests_of_the_base_weights(start, tiny_llama):
    engine = start("kv_producer", tiny_llama, enable_lora=True, max_lora_rank=8)
    for layer in range(3):
        found = split_digests(told(engine)[layer][1])
        assert found == digests_of_checkpoint(tiny_llama, layer)


class PackedProjection:
    """A projection of GPTQ's or AWQ's: it has no parameter of the name ``weight``."""

    quant_method = object()


def test_a_projection_without_plain_weights_says_why(start, tiny_llama):
    assert kv_weights(PackedProjection(), None) == "weights are quantised (object)"


def test_a_kernel_that_cannot_be_asked_is_a_reason_and_no_end(start, tiny_llama, monkeypatch):
    projection, attention = projection_and_layer(start("kv_producer", tiny_llama))

    method: Any = type(projection.quant_method)

    class Refuses(method):
        def apply(self, *_):
            raise RuntimeError("this platform has no such kernel")

    monkeypatch.setattr(projection, "quant_method", Refuses())
    found = heads._digest(projection, attention, 4)
    assert found == ("weights could not be digested (RuntimeError)", b"")


def test_with_config_alone_nothing_is_digested_since_nobody_looks_again(start, tiny_llama):
    engine = start("kv_producer", tiny_llama, extra={"weights_check": "config"})
    assert set(told(engine).values()) == {("weights_check is config", b"")}


@pytest.fixture
def projection_class(monkeypatch):
    from vllm.model_executor.layers import linear

    class Projection(torch.nn.Module):
        """In the place of vLLM's, which needs parallel groups."""

    monkeypatch.setattr(linear, "QKVParallelLinear", Projection)
    return Projection


def module(**children):
    made = torch.nn.Module()
    for name, child in children.items():
        made.add_module(name, child)
    return made


def found_in(model, context, names):
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=context))
    return qkv_projections(config, [model], names)


def test_a_projection_is_found_beside_around_and_inside_its_attention_layer(projection_class):
    layers = {name: torch.nn.Identity() for name in ("own", "one", "other", "torn", "bare")}
    made = {name: projection_class() for name in ("own", "shared", "inside")}
    layers["inside"] = module(qkv_proj=made["inside"])
    adapter = module()
    adapter.base_layer = made["own"]
    model = module(
        tower=module(qkv=projection_class()),
        first=module(qkv=adapter, attn=layers["own"]),
        loops=module(qkv=made["shared"], a=layers["one"], b=module(attn=layers["other"])),
        torn=module(q=projection_class(), k=projection_class(), attn=layers["torn"]),
        bare=module(attn=layers["bare"]),
        sparse=module(attn=layers["inside"]),
    )
    assert found_in(model, layers, layers) == {
        "own": made["own"],
        "one": made["shared"],
        "other": made["shared"],
        "inside": made["inside"],
    }


def test_what_else_vllm_keeps_beside_attention_layers_does_not_hide_a_projection(projection_class):
    # As in a layer of Jamba: experts are in vLLM's context too.
    attention, experts, own = torch.nn.Identity(), torch.nn.Identity(), projection_class()
    model = module(layer=module(qkv_proj=own, attn=attention, feed_forward=module(experts=experts)))
    context = {"attn": attention, "experts": experts}
    assert found_in(model, context, ["attn"]) == {"attn": own}


# ---- layers whose heads differ, and layers that share a cache ------------------------------------


@pytest.fixture(scope="session")
def make_gemma4(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gemma4")

    def make(**settings):
        name = "-".join(f"{key}{value}" for key, value in settings.items()) or "plain"
        return write_gemma4(folder / name, **settings)

    return make


def start_alone(start, model, **settings):
    """A lone engine, without our connector."""
    try:
        return start(None, model, **settings)
    except KeyError as error:
        if release.lacks:
            pytest.skip(f"this release of vLLM does not start the model by itself: {error}")
        raise


@pytest.mark.parametrize("settings", [{}, {"full_heads": 1}, {"shared": 2}], ids=str)
def test_tokens_are_those_of_a_single_engine(
    start, start_pair, make_gemma4, decodes_windows, random_prompt, settings
):
    model = make_gemma4(**settings)
    prompts = [random_prompt(length) for length in LENGTHS]
    expected = tokens(start_alone(start, model).generate(prompts))
    start_alone(start, model, **{key[2:]: value for key, value in decodes_windows.items()})
    prefill, decode = start_pair(p_model=model, d_model=model, **decodes_windows)
    params = prefill.prefill(prompts)
    assert tokens(decode.generate(prompts, params)) == expected
    external = decode.prompt_tokens_from("external_kv_transfer")
    assert external == sum(LENGTHS) - len(LENGTHS)
    assert all(digests for _, digests in told(decode).values())


def test_a_cache_that_layers_share_is_described_and_moved_once(
    start, start_pair, make_gemma4, decodes_windows, random_prompt, records
):
    model = make_gemma4(shared=2)
    start_alone(start, model, **{key[2:]: value for key, value in decodes_windows.items()})
    extra = {"record_digests": True}
    prefill, decode = start_pair(p_model=model, d_model=model, extra=extra, **decodes_windows)
    groups = decode.connector.connector_scheduler.groups
    held = sorted(layer for group in groups for layer in group.geometry.model_layers)
    assert held == [0, 1, 2, 3]  # of six layers the last two read the caches of layers 2 and 3
    assert sorted(told(decode)) == held
    sent, received = records(prefill), records(decode)
    prompt = random_prompt(50)
    decode.generate([prompt], prefill.prefill([prompt]))
    prefill.drain()
    assert_all_arrived(sent, received, 1)
    # In float32, of the 49 tokens that P lends: two layers of 4 heads of 32, two of 2 heads of 64.
    moved = sum(record.nbytes for record in received)
    assert moved == 49 * 2 * 4 * (2 * 4 * 32 + 2 * 2 * 64)


# ---- a wrong mapping ----------------------------------------------------------------------------


def test_engines_whose_heads_are_in_another_order_are_refused_by_their_digests_alone(
    start_pair, random_prompt, caplog
):
    """Only the digests can tell: shapes, config and the digest of the weights are equal."""
    prefill, decode = start_pair(policy="recompute")
    description = decode.connector.connector_scheduler.pull.description
    (rank,) = description.told.ranks
    turned = {
        layer: (form, b"".join(reversed(split_digests(digests))))
        for layer, (form, digests) in rank.heads.told().items()
    }
    rank = msgspec.structs.replace(rank, heads=HeadDigests.of(turned))
    description.tell(msgspec.structs.replace(description.told, ranks=(rank,)))
    prompt = random_prompt(100)
    decode.generate([prompt], prefill.prefill([prompt]))
    assert decode.prompt_tokens_from("external_kv_transfer") == 0
    assert "both have a head 0 in layers 0-2, but its weights differ" in caplog.text


def test_weights_that_change_in_place_are_digested_anew(
    start_pair, make_model, tiny_llama, random_prompt
):
    other = make_model(seed=99)
    prefill, decode = start_pair(policy="recompute")
    for engine in (prefill, decode):
        engine.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
    prompt = random_prompt(100)
    decode.generate([prompt], prefill.prefill([prompt]))
    loads = release.gives_cache_manager  # before 0.30 transfers end with an update
    assert decode.prompt_tokens_from("external_kv_transfer") == (99 if loads else 0)
    if loads:
        (rank,) = decode.connector.connector_scheduler.pull.description.told.ranks
        for layer, (_, digests) in rank.heads.told().items():
            assert split_digests(digests) == digests_of_checkpoint(other, layer)
