"""Engines that come, change and leave while a router serves."""

import asyncio
import contextlib
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

import httpx
import msgspec
import pytest

from kvferry.errors import ConfigError
from kvferry.router import engine_client, health, members
from kvferry.router.engine_client import EngineClient, HttpAnswer
from kvferry.router.engines import Engine
from kvferry.router.health import EngineHealth, Told
from kvferry.router.lists import engines_behind, engines_in
from kvferry.router.members import EnginePool, Members, NoEngineError
from kvferry.router.router import Router
from kvferry.serving.messages import EngineAddress, Role, RouterSettings
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import FakeEngine, leave


@pytest.fixture(autouse=True)
def _quick_looks(monkeypatch):
    monkeypatch.setattr(health, "PROBE_INTERVAL_S", 0.05)
    monkeypatch.setattr(members, "LOOK_INTERVAL_S", 0.05)


def told(setup, name, role="decode"):
    """What the router tells of an engine; ``None`` if it does not know it."""
    found = setup.client.get("/kvferry/engines").json()["engines"]
    return next((one for one in found if (one["role"], one["name"]) == (role, name)), None)


def state(setup, name, role="decode"):
    engine = told(setup, name, role)
    return engine and engine["state"]


def is_ready(setup, name, role):
    return state(setup, name, role) == "ready"


def until_probed(engine, routers=1):
    """Waits until so many routers have heard what it tells now: who asks again was answered."""
    engine.probes = Counter()
    until(lambda: sum(count > 1 for count in list(engine.probes.values())) >= routers)


def put(setup, role, name, url):
    return setup.client.put(f"/kvferry/engines/{role}/{name}", json={"url": url})


def start(setup, role, name):
    """One more engine, which the router is not told of."""
    fake = FakeEngine(name, role)
    fake.url = setup.servers.start(fake.app())
    (setup.prefill if role == "prefill" else setup.decode).append(fake)
    setup.says("Hello")
    return fake


def test_the_router_tells_which_engines_do_not_answer_one_of_its_own(setup):
    assert told(setup, "d0")["silent_peers"] == []
    metric = 'kvferry_router_engine_silent_peers{engine="d0",role="decode"}'
    setup.decode[0].tells = {"silent_peers": ["p0 (10.0.0.1:1)", "\x1b[31m"]}
    until(lambda: told(setup, "d0")["silent_peers"] == ["p0 (10.0.0.1:1)", r"\x1b[31m"])
    assert f"{metric} 2.0" in setup.client.get("/metrics").text
    setup.decode[0].tells = {}
    until(lambda: f"{metric} 0.0" in setup.client.get("/metrics").text)


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_an_engine_that_is_entered_gets_requests_at_once(setup, role):
    more = start(setup, role, "more")

    answer = put(setup, role, "more", more.url)

    assert (answer.status_code, answer.json()["url"]) == (200, more.url)
    until(lambda: state(setup, "more", role) == "ready")
    for _ in range(2):
        assert setup.complete(max_tokens=5).json()["choices"][0]["text"] == "Hello"
    assert more.bodies


def test_a_router_begins_without_engines_and_serves_once_some_are_entered(make_setup):
    setup = make_setup(prefill=0, decode=0)
    setup.complete()
    nobody = setup.complete()
    assert nobody.status_code == 503
    assert "no decode engine can serve this: there is none" in nobody.text

    for role in ("prefill", "decode"):
        engine = start(setup, role, role)
        put(setup, role, role, engine.url)
        until(partial(is_ready, setup, role, role))

    assert setup.complete(max_tokens=5).json()["choices"][0]["text"] == "Hello"


def test_an_engine_that_drains_gets_nothing_new_and_ends_what_it_has(make_setup):
    setup = make_setup(decode=2)
    slow, other = setup.decode
    other.refuse = (503, "not this one")
    slow.hang = True
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(setup.complete, max_tokens=5)
        until(lambda: slow.bodies)
        other.refuse = None
        until(lambda: state(setup, other.name) == "ready")

        answer = setup.client.post(f"/kvferry/engines/decode/{slow.name}/drain")

        assert answer.json()["state"] == "draining"
        for _ in range(3):
            assert setup.complete(max_tokens=5).status_code == 200
        assert len(slow.bodies) == 1
        assert state(setup, slow.name) == "draining"
        slow.release.set()
        assert waiting.result().json()["choices"][0]["text"] == "Hello"
    assert state(setup, slow.name) == "drained"
    assert put(setup, "decode", slow.name, slow.url).json()["state"] == "ready"  # it is back


