"""``kvferry plan``."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console

from kvferry.cache.cache_shape import LayerHeads
from kvferry.cli.console import PartProgress, make_console, print_json
from kvferry.cli.options import AsJson, Device, Tokens
from kvferry.cli.rank_map import load_transports, show_explained
from kvferry.cli.specs import find_model, parse_spec
from kvferry.cluster.preflight import model_shape
from kvferry.config import ClusterConfig, load_cluster
from kvferry.engine.builder import engine_cache
from kvferry.engine.model_config import DecoderConfig
from kvferry.errors import ConfigError, HostError
from kvferry.explain.models import ModelInfo
from kvferry.explain.pairs import PlannedEngine, explain_pair, pair_as_json
from kvferry.explain.picture import check_drawable, draw_pairs
from kvferry.explain.sentences import heads_text
from kvferry.plugins import TRANSPORTS, installed_plugins
from kvferry.topology import GroupGeometry
from kvferry.transports.base import Transport
from kvferry.transports.registry import transport_class

Engines: TypeAlias = tuple[ModelInfo, list[PlannedEngine], list[PlannedEngine]]
"""A model, the model's prefill engines, and the model's decode engines."""


def plan(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[CLUSTER.toml]", help="The cluster file.", show_default=False),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Instead of a file: the prefill engine, such as tp=8,pp=2,block=16,layout=HND.",
            show_default=False,
        ),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC", help="Instead of a file: the decode engine.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Instead of a file: a model's name, or a config.json.",
            show_default=False,
        ),
    ] = None,
    tokens: Tokens = 2048,
    as_json: AsJson = False,
    picture: Annotated[
        Path | None,
        typer.Option(
            metavar="PLAN.svg", help="Also draw the plan into this file.", show_default=False
        ),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show the path of the cells over this transport only.",
            show_default="all that are installed",
        ),
    ] = None,
    device: Device = "cpu",
) -> None:
    """Prints, and draws, which rank reads which cells from which rank.

    Raises:
        ConfigError: the options, the cluster file or a spec cannot be used.
        PluginError: a transport is neither known nor installed.
        ModelError: the model's files cannot be read.
        HostError: the picture cannot be written.
    """
    given = {"--prefill": prefill, "--decode": decode, "--model": model}
    specs = {option: value for option, value in given.items() if value is not None}
    transports = _transports(transport)
    info, sources, targets = _from_specs(specs) if file is None else _from_cluster(file, specs)
    if picture is not None:
        check_drawable([*sources, *targets])
    try:
        pairs = [
            explain_pair(source, target, tokens, transports, device)
            for source in sources
            for target in targets
        ]
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if picture is not None:
        drawing = draw_pairs(pairs, info)
        try:
            picture.write_text(drawing, encoding="utf-8")
        except OSError as error:
            raise HostError(f"{picture}: cannot be written: {error.strerror}") from error
    if as_json:
        described = [pair_as_json(pair) for pair in pairs]
        print_json({"tokens": tokens, "model": _model_as_json(info), "pairs": described})
        return
    console = make_console()
    console.print(model_text(info), highlight=False, markup=False, soft_wrap=True)
    for number, pair in enumerate(pairs):
        if number:
            console.print()
        show_explained(pair, console)
    if picture is not None:
        console.print(f"picture: {picture}", markup=False, soft_wrap=True)


def cluster_engines(
    cluster: ClusterConfig, model: DecoderConfig
) -> tuple[list[PlannedEngine], list[PlannedEngine]]:
    """The prefill engines and the decode engines of a cluster file.

    Raises:
        ConfigError: an engine's shape does not fit the model.
    """
    prefill, decode = (
        [
            PlannedEngine(
                engine.name,
                engine_cache(engine, model, cluster.model.dtype)[1],
                engine.transfer_config().engine_id,
            )
            for engine in engines
        ]
        for engines in (cluster.prefill, cluster.decode)
    )
    return prefill, decode


def model_text(model: ModelInfo) -> str:
    """Description of a model in one line."""
    layers, heads = model.shape.layers, model.shape.layers_by_heads()
    counts = {
        "with a window": len(model.shape.layer_windows),
        "in chunks": sum(
            isinstance(cache, LayerHeads) and cache.attention_chunk_size is not None
            for cache in layers
        ),
        "recurrent": sum(isinstance(cache, tuple) for cache in layers),
        "without a cache of their own": layers.count(None),
    }
    kinds = "".join(f", {count} of them {what}" for what, count in counts.items() if count)
    cells = " and ".join(
        f"{_cells_text(one)}{f' in {len(those)} of them' * (len(heads) > 1)}"
        for one, those in heads.items()
    )
    return f"{model.name}: {len(layers)} layers{kinds}, {cells} (from {model.source})"


def _cells_text(heads: LayerHeads) -> str:
    return heads_text(heads.num_kv_heads, heads.head_size, heads.head_size_v, heads.use_mla)


def _transports(name: str | None) -> list[type[Transport]]:
    """A single transport, or all installed transports; reports transports that do not load.

    Raises:
        PluginError: the named transport is unknown or does not load.
    """
    if name is not None:
        return [transport_class(name)]
    return load_transports(installed_plugins(TRANSPORTS))


def _from_cluster(file: Path, specs: Mapping[str, str]) -> Engines:
    if specs:
        raise ConfigError(
            f"{file}: a cluster file names its engines and its model; leave out --prefill, "
            "--decode and --model, or leave out the file"
        )
    cluster = load_cluster(file)
    with PartProgress(Console(stderr=True)) as progress:
        model = model_shape(cluster.model, partial(progress, "model"))
    prefill, decode = cluster_engines(cluster, model)
    source = cluster.model.source
    info = ModelInfo(Path(source).name, source, model.cache_shape, cluster.model.dtype)
    return info, prefill, decode


def _from_specs(specs: Mapping[str, str]) -> Engines:
    if not specs:
        raise ConfigError(
            "nothing to plan: give a CLUSTER.toml, or --prefill, --decode and --model, as in "
            "--prefill tp=8,layout=HND --decode tp=2 --model llama-3-70b"
        )
    missing = [name for name in ("--prefill", "--decode", "--model") if name not in specs]
    if missing:
        raise ConfigError(f"{', '.join(missing)} missing; without a file all three are needed")
    model = find_model(specs["--model"])
    prefill, decode = (
        PlannedEngine(role, _geometries(specs[f"--{role}"], f"--{role}", model), role)
        for role in ("prefill", "decode")
    )
    return model, [prefill], [decode]


def _geometries(spec: str, where: str, model: ModelInfo) -> tuple[GroupGeometry, ...]:
    engine = parse_spec(spec, where)
    try:
        return engine.geometries(model.shape, model.dtype)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _model_as_json(model: ModelInfo) -> dict[str, Any]:
    shape = model.shape
    return {
        "name": model.name,
        "source": model.source,
        "num_layers": len(shape.layers),
        "heads": [
            {
                "layers": layers,
                **{key: getattr(heads, key) for key in ("num_kv_heads", "head_size", "use_mla")},
                "head_size_v": heads.head_size_v or heads.head_size,
            }
            for heads, layers in shape.layers_by_heads().items()
        ],
        "layer_windows": {str(layer): window for layer, window in shape.layer_windows.items()},
        "recurrent_layers": [n for n, cache in enumerate(shape.layers) if isinstance(cache, tuple)],
        "layers_without_cache": [n for n, cache in enumerate(shape.layers) if cache is None],
        "dtype": model.dtype,
    }
