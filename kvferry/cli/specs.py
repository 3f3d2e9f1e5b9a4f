"""Parts of a plan without a cluster file: engines, in one line each, and a model."""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

from kvferry.cache.cache_shape import CacheShape
from kvferry.cache.config_builder import group_layers
from kvferry.config import shown
from kvferry.engine.weights_folder import CONFIG_FILE, read_json
from kvferry.errors import ConfigError, ModelError
from kvferry.explain.models import KNOWN_MODELS, QUANTIZATION_FILE, ModelInfo, parse_model
from kvferry.topology import GroupGeometry, ParallelShape
from kvferry.topology.description import MAX_RANKS

#: Key of a spec → description of the value, for messages.
SPEC_KEYS = {
    "tp": "tensor-parallel ranks",
    "pp": "pipeline stages",
    "layers": "layers of each stage, as 20+12, where stages have unequal numbers",
    "dcp": "decode-context-parallel ranks, inside tp",
    "pcp": "prefill-context-parallel ranks",
    "interleave": "tokens in a row on one context rank",
    "block": "tokens per block",
    "layout": "name or dim order",
    "dtype": "of the KV cache",
    "hybrid": "true or false: whether windows keep groups of their own",
}

_ANSWERS = {
    "dp": "each data-parallel engine has a cache of its own; leave out dp, and plan one of these "
    "engines with the tp of its attention",
    "ep": "experts keep no KV; leave out ep",
}
"""Key that a spec does not have → reason, and what to write instead."""
_DTYPES = {
    "auto": None,
    "half": "float16",
    "float": "float32",
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_inc"), "float8_e4m3fn"),
    "fp8_e5m2": "float8_e5m2",
}
"""vLLM's name of a dtype → dtype of the KV cache; ``None`` for the model's dtype."""
_PACKED = re.compile(r"(nvfp4|turboquant|ultraquant).*|.*_(ds_mla|per_token_head)")
"""vLLM's names of caches whose scales lie beside the elements."""
_COUNTS = ("tp", "pp", "dcp", "pcp", "interleave", "block")
_MOST_DIGITS = 100
"""Largest number of digits of a count. Python refuses to read numbers of some thousand digits."""
_COMMA = re.compile(r",(?![^(]*\))")  # a layout with inner orders holds commas in brackets


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The shape of an engine, as far as the KV cache depends on the shape."""

    parallel: ParallelShape
    block_size: int = 16
    layout: str = "NHD"
    dtype: str | None = None
    """Dtype of the KV cache; ``None`` for the model's dtype."""
    hybrid: bool = True
    stage_layers: tuple[int, ...] | None = None
    """Number of layers in each pipeline stage; ``None`` if the layers are divided evenly."""

    def geometries(self, shape: CacheShape, dtype: str) -> tuple[GroupGeometry, ...]:
        """The KV cache groups of an engine of this shape that serves a model.

        Args:
            shape: cache shape of the model.
            dtype: dtype of the KV cache if the spec names none.

        Raises:
            ValueError: the engine does not fit the model.
        """
        specs = shape.kv_cache_specs(self.block_size, self.dtype or dtype, self.parallel.tp)
        groups = group_layers(specs, hybrid=self.hybrid)
        made = shape.geometries(
            groups, layout=self.layout, parallel=self.parallel, stage_layers=self.stage_layers
        )
        # Attention comes first, because the first group is shown as attention.
        return tuple(sorted(made, key=lambda group: group.is_recurrent))


