"""The commands and their options. What they do lives in a module each, loaded when it runs."""

import enum
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvferry import __version__
from kvferry.errors import ConfigError, KVFerryError

app = typer.Typer(
    help="Move KV-cache blocks between prefill and decode engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

ERROR_EXIT_CODE = 2
"""The exit code when something outside the command went wrong; the message says what."""


class DecodeOnly(enum.StrEnum):
    """What decode servers do while no prefill server is healthy."""

    FALLBACK = "fallback"
    NEVER = "never"


class RouteBy(enum.StrEnum):
    """How a router chooses engines."""

    COST = "cost"
    REQUESTS = "requests"


class AtOnce(enum.StrEnum):
    """Values of ``--at-once``."""

    NEVER = "never"
    AUTO = "auto"
    ALWAYS = "always"


class Role(enum.StrEnum):
    """What an engine does for a router."""

    PREFILL = "prefill"
    DECODE = "decode"


ClusterFile = Annotated[
    Path, typer.Argument(metavar="CLUSTER.toml", help="The cluster file.", show_default=False)
]
Tokens = Annotated[int, typer.Option(min=1, help="Tokens of the request to plan for.")]
Keys = Annotated[
    Path | None,
    typer.Option(help="File of CURVE keys, where the channel has some.", show_default=False),
]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds to wait.")]
Device = Annotated[
    str, typer.Option(metavar="NAME", help="Where the decode engine's KV cache lies: cuda say.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON for other programs.")]


def run() -> None:
    """Runs the command line; an expected error is one message and exit code 2."""
    try:
        app()
    except KVFerryError as error:
        if "--debug" in sys.argv:
            raise
        notes = getattr(error, "__notes__", ())
        text = Text.assemble(("kvferry: ", "bold red"), "\n  ".join([str(error), *notes]))
        Console(stderr=True, soft_wrap=True, highlight=False).print(text)
        sys.exit(ERROR_EXIT_CODE)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kvferry {__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options before the command."""


Logs = Annotated[
    Path | None,
    typer.Option(help="Folder for one log per process.", show_default="a temporary one"),
]
ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="KVFERRY_API_KEY",
        help="Bearer token that clients must show, and servers are shown.",
        show_default=False,
    ),
]
OperatorKey = Annotated[
    str | None,
    typer.Option(
        envvar="KVFERRY_OPERATOR_KEY",
        help="Bearer token of who may change a router's engines.",
        show_default=False,
    ),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="HOST:PORT",
        help="A Ray cluster whose nodes run the engines; this machine is one of them.",
        show_default="processes of this machine",
    ),
]


@app.command()
def serve(
    file: ClusterFile,
    logs: Logs = None,
    api_key: ApiKey = None,
    operator_key: OperatorKey = None,
    ray: RayAddress = None,
) -> None:
    """Start every engine of a cluster file and an OpenAI-compatible router, until Ctrl-C."""
    from kvferry.cli.serve import serve as command

    command(file, logs, api_key, operator_key, ray)


@app.command()
def engine(
    file: ClusterFile,
    name: Annotated[str, typer.Argument(help="The engine's name in the file.", show_default=False)],
    router: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A router to enter it at; repeat it.", show_default=False),
    ] = None,
    logs: Logs = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0.0, help="Seconds that Ctrl-C or SIGTERM leave it to drain.")
    ] = 60.0,
    api_key: ApiKey = None,
    operator_key: OperatorKey = None,
) -> None:
    """Start one engine of a cluster file on this host. On Ctrl-C or SIGTERM it drains."""
    from kvferry.cli.engine import engine as command

    command(file, name, router or [], logs, drain_timeout, api_key, operator_key)


routers = typer.Typer(no_args_is_help=False)
app.add_typer(routers, name="router")

RouterUrl = Annotated[
    str, typer.Option("--router", metavar="URL", envvar="KVFERRY_ROUTER", help="The router.")
]
EngineRole = Annotated[Role, typer.Argument(help="What the engine does for this router.")]
EngineName = Annotated[
    str, typer.Argument(help="Its name, as `kvferry router list` shows it.", show_default=False)
]
ROUTER_URL = "http://127.0.0.1:8000"


@routers.callback(invoke_without_command=True)
def router(
    context: typer.Context,
    prefill: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A prefill server; repeat it.", show_default=False),
    ] = None,
    decode: Annotated[
        list[str] | None,
        typer.Option(metavar="URL", help="A decode server; repeat it.", show_default=False),
    ] = None,
    engines: Annotated[
        Path | None,
        typer.Option(
            metavar="ENGINES.toml",
            help="File of servers: arrays prefill and decode of tables with a url each. Whoever "
            "is taken out of it while the router runs is drained.",
            show_default=False,
        ),
    ] = None,
    all_addresses: Annotated[
        bool,
        typer.Option(
            "--all-addresses",
            help="The names in --prefill and --decode stand for all their addresses, and are "
            "looked up again and again.",
        ),
    ] = False,
    control: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The control channel (kv_port) of each server, those of --prefill first, then "
            "those of --decode, in their order: for people who look at the cluster, and for "
            "--at-once.",
            show_default=False,
        ),
    ] = None,
    keys: Keys = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="The model's folder: its tokenizer lets the prefill server's first token of a "
            "completion through at once. Without it, and in chats of vLLM's servers, decode "
            "servers draw every token.",
            show_default=False,
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, help="Port; 0 takes a free one.")] = 8000,
    api_key: ApiKey = None,
    operator_key: OperatorKey = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for a whole answer.")] = 600.0,
    outstanding_timeout: Annotated[
        float,
        typer.Option(
            min=0.1,
            help="Seconds that a request waits for an unhealthy server before another gets it.",
        ),
    ] = 5.0,
    decode_only: Annotated[
        DecodeOnly, typer.Option(help="Whether decode servers compute while no prefill server can.")
    ] = DecodeOnly.FALLBACK,
    route_by: Annotated[
        RouteBy,
        typer.Option(
            help="How servers are chosen: by what a prompt costs there, where they publish KV "
            "cache events; or always by the requests under way."
        ),
    ] = RouteBy.COST,
    assume_cached: Annotated[
        bool,
        typer.Option(
            "--assume-cached",
            help="Take servers that publish no KV cache events to have what they were sent last.",
        ),
    ] = False,
    direct_tokens: Annotated[
        int,
        typer.Option(
            min=0,
            help="Tokens that a decode server computes at most of a prompt that it has the "
            "beginning of, where that costs less; 0 for never.",
        ),
    ] = 512,
    at_once: Annotated[
        AtOnce,
        typer.Option(
            help="Send a prompt to a prefill and a decode server at the same time, where --control "
            "names the channels of both; auto: where that is expected to pay.",
        ),
    ] = AtOnce.NEVER,
    cluster_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The servers' cluster key, which signs what both are sent with --at-once.",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Say of each request why its servers were chosen, here and in answers.",
        ),
    ] = False,
    workers: Annotated[
        int,
        typer.Option(
            min=1,
            max=64,
            help="Processes that serve requests; several share what they know of the servers, and "
            "one more watches these.",
        ),
    ] = 1,
) -> None:
    """Route OpenAI requests over running prefill and decode servers (vLLM's), until Ctrl-C.

    The commands below change the servers of a router that runs.
    """
    if context.invoked_subcommand is not None:
        return
    from kvferry.cli.router import router as command

    servers = (prefill or [], decode or [], control or [])
    options = {
        "api_key": api_key,
        "operator_key": operator_key,
        "request_timeout_s": timeout,
        "outstanding_timeout_s": outstanding_timeout,
        "decode_only": decode_only.value,
        "route_by": route_by.value,
        "assume_cached": assume_cached,
        "direct_tokens": direct_tokens,
        "at_once": at_once.value,
        "explain": explain,
        "workers": workers,
    }
    address = (host, port)
    command(servers, engines, all_addresses, tokenizer, keys, cluster_key_file, address, options)


@routers.command("list")
def list_engines(
    router: RouterUrl = ROUTER_URL, operator_key: OperatorKey = None, as_json: AsJson = False
) -> None:
    """Show the engines of a router."""
    from kvferry.cli.members import list_engines as command

    command(router, operator_key, as_json)


@routers.command()
def add(
    role: EngineRole,
    url: Annotated[str, typer.Argument(metavar="URL", help="Where it serves.", show_default=False)],
    name: Annotated[
        str, typer.Option(help="How people know it.", show_default="the URL's host:port")
    ] = "",
    control: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT",
            help="Its control channel (kv_port), for people who look at the cluster and for a "
            "router with --at-once; an engine of kvferry tells it itself.",
            show_default=False,
        ),
    ] = "",
    kv_events: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT",
            help="Where it publishes its KV cache events, tcp://host:port; an engine of kvferry "
            "tells it itself.",
            show_default=False,
        ),
    ] = "",
    kv_events_replay: Annotated[
        str,
        typer.Option(
            metavar="ENDPOINT", help="Where it replays those that were missed.", show_default=False
        ),
    ] = "",
    router: RouterUrl = ROUTER_URL,
    operator_key: OperatorKey = None,
) -> None:
    """Enter an engine, or take one back that drains here."""
    from kvferry.cli.members import add as command

    events = (kv_events, kv_events_replay)
    command(role.value, url, name, control, events, router, operator_key)


@routers.command()
def remove(
    role: EngineRole,
    name: EngineName,
    router: RouterUrl = ROUTER_URL,
    operator_key: OperatorKey = None,
) -> None:
    """Forget an engine at once; what it works on goes on."""
    from kvferry.cli.members import remove as command

    command(role.value, name, router, operator_key)


@routers.command()
def drain(
    role: EngineRole,
    name: EngineName,
    router: RouterUrl = ROUTER_URL,
    operator_key: OperatorKey = None,
    timeout: Annotated[float, typer.Option(min=0.0, help="Seconds to wait until it is.")] = 600.0,
) -> None:
    """Give an engine nothing new, and wait until nobody needs it; then it can be stopped."""
    from kvferry.cli.members import drain as command

    command(role.value, name, router, operator_key, timeout)


@app.command()
def top(
    router: Annotated[
        str, typer.Argument(metavar="ROUTER", envvar="KVFERRY_ROUTER", help="The router's URL.")
    ] = ROUTER_URL,
    once: Annotated[bool, typer.Option("--once", help="Show it once, for scripts.")] = False,
    api_key: ApiKey = None,
    as_json: Annotated[bool, typer.Option("--json", help="Likewise, as JSON.")] = False,
) -> None:
    """Show engines, pairs, leases, loads and failures of a router's cluster, until Ctrl-C."""
    from kvferry.cli.top import top as command

    command(router, api_key, once, as_json)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the results.")] = Path(
        "demo-out"
    ),
    transport: Annotated[
        str, typer.Option(help="What moves the KV: shm or tcp, or another one installed.")
    ] = "shm",
    prompts: Annotated[
        Path | None,
        typer.Option(help="JSON list of prompts to send.", show_default="the ones that ship"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer in tokens.")] = 40,
    model: Annotated[str, typer.Option(help="Model to serve.")] = "smollm2",
    ray: RayAddress = None,
) -> None:
    """Serve real prompts with a prefill/decode pair and compare with one undivided engine."""
    from kvferry.cli.demo import demo as command

    command(out, transport, prompts, max_tokens, model, ray)


@app.command()
def prepare(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CLUSTER.toml]", help="Convert the model of this cluster.", show_default=False
        ),
    ] = None,
) -> None:
    """Do what takes long at a first start: compile the kernels. For the build of an image."""
    from kvferry.cli.prepare import prepare as command

    command(file)


