"""A conversation over a cluster whose engines say what they have."""

from contextlib import ExitStack, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import cast

import httpx
import pytest
import torch

from kvferry.cluster.preflight import cluster_key
from kvferry.config import ClusterConfig, EngineConfig
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import SamplingParams
from kvferry.router.answer import TextCodec
from kvferry.router.hand_over import HandOver
from kvferry.router.pace import Work
from kvferry.router.prefixes import Prompt
from kvferry.router.router import Router
from kvferry.serving.messages import EngineAddress, RouterSettings
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import running_cluster

pytestmark = pytest.mark.processes

ANSWER = 30
"""Tokens of each answer."""


def engine(name, role, **values):
    free = "tcp://127.0.0.1:0"
    return {
        "name": name,
        "num_blocks": 64,
        "max_model_len": 512,
        "kv_transfer_config": {"kv_connector": "PullConnector", "kv_role": role, "kv_port": 0},
        "kv_events": {"endpoint": free, "replay_endpoint": free},
        **values,
    }


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    config = ClusterConfig.from_mapping(
        {
            "model": {"source": "tiny", "dtype": "float64"},
            "prefill": [engine("p0", "kv_both", block_size=16, tp=2)],
            "decode": [engine("d0", "kv_both", block_size=24, layout="HND")],
            "router": {"port": 0, "explain": True},
        }
    )
    with running_cluster(config, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


class Conversation:
    """Turns of token ids, each with what was said before."""

    def __init__(self, client):
        self.client = client
        self.prompts, self.answers, self.routes = [], [], []

    def turn(self, new):
        """Says something new; returns how many tokens of the prompt were cached."""
        prompt = [*(self.prompts[-1] + self.answers[-1] if self.prompts else []), *new]
        body = {
            "prompt": prompt,
            "max_tokens": ANSWER,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        response = self.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        self.prompts.append(prompt)
        self.answers.append(response.json()["choices"][0]["token_ids"])
        self.routes.append(response.headers.get("x-kvferry-route", ""))
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def metric(self, name):
        """Of the router; ``None`` where it has no such series."""
        lines = self.client.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name)]
        return float(found[0].split()[-1]) if found else None

    def until_known(self, **blocks):
        """Waits until the router knows so many blocks of engines."""
        for name, count in blocks.items():
            until(partial(self._knows, name, count))

    def _knows(self, name, count):
        return (self.metric(f'kvferry_router_prefix_blocks{{engine="{name}"') or -1) >= count


@pytest.fixture
def converse():
    with ExitStack() as opened:

        def converse(url):
            client = httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False)
            conversation = Conversation(opened.enter_context(client))
            until(lambda: conversation.metric("kvferry_router_prefix_blocks") is not None)
            return conversation

        yield converse


def answers_of_one_engine(cluster, prompts):
    """Of an engine that shares nothing with anybody."""
    config = EngineConfig(name="one", kv_transfer_config={}, num_blocks=64)
    torch.set_num_threads(1)
    with build_engine(
        config, cluster.model_folder, dtype="float64", executor="inprocess", connect=False
    ) as one:
        outputs = one.generate(prompts, SamplingParams(max_tokens=ANSWER))
    return [output.token_ids for output in outputs]