def test_a_prefill_engine_has_not_drained_while_its_kv_waits_to_be_fetched(setup):
    (lender,), (borrower,) = setup.prefill, setup.decode
    borrower.hang = True
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(setup.complete, max_tokens=5)
        until(lambda: borrower.bodies)

        engine = setup.client.post(f"/kvferry/engines/prefill/{lender.name}/drain").json()

        assert (engine["state"], engine["outstanding"], engine["lent"]) == ("draining", 0, 1)
        borrower.release.set()
        assert waiting.result().status_code == 200
    assert state(setup, lender.name, "prefill") == "drained"


def test_a_lender_is_drained_when_a_client_went_away_before_its_kv_was_fetched(setup):
    (lender,), (borrower,) = setup.prefill, setup.decode
    borrower.hang = True
    leave(setup.client, lambda: borrower.bodies, prompt="Hi", max_tokens=5, temperature=0)
    assert borrower.aborted.wait(WAIT_S)
    until(lambda: told(setup, lender.name, "prefill")["lent"] == 0)
    until(lambda: lender.taken_back)


def test_an_engine_that_says_that_it_drains_is_left_alone_and_not_taken_for_dead(make_setup):
    setup = make_setup(decode=2, outstanding_timeout_s=0.2)
    leaving, _ = setup.decode
    leaving.tells = {"drain": {"requests": 2, "loads": 0, "leases": 1, "is_over": False}}
    until(lambda: state(setup, leaving.name) == "draining")
    leaving.bodies.clear()

    for _ in range(3):
        assert setup.complete(max_tokens=5).status_code == 200

    assert not leaving.bodies
    assert told(setup, leaving.name)["healthy"]
    assert told(setup, leaving.name)["drain"]["leases"] == 1
    leaving.tells = {"drain": {"requests": 0, "loads": 0, "leases": 0, "is_over": True}}
    until(lambda: state(setup, leaving.name) == "drained")
    leaving.tells = {}  # started again at the same place
    until(lambda: state(setup, leaving.name) == "ready")


def test_draining_is_undone(make_setup):
    setup = make_setup(decode=2)
    (engine, _), path = setup.decode, "/kvferry/engines/decode/d0"
    engine.tells = {"drain": None}
    until(lambda: setup.client.post(f"{path}/drain").json()["state"] == "drained")

    put(setup, "decode", "d0", engine.url)  # as it does itself, again and again

    assert state(setup, "d0") == "drained"
    assert setup.client.delete(f"{path}/drain").json()["state"] == "ready"
    assert engine.tells == {"drain": None}
    engine.bodies.clear()
    for _ in range(2):
        assert setup.complete(max_tokens=5).status_code == 200
    assert engine.bodies
    assert setup.client.delete(f"{path}/drain").json()["state"] == "ready"  # once more: no harm


def test_an_engine_that_drained_serves_again_after_its_next_start(setup):
    (engine,) = setup.decode
    engine.tells = {"drain": None}
    until(lambda: setup.client.post("/kvferry/engines/decode/d0/drain").json()["drain"])
    engine.tells = {"drain": None}
    until(lambda: state(setup, "d0") == "ready")


def test_an_engine_of_ours_has_not_drained_before_it_has_heard_of_it(setup, monkeypatch):
    """Other routers give it requests till then."""
    (engine,) = setup.decode
    engine.tells = {"drain": None}
    until_probed(engine)  # the router has seen that it is one of ours
    engine.is_slow = True

    with monkeypatch.context() as patch:
        patch.setattr(engine_client, "CONNECT_TIMEOUT_S", 0.2)
        assert setup.client.post("/kvferry/engines/decode/d0/drain").is_success
        until(lambda: state(setup, "d0") == "draining")

    time.sleep(0.3)
    assert state(setup, "d0") == "draining"
    assert engine.tells == {"drain": None}
    engine.is_slow = False
    until(lambda: state(setup, "d0") == "drained")
    assert engine.tells["drain"]["is_over"]


