"""Shows that the tests see defects of the product: ``python -m tests.planted [NAME ...]``.

Each patch beside this file puts one defect into the product, and names tests that must see it. The
command takes each defect into a worktree of its own, made from the last commit, and runs these
tests there several times. They must fail each time. Without a defect they must pass. The command
prints a line per defect, and ends with 1 if a test saw no defect, or saw one where there is none.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
_SEEN_BY = re.compile(r"^Seen by: (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Defect:
    """A patch with a header: a sentence about the defect, and the tests that must see it."""

    path: Path
    tests: tuple[str, ...]
    """Node ids of the tests, without parameters."""

    @classmethod
    def read(cls, path: Path) -> "Defect":
        """Reads the header of a patch."""
        header = path.read_text(encoding="utf-8").partition("\ndiff --git ")[0]
        return cls(path, tuple(_SEEN_BY.findall(header)))


def defects() -> list[Defect]:
    """All defects, in the order of their names."""
    return [Defect.read(path) for path in sorted(FOLDER.glob("*.patch"))]


def git(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Runs git, and waits for its end."""
    # A hook of git names the repository that it belongs to, which is not the worktree.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", *arguments], cwd=cwd, env=env, check=False, capture_output=True, text=True
    )


@contextmanager
def worktree(base: Path) -> Iterator[Path]:
    """A worktree of the last commit. It lies at the same place each time, so that kernels which
    were compiled there are found again.
    """
    tree = base / "tree"
    git("worktree", "add", "--detach", str(tree), "HEAD").check_returncode()
    try:
        yield tree
    finally:
        git("worktree", "remove", "--force", str(tree))


def run_tests(tree: Path, tests: Sequence[str]) -> tuple[int, dict[str, set[str]]]:
    """Runs tests in a worktree.

    Returns:
        The exit code of pytest, and for each test what pytest says of it: ``PASSED``, ``FAILED`` or
        ``ERROR``; all of what it says of a test with parameters.
    """
    env = os.environ | {
        "NUMBA_CACHE_DIR": str(tree.with_name("kernels")),
        "OMP_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",  # a patched file may be as long and as old as before
        "PYTHONPATH": str(tree),
    }
    options = ["-n", "0", "-p", "no:cacheprovider", "--color=no", "-q", "-rfEp"]
    command = [sys.executable, "-m", "pytest", *options, *tests]
    run = subprocess.run(command, cwd=tree, env=env, check=False, capture_output=True, text=True)
    said = re.findall(r"^(PASSED|FAILED|ERROR) ([^\s\[]+)", run.stdout, re.MULTILINE)
    return run.returncode, {
        test: {outcome for outcome, name in said if name == test} for test in tests
    }


def has_passed(base: Path, tests: Sequence[str]) -> bool:
    """Whether all tests pass without a defect; prints the others."""
    with worktree(base) as tree:
        code, outcomes = run_tests(tree, tests)
    others = [test for test, said in outcomes.items() if said != {"PASSED"}]
    print(f"without a defect: {len(tests) - len(others)} of {len(tests)} tests pass", flush=True)
    print(*others, sep="\n", end="\n" if others else "", flush=True)
    return code == 0 and not others


def is_seen(base: Path, defect: Defect, times: int) -> bool:
    """Whether all tests of a defect see it each time; prints a line about it."""
    seen, missed = 0, set[str]()
    with worktree(base) as tree:
        applied = git("apply", str(defect.path), cwd=tree)
        for _ in range(0 if applied.returncode else times):
            code, outcomes = run_tests(tree, defect.tests)
            blind = {test for test, said in outcomes.items() if "FAILED" not in said}
            seen += code == 1 and not blind
            missed |= blind
    line = f"{defect.path.stem}: red {seen} of {times}, seen by {', '.join(defect.tests)}"
    if applied.returncode:
        line = f"{defect.path.stem}: does not apply: {applied.stderr.strip()}"
    elif missed:
        line += f"; not by {', '.join(sorted(missed))}"
    print(line, flush=True)
    return 0 < seen == times and bool(defect.tests)


def main() -> int:
    """Runs the command; returns its exit code."""
    every = {defect.path.stem: defect for defect in defects()}
    parser = argparse.ArgumentParser(prog="python -m tests.planted", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"all, or: {', '.join(every)}")
    parser.add_argument("--times", type=int, default=5, help="runs with each defect")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in every]:
        parser.error(f"no such defects: {', '.join(unknown)}; there are {', '.join(every)}")
    chosen = [every[name] for name in options.names or every]
    tests = list(dict.fromkeys(test for defect in chosen for test in defect.tests))
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        results = [has_passed(base, tests)]
        results += [is_seen(base, defect, options.times) for defect in chosen]
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
