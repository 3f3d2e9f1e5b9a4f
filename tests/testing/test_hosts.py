"""Hosts made of namespaces, and the links between them."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from subprocess import DEVNULL, PIPE

import pytest

from kvferry.errors import HostError
from kvferry.testing.hosts import Link, Network
from kvferry.testing.waiting import WAIT_S, until
from tests.test_docs import blocks

pytestmark = pytest.mark.processes

PAGE = Path(__file__).parents[2] / "docs" / "extend" / "test-hosts.md"

SERVER = """
import socket, subprocess, sys, time
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)
with socket.create_server((sys.argv[1], 9000)) as listener:
    print("listening", flush=True)
    connection, _ = listener.accept()
    print("accepted", flush=True)
    time.sleep(1000)
"""

FAMILIES = pytest.mark.parametrize("family", ["ipv4", "ipv6"])


@pytest.fixture
def pair(network):
    return network, network.add_host("alpha"), network.add_host("beta")


def said(host, *argv, **keys):
    """What a program prints that runs in a host."""
    process = host.run(argv, stdout=PIPE, **keys)
    output = process.stdout.read().decode().strip()
    assert process.wait(WAIT_S) == 0
    return output


def listen(host, port=9000, family="ipv4"):
    kind = socket.AF_INET6 if family == "ipv6" else socket.AF_INET
    listener = host.open_socket(kind)
    listener.settimeout(WAIT_S)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((getattr(host, family), port))
    listener.listen()
    return listener


def connected(source, target, family="ipv4"):
    """The two ends of a TCP connection."""
    with listen(target, family=family) as listener:
        ours = source.connect(getattr(target, family), 9000, WAIT_S)
        theirs, _ = listener.accept()
        theirs.settimeout(WAIT_S)
        return ours, theirs


def datagrams(host, port=7000):
    ours = host.open_socket(socket.AF_INET, socket.SOCK_DGRAM)
    ours.settimeout(WAIT_S)
    ours.bind((host.ipv4, port))
    return ours


def until_state(pid, *states):
    """Waits until a process is in one of these states, as letters; one that is gone has Z."""
    until(lambda: _state(pid) in states, what=lambda: f"process {pid} is {_state(pid)}; {states}")


def until_gone(pid):
    until_state(pid, "Z")


def _state(pid):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "Z"
    return status.partition("State:\t")[2][0]


# ---- hosts ------------------------------------------------------------------------------------


def test_a_host_has_its_own_name_memory_and_identity(pair):
    _, alpha, beta = pair
    assert said(alpha, "hostname") == "alpha"
    said(alpha, "touch", "/dev/shm/mine")
    assert said(alpha, "ls", "/dev/shm") == "mine"
    assert said(beta, "ls", "/dev/shm") == ""
    assert not Path("/dev/shm/mine").exists()
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    ids = {said(host, "cat", str(boot_id)) for host in (alpha, beta)} | {boot_id.read_text()}
    assert len(ids) == 3


def test_names_of_hosts_are_looked_up(pair):
    _, alpha, beta = pair
    code = "import socket, sys; print(socket.gethostbyname(sys.argv[1]))"
    assert said(alpha, sys.executable, "-c", code, "beta") == beta.ipv4


@FAMILIES
def test_hosts_reach_each_other(pair, family):
    _, one, other = pair
    ours, theirs = connected(one, other, family)
    with ours, theirs:
        ours.sendall(b"there")
        assert theirs.recv(10) == b"there"
        theirs.sendall(b"and back")
        assert ours.recv(10) == b"and back"


def test_there_is_no_way_out(network):
    alpha = network.add_host("alpha")
    with socket.create_server(("127.0.0.1", 0)) as outside:
        port = outside.getsockname()[1]
        with pytest.raises(ConnectionRefusedError):  # its loopback is not ours
            alpha.connect("127.0.0.1", port, WAIT_S)
    with pytest.raises(OSError, match="unreachable"):
        alpha.connect("192.0.2.1", 80, WAIT_S)


@pytest.mark.parametrize("name", ["", "a b", "a/b", "x" * 64])
def test_a_name_must_be_a_hostname(network, name):
    with pytest.raises(ValueError, match="hostname"):
        network.add_host(name)


def test_two_hosts_have_two_names(network):
    network.add_host("alpha")
    with pytest.raises(ValueError, match="already"):
        network.add_host("alpha")


# ---- processes --------------------------------------------------------------------------------


def test_a_process_is_given_what_it_asks_for(pair, tmp_path):
    script = 'read line; echo "$line $WORD $PWD"; echo bad >&2; exit 3'
    process = pair[1].run(
        ["sh", "-c", script],
        stdin=PIPE,
        stdout=PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "WORD": "word"},
        cwd=tmp_path,
    )
    process.stdin.write(b"line\n")
    process.stdin.close()
    assert process.stdout.read().decode() == f"line word {tmp_path}\nbad\n"
    assert process.wait(WAIT_S) == 3
    assert process.poll() == 3


def test_a_process_writes_to_a_file(pair, tmp_path):
    with (tmp_path / "log").open("wb") as log:
        pair[1].run(["echo", "hello"], stdout=log).wait(WAIT_S)
    assert (tmp_path / "log").read_text() == "hello\n"


def test_signals_reach_a_process(pair):
    process = pair[1].run(["sleep", "1000"])
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    pid = process.pid
    process.send_signal(signal.SIGSTOP)
    until_state(pid, "T")
    process.kill()
    assert process.wait(WAIT_S) == -signal.SIGKILL
    process.terminate()  # it has ended: nothing happens


def test_a_host_pauses_with_all_its_processes(pair):
    _, alpha, beta = pair
    server = beta.run([sys.executable, "-c", SERVER, beta.ipv4], stdout=PIPE)
    other = alpha.run(["sleep", "1000"])
    assert server.stdout.readline() == b"listening\n"
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    beta.pause()
    assert [_state(pid) for pid in (server.pid, *children)] == ["T"] * (1 + len(children))
    assert _state(other.pid) == "S"
    with alpha.connect(beta.ipv4, 9000, WAIT_S):  # its kernel answers
        beta.resume()
        assert server.stdout.readline() == b"accepted\n"


def test_a_program_that_is_not_there_is_an_error(pair):
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        pair[1].run(["no-such-program"], stdout=PIPE)
    assert said(pair[1], "echo", "still here") == "still here"


# ---- links ------------------------------------------------------------------------------------


@FAMILIES
def test_a_cut_link_is_silent_and_heals(pair, family):
    network, alpha, beta = pair
    ours, theirs = connected(alpha, beta, family)
    with ours, theirs:
        network.cut(alpha, beta)
        ours.sendall(b"late")
        theirs.settimeout(0.2)
        with pytest.raises(TimeoutError):
            theirs.recv(10)
        network.restore(alpha, beta)
        theirs.settimeout(WAIT_S)
        assert theirs.recv(10) == b"late"


def test_a_link_is_cut_in_one_direction(pair):
    network, alpha, beta = pair
    with datagrams(alpha) as ours, datagrams(beta) as theirs:
        network.cut(alpha, beta, one_way=True)
        ours.sendto(b"lost", (beta.ipv4, 7000))
        theirs.sendto(b"arrives", (alpha.ipv4, 7000))
        assert ours.recv(10) == b"arrives"
        network.restore(alpha, beta, one_way=True)
        ours.sendto(b"sent later", (beta.ipv4, 7000))
        assert theirs.recv(10) == b"sent later"  # and not what was lost


def test_other_links_are_left_alone(pair):
    network, alpha, beta = pair
    gamma = network.add_host("gamma")
    network.cut(alpha, beta)
    for host in (alpha, beta):
        ours, theirs = connected(host, gamma)
        with ours, theirs:
            ours.sendall(b"x")
            assert theirs.recv(1) == b"x"


def test_a_slow_link_takes_its_time(pair):
    network, alpha, beta = pair
    ours, theirs = connected(alpha, beta)
    with ours, theirs:
        network.slow(alpha, beta, delay_s=0.1)
        began = time.monotonic()
        ours.sendall(b"x")
        theirs.sendall(theirs.recv(1))
        ours.recv(1)
        assert time.monotonic() - began >= 0.2

        network.restore(alpha, beta)
        network.slow(alpha, beta, bytes_per_s=1e6, one_way=True)
        began = time.monotonic()
        _send_and_receive(ours, theirs, bytes(400_000))
        assert time.monotonic() - began >= 0.3


def test_what_a_lossy_link_loses_tcp_sends_again(pair):
    network, alpha, beta = pair
    network.lose(alpha, beta, 0.1)
    with datagrams(alpha) as ours, datagrams(beta) as theirs:
        for _ in range(200):
            ours.sendto(b"x", (beta.ipv4, 7000))
        network.restore(alpha, beta)
        ours.sendto(b"end", (beta.ipv4, 7000))
        arrived = 0
        while theirs.recv(10) != b"end":
            arrived += 1
        assert 0 < arrived < 200
    ours, theirs = connected(alpha, beta)
    network.lose(alpha, beta, 0.1)
    with ours, theirs:
        content = os.urandom(300_000)
        assert _send_and_receive(ours, theirs, content) == content


def test_what_a_link_does_adds_up(pair):
    network, alpha, beta = pair
    network.slow(alpha, beta, delay_s=0.1)
    network.cut(alpha, beta)
    network.restore(beta, alpha, one_way=True)
    network.lose(beta, alpha, 0.5, one_way=True)
    assert network.link(alpha, beta) == Link(is_cut=True, delay_s=0.1)
    assert network.link(beta, alpha) == Link(loss=0.5)


@pytest.mark.parametrize("wrong", [{"delay_s": -1}, {"bytes_per_s": 0}])
def test_a_link_that_cannot_be_is_refused(pair, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        pair[0].slow(*pair[1:], **wrong)


def _send_and_receive(ours, theirs, content):
    ours.setblocking(False)
    received = bytearray()
    sent = 0
    theirs.setblocking(False)

    def are_there():
        nonlocal sent
        with contextlib.suppress(BlockingIOError):
            sent += ours.send(content[sent : sent + 65536])
        with contextlib.suppress(BlockingIOError):
            received.extend(theirs.recv(65536))
        return len(received) >= len(content)

    until(are_there, every_s=0, what="all bytes")
    return bytes(received)


# ---- deaths -----------------------------------------------------------------------------------


def test_a_host_dies_with_all_its_processes_and_tells_nobody(pair):
    _, alpha, beta = pair
    server = beta.run([sys.executable, "-c", SERVER, beta.ipv4], stdout=PIPE)
    assert server.stdout.readline() == b"listening\n"
    with alpha.connect(beta.ipv4, 9000, WAIT_S) as ours:
        assert server.stdout.readline() == b"accepted\n"
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        assert len(children) == 1
        beta.kill()
        assert server.wait(WAIT_S) == -signal.SIGKILL
        until_gone(children[0])
        beta.start()
        ours.sendall(b"anybody?")
        with pytest.raises(ConnectionResetError):
            ours.recv(1)  # had the dying host ended the connection, this would be b""


def test_a_host_comes_back_as_another_machine_of_the_same_address(pair):
    _, alpha, beta = pair
    command = ["cat", "/proc/sys/kernel/random/boot_id"]
    before = said(beta, *command), beta.ipv4
    said(beta, "touch", "/dev/shm/old")
    beta.kill()
    for use in (beta.open_socket, lambda: beta.run(["true"])):
        with pytest.raises(HostError, match="'beta' is down"):
            use()
    beta.kill()
    beta.start()
    beta.start()
    assert said(beta, *command) != before[0]
    assert said(beta, "ls", "/dev/shm") == ""
    ours, theirs = connected(alpha, beta)
    with ours, theirs:
        assert theirs.getsockname()[0] == before[1]


def test_a_host_dies_while_it_sends(pair):
    _, alpha, beta = pair
    flood = (
        "import socket, sys\n"
        "with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ours:\n"
        "    print('sending', flush=True)\n"
        "    while True:\n"
        "        ours.sendto(b'x', (sys.argv[1], 7000))\n"
    )
    for _ in range(5):
        process = alpha.run([sys.executable, "-c", flood, beta.ipv4], stdout=PIPE)
        assert process.stdout.readline() == b"sending\n"
        alpha.kill()
        alpha.start()
    ours, theirs = connected(alpha, beta)
    with ours, theirs:
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"


def test_a_link_stays_as_it_is_while_its_host_is_dead(pair):
    network, alpha, beta = pair
    network.cut(alpha, beta, one_way=True)
    beta.kill()
    beta.start()
    with datagrams(alpha) as ours, datagrams(beta) as theirs:
        ours.sendto(b"lost", (beta.ipv4, 7000))
        theirs.sendto(b"arrives", (alpha.ipv4, 7000))
        assert ours.recv(10) == b"arrives"
        network.restore(alpha, beta)
        ours.sendto(b"later", (beta.ipv4, 7000))
        assert theirs.recv(10) == b"later"


RUN_FOR_EVER = """
import signal, time
# A shell starts background commands with it ignored, and so their children.
signal.signal(signal.SIGINT, signal.default_int_handler)
from kvferry.testing.hosts import Network
with Network.open() as network:
    host = network.add_host("alpha")
    process = host.run(["sh", "-c", "setsid sleep 1000 & wait"])
    print(process.pid, network._keeper.pid, flush=True)
    {then}
