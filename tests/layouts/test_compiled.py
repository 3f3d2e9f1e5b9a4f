"""What is kept of kernels on disk is of their present sources."""

import fcntl
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from kvferry.layouts import compiled
from kvferry.testing.waiting import until

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


def test_of_processes_that_start_side_by_side_one_compiles_each_kernel(package, run):
    (package / "__init__.py").write_text("import logging\nlogging.basicConfig(level='INFO')\n")
    with ThreadPoolExecutor(3) as threads:
        told = list(threads.map(lambda _: run(), range(3)))
    said = "".join(text for text, _ in told)
    by_kernel = zip(*(results for _, results in told), strict=True)
    assert [sorted(hits for _, hits in each) for each in by_kernel] == [["0", "1", "1"]] * 2
    assert 1 <= said.count("compiling kernels") == len(said.splitlines()) <= 2


def test_a_process_that_dies_in_its_turn_ends_it(package, run):
    folder = next(compiled.kernel_folders(package / "outer.py"))
    Path(folder).mkdir()
    lock = Path(folder, "compiling.lock")
    with ThreadPoolExecutor(1) as threads:
        with lock.open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            told = threads.submit(run)
            until(lambda: is_open_elsewhere(lock), what="a process that waits for its turn")
            assert not told.done()
        assert told.result()[1] == [["1", "0"]] * 2  # the file is closed, as at a process's end


def is_open_elsewhere(file: Path) -> bool:
    """Whether another process has the file open."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid != os.getpid() and str(file) in {
                each.path for each in process.open_files()
            }:
                return True
    return False


def test_results_that_two_processes_save_at_once_are_not_exchanged(tmp_path, monkeypatch):
    one, two = (compiled.KernelFiles(str(tmp_path), "kernel", "stamp") for _ in range(2))
    monkeypatch.setattr(one, "_load_index", dict)  # it has looked before the other one saved
    monkeypatch.setattr(one, "_save_index", lambda _: None)  # the other one's index is later
    two.save("b", "code of b")
    one.save("a", "code of a")
    assert two.load("b") == "code of b"
    assert two.load("a") is None
