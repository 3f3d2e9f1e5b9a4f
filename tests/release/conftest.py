"""The archives that ``make release`` has built, and environments to install them in."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = ROOT / "build" / "release"
TOOLS = ROOT / os.environ.get("KVFERRY_TEST_TOOLS", ".venv-release") / "bin"


def built(pattern: str) -> Path:
    """The archive of a kind."""
    found = sorted(BUILT.glob(pattern))
    assert len(found) == 1, f"{pattern} in {BUILT}: {found}; run make release"
    return found[0]


@pytest.fixture(scope="session")
def wheel() -> Path:
    return built("kvferry-*.whl")


@pytest.fixture(scope="session")
def source_archive() -> Path:
    return built("kvferry-*.tar.gz")


@pytest.fixture(scope="session")
def pinned() -> dict[str, str]:
    """Package → requirement of constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    return {line.partition("==")[0]: line for line in lines if "==" in line}


@dataclass(frozen=True)
class Environment:
    """A virtual environment, and a folder beside it in which its programs run."""

    folder: Path
    work: Path

    @classmethod
    def make(cls, folder: Path, python: str) -> "Environment":
        """Makes an empty environment of a release of Python, ``3.12`` say."""
        # Where pyenv manages the releases, this chooses one.
        variables = {**os.environ, "PYENV_VERSION": python}
        command = [f"python{python}", "-m", "venv", "--without-pip", str(folder / "env")]
        subprocess.run(command, check=True, env=variables)
        (folder / "work").mkdir()
        return cls(folder / "env", folder / "work")

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def packages(self) -> Path:
        """The folder of the installed packages."""
        (folder,) = (self.folder / "lib").glob("python3.*/site-packages")
        return folder

    def install(self, *requirements: str | Path) -> None:
        """Installs with the pip of the tools, so that nothing but the requirements is there."""
        pip = (TOOLS / "python", "-m", "pip", "--python", self.python, "--quiet")
        self.run(*pip, "install", *requirements)

    def kvferry(self, *arguments: str) -> str:
        """Output of ``kvferry ARGUMENTS``."""
        return self.run(self.folder / "bin" / "kvferry", *arguments)

    def run(self, *command: str | Path) -> str:
        """Output of a program that knows no checkout; a failure shows all that it printed."""
        variables = {
            **os.environ,
            "PATH": f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "COLUMNS": "200",
        }
        variables.pop("PYTHONPATH", None)
        done = subprocess.run(
            [*command], cwd=self.work, env=variables, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
        return done.stdout
