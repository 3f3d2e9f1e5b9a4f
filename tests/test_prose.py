"""The English of docstrings, comments and pages keeps the limits of the glossary's page."""

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kvferry"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]

MOST = {
    r"\bones?\b": 8.0,
    r"\bwhat\b": 4.0,
    r"\bits?\b": 16.0,
    r"\b(nobody|somebody|anybody|whoever|whomever|no one)\b": 0.3,
}
"""Pattern → how often it may occur per 1,000 words of docstrings and comments."""
SAME_NAMES = 5
"""Public classes of the package that may share a name with another one."""
BARE = re.compile(
    r"(Of|On|In|By|For|From|To|At|With|Without|Until|Since|As|Under|Per|That|Which|Whose|The same|"
    r"Likewise)\b"
)
"""How the docstring of an attribute does not begin: it names its subject."""
GIVEN_UP = re.compile(
    r"\b(whoever|whomever|somebody|anybody|anew|therein|thereby)\b", re.IGNORECASE
)
"""Words that no docstring, comment or page has."""
PAGE_LINES, README_LINES = 250, 150


def attribute_docstrings(tree: ast.Module) -> Iterator[str]:
    """The docstrings behind assignments of modules and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            for before, each in zip(node.body, node.body[1:], strict=False):
                is_text = isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant)
                if is_text and isinstance(before, ast.Assign | ast.AnnAssign):
                    text = each.value.value  # type: ignore[attr-defined]
                    if isinstance(text, str):
                        yield text


@cache
def prose() -> dict[str, str]:
    """Path → docstrings and comments of a module of the package."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        texts = [*attribute_docstrings(tree)]
        for node in ast.walk(tree):
            if isinstance(
                node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
            ) and (text := ast.get_docstring(node)):
                texts.append(text)
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                texts.append(token.string.lstrip("# "))
        found[str(path.relative_to(ROOT))] = "\n".join(texts)
    return found


@pytest.mark.parametrize("pattern", MOST)
def test_pronouns_stand_where_they_are_needed_only(pattern):
    text = "\n".join(prose().values())
    words = len(re.findall(r"[A-Za-z']+", text))
    share = 1000 * len(re.findall(pattern, text, re.IGNORECASE)) / words
    assert share <= MOST[pattern], f"{pattern}: {share:.1f} per 1,000 words, {MOST[pattern]} may be"


def test_docstrings_of_attributes_name_their_subject():
    bare = [
        f"{path.relative_to(ROOT)}: {text.strip().splitlines()[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in attribute_docstrings(ast.parse(path.read_text(encoding="utf-8")))
        if BARE.match(text.strip())
    ]
    assert bare == []


def test_a_public_name_stands_for_one_class():
    where = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                where[node.name].append(str(path.relative_to(ROOT)))
    shared = {name: paths for name, paths in where.items() if len(paths) > 1}
    assert len(shared) <= SAME_NAMES, shared


def test_words_that_were_given_up_are_not_used():
    texts = prose() | {
        str(page.relative_to(ROOT)): page.read_text(encoding="utf-8")
        for page in PAGES
        if page.name != "glossary.md"
    }
    used = {path: found for path, text in texts.items() if (found := GIVEN_UP.findall(text))}
    assert used == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_short(page):
    lines = len(page.read_text(encoding="utf-8").splitlines())
    assert lines <= (README_LINES if page.name == "README.md" else PAGE_LINES)
