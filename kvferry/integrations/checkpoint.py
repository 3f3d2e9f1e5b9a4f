"""The model that an engine serves, for its fingerprint: its config, and its checkpoint's tensors.

Two checkpoints of one shape must not pair, so the weights are part of the fingerprint. Reading all
weights again would double the start time of a large model. A slice of every tensor is read instead,
because any training run changes such slices. Tensors have the names of the checkpoint, which are
the same in every serving engine.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from kvferry.errors import ConfigError

logger = logging.getLogger(__name__)

WeightsCheck = Literal["sample", "full", "config"]
"""How two checkpoints are told apart: by slices of every tensor, by every byte, or by the config of
the model alone."""

DIGEST_CHARS = 32
"""Number of characters in a digest of weights: 128 bits."""
SLICE_BYTES = 4096
"""Number of bytes read of a tensor at each of three places: start, middle and end."""
_SLICES_PER_FILE = 256
"""Number of slices of a file whose tensors cannot be located."""
_CHUNK_BYTES = 1 << 24
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
_MAX_HEADER_BYTES = 1 << 28

#: Keys of a model's config that do not shape its KV.
_OUTSIDE_DIGEST = ("_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache")
_ADDED = (
    "context_len",
    "encoder_only",
    "head_dim",
    "language_model_only",
    "language_only",
    "swa_head_dim",
    "swa_v_head_dim",
    "v_head_dim",
)
"""Keys that a serving engine writes into a config whose class does not know them."""
_ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")


def canonical(config: Any) -> dict[str, Any]:
    """The keys of a model's config that shape its KV, with values of JSON alone. Every serving
    engine has the same keys for the same files.

    Args:
        config: the config as transformers has read it.
    """
    values: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=str))
    return _without_additions(values, config)


def _without_additions(values: dict[str, Any], config: object) -> dict[str, Any]:
    """The values that come from the files: without settings of a serving engine, and without the
    older name of a rope's type where the newer name is there too.
    """
    kept = {
        key: _without_additions(value, getattr(config, key, None))
        if isinstance(value, dict)
        else value
        for key, value in values.items()
        if key not in _OUTSIDE_DIGEST and (key not in _ADDED or hasattr(type(config), key))
    }
    if "rope_type" in kept and kept.get("type") == kept["rope_type"]:
        del kept["type"]
    return kept


def digest_of(values: object) -> str:
    """SHA-256 (hex) of a JSON value."""
    return hashlib.sha256(json.dumps(values, sort_keys=True, default=str).encode()).hexdigest()


def config_digest(model_config: Any, speculative: Mapping[str, Any] | None = None) -> str:
    """SHA-256 (hex) of a model's config, and of the settings of the engine that shape the KV.

    Args:
        model_config: the engine's own config of the model.
        speculative: the method that drafts tokens, and its model; ``None`` if no tokens are
            drafted.
    """
    engine = {"quantization": model_config.quantization, "speculative": speculative}
    return digest_of({"config": canonical(model_config.hf_config), "engine": engine})


def rope_text(config: Any) -> str:
    """Canonical text of the rope settings in a model's config."""
    values = canonical(config)
    return json.dumps({key: values[key] for key in _ROPE_KEYS if key in values}, sort_keys=True)


def dtype_text(dtypes: Iterable[str]) -> str:
    """The dtype of the cells in a fingerprint; fp8 has a name that allows no conversion from or to
    it.

    An engine divides by a layer's scales, which may come from the checkpoint, before rounding to
    fp8. A conversion of the dtype alone would change the values.
    """
    found = dict.fromkeys(dtypes)
    scaled = [dtype for dtype in found if dtype.startswith("float8")]
    return f"{', '.join(scaled)} with scales of its own" if scaled else next(iter(found), "")


def downloaded(name: str, revision: str | None) -> Path | None:
    """The folder of a model's files: a folder of this name, or a downloaded snapshot; ``None`` if
    the files are not on this machine.
    """
    path = Path(name)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except Exception:  # any exception means that the files are not here
        return None


def weight_files(folder: Path) -> list[Path]:
    """The files of the first format found: a folder may hold the same weights in two formats."""
    if folder.is_file():
        return [folder]
    for pattern in _WEIGHTS:
        if found := sorted(folder.glob(pattern)):
            return found
    return []


def checkpoint_digests(name: str, revision: str | None, check: WeightsCheck) -> dict[str, str]:
    """Name → digest of each tensor of a model's checkpoint; the name and the revision of the model
    if the files are not to be read, or are not on this machine.

    Args:
        name: name of the model, or its folder.
        revision: revision of the model that the engine was asked for.
        check: how much of the files is read.

    Raises:
        ConfigError: a file cannot be read.
    """
    folder = None if check == "config" else downloaded(name, revision)
    if folder is None:
        if check != "config":
            logger.warning(
                "the files of %s are not on this machine; two checkpoints of it are told apart by "
                "name and revision only",
                name,
            )
        return {"model": name, "revision": str(revision)}
    try:
        return tensor_digests(weight_files(folder), full=check == "full")
    except OSError as error:
        raise ConfigError(f"weights_check: {folder} cannot be read: {error}") from error


def tensor_digests(paths: list[Path], *, full: bool) -> dict[str, str]:
    """Name → digest of each tensor of some files; a digest of the whole file if names are unknown.

    Args:
        paths: files in a fixed order; their names do not count.
        full: read every byte, not slices.

    Raises:
        OSError: a file cannot be read.
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
        OSError: a file cannot be read.
    """
    return digest_of(tensor_digests(paths, full=full))


def slices(nbytes: int, full: bool) -> list[tuple[int, int]]:
    """(start, bytes) of each slice that is read of a tensor of ``nbytes``.

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
    """Name → first byte of each tensor of a safetensors file and the byte after the last."""
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
