"""The list of commands. Each command is a module, loaded when the command runs."""

import importlib
import signal
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from kvferry import __version__
from kvferry.errors import ConfigError, KVFerryError

ERROR_EXIT_CODE = 2
"""Exit code for a failure outside the command; the message names the failure."""

COMMANDS = {
    "serve": "Start every engine of a cluster file and an OpenAI-compatible router, until Ctrl-C.",
    "engine": "Start one engine of a cluster file on this host. Ctrl-C or SIGTERM drains it.",
    "top": "Show engines, pairs, leases, loads and failures of a router's cluster, until Ctrl-C.",
    "demo": "Serve real prompts with a prefill/decode pair and compare with one undivided engine.",
    "prepare": "Compile the kernels, so that a first start is short. For the build of an image.",
    "plan": "Show which ranks read which layers and heads, the cost, and cheaper shapes. Starts "
    "nothing.",
    "check": "Ask running engines whether, and how, each prefill/decode pair will work. Exit code "
    "1: at least one pair will not.",
    "doctor": "Show what this machine has and lacks, and the transports that it can use. Exit code "
    "1: a default transport is lacking.",
    "bench": "Measure transfers between two hosts, beside the limits. The other host runs --serve.",
    "drain": "Tell whether an engine may be stopped: whether it has no request that loads or lends "
    "KV. Exit code 1: it has.",
    "status": "Show an engine's peers, leases, transfers and last errors.",
    "trace": "Show one request's life over prefill and decode engines. Exit code 1: every engine "
    "answered, and none knows the request.",
    "keys": "Make a cluster key (signs tickets) and CURVE keys (encrypt the control channel).",
    "router": "Route OpenAI requests over running prefill and decode servers (vLLM's), until "
    "Ctrl-C.\n\nThe commands below change the servers of a router that runs.",
}
"""Name of a command, which is also the name of the module → help text."""


def load_command(name: str) -> Any:
    """Loads the module of a command and returns the click command that typer makes of the module.

    The module has a function, or a group of commands, of the same name.

    Raises:
        ConfigError: a package that the command needs is not installed.
    """
    try:
        found = getattr(importlib.import_module(f"kvferry.cli.{name}"), name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{name}: the package {error.name} is not installed; pip install "
            "'kvferry[engine,serve]' has what all commands need"
        ) from error
    if isinstance(found, typer.Typer):
        command: Any = typer.main.get_group(found)
    else:
        alone = typer.Typer(add_completion=False)
        alone.command(name)(found)
        command = typer.main.get_command(alone)
    command.help = COMMANDS[name]
    return command


class _Commands(TyperGroup):
    """Lists the commands without loading their modules, because most import heavy packages."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        return name, load_command(name) if name in COMMANDS else command, rest


app = typer.Typer(
    cls=_Commands,
    help="Move KV-cache blocks between prefill and decode engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _name, _help in COMMANDS.items():
    app.command(_name, help=_help)(lambda: None)  # only shown in the list, never called


def run() -> None:
    """Runs the command line; an expected error gives a single message and exit code 2."""
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
        from kvferry.integrations.releases import engine_lines
        from kvferry.topology.description import PROTOCOL_MAX, PROTOCOL_MIN  # loads numpy

        typer.echo(f"kvferry {__version__}")
        typer.echo(f"control protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}")
        for line in engine_lines():
            typer.echo(line)
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the versions.", callback=_print_version, is_eager=True
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options before the command."""
