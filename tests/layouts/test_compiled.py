"""What is kept of kernels on disk is of their present sources."""

import os
import subprocess
import sys

import pytest

from kvferry.layouts import compiled

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


@pytest.fixture
def run(package):
    """Runs the kernels in a process of its own: the last words on standard error, and of each
    kernel what it returned and how often it was found on disk.
    """

    def run(**environment: str) -> tuple[str, list[list[str]]]:
        ended = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            cwd=package.parent,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return ended.stderr, [line.split() for line in ended.stdout.splitlines()]

    (package / "inner.py").write_text(INNER.format(number=1))
    return run


def test_a_kernel_is_compiled_anew_when_one_that_it_calls_has_changed(package, run):
    assert run() == ("", [["1", "0"]] * 2)
    assert run() == ("", [["1", "1"]] * 2)
    (package / "inner.py").write_text(INNER.format(number=2))
    assert run() == ("", [["2", "0"]] * 2)


def test_without_a_folder_kernels_are_compiled_and_one_warning_tells_the_price(package, run):
    (package / "__pycache__").touch()  # no folder, for root neither
    said, results = run(NUMBA_CACHE_DIR="/dev/null", XDG_CACHE_HOME="/dev/null")
    assert results == [["1", "0"]] * 2
    assert said.count("compiled kernels cannot be kept") == len(said.splitlines()) == 1
    assert "seconds" in said
    assert "set NUMBA_CACHE_DIR" in said
    for folder in (f"/dev/null/{package.name}", package / "__pycache__", "/dev/null/numba"):
        assert str(folder) in said


def test_a_user_without_a_home_writes_nothing_into_the_folder_in_which_it_is(package, run):
    (package / "__pycache__").touch()
    said, _ = run(HOME="~", XDG_CACHE_HOME="", NUMBA_CACHE_DIR="/dev/null")
    assert "compiled kernels cannot be kept" in said
    assert [path.name for path in package.parent.iterdir()] == [package.name]


def test_kernels_of_an_image_are_found_although_files_have_other_times_there(
    package, run, tmp_path
):
    assert run() == ("", [["1", "0"]] * 2)
    for file in package.glob("*.py"):
        os.utime(file, (1, 1))
    other = tmp_path / "other"
    assert run(NUMBA_CACHE_DIR=str(other)) == ("", [["1", "1"]] * 2)
    assert not other.exists()


def test_results_that_two_processes_save_at_once_are_not_exchanged(tmp_path, monkeypatch):
    one, two = (compiled.KernelFiles(str(tmp_path), "kernel", "stamp") for _ in range(2))
    monkeypatch.setattr(one, "_load_index", dict)  # it has looked before the other one saved
    monkeypatch.setattr(one, "_save_index", lambda _: None)  # the other one's index is later
    two.save("b", "code of b")
    one.save("a", "code of a")
    assert two.load("b") == "code of b"
    assert two.load("a") is None
