"""Real vLLM servers of unequal blocks that get a request at once: decode reads the prompt while
prefill computes it, in chunks."""

import http.client
import json
import random
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from benchmarks.vllm_servers.client import RefusalError, complete, stream
from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import hybrid_model, tiny_model
from benchmarks.vllm_servers.pair import Shape
from kvferry.control.client import asking_client, fetch_status
from kvferry.control.tickets import TransferId
from kvferry.observe.timeline import gather
from kvferry.testing.waiting import WAIT_S, until

pytestmark = pytest.mark.slow

KEY = "a key of the whole cluster"
CHUNK = ("--max-num-batched-tokens", "128")
LENGTHS = (5, 127, 129, 300, 1000, 1900)
PLUGIN = Path(__file__).parent / "plugin"
CASES = {
    "now": (tiny_model, Shape(64, arguments=CHUNK), Shape(128), "now"),
    "late": (tiny_model, Shape(64, arguments=CHUNK), Shape(128), "late"),
    "off": (tiny_model, Shape(64, arguments=CHUNK), Shape(128), "off"),
    "now, pp 2 to tp 2": (
        tiny_model,
        Shape(64, pp=2, arguments=CHUNK),
        Shape(128, tp=2),
        "now",
    ),
    "now, hybrid": (hybrid_model, Shape(64, arguments=CHUNK), Shape(128), "now"),
    "now, tp 2, scheduled ahead": (
        tiny_model,
        Shape(64, tp=2, arguments=CHUNK),
        Shape(128),
        "now",
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def model(case):
    return CASES[case][0]()


@pytest.fixture(scope="module")
def pair(case, model, start_pair):
    _, prefill, decode, mode = CASES[case]
    kind = Ahead if case.endswith("scheduled ahead") else KVFerry
    connector = kind(extra={"cluster_key": KEY, "early_load": mode})
    with start_pair(model, prefill, decode, connector, path=(PLUGIN,)) as pair:
        yield pair


class Ahead(KVFerry):
    """In servers that schedule asynchronously."""

    def environment(self):
        return {"SCHEDULE_AHEAD": "1"}


@pytest.fixture
def clients():
    with ThreadPoolExecutor(8) as clients:
        yield clients


@pytest.fixture
def prompt_of(model, request):
    """``prompt_of(length)``: random tokens, other ones in every test."""
    draw = random.Random(request.node.name)
    return lambda length: [draw.randrange(8, model.vocab_size) for _ in range(length)]


def control(server):
    return f"127.0.0.1:{server.options.transfer['kv_port']}"


def send(pair, prompt, clients, request_id=None):
    """The request at both servers; the futures of their answers."""
    transfer = TransferId.begin(control(pair.prefill), KEY.encode()).text
    lent = {"do_remote_decode": True, "do_remote_prefill": False, "transfer": transfer}
    loaded = {"do_remote_prefill": True, "transfer": transfer}
    ask = {"request_id": request_id, "timeout_s": WAIT_S}
    return (
        clients.submit(complete, pair.prefill.url, prompt, 1, kv_transfer_params=lent, **ask),
        clients.submit(complete, pair.decode.url, prompt, 16, kv_transfer_params=loaded, **ask),
    )


def answers(pair, prompt, clients, request_id=None):
    both = send(pair, prompt, clients, request_id)
    _, answer = [future.result(WAIT_S) for future in both]
    return answer.tokens


def spans(pair, request_id):
    """When prefill computed a prompt, and when decode's ranks read it: each from and to."""
    with asking_client("test", WAIT_S) as client:
        told = gather(client, [control(pair.prefill), control(pair.decode)], request_id)
    parts = [part for engine in told for request in engine.requests for part in request.parts]
    found = {}
    for name in ("prefill", "read"):
        times = [(part.started, part.started + part.seconds) for part in parts if part.name == name]
        found[name] = min(first for first, _ in times), max(last for _, last in times)
    return found["prefill"], found["read"]


def test_the_tokens_of_a_single_server_come_out_and_the_prompt_from_outside(
    case, pair, model, reference, prompt_of, clients
):
    for length in LENGTHS:
        prompt = prompt_of(length)
        before = pair.external_tokens()
        assert answers(pair, prompt, clients) == reference.tokens(model, prompt), length
        assert pair.external_tokens() - before == length - 1
    assert pair.idle()
    for server in (pair.prefill, pair.decode):
        is_ahead = "its tokens are taken when they are needed" in server.log.read_text()
        assert is_ahead == case.endswith("scheduled ahead")


def test_the_prompt_is_read_while_it_is_computed(case, pair, prompt_of, clients):
    """A machine may be so busy that decode asks too late, so it is tried until it is seen."""
    if CASES[case][3] != "now":
        pytest.skip("only with `now` is it sure to begin early")
    for _ in range(200):
        request_id = uuid.uuid4().hex
        answers(pair, prompt_of(1900), clients, request_id)
        computed, read = spans(pair, request_id)
        if read[0] < sum(computed) / 2:
            return
    raise AssertionError("no load began in the first half of its prefill")


def status(server):
    return fetch_status("127.0.0.1", server.options.transfer["kv_port"], timeout_s=WAIT_S)


def ask_and_leave(pair, prompt, transfer, answer):
    """A client asks prefill, and goes away once there is a lease, or decode has answered."""
    lent = {"do_remote_decode": True, "do_remote_prefill": False, "transfer": transfer}
    body = {"model": "model", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": lent}
    url = httpx.URL(pair.prefill.url)
    client = http.client.HTTPConnection(url.host, url.port, timeout=WAIT_S)
    try:
        headers = {"content-type": "application/json"}
        client.request("POST", "/v1/completions", json.dumps(body), headers)
        until(lambda: answer.done() or status(pair.prefill).leases, WAIT_S)
    finally:
        client.close()


def test_a_prompt_that_is_aborted_fails_its_load_or_is_computed_by_decode(
    case, pair, model, reference, prompt_of, clients
):
    if case != "now":
        pytest.skip("one pair will do")
    for _ in range(200):
        prompt = prompt_of(1900)
        transfer = TransferId.begin(control(pair.prefill), KEY.encode()).text
        loaded = {"do_remote_prefill": True, "transfer": transfer}
        answer = clients.submit(
            complete, pair.decode.url, prompt, 16, kv_transfer_params=loaded, timeout_s=WAIT_S
        )
        ask_and_leave(pair, prompt, transfer, answer)
        error = answer.exception(WAIT_S)
        if error is not None:
            assert isinstance(error, RefusalError)
            assert error.status == httpx.codes.INTERNAL_SERVER_ERROR
            break
        assert answer.result().tokens == reference.tokens(model, prompt)
    else:
        raise AssertionError("no prompt was aborted while decode loaded it")
    assert status(pair.prefill).counters["leases.revoked"]
    assert pair.idle(WAIT_S)
    prompt = prompt_of(700)
    assert answers(pair, prompt, clients) == reference.tokens(model, prompt)


def test_many_at_once(pair, model, reference, prompt_of, clients):
    prompts = [prompt_of(length) for length in (40, 700, 1300, 90, 500, 1700, 260, 1100)]
    expected = [reference.tokens(model, prompt) for prompt in prompts]
    both = [send(pair, prompt, clients) for prompt in prompts[:4]]
    found = [answer.result(WAIT_S).tokens for _, answer in both]
    both = [send(pair, prompt, clients) for prompt in prompts[4:]]
    found += [answer.result(WAIT_S).tokens for _, answer in both]
    assert found == expected
    assert pair.idle()


@pytest.mark.parametrize("passes_through", [False, True])
def test_behind_our_router(
    pair, model, reference, prompt_of, start_router, clients, tmp_path, passes_through
):
    key = tmp_path / "cluster.key"
    key.write_text(KEY)
    arguments = [
        "--at-once",
        "always",
        "--cluster-key-file",
        str(key),
    ]
    if not passes_through:
        arguments += ["--tokenizer", str(model.folder)]
    for server in (pair.prefill, pair.decode):
        arguments += ["--control", control(server)]
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [reference.tokens(model, prompt) for prompt in prompts]
    with start_router(pair, *arguments) as url:
        before = pair.external_tokens()
        asked = [clients.submit(complete, url, prompt, 16) for prompt in prompts]
        assert [answer.result(WAIT_S).tokens for answer in asked] == expected
        asked = [clients.submit(stream, url, prompt, 16) for prompt in prompts]
        assert [answer.result(WAIT_S)[1] for answer in asked] == expected
    # Decode computed nothing but last tokens, each time.
    assert pair.external_tokens() - before >= sum(len(prompt) - 1 for prompt in prompts)
    assert pair.idle()
