"""What the README and the docs show works: Python runs, TOML and JSON are valid configuration."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from kvferry.config import ClusterConfig, KVTransferConfig, load_cluster

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
CLUSTER_FILES = sorted(
    path for path in ROOT.glob("examples/**/*.toml") if path.name != "pyproject.toml"
)

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


@pytest.mark.parametrize("page", pages_with("python"))
def test_python_blocks_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {"__name__": "__docs__"}
    for block in blocks(page, "python"):
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


@pytest.mark.parametrize("path", CLUSTER_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_example_cluster_files_are_valid(path):
    load_cluster(path)


def test_the_readme_shows_a_cluster_file():
    assert any("prefill" in block for block in blocks(ROOT / "README.md", "toml"))
