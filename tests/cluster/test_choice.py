"""Engines are chosen by what they have, where they tell it, and by what the rest costs."""

import asyncio
import logging
from concurrent.futures import ThreadPoolExecutor
from typing import cast

import msgspec
import pytest

from kvferry.cache.events import BlockRemoved, BlockStored
from kvferry.config import KVEventsConfig
from kvferry.control.cache_events import CacheEventPublisher
from kvferry.errors import ConfigError
from kvferry.router import pace
from kvferry.router.choice import Chooser
from kvferry.router.engine_client import EngineClient
from kvferry.router.engines import Engine
from kvferry.router.health import Told
from kvferry.router.lists import engines_in
from kvferry.router.members import EnginePool, Members
from kvferry.router.metrics import RouterMetrics
from kvferry.router.pace import HALF_LIFE_S, FittedLine, Pace
from kvferry.router.prefixes import Prompt, SentPrompts
from kvferry.router.replies import Reply
from kvferry.serving.messages import KVEventsPlace
from kvferry.testing.waiting import WAIT_S, until

PROMPT = "a prompt of forty-two characters, to route"
TOKENS = list(PROMPT.encode())


# ---- what is measured ---------------------------------------------------------------------------


def test_line_begins_with_its_guess_and_follows_what_it_sees():
    line = FittedLine(1.0, 0.5)
    assert (line.seconds(4), line.is_known(0.0)) == (3.0, False)
    for count in (10, 20, 40):
        line.note(count, 0.1 + 0.01 * count, now=0.0)
    assert line.is_known(0.0)
    assert line.seconds(100) == pytest.approx(1.1)


def test_line_forgets_after_a_while_and_is_no_longer_known():
    line = FittedLine(1.0, 0.5)
    line.note(10, 5.0, now=0.0)
    for _ in range(3):
        line.note(10, 1.0, now=10 * HALF_LIFE_S)
        line.note(20, 2.0, now=10 * HALF_LIFE_S)
    assert line.seconds(10) == pytest.approx(1.0, abs=0.01)
    assert line.is_known(11 * HALF_LIFE_S)
    assert not line.is_known(20 * HALF_LIFE_S)


def test_counts_that_are_all_alike_leave_the_guess_of_each():
    line = FittedLine(1.0, 0.01)
    for _ in range(3):
        line.note(100, 1.5, now=0.0)
    base, each = line.both
    assert base == pytest.approx(0.5)
    assert each == 0.01


@pytest.mark.parametrize("samples", [[(10, 3.0), (20, 1.0)], [(0, 0.0), (10, 9.0), (11, 30.0)]])
def test_no_line_is_negative(samples):
    line = FittedLine(1.0, 0.01)
    for count, seconds in samples:
        line.note(count, seconds, now=0.0)
    assert min(line.both) >= 0


def test_what_is_under_way_is_waited_for():
    work = Pace().computing
    _, alone = work.cost(100)
    with work.doing(50) as done:
        queue, own = work.cost(100)
        assert own == alone
        assert queue > 0
        done(50)
        assert work.count.total == 0
    with pytest.raises(RuntimeError), work.doing(50):
        raise RuntimeError
    assert work.count.total == 0


def test_engine_that_was_not_measured_is_taken_to_be_like_the_others(monkeypatch):
    monkeypatch.setattr(pace, "HALF_LIFE_S", 1e9)
    shared = Pace()
    first, second = Pace(shared), Pace(shared)
    guess = second.computing.cost(1000)
    for count in (100, 200):
        first.computing.shared.note(count, 7.0)
        first.computing.own.note(count, 7.0)
    assert first.computing.cost(1000) == pytest.approx(second.computing.cost(1000))
    assert second.computing.cost(1000) != guess
    second.computing.own.note(1, 100.0)
    assert second.computing.cost(1000)[1] > first.computing.cost(1000)[1]


