"""``kvferry doctor``: what this machine has and lacks, and the transports that this leaves."""

import enum
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
from rich.console import Console
from rich.text import Text

from kvferry.cli.console import make_console, print_json
from kvferry.cli.machine import Folder, Machine, look
from kvferry.cli.options import AsJson
from kvferry.explain.sentences import bytes_text
from kvferry.transports.registry import ALLOCATED, IN_HOST_MEMORY, ON_A_DEVICE
from kvferry.transports.shm_segment import SHM_DIR

LACKING_EXIT_CODE = 1
"""Exit code if a transport that engines take by default cannot be used."""
SHM_BYTES = 1 << 30
"""Number of free bytes of ``/dev/shm`` below which a KV cache of a real model has no room."""
KERNEL_BYTES = 64 << 20
"""Number of free bytes for kernels; all kernels of one kind of CPU take 12 MB."""
FILES = 1024
"""Number of open files that a process of a cluster with a hundred engines may need."""
FILES_PER_ENGINE = 10
"""Number of open files that a process may need for each other engine."""
SLOW_CLOCK_S = 5e-7
"""Seconds of a reading of the clock; a clock that needs a system call takes longer."""


class State(enum.StrEnum):
    """State of a finding."""

    OK = "ok"
    LIMITED = "limited"
    """It is there, and does less than it could."""
    MISSING = "missing"


class Finding(msgspec.Struct, frozen=True):
    """A thing that kvferry may use on this machine."""

    name: str
    state: State
    found: str
    """What was found."""
    meaning: str
    """What the finding means for kvferry."""
    remedy: str = ""
    """How to change a state that is not ``ok``."""


class Reach(msgspec.Struct, frozen=True):
    """The transports for one kind of KV cache on this machine."""

    cache: str
    """Where the cache lies."""
    default: tuple[str, ...]
    """Transports that engines take by default, best first."""
    named: tuple[str, ...]
    """Further transports, which engines take if ``transport`` names them."""
    lacking: dict[str, str]
    """Transport that engines would take by default → reason why it cannot be used."""
    failed: dict[str, str]
    """Further transport → reason why it cannot be used, or not be tried without its keys."""


def doctor(as_json: AsJson = False) -> None:
    """Looks at this machine and prints the findings.

    Raises:
        SystemExit: 1 if a transport that engines take by default cannot be used.
    """
    with Console(stderr=True).status("trying the transports; compiling kernels takes a minute"):
        machine = look()
    findings = [judge(machine) for judge in JUDGES]
    reaches = [*reaches_of(machine)]
    if as_json:
        print_json({"findings": findings, "caches": reaches})
    else:
        _show(findings, reaches, make_console())
    if any(reach.lacking for reach in reaches):
        sys.exit(LACKING_EXIT_CODE)


def reaches_of(machine: Machine) -> Iterator[Reach]:
    """The transports for caches in host memory, and, if there is a GPU, for caches on it."""
    trials = machine.trials
    yield _reach("in host memory of the reference engine", ALLOCATED, trials.allocated)
    yield _reach("in host memory of another engine, such as vLLM", IN_HOST_MEMORY, trials.existing)
    if machine.gpus.are_there:
        # Without RDMA an engine leaves nixl out, and lacks nothing.
        first = [name for name in ON_A_DEVICE if name != "nixl" or machine.rdma.is_usable]
        yield _reach("on a GPU", first, trials.device)


def _reach(cache: str, first: Sequence[str], results: Mapping[str, str]) -> Reach:
    usable = [name for name, problem in results.items() if not problem]
    return Reach(
        cache,
        default=tuple(name for name in first if name in usable),
        named=tuple(name for name in usable if name not in first),
        lacking={name: results.get(name, "not tried") for name in first if name not in usable},
        failed={name: why for name, why in results.items() if why and name not in first},
    )


# ---- findings -----------------------------------------------------------------------------------


def shared_memory(machine: Machine) -> Finding:
    """Whether the transport ``shm`` has room for KV caches."""
    name, shm = "shared memory", machine.shm
    meaning = "shm keeps whole KV caches there, and vLLM on a CPU needs 400 MiB of it"
    remedy = "enlarge it: `mount -o remount,size=...`; Docker: --shm-size; Kubernetes: a volume "
    remedy += f"emptyDir with medium Memory at {SHM_DIR}"
    found = f"{shm.path}: {bytes_text(shm.free)} free of {bytes_text(shm.nbytes)}"
    if problem := shm.problem or machine.trials.allocated.get("shm", ""):
        return Finding(name, State.MISSING, f"{found}; {problem}", meaning, remedy)
    if shm.free < SHM_BYTES:
        return Finding(name, State.LIMITED, found, meaning, remedy)
    return Finding(name, State.OK, found, meaning)


