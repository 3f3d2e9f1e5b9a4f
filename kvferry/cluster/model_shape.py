"""The shape of a model, without its weights where that is possible."""

from pathlib import Path

import msgspec

from kvferry.config import ModelConfig
from kvferry.engine.model_config import DecoderConfig, parse_config
from kvferry.engine.weights import load_model_config, prepare_model
from kvferry.engine.weights_folder import CONFIG_FILE, TINY_MODELS, Progress, read_json


def convert(model: ModelConfig, progress: Progress) -> Path:
    """Converts a model unless that was done before; returns its folder.

    Raises:
        ModelError: see :func:`~kvferry.engine.weights.prepare_model`.
    """
    tiny = TINY_MODELS.get(model.source)
    if tiny is not None:
        tiny = msgspec.structs.replace(tiny, seed=model.seed)
    return prepare_model(model.source, tiny=tiny, progress=progress)


def model_shape(
    model: ModelConfig, progress: Progress = lambda _doing, _done: None
) -> DecoderConfig:
    """The config of a model.

    A folder with a ``config.json`` is only looked at. A GGUF file is converted, once: its header
    takes a third of that time to read, and the result is what ``serve`` needs anyway.

    Raises:
        ModelError: the model's files cannot be used.
    """
    path = Path(model.source) / CONFIG_FILE
    if path.is_file():
        return parse_config(read_json(path), str(path))
    return load_model_config(convert(model, progress))