def test_requests_under_way_always_count_for_something(monkeypatch):
    monkeypatch.setattr(pace, "HALF_LIFE_S", 1e9)
    seen = Pace()
    for outstanding in (1, 2, 3):
        seen.drew(outstanding, 2.0)
    assert seen.slowing(0) == 0
    assert 0 < seen.slowing(1) < seen.slowing(2)


# ---- what is chosen -----------------------------------------------------------------------------


class FakeMembers:
    """Two pools of healthy engines, and an index by hand, whose places are names."""

    def __init__(self, prefills, decodes, has, kv_role=None):
        self.prefill = EnginePool("prefill", 1.0)
        self.decode = EnginePool("decode", 1.0)
        for pool, count in ((self.prefill, prefills), (self.decode, decodes)):
            for number in range(count):
                name = f"{pool.role[0]}{number}"
                engine = Engine(name, f"http://{name}", pool.role, EngineClient({}))
                engine.health.up()
                place = cast(KVEventsPlace, name)
                engine.health.told = Told(kv_events=place, kv_role=kv_role)
                pool.engines.append(engine)
        self.has = has
        self.index = self

    is_empty = False

    def blocks(self, name):
        return Holding(self.has.get(name, 0))

    def __getitem__(self, name):
        return next(e for e in (*self.prefill.engines, *self.decode.engines) if e.name == name)


class Holding:
    def __init__(self, count):
        self.count = count

    def held(self, _prompt):
        return self.count


def chooser_of(members, direct_tokens):
    """A chooser to which the fake stands for the router's own members."""
    return Chooser(cast(Members, members), RouterMetrics(()), direct_tokens)


def choose(has, *, prefills=2, decodes=2, tokens=1000, direct_tokens=512, change=lambda _: None):
    members = FakeMembers(prefills, decodes, has)
    change(members)
    chooser = chooser_of(members, direct_tokens)
    route = chooser.choose("r", range(tokens), set())
    return route and (route.prefill and route.prefill.name, route.decode.name)


def test_nobody_has_anything_so_it_goes_in_turn():
    assert choose({}) == ("p0", "d0")


def test_longest_beginning_is_used_on_either_side():
    assert choose({"p1": 800, "d1": 400}) == ("p1", "d1")


def test_short_rest_goes_to_the_decode_engine_that_has_the_beginning():
    assert choose({"p0": 600, "d1": 900}) == (None, "d1")


@pytest.mark.parametrize("direct_tokens", [0, 99])
def test_rest_that_is_not_short_is_computed_by_a_prefill_engine(direct_tokens):
    assert choose({"d1": 900}, direct_tokens=direct_tokens) == ("p0", "d1")


def test_prefill_engine_that_has_more_computes_where_that_is_cheaper():
    assert choose({"p1": 999, "d0": 500}) == ("p1", "d0")


def test_engine_without_a_beginning_computes_nothing_directly():
    assert choose({}, tokens=10) == ("p0", "d0")


def test_busy_engine_is_left_once_its_queue_costs_more_than_the_prompt():
    def make_busy(members):
        members["p1"].pace.computing.count.add(10_000)

    assert choose({"p1": 900}, change=make_busy) == ("p0", "d0")


def test_session_leaves_a_decode_engine_that_answers_many():
    def make_busy(members):
        members["d1"].pace.requests.add(100)

    assert choose({"d1": 600, "p0": 600}, change=make_busy) == ("p0", "d0")


def test_engines_that_are_not_fit_are_not_chosen():
    def leave(members):
        members["p1"].health.is_leaving = True
        members["d1"].health.down("gone", reached=True)

    assert choose({"p1": 800, "d1": 999}, change=leave) == ("p0", "d0")


def test_nothing_is_chosen_without_engines_of_both_roles():
    assert choose({"d1": 999}, prefills=0) is None
    assert choose({"p1": 999}, decodes=0) is None


def test_last_token_is_computed_even_if_it_is_cached():
    members = FakeMembers(1, 1, {"d0": 1000})
    route = chooser_of(members, 512).choose("r", range(1000), set())
    assert (route.prefill, route.begin.cached, route.begin.computed, route.moved) == (
        None,
        999,
        1,
        0,
    )


