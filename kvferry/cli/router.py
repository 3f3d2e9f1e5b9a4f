"""``kvferry router``."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer
from rich.table import Table

from kvferry.cli.console import make_console
from kvferry.cli.status import load_keys
from kvferry.cluster.answer import TextCodec
from kvferry.cluster.lists import engines_behind, engines_in
from kvferry.cluster.messages import EngineAddress, Role, RouterSettings, without_credentials
from kvferry.cluster.process import listen
from kvferry.cluster.router import serve_router
from kvferry.connectors.pull.config import PullConfig


def router(
    servers: tuple[Sequence[str], Sequence[str], Sequence[str]],
    file: Path | None,
    all_addresses: bool,
    tokenizer: Path | None,
    keys: Path | None,
    cluster_key: Path | None,
    address: tuple[str, int],
    options: dict[str, Any],
) -> None:
    """Serves until Ctrl-C or SIGTERM; ``options`` are fields of ``RouterSettings``.

    Args:
        servers: URLs of prefill servers, those of decode servers, and the control channels of
            both, if any.
        file: lists more of them; other ones from time to time.
        all_addresses: whether the names in the URLs stand for all their addresses.
        tokenizer: the model's folder, if completions are to begin with the prefill server's token.
        keys: file of the CURVE keys of the control channels.
        cluster_key: file of the servers' cluster key.
        address: host and port to listen on.
        options: more fields of the settings.

    Raises:
        KVFerryError: a file or the tokenizer cannot be used, or the port is taken.
        typer.BadParameter: a URL is none, the control channels are not those of the servers, or
            an option is given without another one that it needs.
    """
    is_at_once = options["at_once"] != "never"
    key = _key(cluster_key, signs=is_at_once)
    named = _named(*servers)
    if all_addresses and servers[2]:
        raise typer.BadParameter(
            "a name stands for several servers: list them in a file, each with its control",
            param_hint="--control",
        )
    lists = [] if file is None else [engines_in(file)]
    for look in lists:
        asyncio.run(look())  # a mistake is told now, and not in a log
    if all_addresses:
        lists += [engines_behind(engine.role, engine.url) for engine in named]
    host, port = address
    settings = RouterSettings(
        engines=() if all_addresses else tuple(named),
        model_folder=str(tokenizer) if tokenizer is not None else None,
        foreign=True,
        host=host,
        port=port,
        curve=load_keys(keys),
        cluster_key=key,
        **options,
    )
    _set_up_logs(explain=settings.explain)
    with contextlib.closing(listen(host, port, "router")) as listener:
        codec = TextCodec.open(tokenizer) if tokenizer is not None else None
        _tell(named, file, settings, listener.getsockname()[1])

        async def run() -> None:
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
            await serve_router(settings, codec, lists, listener, stop)

        asyncio.run(run())


def _tell(
    named: Sequence[EngineAddress], file: Path | None, settings: RouterSettings, port: int
) -> None:
    """Prints what is served, for whom and where."""
    console = make_console()
    table = Table("role", "server")
    for engine in named:
        table.add_row(engine.role, without_credentials(engine.url))
    if named:
        console.print(table)
    if file is not None:
        console.print(f"more servers: as {file} says", style="dim")
    if not named and file is None:
        console.print("no servers yet: see kvferry router add --help", style="dim")
    if settings.operator_key is None:
        console.print("its servers are fixed: no KVFERRY_OPERATOR_KEY is set", style="dim")
    first = "decode (give --tokenizer to have prefill's in completions)"
    if settings.model_folder is not None:
        first = "prefill in completions, decode in chats of vLLM's servers"
    if settings.at_once != "never":
        first = "decode, where both servers get a prompt at once"
    console.print(f"first token: from {first}", style="dim")
    console.print(f"OpenAI API at [bold]http://{settings.host}:{port}/v1[/] (Ctrl-C stops it)")
    console.print(f"the cluster at http://{settings.host}:{port}/kvferry", style="dim")


def _key(file: Path | None, *, signs: bool) -> bytes | None:
    """The cluster key.

    Raises:
        ConfigError: the file cannot be read, or the key is too short.
        typer.BadParameter: nothing is to be signed with it.
    """
    if file is None:
        return None
    if not signs:
        raise typer.BadParameter(
            "it signs what both servers are sent at once: give --at-once, or leave it out",
            param_hint="--cluster-key-file",
        )
    return PullConfig(cluster_key_file=str(file)).key()


def _set_up_logs(*, explain: bool) -> None:
    if explain:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("kvferry.cluster.choice").setLevel(logging.INFO)


def _named(
    prefill: Sequence[str], decode: Sequence[str], controls: Sequence[str]
) -> list[EngineAddress]:
    """The servers of the command line.

    Raises:
        typer.BadParameter: a URL is none, or the control channels are not those of the servers.
    """
    roles: list[tuple[Role, str]] = [("prefill", url) for url in prefill]
    roles += [("decode", url) for url in decode]
    if controls and len(controls) != len(roles):
        raise typer.BadParameter(
            f"{len(controls)} control channels for {len(roles)} servers: give one for each, those "
            "of --prefill first",
            param_hint="--control",
        )
    return [
        _address(role, url, control)
        for (role, url), control in zip(roles, controls or [""] * len(roles), strict=True)
    ]


def _address(role: Role, url: str, control: str) -> EngineAddress:
    try:
        return EngineAddress.of(role, url, control=control)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"--{role}") from error
