"""Equal tokens, other KV: adapters, multimodal inputs and embeddings are part of a ticket."""

import json
import os
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

import torch
from safetensors.torch import save_file
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.request import Request

from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.content import Adapters, ContentKeys
from kvferry.integrations.vllm.views import VllmRequest

HIDDEN = 128
"""Width of the tiny models' embeddings."""


def request_of(tokens, **fields):
    """A request of vLLM's."""
    return Request(
        request_id="r",
        prompt_token_ids=None if tokens is None else list(tokens),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        **fields,
    )


def view(tokens=(1, 2, 3, 4, 5, 6), check="sample", hashed=True, **fields):
    """The same as a connector sees it."""
    return VllmRequest(request_of(tokens, **fields), ContentKeys(check, inputs_are_hashed=hashed))


def test_a_cut_request_ends_after_its_first_token_whatever_the_client_asked_for():
    """vLLM 0.28 goes on below ``min_tokens`` although ``max_tokens`` is reached."""
    params = SamplingParams(max_tokens=50, min_tokens=40)
    request = Request("r", list(range(20)), params, None)
    compat.cut_prompt(request, 17)
    assert (request.num_prompt_tokens, request.max_tokens) == (17, 1)
    assert request.sampling_params is not None
    assert request.sampling_params.min_tokens == 1
    assert params.min_tokens == 40, "other requests of the client may have it too"


def test_a_cut_prompt_stays_whole_for_its_client():
    """A client that runs the engine in its own process may send the same list again."""
    prompt, are_tokens = list(range(20)), [True] * 20
    request = Request(
        "r",
        prompt,
        SamplingParams(),
        None,
        prompt_embeds=torch.zeros(20, HIDDEN),
        prompt_is_token_ids=are_tokens,
    )
    compat.cut_prompt(request, 17)
    assert request.prompt_token_ids == list(request.all_token_ids) == list(range(17))
    assert request.prompt_is_token_ids == [True] * 17
    assert (prompt, are_tokens) == (list(range(20)), [True] * 20)


def image(identifier, offset, length=2):
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def write_adapter(folder, *, seed=1, **config):
    """A random LoRA adapter of rank 8 for the tiny Llama's attention."""
    torch.manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {"q_proj": 256, "k_proj": 128, "v_proj": 128}
    sizes = {
        f"base_model.model.model.layers.{layer}.self_attn.{name}.{part}.weight": shape
        for layer in range(3)
        for name, size in outputs.items()
        for part, shape in (("lora_A", (8, HIDDEN)), ("lora_B", (size, 8)))
    }
    tensors = {name: 0.2 * torch.randn(shape) for name, shape in sizes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 8,
        "bias": "none",
        "target_modules": list(outputs),
        "base_model_name_or_path": str(folder),
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    return folder


def lora(path, name="sql", number=1):
    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=str(path))


def lora_key(path, name="sql", number=1, check="sample"):
    return view(lora_request=lora(path, name, number), check=check).content_keys(6)["lora"]


# ---- what a request says -------------------------------------------------------------------------


def test_tokens_alone_have_no_content_whatever_their_salt():
    assert view().content_keys(6) == {}
    assert view(cache_salt="mine").content_keys(6) == {}


def test_an_adapter_is_known_by_name_and_files_and_not_by_place_or_number(tmp_path):
    one, two = write_adapter(tmp_path / "here"), write_adapter(tmp_path / "there")
    assert lora_key(one) == lora_key(two, number=7)
    assert lora_key(one).startswith("sql ")
    assert lora_key(one) != lora_key(one, name="chat")


def test_two_adapters_of_one_name_differ(tmp_path):
    one = write_adapter(tmp_path / "one")
    trained = write_adapter(tmp_path / "trained", seed=2)
    scaled = write_adapter(tmp_path / "scaled", lora_alpha=16)
    assert len({lora_key(path) for path in (one, trained, scaled)}) == 3
    # Where the files are not to be read, the name has to do.
    assert len({lora_key(path, check="config") for path in (one, trained, scaled)}) == 1


def test_an_adapter_that_is_replaced_in_its_place_is_another(tmp_path):
    adapters = Adapters("sample")
    path = write_adapter(tmp_path / "sql")
    before = adapters.key("sql", str(path))
    weights = path / "adapter_model.safetensors"
    changed = weights.stat().st_mtime_ns + 1_000_000_000
    write_adapter(path, seed=2)
    os.utime(weights, ns=(changed, changed))
    assert adapters.key("sql", str(path)) != before


