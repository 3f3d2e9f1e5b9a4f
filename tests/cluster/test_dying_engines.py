"""A router that neither waits for dead engines nor gives them all to one request."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvferry.router import engine_client, health, members
from kvferry.serving.messages import RouterSettings
from kvferry.testing.waiting import WAIT_S, until


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch):
    monkeypatch.setattr(health, "PROBE_INTERVAL_S", 0.05)


def healthy(setup, name):
    told = setup.client.get("/health").json()["engines"]
    return next(engine["healthy"] for engine in told if engine["name"] == name)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_refuses_one_request_and_is_well_serves_others(make_setup, role, stream):
    setup = make_setup(prefill=3, decode=3)
    group = getattr(setup, role)
    for engine in group[:2]:
        engine.refuse, engine.refuse_code = (503, "paused"), "engine_paused"

    for _ in range(4):
        assert setup.complete(max_tokens=5, stream=stream).status_code == 200
        assert all(healthy(setup, engine.name) for engine in group)
    assert all(engine.bodies for engine in group)


def test_where_all_decode_engines_refuse_a_request_the_client_hears_the_last_ones_words(make_setup):
    setup = make_setup(decode=3)
    for engine in setup.decode:
        engine.refuse, engine.refuse_code = (503, "paused"), "engine_paused"

    response = setup.complete(max_tokens=5)

    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "engine_paused"
    assert "paused" in error["message"]
    assert [len(engine.bodies) for engine in setup.decode] == [1, 1, 1]
    until(lambda: setup.prefill[0].taken_back)


def test_where_no_prefill_engine_takes_a_request_a_decode_engine_computes_it(make_setup):
    setup = make_setup(prefill=2)
    for engine in setup.prefill:
        engine.refuse, engine.refuse_code = (503, "paused"), "engine_paused"

    assert setup.complete(max_tokens=5).json()["choices"][0]["text"] == "Hello"

    assert "kv_transfer_params" not in setup.decode[0].bodies[0]


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_request_under_which_two_engines_died_is_not_given_to_a_third(make_setup, role):
    setup = make_setup(prefill=3, decode=3, decode_only="never")
    group = getattr(setup, role)
    for engine in group:
        engine.refuse, engine.dies = (503, "it ended under this request"), True

    response = setup.complete(max_tokens=5)

    assert response.status_code == 503
    error = response.json()["error"]
    assert error["code"] == "engine_unavailable"
    assert "it ended under this request" in error["message"]
    assert sum(len(engine.bodies) for engine in group) == 2


def test_choices_of_one_request_share_its_replay(make_setup):
    setup = make_setup(prefill=5)
    for engine in setup.prefill:
        engine.refuse, engine.dies = (503, "it ended under this request"), True

    assert setup.complete(max_tokens=5, n=2).status_code == 503

    # Each choice began at an engine of its own.
    assert sum(bool(engine.bodies) for engine in setup.prefill) <= 3


def test_engines_that_cannot_be_reached_do_not_make_a_request_suspect(make_setup):
    setup = make_setup(prefill=4)
    for engine in setup.prefill[:3]:
        setup.stop(engine)

    for _ in range(3):
        assert setup.complete(max_tokens=4).json()["choices"][0]["text"] == "Hell"


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_what_waits_for_an_unhealthy_engine_goes_to_another(make_setup, role):
    setup = make_setup(prefill=2, decode=2, outstanding_timeout_s=0.3)
    silent = getattr(setup, role)[0]
    silent.hang = True
    answers = []
    client = threading.Thread(target=lambda: answers.append(setup.complete(max_tokens=5)))
    client.start()
    until(lambda: silent.bodies)
    assert not answers
    began = time.monotonic()
    silent.healthy = False  # its host has vanished, say
    client.join(WAIT_S)

    assert answers[0].json()["choices"][0]["text"] == "Hello"
    assert time.monotonic() - began > 0.2
    assert silent.aborted.wait(WAIT_S)


def test_what_waits_for_the_only_engine_waits_on(make_setup):
    """Slow is not dead, and nobody else could serve it."""
    setup = make_setup(outstanding_timeout_s=0.1)
    setup.decode[0].hang = True
    answers = []
    client = threading.Thread(target=lambda: answers.append(setup.complete(max_tokens=5)))
    client.start()
    until(lambda: setup.decode[0].bodies)
    setup.decode[0].healthy = False
    until(lambda: not healthy(setup, "d0"))
    time.sleep(0.5)
    assert not answers
    assert not setup.decode[0].aborted.is_set()
    setup.decode[0].release.set()
    client.join(WAIT_S)

    assert answers[0].json()["choices"][0]["text"] == "Hello"


def state(setup, name):
    told = setup.client.get("/health").json()["engines"]
    return next(engine["state"] for engine in told if engine["name"] == name)


def slow_down(setup, engine):
    """From now on the router knows that an engine is slow, and no other engine counts as slow."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_client, "CONNECT_TIMEOUT_S", 0.1)
        # A check that began before would wait for as long as this test does.
        seen = engine.probes.total()
        until(lambda: engine.probes.total() > seen + 1)
        engine.is_slow = True
        until(lambda: state(setup, engine.name) in ("slow", "down"))
    others = [(each, each.probes.total()) for each in setup.engines if not each.is_slow]
    until(lambda: all(each.probes.total() > seen + 1 for each, seen in others))
    until(lambda: all(state(setup, each.name) == "ready" for each, _ in others))