def test_an_engine_that_has_been_slow_from_its_start_has_not_drained(setup, monkeypatch):
    """Whether other routers use it is not known."""
    engine = start(setup, "decode", "more")
    engine.is_slow = True
    engine.tells = {"drain": None}
    with monkeypatch.context() as patch:
        patch.setattr(engine_client, "CONNECT_TIMEOUT_S", 0.2)
        put(setup, "decode", "more", engine.url)
        until(lambda: state(setup, "more") == "slow")
        setup.client.post("/kvferry/engines/decode/more/drain")
        until(lambda: state(setup, "more") == "draining")
    engine.is_slow = False
    until(lambda: state(setup, "more") == "drained")
    assert engine.tells["drain"]["is_over"]


def test_one_engine_does_not_limit_all_by_a_length_that_is_none(setup):
    wrong = start(setup, "decode", "wrong")
    wrong.max_model_len = -5
    put(setup, "decode", "wrong", wrong.url)
    until(lambda: "-5 is less than 1" in told(setup, "wrong")["last_error"])
    assert setup.complete(max_tokens=5).status_code == 200


def test_an_engine_that_comes_back_with_another_longest_sequence_is_asked_anew(make_setup):
    setup = make_setup(prefill=0)

    def longest():
        return setup.client.get("/v1/models").json()["data"][0]["max_model_len"]

    (engine,) = setup.decode
    assert longest() == 512
    engine.healthy, engine.max_model_len = False, 1024
    until(lambda: state(setup, "d0") == "down")
    engine.healthy = True
    until(lambda: state(setup, "d0") == "ready")
    assert longest() == 1024


def test_credentials_in_a_url_are_shown_to_nobody(setup):
    (engine,) = setup.decode
    url = engine.url.replace("http://", "http://user:secret@")
    assert put(setup, "decode", "d1", url).json()["url"] == engine.url
    until(lambda: state(setup, "d1") == "ready")
    engine.healthy = False
    until(lambda: state(setup, "d1") == "down" == state(setup, "d0"))
    refused = setup.complete(max_tokens=5)
    assert refused.status_code == 503
    for answer in (refused, setup.client.get("/health"), setup.client.get("/metrics")):
        assert "secret" not in answer.text


def test_a_refusal_to_take_new_requests_is_no_death(make_setup):
    setup = make_setup(decode=2)
    leaving, _ = setup.decode
    leaving.refuse, leaving.refuse_code = (503, "it is draining"), "DrainingError"

    for _ in range(4):
        assert setup.complete(max_tokens=5).status_code == 200

    assert leaving.bodies
    assert told(setup, leaving.name)["healthy"]
    prefilled = sum(len(engine.bodies) for engine in setup.prefill)
    assert prefilled == 4  # the lease was not in its hands: nothing is computed again


def test_an_engine_that_is_forgotten_ends_what_it_works_on(setup):
    (engine,) = setup.decode
    engine.hang = True
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(setup.complete, max_tokens=5)
        until(lambda: engine.bodies)

        gone = setup.client.delete(f"/kvferry/engines/decode/{engine.name}").json()

        assert gone["outstanding"] == 1
        assert told(setup, engine.name) is None
        engine.release.set()
        assert waiting.result().json()["choices"][0]["text"] == "Hello"


def test_a_forgotten_engine_is_not_told_to_drain(setup):
    """Another router may use it, and this one may get it back."""
    (engine,) = setup.decode
    engine.tells, engine.hang = {"drain": None}, True
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(setup.complete, max_tokens=5)
        until(lambda: engine.bodies)
        seen = engine.probes.total()
        until(lambda: engine.probes.total() > seen + 1)  # it has told that it can drain
        setup.client.delete(f"/kvferry/engines/decode/{engine.name}")
        seen = engine.probes.total()
        until(lambda: engine.probes.total() > seen + 2)
        engine.release.set()
        waiting.result()
    assert engine.tells == {"drain": None}
    put(setup, "decode", engine.name, engine.url)
    until(lambda: state(setup, engine.name) == "ready")


