"""SGLang servers tell of a checkpoint what servers of every other engine tell of it."""

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

from sglang.srt.configs.model_config import ModelConfig
from transformers import FalconH1Config, Qwen3NextConfig

from kvferry.integrations.checkpoint import canonical
from kvferry.integrations.rooms import RoomRequest
from kvferry.integrations.sglang.model import fingerprint, weights_digest
from tests.integrations.checkpoints import (
    EXPECTED,
    GROUP,
    WEIGHTS_DIGEST,
    expected_facts,
    facts,
    write_checkpoint,
)


def told(folder):
    config = ModelConfig(str(folder), dtype="float32")
    return fingerprint(config, [GROUP], weights_digest(config, "auto", "sample"))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_checkpoint_has_the_fingerprint_of_every_engine(tmp_path, name):
    found = told(write_checkpoint(tmp_path, name))
    assert (found.config_digest, found.rope) == EXPECTED[name]
    assert found.weights_digest == WEIGHTS_DIGEST
    assert facts(found) == expected_facts(name)


@pytest.mark.parametrize(
    "changed", [{"rms_norm_eps": 0.25}, {"rope_theta": 5.0}, {"hidden_act": "gelu"}], ids=str
)
def test_another_config_has_another_digest(tmp_path, changed):
    found = told(write_checkpoint(tmp_path, "llama", **changed))
    assert found.config_digest != EXPECTED["llama"][0]
    assert (found.rope == EXPECTED["llama"][1]) == ("rope_theta" not in changed)


@pytest.mark.parametrize("kind", [FalconH1Config, Qwen3NextConfig])
def test_the_config_of_a_hybrid_model_is_another_in_sglang(tmp_path, kind):
    """So a pair with another engine is refused at the handshake, by ``config_digest``."""
    config = kind(architectures=[kind.__name__.replace("Config", "ForCausalLM")])
    config.save_pretrained(tmp_path)
    theirs = ModelConfig(str(tmp_path), dtype="float32").hf_config
    assert theirs.__class__.__module__.startswith("sglang.srt.configs")
    assert canonical(theirs) != canonical(kind.from_pretrained(tmp_path))


def test_a_request_names_the_weights_as_every_engine_does():
    request = RoomRequest(
        request_id="r", prompt_token_ids=[1], kv_transfer_params={}, weights=WEIGHTS_DIGEST
    )
    assert request.content_keys(1) == {"weights": WEIGHTS_DIGEST}
