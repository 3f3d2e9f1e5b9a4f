"""The rooms of the package import only what stands above them, and only what is declared."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvferry

ROOT = Path(kvferry.__file__).parent

#: From the foundation up: a room may import the rooms before it in this list.
ROOMS = (
    "errors",
    "decoding",
    "lifetimes",
    "mailbox",
    "config",
    "plugins",
    "zeromq",
    "layouts",
    "topology",
    "cache",
    "transports",
    "control",
    "observe",
    "connectors",
    "explain",
    "engine",
    "serving",
    "router",
    "cluster",
    "integrations",
    "cli",
    "testing",  # behind the product, none of which may import it
)


def imported_rooms(source: str) -> Iterator[tuple[int, str]]:
    """(line, room) of each import of a room of kvferry, those inside functions included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "kvferry":
            modules = [f"kvferry.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules = [node.module]
        else:
            continue
        for module in modules:
            parts = module.split(".")
            if parts[0] == "kvferry" and len(parts) > 1 and not parts[1].startswith("__"):
                yield node.lineno, parts[1]


def room_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def violations(room: str, source: str) -> list[str]:
    allowed = ROOMS[: ROOMS.index(room) + 1]
    return [
        f"line {line}: {room} imports {other}"
        for line, other in imported_rooms(source)
        if other not in allowed
    ]


def test_every_module_belongs_to_a_room():
    strangers = {room_of(path) for path in ROOT.rglob("*.py")} - {*ROOMS, "__init__", "__main__"}
    assert strangers == set()


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_rooms_above_it(room):
    found = {
        str(path.relative_to(ROOT)): wrong
        for path in ROOT.rglob("*.py")
        if room_of(path) == room and (wrong := violations(room, path.read_text()))
    }
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "import kvferry.engine.scheduler",
        "from kvferry.engine import scheduler",
        "from kvferry import engine",
        "import os, kvferry.engine as engine",
        "def late():\n    from kvferry.engine.scheduler import Scheduler",
        "if TYPE_CHECKING:\n    from kvferry.engine.scheduler import Scheduler",
    ],
)
def test_an_import_of_a_lower_room_is_seen_in_any_form(source):
    assert len(violations("transports", source)) == 1


@pytest.mark.parametrize("room", ROOMS[:-1])
def test_nothing_of_the_product_imports_what_is_for_tests(room):
    assert ROOMS[-1] == "testing"
    assert violations(room, "from kvferry.testing import FakeEngine") == [
        f"line 1: {room} imports testing"
    ]


@pytest.mark.parametrize(
    "source",
    [
        "from kvferry.layouts.tiles import Tiles",
        "import kvferry.errors",
        "from kvferry.transports.base import Transport",
        "from kvferry import __version__",
        "import kvferry_plugins.engine",
    ],
)
def test_an_import_of_a_higher_room_is_let_be(source):
    assert violations("transports", source) == []


# ---- cycles ------------------------------------------------------------------------------------


def package_modules() -> dict[str, str]:
    """Full name of every module of the package → its source."""
    sources = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        sources[".".join(parts).removesuffix(".__init__")] = path.read_text()
    return sources


def imports_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Module → the other modules that it imports anywhere: in functions and for types as well."""
    found: dict[str, set[str]] = {}
    for name, source in sources.items():
        named: set[str] = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                named.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    inner = f"{node.module}.{alias.name}"
                    named.add(inner if inner in sources else node.module)
        found[name] = (named & sources.keys()) - {name}
    return found


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """The modules that import each other, directly or by way of others."""
    reached = {name: reachable(name, imports) for name in imports}
    together = {
        frozenset(other for other in reached[name] if name in reached[other]) for name in imports
    }
    return sorted(sorted(group) for group in together if group)


def reachable(start: str, imports: dict[str, set[str]]) -> set[str]:
    """Whatever is imported if ``start`` and all that it imports are; itself only in a cycle."""
    found: set[str] = set()
    waiting = list(imports[start])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += imports[name]
    return found


def test_no_module_imports_itself_by_way_of_others():
    assert cycles(imports_of(package_modules())) == []


@pytest.mark.parametrize(
    "late",
    [
        "from pack.one import Thing",
        "import pack.one",
        "from pack import one",
        "def later():\n    from pack.one import Thing",
        "if TYPE_CHECKING:\n    from pack.one import Thing",
    ],
)
def test_a_cycle_is_seen_in_any_form(late):
    sources = {
        "pack": "",
        "pack.one": "from pack.two import helper\nfrom pack.apart import other",
        "pack.two": "import pack.three",
        "pack.three": late,
        "pack.apart": "import os",
    }
    assert cycles(imports_of(sources)) == [["pack.one", "pack.three", "pack.two"]]
    assert cycles(imports_of(sources | {"pack.three": ""})) == []


@pytest.mark.parametrize(
    "module",
    [
        "kvferry",
        "kvferry.errors",
        "kvferry.config",
        "kvferry.plugins",
        "kvferry.layouts",
        "kvferry.topology",
        "kvferry.cache",
    ],
)
def test_the_base_rooms_import_without_torch_and_zmq(module):
    # None in sys.modules makes the import fail where it stands, so the traceback names the culprit.
    program = f"""
import sys
for heavy in ("torch", "zmq", "transformers", "triton"):
    sys.modules[heavy] = None
import {module}
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=240
    )
    assert result.returncode == 0, result.stderr


#: Import name → name of the distribution, where they differ.
DISTRIBUTIONS = {
    "libucx": "libucx-cu12",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
    "zmq": "pyzmq",
}

#: Integrations import these only where their engine or device is there. vLLM brings
#: huggingface_hub.
PEERS = {"huggingface_hub", "nixl", "requests", "sglang", "triton", "ucxx", "vllm"}


def test_every_third_party_import_is_a_declared_dependency():
    project = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    declared = {re.split(r"[\[<>=;~ ]", item)[0] for items in lists for item in items}
    found: dict[str, str] = {}
    for path in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module]
            found |= {name.split(".")[0]: str(path.relative_to(ROOT)) for name in names}
    foreign = found.keys() - sys.stdlib_module_names - PEERS - {"kvferry"}
    undeclared = {n: found[n] for n in foreign if DISTRIBUTIONS.get(n, n) not in declared}
    assert undeclared == {}
