"""Engines that are killed (SIGKILL) under load: no client notices, and no token is another one.

The KV outlives D: a decode engine that dies before its first token is replaced by another, which
takes its lease over. Later ones are replaced too, and so are prefill engines under a reader.
"""

import contextlib
import itertools
import os
import random
import signal
import threading
from pathlib import Path

import httpx
import pytest
import torch

from kvferry.cluster import launcher
from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig, EngineConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import SamplingParams
from kvferry.testing.waiting import WAIT_S, until
from tests.load import Load, tokens_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.processes,
    pytest.mark.timed(
        "Parts of a second in which an answer is in one state must be seen by polling."
    ),
]

KILLS = int(os.environ.get("KILLS", "6"))
"""Of the test in which one follows another; a long run takes more."""
CLIENTS = 3
MAX_TOKENS = 250
"""So many that an engine is still drawing when its metrics are looked at."""
TRIES = 5
"""Requests of which one must be seen in the state that a test wants."""
LIVE = "kvferry_engine_live_requests"
NOBODY = object()
PLUGIN = Path(__file__).parents[1] / "vllm_servers" / "plugin"
"""Has a ``tcp`` whose reads begin two seconds late, so that there is time to kill."""


def engine(role, number):
    """No two of a role have one shape."""
    transfer = {
        "kv_connector": "PullConnector",
        "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
        "kv_port": 0,
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"transport": "slow_tcp", "lease_duration_s": 10.0},
    }
    return {
        "name": f"{role}-{number}",
        "tp": 1 + number,
        "block_size": (16, 24)[number],
        "num_blocks": 256,
        "max_model_len": 1024,
        "kv_transfer_config": transfer,
    }


CONFIG = ClusterConfig.from_mapping(
    {
        "model": {"source": "tiny", "dtype": "float64"},
        "prefill": [engine("prefill", number) for number in range(2)],
        "decode": [engine("decode", number) for number in range(2)],
        "router": {"port": 0, "decode_only": "never"},
    }
)


def prompt(number):
    """No two of them begin alike."""
    draw = random.Random(number)
    return [draw.randrange(3, 250) for _ in range(70 + number % 50)]


def sampling(number):
    """Every other one is drawn with a seed."""
    return {"temperature": 0.9, "seed": number} if number % 2 else {"temperature": 0.0}


class Killable:
    """A cluster whose engines are killed, and started again by its supervisor."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.client = httpx.Client(base_url=cluster.url, timeout=WAIT_S, trust_env=False)
        self._fresh = itertools.count(1000)
        self._stop = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise)
        self._supervisor.start()
        torch.set_num_threads(1)
        self._undivided = build_engine(
            EngineConfig(name="one", kv_transfer_config={}, num_blocks=256),
            cluster.model_folder,
            dtype="float64",
            executor="inprocess",
            connect=False,
        )

    def _supervise(self):
        while not self._stop.is_set():
            self.cluster.wait(0.2)

    def close(self):
        self._stop.set()
        self._supervisor.join()
        self.client.close()
        self._undivided.close()

    def fresh(self):
        """The number of a prompt that no engine has seen."""
        return next(self._fresh)

    def engine(self, name):
        return next(one for one in self.cluster.engines if one.name == name)

    def kill(self, name):
        process = self.engine(name).process
        os.killpg(process.pid, signal.SIGKILL)
        until(lambda: not process.is_running)

    def until_ready(self):
        engines = self.cluster.engines
        until(lambda: all(one.process.is_running and one.is_ready for one in engines))
        until(lambda: all(one.known_url == one.url for one in engines))
        until(lambda: all(one["state"] == "ready" for one in self.health()))

    def health(self):
        return self.client.get("/health").json()["engines"]

    def samples(self, name, metric):
        """Label → value of one of an engine's metrics; empty while it is not there."""
        with contextlib.suppress(httpx.HTTPError):
            text = httpx.get(f"{self.engine(name).url}/metrics", timeout=60, trust_env=False).text
            lines = [line for line in text.splitlines() if line.startswith(f"{metric}{{")]
            return {line.split('"')[1]: float(line.split()[-1]) for line in lines}
        return {}

    def having(self, *wanted):
        """The name of an engine for each (role, state): one of that role, with a live request in
        that state. ``None`` once no request is live.
        """

        def find():
            live = [(one, self.samples(one.name, LIVE)) for one in self.cluster.engines]
            names = [
                next(
                    (one.name for one, counts in live if one.role == role and counts.get(state)),
                    None,
                )
                for role, state in wanted
            ]
            if all(names):
                return names
            return not any(any(counts.values()) for _, counts in live) and NOBODY

        found = until(find)
        return None if found is NOBODY else found

    def catch(self, *wanted, drawn=0):
        """A request that is caught in states, see :meth:`having`: its number, the prompt tokens
        that were computed before, its tokens, and the engines.

        Requests that pass these states unseen are followed by others.
        """
        for _ in range(TRIES):
            number, before = 2 * self.fresh() + drawn, self.computed()
            tokens = self.stream(number)
            first = next(tokens)
            names = self.having(*wanted)
            if names is not None:
                return number, before, itertools.chain([first], tokens), names
            assert [first, *tokens] == self.expected(number)
        raise AssertionError(f"no request was seen in {wanted}")

    def computed(self):
        """Name → prompt tokens that an engine has computed since it started."""
        metric = "kvferry_engine_prompt_tokens_total"
        names = [one.name for one in self.cluster.engines]
        return {name: self.samples(name, metric).get("computed", 0.0) for name in names}

    def stream(self, number):
        """The tokens of an answer as they come.

        Raises:
            AssertionError: the client is told of an error.
        """
        body = {
            "prompt": prompt(number),
            "max_tokens": MAX_TOKENS,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **sampling(number),
        }
        with self.client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200, response.read()
            yield from tokens_in(response.iter_lines())

    def expected(self, number):
        """The tokens of one engine that lends nothing and loads nothing."""
        drawn = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, **sampling(number))
        (answer,) = self._undivided.generate([prompt(number)], drawn)
        return list(answer.token_ids)

    def check_nothing_is_stranded(self):
        for one in self.cluster.engines:
            until(lambda: not any(self.samples(one.name, LIVE).values()))  # noqa: B023
            assert self.samples(one.name, "kvferry_engine_kv_blocks")["used"] == 0