def route_of(has, tokens=1000, direct_tokens=512, change=lambda _: None):
    members = FakeMembers(2, 2, has, "kv_both")
    change(members)
    chooser = chooser_of(members, direct_tokens)
    return chooser.choose("r", range(tokens), set())


def test_what_only_another_engine_has_is_borrowed_where_that_costs_less():
    route = route_of({"d1": 900}, direct_tokens=0)
    begin = route.begin
    assert (begin.engine.name, begin.lender.name) == ("p0", "d1")
    assert (begin.cached, begin.borrowed, begin.computed) == (0, 900, 100)
    assert (route.decode.name, route.moved) == ("d1", 100)
    assert "900 borrowed of d1, 100 computed" in str(route)
    assert "borrowed=900; lender=d1; computed=100" in route.header


def test_nothing_is_borrowed_where_computing_costs_less():
    assert route_of({"d1": 20}, direct_tokens=0).begin.lender is None


def test_only_what_the_borrower_has_not_is_moved():
    begin = route_of({"p0": 300, "d1": 900}, direct_tokens=0).begin
    assert (begin.engine.name, begin.cached, begin.borrowed) == ("p0", 300, 600)


def test_busy_prefill_engine_lends_what_it_has_to_a_decode_engine():
    def make_busy(members):
        for name in ("p0", "p1"):
            members[name].pace.computing.count.add(10_000)

    route = route_of({"p1": 900}, change=make_busy)
    assert (route.prefill, route.begin.lender.name, route.begin.computed) == (None, "p1", 100)


@pytest.mark.parametrize(
    ("name", "role"), [("d1", "kv_consumer"), ("d1", None), ("p0", "kv_producer"), ("p0", None)]
)
def test_only_engines_that_may_lend_and_load_do_so(name, role):
    def change(members):
        members["p1"].health.is_leaving = True
        health = members[name].health
        health.told = msgspec.structs.replace(health.told, kv_role=role)

    assert route_of({"d1": 900}, direct_tokens=0, change=change).begin.lender is None


def test_engine_borrows_nothing_of_itself():
    def are_one(members):
        for engine in (*members.prefill.engines, *members.decode.engines):
            engine.url = "http://one"

    assert route_of({"d1": 900}, direct_tokens=0, change=are_one).begin.lender is None


# ---- behind HTTP --------------------------------------------------------------------------------


