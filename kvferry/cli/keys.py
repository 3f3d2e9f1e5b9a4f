"""``kvferry keys``."""

import os
import secrets
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kvferry.control.options import make_keys
from kvferry.errors import HostError

CLUSTER_KEY_FILE = "cluster.key"
CURVE_KEYS_FILE = "curve.json"


def keys(
    folder: Annotated[
        Path, typer.Argument(help="Folder for the files; created if missing.")
    ] = Path("kvferry-keys"),
) -> None:
    """Writes the two key files and prints where to name them.

    Raises:
        HostError: a file exists, or cannot be written.
    """
    folder = folder.absolute()  # engines may run in other folders than this command
    curve = msgspec.json.format(msgspec.json.encode(make_keys()), indent=2)
    contents = {
        CLUSTER_KEY_FILE: secrets.token_hex(32).encode() + b"\n",
        CURVE_KEYS_FILE: curve + b"\n",
    }
    for name in contents:
        if (folder / name).exists():
            raise HostError(
                f"{folder / name} exists; delete it first if the cluster is to have new keys"
            )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in contents.items():
            _write_secret(folder / name, content)
    except OSError as error:
        raise HostError(f"{folder}: cannot be written: {error.strerror}") from error
    typer.echo(
        "Copy the files to every machine of the cluster and name them in every engine's "
        "kv_connector_extra_config:\n\n"
        f'  cluster_key_file = "{folder / CLUSTER_KEY_FILE}"\n'
        f'  curve_keys = "{folder / CURVE_KEYS_FILE}"'
    )


def _write_secret(path: Path, content: bytes) -> None:
    """Writes a file that other users could never read."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
