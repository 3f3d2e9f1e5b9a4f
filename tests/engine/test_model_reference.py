"""The model against transformers' LlamaForCausalLM, on the same weights in float64."""

import json

import pytest
import torch

from kvferry.engine.attention import build_batch
from kvferry.engine.communicator import LocalGroup
from kvferry.engine.executor import Executor
from kvferry.engine.messages import SamplingParams, ScheduledRequest
from kvferry.engine.weights import load_model_config, prepare_model
from kvferry.engine.weights_folder import TinyLatent
from kvferry.engine.worker import Worker

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


@pytest.fixture
def transformers_model(monkeypatch):
    """Loads a converted folder with transformers, nothing of it rounded to float32."""
    from transformers import AutoModelForCausalLM
    from transformers.models.deepseek_v2 import modeling_deepseek_v2
    from transformers.models.llama import modeling_llama
    from transformers.models.ministral import modeling_ministral
    from transformers.models.mistral import modeling_mistral

    def norm(self, x):
        return self.weight * (x / (x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon).sqrt())

    def angles(self, _, position_ids):
        """As theirs, which takes cosines and sines from another float32 function."""
        turned = position_ids[..., None].float() * self.inv_freq.float()
        return torch.complex(turned.cos().double(), turned.sin().double())

    def rotate(q, k, angles):
        """As theirs, which computes in float32."""
        turned = [
            torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * angles.unsqueeze(1)
            for x in (q, k)
        ]
        return [torch.view_as_real(x).flatten(3) for x in turned]

    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_ministral.MinistralRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_mistral.MistralRMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_deepseek_v2.DeepseekV2RMSNorm, "forward", norm)
    monkeypatch.setattr(modeling_deepseek_v2.DeepseekV2RotaryEmbedding, "forward", angles)
    monkeypatch.setattr(modeling_deepseek_v2, "apply_rotary_emb", rotate)

    def load(folder):
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="sdpa"
        ).eval()

    return load


