"""Several processes that serve the requests of one router."""

import asyncio
import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections import Counter
from typing import cast

import httpx
import msgspec
import psutil
import pytest

from kvferry.config import RouterConfig
from kvferry.errors import WorkerDiedError
from kvferry.router import health
from kvferry.router.counts import SLOTS, CountTable
from kvferry.router.draining import Drain
from kvferry.router.engine_client import EngineClient, HttpAnswer
from kvferry.router.health import SGLangServer, Told
from kvferry.router.members import Members
from kvferry.router.workers import Leader, Tell, Workers, WorkerSettings
from kvferry.serving.messages import EngineAddress, RouterSettings
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import FakeEngine
from tests.load import stop

pytestmark = [pytest.mark.slow, pytest.mark.processes]

OPERATOR = {"authorization": "Bearer operator"}
REQUEST = {"prompt": "Hi", "max_tokens": 5, "temperature": 0}


class Running:
    """A router with two workers before fake engines."""

    def __init__(self, servers, folder, byte_model):
        self.folder = folder
        self.prefill = FakeEngine("p0", "prefill")
        self.decode = [FakeEngine(f"d{number}", "decode") for number in range(2)]
        self.fakes = (self.prefill, *self.decode)
        for fake in self.fakes:
            self.start(servers, fake)
        settings = RouterSettings(
            engines=tuple(
                EngineAddress(name=each.name, role=each.role, url=each.url) for each in self.fakes
            ),
            model_folder=str(byte_model),
            operator_key="operator",
            workers=2,
            port=0,
            assume_cached=True,
            explain=True,
            drain_timeout_s=WAIT_S,
        )
        reports, report_to = os.pipe()
        self.leader = subprocess.Popen(
            [sys.executable, "-m", "kvferry.cluster.main", "router", str(report_to), "router"],
            stdin=subprocess.PIPE,
            pass_fds=(report_to,),
            env={**os.environ, "TMPDIR": str(folder)},
        )
        os.close(report_to)
        assert self.leader.stdin is not None
        self.leader.stdin.write(msgspec.json.encode(settings) + b"\n")
        self.leader.stdin.flush()
        with os.fdopen(reports, "rb") as events:
            self.port = msgspec.json.decode(events.readline())["port"]
        self.client = httpx.Client(
            base_url=f"http://127.0.0.1:{self.port}",
            timeout=WAIT_S,
            trust_env=False,
            headers={**OPERATOR, "connection": "close"},
        )
        until(lambda: len(self.workers()) == 2)

    def start(self, servers, fake):
        fake.prompt, fake.script = list(b"Hi"), list(b"Hello")
        fake.url = servers.start(fake.app())

    def make_ready(self):
        """All engines are as at the start, and all workers know it."""
        for fake in self.fakes:
            fake.hang = False
            fake.release.clear()
            fake.bodies.clear()
            self.enter(fake)
        until(
            lambda: all(
                each["healthy"] and not each["outstanding"] and not each["lent"]
                for each in self.engines()
            )
        )
        self.enter(self.prefill)

    def enter(self, fake):
        """Is answered once all workers know of it."""
        path = f"/kvferry/engines/{fake.role}/{fake.name}"
        assert self.client.put(path, json={"url": fake.url}).status_code == 200

    def engines(self):
        return self.client.get("/kvferry/engines").json()["engines"]

    def told(self, name):
        return next(each for each in self.engines() if each["name"] == name)

    def workers(self):
        """Number → process."""
        found = {}
        for each in psutil.Process(self.leader.pid).children():
            with contextlib.suppress(psutil.Error, IndexError):
                found[each.cmdline()[-1]] = each
        return {int(name[7:]): each for name, each in found.items() if name.startswith("worker-")}

    def doors(self):
        """Number of the workers' connections within this host, to their leader among them."""
        return sum(len(each.net_connections("unix")) for each in self.workers().values())

    @contextlib.contextmanager
    def only(self, number):
        """Connections that are made now are that worker's: the others are stopped."""
        others = [process for each, process in self.workers().items() if each != number]
        try:
            for process in others:
                stop(process.pid)
            yield
        finally:
            for process in others:
                process.resume()

    def complete(self, number):
        """A request to one worker."""
        with self.only(number):
            return self.client.post("/v1/completions", json=REQUEST)

    def begin(self, number):
        """A request to one worker, which waits for its decode engine when this returns."""
        before = self.asked()
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        with self.only(number):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(REQUEST), headers)
            until(lambda: self.asked() > before)
        return connection

    def asked(self):
        return sum(len(each.bodies) for each in self.decode)

    def metric(self, name):
        found = re.findall(rf"^{re.escape(name)} (.*)$", self.client.get("/metrics").text, re.M)
        return float(found[0]) if found else 0.0

    def close(self):
        self.client.close()
        for each in self.decode:
            each.release.set()
        for process in self.workers().values() if self.leader.poll() is None else ():
            process.resume()
        self.leader.terminate()
        self.leader.wait(WAIT_S)
        assert self.leader.stdin is not None
        self.leader.stdin.close()


