"""A cluster on hosts: its engines, its links, its router; how each is hurt and mended."""

import contextlib
import functools
import http.client
import os
import resource
import shutil
import signal
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec
import psutil

from benchmarks.faults.load import Endpoint, Prompts
from benchmarks.programs import family
from benchmarks.remote import ROOT
from benchmarks.vllm_servers.client import samples_in
from kvferry.lifetimes import Closing
from kvferry.testing.hosts import Host, HostProcess, Network

Found = TypeVar("Found")
Role = Literal["prefill", "decode"]
Step = Literal["waiting", "prefilling", "lent", "loading", "decoding"]
STEPS: tuple[Step, ...] = ("waiting", "prefilling", "lent", "loading", "decoding")

HTTP_PORT = 8000
CONTROL_PORT = 14600
KEY = "a key of the hosts of one benchmark, and of nobody else"
CLOCK_SOURCE = Path(__file__).parent / "clock.c"
START_S = 900.0
"""Seconds for engines to serve; a quiet machine needs 10, and 60 for vLLM's."""
SEEN_S = 60.0
"""Seconds in which a request must be seen at a step."""
DELAY_S = 0.01
"""Seconds from a prefill host to a decode host and back, so that loads take a while."""


class SystemFailedError(Exception):
    """The system itself cannot be used any more; the message says why."""


def until(condition: Callable[[], Found | None], within_s: float, what: str) -> Found:
    """Waits for a condition, and returns what it found.

    Raises:
        SystemFailedError: in vain.
    """
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise SystemFailedError(f"not within {within_s:g} s: {what}")
        time.sleep(0.05)
    return found


