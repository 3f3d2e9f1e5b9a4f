"""What is kept of kernels on disk is of their present sources."""

import subprocess
import sys

import pytest

INNER = """
from kvferry.layouts.compiled import kernel

@kernel
def number():
    return {number}
"""
OUTER = """
from kvferry.layouts.compiled import kernel
from some_kernels import inner
from some_kernels.inner import number

@kernel
def by_name():
    return number()

@kernel
def by_module():
    return inner.number()
"""
PROGRAM = """
from some_kernels import outer
for each in (outer.by_name, outer.by_module):
    print(each(), sum(each.stats.cache_hits.values()))
"""


@pytest.fixture
def package(tmp_path):
    folder = tmp_path / "some_kernels"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "outer.py").write_text(OUTER)
    return folder


def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(package):
    def run() -> list[list[str]]:
        output = subprocess.check_output(
            [sys.executable, "-c", PROGRAM], cwd=package.parent, text=True
        )
        return [line.split() for line in output.splitlines()]

    (package / "inner.py").write_text(INNER.format(number=1))
    assert run() == [["1", "0"]] * 2
    assert run() == [["1", "1"]] * 2
    (package / "inner.py").write_text(INNER.format(number=2))
    assert run() == [["2", "0"]] * 2