@pytest.fixture(scope="module")
def shared(server_thread, tmp_path_factory, byte_model):
    made = Running(server_thread, tmp_path_factory.mktemp("workers"), byte_model)
    yield made
    made.close()


@pytest.fixture
def running(shared):
    """One router for all tests that leave it as it was."""
    shared.make_ready()
    return shared


@pytest.fixture
def ending(server_thread, tmp_path, byte_model):
    """A router that a test ends."""
    made = Running(server_thread, tmp_path, byte_model)
    made.make_ready()
    yield made
    made.close()


def is_gone(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.status() == psutil.STATUS_ZOMBIE
    return True


# ---- requests ------------------------------------------------------------------------------------


@pytest.mark.timed("Workers must hear of each other within 2 s.")
def test_each_worker_answers_and_their_requests_and_metrics_are_one(running):
    counted = (
        'kvferry_router_requests_total{status="200"}',
        "kvferry_router_completion_tokens_total",
        "kvferry_router_request_seconds_count",
    )
    before = [running.metric(name) for name in counted]
    for number in (1, 2, 2):
        answer = running.complete(number)
        assert answer.json()["choices"][0]["text"] == "Hello"
        assert "prefill=p0; decode=d" in answer.headers["x-kvferry-route"]

    more = [running.metric(name) - was for name, was in zip(counted, before, strict=True)]
    assert more == [3, 15, 3]
    assert running.metric('kvferry_router_engine_up{engine="d0",role="decode"}') == 1
    with running.client.stream("GET", "/kvferry/watch") as events:
        first = next(line for line in events.iter_lines() if line)
    shown = msgspec.json.decode(first.removeprefix("data: "))["requests"]
    assert [one["engines"][0] for one in shown[:3]] == ["p0"] * 3
    assert shown == sorted(shown, key=lambda one: one["started"], reverse=True)


def test_connections_are_spread_over_the_workers(running):
    with contextlib.ExitStack() as stack:

        def have_all():
            stack.enter_context(socket.create_connection(("127.0.0.1", running.port)))
            return all(
                any(each.laddr.port == running.port and each.raddr for each in found)
                for found in (each.net_connections() for each in running.workers().values())
            )

        until(have_all)


@pytest.mark.timed("Workers must hear of each other within 2 s.")
def test_the_choice_counts_the_requests_of_all_workers(running):
    first, second = running.decode
    first.hang = second.hang = True
    with contextlib.ExitStack() as stack:
        for number in (1, 2, 2, 1):
            stack.callback(running.begin(number).close)
        assert (len(first.bodies), len(second.bodies)) == (2, 2)
        assert running.told("d0")["outstanding"] == 2
    until(lambda: running.told("d0")["outstanding"] == running.told("d1")["outstanding"] == 0)


@pytest.mark.timed("Workers must hear of each other within 2 s.")
def test_what_an_operator_drains_through_one_worker_gets_nothing_from_any(running):
    path = "/kvferry/engines/decode/d0/drain"
    assert running.client.post(path, headers={"authorization": "Bearer no"}).status_code == 401
    assert running.client.post(path).json()["state"] == "drained"

    for number in (1, 2, 1, 2):
        assert running.complete(number).status_code == 200
    assert not running.decode[0].bodies

    assert running.client.delete(path).json()["state"] == "ready"
    assert running.client.delete("/kvferry/engines/decode/d1").status_code == 200
    for number in (1, 2):
        assert running.complete(number).status_code == 200
    assert len(running.decode[0].bodies) == 2


@pytest.mark.timed("Workers must hear of each other within 2 s.")
def test_an_operator_does_not_wait_for_a_worker_that_hangs(running):
    with running.only(1):
        assert running.client.post("/kvferry/engines/decode/d0/drain").json()["state"] == "drained"
    running.enter(running.decode[0])  # which the other one hears as well
    assert running.complete(2).status_code == 200


def test_an_engine_has_drained_when_no_worker_has_a_request_there(running):
    first = running.decode[0]
    assert running.client.delete("/kvferry/engines/decode/d1").status_code == 200
    first.hang = True
    ones, others = running.begin(1), running.begin(2)

    drained = running.client.post("/kvferry/engines/decode/d0/drain").json()

    assert (drained["state"], drained["outstanding"]) == ("draining", 2)
    ones.close()
    until(lambda: running.told("d0")["outstanding"] == 1)
    assert running.told("d0")["state"] == "draining"
    first.release.set()
    assert others.getresponse().status == 200
    others.close()
    assert running.told("d0")["state"] == "drained"


def test_an_engine_that_dies_is_left_by_all_workers(running, server_thread):
    dying = FakeEngine("dying", "decode")
    running.start(server_thread, dying)
    running.enter(dying)
    until(lambda: running.told("dying")["healthy"])
    server_thread.stop(dying.url)

    for number in (1, 2, 1, 2):
        assert running.complete(number).status_code == 200
    until(lambda: running.told("dying")["state"] == "down")
    assert running.asked() == 4
    assert running.client.delete("/kvferry/engines/decode/dying").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/kvferry", 200),
        ("GET", "/kvferry/requests/r%20%3F%25", 200),
        ("GET", "/kvferry/engines/decode/none", 405),
        ("DELETE", "/kvferry/engines/decode/a%2Fb", 404),
        ("PUT", "/kvferry/engines/decode/a%2Fb", 400),
        ("GET", "/kvferry/nothing", 404),
        ("GET", "/kvferry/%2E%2E/health", 404),
        ("POST", "/health", 405),
    ],
)
def test_what_the_leader_answers_comes_through(running, method, path, status):
    answer = running.client.request(method, path, json={} if method == "PUT" else None)
    assert answer.status_code == status, answer.text
    if "a%2Fb" in path and status == 404:
        assert "decode engine 'a/b' is not known here" in answer.text


