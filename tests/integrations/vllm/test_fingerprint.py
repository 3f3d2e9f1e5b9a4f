"""Two checkpoints of one shape have two fingerprints."""

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.config import ModelConfig

from kvferry.integrations.checkpoint import digest_of_files
from kvferry.integrations.vllm.content import ContentKeys
from kvferry.integrations.vllm.fingerprint import fingerprint, named_weights
from kvferry.integrations.vllm.weights import RankWeights, weights_digest
from tests.integrations.checkpoints import (
    EXPECTED,
    GROUP,
    WEIGHTS_DIGEST,
    expected_facts,
    facts,
    write_checkpoint,
)

SHAPES = {"small": (3,), "large": (64, 300), "row": (1, 5000)}


def checkpoint(path, **changed):
    tensors = {
        name: torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        for name, shape in SHAPES.items()
    }
    save_file(tensors | changed, path)
    return path


@pytest.mark.parametrize("full", [False, True])
def test_equal_bytes_have_one_digest(tmp_path, full):
    one, two = checkpoint(tmp_path / "one"), checkpoint(tmp_path / "two")
    assert digest_of_files([one], full=full) == digest_of_files([two], full=full)


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_a_tensor_that_was_trained_on_changes_it(tmp_path, name, full):
    one = checkpoint(tmp_path / "one")
    two = checkpoint(tmp_path / "two", **{name: torch.randn(SHAPES[name])})
    assert digest_of_files([one], full=full) != digest_of_files([two], full=full)


def test_a_single_byte_between_the_samples_needs_the_full_check(tmp_path):
    path = tmp_path / "weights.bin"
    content = bytearray(4 << 20)
    path.write_bytes(content)
    before = [digest_of_files([path], full=full) for full in (False, True)]
    content[5000] = 1
    path.write_bytes(content)
    after = [digest_of_files([path], full=full) for full in (False, True)]
    assert before[0] == after[0]
    assert before[1] != after[1]


@pytest.mark.parametrize("content", [b"", b"x", b"\xff" * 100, b"\x05" + b"\0" * 7 + b"[1,2]"])
def test_any_file_has_a_digest(tmp_path, content):
    path = tmp_path / "strange.safetensors"
    path.write_bytes(content)
    assert len(digest_of_files([path], full=False)) == 64


def model_config(folder):
    return ModelConfig(model=str(folder), dtype="float32", skip_tokenizer_init=True)


def told(folder):
    config = SimpleNamespace(model_config=model_config(folder), speculative_config=None)
    groups: Any = (SimpleNamespace(geometry=GROUP),)
    return fingerprint(config, groups)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_checkpoint_has_the_fingerprint_of_every_engine(tmp_path, name):
    found = told(write_checkpoint(tmp_path, name))
    assert (found.config_digest, found.rope) == EXPECTED[name]
    assert facts(found) == expected_facts(name)


@pytest.mark.parametrize("name", EXPECTED)
def test_weights_have_the_digest_of_every_engine(tmp_path, name):
    config = model_config(write_checkpoint(tmp_path, name))
    named = named_weights(config, "auto", "sample")
    assert weights_digest(named, [RankWeights("at start", {}, "")]) == WEIGHTS_DIGEST


@pytest.mark.parametrize(
    "changed", [{"rms_norm_eps": 0.25}, {"rope_theta": 5.0}, {"hidden_act": "gelu"}], ids=str
)
def test_another_config_has_another_digest(tmp_path, changed):
    found = told(write_checkpoint(tmp_path, "llama", **changed))
    assert found.config_digest != EXPECTED["llama"][0]
    assert (found.rope == EXPECTED["llama"][1]) == ("rope_theta" not in changed)


def test_a_request_names_the_weights_as_every_engine_does():
    keys = ContentKeys("sample")
    keys.weights = WEIGHTS_DIGEST
    plain = SimpleNamespace(
        lora_request=None, mm_features=[], prompt_embeds=None, prompt_is_token_ids=None
    )
    assert keys.of(plain, 1) == {"weights": WEIGHTS_DIGEST}