def test_the_files_of_an_adapter_are_read_once(tmp_path, monkeypatch):
    from kvferry.integrations.vllm import content

    read = []

    def digest_of_files(files, full):
        read.append(files)
        return "digest"

    monkeypatch.setattr(content, "digest_of_files", digest_of_files)
    adapters = Adapters("sample")
    path = write_adapter(tmp_path / "sql")
    assert adapters.key("sql", str(path)) == adapters.key("sql", str(path))
    assert len(read) == 1


@pytest.mark.parametrize("broken", ["nowhere", "empty", "no config", "no json"])
def test_files_that_cannot_be_read_are_warned_of_once_and_the_name_counts(tmp_path, caplog, broken):
    path = tmp_path / "sql"
    if broken == "empty":
        path.mkdir()
    elif broken != "nowhere":
        write_adapter(path)
        (path / "adapter_config.json").write_text("{")
    if broken == "no config":
        (path / "adapter_config.json").unlink()
    adapters = Adapters("sample")
    with caplog.at_level("WARNING", logger="kvferry"):
        keys = {adapters.key("sql", str(path)) for _ in range(3)}
    assert keys == {Adapters("config").key("sql", "")}
    (record,) = set(caplog.records)  # pytest also listens at vLLM's logger
    assert "LoRA adapter sql" in record.message
    assert 'weights_check to "config"' in record.message


def test_images_count_with_their_places_if_the_tokens_reach_them():
    def key(*features, num_tokens=6):
        return view(mm_features=list(features)).content_keys(num_tokens).get("multimodal")

    assert key(image("a", 1)) == key(image("a", 1))
    found = [
        key(image("a", 1)),
        key(image("b", 1)),
        key(image("a", 2)),
        key(image("a", 1, length=3)),
        key(image("a", 1), image("b", 4)),
        key(image("b", 1), image("a", 4)),
    ]
    assert len(set(found)) == len(found)
    # The second image begins after the fourth token.
    assert key(image("a", 1), image("b", 4), num_tokens=4) == key(image("a", 1))
    assert key(image("a", 1), num_tokens=1) is None


def test_images_that_a_server_only_counts_are_like_none_of_another():
    keys = [
        view(mm_features=[image("renderer0-mm-1-image-0", 1)], hashed=False).content_keys(6)
        for _ in range(2)
    ]
    assert keys[0] != keys[1]
    assert keys[0]["multimodal"].startswith("1 inputs not hashed ")


@pytest.mark.parametrize(
    ("processor_cache_gb", "prefix_caching", "hashed"),
    [(4, True, True), (4, False, True), (0, True, True), (0, False, False)],
)
def test_vllm_hashes_images_for_either_of_its_caches(processor_cache_gb, prefix_caching, hashed):
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            multimodal_config=SimpleNamespace(mm_processor_cache_gb=processor_cache_gb)
        ),
        cache_config=SimpleNamespace(enable_prefix_caching=prefix_caching),
    )
    assert compat.hashes_inputs(config) is hashed
    config.model_config.multimodal_config = None
    assert compat.hashes_inputs(config)


def test_embeddings_count_as_far_as_the_tokens_reach():
    embeddings = torch.randn(6, 4)

    def key(tensor, num_tokens=6, **fields):
        return view(None, prompt_embeds=tensor, **fields).content_keys(num_tokens)["prompt_embeds"]

    other = embeddings.clone()
    other[4] += 1
    assert key(embeddings) == key(embeddings.clone())
    assert key(embeddings) != key(other)
    assert key(embeddings, 4) == key(other, 4)
    assert key(embeddings, 4) != key(embeddings, 5)
    assert key(embeddings) != key(embeddings.double())
    key(embeddings.bfloat16())
    key(embeddings, 0)  # a peer's number


def test_which_tokens_are_embeddings_counts():
    embeddings = torch.randn(3, 4)

    def key(mask):
        mixed = view([1, 2, 3], prompt_embeds=embeddings, prompt_is_token_ids=mask)
        return mixed.content_keys(3)["prompt_embeds"]

    assert key([True, False, False]) != key([True, True, False])


def test_embeddings_have_as_many_tokens_as_they_have_rows():
    found = view(None, prompt_embeds=torch.randn(6, 4)).prompt_token_ids
    assert list(found) == [0] * 6


