"""Shapes of models, for plans before any download.

Only the properties that determine the KV cache are kept. The shapes of well-known models are from
the ``config.json`` in their repositories on Hugging Face, which ``source`` names. The shapes of
other models are read from their files. The engine computes few architectures, but a plan needs only
the shape of the cache, so configs of many more architectures can be read.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvferry.cache.cache_shape import CacheShape
from kvferry.errors import ModelError
from kvferry.explain.families import FAMILIES, MODELS
from kvferry.explain.model_file import REMEDY, ModelFile, suspicious_keys
from kvferry.topology.tensors import dtype_name


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of a model that a plan needs."""

    name: str
    source: str
    """Origin of the shape: a repository on Hugging Face, or a file."""
    shape: CacheShape
    dtype: str = "bfloat16"
    """Default dtype of the KV cache: the dtype in which vLLM serves the checkpoint."""


QUANTIZATION_FILE = "hf_quant_config.json"
"""File beside a ``config.json`` in which older releases of ModelOpt say how they quantised. As in
vLLM, it counts if the ``config.json`` has no ``quantization_config``."""
_DECODERS = ("text_config", "llm_config", "language_config", "thinker_config")
"""Keys under which multimodal models describe their decoder."""


def parse_model(
    values: Mapping[str, Any], where: str, quantization: tuple[Any, str] | None = None
) -> ModelInfo:
    """The shape that a ``config.json`` describes.

    Args:
        values: the decoded JSON, in the format of any release of transformers; for a multimodal
            model, only its ``text_config`` is used.
        where: place of the file, for error messages.
        quantization: content and place of a :data:`QUANTIZATION_FILE` that stands for the
            ``quantization_config`` of the file.

    Raises:
        ModelError: a value is missing or has a wrong type, or the cache of a layer is unknown.
    """
    text: Mapping[str, Any] = values
    outer: dict[str, Any] = {}
    while inner := next((part for key in _DECODERS if isinstance(part := text.get(key), dict)), {}):
        outer |= {key: value for key, value in text.items() if not isinstance(value, dict)}
        text = {"quantization_config": text.get("quantization_config"), **inner}
    if text.get("is_encoder_decoder") or outer.get("is_encoder_decoder"):
        raise ModelError(f"{where}: is_encoder_decoder: only decoders can be planned")
    kind = text.get("model_type") or outer.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str | None) else None
    if family is None:
        keys = suspicious_keys(text)
        raise ModelError(
            f"{where}: model_type {kind!r} is not known, so nothing says how to read "
            f"{', '.join(keys) or 'it'}; {REMEDY}"
        )
    dtype = _served_dtype({**outer, **{key: value for key, value in text.items() if value}}, where)
    ModelFile(outer, where, dtype, {}).check_understood()
    try:
        shape = CacheShape(family.layers(ModelFile(text, where, dtype, family.defaults)))
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error
    name = Path(where).parent.name or where
    said = text.get("quantization_config") or {}, f"{where}: quantization_config"
    return ModelInfo(name, where, shape, _cache_dtype(*(quantization or said)) or dtype)


def _served_dtype(values: Mapping[str, Any], where: str) -> str:
    """The dtype in which vLLM serves a checkpoint: its own, but bfloat16 instead of float32."""
    try:
        dtype = dtype_name(values.get("dtype") or values.get("torch_dtype") or "bfloat16")
    except ValueError as error:
        raise ModelError(f"{where}: {error}") from error
    return "bfloat16" if dtype == "float32" else dtype


def _cache_dtype(quantization: Any, where: str) -> str | None:
    """The KV cache's own dtype, if a quantised checkpoint has scales for it; else ``None``.

    ``quantization`` is what the checkpoint says of its quantisation, as ``where`` has it.
    """
    if not isinstance(quantization, dict):
        raise ModelError(f"{where} is {quantization!r}; keys are needed")
    places = [quantization]
    if _is_of_modelopt(quantization):
        places.insert(0, quantization["quantization"])
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        scheme = next((place[key] for place in places if place.get(key)), None)
        bits = [scheme.get("num_bits"), scheme.get("type")] if isinstance(scheme, dict) else scheme
        if bits in ([8, "float"], "FP8", "fp8"):
            return "float8_e4m3fn"
        if scheme is not None:
            raise ModelError(
                f"{where}: {key} is {scheme!r}; only 8-bit floats can be planned; take it out of "
                "a copy of the file and write dtype= in the specs"
            )
    return None


def _is_of_modelopt(quantization: Mapping[str, Any]) -> bool:
    """Whether vLLM reads the keys below ``quantization``, which older releases of ModelOpt write.

    vLLM does so if the weights, too, are quantised.
    """
    inner, producer = quantization.get("quantization"), quantization.get("producer")
    if not isinstance(inner, dict):
        return False
    if str(quantization.get("quant_method", "")).startswith("modelopt"):
        return True
    is_made_by = isinstance(producer, dict) and producer.get("name") == "modelopt"
    is_signed = is_made_by or "modelopt_quant_config" in inner
    return is_signed and inner.get("quant_algo") is not None


#: Name → model, in the order of lists for users.
KNOWN_MODELS: Mapping[str, ModelInfo] = {
    name: ModelInfo(name, known["source"], parse_model(known["config"], known["source"]).shape)
    for name, known in MODELS["known"].items()
}