@app.command()
def plan(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[CLUSTER.toml]", help="The cluster file.", show_default=False),
    ] = None,
    prefill: Annotated[
        str | None,
        typer.Option(
            metavar="SPEC",
            help="Instead of a file: the prefill engine, tp=8,pp=2,block=16,layout=HND say.",
            show_default=False,
        ),
    ] = None,
    decode: Annotated[
        str | None,
        typer.Option(metavar="SPEC", help="Likewise the decode engine.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Likewise the model: a name, or a config.json.", show_default=False
        ),
    ] = None,
    tokens: Tokens = 2048,
    as_json: AsJson = False,
    picture: Annotated[
        Path | None,
        typer.Option(metavar="PLAN.svg", help="Draw the plan as well.", show_default=False),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Show the way of the cells over this transport alone.",
            show_default="all that are installed",
        ),
    ] = None,
    device: Device = "cpu",
) -> None:
    """Show who reads what from whom, what it costs, and what would be cheaper. Starts nothing."""
    from kvferry.cli.plan import plan as command

    given = {"--prefill": prefill, "--decode": decode, "--model": model}
    specs = {option: value for option, value in given.items() if value is not None}
    command(file, specs, tokens, as_json, picture, transport, device)


@app.command()
def check(
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST:PORT...",
            help="Control channels (kv_port) of two or more engines.",
            show_default=False,
        ),
    ],
    seen_from: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="HOST:PORT",
            help="One more engine: tell only how this one loads from the others.",
            show_default=False,
        ),
    ] = None,
    keys: Keys = None,
    timeout: Timeout = 5.0,
    tokens: Tokens = 2048,
    device: Device = "cpu",
    as_json: AsJson = False,
) -> None:
    """Ask running engines whether, and how, each prefill/decode pair will work. Exit code 1: no."""
    from kvferry.cli.check import check as command

    command(addresses, keys, timeout, tokens, device, as_json, seen_from)