@pytest.fixture(scope="module")
def killable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE", str(folder / "cache"))
        patch.setenv("PYTHONPATH", f"{PLUGIN}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        patch.syspath_prepend(PLUGIN)
        patch.setattr(launcher, "LONGEST_BACK_OFF_S", 1.0)
        with (
            Cluster.open(CONFIG, logs=folder / "logs", timeout_s=WAIT_S) as cluster,
            contextlib.closing(Killable(cluster)) as opened,
        ):
            yield opened


@pytest.fixture
def served(killable):
    """All engines are there, and hold nothing afterwards."""
    killable.until_ready()
    yield killable
    killable.until_ready()
    killable.check_nothing_is_stranded()


@pytest.mark.parametrize("drawn", [0, 1], ids=["greedy", "seeded"])
def test_a_decode_engine_that_dies_before_its_first_token_costs_no_prompt(served, drawn):
    number, before, tokens, (dead,) = served.catch(("decode", "loading"), drawn=drawn)
    served.kill(dead)
    assert list(tokens) == served.expected(number)
    after = served.computed()
    # The prompt by one engine, once, and by the other decode engine what no other can have.
    computed = [after[name] - before[name] for name in before if name != dead]
    assert sorted(computed) == [0, 1, len(prompt(number))]


@pytest.mark.parametrize("drawn", [0, 1], ids=["greedy", "seeded"])
def test_a_stream_goes_on_when_its_decode_engine_dies(served, drawn):
    number, _, tokens, (dead,) = served.catch(("decode", "running"), drawn=drawn)
    come = [next(tokens) for _ in range(4)]
    served.kill(dead)
    assert [*come, *tokens] == served.expected(number)


def test_a_stream_waits_when_the_prefill_engine_dies_from_which_it_is_read(served):
    wanted = ("decode", "loading"), ("prefill", "lent")
    number, _, tokens, (_, dead) = served.catch(*wanted)
    served.kill(dead)
    assert list(tokens) == served.expected(number)


def test_engines_are_killed_in_a_row_under_load(served):
    moments = itertools.cycle([("decode", "loading"), ("decode", "running"), ("prefill", "lent")])
    numbers = itertools.count()
    with Load(lambda n: list(served.stream(n)), numbers, clients=CLIENTS) as load:
        for _ in range(KILLS):
            wanted = next(moments)
            (dead,) = until(lambda: served.having(wanted))  # noqa: B023
            served.kill(dead)
            load.until_all_are_new()
            served.until_ready()
            if load.errors:
                break
    wrong = load.wrong(served.expected)
    print(f"{KILLS} kills, {len(load.answers)} answers, {load.errors=}, {wrong=}")
    assert (load.errors, wrong) == ([], [])
