"""What the README and the docs show works: Python runs, TOML and JSON are valid configuration."""

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path

import msgspec
import pytest

from kvferry.config import ClusterConfig, KVTransferConfig, load_cluster, parse_struct
from kvferry.connectors.pull.config import PullConfig
from tests.pages import PAGES, ROOT, text_of

CLUSTER_FILES = sorted(
    path for path in ROOT.glob("examples/**/*.toml") if path.name != "pyproject.toml"
)

_FILE_NAME = re.compile(r"\n*# (\w+)\.py\n")
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path, language: str) -> list[str]:
    """The page's fenced blocks of a language, each preceded by as many lines as stand before it,
    so that a traceback shows the page's own line numbers.
    """
    text = page.read_text(encoding="utf-8")
    return [
        "\n" * text.count("\n", 0, match.start(2)) + match[2]
        for match in _BLOCK.finditer(text)
        if match[1] == language
    ]


def pages_with(language: str) -> list:
    pages = [page for page in PAGES if blocks(page, language)]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


def as_file(block: str, folder: Path) -> str | None:
    """Writes a block whose first line is ``# some_name.py``; returns the module's name."""
    named = _FILE_NAME.match(block)
    if named is None:
        return None
    (folder / f"{named[1]}.py").write_text(block.lstrip("\n"), encoding="utf-8")
    return named[1]


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    namespace: dict = {"__name__": "__docs__"}
    for block in blocks(page, "python"):
        module = as_file(block, tmp_path)  # a later block may import it
        if module is not None:
            # Set before it is deleted, so that it is gone again when the test ends.
            monkeypatch.setitem(sys.modules, module, sys)
            del sys.modules[module]
        exec(compile(block, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", pages_with("toml"))
def test_toml_blocks_are_cluster_files(page):
    for block in blocks(page, "toml"):
        values = tomllib.loads(block)
        if "prefill" in values or "decode" in values:
            ClusterConfig.from_mapping(values, str(page))


@pytest.mark.parametrize("page", pages_with("json"))
def test_json_blocks_are_transfer_configs(page):
    for block in blocks(page, "json"):
        values = msgspec.json.decode(block)
        if "kv_connector" in values:
            KVTransferConfig.from_mapping(values, str(page))


_TRANSFER_CONFIG = re.compile(r"--kv-transfer-config '(\{.*?\})'", re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/operate/hosts.md"])
def test_the_servers_of_a_page_find_each_other(page):
    shown = _TRANSFER_CONFIG.findall((ROOT / page).read_text(encoding="utf-8"))
    prefill, decode = (
        KVTransferConfig.from_mapping(msgspec.json.decode(text), page) for text in shown
    )
    extras = [
        parse_struct(PullConfig, config.kv_connector_extra_config, page)
        for config in (prefill, decode)
    ]
    assert (prefill.kv_role, decode.kv_role) == ("kv_producer", "kv_consumer")
    assert prefill.engine_id != decode.engine_id
    assert list(extras[1].peers) == [f"{extras[0].host}:{prefill.kv_port}"]
    assert extras[0].cluster_key_file == extras[1].cluster_key_file


@pytest.mark.parametrize("path", CLUSTER_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_cluster_files_are_valid(path):
    load_cluster(path)


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", page.read_text(encoding="utf-8"))
    for path, anchor in links:
        target = page.parent / path if path else page
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


def named_things(page: Path) -> set[str]:
    """Dotted names of kvferry and paths of this repository that a page has between backticks."""
    spans = re.findall(r"`([^`\n]+)`", page.read_text(encoding="utf-8"))
    dotted = r"kvferry(?:\.\w+)+"
    path = r"(?:kvferry|tests|benchmarks|docs|examples|\w+)/[\w/]*\w\.(?:py|md|toml|svg|json|sh)"
    words = [word for span in spans for word in re.findall(rf"{path}|{dotted}", span)]
    return {word for word in words if not word.endswith((".json", ".costs", ".key"))}


def exists(name: str) -> bool:
    if "/" in name:
        return any((root / name).exists() for root in (ROOT, ROOT / "kvferry"))
    if (ROOT / name.replace(".", "/")).is_dir():  # a room, though what it needs is not installed
        return True
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:
        if "." not in module:
            return hasattr(importlib.import_module(module), attribute)
        return exists(module) and is_member(module, attribute)
    return True


def is_member(name: str, attribute: str) -> bool:
    """Whether a module, or a class of one, has the attribute."""
    module, _, cls = name.rpartition(".")
    owner = getattr(importlib.import_module(module), cls, None)
    owner = owner if isinstance(owner, type) else importlib.import_module(name)
    return hasattr(owner, attribute) or attribute in getattr(owner, "__struct_fields__", ())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_the_pages_name_exists(page):
    missing = [name for name in sorted(named_things(page)) if not exists(name)]
    assert missing == []


def test_names_that_do_not_exist_are_noticed():
    wrong = ["kvferry.nope", "kvferry.nope.Thing", "kvferry.errors.NoError", "layouts/nope.py"]
    assert [name for name in wrong if exists(name)] == []


def names_in_files(text: str) -> list[tuple[str, str]]:
    """(file, name) of what a text says to be in a file: ``file.py``: ``A.b``, ``c``."""
    named = r"`([\w/]+\.py)`:\s+((?:`[\w.]+`(?:,\s+)?)+)"
    return [
        (file, name)
        for file, names in re.findall(named, text)
        for name in re.findall(r"`([\w.]+)`", names)
    ]


def defined_names(file: Path) -> set[str]:
    """Functions, classes, methods and constants of a file, as ``function`` or ``Class.method``."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = ast.FunctionDef | ast.AsyncFunctionDef
            names |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, methods)}
        if isinstance(node, ast.Assign):
            names |= {ast.unparse(target) for target in node.targets}
    return names


def test_every_step_of_a_load_is_where_the_page_says():
    page = text_of("design")
    named = names_in_files(page)
    assert len(named) > 50
    missing = [
        f"{file}: {name}"
        for file, name in named
        if name not in defined_names(ROOT / "kvferry" / file)
    ]
    assert missing == []


def test_a_step_that_is_elsewhere_is_noticed():
    named = names_in_files("`engine/loop.py`: `EngineLoop.submit`,\n`EngineLoop.nope`, and so on")
    assert named == [("engine/loop.py", "EngineLoop.submit"), ("engine/loop.py", "EngineLoop.nope")]
    assert "EngineLoop.submit" in defined_names(ROOT / "kvferry" / "engine" / "loop.py")
    assert "EngineLoop.nope" not in defined_names(ROOT / "kvferry" / "engine" / "loop.py")


def test_the_files_of_the_page_are_those_of_their_folders():
    page = text_of("design")
    rows = re.findall(r"^\| `([\w/]+)/` \| (.*)$", page, re.MULTILINE)
    assert len(rows) > 5
    for folder, files in rows:
        there = {path.name for path in (ROOT / "kvferry" / folder).glob("*.py")}
        named = set(re.findall(r"`(\w+\.py)`", files))
        assert named == there - {"__init__.py", "__main__.py"}, folder


def thread_names(text: str) -> set[str]:
    """The threads that a module of the product starts, without ``kvferry-``."""
    names = set(re.findall(r'= [mM]ailbox\("([\w-]+)"', text))
    names |= set(re.findall(r'name="kvferry-([\w-]+)"', text))
    names |= {f"{name}-N" for name in re.findall(r'Mailbox\(f"([\w-]+)-\{number\}"', text)}
    names |= {f"{name}-N" for name in re.findall(r'MoverPool\("([\w-]+)"', text)}
    if "(LocalTransport[" in text:  # its movers have the name of the transport
        names |= {f"{name}-N" for name in re.findall(r'^    name = "(\w+)"', text, re.MULTILINE)}
    return names


def test_the_threads_of_the_page_are_those_of_the_code():
    started = {
        name
        for path in (ROOT / "kvferry").rglob("*.py")
        if "testing" not in path.relative_to(ROOT).parts
        for name in thread_names(path.read_text(encoding="utf-8"))
    }
    page = text_of("design")
    table = "".join(re.findall(r"^\| .* \| `kvferry-.*$", page, re.MULTILINE))
    assert set(re.findall(r"`kvferry-([\w-]+)`", table)) == started
