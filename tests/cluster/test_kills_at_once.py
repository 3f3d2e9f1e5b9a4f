"""A prefill engine is killed (SIGKILL) while both engines have a request (``at_once``).

It computes slowly, so that there is time: before it grants a lease, and after it has granted one
and before its prompt is computed. No client is told of an error, and no token is another one.
"""

import contextlib
import itertools
import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from kvferry.cluster import launcher
from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig
from kvferry.control.client import fetch_status
from kvferry.errors import KVFerryError
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster import test_kills
from tests.cluster.test_kills import TRIES, Killable

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.processes]

PROMPT, MAX_TOKENS = 700, 20


def engine(role, number):
    """No two of a role have one shape. A prefill engine takes a step for each token, one
    prompt at a time; the decode engines differ in when they begin to load.
    """
    slow = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
    return {
        "name": f"{role}-{number}",
        "tp": 1 + number,
        "block_size": (16, 24)[number],
        "num_blocks": 256,
        "max_model_len": 1024,
        "kv_transfer_config": {
            "kv_connector": "PullConnector",
            "kv_role": "kv_producer" if role == "prefill" else "kv_consumer",
            "kv_port": 0,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {
                "lease_duration_s": 10.0,
                "early_load": ("now", "late")[number],
            },
        },
        **(slow if role == "prefill" else {}),
    }


CONFIG = ClusterConfig.from_mapping(
    {
        "model": {"source": "tiny", "dtype": "float64"},
        "prefill": [engine("prefill", number) for number in range(2)],
        "decode": [engine("decode", number) for number in range(2)],
        "router": {"port": 0, "decode_only": "never", "at_once": "always"},
    }
)


@pytest.fixture(scope="module")
def killable(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kills")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVFERRY_CACHE", str(folder / "cache"))
        patch.setattr(launcher, "LONGEST_BACK_OFF_S", 1.0)
        patch.setattr(test_kills, "MAX_TOKENS", MAX_TOKENS)
        patch.setattr(test_kills, "prompt", prompt)
        with (
            Cluster.open(CONFIG, logs=folder / "logs", timeout_s=WAIT_S) as cluster,
            contextlib.closing(Killable(cluster)) as opened,
        ):
            yield opened


def prompt(number):
    """No two of them begin alike."""
    draw = random.Random(number)
    return [draw.randrange(3, 250) for _ in range(PROMPT)]


served = test_kills.served


def leases_of(served, name):
    """The open leases of a prefill engine; none while it is not there."""
    with contextlib.suppress(httpx.HTTPError, KVFerryError, KeyError):
        told = httpx.get(f"{served.engine(name).url}/health", timeout=60, trust_env=False).json()
        host, port = told["control"].rsplit(":", 1)
        return fetch_status(host, int(port), 60.0).leases
    return ()


def caught(served, clients, numbers, is_so):
    """Sends requests until a prefill engine is seen at which something is so, and kills it."""
    names = [one.name for one in served.cluster.engines if one.role == "prefill"]
    for _ in range(TRIES):
        answers = {
            number: clients.submit(lambda n: list(served.stream(n)), number) for number in numbers()
        }

        def look(answers=answers):
            found = next((name for name in names if is_so(name)), None)
            return found or all(answer.done() for answer in answers.values())

        found = until(look)
        if found is not True:
            served.kill(found)
        for number, answer in answers.items():
            assert answer.result(WAIT_S) == served.expected(number)
        if found is not True:
            return
    raise AssertionError("no prefill engine was seen so")


@pytest.fixture
def clients():
    with ThreadPoolExecutor(4) as clients:
        yield clients


@pytest.mark.timed("Parts of a second in which an answer is in one state must be seen by polling.")
def test_a_prefill_engine_that_dies_before_it_grants_is_done_without(served, clients):
    """One request is computed at each of them, and the others wait for their turn: of those
    nothing is lent yet.
    """

    def waits(name):
        return served.samples(name, test_kills.LIVE).get("waiting")

    caught(served, clients, lambda: [2 * served.fresh() + n % 2 for n in range(4)], waits)


@pytest.mark.timed("Parts of a second in which an answer is in one state must be seen by polling.")
@pytest.mark.parametrize("drawn", [0, 1], ids=["greedy", "seeded"])
def test_a_prefill_engine_that_dies_in_the_middle_of_a_prompt_that_it_lends_is_done_without(
    served, clients, drawn
):
    def lends(name):
        return leases_of(served, name) and served.samples(name, test_kills.LIVE).get("running")

    caught(served, clients, lambda: [2 * served.fresh() + drawn], lends)


@pytest.mark.timed("Parts of a second in which an answer is in one state must be seen by polling.")
def test_prefill_engines_die_one_after_the_other(served, clients):
    names = itertools.cycle(["prefill-0", "prefill-1"])
    for _ in range(2):
        chosen = next(names)
        caught(
            served,
            clients,
            lambda: [2 * served.fresh() for _ in range(3)],
            lambda name, chosen=chosen: name == chosen and leases_of(served, name),
        )
        served.until_ready()
