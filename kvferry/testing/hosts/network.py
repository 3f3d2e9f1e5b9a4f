"""Hosts and links as a test sees them."""

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

import msgspec

from kvferry.errors import HostError
from kvferry.lifetimes import Closing
from kvferry.testing.hosts.messages import (
    Answer,
    ExitCode,
    KillHost,
    Link,
    Message,
    OpenSocket,
    Run,
    SetLink,
    StartHost,
)
from kvferry.testing.hosts.process import File, HostProcess, open_end

MAX_HOSTS = 200
ANSWER_TIMEOUT_S = 120.0
"""Seconds within which the keeper must answer, even on a busy machine."""

_STOP = """kill -STOP -1
for task in $(ls -d /proc/[0-9]*/task/* | grep -Ev "^/proc/(1|$$)/"); do
    while grep -qs "^State:.[^TtZX]" "$task/status"; do sleep 0.01; done
done"""
"""Stops every process of a host except the first and this script (-1 in the host's process
namespace), and waits for each thread: a thread runs on until it sees the signal."""


class Host:
    """A machine on the network, with its own addresses, hostname, shared memory and processes.

    All hosts and the test share one file system. Names of hosts are looked up in a separate
    ``/etc/hosts``; there is no way out of the network.
    """

    def __init__(self, network: "Network", index: int, name: str) -> None:
        """Use :meth:`Network.add_host`."""
        self.name = name
        """Hostname of the host."""
        self.ipv4 = f"10.77.0.{index + 1}"
        """IPv4 address of the host."""
        self.ipv6 = f"fd77::{index + 1:x}"
        """IPv6 address of the host."""
        self.index = index
        """Index of the host in :attr:`Network.hosts`."""
        self.is_up = False
        """Whether the host runs."""
        self._network = network
        self._processes: list[HostProcess] = []

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        stdin: File = subprocess.DEVNULL,
        stdout: File = None,
        stderr: File = None,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> HostProcess:
        """Starts a process in this host.

        Args:
            argv: the program and its arguments.
            stdin: input of the process.
            stdout: target of the output; by default the stdout of this process.
            stderr: target of the error output; by default the stderr of this process.
            env: environment; by default the environment of this process.
            cwd: working directory; by default the working directory of this process.

        Raises:
            OSError: the program cannot be started.
            HostError: the host is down.
        """
        self._check_up()
        message = Run(
            self.index,
            [str(word) for word in argv],
            dict(os.environ if env is None else env),
            str(Path.cwd() if cwd is None else cwd),
        )
        ours: list[IO[bytes] | None] = []
        with ExitStack() as theirs:
            descriptors: list[int] = []
            for number, file in enumerate((stdin, stdout, stderr)):
                out = descriptors[1] if file == subprocess.STDOUT else None
                descriptor, our = open_end(number, file, theirs)
                descriptors.append(descriptor if out is None else out)
                ours.append(our)
            try:
                answer, (pidfd,) = self._network.ask_fds(message, descriptors)
            except BaseException:
                for pipe in filter(None, ours):
                    pipe.close()
                raise
        assert answer.value is not None
        asked = ExitCode(answer.value)
        process = HostProcess(message.argv, pidfd, lambda: self._network.ask(asked).value)
        process.stdin, process.stdout, process.stderr = ours
        self._processes.append(process)
        return process

    def open_socket(
        self, family: int = socket.AF_INET, kind: int = socket.SOCK_STREAM
    ) -> socket.socket:
        """A socket of this host, which the test can use as if the test ran there.

        Raises:
            HostError: the host is down.
        """
        self._check_up()
        _, (descriptor,) = self._network.ask_fds(OpenSocket(self.index, family, kind), [])
        return socket.socket(fileno=descriptor)

    def connect(self, address: str, port: int, timeout_s: float = 10.0) -> socket.socket:
        """A TCP connection from this host, for the test to use.

        Args:
            address: the IPv4 or IPv6 address of a host.
            port: port of the listening process.
            timeout_s: seconds for each operation on the connection, including this call.

        Raises:
            OSError: no process listens there, or no answer comes.
            HostError: the host is down.
        """
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with ExitStack() as undo:
            connection = undo.enter_context(self.open_socket(family))
            connection.settimeout(timeout_s)
            connection.connect((address, port))
            undo.pop_all()
        return connection

    def pause(self) -> None:
        """Stops all processes of the host, as if the host had lost its CPU, and waits until they
        have stopped. The host's kernel goes on: it accepts packets and answers for connections.
        """
        self.run(["sh", "-c", _STOP]).wait(ANSWER_TIMEOUT_S)

    def resume(self) -> None:
        """Resumes the processes of the host."""
        self.run(["sh", "-c", "kill -CONT -1"]).wait(ANSWER_TIMEOUT_S)

    def kill(self) -> None:
        """Kills the host at once. The host sends nothing more, not even the end of connections. All
        processes are killed, and the shared memory is gone. Peers are not notified. Idempotent.
        """
        if self.is_up:
            self.is_up = False
            self._network.ask(KillHost(self.index))

    def start(self) -> None:
        """Starts the host (again), with the same name and addresses and without processes.
        Idempotent.
        """
        if not self.is_up:
            self._network.ask(StartHost(self.index, self.name, self.ipv4, self.ipv6))
            self.is_up = True

    def _check_up(self) -> None:
        if not self.is_up:
            raise HostError(f"host {self.name!r} is down; start it first")

    def forget_processes(self) -> None:
        """Closes the test's handles of the host's processes."""
        for process in self._processes:
            process.close()
        self._processes.clear()


