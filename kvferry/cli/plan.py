"""``kvferry plan``."""

from functools import partial
from pathlib import Path

import msgspec
import typer
from rich.console import Console

from kvferry.cli.console import PartProgress, make_console
from kvferry.cli.rank_map import as_json as pairs_as_json
from kvferry.cli.rank_map import engine_pairs, show_pair
from kvferry.cluster.model_shape import model_shape
from kvferry.config import load_cluster


def plan(file: Path, tokens: int, as_json: bool) -> None:
    """Prints who reads what from whom in the cluster of ``file``.

    Raises:
        ConfigError: the cluster file cannot be used.
        ModelError: the model's files cannot be read.
    """
    cluster = load_cluster(file)
    with PartProgress(Console(stderr=True)) as progress:
        model = model_shape(cluster.model, partial(progress, "model"))
    pairs = engine_pairs(cluster, model, tokens)
    if as_json:
        document = msgspec.json.encode(pairs_as_json(pairs, tokens))
        typer.echo(msgspec.json.format(document, indent=2).decode())
        return
    console = make_console()
    for pair in pairs:
        show_pair(pair, tokens, console)
