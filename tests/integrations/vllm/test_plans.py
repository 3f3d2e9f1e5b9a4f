"""What ``kvferry plan`` reads of a config is what the same config becomes inside vLLM."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry.explain.models import parse_model
from tests.explain.test_model_configs import cache_text

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

#: ``model_type`` of the config class whose defaults are built, and its architecture in vLLM.
CLASSES = {
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon": "FalconForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "jamba": "JambaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "olmo3": "Olmo3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
}


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Model type → its config, and what vLLM makes of each of its layers."""
    pytest.importorskip("vllm")
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    folders, configs = tmp_path_factory.mktemp("models"), {}
    for kind, architecture in CLASSES.items():
        configs[kind] = auto.CONFIG_MAPPING[kind]().to_dict() | {
            "architectures": [architecture],
            "dtype": "bfloat16",
        }
        (folders / kind).mkdir()
        (folders / kind / "config.json").write_text(json.dumps(configs[kind]), encoding="utf-8")
    result = subprocess.run(
        [sys.executable, Path(__file__).with_name("model_specs.py"), *folders.iterdir()],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
    )
    lines = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    specs = {line["folder"]: line["specs"] for line in lines}
    assert set(specs) == set(CLASSES), result.stderr[-4000:]
    return {kind: (configs[kind], specs[kind]) for kind in CLASSES}


@pytest.mark.parametrize("kind", CLASSES)
def test_each_layer_of_a_config_is_read_as_vllm_builds_it(built, kind):
    config, specs = built[kind]

    layers = parse_model(config, "here").shape.layers

    assert {
        str(layer): cache_text(cache) for layer, cache in enumerate(layers) if cache is not None
    } == specs
