"""The facts of this machine that ``kvferry doctor`` judges."""

import ctypes
import os
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvferry.cli.trials import Trials, try_all
from kvferry.layouts import compiled, kernels
from kvferry.transports.nixl_agents import has_rdma

_NOT_SYNCHRONISED = 5
"""Answer of ``adjtimex`` (``TIME_ERROR``) if nothing sets the clock."""
_TIMEX_BYTES = 256
"""Number of bytes for the C ``struct timex``, which has 208; its first field, 0, asks only."""
_READS = 10_000


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder to write to."""

    path: str
    problem: str = ""
    """Reason why nothing can be written there; empty if files can be written."""
    nbytes: int = 0
    """Size of its file system in bytes."""
    free: int = 0
    """Number of bytes that this user may still write."""


@dataclass(frozen=True, slots=True)
class Tracing:
    """Rules for reading the memory of other processes."""

    scope: int | None = None
    """Yama's ``ptrace_scope``; ``None`` without Yama."""
    is_filtered: bool = False
    """Whether a seccomp filter checks the system calls of this process."""


@dataclass(frozen=True, slots=True)
class Rdma:
    """Devices for RDMA."""

    ports: Mapping[str, str] = field(default_factory=dict)
    """``DEVICE/PORT`` → state of the port, in the words of Linux."""
    is_usable: bool = False
    """Whether UCX can use a port."""


@dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs of the machine, as torch sees them."""

    are_there: bool = False
    """Whether the system has a device file of a GPU."""
    names: tuple[str, ...] = ()
    """Names of the GPUs; empty if torch cannot use any."""
    apart: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs of which the first cannot read the memory of the second."""
    problem: str = ""
    """Reason why a GPU that is there cannot be used."""


@dataclass(frozen=True, slots=True)
class Clock:
    """The clocks of the machine."""

    source: str = ""
    """Hardware that the kernel reads; empty if the kernel does not say."""
    read_s: float = 0.0
    """Seconds that a reading of the monotonic clock takes."""
    is_synchronised: bool | None = None
    """Whether a service sets the wall clock; ``None`` if the system does not say."""


@dataclass(frozen=True, slots=True)
class Kernels:
    """Folders for compiled kernels."""

    host: tuple[Folder, ...]
    """Folders for kernels of the CPU, in the order in which they are tried."""
    device: Folder
    """Folder for kernels of GPUs, which Triton compiles."""
    are_kept: bool = True
    """Whether all kernels of the trials were found on disk, or are now on disk."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine has."""

    shm: Folder
    tracing: Tracing
    memlock: int | None
    """Number of bytes that a process may lock in memory; ``None`` without a limit."""
    files: int | None
    """Number of files that a process may open; ``None`` without a limit."""
    rdma: Rdma
    gpus: Gpus
    clock: Clock
    kernels: Kernels
    trials: Trials


def look(root: Path = Path("/")) -> Machine:
    """Looks at this machine, tries the transports, and compiles kernels that are not on disk yet.

    Args:
        root: folder under which ``dev``, ``proc`` and ``sys`` lie; for tests.
    """
    gpus = look_for_gpus(root)
    trials = try_all("cuda:0" if gpus.names else None)
    return Machine(
        shm=look_at_folder(root / "dev/shm"),
        tracing=_tracing(root / "proc"),
        memlock=_limit(resource.RLIMIT_MEMLOCK),
        files=_limit(resource.RLIMIT_NOFILE),
        rdma=Rdma(_rdma_ports(root / "sys/class/infiniband"), has_rdma()),
        gpus=gpus,
        clock=_clock(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        kernels=Kernels(
            host=tuple(
                look_at_folder(Path(folder))
                for folder in compiled.kernel_folders(Path(kernels.__file__))
            ),
            device=look_at_folder(Path(os.environ.get("TRITON_CACHE_DIR") or "~/.triton/cache")),
            are_kept=compiled.is_kept(),  # after the trials, which use the kernels
        ),
        trials=trials,
    )


def look_at_folder(path: Path) -> Folder:
    """The room in a folder, which need not exist: then, in the folder where it would be made."""
    try:
        path = path.expanduser()
    except RuntimeError:
        return Folder(str(path), "the user has no home folder")
    there = path
    while not _exists(there):
        there = there.parent
    room = os.statvfs(there)
    nbytes, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    problem = ""
    if not there.is_dir():
        problem = f"{there} is not a folder"
    elif not os.access(there, os.W_OK | os.X_OK):
        problem = f"this user cannot write to {there}"
    return Folder(str(path), problem, nbytes, free)


def _exists(path: Path) -> bool:
    """Whether a path exists, as far as this user may know."""
    try:
        return path.exists()
    except PermissionError:
        return False


def look_for_gpus(root: Path, cuda: Any = None) -> Gpus:
    """The GPUs. Without a device file of a GPU, torch is not imported.

    Args:
        root: folder under which ``dev`` lies.
        cuda: the module ``torch.cuda``, for tests.
    """
    if not any((root / "dev").glob("nvidia[0-9]*")) and not (root / "dev/dxg").exists():
        return Gpus()
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if cuda is None and missing:
        return Gpus(are_there=True, problem=f"not installed: {', '.join(missing)}")
    if cuda is None:
        import torch  # slow

        cuda = torch.cuda
    if not cuda.is_available():
        return Gpus(are_there=True, problem="torch finds no driver for it, or is built for CPUs")
    count = range(cuda.device_count())
    return Gpus(
        are_there=True,
        names=tuple(cuda.get_device_name(number) for number in count),
        apart=tuple(
            (reader, source)
            for reader in count
            for source in count
            if reader != source and not cuda.can_device_access_peer(reader, source)
        ),
    )


def _tracing(proc: Path) -> Tracing:
    scope = _text(proc / "sys/kernel/yama/ptrace_scope")
    status = _text(proc / "self/status").splitlines()
    return Tracing(int(scope) if scope else None, "Seccomp:\t2" in status)


def _rdma_ports(devices: Path) -> dict[str, str]:
    found = {}
    for port in sorted(devices.glob("*/ports/*")):
        state = _text(port / "state").rpartition(": ")[2]
        found[f"{port.parent.parent.name}/{port.name}"] = state or "unknown"
    return found


def _limit(kind: int) -> int | None:
    limit, _highest = resource.getrlimit(kind)
    return None if limit == resource.RLIM_INFINITY else limit


def _clock(source: Path) -> Clock:
    begun = time.perf_counter()
    for _ in range(_READS):
        time.monotonic()
    read_s = (time.perf_counter() - begun) / _READS
    adjtimex = getattr(ctypes.CDLL(None), "adjtimex", None)  # glibc and musl have it
    state = -1 if adjtimex is None else adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    return Clock(_text(source), read_s, None if state < 0 else state != _NOT_SYNCHRONISED)


def _text(path: Path) -> str:
    """Text of a small file of the kernel; empty if the file cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""