def test_a_body_that_is_too_long_for_an_engine_is_refused_by_name(running):
    answer = running.client.put("/kvferry/engines/decode/d0", json={"url": "x" * 5000})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_long")


def test_a_client_that_leaves_does_not_wait_for_a_leader_that_hangs(running):
    with socket.create_connection(("127.0.0.1", running.port)) as client:
        stop(running.leader.pid)
        before = running.doors()
        try:
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            until(lambda: running.doors() > before)
            client.close()
            until(lambda: running.doors() == before)
        finally:
            running.leader.send_signal(signal.SIGCONT)


# ---- processes that end --------------------------------------------------------------------------


def test_a_worker_that_is_killed_takes_its_own_requests_alone_and_is_started_again(running):
    name = 'kvferry_router_requests_total{status="200"}'
    before = running.metric(name)
    assert running.complete(1).status_code == 200
    for each in running.decode:
        each.hang = True
    lost, kept = running.begin(1), running.begin(2)
    killed = running.workers()[1]

    killed.kill()

    with pytest.raises((http.client.RemoteDisconnected, ConnectionResetError)):
        lost.getresponse()
    until(lambda: sum(each["outstanding"] for each in running.engines()) == 1)
    for each in running.decode:
        each.release.set()
    assert kept.getresponse().status == 200
    kept.close()
    lost.close()
    until(lambda: running.workers().get(1, killed).pid != killed.pid)
    assert running.complete(1).status_code == 200
    assert running.metric(name) - before == 3


