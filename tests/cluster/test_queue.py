"""A router whose servers take a limited number of requests each: the others wait in a queue."""

import asyncio
import contextlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from kvferry.config import RouterConfig
from kvferry.observe.spans import RequestSpan
from kvferry.router.counts import CountTable
from kvferry.router.queue import OLDEST_EACH, QueuePlace, RequestQueue
from kvferry.serving.messages import Role
from kvferry.serving.openai import ApiError
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import leave_path, router_process, running_router
from tests.cluster.streams import CHAT, COMPLETIONS, MESSAGES, RESPONSES

processes = pytest.mark.processes
OTHERS = [COMPLETIONS, RESPONSES, "/inference/v1/generate"]
PATHS = [CHAT, MESSAGES, *(pytest.param(path, marks=pytest.mark.slow) for path in OTHERS)]


# ---- the order, without servers ------------------------------------------------------------------


ROLES: tuple[Role, ...] = ("prefill", "decode")


class Room:
    """Servers of both roles that take a number of requests."""

    def __init__(self, most):
        self.most = most
        self.taken: Counter[Role] = Counter()

    def queue(self, most_waiting=1000, table=None):
        room = {role: partial(self.left, role) for role in ROLES}
        return RequestQueue(room, most_waiting, table)

    def left(self, role):
        return self.most - self.taken[role]


async def asks(queue, name, priority, admitted, over, needs=("decode",)):
    """A request that holds its place until its event; it notes when it was admitted."""
    async with queue.waited(QueuePlace(priority), needs, RequestSpan(None, CHAT, "")):
        admitted.append(name)
        await over.wait()


async def order_of(priorities, queues, room):
    """The order in which one server takes requests that wait, each in one of the queues."""
    admitted: list[int] = []
    over = asyncio.Event()
    over.set()
    room.most = 0
    tasks = []
    for name, priority in enumerate(priorities):
        queue = queues[name % len(queues)]
        tasks.append(asyncio.create_task(asks(queue, name, priority, admitted, over)))
        await asyncio.sleep(0)  # each of them waits before the next one comes
    assert admitted == []
    room.most = 1
    await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)
    return admitted


def expected(priorities):
    """The slow rule: sort again for each place."""
    waiting = list(enumerate(priorities))
    order: list[int] = []
    while waiting:
        is_oldest = len(order) % OLDEST_EACH == OLDEST_EACH - 1
        each = waiting[0] if is_oldest else min(waiting, key=lambda one: (one[1], one[0]))
        waiting.remove(each)
        order.append(each[0])
    return order


@given(st.lists(st.integers(-2, 2), max_size=25), st.integers(1, 3))
def test_requests_go_by_priority_then_in_order_and_each_eighth_is_the_oldest(priorities, processes):
    room, fd = Room(0), CountTable.make(processes)
    tables = [CountTable(fd, processes, own) for own in range(processes)]
    queues = [room.queue(table=table) for table in tables]

    async def ordered():
        return await order_of(priorities, queues, room)

    try:
        assert asyncio.run(ordered()) == expected(priorities)
        assert queues[0].view().waiting == 0
    finally:
        os.close(fd)


def test_urgent_requests_without_end_starve_no_batch_request():
    room, over = Room(0), asyncio.Event()
    admitted: list[str] = []

    async def run():
        over.set()
        queue, tasks = room.queue(), []
        for name, priority in (("batch", 10), *((f"urgent {n}", 0) for n in range(20))):
            tasks.append(asyncio.create_task(asks(queue, name, priority, admitted, over)))
            await asyncio.sleep(0)
        room.most = 1
        await asyncio.gather(*tasks)

    asyncio.run(run())

    assert admitted.index("batch") == OLDEST_EACH - 1


def test_each_sequence_of_a_request_has_a_wait_of_its_own():
    room, span = Room(1), RequestSpan(None, CHAT, "")
    waits: list[float] = []

    async def run():
        queue, goes_on = room.queue(), asyncio.Event()

        async def sequence():
            async with queue.waited(QueuePlace(0), ("decode",), span) as waited_s:
                waits.append(waited_s)
                room.taken["decode"] = 1  # until the test goes on, there is room for one alone
                await goes_on.wait()
                room.taken["decode"] = 0

        tasks = [asyncio.create_task(sequence()) for _ in range(3)]
        while len(waits) < 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        goes_on.set()
        await asyncio.wait_for(asyncio.gather(*tasks), WAIT_S)

    asyncio.run(run())
    first, *others = waits
    assert first < min(others)
    assert span.waited_s == max(waits)