@pytest.mark.timed("The router's choice depends on a pace that it measures.")
@pytest.mark.slow
def test_next_turn_is_computed_where_the_last_one_was_answered(cluster, converse):
    chat = converse(cluster.url)
    assert chat.turn(range(1, 101)) == 0
    # What D has: the prompt, which it loaded, and its answer without the last token.
    chat.until_known(d0=(100 + ANSWER - 1) // 24, p0=100 // 16)
    assert chat.turn(range(101, 121)) == 120
    chat.turn(range(121, 141))
    start = "cached=0; borrowed=0; lender=-; computed=100; moved=100; "
    assert chat.routes[0].startswith(f"prefill=p0; decode=d0; {start}")
    start = "cached=120; borrowed=0; lender=-; computed=30; moved=0; "
    assert chat.routes[1].startswith(f"prefill=-; decode=d0; {start}")
    assert chat.metric('kvferry_router_prefix_tokens_total{source="decode"}') >= 120
    assert chat.metric("kvferry_router_prefix_missed_tokens_total") == 0
    assert chat.answers == answers_of_one_engine(cluster, chat.prompts)


class Fixed:
    """Work that always takes as long, so that a choice is the same on any machine."""

    under_way = 0

    def __init__(self, each_s):
        self.each_s = each_s

    def cost(self, tokens):
        return 0.0, self.each_s * tokens

    def doing(self, _tokens):
        return nullcontext(lambda _count: None)


def fixed(each_s):
    return cast(Work, Fixed(each_s))


@pytest.fixture(params=["never", "always"])
def saving_router(request, cluster, server_thread, monkeypatch):
    """Another router of the cluster, to which computing is dear and loading is cheap."""
    addresses = tuple(
        EngineAddress(name=one.name, role=one.role, url=one.url) for one in cluster.engines
    )
    settings = RouterSettings(
        engines=addresses,
        model_folder=cluster.model_folder,
        model_name="tiny",
        direct_tokens=0,
        explain=True,
        at_once=request.param,
        cluster_key=cluster_key(cluster.config, cluster._cluster_key),
    )
    router = Router(settings, TextCodec.open(cluster.model_folder))
    for one in router.members:
        one.pace.computing, one.pace.moving = fixed(1000.0), fixed(0.001)
    loans = []
    both = HandOver.both

    def noted(self, asked, prefill, decode, loan):
        loans.append(loan.params is not None)
        return both(self, asked, prefill, decode, loan)

    monkeypatch.setattr(HandOver, "both", noted)
    url = server_thread.start(router.app())
    yield SimpleNamespace(
        url=url, members=router.members, is_at_once=request.param == "always", loans=loans
    )
    server_thread.end_all()


@pytest.mark.slow
def test_prefill_engine_borrows_the_answer_that_only_the_decode_engine_has(
    cluster, saving_router, converse
):
    chat = converse(saving_router.url)
    (prefill,) = [one for one in cluster.engines if one.name == "p0"]

    def loaded():
        """Tokens that the prefill engine has loaded."""
        text = httpx.get(f"{prefill.url}/metrics", timeout=WAIT_S, trust_env=False).text
        series = 'kvferry_engine_prompt_tokens_total{source="peer"} '
        return sum(float(line[len(series) :]) for line in text.splitlines() if series in line)

    before = loaded()
    first = 31 if saving_router.is_at_once else 30
    new = range(first, first + 100)  # another first token: nothing is cached
    assert chat.turn(new) == 0
    prompt = Prompt(chat.prompts[0] + chat.answers[0])
    held = {"p0": 96, "d0": 120}  # six blocks of 16 tokens of the prompt, five of 24 of it all

    def are_known():
        index = saving_router.members.index
        blocks = {one.name: index.blocks(one.told.kv_events) for one in saving_router.members}
        return {name: each.held(prompt) for name, each in blocks.items() if each} == held

    until(are_known)
    cached = chat.turn(range(130, 150))
    # Whoever draws the first token tells of its own cache.
    assert cached in ((96, 120) if saving_router.is_at_once else (96,))
    assert chat.routes[1].startswith(
        "prefill=p0; decode=d0; cached=96; borrowed=24; lender=d0; computed=30; moved=30; "
    )
    assert chat.metric("kvferry_router_borrowed_tokens_total") == 24
    assert chat.metric("kvferry_router_prefix_missed_tokens_total") == 0
    assert loaded() - before == 24
    chat.turn(range(150, 170))
    assert saving_router.loans[:2] == ([False, True] if saving_router.is_at_once else [])
    assert chat.answers == answers_of_one_engine(cluster, chat.prompts)
