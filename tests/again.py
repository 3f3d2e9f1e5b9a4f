"""Runs the tests, and runs once more what failed only because something came late.

    python -m tests.again PART... [-- ARGS]

Each PART is one string of arguments for pytest; the parts run one after the other, all of them with
ARGS. A machine that stands still for a minute fails right code, so a test that failed with one of
:func:`waiting_errors` gets a second chance after everything else: its whole file, in its order, in
a process of its own. A test that passes then is *unstable*. It is printed, and kept in
``unstable.toml`` for two weeks, after which the run is red until somebody has mended it. Any other
failure, a crashed process, too many files or too many unstable tests: the run is red at once.
"""

import datetime as dt
import json
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Generator
from pathlib import Path
from typing import NamedTuple

import pytest

MAX_FILES = 5
"""More files than this are not run again: then it is no single test that came too late."""
MAX_UNSTABLE = 3
"""More unstable tests than this make a run red."""
KEPT = Path(__file__).with_name("unstable.toml")
DAYS = 14
"""Number of days within which an unstable test must be mended."""
NO_TESTS = pytest.ExitCode.NO_TESTS_COLLECTED


class Failure(NamedTuple):
    """A test that failed."""

    test: str
    """Its node id."""
    waited: bool
    """Whether it failed only because something did not come in time."""
    text: str
    """What pytest says of it."""

    @property
    def file(self) -> str:
        """File of the test."""
        return self.test.partition("::")[0]


def waiting_errors() -> tuple[type[BaseException], ...]:
    """Exceptions that mean: something did not come in time."""
    import httpx

    from kvferry.errors import PeerLostError, StalledError
    from kvferry.testing.waiting import NotInTimeError

    lost = (PeerLostError, StalledError, NotInTimeError)
    return (*lost, TimeoutError, subprocess.TimeoutExpired, httpx.TimeoutException)


# The part that pytest loads, with `-p tests.again`, in the process that runs the tests.


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--failures FILE``: where the failures of the run are written as JSON."""
    parser.addoption("--failures", default=None, help="write the failures of the run to this file")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Notes on a report whether the test only waited too long; xdist carries it along."""
    report = yield
    if call.excinfo is not None:
        error = call.excinfo.value
        report.waited = isinstance(error, waiting_errors()) or (  # type: ignore[attr-defined]
            isinstance(error, pytest.fail.Exception) and str(error).startswith("Timeout (>")
        )
    return report


class Failures:
    """Collects what fails, in the process that hears of all tests."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: list[Failure] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A phase of a test has ended."""
        self._note(report, getattr(report, "waited", False))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file was collected, or could not be."""
        self._note(report, False)

    def pytest_sessionfinish(self) -> None:
        """All tests have ended."""
        self._path.write_text(json.dumps(self._found))

    def _note(self, report: pytest.TestReport | pytest.CollectReport, waited: bool) -> None:
        if report.failed:
            self._found.append(Failure(report.nodeid, waited, report.longreprtext))


def pytest_configure(config: pytest.Config) -> None:
    """Workers of xdist hear of their own tests alone, so they collect nothing."""
    path = config.getoption("--failures")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Failures(Path(path)))


# The part that starts pytest.


class Result(NamedTuple):
    """What a process of pytest ended with."""

    code: int
    failures: list[Failure]


def run(arguments: list[str]) -> Result:
    """Runs pytest in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "failures.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.again", "--failures", str(path)]
        command += ["--durations=15", "--durations-min=5"]  # the gate must stay short
        code = subprocess.run([*command, *arguments], check=False).returncode
        found = json.loads(path.read_text()) if path.exists() else []
    return Result(code, [Failure(*each) for each in found])


def overdue(today: dt.date) -> list[str]:
    """Tests that were unstable more than :data:`DAYS` days ago."""
    kept = tomllib.loads(KEPT.read_text())
    return [test for test, entry in kept.items() if entry["mend_by"] < today]


def keep(failure: Failure, today: dt.date) -> None:
    """Writes an unstable test down, unless it is there already."""
    if failure.test in tomllib.loads(KEPT.read_text()):
        return
    last_lines = "\n".join(failure.text.splitlines()[-40:]).encode("ascii", "replace").decode()
    for folder in (Path(__file__).parents[1], sys.base_prefix):  # where this machine keeps them
        last_lines = last_lines.replace(f"{folder}/", "")
    mend_by = today + dt.timedelta(DAYS)
    with KEPT.open("a") as file:  # JSON's strings of ASCII are TOML's
        file.write(f"\n[{json.dumps(failure.test)}]\nmend_by = {mend_by}\n")
        file.write(f"first = {json.dumps(last_lines)}\n")


def run_again(part: list[str], failures: list[Failure]) -> None:
    """Runs the files of these failures once more, each alone.

    Args:
        part: arguments of the run in which they failed.
        failures: what failed there.

    Raises:
        SystemExit: a file failed again, or its process crashed.
    """
    # No folders and tests; and a few files would tell a false share of lines that are covered.
    options = [
        each
        for each in part
        if not (Path(each.partition("::")[0]).exists() or each.startswith("--cov"))
    ]
    if "-n" in options:
        options += ["-n", "0"]
    for file in sorted({failure.file for failure in failures}):
        print(f"again, alone: {file}", flush=True)
        code, failed = run([*options, file])
        if code != pytest.ExitCode.OK:
            names = ", ".join(each.test for each in failed)
            raise SystemExit(f"red: failed again (exit code {code}): {names or file}")


def check(results: list[Result]) -> None:
    """Refuses what a second chance cannot mend.

    Raises:
        SystemExit: the run is red.
    """
    codes = {result.code for result in results}
    if codes == {NO_TESTS}:
        raise SystemExit(int(NO_TESTS))
    if not codes <= {pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, NO_TESTS}:
        raise SystemExit(f"red: pytest ended with {sorted(codes)}")
    if any(each.code == pytest.ExitCode.TESTS_FAILED and not each.failures for each in results):
        raise SystemExit("red: pytest failed without naming a test")
    failures = [failure for result in results for failure in result.failures]
    if wrong := [failure.test for failure in failures if not failure.waited]:
        raise SystemExit(f"red: {', '.join(wrong)}")
    if len(files := {failure.file for failure in failures}) > MAX_FILES:
        raise SystemExit(f"red: tests of {len(files)} files came too late, {MAX_FILES} may")


def main() -> None:
    """See the module.

    Raises:
        SystemExit: with 1 or a reason if the run is red.
    """
    parts, extra = sys.argv[1:], []
    if "--" in parts:
        at = parts.index("--")
        parts, extra = parts[:at], parts[at + 1 :]
    today = dt.datetime.now(dt.UTC).date()
    if late := overdue(today):
        raise SystemExit(f"red: mend these, then take them out of {KEPT.name}: {', '.join(late)}")
    results = [run([*shlex.split(part), *extra]) for part in parts]
    check(results)
    for part, result in zip(parts, results, strict=True):
        run_again([*shlex.split(part), *extra], result.failures)
    unstable = {failure.test: failure for result in results for failure in result.failures}
    for test, failure in unstable.items():
        print(f"UNSTABLE {test}")
        keep(failure, today)
    if len(unstable) > MAX_UNSTABLE:
        raise SystemExit(f"red: {len(unstable)} tests are unstable, {MAX_UNSTABLE} may be")


if __name__ == "__main__":
    main()
