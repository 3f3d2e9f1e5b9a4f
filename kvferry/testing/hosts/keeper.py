"""Keeps the hosts of one test: ``python -m kvferry.testing.hosts.keeper FD``.

All resources depend on one process: this process's child, the first process of a process namespace.
When the child ends for any reason, the kernel kills all processes in the namespace; the other
namespaces, links and mounts vanish with the last process. The child ends when the test process
closes its end of ``FD``, at the latest by dying. So nothing has a name that a later run could find
as a leftover.

    test process ── FD ── keeper: relay, sockets ──┬── first process of host 0 ── its processes
                                                   └── first process of host 1 ── ...

The keeper has a single thread, because it forks and enters hosts' namespaces for short times.
"""

import ctypes
import errno
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvferry.testing.hosts.messages import (
    Answer,
    ExitCode,
    KillHost,
    Message,
    OpenSocket,
    Run,
    SetLink,
    StartHost,
)
from kvferry.testing.hosts.relay import Relay

try:
    from pyroute2 import IPRoute
except ImportError:  # reported in the first answer
    IPRoute = None

MTU = 9000
"""Number of bytes in the largest packet between hosts, as in a cluster."""
CARRIER_TIMEOUT_S = 30.0
"""Seconds within which a new link must come up; a second is already long."""
SAME_MAC = "02:00:00:00:00:01"
"""MAC address of every host. No protocol asks for the address: the relay reads IP addresses
only."""

# Constants of Linux that the os module does not name before Python 3.12.
_NEWNS = 0x00020000
_NEWUTS = 0x04000000
_NEWIPC = 0x08000000
_NEWUSER = 0x10000000
_NEWPID = 0x20000000
_NEWNET = 0x40000000
_MS_BIND = 0x1000
_MS_REC_PRIVATE = 0x4000 | 0x40000
_PR_SET_PDEATHSIG = 1
_NODAD = 0x02
"""Flag of an IPv6 address that skips the search for duplicates."""

_libc = ctypes.CDLL(None, use_errno=True)


def _call(what: str, *arguments: object) -> None:
    """Calls the C library.

    Raises:
        OSError: the call failed; the message names the call.
    """
    if getattr(_libc, what)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    try:
        _call("mount", source.encode(), target.encode(), kind.encode(), flags, None)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} ({kind or source} at {target})") from error


def _enter(pidfd: int, kinds: int) -> None:
    _call("setns", pidfd, kinds)


def leave_the_machine() -> None:
    """Gives this process new namespaces, and continues in a child, the first process of these
    namespaces.

    Raises:
        OSError: the kernel does not allow namespaces.
    """
    kinds = _NEWNET | _NEWNS | _NEWPID
    uid, gid = os.geteuid(), os.getegid()
    try:
        _call("unshare", kinds)
    except PermissionError:
        _call("unshare", kinds | _NEWUSER)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
        Path("/proc/self/gid_map").write_text(f"0 {gid} 1")
    if child := os.fork():
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    _mount("none", "/", flags=_MS_REC_PRIVATE)
    # Names of hosts, in memory: a file on the machine's disk would stay if this process were
    # killed.
    _mount("tmpfs", "/dev/shm", "tmpfs")  # noqa: S108 - the place of shared memory
    names = Path("/dev/shm/hosts")  # noqa: S108
    names.write_text("127.0.0.1 localhost\n::1 localhost\n")
    _mount(str(names), "/etc/hosts", flags=_MS_BIND)


def _be_a_host(name: str, ready: int) -> None:
    """The first process of a host; never returns. Writes to ``ready`` if the host cannot be
    made.
    """
    try:
        _call("unshare", _NEWNET | _NEWNS | _NEWUTS | _NEWIPC)
        socket.sethostname(name)
        _mount("proc", "/proc", "proc")
        _mount("tmpfs", "/dev/shm", "tmpfs")  # noqa: S108
        # Programs read this number to find out whether they share a machine.
        boot_id = Path("/dev/shm/boot_id")  # noqa: S108
        boot_id.write_text(f"{uuid.uuid4()}\n")
        _mount(str(boot_id), "/proc/sys/kernel/random/boot_id", flags=_MS_BIND)
        boot_id.unlink()
    except OSError as error:
        os.write(ready, msgspec.json.encode(Answer(errno=error.errno, error=str(error.strerror))))
        os._exit(1)
    # The kernel then reaps processes of this host that end without a parent.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.closerange(0, ready)
    os.closerange(ready, 4096)
    while True:
        signal.pause()


