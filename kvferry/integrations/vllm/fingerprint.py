"""What must agree before KV of one vLLM engine means anything to another.

Two checkpoints of one shape must not pair, so the weights are part of it. Reading all of them again
would double the start of a large model; a slice of every tensor is read instead, which any training
run changes.
"""

import hashlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.caches import CacheGroup
from kvferry.integrations.vllm.config import WeightsCheck
from kvferry.topology.description import ModelFingerprint

logger = logging.getLogger(__name__)

SLICE_BYTES = 4096
"""Bytes read of a tensor at each of its three places: start, middle and end."""
_SLICES_PER_FILE = 256
"""Slices of a file whose tensors' places are not known."""
_CHUNK_BYTES = 1 << 24
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_MAX_HEADER_BYTES = 1 << 28

#: Keys of a model's config that do not shape its KV.
_OUTSIDE_DIGEST = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def fingerprint(
    vllm_config: Any, groups: tuple[CacheGroup, ...], check: WeightsCheck
) -> ModelFingerprint:
    """The fingerprint of an engine's model.

    Args:
        vllm_config: the engine's config.
        groups: its KV cache.
        check: how the weights are told apart.

    Raises:
        ConfigError: the model's files cannot be read.
    """
    model = vllm_config.model_config
    config = _canonical(model.hf_config.to_dict())
    text = _canonical(model.hf_text_config.to_dict())
    rope = {key: text[key] for key in _ROPE_KEYS if key in text}
    first = groups[0].geometry
    return ModelFingerprint(
        name=str(model.model),
        architecture=", ".join(model.architectures),
        num_layers=int(model.get_total_num_hidden_layers()),
        num_kv_heads=first.num_kv_heads,
        head_size=first.head_size,
        dtype=_dtypes(groups),
        rope=json.dumps(rope, sort_keys=True),
        config_digest=digest_of({"config": config, "engine": _engine_settings(vllm_config)}),
        weights_digest=weights_digest(model, vllm_config.load_config.load_format, check),
    )


def _dtypes(groups: tuple[CacheGroup, ...]) -> str:
    """The dtype of the cells; fp8 by a name that nothing is converted from or to.

    vLLM divides by a layer's scales, which may be the checkpoint's, before it rounds to fp8: a
    conversion of the dtype alone would change the values.
    """
    found = dict.fromkeys(group.geometry.dtype for group in groups)
    scaled = [dtype for dtype in found if dtype.startswith("float8")]
    return f"{', '.join(scaled)} with scales of its own" if scaled else next(iter(found))


def _engine_settings(vllm_config: Any) -> dict[str, Any]:
    """Settings outside the model's config that shape its KV."""
    speculative = vllm_config.speculative_config
    draft = speculative and getattr(speculative, "draft_model_config", None)
    return {
        "quantization": vllm_config.model_config.quantization,
        "speculative": None
        if not speculative
        else {"method": speculative.method, "model": draft and str(draft.model)},
    }


def _canonical(values: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in _OUTSIDE_DIGEST}


def digest_of(values: object) -> str:
    """SHA-256 (hex) of what JSON can say."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def weights_digest(model_config: Any, load_format: object, check: WeightsCheck) -> str:
    """SHA-256 (hex) over the weights, or over what stands for them.

    Raises:
        ConfigError: a file cannot be read.
    """
    if str(getattr(load_format, "value", load_format)) == "dummy":
        return digest_of({"dummy weights of seed": model_config.seed})
    folder = None if check == "config" else compat.weights_folder(model_config)
    if folder is None:
        if check != "config":
            logger.warning(
                "the files of %s are not on this machine; two checkpoints of it are told apart "
                "by name and revision only",
                model_config.model,
            )
        return digest_of({"model": str(model_config.model), "revision": model_config.revision})
    try:
        return digest_of_files(weight_files(folder), full=check == "full")
    except OSError as error:
        raise ConfigError(f"weights_check: {folder} cannot be read: {error}") from error


def weight_files(folder: Path) -> list[Path]:
    """The files of the first format that there is: a folder may hold the same weights in two."""
    if folder.is_file():
        return [folder]
    for pattern in _WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def digest_of_files(paths: list[Path], *, full: bool) -> str:
    """SHA-256 (hex) over the bytes of some files, or over a slice of each of their tensors.

    Args:
        paths: files in a fixed order; their names do not count.
        full: read every byte.

    Raises:
        OSError: one cannot be read.
    """
    digest = hashlib.sha256(b"full" if full else b"sample")
    for path in paths:
        size = path.stat().st_size
        digest.update(size.to_bytes(8, "little"))
        with path.open("rb") as file:
            for start, length in _ranges(file, size, full):
                file.seek(start)
                digest.update(file.read(length))
    return digest.hexdigest()


def _ranges(file: Any, size: int, full: bool) -> Iterator[tuple[int, int]]:
    """(start, bytes) of what is read of a file."""
    if full:
        yield from ((start, _CHUNK_BYTES) for start in range(0, size, _CHUNK_BYTES))
        return
    header = _safetensors_header(file, size)
    if header is None:
        step = max(SLICE_BYTES, size // _SLICES_PER_FILE)
        yield from ((start, SLICE_BYTES) for start in range(0, size, step))
        return
    data, spans = header
    yield 0, data
    for first, end in spans:
        last = max(first, end - SLICE_BYTES)
        for start in sorted({first, (first + last) // 2, last}):
            yield data + start, min(SLICE_BYTES, end - start)


def _safetensors_header(file: Any, size: int) -> tuple[int, list[tuple[int, int]]] | None:
    """Where the data of a safetensors file begins, and each tensor's first and last byte in it."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size, _MAX_HEADER_BYTES):
        return None
    try:
        table = json.loads(file.read(length))
        spans = [
            tuple(entry["data_offsets"]) for name, entry in table.items() if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    return 8 + length, sorted((int(first), int(end)) for first, end in spans)