def test_a_forgotten_engine_that_dies_does_not_keep_its_requests_for_ever(make_setup):
    setup = make_setup(decode=2, outstanding_timeout_s=0.2)
    dying, other = setup.decode
    other.refuse = (503, "not this one")
    dying.hang = True
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(setup.complete, max_tokens=5)
        until(lambda: dying.bodies)
        other.refuse = None
        setup.client.delete(f"/kvferry/engines/decode/{dying.name}")
        dying.healthy = False
        assert waiting.result().json()["choices"][0]["text"] == "Hello"
    assert other.bodies


def test_an_engine_entered_with_another_address_takes_the_place_of_the_one_before(setup):
    (before,) = setup.decode
    after = start(setup, "decode", before.name)

    put(setup, "decode", before.name, after.url)

    until(lambda: state(setup, before.name) == "ready")
    assert told(setup, before.name)["url"] == after.url
    before.bodies.clear()
    assert setup.complete(max_tokens=5).status_code == 200
    assert after.bodies
    assert not before.bodies


def test_an_engine_changes_its_role_while_it_runs(make_setup):
    setup = make_setup(prefill=2, decode=1)
    both = setup.prefill[1]

    put(setup, "decode", both.name, both.url)
    until(lambda: state(setup, both.name) == "ready")
    setup.client.delete(f"/kvferry/engines/prefill/{both.name}")
    setup.client.delete(f"/kvferry/engines/decode/{setup.decode[0].name}")
    both.bodies.clear()

    assert setup.complete(max_tokens=5).json()["choices"][0]["text"] == "Hello"
    (body,) = both.bodies
    assert body["kv_transfer_params"] == {"ticket": f"from {setup.prefill[0].name}"}


def test_an_engine_whose_kv_role_does_not_fit_is_not_used_and_says_why(setup):
    wrong = start(setup, "decode", "wrong")
    wrong.tells = {"kv_role": "kv_producer"}
    put(setup, "decode", "wrong", wrong.url)
    until(lambda: told(setup, "wrong")["last_error"] not in ("", "not reached yet"))
    assert told(setup, "wrong")["last_error"] == (
        "its kv_role is 'kv_producer'; a decode engine needs kv_consumer or kv_both"
    )
    assert state(setup, "wrong") == "down"


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "says"),
    [
        ("PUT", "decode/d9", {"url": "localhost:80"}, 400, "'localhost:80' is no URL of a server"),
        ("PUT", "decode/d9", {"url": "http://h:http"}, 400, "'http://h:http': Port could not be"),
        ("PUT", "decode/d9", {"url": "http://h:99999"}, 400, "Port out of range 0-65535; write"),
        ("PUT", "decode/d9", {"url": "http://h:80?to=/x"}, 400, "is no URL of a server"),
        ("PUT", "decode/d9", {"url": "http://h", "rol": 1}, 400, "rol"),
        ("PUT", "decode/d9", {}, 400, "url"),
        ("PUT", "decoder/d9", {"url": "http://h"}, 404, "Invalid enum value 'decoder'"),
        ("PUT", "decode/a%1Bb", {"url": "http://h"}, 400, "is not printable text"),
        ("PUT", f"decode/{'n' * 300}", {"url": "http://h"}, 400, "of 1 to 256 characters"),
        ("DELETE", "decode/d9", None, 404, "decode engine 'd9' is not known here; there are 'd0'"),
        ("POST", "prefill/d0/drain", None, 404, "there are 'p0'"),
    ],
)
def test_bad_requests_to_change_the_engines_are_named(setup, method, path, body, status, says):
    response = setup.client.request(method, f"/kvferry/engines/{path}", json=body)
    assert response.status_code == status
    assert says in response.json()["error"]["message"]
    assert len(setup.client.get("/kvferry/engines").json()["engines"]) == 2


def test_an_engine_whose_name_no_resolver_takes_is_down_and_says_why(setup):
    put(setup, "decode", "d9", "http://xn--\u00fc:80")
    until(lambda: told(setup, "d9")["last_error"] != "not reached yet")
    assert "xn--" in told(setup, "d9")["last_error"]


