"""Reference pages made from the code: the commands, and the public names for Python.

``python -m tests.reference_pages`` writes both pages; a test compares them with the code.
"""

import ast
import functools
import importlib
import inspect
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import kvferry
from kvferry.cli.app import COMMANDS, app, load_command
from tests.pages import ROOT

PACKAGES = {
    "kvferry.connectors": "Connectors: the two halves, their messages and the output aggregator.",
    "kvferry.transports": "Transports: the base classes, and how a transport is opened by name.",
    "kvferry.testing": "Conformance suites, fake engines, and transports with faults.",
    "kvferry.config": "Configuration: `kv_transfer_config` and the cluster file.",
    "kvferry.topology": "Plans: the cells that a rank holds, and who reads them from whom.",
    "kvferry.layouts": "Layouts of a KV cache, copies and postprocessing.",
    "kvferry.cache": "The cache core: specs of layers, block pool, prefix cache.",
    "kvferry.explain": "What a transfer costs, and which change would make it cheaper.",
}
"""Package → its subject. These packages have an ``__all__`` with the names that plugins may use."""


ROLE = re.compile(r":[a-z]+:`~?(?:\w+\.)*(\w+)`")
"""A reference of Sphinx to a name, such as ``:class:`~kvferry.cache.BlockPool```."""

COMMANDS_HEAD = """# Commands

This page lists every command of `kvferry` with its arguments and options; [the router's
commands](router-commands.md) have a page of their own. The texts are those of `--help`. The page is
made from the code by `python -m tests.reference_pages`.

Every command ends with exit code 2 if something outside the command failed. The message names the
cause. [Exit codes](../operate/start.md#exit-codes-and-upgrades) has the other codes. Some commands
need [an extra](../operate/install.md#from-a-release).

These options stand before the command:"""

ROUTER_HEAD = """# The router's commands

This page lists `kvferry router` and the commands below it, with their arguments and options. The
texts are those of `--help`. The page is made from the code by `python -m tests.reference_pages`.
[Commands](commands.md) has all other commands."""

PYTHON_HEAD = """# Python names

This page is for authors of plugins and tools. It lists the public names of kvferry, each with the
first sentence of its docstring. `help()` shows the whole docstring. The [errors](errors.md) of
`kvferry.errors` are public too. The pages for authors name a few more modules, such as
`kvferry.plugins` and `kvferry.layouts.copier`. These may change in a minor release before 1.0, and
the [changelog](../../CHANGELOG.md) says so. All other names may change without notice. The page is
made from the code by `python -m tests.reference_pages`."""


TYPES = re.compile(r" <(?:str|path|int range|float range|list\[str\])>")
"""Types that typer shows behind an option, and that a reader knows from the text."""


def command_page() -> str:
    """The page of all commands with their arguments and options."""
    top = typer.main.get_command(app)
    parts = [COMMANDS_HEAD, _table(top, "kvferry")]
    for name in COMMANDS:
        if name != "router":
            parts += _sections(load_command(name), f"kvferry {name}")
    return "\n\n".join(parts) + "\n"


def router_page() -> str:
    """The page of the router's commands."""
    return "\n\n".join([ROUTER_HEAD, *_sections(load_command("router"), "kvferry router")]) + "\n"


def _sections(command: Any, path: str) -> Iterator[str]:
    yield f"## {path}\n\n" + " ".join((command.help or "").split())
    yield _table(command, path)
    for name, below in getattr(command, "commands", {}).items():
        yield from _sections(below, f"{path} {name}")


def _table(command: Any, path: str) -> str:
    context = command.make_context(path, [], resilient_parsing=True)
    rows = [parameter.get_help_record(context) for parameter in command.params]
    shown = [
        f"| `{_cell(TYPES.sub('', name))}` | {_cell(text)} |" for name, text in filter(None, rows)
    ]
    return "\n".join(["| option | meaning |", "|---|---|", *shown])


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def python_page() -> str:
    """The page of all public names, each with the first sentence of its docstring."""
    parts = [PYTHON_HEAD]
    for name, subject in PACKAGES.items():
        package = importlib.import_module(name)
        rows = [f"| `{each}` | {_first_sentence(package, each)} |" for each in package.__all__]
        parts.append("\n".join([f"## {name}\n\n{subject}\n\n| name | meaning |\n|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _first_sentence(package: Any, name: str) -> str:
    value = getattr(package, name)
    if getattr(value, "__module__", "").startswith("kvferry."):
        doc = inspect.getdoc(value) or ""
    else:
        doc = _documented_values()[name]
    sentence = _cell(doc.split("\n\n")[0]).partition(". ")[0].rstrip(".:") + "."
    return ROLE.sub(r"`\1`", sentence).replace("``", "`")


@functools.cache
def _documented_values() -> dict[str, str]:
    """Name of a value in a module of kvferry → the docstring below its assignment."""
    found = {}
    for path in Path(kvferry.__path__[0]).rglob("*.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for value, doc in itertools.pairwise(body):
            match value, doc:
                case (
                    ast.Assign(targets=[ast.Name(id=name)])
                    | ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = text
    return found


REFERENCE_PAGES = {
    "commands.md": command_page,
    "router-commands.md": router_page,
    "python.md": python_page,
}
"""File in ``docs/reference`` → the function that makes its text."""

if __name__ == "__main__":
    for _file, _page in REFERENCE_PAGES.items():
        (ROOT / "docs/reference" / _file).write_text(_page(), encoding="utf-8")
