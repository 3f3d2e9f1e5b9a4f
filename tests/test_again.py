"""The runner of the tests: what it forgives, what it writes down, and what stays red."""

import datetime as dt
import os
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path

import httpx
import pytest

from kvferry.errors import PeerEndedError, StalledError
from tests import again

COMES_LATE_ONCE = """
from pathlib import Path
from kvferry.testing.waiting import NotInTimeError

def test_it():
    seen = Path({seen!r})
    if not seen.exists():
        seen.touch()
        raise {error}
"""
LATE = "NotInTimeError('it did not come')"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty project, in which the runner runs."""
    (tmp_path / "pytest.ini").touch()
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))
    monkeypatch.setattr(again, "KEPT", tmp_path / "unstable.toml")
    again.KEPT.touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capfd):
    """``run(part, ...)``: why it is red (``None`` if it is not), and what it printed."""

    def running(*parts):
        monkeypatch.setattr(sys, "argv", ["again", *(parts or ["-q"])])
        try:
            again.main()
        except SystemExit as error:
            return error.code, capfd.readouterr().out
        return None, capfd.readouterr().out

    return running


def write(folder, name, text):
    (folder / name).write_text(textwrap.dedent(text))


def late_once(folder, name, error=LATE):
    write(folder, name, COMES_LATE_ONCE.format(seen=str(folder / f"{name}.seen"), error=error))


def test_what_passes_is_green(folder, run):
    write(folder, "test_a.py", "def test_it(): pass")
    assert run()[0] is None


@pytest.mark.usefixtures("folder")
def test_what_is_kept_names_no_folder_of_the_machine():
    text = f"{again.__file__}:1: late\n{sys.base_prefix}/lib/python/threading.py:2: waits"
    again.keep(again.Failure("test_a.py::test_it", True, text), dt.date(2026, 1, 1))
    (kept,) = tomllib.loads(again.KEPT.read_text()).values()
    assert kept["first"] == "tests/again.py:1: late\nlib/python/threading.py:2: waits"


def test_a_test_that_waited_too_long_runs_again_and_is_named(folder, run):
    late_once(folder, "test_a.py")
    red, printed = run()
    assert red is None
    assert "UNSTABLE test_a.py::test_it" in printed
    assert "it did not come" in again.KEPT.read_text()
    assert "test_a.py::test_it" in again.KEPT.read_text()


@pytest.mark.slow
def test_the_whole_file_runs_again_in_a_process_of_its_own(folder, run):
    late_once(folder, "test_a.py")
    with (folder / "test_a.py").open("a") as file:
        file.write("\ndef test_where():\n    import os; print('process', os.getpid())\n")
    _, printed = run("-q -s")
    processes = [line for line in printed.splitlines() if "process " in line]
    assert len(set(processes)) == 2
    assert not any(str(os.getpid()) in line for line in processes)


@pytest.mark.parametrize(
    "error",
    [
        "AssertionError('wrong token')",
        pytest.param("__import__('pytest').fail('no')", marks=pytest.mark.slow),
    ],
)
def test_no_other_failure_is_forgiven(folder, run, error):
    late_once(folder, "test_a.py", error)
    red, printed = run()
    assert red == "red: test_a.py::test_it"
    assert "UNSTABLE" not in printed


@pytest.mark.parametrize(
    ("error", "comes_late"),
    [
        (TimeoutError, True),
        (StalledError, True),
        (PeerEndedError, True),
        (httpx.ReadTimeout, True),
        (subprocess.TimeoutExpired, True),
        (httpx.ConnectError, False),
        (ValueError, False),
    ],
)
def test_these_errors_mean_that_something_came_late(error, comes_late):
    assert issubclass(error, again.waiting_errors()) == comes_late


@pytest.mark.slow
def test_a_limit_of_pytest_timeout_means_the_same(folder, run):
    late_once(folder, "test_a.py", "__import__('time').sleep(60)")  # never raised: sleeps first
    assert run("-q --timeout 1")[0] is None


def test_what_fails_again_is_red(folder, run):
    write(folder, "test_a.py", "def test_it(): raise TimeoutError")
    assert run()[0] == "red: failed again (exit code 1): test_a.py::test_it"


def test_a_process_that_crashes_is_red(folder, run):
    write(folder, "test_a.py", "import os\ndef test_it(): os._exit(1)")
    assert str(run()[0]).startswith("red")
    assert str(run("-q -n 1")[0]).startswith("red")


@pytest.mark.slow
def test_a_file_that_cannot_be_read_is_red(folder, run):
    write(folder, "test_a.py", "import nothing_of_this_name")
    assert str(run()[0]).startswith("red")


@pytest.mark.slow
def test_only_the_file_runs_again_though_the_part_names_a_folder(folder, run):
    late_once(folder, "test_a.py")
    write(folder, "test_b.py", "def test_other(): print('ran', 'test_b')")
    red, printed = run(f"-q -s {folder}")
    assert red is None
    assert printed.count("ran test_b") == 1


@pytest.mark.slow
def test_the_options_of_all_parts_hold_for_the_second_run_too(folder, run):
    late_once(folder, "test_a.py")
    with (folder / "test_a.py").open("a") as file:
        file.write("\ndef test_limit(request): print('limit', request.config.option.timeout)\n")
    write(folder, "test_b.py", "def test_other(): print('ran', 'test_b')")
    red, printed = run("-q -s", "--", "--timeout", "77", "test_a.py::test_it", "test_a.py")
    assert red is None
    assert printed.count("limit 77.0") == 2
    assert "ran test_b" not in printed


@pytest.mark.slow
def test_failures_in_workers_are_known(folder, run):
    late_once(folder, "test_a.py")
    write(folder, "test_b.py", "def test_it(): pass")
    red, printed = run("-q -n 2 --dist loadfile")
    assert red is None
    assert "UNSTABLE test_a.py::test_it" in printed


def test_too_many_files_are_red_without_a_second_chance(folder, run):
    for index in range(again.MAX_FILES + 1):
        late_once(folder, f"test_{index}.py")
    red, printed = run()
    assert red == "red: tests of 6 files came too late, 5 may"
    assert "again, alone" not in printed


@pytest.mark.slow
def test_too_many_unstable_tests_are_red(folder, run):
    for index in range(again.MAX_UNSTABLE + 1):
        late_once(folder, f"test_{index}.py")
    assert run()[0] == "red: 4 tests are unstable, 3 may be"


def test_an_unstable_test_is_red_after_its_date(folder, run):
    write(folder, "test_a.py", "def test_it(): pass")
    yesterday = dt.datetime.now(dt.UTC).date() - dt.timedelta(1)
    again.KEPT.write_text(f'["test_a.py::test_it"]\nmend_by = {yesterday}\n')
    red, _ = run()
    assert red == "red: mend these, then take them out of unstable.toml: test_a.py::test_it"


@pytest.mark.slow
def test_parts_without_tests_are_left_out_unless_all_are(folder, run):
    write(folder, "test_a.py", "def test_it(): pass")
    assert run("-q", "-q -k nothing")[0] is None
    assert run("-q -k nothing", "-q -k nothing")[0] == 5


@pytest.mark.slow
def test_arguments_after_the_dashes_go_to_every_part(folder, run):
    write(folder, "test_a.py", "def test_it(): pass\ndef test_other(): raise ValueError")
    assert run("-q", "-q", "--", "-k", "test_it")[0] is None


DRAW = """
from hypothesis import Phase, given, settings, strategies as st
drawn = []
@settings(max_examples=100, phases=[Phase.generate])
@given(st.lists(st.one_of(st.integers(), st.floats(allow_nan=False), st.text())))
def draw(value): drawn.append(value)
draw()
print(hash(repr(drawn)))
"""


def test_a_property_test_draws_the_same_whatever_is_loaded():
    def drawn(first):
        code = f"import conftest\n{first}\n{DRAW}"
        environment = os.environ | {"PYTHONHASHSEED": "0"}
        root = Path(__file__).parents[1]
        command = [sys.executable, "-c", code]
        return subprocess.run(
            command, cwd=root, env=environment, capture_output=True, text=True, check=True
        ).stdout

    assert drawn("") == drawn("import kvferry.config, kvferry.topology, tests.geometries")
