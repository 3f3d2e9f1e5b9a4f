"""Prefill and decode engine get a request at the same time (``at_once``)."""

import asyncio
import itertools
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import cast

import httpx
import msgspec
import pytest
import torch

from kvferry.config import ClusterConfig, EngineConfig
from kvferry.control.client import fetch_status
from kvferry.control.tickets import read_transfer
from kvferry.engine.builder import build_engine
from kvferry.engine.messages import SamplingParams
from kvferry.errors import TicketForgedError
from kvferry.observe.spans import RequestSpan
from kvferry.router.choice import Chooser
from kvferry.router.engine_client import EngineClient
from kvferry.router.engines import Engine
from kvferry.router.hand_over import HandOver
from kvferry.router.health import Status, Told
from kvferry.router.members import EnginePool, NoEngineError
from kvferry.router.queue import QueuePlace, RequestQueue
from kvferry.router.replies import EngineDownError, Reply
from kvferry.router.routed_request import Loan
from kvferry.router.token_request import TokenRequest
from kvferry.serving.messages import Role
from kvferry.serving.openai import ApiError, parse_completion
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import leave, running_cluster

KEY = b"k" * 32
CONTROL = "127.0.0.1:14579"

# ---- the router, before engines that are played --------------------------------------------------


def is_probed(engine, count):
    return engine.probes.total() >= count


@pytest.fixture
def at_once(make_setup):
    """Makes a router that may send both at once; engines say whether they know how."""

    def make(prefill=1, decode=1, *, knows=("prefill", "decode"), control=CONTROL, **settings):
        settings = {"at_once": "always", "cluster_key": KEY} | settings
        setup = make_setup(prefill, decode, **settings)
        for engine in setup.engines:
            role = "kv_producer" if engine.role == "prefill" else "kv_consumer"
            engine.tells = {"kv_role": role, "control": control}
            engine.tells["at_once"] = engine.role in knows
        seen = [engine.probes.total() for engine in setup.engines]
        for engine, before in zip(setup.engines, seen, strict=True):
            until(partial(is_probed, engine, before + 2))
        return setup

    return make


@pytest.fixture
def clients():
    with ThreadPoolExecutor(1) as clients:
        yield clients


def text_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def test_both_engines_are_sent_the_prompt_with_one_signed_transfer(at_once, clients):
    setup = at_once()
    (prefill,), (decode,) = setup.prefill, setup.decode
    decode.hang = True  # it would be done before the other one has read the request
    answer = clients.submit(setup.complete, max_tokens=5)
    until(lambda: prefill.bodies and decode.bodies)
    decode.release.set()
    assert text_of(answer.result(WAIT_S)) == "Hello"
    (asked,), (drawn,) = prefill.bodies, decode.bodies
    assert asked["prompt"] == drawn["prompt"] == list(b"Hi")
    assert (asked["max_tokens"], drawn["max_tokens"]) == (1, 5)
    lent, loaded = asked["kv_transfer_params"], drawn["kv_transfer_params"]
    assert lent["do_remote_decode"]
    assert "keep_first_token" not in lent
    assert loaded == {"do_remote_prefill": True, "transfer": lent["transfer"]}
    assert read_transfer(loaded["transfer"], KEY).address == CONTROL
    with pytest.raises(TicketForgedError):
        read_transfer(loaded["transfer"], b"x" * 32)
    assert not prefill.taken_back


@pytest.mark.parametrize("knows", [("prefill",), ("decode",), ()])
def test_engines_that_do_not_know_how_get_it_in_turn(at_once, knows):
    setup = at_once(knows=knows)
    assert text_of(setup.complete(max_tokens=5)) == "Hello"
    (drawn,) = setup.decode[0].bodies
    assert "ticket" in drawn["kv_transfer_params"]


def test_an_engine_whose_channel_no_transfer_can_name_gets_it_in_turn(at_once):
    setup = at_once(control=f"{'h' * 230}:1")
    assert text_of(setup.complete(max_tokens=5)) == "Hello"
    assert "ticket" in setup.decode[0].bodies[0]["kv_transfer_params"]


def test_without_the_setting_they_get_it_in_turn(at_once):
    setup = at_once(at_once="never")
    assert text_of(setup.complete(max_tokens=5)) == "Hello"
    assert "ticket" in setup.decode[0].bodies[0]["kv_transfer_params"]