@app.command()
def bench(
    context: typer.Context,
    address: Annotated[
        str | None,
        typer.Argument(
            metavar="[HOST:PORT]", help="Where the other side serves.", show_default=False
        ),
    ] = None,
    serve: Annotated[
        bool, typer.Option("--serve", help="Be the other side, until Ctrl-C.")
    ] = False,
    host: Annotated[str, typer.Option(help="With --serve: address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --serve: port; 0 takes a free one.")
    ] = 14600,
    insecure: Annotated[
        bool,
        typer.Option("--insecure", help="With --serve: listen beyond this machine without --keys."),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME", help="With --serve: whose KV cache: a name, or a config.json."
        ),
    ] = "llama-3-8b",
    tokens: Annotated[int, typer.Option(min=1, help="With --serve: tokens to move.")] = 2048,
    block: Annotated[int, typer.Option(min=1, help="With --serve: tokens per block.")] = 16,
    transport: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --serve: serve by this one; repeat it.",
            show_default="shm, vm, tcp and nixl, where installed",
        ),
    ] = None,
    keys: Keys = None,
    threads: Annotated[
        int, typer.Option(min=1, max=32, help="Threads of each transport on this side.")
    ] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each times everything once.")] = 5,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Measure what moves between two hosts, beside the limits: --serve there, HOST:PORT here."""
    from kvferry.cli.bench import bench as measure
    from kvferry.cli.bench_server import serve as serve_blocks

    theirs = (
        ("rounds", "timeout", "as_json")
        if serve
        else ("host", "port", "insecure", "model", "tokens", "block", "transport")
    )
    for name in theirs:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            option = "--json" if name == "as_json" else f"--{name}"
            side = "kvferry bench HOST:PORT" if serve else "kvferry bench --serve"
            raise ConfigError(f"{option}: belongs to the other side; give it to `{side}`")
    if serve == (address is not None):
        raise ConfigError(
            f"--serve and HOST:PORT: {'both' if serve else 'neither'} given; write "
            "`kvferry bench --serve` on one host and `kvferry bench HOST:PORT` on the other"
        )
    if address is not None:
        measure(address, keys, timeout, rounds, threads, as_json)
        return
    serve_blocks((host, port), keys, insecure, model, tokens, block, transport, threads)


@app.command()
def status(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="An engine's control channel (kv_port).", show_default=False
        ),
    ],
    keys: Keys = None,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Show an engine's peers, leases, transfers and last errors."""
    from kvferry.cli.status import status as command

    command(address, keys, timeout, as_json)


@app.command()
def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="As an answer's header x-request-id or a log names it.",
            show_default=False,
        ),
    ],
    addresses: Annotated[
        list[str],
        typer.Argument(
            metavar="HOST:PORT...",
            help="Control channels (kv_port) of the engines to ask.",
            show_default=False,
        ),
    ],
    keys: Keys = None,
    timeout: Timeout = 5.0,
    as_json: AsJson = False,
) -> None:
    """Show one request's life over prefill and decode engines. Exit code 1: none knows it."""
    from kvferry.cli.trace import trace as command

    command(request_id, addresses, keys, timeout, as_json)


@app.command()
def keys(
    folder: Annotated[
        Path, typer.Argument(help="Folder that gets the files; made if missing.")
    ] = Path("kvferry-keys"),
) -> None:
    """Make a cluster key (signs tickets) and CURVE keys (encrypt the control channel)."""
    from kvferry.cli.keys import keys as command

    command(folder)
