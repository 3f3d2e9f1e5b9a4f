"""What must agree before KV of one vLLM engine means anything to another.

Two checkpoints of one shape must not pair, so the weights are part of it. Reading all of them again
would double the start of a large model; a slice of every tensor is read instead, which any training
run changes.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from kvferry.errors import ConfigError
from kvferry.integrations.vllm import compat
from kvferry.integrations.vllm.caches import CacheGroup
from kvferry.integrations.vllm.config import WeightsCheck
from kvferry.topology import EngineGeometry
from kvferry.topology.description import ModelFingerprint

logger = logging.getLogger(__name__)

DIGEST_CHARS = 32
"""Characters of a digest of weights: 128 bits."""
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


def fingerprint(vllm_config: Any, groups: tuple[CacheGroup, ...]) -> ModelFingerprint:
    """The fingerprint of an engine's model, without its weights.

    Args:
        vllm_config: the engine's config, where the model has been built.
        groups: its KV cache.
    """
    model = vllm_config.model_config
    config = _canonical(model.hf_config.to_dict())
    text = _canonical(model.hf_text_config.to_dict())
    rope = {key: text[key] for key in _ROPE_KEYS if key in text}
    attention = [each.geometry for each in groups if isinstance(each.geometry, EngineGeometry)]
    return ModelFingerprint(
        name=str(model.model),
        architecture=", ".join(model.architectures),
        num_layers=int(model.get_total_num_hidden_layers()),
        num_kv_heads=attention[0].num_kv_heads if attention else 0,
        head_size=attention[0].head_size if attention else 0,
        dtype=_dtypes(attention),
        rope=json.dumps(rope, sort_keys=True),
        config_digest=digest_of({"config": config, "engine": _engine_settings(vllm_config)}),
        weights_digest="",
    )


def _dtypes(attention: Sequence[EngineGeometry]) -> str:
    """The dtype of the cells; fp8 by a name that nothing is converted from or to.

    Of states the handshake compares the dtypes themselves, one by one.

    vLLM divides by a layer's scales, which may be the checkpoint's, before it rounds to fp8: a
    conversion of the dtype alone would change the values.
    """
    found = dict.fromkeys(geometry.dtype for geometry in attention)
    scaled = [dtype for dtype in found if dtype.startswith("float8")]
    return f"{', '.join(scaled)} with scales of its own" if scaled else next(iter(found), "")


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


def are_dummy(load_format: object) -> bool:
    """Whether vLLM draws weights instead of loading them."""
    return str(getattr(load_format, "value", load_format)) == "dummy"


def named_weights(model_config: Any, load_format: object, check: WeightsCheck) -> dict[str, str]:
    """Name in the checkpoint → digest of each tensor, or of what stands for them.

    Raises:
        ConfigError: a file cannot be read.
    """
    if are_dummy(load_format):
        return {"dummy weights of seed": str(model_config.seed)}
    folder = None if check == "config" else compat.weights_folder(model_config)
    if folder is None:
        if check != "config":
            logger.warning(
                "the files of %s are not on this machine; two checkpoints of it are told apart "
                "by name and revision only",
                model_config.model,
            )
        return {"model": str(model_config.model), "revision": str(model_config.revision)}
    try:
        return tensor_digests(weight_files(folder), full=check == "full")
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


def tensor_digests(paths: list[Path], *, full: bool) -> dict[str, str]:
    """Name → digest of each tensor of some files; of a file itself where these are not known.

    Args:
        paths: files in a fixed order; their names do not count.
        full: read every byte, not slices.

    Raises:
        OSError: one cannot be read.
    """
    digests = {}
    for index, path in enumerate(paths):
        size = path.stat().st_size
        with path.open("rb") as file:
            spans = _safetensors_spans(file, size)
            if spans is None:
                step = _CHUNK_BYTES if full else max(SLICE_BYTES, size // _SLICES_PER_FILE)
                length = _CHUNK_BYTES if full else SLICE_BYTES
                pieces = ((start, length) for start in range(0, size, step))
                digests[f"file {index}"] = _digest_of_pieces(file, size, pieces)
                continue
            for name, (first, end) in spans.items():
                pieces = ((first + at, length) for at, length in slices(end - first, full))
                digests[name] = _digest_of_pieces(file, end - first, pieces)
    return digests


def digest_of_files(paths: list[Path], *, full: bool) -> str:
    """SHA-256 (hex) over the digests of the tensors of some files; see :func:`tensor_digests`.

    Raises:
        OSError: one cannot be read.
    """
    return digest_of(tensor_digests(paths, full=full))


def slices(nbytes: int, full: bool) -> list[tuple[int, int]]:
    """(start, bytes) of what is read of a tensor of ``nbytes``.

    >>> slices(20_000, False), slices(5000, False), slices(3, False), slices(0, False)
    ([(0, 4096), (7952, 4096), (15904, 4096)], [(0, 4096), (452, 4096), (904, 4096)], [(0, 3)], [])
    """
    if full:
        return [
            (start, min(_CHUNK_BYTES, nbytes - start)) for start in range(0, nbytes, _CHUNK_BYTES)
        ]
    last = max(0, nbytes - SLICE_BYTES)
    starts = sorted({0, last // 2, last}) if nbytes else []
    return [(start, min(SLICE_BYTES, nbytes - start)) for start in starts]


def _digest_of_pieces(file: Any, nbytes: int, pieces: Iterable[tuple[int, int]]) -> str:
    digest = hashlib.sha256(nbytes.to_bytes(8, "little"))
    for start, length in pieces:
        file.seek(start)
        digest.update(file.read(length))
    return digest.hexdigest()[:DIGEST_CHARS]


def _safetensors_spans(file: Any, size: int) -> dict[str, tuple[int, int]] | None:
    """Name → first byte of each tensor of a safetensors file and the one after its last."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size, _MAX_HEADER_BYTES):
        return None
    try:
        table = json.loads(file.read(length))
        offsets = {
            name: tuple(entry["data_offsets"])
            for name, entry in table.items()
            if name != "__metadata__"
        }
        data = 8 + length
        return {
            name: (data + int(first), data + int(end)) for name, (first, end) in offsets.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