def other_processes(machine: Machine) -> Finding:
    """Whether the transport ``vm`` may read the memory of another process."""
    name, problem = "ptrace and seccomp", machine.trials.allocated.get("vm", "")
    meaning = "vm moves blocks between processes of this host that allocated their caches "
    meaning += "themselves, as vLLM does; without vm they use tcp"
    scope, rules = machine.tracing.scope, []
    if scope is not None:
        rules.append(f"kernel.yama.ptrace_scope is {scope}")
    if machine.tracing.is_filtered:
        rules.append("a seccomp filter is active")
    said = "; ".join(rules) or "no rule of Yama or seccomp"
    if not problem:
        return Finding(name, State.OK, f"another process has read memory of this; {said}", meaning)
    if scope == 3:
        remedy = "set kernel.yama.ptrace_scope to 1 and start the machine again"
    elif scope == 2:
        remedy = "run `sysctl kernel.yama.ptrace_scope=1`"
    elif machine.tracing.is_filtered:
        remedy = "use a seccomp profile that allows process_vm_readv and pidfd_open"
    else:
        remedy = "run the engines of a host as one user in one PID namespace"
    return Finding(name, State.MISSING, f"{problem}; {said}", meaning, remedy)


def locked_memory(machine: Machine) -> Finding:
    """Whether NIXL and UCX may register a whole KV cache for RDMA."""
    name, limit = "memlock", machine.memlock
    meaning = "nixl and ucx lock the memory that they register for RDMA; kvferry locks no other"
    if limit is None:
        return Finding(name, State.OK, "no limit", meaning)
    found = f"a process may lock {bytes_text(limit)}"
    if not machine.rdma.is_usable:
        return Finding(name, State.OK, f"{found}; there is no RDMA", meaning)
    remedy = "set `ulimit -l unlimited`; Docker: --ulimit memlock=-1; systemd: LimitMEMLOCK"
    return Finding(name, State.LIMITED, found, meaning, remedy)


def gpus(machine: Machine) -> Finding:
    """Whether there are GPUs, and whether they reach each other."""
    name, there = "GPUs", machine.gpus
    meaning = "cuda_ipc moves blocks between GPUs of this host that reach each other; other GPUs "
    meaning += "use nixl or tcp"
    if not there.are_there:
        remedy = "none is needed for caches in host memory; a container needs the devices: "
        remedy += "Docker: --gpus all"
        return Finding(name, State.MISSING, "no device file of a GPU", meaning, remedy)
    if there.problem:
        remedy = "install NVIDIA's driver, torch built for CUDA, and kvferry[gpu]"
        return Finding(name, State.MISSING, there.problem, meaning, remedy)
    found = ", ".join(f"{number}: {each}" for number, each in enumerate(there.names))
    if there.apart:
        pairs = ", ".join(f"{reader} from {source}" for reader, source in there.apart)
        remedy = "give the engines of a pair GPUs that reach each other: `nvidia-smi topo -m`"
        return Finding(name, State.LIMITED, f"{found}; out of reach: {pairs}", meaning, remedy)
    return Finding(name, State.OK, found, meaning)


def nixl(machine: Machine) -> Finding:
    """Whether NIXL is installed and works."""
    return _package(machine, "nixl", "nixl moves blocks over RDMA, to and from GPUs as well")


def ucx(machine: Machine) -> Finding:
    """Whether ucxx is installed and works."""
    return _package(machine, "ucx", "ucx moves blocks over RDMA, shared memory or TCP")


def _package(machine: Machine, name: str, meaning: str) -> Finding:
    problem = machine.trials.allocated.get(name, "the transport is not registered")
    meaning += "; it is used if `transport` names it"
    if not problem:
        return Finding(name, State.OK, "another process has read memory over it", meaning)
    remedy = f"install kvferry with the extra {name} where RDMA is to be used"
    return Finding(name, State.MISSING, problem, meaning, remedy)


def rdma(machine: Machine) -> Finding:
    """Whether there is a port for RDMA that can be used."""
    name, ports = "RDMA", machine.rdma.ports
    meaning = "nixl and ucx use RDMA between hosts; tcp needs none"
    found = ", ".join(f"{port} is {state}" for port, state in ports.items())
    if machine.rdma.is_usable:
        return Finding(name, State.OK, found, meaning)
    if not ports:
        remedy = "none is needed for tcp; a container needs the devices: Docker: "
        remedy += "--device /dev/infiniband"
        return Finding(name, State.MISSING, "no device in /sys/class/infiniband", meaning, remedy)
    remedy = "bring a port up, and let this user open /dev/infiniband/uverbs*"
    return Finding(name, State.LIMITED, found, meaning, remedy)