def test_killing_the_leader_ends_the_workers_and_frees_the_port(ending):
    processes = list(ending.workers().values())
    (made,) = ending.folder.glob("kvferry-router-*")

    ending.leader.kill()

    until(lambda: all(is_gone(each) for each in processes))
    assert not made.exists()
    socket.create_server(("127.0.0.1", ending.port)).close()


def test_the_end_lets_open_requests_end_and_leaves_no_process_and_no_file(ending):
    processes = ending.workers()
    for each in ending.decode:
        each.hang = True
    asked = ending.begin(2)

    ending.leader.terminate()
    until(lambda: is_gone(processes[1]))
    assert ending.client.get("/health").json()["status"] == "draining"
    for each in ending.decode:
        each.release.set()

    assert asked.getresponse().status == 200
    asked.close()
    assert ending.leader.wait(WAIT_S) == 0
    assert all(is_gone(each) for each in processes.values())
    assert not list(ending.folder.glob("kvferry-router-*"))


def test_a_router_whose_workers_cannot_start_ends_and_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    settings = RouterSettings(engines=(), foreign=True, workers=2)

    async def run():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            workers = Workers(settings, listener, tmp_path)
            await workers.run(Members(settings, EngineClient({})), Drain())

    with pytest.raises(WorkerDiedError, match=r"worker \d of the router ended with exit code 1"):
        asyncio.run(run())


# ---- what they share -----------------------------------------------------------------------------


def test_counts_are_those_of_all_processes_until_one_dies():
    fd = CountTable.make(3)
    leader, first, second = (CountTable(fd, 3, own) for own in range(3))
    os.close(fd)
    first.counts(7)[0].add(2)
    second.counts(7)[0].add(3)
    second.counts(7)[0].add(-1)

    assert [count.total for count in leader.counts(7)] == [4, 0, 0, 0]
    assert (leader.free(range(7)), leader.free(range(SLOTS - 1))) == (8, SLOTS - 1)

    leader.clear(1)
    assert (first.counts(7)[0].total, leader.counts(8)[0].total) == (2, 0)
    leader.clear(2)
    assert leader.free(range(7)) == 7


def followed(*names):
    """The members of a leader, and those of a worker that follow them."""
    settings = RouterSettings(
        engines=tuple(
            EngineAddress(name=each, role="decode", url=f"http://{each}") for each in names
        )
    )
    fd = CountTable.make(2)
    members = Members(settings, EngineClient({}), table=CountTable(fd, 2, 0))
    mine = msgspec.structs.replace(settings, engines=())
    follower = Members(mine, EngineClient({}), table=CountTable(fd, 2, 1), follows=True)
    os.close(fd)
    follower.follow(members.states())
    return members, follower


def test_members_of_a_worker_are_those_of_its_leader_in_their_order():
    members, follower = followed("d0", "d1", "d2")
    known = list(follower)
    known[0].pace.requests.add(1)

    members.remove(members.find("decode", "d1"))
    members.add(EngineAddress(name="d3", role="decode", url="http://d3", control="d3:1"))
    members.add(EngineAddress(name="d0", role="decode", url="http://elsewhere"))
    follower.follow(members.states())

    assert [each.name for each in follower] == ["d2", "d3", "d0"]
    assert known[0].health.is_leaving
    assert known[1].health.is_leaving
    assert follower.find("decode", "d2") is known[2]
    assert follower.find("decode", "d3").told.control == "d3:1"
    # What works for the d0 of before does not count for the new one.
    assert follower.find("decode", "d0").outstanding == 0