def test_a_name_may_have_a_slash(setup):
    (engine,) = setup.decode
    path = "/kvferry/engines/decode/rack%2F1"
    assert setup.client.put(path, json={"url": engine.url}).json()["name"] == "rack/1"
    assert setup.client.post(f"{path}/drain").json()["state"] == "drained"
    assert setup.client.delete(path).status_code == 200
    assert told(setup, "rack/1") is None


def test_what_an_engine_said_before_it_was_told_to_drain_does_not_count():
    class Client:
        """An engine whose answers to health checks are on their way until it is told."""

        def __init__(self):
            self.tells, self.told = {}, asyncio.Event()

        async def ask(self, method, _url):
            if method == "POST":
                left = {"requests": 3, "loads": 0, "leases": 0, "is_over": False}
                self.tells = {"drain": left}
                self.told.set()
                return HttpAnswer(200, msgspec.json.encode(left))
            answer = HttpAnswer(200, msgspec.json.encode(self.tells))
            await self.told.wait()
            return answer

    async def drain():
        engine = Engine("d0", "http://d0", "decode", cast(EngineClient, Client()))
        engine.health.told = Told(max_model_len=1)
        engine.health.probing()
        await asyncio.sleep(0)  # it asks
        await engine.health.leave()
        return engine.state

    assert asyncio.run(drain()) == "draining"


def test_engines_are_bounded(setup, monkeypatch):
    monkeypatch.setattr(members, "MOST_ENGINES", 2)
    response = put(setup, "decode", "d9", "http://127.0.0.1:9")
    assert response.status_code == 409
    assert "there are 2, no more are taken" in response.text


def test_only_an_operator_changes_the_engines(make_setup):
    setup = make_setup(api_key="clients", operator_key="operator", wait=False)

    def ask(key, method="GET", path=""):
        headers = {"authorization": f"Bearer {key}"}
        url = f"/kvferry/engines{path}"
        return setup.client.request(method, url, headers=headers).status_code

    assert (ask("operator"), ask("clients"), ask("no")) == (200, 200, 401)
    assert ask("clients", "DELETE", "/decode/d0") == 401
    assert ask("clients", "POST", "/decode/d0/drain") == 401
    assert ask("clients", "PUT", "/decode/d9") == 401
    assert ask("operator", "DELETE", "/decode/d0") == 200


def test_without_an_operator_key_nobody_changes_the_engines(make_setup):
    setup = make_setup(operator_key=None, wait=False)
    assert setup.client.get("/kvferry/engines").status_code == 200
    response = put(setup, "decode", "mine", "http://127.0.0.1:9")
    assert response.status_code == 403
    assert "KVFERRY_OPERATOR_KEY" in response.text


def test_metrics_tell_of_the_engines_that_there_are(setup):
    (gone,) = setup.decode
    assert f'engine="{gone.name}"' in setup.client.get("/metrics").text
    setup.client.delete(f"/kvferry/engines/decode/{gone.name}")
    assert f'engine="{gone.name}"' not in setup.client.get("/metrics").text


# ---- lists ---------------------------------------------------------------------------------


class Lookup:
    """A list that a test changes."""

    def __init__(self):
        self.found: list[tuple[Role, str, str]] | ConfigError = []

    async def __call__(self):
        if isinstance(self.found, Exception):
            raise self.found
        return [EngineAddress.of(*address) for address in self.found]


@pytest.fixture
def follow(servers, codec, byte_model):
    """A router that follows a list; returns what asks it for its engines."""
    clients = []

    def begin(look):
        settings = RouterSettings(engines=(), model_folder=str(byte_model))
        url = servers.start(Router(settings, codec, [look]).app())
        clients.append(httpx.Client(base_url=url, timeout=WAIT_S, trust_env=False))

        def names():
            found = clients[-1].get("/kvferry/engines").json()["engines"]
            return {(one["role"], one["name"], one["url"]) for one in found}

        return names

    yield begin
    for client in clients:
        client.close()


