"""Real vLLM servers behind our router that die, come and go: no client notices.

At most three of them run at a time where they are killed. There reads begin late, so that there is
time to kill who reads.
"""

import contextlib
import itertools
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import httpx
import pytest

from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import CACHE_USED, EXTERNAL_TOKENS
from benchmarks.vllm_servers.server import ServerOptions
from kvferry.control.client import fetch_status
from kvferry.router.router_client import RouterClient
from kvferry.testing.waiting import WAIT_S, until
from tests.load import Load, tokens_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

PLUGIN = Path(__file__).parent / "plugin"
READ_S = "10"
"""Of a read before it begins, where servers are killed."""
KILLS = int(os.environ.get("KILLS", "2"))
"""Servers that are killed in a row under load; a long run takes more."""
SCALE_S = float(os.environ.get("SCALE_S", "300"))
"""Seconds for which servers come and go."""
SCALE_MEMBERS = int(os.environ.get("SCALE_MEMBERS", "2"))
"""Servers of each role, while none comes or goes."""
CHANGE_S = 20.0
"""Seconds between two rounds of changes, at least."""
CLIENTS = 3
LONG = 800
"""Tokens, so many that a server is still drawing when it is killed."""
SHORT = 48
BLOCKS = {"prefill": 64, "decode": 128}
COMPUTED = "vllm:prompt_tokens_total"
DRAWN = "vllm:generation_tokens_total"


def role_of(name):
    return "prefill" if name.startswith("p") else "decode"


def prompt(number):
    """No two of them begin alike."""
    draw = random.Random(number)
    return [draw.randrange(8, tiny_model().vocab_size) for _ in range(200 + 40 * (number % 6))]