def open_files(machine: Machine) -> Finding:
    """Whether a process may open enough files for the connections of a cluster."""
    name, limit = "open files", machine.files
    meaning = f"a process needs up to {FILES_PER_ENGINE} files for each other engine"
    if limit is None:
        return Finding(name, State.OK, "no limit", meaning)
    found = f"a process may open {limit:,}, enough for {limit // FILES_PER_ENGINE:,} engines"
    remedy = "raise it: `ulimit -n`; Docker: --ulimit nofile=...; systemd: LimitNOFILE"
    return _unless(limit < FILES, name, found, meaning, remedy)


def clock(machine: Machine) -> Finding:
    """Whether the clocks are quick to read, and show the time of other hosts."""
    name, seen = "clock", machine.clock
    meaning = "leases and time limits follow the monotonic clock, so a wall clock that is wrong "
    meaning += "changes no decision; without a common time, logs, records and spans of several "
    meaning += "hosts do not compare (`kvferry trace` corrects for it)"
    found = f"{seen.source or 'unknown source'}, {seen.read_s * 1e9:.0f} ns a reading; "
    known = {True: "synchronised", False: "not synchronised", None: "whether synchronised: unknown"}
    found += known[seen.is_synchronised]
    remedies = []
    if seen.read_s > SLOW_CLOCK_S:
        remedies.append("a reading is slow: boot with a clock source such as tsc or kvm-clock")
    if seen.is_synchronised is False:
        remedies.append("run chrony or another NTP client on the host")
    return _unless(bool(remedies), name, found, meaning, "; ".join(remedies))


def kernels(machine: Machine) -> Finding:
    """Whether compiled kernels can be kept on disk."""
    meaning = "a process that finds no kernels compiles them at its start, for up to 40 s"
    remedy = "set NUMBA_CACHE_DIR to a folder that can be written, or run `kvferry prepare` when "
    remedy += "the image is built"
    folders = machine.kernels.host
    writable = next((folder for folder in folders if not folder.problem), None)
    if not machine.kernels.are_kept:
        tried = "; ".join(f"{folder.path}: {folder.problem or 'full'}" for folder in folders)
        return Finding("kernels", State.LIMITED, f"cannot be kept: {tried}", meaning, remedy)
    if writable is None:
        return Finding(
            "kernels", State.OK, "found in a folder that this user cannot write", meaning
        )
    return _room("kernels", writable, meaning, remedy)


def gpu_kernels(machine: Machine) -> Finding:
    """Whether kernels for GPUs can be kept on disk."""
    name, folder = "GPU kernels", machine.kernels.device
    meaning = "Triton compiles kernels for caches on a GPU, and keeps them there"
    remedy = "set TRITON_CACHE_DIR to a folder that can be written"
    if not machine.gpus.names:
        return Finding(name, State.OK, "no GPU that needs kernels", meaning)
    if folder.problem:
        return Finding(name, State.LIMITED, f"{folder.path}: {folder.problem}", meaning, remedy)
    return _room(name, folder, meaning, remedy)


def _room(name: str, folder: Folder, meaning: str, remedy: str) -> Finding:
    found = f"{folder.path}: {bytes_text(folder.free)} free"
    return _unless(folder.free < KERNEL_BYTES, name, found, meaning, remedy)


def _unless(is_limited: bool, name: str, found: str, meaning: str, remedy: str) -> Finding:
    """A finding that is well unless ``is_limited``; only then it has a remedy."""
    state = State.LIMITED if is_limited else State.OK
    return Finding(name, state, found, meaning, remedy if is_limited else "")


JUDGES: tuple[Callable[[Machine], Finding], ...] = (
    shared_memory,
    other_processes,
    locked_memory,
    gpus,
    nixl,
    ucx,
    rdma,
    open_files,
    clock,
    kernels,
    gpu_kernels,
)
"""Functions that judge a machine, in the order of the output."""

# ---- output -------------------------------------------------------------------------------------

_STYLES = {State.OK: "green", State.LIMITED: "yellow", State.MISSING: "red"}
_INDENT = " " * 9


def _show(findings: list[Finding], reaches: list[Reach], console: Console) -> None:
    # As plain text: names of devices and reasons may look like markup.
    for each in findings:
        head = Text.assemble((f"{each.state:<9}", _STYLES[each.state]), (f"{each.name}: ", "bold"))
        console.print(head + Text(each.found), soft_wrap=True)
        console.print(Text(f"{_INDENT}{each.meaning}", style="dim"), soft_wrap=True)
        if each.remedy:
            console.print(Text(f"{_INDENT}remedy: {each.remedy}"), soft_wrap=True)
    console.print()
    for reach in reaches:
        line = Text.assemble(
            (f"caches {reach.cache}: ", "bold"), ", ".join(reach.default) or "none"
        )
        if reach.named:
            line.append(f"; if `transport` names them: {', '.join(reach.named)}")
        console.print(line, soft_wrap=True)
        for style, reasons in (("red", reach.lacking), ("dim", reach.failed)):
            for name, reason in reasons.items():
                console.print(Text(f"{_INDENT}not {name}: {reason}", style=style), soft_wrap=True)