def test_what_waits_for_a_slow_engine_stays_there(make_setup):
    """Its connections live, and a minute without CPU explains what we see."""
    setup = make_setup(decode=2)
    assert RouterSettings(engines=()).outstanding_timeout_s > 60
    slow, other = setup.decode
    slow.hang = True
    slow_down(setup, slow)
    slow.is_slow = False
    until(lambda: state(setup, "d0") == "ready")
    slow_down(setup, other)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(setup.complete, max_tokens=5)
        until(lambda: slow.bodies)
        other.is_slow = False
        slow_down(setup, slow)
        for _ in range(3):  # a new one goes to an engine that answers
            assert setup.complete(max_tokens=5).status_code == 200
        assert (len(slow.bodies), len(other.bodies)) == (1, 3)
        slow.release.set()
        assert waiting.result().json()["choices"][0]["text"] == "Hello"
    assert len(other.bodies) == 3


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_where_every_engine_is_slow_they_serve(make_setup, role):
    setup = make_setup(decode_only="never")
    (engine,) = getattr(setup, role)
    slow_down(setup, engine)
    assert setup.client.get("/health").status_code == 200
    assert setup.complete(max_tokens=5).json()["choices"][0]["text"] == "Hello"


def test_an_engine_that_is_slow_for_too_long_counts_as_hung(make_setup):
    setup = make_setup(outstanding_timeout_s=0.5)
    slow_down(setup, setup.decode[0])
    until(lambda: setup.client.get("/health").status_code == 503)
    refused = setup.complete(max_tokens=5)
    assert refused.status_code == 503
    assert "it has not answered for " in refused.json()["error"]["message"]


def test_an_engine_that_has_come_back_serves_the_next_request(make_setup, monkeypatch):
    monkeypatch.setattr(members, "RECOVERY_WAIT_S", WAIT_S)
    setup = make_setup()
    setup.decode[0].healthy = False
    until(lambda: not healthy(setup, "d0"))
    monkeypatch.setattr(health, "PROBE_INTERVAL_S", 30.0)
    time.sleep(0.2)  # the watcher sleeps for long now

    setup.decode[0].healthy = True
    assert setup.complete(max_tokens=5).status_code == 200
    assert healthy(setup, "d0")


def test_a_good_answer_makes_an_engine_healthy(make_setup):
    setup = make_setup()
    setup.says("x" * 40)
    setup.decode[0].hang = True
    answers = []
    client = threading.Thread(target=lambda: answers.append(setup.complete(max_tokens=5)))
    client.start()
    until(lambda: setup.decode[0].bodies)
    setup.decode[0].healthy = False
    until(lambda: not healthy(setup, "d0"))
    setup.decode[0].probes.clear()
    setup.decode[0].is_slow = True
    until(lambda: setup.decode[0].probes)  # no health check is answered any more
    setup.decode[0].release.set()
    client.join(WAIT_S)

    assert answers[0].status_code == 200
    assert healthy(setup, "d0")


def test_with_no_prefill_engine_left_a_decode_engine_computes_the_prompt(make_setup):
    setup = make_setup(prefill=2)
    for engine in setup.prefill:
        setup.stop(engine)

    for stream in (False, True):
        if stream:
            events = setup.stream(max_tokens=5)
            text = "".join(e["choices"][0]["text"] for e in events[:-1])
        else:
            text = setup.complete(max_tokens=5, seed=7).json()["choices"][0]["text"]
        assert text == "Hello"
    asked = setup.decode[0].bodies[0]
    assert asked["prompt"] == list(b"Hi")
    assert (asked["max_tokens"], asked["seed_offset"]) == (5, 0)
    assert "kv_transfer_params" not in asked
    health = setup.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "decode_only")


def test_a_request_whose_prefill_engine_died_is_computed_by_decode_engines_once(make_setup):
    setup = make_setup(decode=3)
    setup.prefill[0].refuse = (503, "it ended under this request")
    for engine in setup.decode:
        engine.refuse = (503, "and so did this one")
    for engine in setup.engines:
        engine.dies = True

    response = setup.complete(max_tokens=5)

    assert response.status_code == 503
    assert "and so did this one" in response.json()["error"]["message"]
    assert sum(len(engine.bodies) for engine in setup.decode) == 1


def test_decode_only_never_refuses_what_no_prefill_engine_can_compute(make_setup):
    setup = make_setup(decode_only="never")
    setup.stop(setup.prefill[0])

    assert setup.complete(max_tokens=5).status_code == 503
    assert setup.decode[0].bodies == []
    assert setup.client.get("/health").status_code == 503
