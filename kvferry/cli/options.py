"""Options and arguments of several commands, and functions that read their values."""

import re
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer

from kvferry.config import parse_struct
from kvferry.control.options import CurveKeys
from kvferry.errors import ConfigError
from kvferry.zeromq import split_address

ROUTER_URL = "http://127.0.0.1:8000"
"""URL of the router to ask if none is named."""

ClusterFile = Annotated[
    Path, typer.Argument(metavar="CLUSTER.toml", help="The cluster file.", show_default=False)
]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of the request to plan for.")]
Keys = Annotated[
    Path | None,
    typer.Option(
        help="File of the control channel's CURVE keys, if it has keys.", show_default=False
    ),
]
Timeout = Annotated[float, typer.Option("--timeout", min=0.1, help="Seconds to wait.")]
Device = Annotated[
    Literal["cpu", "cuda"], typer.Option(help="Device of the decode engine's KV cache.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]
Logs = Annotated[
    Path | None,
    typer.Option(help="Folder for one log per process.", show_default="a temporary one"),
]


def _check_key(context: typer.Context, option: typer.CallbackParam, key: str | None) -> str | None:
    """Refuses a key that no client can show, because an HTTP header cannot hold it."""
    if key is None or re.fullmatch("[!-~]([ -~]*[!-~])?", key):
        return key
    source = context.get_parameter_source(option.name or "")
    name = option.opts[0] if source is not None and source.name == "COMMANDLINE" else option.envvar
    raise ConfigError(
        f"{name}: clients show this key in an HTTP header, and no such header can hold this one; "
        "write letters, digits and punctuation of ASCII, without spaces or line breaks at the ends"
    )


ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="KVFERRY_API_KEY",
        callback=_check_key,
        help="Bearer token that clients must send. The router sends it to servers too.",
        show_default=False,
    ),
]
OperatorKey = Annotated[
    str | None,
    typer.Option(
        envvar="KVFERRY_OPERATOR_KEY",
        callback=_check_key,
        help="Bearer token that allows changes to a router's engines.",
        show_default=False,
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="HOST:PORT",
        help="Address of a Ray cluster whose nodes run the engines. This machine is a node.",
        show_default="processes of this machine",
    ),
]


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``[HOST]:PORT`` or ``PORT``.

    Raises:
        ConfigError: the text has none of these forms.
    """
    try:
        return split_address(address if ":" in address else f"127.0.0.1:{address}")
    except ValueError as error:
        raise ConfigError(
            f"{address!r} is not an address; write HOST:PORT, 127.0.0.1:14579 say"
        ) from error


def load_keys(file: Path | None) -> CurveKeys | None:
    """Reads the CURVE keys that ``kvferry keys`` has written.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    if file is None:
        return None
    try:
        values = msgspec.json.decode(file.read_bytes())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{file}: not JSON: {error}") from error
    return parse_struct(CurveKeys, values, str(file))