def test_a_request_that_needs_both_servers_waits_for_both_and_nobody_overtakes_it():
    room = Room(1)
    admitted: list[str] = []

    async def run():
        over = asyncio.Event()
        queue, both = room.queue(), asyncio.Event()
        room.taken["prefill"] = 1
        first = asyncio.create_task(asks(queue, "both", 0, admitted, both, ROLES))
        await asyncio.sleep(0)
        second = asyncio.create_task(asks(queue, "decode alone", 0, admitted, over))
        await asyncio.sleep(0.05)
        assert admitted == []
        room.taken["prefill"] = 0
        until_admitted = asyncio.create_task(_until(lambda: admitted == ["both"]))
        await asyncio.wait_for(until_admitted, WAIT_S)
        both.set()
        over.set()
        await asyncio.wait_for(asyncio.gather(first, second), WAIT_S)

    asyncio.run(run())

    assert admitted == ["both", "decode alone"]


async def _until(is_true):
    while not is_true():
        await asyncio.sleep(0.001)


def test_a_request_counts_until_its_server_counts_it():
    room = Room(1)

    async def run():
        queue = room.queue()
        place = QueuePlace(0)
        async with queue.waited(place, ROLES, RequestSpan(None, CHAT, "")):
            for role in ROLES:
                other = asyncio.create_task(_enters(queue, (role,)))
                await asyncio.sleep(0.02)
                assert not other.done()
                other.cancel()
                await asyncio.gather(other, return_exceptions=True)
            place.sent("prefill")
            await asyncio.wait_for(_enters(queue, ("prefill",)), WAIT_S)
            place.sent("decode")
            await asyncio.wait_for(_enters(queue, ROLES), WAIT_S)
        await asyncio.wait_for(_enters(queue, ROLES), WAIT_S)
        assert queue.view().waiting == 0

    asyncio.run(run())


async def _enters(queue, needs):
    async with queue.waited(QueuePlace(0), needs, RequestSpan(None, CHAT, "")):
        pass


def test_a_role_without_servers_lets_nobody_wait():
    queue = RequestQueue({"prefill": lambda: None, "decode": lambda: 1}, 0)

    asyncio.run(asyncio.wait_for(_enters(queue, ROLES), WAIT_S))


def test_a_dead_process_stands_in_nobodys_way():
    fd = CountTable.make(3)
    leader, dead, living = (CountTable(fd, 3, own) for own in range(3))

    async def run():
        room = Room(1)
        num_waiting, priority, *_ = dead.of_queue()
        num_waiting.put(1)
        priority.put(-5)
        waits = asyncio.create_task(_enters(room.queue(table=living), ROLES))
        await asyncio.sleep(0.03)
        assert not waits.done()
        leader.clear(1)
        await asyncio.wait_for(waits, WAIT_S)

    asyncio.run(run())
    os.close(fd)


def test_a_full_queue_says_so_and_when_to_come_again():
    queue = Room(0).queue(most_waiting=1)

    async def run():
        waits = asyncio.create_task(_enters(queue, ROLES))
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="1 requests wait for a server already") as refused:
            await _enters(queue, ROLES)
        assert (refused.value.status, refused.value.code) == (429, "queue_full")
        assert refused.value.headers == [(b"retry-after", b"1")]
        assert queue.view().turned_away == 1
        assert queue.view().waiting == 1
        waits.cancel()
        await asyncio.gather(waits, return_exceptions=True)
        assert queue.view().waiting == 0

    asyncio.run(run())


@pytest.mark.parametrize(
    ("key", "value", "least"), [("max_requests_per_server", 0, 1), ("max_queued_requests", -1, 0)]
)
def test_a_limit_that_lets_nothing_through_is_refused(key, value, least):
    with pytest.raises(ValueError, match=f"{key}: {value} is less than {least}"):
        RouterConfig(**{key: value})


# ---- through the command, before servers ---------------------------------------------------------


@dataclass
class Server:
    """Answers as a vLLM server does, and holds each request until the test lets it go."""

    names: list[str] = field(default_factory=list)
    """The requests that came to be answered, in order."""
    now: int = 0
    most: int = 0
    """Largest number of requests that it had at a time."""
    gone: set[str] = field(default_factory=set)
    let_go: set[str] = field(default_factory=set)
    lets_all_go: bool = False

    def app(self):
        return Starlette(
            routes=[
                Route("/health", lambda _: Response()),
                Route("/v1/models", self._models),
                Route("/tokenize", lambda _: Response(), methods=["POST"]),
                Route("/{path:path}", self._answer, methods=["POST"]),
            ]
        )

    async def _models(self, _):
        return JSONResponse({"data": [{"id": "served", "max_model_len": 512}]})

    async def _answer(self, request):
        body = await request.json()
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            if (body.get("kv_transfer_params") or {}).get("do_remote_decode"):
                await asyncio.sleep(0.01)
                return JSONResponse({"choices": [], "kv_transfer_params": {"ticket": "t"}})
            self.names.append(body["user"])
            while not (self.lets_all_go or body["user"] in self.let_go):
                if await request.is_disconnected():
                    self.gone.add(body["user"])
                    return Response()
                await asyncio.sleep(0.002)
            return JSONResponse({"said": body["user"]})
        finally:
            self.now -= 1