def test_a_list_brings_engines_and_takes_them_away(follow, servers):
    fakes = [FakeEngine(f"f{number}", "decode") for number in range(2)]
    for fake in fakes:
        fake.url = servers.start(fake.app())
    everybody: list[tuple[Role, str, str]] = [("decode", fake.url, fake.name) for fake in fakes]
    look = Lookup()
    names = follow(look)
    assert names() == set()

    look.found = everybody
    until(lambda: {name for _, name, _ in names()} == {"f0", "f1"})
    look.found = ConfigError("the disk is gone")
    time.sleep(0.3)
    assert len(names()) == 2  # what cannot be read changes nothing
    look.found = everybody[:1]
    until(lambda: {name for _, name, _ in names()} == {"f0"})
    look.found = everybody
    until(lambda: {name for _, name, _ in names()} == {"f0", "f1"})


def test_an_engine_that_a_list_names_again_serves_again(make_setup, follow):
    setup = make_setup()
    (engine,) = setup.decode
    engine.tells = {"drain": None}
    look = Lookup()
    names = follow(look)
    look.found = [("decode", engine.url, "d0")]
    until(names)
    until_probed(engine, routers=2)
    look.found = []
    until(lambda: engine.tells["drain"] is not None)
    look.found = [("decode", engine.url, "d0")]
    until(lambda: engine.tells["drain"] is None)
    until(lambda: state(setup, "d0") == "ready")


def test_an_engine_that_a_list_names_no_longer_goes_only_when_it_has_drained(make_setup, follow):
    setup = make_setup()
    (engine,) = setup.decode
    look = Lookup()
    names = follow(look)
    engine.tells = {"drain": {"requests": 1, "loads": 0, "leases": 0, "is_over": False}}
    look.found = [("decode", engine.url, "leaving")]
    until(names)
    until_probed(engine, routers=2)
    look.found = []
    time.sleep(0.3)
    assert names()
    engine.tells = {"drain": {"requests": 0, "loads": 0, "leases": 0, "is_over": True}}
    until(lambda: not names())


def test_a_file_of_engines_is_followed_and_its_mistakes_change_nothing(follow, tmp_path, caplog):
    file = tmp_path / "engines.toml"
    file.write_text(
        '[[prefill]]\nurl = "http://127.0.0.1:8100/v1"\n'
        '[[decode]]\nurl = "http://127.0.0.1:8200"\nname = "d0"\n'
    )
    expected = {
        ("prefill", "127.0.0.1:8100", "http://127.0.0.1:8100"),
        ("decode", "d0", "http://127.0.0.1:8200"),
    }
    names = follow(engines_in(file))
    until(lambda: names() == expected)
    for mistake in (
        "[[decode]]\nurl = 3",
        '[[decode]]\nurl = "nowhere"',
        "[[",
        '[[decoder]]\nurl=""',
    ):
        # At once: looks come so quickly here that two might find it empty while it is written.
        (tmp_path / "anew").write_text(mistake)
        (tmp_path / "anew").replace(file)
        until(lambda: "the last one stands" in caplog.text)
        assert str(file) in caplog.text
        caplog.clear()
    assert names() == expected


def test_a_list_is_followed_on_when_an_operator_removes_what_it_drains(monkeypatch):
    look = Lookup()

    async def named(known, name):
        while not known.find("decode", name):
            await asyncio.sleep(0.01)

    async def run():
        client = EngineClient({})
        known = Members(RouterSettings(engines=()), client, [look])

        async def leave(_health):
            engine = known.find("decode", "d0")
            assert engine is not None
            known.remove(engine)  # while the engine is being told

        monkeypatch.setattr(EngineHealth, "leave", leave)
        async with asyncio.timeout(WAIT_S), known.watching():
            look.found = [("decode", "http://127.0.0.1:9", "d0")]
            await named(known, "d0")
            look.found = []
            while known.find("decode", "d0"):
                await asyncio.sleep(0.01)
            look.found = [("decode", "http://127.0.0.1:9", "d1")]
            await named(known, "d1")
        await client.aclose()

    asyncio.run(run())


