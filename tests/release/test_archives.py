"""The wheel and the source archive hold what they should, and nothing else."""

import re
import subprocess
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from kvferry import __version__
from tests.release.conftest import ROOT, TOOLS, built

pytestmark = pytest.mark.release

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
INFO = f"kvferry-{__version__}.dist-info"
DEMO = "examples/demo"


def tracked(*folders: str) -> set[str]:
    """The files of a commit, below some folders."""
    command = ["git", "ls-files", *folders]
    return {*subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()}


@pytest.fixture(scope="module")
def in_wheel(wheel: Path) -> dict[str, bytes]:
    """Name → content of each file of the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def in_source(source_archive: Path) -> dict[str, bytes]:
    """Path below the archive's folder → content of each file."""
    with tarfile.open(source_archive) as archive:
        files = [(member, archive.extractfile(member)) for member in archive if member.isfile()]
        return {
            member.name.partition("/")[2]: file.read() for member, file in files if file is not None
        }


@pytest.fixture(scope="module")
def metadata(in_wheel):
    return message_from_bytes(in_wheel[f"{INFO}/METADATA"])


def test_the_wheel_has_the_package_and_the_demo_and_nothing_else(in_wheel):
    demo = {name for name in tracked(DEMO) if not Path(name).name.startswith("test_")}
    wanted = tracked("kvferry") | {f"kvferry/{name}" for name in demo}
    told = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE"}
    assert in_wheel.keys() == wanted | {f"{INFO}/{name}" for name in told}
    assert "kvferry/py.typed" in in_wheel
    assert "kvferry/layouts/kernels.py" in in_wheel


def test_the_wheel_is_of_every_python_and_machine(wheel):
    assert wheel.name == f"kvferry-{__version__}-py3-none-any.whl"


def test_the_source_archive_is_the_checkout_without_what_ci_needs(in_source):
    left_out = {name for name in tracked() if name.startswith(".ci/")}
    assert in_source.keys() == (tracked() - left_out) | {"PKG-INFO"}


def test_no_file_names_the_folder_in_which_it_was_built(in_wheel, in_source):
    place = str(ROOT).encode()
    assert [name for name, content in (in_wheel | in_source).items() if place in content] == []


def test_the_metadata_are_those_of_the_project(metadata):
    assert metadata["Name"] == "kvferry"
    assert metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] == PROJECT["requires-python"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert {*metadata.get_all("Provides-Extra")} == {*PROJECT["optional-dependencies"]}
    base = [each for each in metadata.get_all("Requires-Dist") if "extra ==" not in each]
    names = {re.split(r"[<>=]", requirement)[0] for requirement in PROJECT["dependencies"]}
    assert {re.split(r"[<>=]", requirement)[0] for requirement in base} == names


def test_every_release_of_python_that_is_tested_is_told(metadata):
    told = {line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier")}
    assert {"3.11", "3.12", "3.13"} <= told


def test_the_plugins_of_the_wheel_are_those_of_the_project(in_wheel):
    told = in_wheel[f"{INFO}/entry_points.txt"].decode()
    for group, plugins in PROJECT["entry-points"].items():
        section = told.partition(f"[{group}]")[2].partition("[")[0]
        lines = [f"{name} = {plugin}" for name, plugin in plugins.items()]
        assert sorted(section.strip().splitlines()) == sorted(lines)


def test_twine_finds_nothing_wrong(wheel, source_archive):
    command = [TOOLS / "twine", "check", "--strict", wheel, source_archive]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_the_chart_is_beside_them():
    with tarfile.open(built("kvferry-vllm-*.tgz")) as archive:
        names = {member.name for member in archive}
    folder = "examples/helm/kvferry-vllm"
    wanted = {f"kvferry-vllm/{Path(name).relative_to(folder)}" for name in tracked(folder)}
    assert names == wanted
