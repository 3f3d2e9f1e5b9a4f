"""``kvferry router``."""

import asyncio
import contextlib
import logging
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from kvferry.cli import members
from kvferry.cli.console import make_console
from kvferry.cli.options import ApiKey, Keys, OperatorKey, load_keys
from kvferry.config import AtOnce, DecodeOnly, RouteBy
from kvferry.config.cluster import HOST_REMEDY
from kvferry.connectors.pull.config import PullConfig
from kvferry.errors import ConfigError
from kvferry.router.answer import TextCodec
from kvferry.router.draining import Drain
from kvferry.router.lists import engines_behind, engines_in
from kvferry.router.router import serve_router
from kvferry.serving.messages import EngineAddress, Role, RouterSettings, Tls, without_credentials
from kvferry.serving.process import listen
from kvferry.serving.web import MAX_CONNECTIONS, MAX_REQUEST_BYTES, SHUTDOWN_GRACE_S

router = typer.Typer(no_args_is_help=False)
router.command("list")(members.list_engines)
router.command()(members.add)
router.command()(members.remove)
router.command()(members.drain)


@router.callback(invoke_without_command=True)
def route(
    context: typer.Context,
    prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="URL of a prefill server. May be repeated.", show_default=False
        ),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="URL of a decode server. May be repeated.", show_default=False
        ),
    ] = None,
    engines: Annotated[
        Path | None,
        typer.Option(
            metavar="ENGINES.toml",
            help="File of servers: the arrays prefill and decode, whose tables have a url each. "
            "The router reads changes while it runs, and drains a server that was removed.",
            show_default=False,
        ),
    ] = None,
    all_addresses: Annotated[
        bool,
        typer.Option(
            "--all-addresses",
            help="Each name in --prefill and --decode stands for all its addresses. The router "
            "looks the names up every few seconds.",
        ),
    ] = False,
    control: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Control channel (kv_port) of each server, in the order of --prefill and then of "
            "--decode. Needed for the router's page and for --at-once.",
            show_default=False,
        ),
    ] = None,
    keys: Keys = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The model's folder. With its tokenizer, the client gets the first token of a "
            "completion from the prefill server. Without it, and in chats of vLLM's servers, "
            "decode servers sample every token.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, help="Port to listen on; 0 takes a free port.")
    ] = 8000,
    api_key: ApiKey = None,
    operator_key: OperatorKey = None,
    timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds until the first event with content of a stream, or until the end of any "
            "other answer.",
        ),
    ] = 600.0,
    idle_timeout: Annotated[
        float,
        typer.Option(min=0.1, help="Seconds between two events of a stream that has begun."),
    ] = 300.0,
    outstanding_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds that a request waits for an unhealthy server before it is retried on "
            "another server.",
        ),
    ] = 5.0,
    tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File (PEM) of the authorities that certify https servers, in place of the "
            "system's authorities.",
            show_default=False,
        ),
    ] = None,
    tls_server_name: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Name that the certificate of each https server must have, in place of the host "
            "of its URL.",
            show_default=False,
        ),
    ] = "",
    tls_no_check: Annotated[
        bool, typer.Option("--tls-no-check", help="Do not check certificates of https servers.")
    ] = False,
    drain_timeout: Annotated[
        float,
        typer.Option(
            min=0,
            help="Seconds for which running requests go on after SIGTERM. The router goes on "
            "listening, and refuses new requests. A second signal ends it at once.",
        ),
    ] = 60.0,
    decode_only: Annotated[
        DecodeOnly,
        typer.Option(help="Whether decode servers compute prompts while no prefill server can."),
    ] = "fallback",
    route_by: Annotated[
        RouteBy,
        typer.Option(
            help="How servers are chosen: by the cost of the prompt at servers that publish KV "
            "cache events, or always by the number of running requests."
        ),
    ] = "cost",
    assume_cached: Annotated[
        bool,
        typer.Option(
            "--assume-cached",
            help="Assume that a server without KV cache events still has the prompts that it was "
            "sent last.",
        ),
    ] = False,
    direct_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Largest number of tokens that a decode server computes itself when it has the "
            "beginning of the prompt and this costs less; 0: never.",
        ),
    ] = 512,
    at_once: Annotated[
        AtOnce,
        typer.Option(
            help="Send a prompt to a prefill and a decode server at the same time. Needs --control "
            "for both. auto: when it is expected to be faster.",
        ),
    ] = "never",
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="File of the servers' cluster key. It signs what both servers of a pair are sent "
            "at the same time: with --at-once, and before pairs with an SGLang server.",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Log why the servers of each request were chosen, and add the reason to answers.",
        ),
    ] = False,
    max_connections: Annotated[
        int,
        typer.Option(
            min=8,
            help="Connections of clients that have a request at a time, for each worker. A further "
            "request gets a 503.",
        ),
    ] = MAX_CONNECTIONS,
    max_request_bytes: Annotated[
        int, typer.Option(min=1, help="Bytes in the body of a request. A longer body gets a 413.")
    ] = MAX_REQUEST_BYTES,
    max_requests_per_server: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests at a server at a time. Further requests wait in a queue, by "
            "X-Vllm-Priority and then in the order in which they came. None: no limit.",
            show_default=False,
        ),
    ] = None,
    max_queued_requests: Annotated[
        int, typer.Option(min=0, help="Requests in the queue. A further request gets a 429.")
    ] = 1000,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Number of processes that serve requests. Several processes share the state of "
            "the servers, which one more process watches.",
        ),
    ] = 1,
) -> None:
    """Serves until Ctrl-C or SIGTERM, unless the user gives a command of the group.

    Raises:
        KVFerryError: a file or the tokenizer cannot be used, the port is taken, or the router could
            never have a server.
        typer.BadParameter: a URL is malformed, the control channels do not match the servers, or
            an option lacks another option that it needs.
    """
    if context.invoked_subcommand is not None:
        return
    if tls_no_check and (tls_ca or tls_server_name):
        raise typer.BadParameter(
            "no certificate is checked, so leave out --tls-ca and --tls-server-name",
            param_hint="--tls-no-check",
        )
    if not host:
        raise typer.BadParameter(f"'' is no address; {HOST_REMEDY}", param_hint="--host")
    tls = Tls(ca=str(tls_ca or ""), server_name=tls_server_name, checks=not tls_no_check)
    tls.context()  # a mistake shows now
    key = _key(cluster_key_file)
    named = _named(prefill or [], decode or [], control or [])
    if all_addresses and control:
        raise typer.BadParameter(
            "a name stands for several servers: list them in a file, each with its control",
            param_hint="--control",
        )
    if not named and engines is None and operator_key is None:
        raise ConfigError(
            "the router has no server, and can never get one: give --prefill and --decode, or "
            "--engines with a file of servers, or set KVFERRY_OPERATOR_KEY, so that "
            "`kvferry router add` and `kvferry engine` can add servers"
        )
    lists = [] if engines is None else [engines_in(engines)]
    for look in lists:
        asyncio.run(look())  # a mistake shows now, not later in a log
    if all_addresses:
        lists += [engines_behind(engine.role, engine.url) for engine in named]
    settings = RouterSettings(
        engines=() if all_addresses else tuple(named),
        model_folder=str(tokenizer) if tokenizer is not None else None,
        foreign=True,
        host=host,
        port=port,
        curve=load_keys(keys),
        cluster_key=key,
        tls=tls,
        api_key=api_key,
        operator_key=operator_key,
        request_timeout_s=timeout,
        idle_timeout_s=idle_timeout,
        outstanding_timeout_s=outstanding_timeout,
        decode_only=decode_only,
        route_by=route_by,
        assume_cached=assume_cached,
        direct_tokens=direct_tokens,
        at_once=at_once,
        explain=explain,
        workers=workers,
        drain_timeout_s=drain_timeout,
        max_connections=max_connections,
        max_request_bytes=max_request_bytes,
        max_requests_per_server=max_requests_per_server,
        max_queued_requests=max_queued_requests,
    )
    _set_up_logs(explain=explain)
    with contextlib.closing(listen(host, port, "router")) as listener:
        codec = TextCodec.open(tokenizer) if tokenizer is not None else None
        _tell(named, engines, settings, listener.getsockname()[1])

        async def run() -> None:
            drain, loop = Drain(), asyncio.get_running_loop()
            loop.add_signal_handler(signal.SIGINT, drain.signalled, SHUTDOWN_GRACE_S)
            await serve_router(settings, codec, lists, listener, drain)

        asyncio.run(run())


def _tell(
    named: Sequence[EngineAddress], file: Path | None, settings: RouterSettings, port: int
) -> None:
    """Prints the servers and the addresses of the router."""
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


def _key(file: Path | None) -> bytes | None:
    """The cluster key; ``None`` without a file.

    Raises:
        ConfigError: the file cannot be read, or the key is too short.
    """
    return None if file is None else PullConfig(cluster_key_file=str(file)).key()


def _set_up_logs(*, explain: bool) -> None:
    if explain:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("kvferry.router.choice").setLevel(logging.INFO)


def _named(
    prefill: Sequence[str], decode: Sequence[str], controls: Sequence[str]
) -> list[EngineAddress]:
    """The servers of the command line.

    Raises:
        typer.BadParameter: a URL is malformed, or the control channels do not match the servers.
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
