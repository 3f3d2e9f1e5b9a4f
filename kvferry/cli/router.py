"""``kvferry router``."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import typer
from rich.table import Table

from kvferry.cli.console import make_console
from kvferry.cluster.answer import TextCodec
from kvferry.cluster.messages import EngineAddress, Role, RouterSettings
from kvferry.cluster.process import listen
from kvferry.cluster.router import Router
from kvferry.cluster.web import serve


def router(
    prefill: Sequence[str],
    decode: Sequence[str],
    tokenizer: Path | None,
    address: tuple[str, int],
    options: dict[str, Any],
) -> None:
    """Serves until Ctrl-C or SIGTERM; ``options`` are fields of ``RouterSettings``.

    Raises:
        KVFerryError: the tokenizer cannot be loaded, or the port is taken.
        typer.BadParameter: a URL is none.
    """
    engines = (*_addresses("prefill", prefill), *_addresses("decode", decode))
    host, port = address
    settings = RouterSettings(
        engines=engines,
        model_folder=str(tokenizer) if tokenizer is not None else None,
        foreign=True,
        host=host,
        port=port,
        **options,
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)  # it would log every health check
    with contextlib.closing(listen(host, port, "router")) as listener:
        codec = TextCodec.open(tokenizer) if tokenizer is not None else None
        app = Router(settings, codec).app()
        console = make_console()
        table = Table("role", "server")
        for engine in engines:
            table.add_row(engine.role, engine.url)
        console.print(table)
        first = "prefill" if codec is not None else "decode (give --tokenizer to have prefill's)"
        console.print(f"first token: from {first}", style="dim")
        port = listener.getsockname()[1]
        console.print(f"OpenAI API at [bold]http://{host}:{port}/v1[/] (Ctrl-C stops it)")

        async def run() -> None:
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
            await serve(app, listener, stop, settings.max_connections)

        asyncio.run(run())


def _addresses(role: Role, urls: Sequence[str]) -> list[EngineAddress]:
    return [_address(role, url) for url in urls]


def _address(role: Role, url: str) -> EngineAddress:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or not url.isprintable():
        raise typer.BadParameter(
            f"{url!r} is no URL of a server; write http://HOST:PORT", param_hint=f"--{role}"
        )
    url = url.rstrip("/").removesuffix("/v1")
    return EngineAddress(name=parts.netloc.rpartition("@")[2], role=role, url=url)