"""


@pytest.mark.parametrize("end", ["exception", "interrupt", "kill"])
def test_nothing_is_left_of_a_run_however_it_ends(network, end):
    then = "raise RuntimeError" if end == "exception" else "time.sleep(1000)"
    run = subprocess.Popen(
        [sys.executable, "-c", RUN_FOR_EVER.format(then=then)], stdout=PIPE, stderr=DEVNULL
    )
    with run:
        assert run.stdout is not None
        pids = run.stdout.readline().split()
        assert len(pids) == 2
        if end != "exception":
            run.send_signal(signal.SIGINT if end == "interrupt" else signal.SIGKILL)
        run.wait(WAIT_S)
    for pid in pids:
        until_gone(int(pid))


def test_close_ends_everything(network):
    alpha = network.add_host("alpha")
    pid = alpha.run(["sleep", "1000"]).pid
    network.close()
    assert not Path(f"/proc/{pid}").exists()
    assert not alpha.is_up
    with pytest.raises(HostError, match="closed"):
        network.add_host("beta")
    network.close()


def test_an_interrupted_question_ends_all(pair, monkeypatch):
    network, alpha, _ = pair
    pid = alpha.run(["sleep", "1000"]).pid

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(network, "_receive", interrupted)
    with pytest.raises(KeyboardInterrupt):
        alpha.open_socket()
    monkeypatch.undo()
    with pytest.raises(HostError, match="closed"):  # and no answer to the question before
        alpha.run(["true"])
    until_gone(pid)


# ---- what the machine allows ------------------------------------------------------------------


def _without(capabilities, code):
    """Runs Python as a root that lacks capabilities, as in a container."""
    if os.geteuid() != 0:
        pytest.skip("drops what only root has")
    command = ["setpriv", f"--bounding-set={capabilities}", "--no-new-privs", sys.executable]
    done = subprocess.run([*command, "-c", code], capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def test_without_privileges_a_user_namespace_does(network):
    code = (
        "from kvferry.testing.hosts import Network\n"
        "with Network.open() as network:\n"
        "    a, b = network.add_host('a'), network.add_host('b')\n"
        "    print(a.run(['hostname']).wait(), flush=True)\n"
        "    with b.open_socket() as listener:\n"
        "        listener.bind((b.ipv4, 9000))\n"
        "        listener.listen()\n"
        "        a.connect(b.ipv4, 9000).close()\n"
        "    b.kill()\n"
        "    b.start()\n"
        "    print('served')\n"
    )
    assert _without("-sys_admin,-net_admin,-net_raw", code) == "a\n0\nserved\n"


def test_where_the_machine_does_not_allow_it_the_reason_is_told(network):
    code = (
        "from kvferry.errors import HostError\n"
        "from kvferry.testing.hosts import Network\n"
        "try:\n"
        "    Network.open()\n"
        "except HostError as error:\n"
        "    print(error)\n"
    )
    told = _without("-all", code)
    assert told == "no hosts for tests on this machine: no namespaces: Operation not permitted\n"


def test_the_fixture_skips_with_the_reason(pytester, monkeypatch):
    pytester.makeconftest('pytest_plugins = ["kvferry.testing.fixtures"]')
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile("def test_it(network): raise AssertionError('not skipped')")
    monkeypatch.setattr(
        Network, "open", classmethod(lambda cls: (_ for _ in ()).throw(HostError("no such luck")))
    )
    result = pytester.runpytest_inprocess("-rs", "-p", "no:cacheprovider")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*no such luck*"])


def test_what_the_page_on_testing_shows_passes(network, pytester):
    (shown,) = [block for block in blocks(PAGE, "python") if "test_a_cut_heals" in block]
    pytester.makeini("[pytest]\nasyncio_default_fixture_loop_scope = function")
    pytester.makepyfile(shown)
    result = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=1)