class Members:
    """A router, and the servers behind it."""

    def __init__(self, start, url, transport):
        self.servers = {}
        self._start = start
        self._transport = transport
        self._stack = contextlib.ExitStack()
        self._client = self._stack.enter_context(
            httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False)
        )
        self._router = RouterClient(url, "operator")
        self._known = {}
        """Name → how a server was started, and is again."""

    def close(self):
        self._stack.close()

    def have(self, *names):
        """Those servers run, and no others; one that was killed has its old ports again."""
        for name in self.servers.keys() - set(names):
            self.remove(name)
        new = [name for name in names if name not in self.servers]
        started = self._stack.enter_context(self._start([self._options(name) for name in new]))
        self.servers |= dict(zip(new, started, strict=True))
        for name in new:
            self._router.put(role_of(name), name, self.servers[name].url)
        until(lambda: all(self._states()[name] == "ready" for name in names), WAIT_S)

    def _options(self, name):
        if name in self._known:
            return self._known[name]
        role = role_of(name)
        connector = KVFerry(
            extra={
                "transport": self._transport,
                "lease_duration_s": 10.0,
                "cluster_key": "of the servers of one test run alone",
            }
        )
        self._known[name] = ServerOptions(
            name=name,
            model=tiny_model(),
            block_size=BLOCKS[role],
            transfer=connector.config("kv_producer" if role == "prefill" else "kv_consumer", name),
            environment={"SLOW_TCP_S": READ_S},
            path=(PLUGIN,),
        )
        return self._known[name]

    def _states(self):
        return {one["name"]: one["state"] for one in self._router.engines()}

    def remove(self, name):
        """Has it drain, then ends it."""
        self._router.drain(role_of(name), name)
        until(lambda: self._states()[name] == "drained", WAIT_S)
        self._router.delete(role_of(name), name)
        self.servers.pop(name).close()

    def kill(self, name):
        self.servers.pop(name).kill()

    def stream(self, number, max_tokens=LONG):
        """The tokens of an answer as they come.

        Raises:
            AssertionError: the client is told of an error.
        """
        body = {
            "model": "model",
            "prompt": prompt(number),
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        with self._client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield from tokens_in(response.iter_lines())

    def reading(self):
        """(lender, reader) of a lease that a server has taken, once there is one."""

        def find():
            for name, server in self.servers.items():
                if role_of(name) == "prefill":
                    port = server.options.transfer["kv_port"]
                    for lease in fetch_status("127.0.0.1", port, WAIT_S).leases:
                        if lease.target:
                            return name, lease.target
            return None

        return until(find, WAIT_S)

    def drawing(self):
        """A decode server that has a request, once there is one."""

        def find():
            engines = self._router.engines()
            busy = [one["name"] for one in engines if one["outstanding"]]
            return next((name for name in busy if role_of(name) == "decode"), None)

        return until(find, WAIT_S)

    def count(self, role, metric):
        """Over the servers of a role that run."""
        servers = [self.servers[name] for name in self.servers if role_of(name) == role]
        return sum(server.metrics().get(metric, 0.0) for server in servers)

    def check_nothing_is_stranded(self):
        for server in self.servers.values():
            until(partial(holds_nothing, server), WAIT_S)


def holds_nothing(server):
    """Whether no request has blocks of a server's KV cache."""
    return not server.metrics()[CACHE_USED]


def asking(members):
    """Clients that never ask the same twice."""

    def ask(number):
        return list(members.stream(number, SHORT))

    return Load(ask, itertools.count(100), clients=CLIENTS, wait_s=WAIT_S)


def check(load, reference, what):
    """Every answer is that of a single server, which runs only now."""
    right = {}

    def compute(number):
        right[number] = reference.tokens(tiny_model(), prompt(number), SHORT)

    assert load.answers
    numbers = [number for number, _ in load.answers]
    compute(numbers[0])
    with ThreadPoolExecutor(4) as threads:  # it is up now
        list(threads.map(compute, numbers[1:]))
    reference.close()
    wrong = load.wrong(right.__getitem__)
    print(f"{what}, {len(load.answers)} answers, {load.errors=}, {wrong=}", flush=True)
    assert (load.errors, wrong) == ([], [])


@pytest.fixture(scope="module")
def behind(start, start_router):
    """``behind(transport)`` is a context manager over :class:`Members`."""

    @contextlib.contextmanager
    def opening(transport):
        tokenizer = ("--tokenizer", str(tiny_model().folder), "--decode-only", "never")
        with (
            pytest.MonkeyPatch.context() as patch,
            contextlib.ExitStack() as stack,
        ):
            patch.setenv("KVFERRY_OPERATOR_KEY", "operator")
            url = stack.enter_context(start_router(None, *tokenizer))
            yield stack.enter_context(contextlib.closing(Members(start, url, transport)))

    return opening


@pytest.fixture(scope="module")
def expected(reference):
    """Number → the right tokens, of a single server that ran before the others."""
    tokens = [reference.tokens(tiny_model(), prompt(number), LONG) for number in range(3)]
    reference.close()
    return tokens


@pytest.fixture(scope="module")
def killable(behind, expected):
    with behind("slow_tcp") as members:
        yield members


def test_a_decode_server_that_dies_before_its_first_token_costs_no_prompt(killable, expected):
    killable.have("p0", "d0", "d1")
    computed = killable.count("prefill", COMPUTED)
    tokens = killable.stream(0)
    come = [next(tokens)]  # the prefill server's
    _, dead = killable.reading()
    killable.kill(dead)
    loaded = killable.count("decode", EXTERNAL_TOKENS)

    come += tokens

    assert come == expected[0]
    # The lease has passed on: nobody has computed the prompt again.
    assert killable.count("prefill", COMPUTED) - computed == len(prompt(0))
    assert killable.count("decode", EXTERNAL_TOKENS) - loaded >= len(prompt(0)) - 1
    killable.check_nothing_is_stranded()


def test_a_stream_goes_on_when_its_decode_server_dies(killable, expected):
    killable.have("p0", "d0", "d1")
    tokens = killable.stream(1)
    come = [next(tokens) for _ in range(5)]
    killable.kill(killable.drawing())
    drawn = killable.count("decode", DRAWN)

    come += tokens

    assert come == expected[1]
    assert killable.count("decode", DRAWN) > drawn
    killable.check_nothing_is_stranded()


def test_decode_servers_are_killed_in_a_row_under_load(killable, reference):
    """At any moment of the requests that are under way."""
    killable.have("p0", "d0", "d1")
    with asking(killable) as load:
        for _ in range(KILLS):
            killable.have("p0", "d0", "d1")
            load.until_all_are_new()
            _, dead = killable.reading()
            killable.kill(dead)
            load.until_all_are_new()
            if load.errors:
                break
    killable.check_nothing_is_stranded()
    killable.have("p0")  # the single server has room
    check(load, reference, f"{KILLS} kills")


def test_a_stream_waits_when_the_prefill_server_dies_from_which_it_is_read(killable, expected):
    killable.have("p0", "p1", "d0")
    tokens = killable.stream(2)
    come = [next(tokens)]
    dead, _ = killable.reading()
    killable.kill(dead)
    computed = killable.count("prefill", COMPUTED)

    come += tokens

    assert come == expected[2]
    assert killable.count("prefill", COMPUTED) - computed >= len(prompt(2))
    killable.check_nothing_is_stranded()


def test_servers_come_and_go_under_load_and_every_answer_is_right(behind, reference):
    """One of each role is started, and takes the place of another, again and again."""
    numbers = itertools.count(SCALE_MEMBERS)
    present = [f"{letter}{number}" for letter in "pd" for number in range(SCALE_MEMBERS)]
    with behind("tcp") as members:
        members.have(*present)
        ends = time.monotonic() + SCALE_S
        with asking(members) as load:
            rounds = 0
            while not load.errors and time.monotonic() < ends:
                begun = time.monotonic()
                number = next(numbers)
                for letter in "pd":
                    oldest = next(name for name in present if name.startswith(letter))
                    present.append(f"{letter}{number}")
                    members.have(*present)
                    present.remove(oldest)
                    members.have(*present)
                rounds += 1
                time.sleep(max(0.0, CHANGE_S - (time.monotonic() - begun)))
        assert members.count("decode", EXTERNAL_TOKENS)
        members.check_nothing_is_stranded()
    check(load, reference, f"{rounds} rounds of two changes")