@dataclass
class Running:
    """A router before a prefill server and decode servers."""

    url: str
    prefill: Server
    decode: list[Server]
    pool: ThreadPoolExecutor
    process: "subprocess.Popen[str]"
    urls: list[str]
    """Addresses of the decode servers."""

    def ask(self, name, priority=None, path=CHAT):
        """Begins a request; its answer is ``(status, headers, body)``."""
        headers = {} if priority is None else {"X-Vllm-Priority": str(priority)}
        return self.pool.submit(self._post, path, {"user": name, **WORDS[path]}, headers)

    def _post(self, path, body, headers):
        answer = httpx.post(
            self.url + path, json=body, headers=headers, timeout=WAIT_S, trust_env=False
        )
        return answer.status_code, answer.headers, answer.json()

    def metric(self, name):
        text = httpx.get(f"{self.url}/metrics", timeout=WAIT_S, trust_env=False).text
        found = re.search(rf"^{re.escape(name)} ([\d.]+)$", text, re.M)
        return float(found[1]) if found else 0.0

    def until_waiting(self, count):
        until(lambda: self.metric("kvferry_router_queue_waiting") == count)

    def names(self):
        return [name for server in self.decode for name in server.names]


WORDS: dict[str, dict[str, object]] = {
    CHAT: {"messages": []},
    COMPLETIONS: {"prompt": "a"},
    MESSAGES: {"messages": [], "max_tokens": 3},
    RESPONSES: {"input": "a"},
    "/inference/v1/generate": {"token_ids": [1], "sampling_params": {"max_tokens": 2}},
}


@contextlib.contextmanager
def started(servers, *options, num_decode=1):
    p, *ds = all_servers = [Server() for _ in range(1 + num_decode)]
    urls = [servers.start(each.app()) for each in all_servers]
    with (
        router_process(urls[:1], urls[1:], *options) as (process, url),
        ThreadPoolExecutor(64) as pool,
    ):
        try:
            yield Running(url, p, ds, pool, process, urls[1:])
        finally:
            for each in all_servers:
                each.lets_all_go = True


@pytest.fixture(params=["1", pytest.param("3", marks=pytest.mark.slow)])
def workers(request):
    return ("--workers", request.param)


@processes
def test_no_server_has_more_requests_than_its_limit_and_all_are_answered(servers, workers):
    with started(servers, "--max-requests-per-server", "4", *workers, num_decode=2) as running:
        asked = [running.ask(f"{number}") for number in range(40)]
        until(lambda: sum(each.now for each in running.decode) == 8)
        running.until_waiting(32)
        for each in running.decode:
            each.lets_all_go = True

        assert [each.result(WAIT_S)[2]["said"] for each in asked] == [f"{n}" for n in range(40)]
        assert sum(each.most for each in running.decode) <= 8 + 2 * (int(workers[1]) - 1)
        assert running.prefill.most <= 4
        assert running.metric("kvferry_router_queue_seconds_count") == 40


@processes
@pytest.mark.parametrize("path", PATHS)
def test_waiting_requests_go_by_vllms_priority_and_then_in_order(servers, path):
    with started(servers, "--max-requests-per-server", "1") as running:
        asked = [running.ask("first", path=path)]
        until(lambda: running.names() == ["first"])
        for number, (name, priority) in enumerate(
            [("batch", 7), ("usual", None), ("urgent", -1), ("usual too", 0)]
        ):
            asked.append(running.ask(name, priority, path=path))
            running.until_waiting(number + 1)
        running.decode[0].lets_all_go = True

        assert all(each.result(WAIT_S)[0] == 200 for each in asked)
        assert running.names() == ["first", "urgent", "usual", "usual too", "batch"]


@processes
@pytest.mark.slow
def test_workers_have_one_order(servers):
    with started(servers, "--max-requests-per-server", "1", "--workers", "3") as running:
        asked = [running.ask("first")]
        until(lambda: running.names() == ["first"])
        order: list[str] = []
        for number in range(6):
            priority = -number
            asked.append(running.ask(f"{priority}", priority))
            order.insert(0, f"{priority}")
            running.until_waiting(number + 1)
        running.decode[0].lets_all_go = True

        assert all(each.result(WAIT_S)[0] == 200 for each in asked)
        assert running.names() == ["first", *order]


