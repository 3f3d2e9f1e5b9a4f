"""Every planted defect can be put into the product, and names tests that there are."""

import ast
import shutil
from functools import cache

import pytest

from tests.planted.__main__ import ROOT, defects, git

DEFECTS = pytest.mark.parametrize("defect", defects(), ids=lambda defect: defect.path.stem)


@cache
def names_in(path: str) -> frozenset[str]:
    """The tests of a file, those of a class with its name before them."""
    found = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}::{method.name}" for method in methods}
    return frozenset(found)


@DEFECTS
def test_a_defect_names_tests_that_there_are(defect):
    assert defect.tests
    for test in defect.tests:
        path, _, name = test.partition("::")
        assert name in names_in(path), f"{path} has no test {name}"


@DEFECTS
def test_a_defect_can_be_put_into_the_product(defect):
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    checked = git("apply", "--check", str(defect.path))
    assert checked.returncode == 0, f"write it anew: {checked.stderr}"


def test_defects_are_numbered_without_a_gap():
    numbers = [int(defect.path.stem.partition("-")[0]) for defect in defects()]
    assert numbers == list(range(1, len(numbers) + 1))