def parse_spec(text: str, where: str) -> EngineSpec:
    """Reads a spec. Defaults are 1, 16 tokens, NHD, the model's dtype and hybrid.

    >>> parse_spec("tp=8,block=64,layout=HND", "--prefill").block_size
    64
    >>> parse_spec("dtype=fp8", "--prefill").dtype
    'float8_e4m3fn'

    Args:
        text: ``key=value`` pairs, separated by commas.
        where: the option, for messages.

    Raises:
        ConfigError: an unknown, repeated or malformed key; the message lists the known keys.
    """
    values: dict[str, str] = {}
    for entry in _COMMA.split(text):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not value:
            raise ConfigError(
                f"{where}: {entry.strip()!r} is no key=value; write {where} tp=8,block=16,"
                f"layout=HND; {_known_keys()}"
            )
        if key in _ANSWERS:
            raise ConfigError(f"{where}: {key}: {_ANSWERS[key]}")
        if key not in SPEC_KEYS:
            near = difflib.get_close_matches(key, SPEC_KEYS, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise ConfigError(f"{where}: unknown key {key!r}; {hint}{_known_keys()}")
        if key in values:
            raise ConfigError(f"{where}: {key} stands twice; write it once")
        values[key] = value
    counts = {key: _count(values[key], key, where) for key in _COUNTS if key in values}
    block_size = counts.pop("block", 16)
    counts["interleave_size"] = counts.pop("interleave", 1)
    stages = None
    if "layers" in values:
        stages = tuple(_count(part, "layers", where) for part in values["layers"].split("+"))
        if counts.setdefault("pp", len(stages)) != len(stages):
            raise ConfigError(
                f"{where}: layers: {values['layers']} are {len(stages)} stages, pp is "
                f"{counts['pp']}; write as many numbers, or leave out pp"
            )
    try:
        parallel = ParallelShape(**counts)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    if parallel.world_size > MAX_RANKS:
        raise ConfigError(
            f"{where}: {parallel.world_size} ranks, an engine has {MAX_RANKS} at most"
        )
    return EngineSpec(
        parallel,
        block_size,
        values.get("layout", "NHD"),
        _dtype(values.get("dtype", "auto"), where),
        _flag(values.get("hybrid", "true"), where),
        stages,
    )


def _known_keys() -> str:
    return "known keys: " + ", ".join(f"{key} ({what})" for key, what in SPEC_KEYS.items())


def _count(value: str, key: str, where: str) -> int:
    if value.isdecimal() and len(value) > _MOST_DIGITS:
        raise ConfigError(f"{where}: {key}: a number of {len(value)} digits; no engine has so many")
    if not value.isdecimal() or int(value) < 1:
        raise ConfigError(f"{where}: {key}: {value!r} is not a whole number of 1 or more")
    return int(value)


def _dtype(value: str, where: str) -> str | None:
    name = value.lower()
    if _PACKED.fullmatch(name):
        raise ConfigError(
            f"{where}: dtype: {value!r} has scales beside its elements, and a plan counts elements "
            "of one dtype; start the engines and run kvferry check"
        )
    return _DTYPES.get(name, name)


def _flag(value: str, where: str) -> bool:
    if value not in ("true", "false"):
        raise ConfigError(f"{where}: hybrid: {value!r} is neither true nor false")
    return value == "true"


def find_model(name: str) -> ModelInfo:
    """The model of a name, of a path to a ``config.json``, or of a folder with a ``config.json``.

    >>> len(find_model("Llama-3-70B").shape.layers)
    80
    >>> find_model("deepseek-ai/DeepSeek-V3").shape.heads.head_size
    576

    Raises:
        ConfigError: the name is neither; the message names the nearest known model.
        ModelError: the file cannot be used.
    """
    wanted = name.lower().replace("_", "-")
    for model in KNOWN_MODELS.values():
        if wanted in (model.name, model.source.lower(), model.source.lower().split("/")[1]):
            return model
    path = Path(name)
    try:
        if path.is_dir():
            path /= CONFIG_FILE
        is_file = path.suffix == ".json" or path.is_file()
    except OSError as error:  # a folder that the user may not enter, or a name that is too long
        raise ModelError(f"--model: {shown(name)} cannot be read: {error.strerror}") from error
    if is_file:
        values, beside = read_json(path), path.with_name(QUANTIZATION_FILE)
        is_said_beside = values.get("quantization_config") is None and path.name == CONFIG_FILE
        if is_said_beside and beside.is_file():
            return parse_model(values, str(path), (read_json(beside), str(beside)))
        return parse_model(values, str(path))
    near = difflib.get_close_matches(wanted, KNOWN_MODELS, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(
        f"--model: {name!r} is unknown; {hint}known models: {', '.join(KNOWN_MODELS)}; or give "
        f"the path of a {CONFIG_FILE}"
    )
