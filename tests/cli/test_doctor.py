"""``kvferry doctor``: each finding on a machine that is made up, and a look at this machine."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from kvferry.cli import doctor as judge
from kvferry.cli.doctor import JUDGES, State, reaches_of
from kvferry.cli.machine import (
    Clock,
    Folder,
    Gpus,
    Kernels,
    Machine,
    Rdma,
    Tracing,
    look,
    look_at_folder,
    look_for_gpus,
)
from kvferry.cli.trials import Trials, try_all
from kvferry.errors import HostError
from kvferry.plugins import TRANSPORTS, temporary_plugin
from kvferry.transports.shm import ShmTransport
from kvferry.transports.tcp import TcpTransport

GIB = 1 << 30
ALL = dict.fromkeys(("shm", "vm", "tcp", "nixl", "ucx"), "")
WELL = Machine(
    shm=Folder("/dev/shm", nbytes=8 * GIB, free=8 * GIB),
    tracing=Tracing(scope=1),
    memlock=None,
    files=65536,
    rdma=Rdma({"mlx5_0/1": "ACTIVE"}, is_usable=True),
    gpus=Gpus(are_there=True, names=("H200", "H200")),
    clock=Clock("tsc", 5e-8, is_synchronised=True),
    kernels=Kernels((Folder("/app", free=GIB),), Folder("/home/.triton", free=GIB)),
    trials=Trials(
        ALL,
        {name: "" for name in ALL if name != "shm"},
        dict.fromkeys(("cuda_ipc", "nixl", "tcp", "ucx"), ""),
    ),
)
BARE = replace(
    WELL,
    rdma=Rdma(),
    gpus=Gpus(),
    trials=replace(WELL.trials, device={}),
)
"""A machine for caches in host memory, without GPUs and RDMA."""


def refused(machine: Machine, name: str, reason: str = "it is forbidden") -> Machine:
    """The machine, on which a transport cannot be used."""
    trials = Trials(
        *(
            {each: reason if each == name else told for each, told in results.items()}
            for results in (
                machine.trials.allocated,
                machine.trials.existing,
                machine.trials.device,
            )
        )
    )
    return replace(machine, trials=trials)


@pytest.mark.parametrize("finding", JUDGES, ids=lambda each: each.__name__)
def test_a_machine_that_has_all_gets_no_remedies(finding):
    found = finding(WELL)
    assert (found.state, found.remedy) == (State.OK, "")
    assert found.meaning


CASES = {
    "no room for a cache in /dev/shm": (
        judge.shared_memory,
        replace(WELL, shm=Folder("/dev/shm", nbytes=64 << 20, free=64 << 20)),
        State.LIMITED,
        "64.0 MiB free of 64.0 MiB",
        "--shm-size",
    ),
    "no /dev/shm": (
        judge.shared_memory,
        replace(WELL, shm=Folder("/dev/shm", "this user cannot write to /dev")),
        State.MISSING,
        "this user cannot write to /dev",
        "--shm-size",
    ),
    "shm refuses": (
        judge.shared_memory,
        refused(WELL, "shm", "the kernel refuses"),
        State.MISSING,
        "the kernel refuses",
        "enlarge it",
    ),
    "Yama forbids": (
        judge.other_processes,
        refused(replace(WELL, tracing=Tracing(scope=2)), "vm"),
        State.MISSING,
        "it is forbidden; kernel.yama.ptrace_scope is 2",
        "run `sysctl kernel.yama.ptrace_scope=1`",
    ),
    "Yama forbids until the next start": (
        judge.other_processes,
        refused(replace(WELL, tracing=Tracing(scope=3)), "vm"),
        State.MISSING,
        "kernel.yama.ptrace_scope is 3",
        "start the machine again",
    ),
    "seccomp forbids": (
        judge.other_processes,
        refused(replace(WELL, tracing=Tracing(is_filtered=True)), "vm"),
        State.MISSING,
        "a seccomp filter is active",
        "a seccomp profile that allows process_vm_readv and pidfd_open",
    ),
    "another user": (
        judge.other_processes,
        refused(replace(WELL, tracing=Tracing()), "vm"),
        State.MISSING,
        "no rule of Yama or seccomp",
        "one user in one PID namespace",
    ),
    "RDMA with a limit of locked memory": (
        judge.locked_memory,
        replace(WELL, memlock=8 << 20),
        State.LIMITED,
        "a process may lock 8.0 MiB",
        "ulimit -l unlimited",
    ),
    "a limit of locked memory without RDMA": (
        judge.locked_memory,
        replace(BARE, memlock=8 << 20),
        State.OK,
        "there is no RDMA",
        "",
    ),
    "no GPU": (judge.gpus, BARE, State.MISSING, "no device file of a GPU", "--gpus all"),
    "a GPU without torch": (
        judge.gpus,
        replace(WELL, gpus=Gpus(are_there=True, problem="not installed: torch")),
        State.MISSING,
        "not installed: torch",
        "kvferry[gpu]",
    ),
    "GPUs apart": (
        judge.gpus,
        replace(WELL, gpus=Gpus(True, ("H200", "L4"), apart=((0, 1),))),
        State.LIMITED,
        "0: H200, 1: L4; out of reach: 0 from 1",
        "nvidia-smi topo -m",
    ),
    "no NIXL": (
        judge.nixl,
        refused(WELL, "nixl", "the package nixl does not load"),
        State.MISSING,
        "the package nixl does not load",
        "with the extra nixl",
    ),
    "no UCX": (
        judge.ucx,
        refused(WELL, "ucx", "the package ucxx does not load"),
        State.MISSING,
        "the package ucxx does not load",
        "with the extra ucx",
    ),
    "a transport that is not registered": (
        judge.ucx,
        replace(WELL, trials=Trials()),
        State.MISSING,
        "the transport is not registered",
        "with the extra ucx",
    ),
    "no RDMA": (judge.rdma, BARE, State.MISSING, "no device in", "--device /dev/infiniband"),
    "RDMA that is down": (
        judge.rdma,
        replace(WELL, rdma=Rdma({"mlx5_0/1": "DOWN", "mlx5_1/1": "INIT"})),
        State.LIMITED,
        "mlx5_0/1 is DOWN, mlx5_1/1 is INIT",
        "bring a port up",
    ),
    "few files": (
        judge.open_files,
        replace(WELL, files=256),
        State.LIMITED,
        "a process may open 256, enough for 25 engines",
        "ulimit -n",
    ),
    "files without a limit": (
        judge.open_files,
        replace(WELL, files=None),
        State.OK,
        "no limit",
        "",
    ),
    "a wall clock that nothing sets": (
        judge.clock,
        replace(WELL, clock=Clock("tsc", 5e-8, is_synchronised=False)),
        State.LIMITED,
        "tsc, 50 ns a reading; not synchronised",
        "chrony",
    ),
    "a slow clock": (
        judge.clock,
        replace(WELL, clock=Clock("hpet", 2e-6, is_synchronised=True)),
        State.LIMITED,
        "hpet, 2000 ns a reading; synchronised",
        "a clock source such as tsc",
    ),
    "a system that does not tell of its clock": (
        judge.clock,
        replace(WELL, clock=Clock("", 5e-8)),
        State.OK,
        "unknown source, 50 ns a reading; whether synchronised: unknown",
        "",
    ),
    "kernels that cannot be kept": (
        judge.kernels,
        replace(
            WELL,
            kernels=Kernels(
                (Folder("/app", "this user cannot write to /app"), Folder("/home")),
                Folder("/home/.triton"),
                are_kept=False,
            ),
        ),
        State.LIMITED,
        "cannot be kept: /app: this user cannot write to /app; /home: full",
        "NUMBA_CACHE_DIR",
    ),
    "kernels of an image": (
        judge.kernels,
        replace(WELL, kernels=Kernels((Folder("/app", "this user cannot"),), Folder("/t"))),
        State.OK,
        "found in a folder that this user cannot write",
        "",
    ),
    "little room for kernels": (
        judge.kernels,
        replace(WELL, kernels=Kernels((Folder("/app", free=1 << 20),), Folder("/t"))),
        State.LIMITED,
        "/app: 1.0 MiB free",
        "kvferry prepare",
    ),
    "no folder for kernels of GPUs": (
        judge.gpu_kernels,
        replace(WELL, kernels=replace(WELL.kernels, device=Folder("/t", "it is not a folder"))),
        State.LIMITED,
        "/t: it is not a folder",
        "TRITON_CACHE_DIR",
    ),
    "no GPU that needs kernels": (judge.gpu_kernels, BARE, State.OK, "no GPU", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_a_finding_names_what_was_found_and_the_remedy(case):
    finding, machine, state, found, remedy = CASES[case]
    seen = finding(machine)
    assert seen.state == state
    assert found in seen.found
    assert remedy in seen.remedy
    assert bool(seen.remedy) == (state != State.OK)


# ---- the transports that are left ---------------------------------------------------------------


def test_caches_in_host_memory_get_their_default_transports_first():
    own, others = reaches_of(BARE)
    assert (own.default, own.named) == (("shm",), ("vm", "tcp", "nixl", "ucx"))
    assert (others.default, others.named) == (("vm", "tcp"), ("nixl", "ucx"))
    assert not own.lacking
    assert not others.lacking


def test_caches_on_a_gpu_take_nixl_by_default_only_over_rdma():
    assert [*reaches_of(WELL)][-1].default == ("cuda_ipc", "nixl", "tcp")
    without = refused(replace(WELL, rdma=Rdma()), "nixl")
    last = [*reaches_of(without)][-1]
    assert (last.default, last.lacking) == (("cuda_ipc", "tcp"), {})


def test_a_gpu_without_torch_lacks_the_transports_of_a_gpu():
    gpus = Gpus(are_there=True, problem="not installed: torch")
    machine = replace(WELL, gpus=gpus, trials=replace(WELL.trials, device={}))
    assert [*reaches_of(machine)][-1].lacking.keys() == {"cuda_ipc", "nixl", "tcp"}


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def seen(monkeypatch):
    """``seen(machine)`` makes the command see a machine that is made up."""
    return lambda machine: monkeypatch.setattr(judge, "look", lambda: machine)


def test_a_machine_that_lacks_only_what_is_optional_is_well(kvferry, seen):
    seen(BARE)
    outcome = kvferry("doctor")
    assert outcome.code == 0, outcome.err
    assert "missing  GPUs: no device file of a GPU" in outcome.out
    assert "caches in host memory of the reference engine: shm; if" in outcome.out


@pytest.mark.parametrize("name", ["shm", "vm", "tcp"])
def test_a_default_transport_that_is_lacking_gives_exit_code_1(name, kvferry, seen):
    seen(refused(BARE, name, "it is [forbidden]"))
    outcome = kvferry("doctor")
    assert outcome.code == 1
    assert f"not {name}: it is [forbidden]" in outcome.out


def test_a_further_transport_that_cannot_be_tried_is_named_with_its_reason(kvferry, seen):
    reason = "transport_config: pigeon: folder is required"
    trials = replace(BARE.trials, allocated={**BARE.trials.allocated, "pigeon": reason})
    seen(replace(BARE, trials=trials))
    outcome = kvferry("doctor")
    assert outcome.code == 0
    assert f"not pigeon: {reason}" in outcome.out


def test_json_has_every_finding_and_every_cache(kvferry, seen):
    seen(refused(BARE, "vm"))
    outcome = kvferry("doctor", "--json")
    told = json.loads(outcome.out)
    assert outcome.code == 1
    assert len(told["findings"]) == len(JUDGES)
    found = {each["name"]: each for each in told["findings"]}
    assert found["ptrace and seccomp"]["state"] == "missing"
    assert found["ptrace and seccomp"]["remedy"]
    assert told["caches"][1]["lacking"] == {"vm": "it is forbidden"}


# ---- looking ------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path):
    """The files of a machine."""
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    clock = tmp_path / "sys/devices/system/clocksource/clocksource0"
    for folder in (port, clock, tmp_path / "dev/shm", tmp_path / "proc/sys/kernel/yama"):
        folder.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (clock / "current_clocksource").write_text("hpet\n")
    (tmp_path / "proc/sys/kernel/yama/ptrace_scope").write_text("2\n")
    (tmp_path / "proc/self").mkdir()
    (tmp_path / "proc/self/status").write_text("Name:\tx\nSeccomp:\t2\n")
    return tmp_path


def test_what_the_system_says_is_read_from_its_files(root, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(root / "triton"))
    machine = look(root)
    assert machine.rdma.ports == {"mlx5_0/1": "ACTIVE"}
    assert machine.clock.source == "hpet"
    assert 0 < machine.clock.read_s < 1e-3
    assert machine.tracing == Tracing(scope=2, is_filtered=True)
    assert (machine.shm.path, machine.shm.problem) == (str(root / "dev/shm"), "")
    assert 0 < machine.shm.free <= machine.shm.nbytes
    assert machine.gpus == Gpus()
    assert machine.kernels.device.path == str(root / "triton")
    assert machine.kernels.are_kept
    assert machine.trials.device == {}
    # Other processes really read; what is not installed is told by name.
    for name in ("shm", "vm", "tcp"):
        assert machine.trials.allocated[name] == ""
    assert "shm" not in machine.trials.existing
    assert machine.trials.existing["vm"] == machine.trials.existing["tcp"] == ""


def test_a_folder_that_is_not_there_yet_is_looked_at_where_it_would_be_made(tmp_path, monkeypatch):
    folder = look_at_folder(tmp_path / "not" / "yet")
    assert (folder.problem, folder.free > 0) == ("", True)
    (tmp_path / "file").touch()
    assert look_at_folder(tmp_path / "file").problem == f"{tmp_path / 'file'} is not a folder"
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    folder = look_at_folder(tmp_path / "not" / "yet")
    assert folder.problem == f"this user cannot write to {tmp_path}"


def test_a_folder_that_this_user_may_not_enter_is_named(tmp_path, monkeypatch):
    closed = tmp_path / "closed"
    closed.mkdir()
    exists, access = Path.exists, os.access

    def hidden(path):
        if closed in path.parents:
            raise PermissionError(13, "Permission denied", str(path))
        return exists(path)

    monkeypatch.setattr(Path, "exists", hidden)
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    folder = look_at_folder(closed / "triton" / "cache")
    assert folder.problem == f"this user cannot write to {closed}"


def test_without_a_gpu_torch_is_not_imported(tmp_path):
    code = (
        "import sys; from pathlib import Path; from kvferry.cli.machine import look_for_gpus\n"
        f"print(look_for_gpus(Path({str(tmp_path)!r})).are_there, 'torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout == "False False\n"


class Cuda:
    """Two GPUs in the place of ``torch.cuda``; the second cannot read the memory of the first."""

    def __init__(self, *, available=True):
        self.available = available

    def is_available(self):
        return self.available

    def device_count(self):
        return 2

    def get_device_name(self, number):
        return f"card {number}"

    def can_device_access_peer(self, reader, source):
        return reader < source


@pytest.mark.parametrize("device", ["nvidia0", "dxg"])
def test_gpus_are_asked_whether_they_reach_each_other(device, root):
    (root / "dev" / device).touch()
    gpus = look_for_gpus(root, Cuda())
    assert gpus == Gpus(are_there=True, names=("card 0", "card 1"), apart=((1, 0),))


def test_a_gpu_that_torch_cannot_use_is_a_problem(root):
    (root / "dev/nvidia0").touch()
    gpus = look_for_gpus(root, Cuda(available=False))
    assert (gpus.names, gpus.problem) == (
        (),
        "torch finds no driver for it, or is built for CPUs",
    )


# ---- trials -------------------------------------------------------------------------------------


class RefusingTransport(ShmTransport):
    """A transport that this machine lacks something for."""

    @classmethod
    def open(cls, options):
        raise HostError("no room at all")


class MissingTransport(ShmTransport):
    """A transport whose package is not installed."""

    @classmethod
    def open(cls, options):
        raise ModuleNotFoundError("No module named 'pigeons'")


class WrongTransport(TcpTransport):
    """A transport whose endpoint no reader understands."""

    def endpoint(self):
        return b"?"


def test_the_reason_of_a_transport_that_cannot_be_used_is_its_own():
    with (
        temporary_plugin(TRANSPORTS, "shm", RefusingTransport),
        temporary_plugin(TRANSPORTS, "vm", MissingTransport),
        temporary_plugin(TRANSPORTS, "tcp", WrongTransport),
        temporary_plugin(TRANSPORTS, "pigeon", RefusingTransport),
    ):
        trials = try_all(None)
    assert [*trials.allocated][:3] == ["shm", "vm", "tcp"]
    assert trials.allocated["shm"] == trials.allocated["pigeon"] == "no room at all"
    assert trials.allocated["vm"] == "No module named 'pigeons'"
    assert trials.allocated["tcp"].startswith("tcp endpoint of 1 bytes: ")  # the child says so


def test_a_transport_of_a_gpu_is_opened_as_an_engine_opens_it():
    seen = {}

    class Served(TcpTransport):
        @classmethod
        def open(cls, options):
            seen[cls.__name__] = dict(options.extra)
            return super().open(replace(options, extra={}))

    class CudaIpc(RefusingTransport):
        @classmethod
        def open(cls, options):
            seen[cls.__name__] = dict(options.extra)
            return super().open(options)

    with (
        temporary_plugin(TRANSPORTS, "cuda_ipc", CudaIpc),
        temporary_plugin(TRANSPORTS, "tcp", Served),
        temporary_plugin(TRANSPORTS, "nixl", MissingTransport),
    ):
        results = try_all("cuda:1").device
    assert seen == {"CudaIpc": {"device": 1}, "Served": {}}
    assert results["cuda_ipc"] == "no room at all"
    assert results["nixl"] == "No module named 'pigeons'"
    assert results["tcp"] == ""
    assert results.keys().isdisjoint({"shm", "vm"})  # made for host memory