@pytest.fixture
def publish():
    """Has a fake engine publish that it has so many tokens of the prompt."""
    opened = []

    def publish(setup, fake, count, size=2):
        free = "tcp://127.0.0.1:0"
        publisher = CacheEventPublisher(KVEventsConfig(endpoint=free, replay_endpoint=free))
        opened.append(publisher)
        event = BlockStored(
            block_hashes=list(range(count // size)),
            parent_block_hash=None,
            token_ids=TOKENS[:count],
            block_size=size,
            lora_id=None,
            medium="GPU",
            lora_name=None,
        )
        publisher.publish([event])
        place = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
        role = {"prefill": "kv_producer", "decode": "kv_consumer"}[fake.role]
        tells = {"kv_role": fake.tells.get("kv_role", role), "drain": None, "kv_events": place}
        fake.tells = tells
        known = f'prefix_blocks{{engine="{fake.name}",role="{fake.role}"}} {count / size}'

        def is_heard():
            publisher.publish([BlockRemoved(block_hashes=[-1], medium="GPU")])
            return known in setup.client.get("/metrics").text

        until(is_heard)
        return publisher

    yield publish
    for publisher in opened:
        publisher.close()


def ask(setup, **body):
    setup.says("Hello", prompt=PROMPT)
    response = setup.complete(prompt=PROMPT, max_tokens=5, **body)
    assert response.json()["choices"][0]["text"] == "Hello"
    return response


def test_prompt_goes_to_the_prefill_engine_that_has_its_beginning(make_setup, publish):
    setup = make_setup(2, 1, explain=True)
    publish(setup, setup.prefill[1], 40)
    for _ in range(3):
        response = ask(setup)
    assert [len(fake.bodies) for fake in setup.engines] == [0, 3, 3]
    assert response.headers["x-kvferry-route"].startswith(
        "prefill=p1; decode=d0; cached=40; borrowed=0; lender=-; computed=2; moved=42; seconds="
    )
    text = setup.client.get("/metrics").text
    assert 'kvferry_router_prefix_tokens_total{source="prefill"} 120.0' in text
    assert 'kvferry_router_prefix_tokens_total{source="computed"} 6.0' in text
    # The fake engine says that it had 3.
    assert "kvferry_router_prefix_missed_tokens_total 111.0" in text


@pytest.mark.parametrize("stream", [False, True])
def test_decode_engine_that_has_the_beginning_computes_the_rest(make_setup, publish, stream):
    setup = make_setup(1, 2)
    publish(setup, setup.decode[1], 40)
    setup.says("Hello", prompt=PROMPT)
    if stream:
        events = setup.stream(prompt=PROMPT, max_tokens=5)
        assert "".join(e["choices"][0]["text"] for e in events if e != "[DONE]") == "Hello"
    else:
        assert "x-kvferry-route" not in ask(setup).headers  # nobody asked why
    assert [len(fake.bodies) for fake in setup.engines] == [0, 0, 1]
    (body,) = setup.decode[1].bodies
    assert (body["prompt"], body["max_tokens"]) == (TOKENS, 5)
    assert "kv_transfer_params" not in body


def test_what_was_chosen_and_what_not_is_logged(make_setup, publish, caplog):
    setup = make_setup(1, 1, explain=True)
    publish(setup, setup.decode[0], 40)
    with caplog.at_level(logging.INFO, logger="kvferry.router.choice"):
        response = ask(setup)
    (text,) = [r.message for r in caplog.records if r.name == "kvferry.router.choice"]
    assert text.startswith(f"request {response.headers['x-request-id']}: directly d0: 40 of 42")
    assert "\n    not p0 > d0: 0 of 42 tokens cached, 42 computed, 2 moved; queue " in text


def test_decode_engine_that_dies_directly_is_replaced_by_a_way_over_prefill(make_setup, publish):
    setup = make_setup(1, 2)
    publish(setup, setup.decode[1], 40)
    setup.decode[1].break_after = 2
    ask(setup)
    assert [len(fake.bodies) for fake in setup.engines] == [1, 1, 1]
    assert setup.prefill[0].bodies[0]["prompt"] == [*TOKENS, *b"He"]


def test_chosen_engine_that_refuses_is_replaced(make_setup, publish):
    setup = make_setup(2, 1)
    publish(setup, setup.prefill[1], 40)
    setup.prefill[1].refuse = (503, "no room")
    ask(setup)
    assert [len(fake.bodies) for fake in setup.engines] == [1, 1, 1]


@pytest.mark.parametrize("settings", [{"direct_tokens": 0}, {"route_by": "requests"}])
def test_what_is_not_wanted_is_not_done(make_setup, publish, settings):
    setup = make_setup(1, 1, **settings)
    if settings.get("route_by"):
        setup.decode[0].tells = {
            "kv_role": "kv_consumer",
            "kv_events": {"endpoint": "tcp://127.0.0.1:9"},
        }
    else:
        publish(setup, setup.decode[0], 40)
    ask(setup)
    assert [len(fake.bodies) for fake in setup.engines] == [1, 1]


def test_engines_that_publish_nothing_are_taken_to_have_what_they_were_sent(make_setup):
    setup = make_setup(1, 1, explain=True, assume_cached=True, direct_tokens=0)
    for fake in setup.engines:
        fake.cached_tokens = None  # as vLLM's servers, unless they are told to tell
    history = "a prompt of sixty characters, behind which five tokens come."
    known = []
    for kept, said in ((True, ""), (True, " And?"), (False, "other" * 20)):
        prompt = f"{history}{said}" if kept else said
        setup.says("Hello", prompt=prompt)
        response = setup.complete(prompt=prompt, max_tokens=5)
        route = dict(part.split("=") for part in response.headers["x-kvferry-route"].split("; "))
        known.append((int(route["cached"]), len(prompt) - int(route["moved"])))
        history = f"{prompt}Hello"
    # P has the prompt alone, D also what it has drawn itself.
    assert known == [(0, 0), (32, 64), (0, 0)]


def test_what_an_engine_had_less_than_it_was_sent_is_counted(make_setup):
    setup = make_setup(1, 1, explain=True, assume_cached=True, direct_tokens=0)
    ask(setup)
    assert "cached=32; " in ask(setup).headers["x-kvferry-route"]
    # The fake engine says that it had 3.
    assert "prefix_missed_tokens_total 29.0" in setup.client.get("/metrics").text


def test_of_an_engine_that_publishes_nothing_is_assumed(make_setup, publish):
    setup = make_setup(1, 1, explain=True, assume_cached=True)
    for fake in setup.engines:
        publish(setup, fake, 4)
    for _ in range(2):
        assert "cached=4; " in ask(setup).headers["x-kvferry-route"]


def test_what_an_engine_was_sent_is_forgotten_when_it_is_down(make_setup):
    setup = make_setup(1, 1, explain=True, assume_cached=True)
    ask(setup)
    (decode,) = setup.decode
    decode.healthy = False
    until(lambda: 'engine_up{engine="d0",role="decode"} 0.0' in setup.client.get("/metrics").text)
    decode.healthy = True
    until(lambda: 'engine_up{engine="d0",role="decode"} 1.0' in setup.client.get("/metrics").text)
    assert "prefill=p0; " in ask(setup).headers["x-kvferry-route"]


def test_prompts_that_were_sent_first_are_forgotten_first_and_their_ends_before():
    sent = SentPrompts(most_blocks=3)
    one, other = (Prompt([token] * 96) for token in (1, 2))
    sent.note(one)
    assert (sent.held(one), sent.held(Prompt([1] * 50)), sent.held(other)) == (96, 32, 0)
    sent.note(Prompt([2] * 70))
    assert (sent.held(one), sent.held(other)) == (32, 64)
    sent.missed()
    assert (sent.held(one), sent.held(other)) == (0, 32)
    sent.note(other)  # and counts on one more
    assert (sent.held(other), len(sent)) == (64, 2)
    sent.forget()
    sent.note(one)
    assert sent.held(one) == 96


def test_clusters_that_publish_nothing_have_no_routes(make_setup):
    setup = make_setup(1, 1, explain=True)
    assert "x-kvferry-route" not in ask(setup).headers
    text = setup.client.get("/metrics").text
    assert "kvferry_router_prefix_tokens_total{" not in text


def test_engine_that_tells_nonsense_of_its_events_is_heard_otherwise(make_setup):
    setup = make_setup(1, 1)
    setup.decode[0].tells = {"kv_events": {"endpoint": "file:///etc/passwd"}}
    ask(setup)


def test_engine_that_is_gone_is_forgotten(make_setup, publish):
    setup = make_setup(2, 1)
    publish(setup, setup.prefill[1], 40)
    setup.stop(setup.prefill[1])
    until(lambda: "kvferry_router_prefix_blocks{" not in setup.client.get("/metrics").text)
    assert "kvferry_router_prefix_forgotten_total 0.0" not in setup.client.get("/metrics").text


def test_operator_may_say_where_a_foreign_engine_publishes(make_setup, publish):
    setup = make_setup(2, 1)
    publisher = publish(setup, setup.prefill[1], 40)
    setup.prefill[1].tells = {}  # as a server of vLLM
    url = setup.prefill[1].url
    assert setup.client.delete("/kvferry/engines/prefill/p1").status_code == 200
    place = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    entered = setup.client.put(
        "/kvferry/engines/prefill/other", json={"url": url, "kv_events": place}
    )
    assert entered.status_code == 200
    refused = setup.client.put(
        "/kvferry/engines/prefill/p9", json={"url": url, "kv_events": {"endpoint": "here"}}
    )
    assert (refused.status_code, "tcp://host:port" in refused.text) == (400, True)
    known = 'prefix_blocks{engine="other",role="prefill"} 20.0'

    def is_heard():
        publisher.publish([BlockRemoved(block_hashes=[-1], medium="GPU")])
        return known in setup.client.get("/metrics").text

    until(is_heard)
    ask(setup)
    assert [len(fake.bodies) for fake in setup.engines] == [0, 1, 1]


def until_probed(setup):
    """Waits until the router has heard what each engine tells by now: a health check that ends may
    have begun before.
    """
    before = [fake.probes.total() for fake in setup.engines]
    counts = list(zip(setup.engines, before, strict=True))
    until(lambda: all(fake.probes.total() > count + 2 for fake, count in counts))


@pytest.fixture
def lending(make_setup, publish):
    """Two prefill engines that may borrow, and a decode engine that has the beginning."""
    setup = make_setup(2, 1, direct_tokens=0, explain=True)
    for fake in setup.engines:
        fake.tells = {"kv_role": "kv_both"}
    setup.decode[0].lends = 40
    publish(setup, setup.decode[0], 40)
    until_probed(setup)
    return setup


def asked(fake):
    return [body.get("kv_transfer_params") for body in fake.bodies]


LOAN = {"do_remote_prefill": True, "remote_num_tokens": 40, "ticket": "lent by d0"}


def test_prefill_engine_loads_what_a_decode_engine_lends(lending):
    response = ask(lending)
    lent, loaded = lending.decode[0].bodies
    assert lent["kv_transfer_params"] == {"do_remote_decode": True, "only_cached": True}
    assert (lent["prompt"], lent["max_tokens"], lent["stream"]) == (TOKENS, 1, False)
    assert asked(lending.prefill[0]) == [
        LOAN | {"do_remote_decode": True, "keep_first_token": True}
    ]
    assert lending.prefill[0].bodies[0]["prompt"] == TOKENS
    assert loaded["kv_transfer_params"] == {"ticket": "from p0"}
    assert "borrowed=40; lender=d0" in response.headers["x-kvferry-route"]
    text = lending.client.get("/metrics").text
    assert "kvferry_router_borrowed_tokens_total 40.0" in text
    assert 'kvferry_router_prefix_tokens_total{source="borrowed"} 40.0' in text
    assert lending.decode[0].taken_back == []
    assert lending.decode[0].ids[0].endswith("-lend")


def test_nothing_is_lent_so_all_is_computed(lending):
    lending.decode[0].lends = 0
    ask(lending)
    (params,) = asked(lending.prefill[0])
    assert "ticket" not in params
    text = lending.client.get("/metrics").text
    assert "kvferry_router_borrowed_tokens_total 0.0" in text
    assert "kvferry_router_prefix_missed_tokens_total 40.0" in text


def test_loan_that_cannot_be_loaded_is_given_back_and_the_prompt_computed(lending):
    fake = lending.prefill[0]
    fake.refuse, fake.refuse_code, fake.refusals = (500, "the lender is gone"), "TransferError", 1
    ask(lending)
    first, second = asked(lending.prefill[0]) + asked(lending.prefill[1])
    assert first["ticket"] == "lent by d0"
    assert "ticket" not in second
    until(lambda: lending.decode[0].taken_back)
    assert lending.decode[0].taken_back == [LOAN]


@pytest.mark.parametrize("status", [500, 503])
def test_lender_that_refuses_is_done_without(lending, status):
    fake = lending.decode[0]
    fake.refuse, fake.refusals = (status, "not now"), 1
    lending.says("Hello", prompt=PROMPT)
    response = lending.complete(prompt=PROMPT, max_tokens=1)
    assert response.status_code == 200
    (params,) = asked(lending.prefill[0])
    assert params is None


def test_loan_of_a_prefill_engine_that_is_down_is_given_back(lending):
    lending.prefill[0].refuse = (503, "not now")
    ask(lending)
    assert "ticket" not in asked(lending.prefill[1])[0]
    until(lambda: lending.decode[0].taken_back)
    assert lending.decode[0].taken_back == [LOAN]


def test_loan_is_the_decode_engines_where_no_prefill_engine_is_left_to_use_it(lending):
    lender = lending.decode[0]
    lender.hang = True
    with ThreadPoolExecutor(1) as clients:
        answer = clients.submit(ask, lending)
        until(lambda: lender.bodies)
        for fake in lending.prefill:
            fake.healthy = False
        until(lambda: lending.client.get("/health").json()["status"] == "decode_only")
        lender.release.set()
        answer.result(WAIT_S)
    lent, loaded = lender.bodies
    assert lent["kv_transfer_params"]["only_cached"]
    assert loaded["kv_transfer_params"] == LOAN
    assert lender.taken_back == []


def test_foreign_engines_lend_and_borrow_where_an_operator_says_so(make_setup, publish):
    setup = make_setup(1, 1, direct_tokens=0)
    publisher = publish(setup, setup.decode[0], 40)
    setup.decode[0].lends = 40
    setup.decode[0].tells = {}  # as servers of vLLM
    place = {"endpoint": publisher.endpoint, "replay_endpoint": publisher.replay_endpoint}
    for fake in setup.engines:
        path = f"/kvferry/engines/{fake.role}"
        assert setup.client.delete(f"{path}/{fake.name}").status_code == 200
        body = {"url": fake.url, "kv_role": "kv_both"}
        if fake.role == "decode":
            body["kv_events"] = place
        assert setup.client.put(f"{path}/v{fake.name}", json=body).status_code == 200

    def is_heard():
        publisher.publish([BlockRemoved(block_hashes=[-1], medium="GPU")])
        known = 'prefix_blocks{engine="vd0",role="decode"} 20.0'
        return known in setup.client.get("/metrics").text

    until(is_heard)
    until_probed(setup)
    ask(setup)
    assert asked(setup.prefill[0])[0]["ticket"] == "lent by d0"
    refused = setup.client.put(
        "/kvferry/engines/decode/d9", json={"url": setup.decode[0].url, "kv_role": "both"}
    )
    assert (refused.status_code, "kv_role" in refused.text) == (400, True)


def test_file_of_engines_may_say_where_they_publish_and_whether_they_lend(tmp_path):
    path = tmp_path / "engines.toml"
    path.write_text(
        '[[decode]]\nurl = "http://d:1"\nkv_role = "kv_both"\n'
        'kv_events = { endpoint = "tcp://d:2", replay_endpoint = "tcp://d:3", topic = "kv" }\n'
    )
    (found,) = asyncio.run(engines_in(path)())
    assert (found.name, found.role, found.kv_role) == ("d:1", "decode", "kv_both")
    events = KVEventsPlace(endpoint="tcp://d:2", replay_endpoint="tcp://d:3", topic="kv")
    assert found.kv_events == events
    path.write_text('[[decode]]\nurl = "http://d:1"\nkv_events = { endpoint = "d:2" }\n')
    with pytest.raises(ConfigError, match="tcp://host:port"):
        asyncio.run(engines_in(path)())


def test_engine_that_does_not_tell_what_was_cached_missed_nothing():
    reply = Reply(usage={"prompt_tokens": 5, "prompt_tokens_details": None})
    assert (reply.cached_tokens, reply.cached_or(3)) == (None, 3)
    reply = Reply(usage={"prompt_tokens_details": {"cached_tokens": 0}})
    assert (reply.cached_tokens, reply.cached_or(3)) == (0, 0)
