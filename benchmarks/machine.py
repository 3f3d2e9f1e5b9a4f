"""Where and when the figures were taken: they mean little without it."""

import importlib.metadata
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec

import kvferry

_PACKAGES = ("numpy", "numba", "pyzmq", "torch", "nixl", "nixl-cu12")


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the machine and what runs on it."""

    date: str
    """UTC, at the start."""
    cpu: str
    cores: int
    """That this process may run on."""
    memory_gib: float
    kernel: str
    python: str
    versions: dict[str, str]
    load_before: float
    """Processes that ran or wanted to, over the last minute, before the benchmark began."""


def load_average() -> float:
    """Processes that ran or wanted to, over the last minute."""
    return round(os.getloadavg()[0], 2)


def command_of(module: str) -> str:
    """The command that started this process: ``python -m module`` and its arguments, of paths of
    this machine the names.
    """
    arguments = [Path(each).name if each.startswith("/") else each for each in sys.argv[1:]]
    return shlex.join(["python", "-m", module, *arguments])


def describe_machine() -> Machine:
    """Reads them off this machine."""
    versions = {"kvferry": kvferry.__version__}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return Machine(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        kernel=platform.release(),
        python=platform.python_version(),
        versions=versions,
        load_before=load_average(),
    )


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    return platform.machine()