@pytest.mark.parametrize("tokens", [None, [1, 2, 3, 4]])
def test_the_last_token_goes_with_its_embedding(tokens):
    request = request_of(
        tokens, prompt_embeds=torch.randn(4, 4), prompt_is_token_ids=tokens and [True] * 4
    )
    compat.drop_last_prompt_token(request)
    assert request.num_tokens == request.num_prompt_tokens == len(request.prompt_embeds) == 3
    assert tokens is None or len(request.prompt_is_token_ids) == len(request.prompt_token_ids) == 3


# ---- two engines ---------------------------------------------------------------------------------


def generated(outputs):
    return [list(output.outputs[0].token_ids) for output in outputs]


def assert_at_rest(*engines):
    for engine in engines:
        engine.drain()
        assert engine.used_blocks == 0


QUICK = {"lease_duration_s": 2.0}
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, "extra": QUICK}


@pytest.mark.timed("A lease of 2 s ends while a kernel is compiled.")
def test_a_request_with_an_adapter_is_loaded_where_the_adapter_is_the_same(
    start, start_pair, reference, random_prompt, tmp_path
):
    here, there = write_adapter(tmp_path / "here"), write_adapter(tmp_path / "there")
    prompt = random_prompt(200)
    expected = generated(start(None, **LORA).generate([prompt], lora=lora(here)))
    assert expected != reference([prompt])
    prefill, decode = start_pair(**LORA)
    params = prefill.prefill([prompt], lora=lora(here))
    # The number is this server's own.
    found = decode.generate([prompt], params, lora=lora(there, number=2))
    assert generated(found) == expected
    assert decode.prompt_tokens_from("external_kv_transfer") == 199
    assert_at_rest(prefill, decode)


@pytest.mark.timed("A lease of 2 s ends while a kernel is compiled.")
@pytest.mark.parametrize("wrong", ["none", "another name", "another adapter of the name"])
def test_a_request_with_another_adapter_is_refused(
    start_pair, random_prompt, tmp_path, wrong, caplog
):
    one, two = write_adapter(tmp_path / "one"), write_adapter(tmp_path / "two", seed=2)
    prefill, decode = start_pair(**LORA)
    prompt = random_prompt(200)
    params = prefill.prefill([prompt], lora=lora(one))
    adapter = {
        "none": None,
        "another name": lora(one, "chat"),
        "another adapter of the name": lora(two),
    }[wrong]
    with caplog.at_level("ERROR", logger="kvferry"):
        (output,) = decode.generate([prompt], params, lora=adapter)
    assert output.outputs[0].finish_reason == "error"
    assert "TicketError" in caplog.text
    assert "lora: prefill had sql" in caplog.text
    assert_at_rest(prefill, decode)


@pytest.fixture(params=["llama", "windows"])
def embeddings_pair(request, start, start_pair, tiny_llama, tiny_hybrid, decodes_windows):
    """A single engine and a pair that take embeddings."""
    model, own = {"llama": (tiny_llama, {}), "windows": (tiny_hybrid, decodes_windows)}[
        request.param
    ]
    settings = {"enable_prompt_embeds": True, "extra": QUICK}
    pair = start_pair(p_model=model, d_model=model, policy="fail", **settings, **own)
    return start(None, model, **settings), *pair


def embedded(length, seed):
    generator = torch.Generator().manual_seed(seed)
    return {"prompt_embeds": torch.randn(length, HIDDEN, generator=generator)}


@pytest.mark.timed("A lease of 2 s ends while a kernel is compiled.")
def test_prompts_of_embeddings_are_loaded(embeddings_pair):
    single, prefill, decode = embeddings_pair
    prompts = [embedded(200, 1), embedded(200, 2), embedded(65, 3)]
    expected = generated(single.generate(prompts))
    assert expected[0] != expected[1]
    assert generated(decode.generate(prompts, prefill.prefill(prompts))) == expected
    assert decode.prompt_tokens_from("external_kv_transfer") == 199 + 199 + 64
    assert_at_rest(prefill, decode)


@pytest.mark.timed("A lease of 2 s ends while a kernel is compiled.")
def test_the_ticket_of_other_embeddings_is_refused(embeddings_pair, caplog):
    _, prefill, decode = embeddings_pair
    prompts = [embedded(200, 1), embedded(200, 2)]
    with caplog.at_level("ERROR", logger="kvferry"):
        outputs = decode.generate(prompts, prefill.prefill(prompts)[::-1])
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert "prompt_embeds: prefill had float32" in caplog.text
    assert_at_rest(prefill, decode)