@processes
@pytest.mark.parametrize("path", PATHS)
def test_a_full_queue_is_a_429_in_the_form_of_each_api(servers, path):
    options = ("--max-requests-per-server", "1", "--max-queued-requests", "1")
    with started(servers, *options) as running:
        first, second = running.ask("first", path=path), None
        until(lambda: running.names() == ["first"])
        second = running.ask("second", path=path)
        running.until_waiting(1)

        status, headers, told = running.ask("third", path=path).result(WAIT_S)

        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert "--max-queued-requests" in json.dumps(told)
        if path == MESSAGES:
            assert (told["type"], told["error"]["type"]) == ("error", "rate_limit_error")
        assert running.metric('kvferry_router_errors_total{code="queue_full"}') == 1
        running.decode[0].lets_all_go = True
        assert [each.result(WAIT_S)[0] for each in (first, second)] == [200, 200]


@processes
def test_a_client_that_leaves_the_queue_gives_its_place_to_the_next(servers):
    with started(servers, "--max-requests-per-server", "1") as running:
        first = running.ask("first")
        until(lambda: running.names() == ["first"])
        with httpx.Client(base_url=running.url, trust_env=False) as client:
            body = {"user": "left", **WORDS[CHAT]}
            leave_path(client, CHAT, lambda: running.until_waiting(1) or True, body)
        running.until_waiting(0)
        last = running.ask("last")
        running.until_waiting(1)
        running.decode[0].lets_all_go = True

        assert [each.result(WAIT_S)[0] for each in (first, last)] == [200, 200]
        assert running.names() == ["first", "last"]


@processes
def test_a_request_that_another_server_must_serve_waits_no_second_time(servers):
    with started(servers, "--max-requests-per-server", "1", num_decode=2) as running:
        both = [running.ask("first"), running.ask("second")]
        until(lambda: len(running.names()) == 2)
        third = running.ask("third", -5)
        running.until_waiting(1)
        dying, living = running.decode
        name = dying.names[0]
        servers.stop(running.urls[0])
        until(lambda: name in living.names)
        assert "third" not in living.names
        living.lets_all_go = True

        assert all(each.result(WAIT_S)[0] == 200 for each in (*both, third))


@processes
def test_a_request_waits_at_most_as_long_as_its_answer_may_take(servers):
    options = ("--max-requests-per-server", "1", "--timeout", "0.5")
    with started(servers, *options) as running:
        asked = [running.ask(f"{number}") for number in range(3)]

        assert [each.result(WAIT_S)[0] for each in asked] == [504] * 3
        running.until_waiting(0)


@processes
def test_waiting_requests_are_answered_while_the_router_drains(servers):
    options = ("--max-requests-per-server", "1", "--drain-timeout", str(WAIT_S))
    with started(servers, *options) as running:
        asked = [running.ask("first")]
        until(lambda: running.names() == ["first"])
        asked.append(running.ask("second"))
        running.until_waiting(1)
        running.process.terminate()
        until(lambda: running.ask("late").result(WAIT_S)[0] == 503)
        running.decode[0].lets_all_go = True

        assert [each.result(WAIT_S)[0] for each in asked] == [200, 200]
        assert running.process.wait(WAIT_S) == 0


@processes
def test_questions_that_compute_no_answer_do_not_wait(servers):
    with started(servers, "--max-requests-per-server", "1") as running:
        first = running.ask("first")
        until(lambda: running.names() == ["first"])

        for method, path in (("GET", "/v1/models"), ("POST", "/tokenize"), ("GET", "/health")):
            answer = httpx.request(
                method, running.url + path, json={}, timeout=WAIT_S, trust_env=False
            )
            assert answer.status_code == 200
        running.decode[0].lets_all_go = True
        assert first.result(WAIT_S)[0] == 200


@processes
def test_top_tells_who_waits_how_long_and_how_many_were_turned_away(servers):
    options = ("--max-requests-per-server", "1", "--max-queued-requests", "1")
    with started(servers, *options) as running:
        asked = [running.ask("first")]
        until(lambda: running.names() == ["first"])
        asked.append(running.ask("second"))
        running.until_waiting(1)
        assert running.ask("third").result(WAIT_S)[0] == 429

        command = [sys.executable, "-m", "kvferry.cli", "top", running.url, "--once"]
        wide = {**os.environ, "COLUMNS": "200"}
        shown = subprocess.run(command, capture_output=True, text=True, check=True, env=wide).stdout

        assert re.search(r"queue: 1 requests wait, the oldest for [\d.]+ m?s; 1 turned away", shown)
        assert "waited" in shown
        running.decode[0].lets_all_go = True
        assert [each.result(WAIT_S)[0] for each in asked] == [200, 200]


@processes
def test_a_router_without_a_limit_has_no_queue(servers):
    url = servers.start(Server(lets_all_go=True).app())
    with running_router([], [url]) as router:
        text = httpx.get(f"{router}/metrics", timeout=WAIT_S, trust_env=False).text

    assert "kvferry_router_queue_waiting" not in text