def test_the_first_token_does_not_wait_for_the_decode_engine(at_once):
    setup = at_once()
    setup.decode[0].hang = True
    body = {"prompt": "Hi", "temperature": 0, "max_tokens": 5, "stream": True}
    with setup.client.stream("POST", "/v1/completions", json=body) as response:
        lines = (line for line in response.iter_lines() if line.startswith("data: {"))
        assert '"text":"H"' in next(lines).replace(" ", "")
        setup.decode[0].release.set()
        texts = [json.loads(line[6:])["choices"][0]["text"] for line in itertools.islice(lines, 4)]
    assert "".join(texts) == "ello"


def test_an_answer_does_not_wait_for_a_prefill_engine_that_is_not_needed(at_once, clients):
    setup = at_once()
    setup.prefill[0].hang = setup.decode[0].hang = True
    answer = clients.submit(setup.complete, max_tokens=5)
    until(lambda: setup.prefill[0].bodies)
    setup.decode[0].release.set()  # it has the prompt, say
    assert text_of(answer.result(WAIT_S)) == "Hello"
    assert setup.prefill[0].aborted.wait(WAIT_S)


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("stop", [None, "l"])
def test_what_was_cached_is_the_prefill_engines_to_say(at_once, clients, first, stop):
    """The decode engine has loaded the prompt, and takes all of it for cached."""
    setup = at_once()
    (prefill,), (decode,) = setup.prefill, setup.decode
    prefill.cached_tokens, decode.cached_tokens, decode.tells_in_streams = 16, 39, True
    ours, other = (prefill, decode) if first == "prefill" else (decode, prefill)
    other.hang = True
    options = {"stream": True, "stream_options": {"include_usage": True}, "stop": stop}
    answer = clients.submit(setup.complete, max_tokens=5, **options)
    until(lambda: ours.bodies and other.bodies)
    time.sleep(0.1)  # time to say all that it has to say
    other.release.set()
    events = [line[6:] for line in answer.result(WAIT_S).text.splitlines() if "usage" in line]
    usage = json.loads(events[-1])["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 16}
    whole = setup.complete(max_tokens=5, stop=stop).json()["usage"]
    assert whole["prompt_tokens_details"] == {"cached_tokens": 16}


def test_where_the_prefill_engine_fails_the_decode_engine_says_what_was_cached(at_once):
    setup = at_once()
    (prefill,), (decode,) = setup.prefill, setup.decode
    prefill.hang, prefill.refuse = True, (500, "as told")
    decode.cached_tokens, decode.tells_in_streams = 1, True
    options = {"stream": True, "stream_options": {"include_usage": True}}
    body = {"prompt": "Hi", "temperature": 0, "max_tokens": 5, **options}
    with setup.client.stream("POST", "/v1/completions", json=body) as response:
        lines = (line[6:] for line in response.iter_lines() if line.startswith("data: {"))
        next(lines)  # so the decode engine computes the prompt
        prefill.release.set()
        *_, usage = lines
    assert json.loads(usage)["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}


def test_an_answer_of_one_token_ends_the_decode_engines_work_and_gives_back(at_once, clients):
    setup = at_once()
    setup.says("", eos=True)
    setup.decode[0].hang = setup.prefill[0].hang = True
    answer = clients.submit(setup.complete, max_tokens=5)
    until(lambda: setup.decode[0].bodies)
    setup.prefill[0].release.set()
    assert text_of(answer.result(WAIT_S)) == ""
    assert setup.decode[0].aborted.wait(WAIT_S)
    until(lambda: setup.prefill[0].taken_back)
    (back,) = setup.prefill[0].taken_back
    assert back["transfer"] == setup.decode[0].bodies[0]["kv_transfer_params"]["transfer"]


def test_an_answer_of_one_token_may_come_from_the_decode_engine_first(at_once, clients):
    setup = at_once()
    setup.says("", eos=True)
    setup.decode[0].hang = setup.prefill[0].hang = True
    answer = clients.submit(setup.complete, max_tokens=5)
    until(lambda: setup.prefill[0].bodies)
    setup.decode[0].release.set()
    assert text_of(answer.result(WAIT_S)) == ""
    assert setup.prefill[0].aborted.wait(WAIT_S)


def test_where_the_decode_engine_draws_another_first_token_all_goes_on_from_the_one_told(at_once):
    setup = at_once()
    (decode,) = setup.decode
    decode.hang = True
    body = {"prompt": "Hi", "temperature": 0, "max_tokens": 5, "stream": True}
    with setup.client.stream("POST", "/v1/completions", json=body) as response:
        lines = (line[6:] for line in response.iter_lines() if line.startswith("data: {"))
        texts = [json.loads(next(lines))["choices"][0]["text"]]
        draw = decode.draw

        def then(_body):
            decode.draw = draw
            return list(b"Jello"), "length"

        decode.draw = then
        decode.release.set()
        texts += [json.loads(line)["choices"][0]["text"] for line in itertools.islice(lines, 4)]
    assert "".join(texts) == "Hello"
    assert [body["prompt"] for body in decode.bodies] == [list(b"Hi"), list(b"HiHe")]
    assert "ticket" in decode.bodies[1]["kv_transfer_params"]  # in turn


def test_where_each_would_draw_what_it_likes_both_are_given_a_seed(at_once, clients):
    setup = at_once()
    (prefill,), (decode,) = setup.prefill, setup.decode
    for _ in range(2):
        decode.release.clear()
        decode.hang = True
        answer = clients.submit(setup.complete, max_tokens=5, temperature=1.0, n=2)
        until(lambda: len(prefill.bodies) == len(decode.bodies) > 1)
        decode.release.set()
        assert answer.result(WAIT_S).status_code == 200
    seeds = [sorted(body["seed"] for body in engine.bodies) for engine in (prefill, decode)]
    assert seeds[0] == seeds[1]
    assert len(set(seeds[0])) == 4, "no two samples share one"


def name_channels(setup, *engines):
    """An operator names the control channels of foreign engines, which tell nothing themselves."""
    for engine in engines:
        path, body = f"/kvferry/engines/{engine.role}/{engine.name}", {"url": engine.url}
        answer = setup.client.put(path, json={**body, "control": CONTROL})
        assert answer.status_code == 200, answer.text
    seen = [engine.probes.total() for engine in engines]
    for engine, before in zip(engines, seen, strict=True):
        until(partial(is_probed, engine, before + 2))


def test_of_foreign_engines_the_decode_engine_draws_all(make_setup, clients):
    setup = make_setup(at_once="always", cluster_key=KEY)
    (prefill,), (decode,) = setup.prefill, setup.decode
    name_channels(setup, prefill, decode)
    decode.hang = True
    decode.draw = lambda _body: (list(b"Jello"), "length")
    answer = clients.submit(setup.complete, max_tokens=5)
    until(lambda: prefill.bodies and decode.bodies)
    decode.release.set()
    assert text_of(answer.result(WAIT_S)) == "Jello", "vLLM may have left out the last token"
    (asked,), (drawn,) = prefill.bodies, decode.bodies
    assert asked["kv_transfer_params"]["transfer"] == drawn["kv_transfer_params"]["transfer"]


@pytest.mark.parametrize("named", ["prefill", "decode"])
def test_foreign_engines_of_which_one_has_no_known_channel_get_it_in_turn(make_setup, named):
    setup = make_setup(at_once="always", cluster_key=KEY)
    name_channels(setup, *getattr(setup, named))
    assert text_of(setup.complete(max_tokens=5)) == "Hello"
    assert "transfer" not in setup.decode[0].bodies[0]["kv_transfer_params"]


def test_a_prefill_engine_that_dies_is_replaced(at_once, clients):
    setup = at_once(prefill=2)
    for engine in setup.engines:
        engine.hang = True
    answer = clients.submit(setup.complete, max_tokens=5)
    until(lambda: any(engine.bodies for engine in setup.prefill))
    first = next(engine for engine in setup.prefill if engine.bodies)
    first.refuse, first.dies = (503, "it is about to end"), True
    for engine in setup.engines:
        engine.release.set()
    assert text_of(answer.result(WAIT_S)) == "Hello"


def test_a_decode_engine_that_dies_is_replaced_by_one_that_asks_too(at_once, clients):
    setup = at_once(decode=2)
    for engine in setup.decode:
        engine.hang = True
    answer = clients.submit(setup.complete, max_tokens=5)
    until(lambda: any(engine.bodies for engine in setup.decode))
    first = next(engine for engine in setup.decode if engine.bodies)
    (second,) = [engine for engine in setup.decode if engine is not first]
    second.release.set()
    first.refuse, first.dies = (503, "it is about to end"), True
    first.release.set()
    assert text_of(answer.result(WAIT_S)) == "Hello"
    transfers = {one.bodies[0]["kv_transfer_params"]["transfer"] for one in setup.decode}
    assert len(transfers) == 1


def test_a_client_that_goes_away_ends_both(at_once):
    setup = at_once()
    for engine in setup.engines:
        engine.hang = True
    leave(
        setup.client,
        lambda: all(engine.bodies for engine in setup.engines),
        prompt="Hi",
        max_tokens=5,
        temperature=0,
    )
    assert all(engine.aborted.wait(WAIT_S) for engine in setup.engines)
    until(lambda: setup.prefill[0].taken_back)


# ---- what one engine has drawn beside the other's error ------------------------------------------


class PlayedEngine(Engine):
    """Says one thing once its gate opens, without another wait."""

    def __init__(self, name, says):
        super().__init__(name, f"http://{name}", "decode", EngineClient({}))
        self.health.told = Told(control=CONTROL, at_once=True, is_ours=True, max_model_len=512)
        self.health.status = Status(healthy=True)
        self.says, self.gate, self.is_asked = says, asyncio.Event(), False
        self.taken_back = []

    async def complete(self, body, *_):
        self.is_asked = True
        await self.gate.wait()
        if isinstance(self.says, Exception):
            raise self.says
        return self.says

    async def stream(self, body, *_):
        yield await self.complete(body)
        await asyncio.Event().wait()

    def take_back(self, kv_transfer_params, request_id, otherwise=None):
        self.taken_back.append(kv_transfer_params)


def one_token(finish_reason, token=7):
    choice = {"token_ids": [token], "finish_reason": finish_reason}
    return msgspec.convert({"choices": [choice]}, Reply)


BY_REQUESTS = cast(
    Chooser, SimpleNamespace(choose=lambda *_, **__: None, computed=lambda *_, **__: None)
)
"""A chooser that knows nothing of what engines have."""


def pools_of(*engines):
    roles: tuple[Role, Role] = ("prefill", "decode")
    return [
        EnginePool(role, 60.0, engines=[engine])
        for role, engine in zip(roles, engines, strict=True)
    ]


def request_of(prompt, chooser=BY_REQUESTS):
    generation = parse_completion({"prompt": prompt, "max_tokens": 5, "temperature": 0})
    return TokenRequest(
        request_id="r",
        died=set(),
        span=RequestSpan(None, "request", ""),
        prompt=tuple(prompt),
        sampling=generation.sampling,
        generation=generation,
        chooser=chooser,
    )


@pytest.mark.parametrize(
    ("tokens", "computing_s", "moving_s", "is_right"),
    [
        (512, 0.011, 0.011, True),
        (511, 0.1, 0.1, False),  # it is computed in one step
        (600, 0.1, 0.009, False),  # it moves fast
        (600, 0.009, 0.1, False),  # hardly any of it moves meanwhile
    ],
)
def test_auto_has_both_work_where_much_moves_while_it_is_computed(
    tokens, computing_s, moving_s, is_right
):
    engines = [PlayedEngine(name, None) for name in ("prefill", "decode")]
    for work, seconds in (
        (engines[0].pace.computing, computing_s),
        (engines[1].pace.moving, moving_s),
    ):
        for count in (100, tokens):  # what the shortest prompt takes does not count
            work.line.note(count, 1.0 + count * seconds / tokens)
    ways = HandOver(*pools_of(*engines), at_once="auto")
    pair = ways.pair(request_of([1] * tokens))
    assert (asyncio.run(pair) is not None) == is_right


FAILURES = {
    "prefill": EngineDownError("prefill", "it went away", reached=True),
    "decode": ApiError(500, "it has failed"),
}


@pytest.mark.parametrize("leaves", [False, True])
def test_a_loan_is_given_back_where_the_engines_that_were_chosen_cannot_be_had(leaves, monkeypatch):
    """The decode engine is slow, and looked at again; it has gone, or the client goes meanwhile."""

    async def play():
        loan = {"do_remote_prefill": True, "remote_num_tokens": 64, "ticket": "loan"}
        lender = PlayedEngine("lender", Reply(kv_transfer_params=loan))
        lender.gate.set()
        prefill, decode = (PlayedEngine(name, None) for name in ("prefill", "decode"))
        decode.health.status = Status(is_slow=True)

        async def probe():
            if leaves:
                await asyncio.Event().wait()
            decode.health.down("it has gone", reached=True)

        monkeypatch.setattr(decode.health, "probe", probe)
        begin = SimpleNamespace(lender=lender, cached=0, borrowed=64)
        route = SimpleNamespace(begin=begin, prefill=prefill, decode=decode, held=0)
        chooser = SimpleNamespace(choose=lambda *_, **__: route, borrowed=lambda *_: None)
        pools = pools_of(prefill, decode)
        ways = HandOver(*pools, at_once="always")
        answer = asyncio.create_task(anext(ways.run(request_of([1] * 100, cast(Chooser, chooser)))))
        if leaves:
            await asyncio.sleep(0.05)
            answer.cancel()
        with pytest.raises(asyncio.CancelledError if leaves else NoEngineError):
            await answer
        assert lender.taken_back == [loan]
        await decode.aclose()

    asyncio.run(play())


def test_an_engine_that_comes_back_in_place_of_the_chosen_one_need_not_know_how(monkeypatch):
    async def play():
        slow, foreign, decode = (PlayedEngine(name, None) for name in ("a", "b", "d"))
        slow.health.status = Status(is_slow=True)
        foreign.health.told = Told(control=CONTROL)
        foreign.health.status = Status(last_error="it was down")

        async def probe():
            foreign.health.up()

        monkeypatch.setattr(foreign.health, "probe", probe)
        monkeypatch.setattr(slow.health, "probe", asyncio.Event().wait)
        prefills, decodes = pools_of(slow, decode)
        prefills.engines.append(foreign)
        ways = HandOver(prefills, decodes, at_once="always")
        assert await ways.pair(request_of([1] * 100)) is None
        assert foreign.status.healthy
        await slow.aclose()

    asyncio.run(play())


def test_a_client_that_goes_away_while_engines_are_told_to_end_leaves_nothing_lent(monkeypatch):
    async def play():
        says = {"prefill": None, "decode": ApiError(400, "it refuses")}
        prefill, decode = (PlayedEngine(name, said) for name, said in says.items())
        decode.gate.set()
        ending = asyncio.Event()

        async def complete(*_):
            try:
                await asyncio.Event().wait()
            finally:
                ending.set()
                await asyncio.sleep(0.01)

        monkeypatch.setattr(prefill, "complete", complete)
        pools = pools_of(prefill, decode)
        ways = HandOver(*pools, at_once="always")
        answer = asyncio.create_task(anext(ways.both(request_of([1, 2]), prefill, decode, Loan())))
        await asyncio.wait_for(ending.wait(), WAIT_S)
        answer.cancel()
        with pytest.raises(asyncio.CancelledError):
            await answer
        (lent,) = prefill.taken_back
        assert "transfer" in lent

    asyncio.run(play())


@pytest.mark.parametrize("fails", FAILURES)
def test_a_token_that_is_drawn_beside_an_error_counts_if_the_client_gets_it(fails):
    """Whoever goes on takes what stands in ``drawn`` for told. A decode engine that has begun needs
    no prefill engine."""

    async def play():
        says = {"prefill": one_token("length"), "decode": one_token(None)}
        says[fails] = FAILURES[fails]
        prefill, decode = both = [PlayedEngine(name, said) for name, said in says.items()]
        request = request_of([1, 2])
        ways = HandOver(*pools_of(*both), at_once="always")
        replies = ways.both(request, prefill, decode, Loan())
        client = asyncio.create_task(anext(replies))
        while not (client.done() or all(engine.is_asked for engine in both)):
            await asyncio.sleep(0)
        for engine in sorted(both, key=lambda engine: engine.name != fails):
            engine.gate.set()  # it speaks before anybody has heard the other
        if fails == "decode":
            with pytest.raises(ApiError):
                await client
            assert not request.drawn
            assert prefill.taken_back
        else:
            assert (await client).token_ids == request.drawn == [7]
            await replies.aclose()
            assert not prefill.taken_back

    asyncio.run(play())


class CountingEngine(PlayedEngine):
    """Draws the numbers that follow the last token of the prompt."""

    async def complete(self, body, *_):
        return one_token("length", body["prompt"][-1] + 1)

    async def stream(self, body, *_):
        await self.gate.wait()
        for number in range(body["max_tokens"]):
            yield one_token(None, body["prompt"][-1] + 1 + number)


@pytest.mark.parametrize("at_once", ["never", "always"])
def test_each_token_reaches_the_client_once(at_once):
    """At once, the decode engine draws the prefill engine's token again."""

    async def play():
        _, decode = both = [CountingEngine(name, None) for name in ("prefill", "decode")]
        replies = HandOver(*pools_of(*both), at_once=at_once).run(request_of([1, 2]))
        told = (await anext(replies)).token_ids
        decode.gate.set()
        return told + [token async for reply in replies for token in reply.token_ids]

    assert asyncio.run(play()) == [3, 4, 5, 6, 7]


@pytest.mark.parametrize("at_once", ["never", "always"])
def test_the_queue_counts_a_request_until_its_engines_do(at_once):
    async def play():
        _, decode = both = [CountingEngine(name, None) for name in ("prefill", "decode")]
        queue = RequestQueue({"prefill": lambda: 1, "decode": lambda: 1}, 10)
        request = request_of([1, 2])
        request.place = QueuePlace(0)
        replies = HandOver(*pools_of(*both), at_once=at_once, queue=queue).run(request)
        await anext(replies)
        is_sent = {"decode"} if at_once == "never" else set()
        assert request.place.needs == is_sent
        decode.gate.set()
        await anext(replies)
        assert request.place.needs == set()
        await replies.aclose()

    asyncio.run(play())


# ---- reference engines of unequal shapes ---------------------------------------------------------

ANSWER = 12
PROMPTS = [
    [random.Random(number).randrange(3, 250) for _ in range(20 + 37 * number)]
    for number in range(8)
]


def engine(name, role, early_load="off", **values):
    return {
        "name": name,
        "num_blocks": 96,
        "max_model_len": 512,
        "max_num_batched_tokens": 64,
        "kv_transfer_config": {
            "kv_connector": "PullConnector",
            "kv_role": role,
            "kv_port": 0,
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"early_load": early_load},
        },
        **values,
    }


@pytest.fixture(scope="module", params=["off", "late", "now"])
def cluster(tmp_path_factory, request):
    config = ClusterConfig.from_mapping(
        {
            "model": {"source": "tiny", "dtype": "float64"},
            "prefill": [engine("p0", "kv_producer", block_size=16, tp=2)],
            "decode": [engine("d0", "kv_consumer", request.param, block_size=24, layout="HND")],
            "router": {"port": 0, "at_once": "always"},
        }
    )
    with running_cluster(config, tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


def answer_of(cluster, prompt):
    body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    response = httpx.post(
        f"{cluster.url}/v1/completions", json=body, timeout=WAIT_S, trust_env=False
    )
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


def status_of(cluster, name):
    (one,) = [one for one in cluster.engines if one.name == name]
    told = httpx.get(f"{one.url}/health", timeout=WAIT_S, trust_env=False).json()
    host, port = told["control"].rsplit(":", 1)
    return fetch_status(host, int(port), WAIT_S)


def answers_of_one_engine(cluster):
    config = EngineConfig(name="one", kv_transfer_config={}, num_blocks=96)
    torch.set_num_threads(1)
    with build_engine(
        config, cluster.model_folder, dtype="float64", executor="inprocess", connect=False
    ) as one:
        return [
            output.token_ids
            for output in one.generate(PROMPTS, SamplingParams(max_tokens=ANSWER, ignore_eos=True))
        ]


@pytest.mark.processes
@pytest.mark.slow
def test_answers_are_those_of_the_undivided_engine_and_nothing_stays_lent(cluster):
    with ThreadPoolExecutor(4) as clients:
        answers = list(clients.map(lambda prompt: answer_of(cluster, prompt), PROMPTS))
    assert answers == answers_of_one_engine(cluster)
    status = status_of(cluster, "p0")
    assert status.counters["requests.Ask"] >= len(PROMPTS)
    assert status.counters["leases.done"] == len(PROMPTS)
    assert "errors.authority" not in status.counters
    assert "errors.load" not in status_of(cluster, "d0").counters


@pytest.mark.processes
@pytest.mark.slow
def test_clients_that_go_away_leave_nothing_lent(cluster):
    asked = status_of(cluster, "p0").counters.get("requests.Ask", 0)
    draw = random.Random(99)
    with httpx.Client(base_url=cluster.url, timeout=WAIT_S, trust_env=False) as client:
        for _ in range(5):
            prompt = [draw.randrange(3, 250) for _ in range(400)]

            def is_asked(before=asked):
                return status_of(cluster, "p0").counters.get("requests.Ask", 0) > before

            leave(client, is_asked, prompt=prompt, max_tokens=ANSWER, temperature=0)
            asked = status_of(cluster, "p0").counters["requests.Ask"]
    until(lambda: not status_of(cluster, "p0").leases)
    until(lambda: not status_of(cluster, "d0").transfers)
    assert answer_of(cluster, PROMPTS[0])