class Network(Closing):
    """Hosts, with a link between every two of them. Closing the network ends them all.

    Close the network, or use it as a context manager. Links are good at first, and may be changed
    at any time. Thread-safe.
    """

    def __init__(self, keeper: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
        """Use :meth:`open`."""
        self.hosts: list[Host] = []
        """Hosts in the order of their creation, including killed hosts."""
        self._keeper = keeper
        self._channel = channel
        self._lock = threading.Lock()
        self._links: dict[tuple[int, int], Link] = {}

    @classmethod
    def open(cls, *, seed: int = 0) -> "Network":
        """Opens a network without hosts.

        Args:
            seed: decides which packets a lossy link loses.

        Raises:
            HostError: this machine does not allow hosts; the message names the missing requirement.
        """
        if sys.platform != "linux":
            raise HostError(f"hosts for tests need Linux's namespaces; this is {sys.platform}")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "kvferry.testing.hosts.keeper", str(theirs.fileno())]
        with theirs, ExitStack() as undo:
            undo.callback(ours.close)
            keeper = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [*command, str(seed)],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # the test handles a Ctrl-C
            )
            undo.pop_all()
        ours.settimeout(ANSWER_TIMEOUT_S)
        network = cls(keeper, ours)
        try:
            answer, _ = network._receive()
            if answer.error:
                raise HostError(f"no hosts for tests on this machine: {answer.error}")
        except BaseException:
            network.close()
            raise
        return network

    def add_host(self, name: str) -> Host:
        """Adds a new host, running.

        Args:
            name: the hostname: letters, digits and hyphens.

        Raises:
            ValueError: the name cannot be a hostname, or another host has the name.
        """
        if not 0 < len(name) < 64 or not name.isascii() or not name.replace("-", "").isalnum():
            raise ValueError(f"name: {name!r} is not a hostname")
        if name in {host.name for host in self.hosts} or len(self.hosts) == MAX_HOSTS:
            raise ValueError(f"name: there is a host {name!r} already, or {MAX_HOSTS} hosts")
        host = Host(self, len(self.hosts), name)
        host.start()
        self.hosts.append(host)
        return host

    # ---- links --------------------------------------------------------------------------------

    def cut(self, source: Host, target: Host, *, one_way: bool = False) -> None:
        """Cuts a link: no packet arrives any more, and neither side gets an error.

        Args:
            source: source of the lost packets.
            target: target of the lost packets.
            one_way: whether packets from ``target`` to ``source`` still arrive.
        """
        self._change(source, target, one_way, is_cut=True)

    def slow(
        self,
        source: Host,
        target: Host,
        *,
        delay_s: float = 0.0,
        bytes_per_s: float | None = None,
        one_way: bool = False,
    ) -> None:
        """Makes a link slow.

        Args:
            source: source of the packets.
            target: target of the packets.
            delay_s: seconds that a packet takes from ``source`` to ``target``.
            bytes_per_s: bandwidth in bytes per second; unlimited by default.
            one_way: whether the other direction stays as it is.
        """
        self._change(source, target, one_way, delay_s=delay_s, bytes_per_s=bytes_per_s)

    def lose(self, source: Host, target: Host, part: float, *, one_way: bool = False) -> None:
        """Makes a link lose packets; TCP sends lost packets again.

        Args:
            source: source of the packets.
            target: target of the packets.
            part: share of lost packets, 0 to 1.
            one_way: whether the other direction stays as it is.
        """
        self._change(source, target, one_way, loss=part)

    def restore(self, source: Host, target: Host, *, one_way: bool = False) -> None:
        """Repairs a link."""
        for pair in self._pairs(source, target, one_way):
            self._set_link(pair, Link())

    def link(self, source: Host, target: Host) -> Link:
        """The current effects on packets from one host to the other."""
        return self._links.get((source.index, target.index), Link())

    def _change(self, source: Host, target: Host, one_way: bool, **changes: Any) -> None:
        for pair in self._pairs(source, target, one_way):
            before = self._links.get(pair, Link())
            self._set_link(pair, msgspec.structs.replace(before, **changes))

    def _pairs(self, source: Host, target: Host, one_way: bool) -> list[tuple[int, int]]:
        pair = (source.index, target.index)
        return [pair] if one_way else [pair, pair[::-1]]

    def _set_link(self, pair: tuple[int, int], link: Link) -> None:
        self.ask(SetLink(*pair, link))
        self._links[pair] = link

    # ---- the keeper ---------------------------------------------------------------------------

    def ask(self, message: Message) -> Answer:
        """Sends a message to the keeper and waits for the answer.

        Raises:
            OSError: the action is not possible.
            HostError: the keeper has ended.
        """
        return self.ask_fds(message, [])[0]

    def ask_fds(self, message: Message, descriptors: list[int]) -> tuple[Answer, list[int]]:
        """Like :meth:`ask`, with descriptors sent to and received from the keeper."""
        with self._lock:
            if self._channel.fileno() < 0:
                raise HostError("the network is closed, and its hosts with it")
            try:
                socket.send_fds(self._channel, [msgspec.json.encode(message)], descriptors)
            except (BrokenPipeError, ConnectionResetError):
                raise HostError("the keeper of the hosts has ended; see its stderr") from None
            try:
                answer, received = self._receive()
            except BaseException:
                # A Ctrl-C, or a timeout of the test: the late answer would be taken for the answer
                # to the next message. So the channel is closed, and all hosts end.
                self._channel.close()
                raise
        if answer.error:
            raise OSError(answer.errno, answer.error)
        return answer, received

    def _receive(self) -> tuple[Answer, list[int]]:
        raw, descriptors, _, _ = socket.recv_fds(self._channel, 1 << 16, 1)
        if not raw:
            raise HostError("the keeper of the hosts has ended; see its stderr")
        return msgspec.json.decode(raw, type=Answer), descriptors

    def close(self) -> None:
        """Kills all processes of all hosts; the hosts are gone after the call. Idempotent."""
        with self._lock:
            self._channel.close()
        try:
            self._keeper.wait(ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # the hosts die with the keeper
            self._keeper.wait()
        for host in self.hosts:
            host.is_up = False
            host.forget_processes()