def test_an_engine_that_was_replaced_is_asked_no_more_while_the_new_one_works(monkeypatch):
    monkeypatch.setattr(health, "PROBE_INTERVAL_S", 0.02)

    class Client:
        def __init__(self):
            self.asked = Counter[str]()

        async def ask(self, _method, url):
            self.asked[url] += 1
            return HttpAnswer(503, b"")

    async def run():
        client = Client()
        settings = RouterSettings(engines=(EngineAddress.of("decode", "http://old", "d0"),))
        fd = CountTable.make(1)
        known = Members(settings, cast(EngineClient, client), table=CountTable(fd, 1, 0))
        os.close(fd)
        async with asyncio.timeout(WAIT_S), known.watching():
            await asyncio.sleep(0.1)
            known.add(EngineAddress.of("decode", "http://new", "d0")).pace.requests.add(1)
            await asyncio.sleep(0.1)
            before = client.asked["http://old/health"]
            while client.asked["http://new/health"] < 10:
                await asyncio.sleep(0.01)
            assert client.asked["http://old/health"] == before > 0

    asyncio.run(run())


def test_of_an_engines_health_the_latest_word_counts():
    members, follower = followed("d0")
    (leads,), (follows,) = members, follower
    leads.health.up()
    told = members.states()
    follows.health.down("a request failed", reached=True)

    follower.follow(told)
    assert (follows.status.healthy, follows.status.last_error) == (False, "a request failed")

    leads.health.up()
    follower.follow(members.states())
    assert (follows.status.healthy, follows.status.last_error) == (True, "")

    leads.health.down("it hangs", reached=False, is_slow=True)
    follower.follow(members.states())
    assert (follows.state, follows.status.down_since) == ("slow", leads.status.down_since)


def test_a_worker_does_not_unlearn_of_which_kind_an_engine_is():
    """From a leader whose first health check has not ended, or did not come through."""
    members, follower = followed("d0")
    (leads,), (follows,) = members, follower
    server = SGLangServer(
        version="0.5.23",
        disaggregation_mode="decode",
        disaggregation_transfer_backend="kvferry",
        disaggregation_bootstrap_port=8998,
    )
    leads.health.enter(EngineAddress(name="d0", role="decode", url="http://d0", control="d0:1"))
    follower.follow(members.states())
    assert follows.told.control == "d0:1"
    follows.health.told = Told(sglang=server, max_model_len=512)
    follows.health.up()

    follower.follow(members.states())
    assert (follower.have_sglang, follower.max_model_len) == (True, 512)

    leads.health.down("it is no SGLang server any more", reached=True)
    follower.follow(members.states())
    assert (follower.have_sglang, follower.max_model_len) == (False, None)


def test_a_worker_that_hears_nothing_of_its_leader_any_more_ends(tmp_path):
    members, follower = followed("d0")
    mine, theirs = socket.socketpair()
    fd = CountTable.make(2)
    settings = WorkerSettings(
        router=RouterSettings(engines=()),
        number=1,
        listener=0,
        channel=mine.detach(),
        table=fd,
        folder=str(tmp_path),
        leader=os.getppid(),
    )
    drain = Drain()
    leader = Leader(settings, drain)
    os.close(fd)
    members.add(EngineAddress(name="d1", role="decode", url="http://d1"))

    async def run():
        async with leader.followed(follower, list):
            theirs.close()
            await drain.over.wait()

    tell = Tell(engines=members.states(), asks=True)
    theirs.sendall(msgspec.json.encode(tell) + b"\n")
    asyncio.run(run())

    assert [each.name for each in follower] == ["d0", "d1"]
    leader.sweep()
    assert tmp_path.exists()


@pytest.mark.parametrize("workers", [0, 65])
def test_a_number_of_workers_that_cannot_be_is_refused(workers):
    with pytest.raises(ValueError, match=f"workers: {workers} is not 1 to 64"):
        RouterConfig(workers=workers)