class Member(ABC):
    """One engine, or vLLM server, on a host of its own."""

    def __init__(self, role: Role, host: Host, client: Host, folder: Path) -> None:
        """One that does not run yet; its port is its own, as a cluster file wants it.

        Args:
            role: what it does.
            host: where it runs; has its name.
            client: where it is asked from.
            folder: for its log and what else it writes, a file system of its own.
        """
        self.role = role
        self.host = host
        port = HTTP_PORT + host.index
        self.http = Endpoint(client, host.ipv4, port, {"authorization": f"Bearer {KEY}"})
        self.folder = folder / host.name
        self.clock = folder / f"{host.name}.clock"
        """Eight bytes: by how many seconds its wall clock is off."""
        self.clock.write_bytes(bytes(8))
        self.folder.mkdir()
        self.must_run = False
        """Whether nobody has ended it on purpose."""
        self._process: HostProcess | None = None

    @property
    def name(self) -> str:
        """Its host's."""
        return self.host.name

    @abstractmethod
    def command(self) -> tuple[list[str], Mapping[str, str]]:
        """What is run, and its environment."""

    @abstractmethod
    def step_counts(self) -> Mapping[Step, float]:
        """Requests at each step, as its metrics tell."""

    @abstractmethod
    def used_blocks(self) -> float:
        """KV blocks that are not free."""

    def start(self) -> None:
        """Starts it (again), at its old address."""
        command, environment = self.command()
        quoted = f"exec \"$@\" >>'{self.folder}/log' 2>&1"
        self._process = self.host.run(
            ["sh", "-c", quoted, "sh", *command],
            env={**environment, "TMPDIR": str(self.folder), "CLOCK_FILE": str(self.clock)},
            cwd=ROOT,
        )
        self.must_run = True

    def is_up(self) -> bool:
        """Whether it serves."""
        try:
            return self.http.ask("GET", "/health", timeout_s=5.0)[0] == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def metrics(self) -> dict[str, float]:
        """See :func:`~benchmarks.vllm_servers.client.samples_in`."""
        return samples_in(self.http.ask("GET", "/metrics")[1].decode())

    @property
    def has_ended(self) -> bool:
        """Whether what was started has ended."""
        return self._process is None or self._process.poll() is not None

    def processes(self) -> list[psutil.Process]:
        """What was started, then all that descend from it."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError):
            return family(self._process.pid)
        return []

    def kill(self) -> None:
        """All its processes end at once."""
        self.must_run = False
        self.host.run(["sh", "-c", "kill -KILL -1"]).wait(60)
        assert self._process is not None
        self._process.wait(60)

    def restart(self) -> None:
        """All its processes end at once, and it is started again at its old address."""
        self.kill()
        self.start()

    def end(self) -> None:
        """Asks it to end, as an operator does, and waits.

        Raises:
            SystemFailedError: it does not.
        """
        self.must_run = False
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        until(lambda: self.has_ended, 120.0, f"the end of {self.name} after SIGTERM")

    @contextlib.contextmanager
    def few_files(self) -> Iterator[None]:
        """None of its processes may open another file or connection."""
        limits = {}
        for process in self.processes():
            with contextlib.suppress(OSError, psutil.Error):
                limits[process.pid] = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
                few = (process.num_fds(), limits[process.pid][1])
                resource.prlimit(process.pid, resource.RLIMIT_NOFILE, few)
        yield
        for pid, limit in limits.items():
            with contextlib.suppress(OSError):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, limit)

    @contextlib.contextmanager
    def clock_off(self, by_s: int) -> Iterator[None]:
        """Its wall clock is wrong."""
        for offset in (by_s, 0):
            with self.clock.open("r+b") as file:
                file.write(struct.pack("q", offset))
            if offset:
                yield

    @contextlib.contextmanager
    def full(self, folder: str | Path) -> Iterator[None]:
        """A file system in memory has no room left."""
        path = f"{folder}/fill"
        room = "mount -o remount,size=$(($(df -k --output=used {0} | tail -1) + 64))k {0}"
        fill = room.format(folder) + f" && ! head -c 100M /dev/zero > {path}"
        if self.host.run(["sh", "-c", f"{fill} 2>/dev/null"]).wait(60):
            raise SystemFailedError(f"{self.name}: {folder} cannot be filled")
        yield
        self.host.run(["sh", "-c", f"rm {path}; mount -o remount,size=1G {folder}"]).wait(60)

    def own_folder(self) -> None:
        """Its folder becomes a file system of its own."""
        command = f"mount -t tmpfs -o size=1G none '{self.folder}'"
        if self.host.run(["sh", "-c", command]).wait(60):
            raise SystemFailedError(f"{self.name}: no file system of its own")

    def save_log(self, path: Path) -> None:
        """Copies what it has written, out of its file system."""
        with path.open("wb") as file:
            self.host.run(["sh", "-c", f"cat '{self.folder}'/*log"], stdout=file).wait(60)


class System(Closing, ABC):
    """Two prefill and two decode members on hosts, and a router. A context manager."""

    name: str
    clients: int
    """Requests that are under way at a time."""
    requests: int
    """Of a cell, at least."""
    lease_s: float
    """The longest that a block may be held for a peer that is gone."""

    def __init__(self, folder: Path) -> None:
        """Starts hosts, and nothing on them.

        Raises:
            HostError: this machine allows none.
        """
        self.folder = folder
        self.network = Network.open()
        self.client = self.network.add_host("client")
        self._router_host = self.network.add_host("router")
        headers = {"authorization": f"Bearer {KEY}"}
        self.router = Endpoint(self.client, self._router_host.ipv4, HTTP_PORT, headers)
        self.members: list[Member] = []
        self.prompts = Prompts((), ())
        self._preload = build_clock(folder)

    @abstractmethod
    def make_members(self) -> list[Member]:
        """Those of the system."""

    @abstractmethod
    def router_arguments(self) -> list[str]:
        """Of ``kvferry router``."""

    @abstractmethod
    def make_prompts(self) -> Prompts:
        """What is asked, and the right answers; called when the members are up."""

    def open(self) -> Self:
        """Starts everything, and waits until it serves."""
        self.members = self.make_members()
        for member in self.members:
            member.own_folder()
            member.start()
        with (self.folder / "router.log").open("wb") as log:
            command = [sys.executable, "-m", "kvferry.cli", "router", "--host", self.router.address]
            self._router_host.run(
                [*command, "--port", str(HTTP_PORT), *self.router_arguments()],
                env=self.environment(),
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        self.mend()
        self.prompts = self.make_prompts()
        return self

    def environment(self) -> dict[str, str]:
        """Of every process."""
        return {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "KVFERRY_API_KEY": KEY,
            "KVFERRY_OPERATOR_KEY": KEY,
            "PYTHONFAULTHANDLER": "1",
            **({"LD_PRELOAD": str(self._preload)} if self._preload else {}),
        }

    @property
    def clock_can_be_set(self) -> bool:
        """Whether members' wall clocks can be wrong here: for that a C compiler is needed."""
        return self._preload is not None

    def of(self, role: Role) -> list[Member]:
        """The members of a role."""
        return [member for member in self.members if member.role == role]

    def pairs(self) -> Iterator[tuple[Host, Host]]:
        """Every prefill host with every decode host."""
        for prefill in self.of("prefill"):
            for decode in self.of("decode"):
                yield prefill.host, decode.host

    def state(self, member: Member) -> str:
        """What the router says of a member."""
        try:
            _, content = self.router.ask("GET", "/kvferry/engines", timeout_s=10.0)
        except (OSError, http.client.HTTPException):
            return "unknown"
        engines = msgspec.json.decode(content)["engines"]
        of_url = [one for one in engines if one["url"] == member.http.url]
        return str(of_url[0]["state"]) if of_url else "unknown"

    def drain(self, member: Member) -> None:
        """Has the router give a member nothing new, and waits until nobody needs it."""
        _, content = self.router.ask("GET", "/kvferry/engines")
        engines = msgspec.json.decode(content)["engines"]
        (name,) = (one["name"] for one in engines if one["url"] == member.http.url)
        self.router.ask("POST", f"/kvferry/engines/{member.role}/{name}/drain", {})
        until(lambda: self.state(member) == "drained", 120.0, f"{member.name} has drained")

    def enter(self, member: Member) -> None:
        """Enters a member again that has drained; ours do that themselves."""

    def await_step(self, step: Step, victim: Member | None) -> None:
        """Returns when a request stands at a step, at the victim if that is of the step's role.

        Raises:
            SystemFailedError: none ever does.
        """
        role: Role = "decode" if step in ("loading", "decoding") else "prefill"
        if step == "waiting" and victim is not None:
            role = victim.role
        looked_at = [victim] if victim is not None and victim.role == role else self.of(role)
        until(
            lambda: any(member.step_counts()[step] for member in looked_at),
            SEEN_S,
            f"a request is {step}",
        )

    def restart(self, member: Member) -> None:
        """A member's processes end at once, and start again; returns when it serves."""
        old = {process.pid for process in member.processes()[1:]}
        member.restart()
        until(
            lambda: (
                old.isdisjoint(process.pid for process in member.processes())
                and member.is_up()
                and self.state(member) == "ready"
            ),
            START_S,
            f"{member.name} serves again",
        )

    def scale_in(self, member: Member) -> None:
        """A member ends as an operator has it end."""
        member.end()

    def unshared(self, salt: str) -> dict[str, str]:
        """Fields of a request that keep prefix caches out of it."""
        return {}

    def mend_links(self) -> None:
        """Links are as at first."""
        for source, target in self.pairs():
            self.network.restore(source, target)
            self.network.slow(source, target, delay_s=DELAY_S)

    def mend(self) -> None:
        """Everything runs, links are as at first, and the router knows."""
        self.mend_links()
        for member in self.members:
            if member.has_ended:
                member.start()
        for member in self.members:
            until(functools.partial(self._is_ready, member), START_S, f"{member.name} serves")

    def _is_ready(self, member: Member) -> bool:
        if member.has_ended:
            raise SystemFailedError(f"{member.name} has ended: see its log")
        if not member.is_up():
            return False
        self.enter(member)
        return self.state(member) == "ready"

    def stranded(self) -> int:
        """KV blocks that are still held when no request and no lease can hold any."""
        deadline = time.monotonic() + self.lease_s
        while used := sum(member.used_blocks() for member in self.members):
            if time.monotonic() > deadline:
                return round(used)
            time.sleep(0.2)
        return 0

    def save_logs(self, label: str) -> None:
        """Copies all logs into the system's folder."""
        for member in self.members:
            member.save_log(self.folder / f"{label}-{member.name}.log")

    def close(self) -> None:
        """Kills everything, and leaves the logs."""
        self.save_logs("end")
        self.network.close()


def build_clock(folder: Path) -> Path | None:
    """The library by which a wall clock is wrong; ``None`` without a C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    library = folder / "clock.so"
    command = [compiler, "-shared", "-fPIC", "-O1", str(CLOCK_SOURCE), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True)
    return library