def test_a_router_that_ends_asks_nothing_more():
    """A connection that was made after its client's end would stay open."""

    class Client:
        asked = 0

        async def ask(self, *_):
            self.asked += 1
            await asyncio.Event().wait()

    async def run():
        client = Client()
        engine = EngineAddress.of("decode", "http://127.0.0.1:9", "d0")
        known = Members(RouterSettings(engines=(engine,)), cast(EngineClient, client))
        async with asyncio.timeout(WAIT_S), known.watching():
            while not client.asked:
                await asyncio.sleep(0.01)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_engines_that_a_list_forgets_are_told_to_drain_at_once(monkeypatch):
    """Each of many that died together takes seconds, and the list has others by now."""
    look, told = Lookup(), Counter[str]()

    async def run():
        client = EngineClient({})
        known = Members(RouterSettings(engines=()), client, [look])
        are_all_told = asyncio.Event()

        async def leave(engine):
            told[engine.title] += 1
            if len(told) == 3:
                are_all_told.set()
            await are_all_told.wait()

        monkeypatch.setattr(EngineHealth, "leave", leave)
        async with asyncio.timeout(WAIT_S), known.watching():
            look.found = [("decode", "http://127.0.0.1:9", f"d{number}") for number in range(3)]
            while not known.find("decode", "d2"):
                await asyncio.sleep(0.01)
            look.found = []
            await are_all_told.wait()
        await client.aclose()

    asyncio.run(run())
    assert sorted(told) == ["decode engine 'd0'", "decode engine 'd1'", "decode engine 'd2'"]


def test_an_engine_that_a_list_forgets_for_one_look_is_not_drained(monkeypatch):
    looks = 0

    async def look():
        nonlocal looks
        looks += 1
        return [EngineAddress.of("decode", "http://127.0.0.1:9", "d0")] if looks % 2 else []

    async def leave(_engine):
        raise AssertionError("it is told to drain")

    async def run():
        client = EngineClient({})
        known = Members(RouterSettings(engines=()), client, [look])
        monkeypatch.setattr(EngineHealth, "leave", leave)
        async with asyncio.timeout(WAIT_S), known.watching():
            while looks < 6:
                await asyncio.sleep(0.01)
        assert known.find("decode", "d0")
        await client.aclose()

    asyncio.run(run())


def test_addresses_of_a_name_are_not_asked_without_the_encryption_that_its_url_wants():
    with pytest.raises(ConfigError, match="https://a: all addresses of a name are reached over"):
        engines_behind("prefill", "https://a")


def test_a_name_stands_for_all_its_addresses(follow, monkeypatch):
    found = ["127.0.0.3", "127.0.0.2", "::1"]
    begun = threading.Event()

    async def getaddrinfo(_self, host, port, **_):
        begun.set()
        assert (host, port) == ("prefill.example", 8100)
        return [(None, None, None, "", (address, port)) for address in found]

    monkeypatch.setattr("asyncio.base_events.BaseEventLoop.getaddrinfo", getaddrinfo)
    names = follow(engines_behind("prefill", "http://prefill.example:8100"))
    until(begun.is_set)
    until(
        lambda: (
            {url for _, _, url in names()}
            == {"http://127.0.0.2:8100", "http://127.0.0.3:8100", "http://[::1]:8100"}
        )
    )
    found.remove("127.0.0.3")
    until(lambda: len(names()) == 2)


@pytest.mark.parametrize("is_new", [True, False])
def test_requests_wait_for_the_first_health_check_of_a_prefill_engine_and_not_for_later_ones(
    monkeypatch, is_new
):
    """As a router's first request may come before it knows that its prefill engine is there."""

    async def probe(engine):
        await asyncio.sleep(0)
        engine.up()

    async def pick():
        pool = EnginePool("prefill", 1.0, dispensable=True)
        pool.engines.append(Engine("p0", "http://p0", "prefill", EngineClient({})))
        if not is_new:
            pool.engines[0].health.down("it has ended", reached=False)
        return await pool.pick()

    monkeypatch.setattr(EngineHealth, "probe", probe)
    monkeypatch.setattr(members, "RECOVERY_WAIT_S", 60.0)
    with contextlib.nullcontext() if is_new else pytest.raises(NoEngineError):
        assert asyncio.run(pick()).name == "p0"
