"""Two real vLLM servers of unequal blocks that lend each other what their prefix caches have."""

import random
import uuid

import httpx
import pytest

from benchmarks.vllm_servers.client import complete
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.front import engines_file
from benchmarks.vllm_servers.models import tiny_model
from benchmarks.vllm_servers.pair import EXTERNAL_TOKENS, Pair
from benchmarks.vllm_servers.ports import free_ports
from benchmarks.vllm_servers.server import ServerOptions
from kvferry.control.cache_events import CacheEventSubscriber
from kvferry.router.prefixes import CachedBlocks, Prompt
from kvferry.testing.waiting import WAIT_S, until

ONLY_CACHED = {"do_remote_decode": True, "do_remote_prefill": False, "only_cached": True}
TURNS = 4


@pytest.fixture(scope="module")
def both(start):
    options = [
        ServerOptions(
            name=name,
            model=tiny_model(),
            block_size=block_size,
            transfer=KVFerry().config("kv_both", name),
            kv_events=(ports, ports + 1),
        )
        for name, block_size, ports in (("p0", 64, free_ports(2)), ("d0", 128, free_ports(2)))
    ]
    with start(options) as servers:
        yield Pair(*servers)


def external_tokens(server):
    return server.metrics().get(EXTERNAL_TOKENS, 0.0)


def alone(server, prompt):
    """What a server answers that has nothing of the prompt, neither cached nor from outside."""
    return complete(server.url, prompt, 16, cache_salt=uuid.uuid4().hex).tokens


def test_a_conversation_goes_to_and_fro(both):
    """D lends the history to P, which computes the question and lends it all to D."""
    draw = random.Random(13)
    model = tiny_model()
    history = []
    for turn in range(TURNS):
        history += [draw.randrange(8, model.vocab_size) for _ in range(300 if turn == 0 else 40)]
        cached = complete(both.decode.url, history, 1, kv_transfer_params=ONLY_CACHED)
        params = cached.kv_transfer_params
        assert params is not None
        assert (params["remote_num_tokens"] > 0) == (turn > 0)
        before = external_tokens(both.prefill)
        ticket = complete(
            both.prefill.url, history, 1, kv_transfer_params=params | {"do_remote_decode": True}
        ).kv_transfer_params
        # Of what P lacks, and of what D has: all but the question of 40 tokens.
        moved = external_tokens(both.prefill) - before
        assert moved <= params["remote_num_tokens"] <= (len(history) - 40 if turn else 0)
        answer = complete(both.decode.url, history, 16, kv_transfer_params=ticket).tokens
        assert answer == alone(both.prefill, history)
        history += answer
    assert both.idle()


def test_a_server_that_has_computed_nothing_borrows_all_that_the_other_has(both):
    draw = random.Random(14)
    model = tiny_model()
    prompt = [draw.randrange(8, model.vocab_size) for _ in range(700)]
    expected = alone(both.prefill, prompt)
    assert complete(both.decode.url, prompt, 16).tokens == expected
    params = complete(both.decode.url, prompt, 1, kv_transfer_params=ONLY_CACHED).kv_transfer_params
    assert params is not None
    assert params["remote_num_tokens"] == 640
    before = external_tokens(both.prefill)
    assert complete(both.prefill.url, prompt, 16, kv_transfer_params=params).tokens == expected
    assert external_tokens(both.prefill) - before == 640
    assert both.idle()


class Heard:
    """What a server has told of its cache, heard beside the router."""

    def __init__(self, server):
        events, replay = (f"tcp://127.0.0.1:{port}" for port in server.options.kv_events)
        self.block_size = server.options.block_size
        self.blocks = CachedBlocks()
        self._listener = CacheEventSubscriber(events, replay_endpoint=replay)

    def has(self, tokens):
        """Whether it has told of every full block of ``tokens``."""
        while (received := self._listener.receive(0.1)) is not None:
            self.blocks.apply(received)
        return self.blocks.held(Prompt(tokens)) == len(tokens) // self.block_size * self.block_size

    def close(self):
        self._listener.close()


@pytest.fixture
def heard(both):
    listeners = {"p0": Heard(both.prefill), "d0": Heard(both.decode)}
    yield listeners
    for listener in listeners.values():
        listener.close()


@pytest.fixture(params=[512, 0], ids=["a short rest directly", "over both"])
def routed(request, both, start_router, tmp_path):
    """The URL of a router that hears what both servers have."""
    file = tmp_path / "engines.toml"
    file.write_text(engines_file([both.prefill], [both.decode]))
    arguments = ["--engines", str(file), "--tokenizer", str(tiny_model().folder), "--explain"]
    with start_router(None, *arguments, "--direct-tokens", str(request.param)) as url:
        yield url


def test_a_router_sends_a_conversation_to_who_has_its_beginning(both, routed, heard):
    draw = random.Random(routed)
    model = tiny_model()
    history, routes = [], []

    def drawn(count):
        return [draw.randrange(8, model.vocab_size) for _ in range(count)]

    with httpx.Client(base_url=routed, timeout=WAIT_S, trust_env=False) as client:

        def wait_for_news(engine, tokens):
            """Until the router, too, knows all that the engine has told: nothing is evicted."""
            until(lambda: heard[engine].has(tokens), WAIT_S)
            series = f'kvferry_router_prefix_blocks{{engine="{engine}"'
            known = f"{float(len(heard[engine].blocks))}"

            def is_known():
                lines = client.get("/metrics").text.splitlines()
                return any(line.startswith(series) and line.split()[-1] == known for line in lines)

            until(is_known, WAIT_S)

        for engine, server in (("p0", both.prefill), ("d0", both.decode)):
            prompt = drawn(200)
            complete(server.url, prompt, 1)
            wait_for_news(engine, prompt)
        for turn in range(TURNS):
            history += drawn(400 if turn == 0 else 60)
            body = {
                "model": "model",
                "prompt": history,
                "max_tokens": 100,
                "temperature": 0.0,
                "ignore_eos": True,
                "return_token_ids": True,
            }
            response = client.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            (choice,) = response.json()["choices"]
            expected = complete(both.prefill.url, history, 100, cache_salt=uuid.uuid4().hex).tokens
            assert choice["token_ids"] == expected
            route = dict(
                part.split("=") for part in response.headers["x-kvferry-route"].split("; ")
            )
            routes.append(route)
            if route["prefill"] != "-":
                wait_for_news("p0", history)
            history += expected
            wait_for_news("d0", history[:-1])
    assert int(routes[0]["cached"]) == 0
    assert all(int(route["cached"]) >= 256 for route in routes[1:])
    assert both.idle()