@dataclass(slots=True)
class _Host:
    """A running host."""

    first: int
    """Id of the host's first process."""
    pidfd: int
    """Pidfd of the host's first process; names the host's namespaces."""
    port: socket.socket | None = None
    """The relay's end of the host's link, once the host is plugged in."""
    processes: list["subprocess.Popen[bytes]"] = field(default_factory=list)
    """Processes started in the host."""


class Keeper:
    """Carries out the messages of the test process, and carries packets meanwhile."""

    def __init__(self, channel: socket.socket, seed: int) -> None:
        self._channel = channel
        self._relay = Relay(seed)
        self._hosts: dict[int, _Host] = {}
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(channel, selectors.EVENT_READ)
        self._own = os.pidfd_open(os.getpid())
        self._own_network = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._decoder: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)

    def serve(self) -> None:
        """Serves until the test process has closed its end."""
        while True:
            ready = self._selector.select(self._relay.send_waiting())
            # The message comes last: it may end a host that still has packets to carry.
            for key, _ in sorted(ready, key=lambda one: one[0].data is None):
                if isinstance(key.data, int):
                    self._relay.carry(key.data)
                elif not self._take_message():
                    return

    def _take_message(self) -> bool:
        raw, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 20, 3)
        if not raw:
            return False
        back: list[int] = []
        try:
            answer = self._do(self._decoder.decode(raw), descriptors, back)
        except OSError as error:
            answer = Answer(errno=error.errno, error=_in_words(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        send_answer(self._channel, answer, back)
        for descriptor in back:
            os.close(descriptor)
        return True

    def _do(self, message: Message, received: list[int], back: list[int]) -> Answer:
        """Carries out a message; adds descriptors for the test process to ``back``."""
        match message:
            case StartHost():
                self._start_host(message)
            case KillHost(index):
                self._kill_host(index)
            case SetLink(source, target, link):
                self._relay.set_link(source, target, link)
            case Run(index):
                process = self._run(message, received)
                self._hosts[index].processes.append(process)
                self._processes[process.pid] = process
                back.append(os.pidfd_open(process.pid))
                return Answer(value=process.pid)
            case ExitCode(process_id):
                return Answer(value=self._processes[process_id].poll())
            case OpenSocket(index, family, kind):
                with self._inside(index):
                    back.append(socket.socket(family, kind).detach())
        return Answer()

    def _start_host(self, message: StartHost) -> None:
        index = message.index
        said, ready = os.pipe()
        with self._children_in(None):
            first = os.fork()
            if not first:
                os.dup2(ready, said)  # so the loop below ends when this descriptor closes
                _be_a_host(message.name, said)
        os.close(ready)
        with os.fdopen(said, "rb") as pipe:
            if refusal := pipe.read():
                os.waitpid(first, 0)
                answer = msgspec.json.decode(refusal, type=Answer)
                raise OSError(answer.errno, answer.error)
        self._hosts[index] = _Host(first, os.pidfd_open(first))
        names = f"{message.ipv4} {message.name}\n{message.ipv6} {message.name}\n"
        with Path("/etc/hosts").open("r+") as file:
            if names not in file.read():
                file.write(names)
        self._connect(message, self._hosts[index])

    def _connect(self, message: StartHost, host: _Host) -> None:
        """Creates a host's link, assigns the addresses, and plugs the host in."""
        interface = _interface(message.index)
        # `gso_max_segs`: packets that the kernel does not divide further, so that each may be lost
        # alone. Without ARP, the kernel uses its own MAC for every host, which is right here.
        inner: dict[str, Any] = {
            "ifname": "eth0",
            "net_ns_pid": host.first,
            "address": SAME_MAC,
            "mtu": MTU,
            "gso_max_segs": 1,
        }
        with IPRoute() as links:
            links.link("add", ifname=interface, kind="veth", mtu=MTU, peer=inner)
            outer = links.link_lookup(ifname=interface)[0]
            links.link("set", index=outer, state="up")
        with self._inside(message.index), IPRoute() as links:
            links.link("set", index=links.link_lookup(ifname="lo")[0], state="up")
            eth0 = links.link_lookup(ifname="eth0")[0]
            links.link("set", index=eth0, arp=False)
            links.link("set", index=eth0, state="up")
            links.addr("add", index=eth0, address=message.ipv4, prefixlen=24)
            links.addr("add", index=eth0, address=message.ipv6, prefixlen=64, flags=_NODAD)
            _await_carrier(links, eth0)
        with IPRoute() as links:
            _await_carrier(links, outer)
        host.port = self._relay.plug_in(message.index, interface, message.ipv4, message.ipv6)
        self._selector.register(host.port, selectors.EVENT_READ, message.index)

    def _kill_host(self, index: int) -> None:
        host = self._hosts.pop(index)
        if host.port is not None:
            self._selector.unregister(host.port)
            self._relay.unplug(index)
            with IPRoute() as links:
                links.link("del", ifname=_interface(index))
        os.kill(host.first, signal.SIGKILL)
        # The kernel ends the first process when the processes that the keeper started are reaped.
        for process in host.processes:
            process.wait()
        os.waitpid(host.first, 0)
        os.close(host.pidfd)

    def _run(self, message: Run, descriptors: list[int]) -> "subprocess.Popen[bytes]":
        host = self._hosts[message.index]

        def enter() -> None:
            _enter(host.pidfd, _NEWNET | _NEWNS | _NEWUTS | _NEWIPC)
            os.chdir(message.cwd)

        stdin, stdout, stderr = descriptors
        with self._children_in(host.pidfd):
            return subprocess.Popen(  # noqa: S603 - a test's own command
                message.argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                env=message.env,
                start_new_session=True,
                preexec_fn=enter,  # noqa: PLW1509 - there is one thread
            )

    @contextmanager
    def _children_in(self, pidfd: int | None) -> Iterator[None]:
        """Within the block, forked children are in a host's process namespace, or in a new
        namespace.
        """
        if pidfd is None:
            _call("unshare", _NEWPID)
        else:
            _enter(pidfd, _NEWPID)
        try:
            yield
        finally:
            _enter(self._own, _NEWPID)

    @contextmanager
    def _inside(self, index: int) -> Iterator[None]:
        """Within the block, this process is in a host's network."""
        _enter(self._hosts[index].pidfd, _NEWNET)
        try:
            yield
        finally:
            _enter(self._own_network, _NEWNET)


def _await_carrier(links: Any, index: int) -> None:
    """Waits until an interface sends: earlier packets are lost, for up to a second.

    Raises:
        TimeoutError: the interface never sends.
    """
    deadline = time.monotonic() + CARRIER_TIMEOUT_S
    while links.link("get", index=index)[0].get("operstate") != "UP":
        if time.monotonic() > deadline:
            raise TimeoutError(errno.ETIMEDOUT, "a link does not come up")
        time.sleep(0.01)


def _interface(index: int) -> str:
    """Name of the relay's end of a host's link."""
    return f"host{index}"


def _in_words(error: OSError) -> str:
    about = f": {error.filename}" if error.filename else ""
    return f"{error.strerror or error}{about}"


def send_answer(channel: socket.socket, answer: Answer, descriptors: list[int]) -> None:
    """Sends an answer; ignores a missing test process."""
    with suppress(BrokenPipeError):
        socket.send_fds(channel, [msgspec.json.encode(answer)], descriptors)


def main() -> None:
    """Runs the keeper of one test process."""
    channel = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if IPRoute is None:
        send_answer(channel, Answer(error="the package pyroute2 is not installed"), [])
        return
    try:
        leave_the_machine()
    except OSError as error:
        why = f"no namespaces: {error.strerror}"
        send_answer(channel, Answer(errno=error.errno, error=why), [])
        return
    send_answer(channel, Answer(), [])
    Keeper(channel, int(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