@pytest.fixture
def our_logits(worker_spec):
    """Logits after every token of a prompt: each token is its own request's last."""

    def compute(folder, prompt, **shape):
        spec = worker_spec(folder, num_blocks=100, **shape)
        groups = spec.geometries
        worker = Worker(spec, LocalGroup(spec.parallel).communicator(0))
        model = worker.model
        needed = -(-len(prompt) // groups[0].block_size)
        free = iter(range(99, 0, -1))
        tables = tuple([next(free) for _ in range(needed)] for _ in groups)
        rows = []
        with torch.inference_mode():
            for position, token in enumerate(prompt):
                request = ScheduledRequest(
                    request_id="r",
                    token_ids=[token],
                    first_position=position,
                    block_ids=tables,
                    sample=SamplingParams(),
                )
                windows = model.config.cache_shape.layer_windows
                batch = build_batch([request], groups, torch.float64, windows)
                logits = model.forward(batch, worker.cache)
                assert logits is not None
                rows.append(logits[0])
        return torch.stack(rows)

    return compute


@pytest.fixture
def with_rope(tiny_folder, tmp_path):
    """A tiny model with other rope settings, as a folder that transformers might have written."""

    def make(rope, **values):
        folder = tiny_folder(**values)
        config = json.loads((folder / "config.json").read_text()) | {"rope_parameters": rope}
        source = tmp_path / "llama3"
        source.mkdir()
        (source / "config.json").write_text(json.dumps(config))
        (source / "model.safetensors").symlink_to(folder / "model.safetensors")
        return prepare_model(source, cache=tmp_path)

    return make


@pytest.mark.parametrize("tied", [False, True])
def test_logits_are_those_of_transformers(
    tied, tiny_folder, transformers_model, our_logits, prompts
):
    folder = tiny_folder(tie_word_embeddings=tied)
    (prompt,) = prompts(45)
    with torch.no_grad():
        theirs = transformers_model(folder)(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(our_logits(folder, prompt), theirs, rtol=0, atol=1e-10)


def logits_of(model, prompt):
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("every", [0, 2, 3])
def test_logits_of_layers_with_windows_are_those_of_transformers(
    every, tiny_folder, transformers_model, our_logits, prompts
):
    folder = tiny_folder(sliding_window=7, full_attention_every=every)
    (prompt,) = prompts(45)
    theirs = logits_of(transformers_model(folder), prompt)
    torch.testing.assert_close(our_logits(folder, prompt), theirs, rtol=0, atol=1e-10)
    wider = our_logits(tiny_folder(sliding_window=8, full_attention_every=every), prompt)
    assert (wider[:7] - theirs[:7]).abs().max() < 1e-10
    assert (wider[8:] - theirs[8:]).abs().max() > 1e-2


def test_logits_of_mistral_are_those_of_transformers(
    tiny_folder, transformers_model, our_logits, prompts, tmp_path
):
    made = tiny_folder(sliding_window=7, full_attention_every=0)
    config = json.loads((made / "config.json").read_text())
    config |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    del config["layer_types"]
    source = tmp_path / "mistral"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(config))
    (source / "model.safetensors").symlink_to(made / "model.safetensors")
    (prompt,) = prompts(30)
    theirs = logits_of(transformers_model(source), prompt)
    folder = prepare_model(source, cache=tmp_path)
    torch.testing.assert_close(our_logits(folder, prompt), theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("rank", [None, 20])
def test_logits_of_latent_attention_are_those_of_transformers(
    rank, tiny_folder, transformers_model, our_logits, prompts
):
    """They spell out keys and values per head, we do not; they pair neighbours when rotating."""
    folder = tiny_folder(latent=TinyLatent(q_lora_rank=rank))
    (prompt,) = prompts(45)
    theirs = logits_of(transformers_model(folder), prompt)
    torch.testing.assert_close(our_logits(folder, prompt), theirs, rtol=0, atol=1e-10)
    assert theirs.std() > 0.5


def test_logits_with_llama3_rope_scaling_are_those_of_transformers(
    with_rope, transformers_model, our_logits, prompts
):
    folder = with_rope(LLAMA3_ROPE)
    (prompt,) = prompts(90)
    with torch.no_grad():
        theirs = transformers_model(folder)(torch.tensor([prompt])).logits[0]
    # transformers blends the frequencies in another order: float32 apart, not float64.
    torch.testing.assert_close(our_logits(folder, prompt), theirs, rtol=0, atol=1e-4)
    plain = our_logits(with_plain_rope(folder), prompt)
    assert (plain - theirs).abs().max() > 1e-2


def with_plain_rope(folder):
    """The same folder without scaling, to show that the test above can see scaling."""
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": config["rope_parameters"]["rope_theta"]}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    return folder


def test_greedy_tokens_and_gaps_are_those_of_transformers(
    tiny_folder, transformers_model, worker_spec, generate, prompts
):
    folder = tiny_folder()
    model = transformers_model(folder)
    asked = prompts(1, 3, 17, 64)
    with Executor(worker_spec(folder, num_blocks=64), in_process=True) as executor:
        found = generate(executor, asked, tokens=12)
    for prompt, sequence in zip(asked, found, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        assert sequence.output == theirs.sequences[0, len(prompt) :].tolist()
        best = torch.stack([row[0].topk(2).values for row in theirs.logits])
        assert sequence.gaps == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-5)


def test_weights_shape_the_answer_enough_for_token_tests(
    tiny_folder, worker_spec, generate, prompts
):
    """Tokens differ, and a model whose attention saw nothing would choose others."""
    with Executor(worker_spec(tiny_folder(), num_blocks=64), in_process=True) as executor:
        found = generate(executor, prompts(30, 30, 30), tokens=16)
        alone = generate(executor, [[sequence.prompt[-1]] for sequence in found], tokens=16)
    assert len({token for sequence in found for token in sequence.output}) > 8
    for sequence, without_context in zip(found, alone, strict=True):
        assert sequence.output != without_context.output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("model", [{}, {"latent": TinyLatent()}], ids=["llama", "mla"])
def test_narrow_dtypes_stay_close_to_float64(
    dtype, model, tiny_folder, worker_spec, prompts, generate
):
    folder, asked = tiny_folder(**model), prompts(20, 33)
    with Executor(worker_spec(folder), in_process=True) as executor:
        exact = generate(executor, asked, tokens=1)
    with Executor(worker_spec(folder, dtype=dtype), in_process=True) as executor:
        rounded = generate(executor, asked, tokens=1)
    for one, other in zip(exact, rounded, strict=True):
        tolerance = 1e-4 if dtype == "float32" else 0.3
        assert one.gaps[0] == pytest.approx(other.gaps[0], abs=tolerance)
        assert one.output == other.output or one.gaps[0] < tolerance


@pytest.mark.slow
def test_smollm2_answers_like_transformers(tmp_path, worker_spec, generate):
    from transformers import AutoTokenizer, LlamaForCausalLM

    progress = []
    folder = prepare_model(
        "smollm2", cache=tmp_path, progress=lambda doing, done: progress.append((doing, done))
    )
    fractions = [done for _, done in progress]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    assert load_model_config(folder).eos_token_ids == (2,)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    asked = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True
        )["input_ids"]
        for question in ("What is the capital of France?", "Write a haiku about the sea.")
    ]
    spec = worker_spec(folder, tp=2, pp=2, block_size=24, num_blocks=20, dtype="float32")
    with Executor(spec, in_process=True) as executor:
        found = generate(executor, asked, tokens=12, chunk=16)
    assert "Paris" in tokenizer.decode(found[0].output)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, sequence in zip(asked, found, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=2
        )
        expected = theirs[0, len(prompt) :].tolist()  # ends at the end of the answer, ours does not
        assert sequence.output[: len(expected)] == expected
        assert len(expected) > 5
