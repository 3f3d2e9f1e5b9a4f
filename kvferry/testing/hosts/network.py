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
"""Seconds for the keeper to do one thing, however busy the machine is."""


class Host:
    """A machine on the network: addresses, a hostname, shared memory and processes of its own.

    It shares the file system with all others and with the test. Names of hosts are looked up in
    an ``/etc/hosts`` of their own; there is no way out of the network.
    """

    def __init__(self, network: "Network", index: int, name: str) -> None:
        """Use :meth:`Network.add_host`."""
        self.name = name
        """Its hostname."""
        self.ipv4 = f"10.77.0.{index + 1}"
        """Its address."""
        self.ipv6 = f"fd77::{index + 1:x}"
        """Its other address."""
        self.index = index
        """Its place in :attr:`Network.hosts`."""
        self.is_up = False
        """Whether it runs."""
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
            stdin: what it reads.
            stdout: where its output goes; that of this process, unless given.
            stderr: likewise.
            env: its environment; that of this process, unless given.
            cwd: its working directory; that of this process, unless given.

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
        """A socket of this host, for the test to use as if it ran there.

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
            port: where something listens.
            timeout_s: seconds for each operation on it, this one included.

        Raises:
            OSError: nobody listens there, or nothing comes back.
            HostError: the host is down.
        """
        connection = self.open_socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        try:
            connection.settimeout(timeout_s)
            connection.connect((address, port))
        except BaseException:
            connection.close()
            raise
        return connection

    def pause(self) -> None:
        """All its processes stop where they are, as if it had no CPU any more. Its kernel goes on:
        it takes in what is sent, and answers for connections.
        """
        self._signal_all("STOP")

    def resume(self) -> None:
        """Its processes go on."""
        self._signal_all("CONT")

    def _signal_all(self, signal_name: str) -> None:
        # In a host's process namespace, -1 is every process of the host but its first.
        self.run(["sh", "-c", f"kill -{signal_name} -1"]).wait(ANSWER_TIMEOUT_S)

    def kill(self) -> None:
        """It dies at once: nothing more is sent, not even that connections end; all its processes
        are killed, its shared memory is gone. Its peers are not told anything. Idempotent.
        """
        if self.is_up:
            self.is_up = False
            self._network.ask(KillHost(self.index))

    def start(self) -> None:
        """It comes up (again), under its name and addresses, with no process. Idempotent."""
        if not self.is_up:
            self._network.ask(StartHost(self.index, self.name, self.ipv4, self.ipv6))
            self.is_up = True

    def _check_up(self) -> None:
        if not self.is_up:
            raise HostError(f"host {self.name!r} is down; start it first")

    def forget_processes(self) -> None:
        """Closes what this process holds of them."""
        for process in self._processes:
            process.close()
        self._processes.clear()


class Network(Closing):
    """Hosts and the links between them, every two of which have one. All ends with it.

    Close it; or use it as a context manager. Links are well at first, and may be changed whenever.
    Thread-safe.
    """

    def __init__(self, keeper: "subprocess.Popen[bytes]", channel: socket.socket) -> None:
        """Use :meth:`open`."""
        self.hosts: list[Host] = []
        """In the order in which they were added; those that were killed too."""
        self._keeper = keeper
        self._channel = channel
        self._lock = threading.Lock()
        self._links: dict[tuple[int, int], Link] = {}

    @classmethod
    def open(cls, *, seed: int = 0) -> "Network":
        """A network without hosts.

        Args:
            seed: decides which packets a lossy link loses.

        Raises:
            HostError: this machine does not allow it; the message says what is missing.
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
                start_new_session=True,  # a Ctrl-C is the test's to handle
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
        """A new host, running.

        Args:
            name: its hostname: letters, digits and hyphens.

        Raises:
            ValueError: the name cannot be a hostname, or another host has it.
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
        """From now on nothing arrives, and nobody is told.

        Args:
            source: of what is lost.
            target: where it does not arrive.
            one_way: whether what goes from ``target`` to ``source`` still arrives.
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
        """From now on packets take their time.

        Args:
            source: of the packets.
            target: of the packets.
            delay_s: seconds from ``source`` to ``target``.
            bytes_per_s: how many bytes pass in a second; any number, unless given.
            one_way: whether the other direction stays as it is.
        """
        self._change(source, target, one_way, delay_s=delay_s, bytes_per_s=bytes_per_s)

    def lose(self, source: Host, target: Host, part: float, *, one_way: bool = False) -> None:
        """From now on some packets do not arrive; TCP sends them again.

        Args:
            source: of the packets.
            target: of the packets.
            part: how many are lost, 0 to 1.
            one_way: whether the other direction stays as it is.
        """
        self._change(source, target, one_way, loss=part)

    def restore(self, source: Host, target: Host, *, one_way: bool = False) -> None:
        """From now on the link is well."""
        for pair in self._pairs(source, target, one_way):
            self._set_link(pair, Link())

    def link(self, source: Host, target: Host) -> Link:
        """What packets from one host to the other meet now."""
        return self._links.get((source.index, target.index), Link())

    def _change(self, source: Host, target: Host, one_way: bool, **changes: Any) -> None:
        for pair in self._pairs(source, target, one_way):
            old = msgspec.structs.asdict(self._links.get(pair, Link()))
            self._set_link(pair, Link(**{**old, **changes}))

    def _pairs(self, source: Host, target: Host, one_way: bool) -> list[tuple[int, int]]:
        pair = (source.index, target.index)
        return [pair] if one_way else [pair, pair[::-1]]

    def _set_link(self, pair: tuple[int, int], link: Link) -> None:
        self.ask(SetLink(*pair, link))
        self._links[pair] = link

    # ---- the keeper ---------------------------------------------------------------------------

    def ask(self, message: Message) -> Answer:
        """Has the keeper do something.

        Raises:
            OSError: it cannot be done.
            HostError: the keeper has ended.
        """
        return self.ask_fds(message, [])[0]

    def ask_fds(self, message: Message, descriptors: list[int]) -> tuple[Answer, list[int]]:
        """The same, with descriptors for it and from it."""
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
                # A Ctrl-C, or a time-out of the test: the answer to this one would be taken for
                # that to the next. So there is no next, and all ends.
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
        """Kills all processes of all hosts; the hosts are gone when this returns. Idempotent."""
        with self._lock:
            self._channel.close()
        try:
            self._keeper.wait(ANSWER_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()  # what it keeps dies with it
            self._keeper.wait()
        for host in self.hosts:
            host.is_up = False
            host.forget_processes()
