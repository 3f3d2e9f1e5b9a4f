"""``kvferry prepare``."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kvferry.cli.console import PartProgress, make_console
from kvferry.config import load_cluster
from kvferry.errors import HostError
from kvferry.layouts import compiled, copier, digest, postprocess
from kvferry.transports import tcp_kernels, vm


def prepare(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CLUSTER.toml]",
            help="Also convert the model of this cluster file.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Compiles the kernels, and converts the model of a cluster file.

    Raises:
        ConfigError, ModelError: the cluster file or its model cannot be used.
        HostError: the compiled kernels or the converted model cannot be kept.
    """
    if file is not None:
        from kvferry.cluster.preflight import convert  # loads torch

        with PartProgress(make_console()) as progress:
            convert(load_cluster(file).model, partial(progress, "model"))
    begun = time.monotonic()
    copier.warm()
    digest.warm()
    postprocess.warm()
    tcp_kernels.warm(encrypted=True)
    vm.warm()
    if not compiled.is_kept():
        raise HostError("compiled kernels cannot be kept: see the warning above")
    typer.echo(f"the kernels are compiled: {time.monotonic() - begun:.1f} s")
