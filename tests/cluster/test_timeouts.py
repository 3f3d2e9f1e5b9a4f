"""Time limits of answers: until the content begins, of each silence, and of a whole answer."""

import json

import httpx
import pytest

from kvferry.router.replies import has_content
from kvferry.testing.waiting import WAIT_S, until
from tests.cluster.conftest import running_router
from tests.cluster.streams import (
    CHAT,
    COMPLETIONS,
    CONTENT,
    END,
    FRAME,
    MESSAGES,
    RESPONSES,
    Server,
    typed,
)

pytestmark = pytest.mark.processes

LONG = str(WAIT_S * 10)
SHORT_S = 0.3
PROMPT = "x" * 2100  # long enough for both servers at once
BY_TOKENS = {"prompt": "Hi", "temperature": 0, "max_tokens": 9}
BODIES = [
    (COMPLETIONS, BY_TOKENS),
    (COMPLETIONS, {"prompt": PROMPT}),
    (CHAT, {"messages": [{"role": "user", "content": PROMPT}]}),
    (MESSAGES, {"messages": []}),
    (RESPONSES, {"input": "Hi"}),
]
IDS = ["tokens", "completions", "chat", "messages", "responses"]
WAYS = {
    "in turn": (),
    "at once": ("--at-once", "always", "--control", "127.0.0.1:1", "--control", "127.0.0.1:2"),
}


@pytest.fixture(scope="module", params=WAYS)
def way(request):
    return WAYS[request.param]


class Pair:
    """One router before two servers, for all tests of its time limits."""

    def __init__(self, servers, byte_model, *options):
        self.both = [Server(), Server()]
        p, d = (servers.start(each.app()) for each in self.both)
        self.running = running_router([p], [d], "--tokenizer", str(byte_model), *options)
        self.url = self.running.__enter__()

    def ask(self, path, body, waits_after, waits_s=None):
        for each in self.both:
            each.waits_after, each.waits_s = waits_after, waits_s
        return httpx.post(self.url + path, json=body, timeout=WAIT_S, trust_env=False)

    def close(self):
        for each in self.both:
            each.goes_on.set()
        self.running.__exit__(None, None, None)


@pytest.fixture(scope="module")
def hasty(server_thread, byte_model, way):
    """Waits shortly for content, and long for all that follows."""
    options = ("--timeout", str(SHORT_S), "--idle-timeout", LONG)
    pair = Pair(server_thread, byte_model, *options, *way)
    yield pair
    pair.close()


@pytest.fixture(scope="module")
def lively(server_thread, byte_model, way):
    """Waits long for content, and shortly for all that follows."""
    options = ("--timeout", LONG, "--idle-timeout", str(SHORT_S))
    pair = Pair(server_thread, byte_model, *options, *way)
    yield pair
    pair.close()


def last_error(path, answer):
    """The error that is the answer, or that ends a stream."""
    if answer.status_code != 200:
        assert answer.status_code == 504
        return answer.json()["error"]["message"]
    *_, end = answer.content.removesuffix(b"data: [DONE]\n\n").rstrip().split(b"\n\n")
    told = json.loads(end.partition(b"data: ")[2])
    return told["message"] if path == RESPONSES else told["error"]["message"]


@pytest.mark.parametrize(("path", "body"), BODIES[1:], ids=IDS[1:])
@pytest.mark.parametrize("waits_after", ["nothing", "frame"])
def test_a_stream_without_content_in_time_names_the_limit(hasty, path, body, waits_after):
    answer = hasty.ask(path, {**body, "stream": True}, waits_after)
    # What comes before the content of a response is held back until the content is there.
    has_frame = waits_after == "frame" and path == MESSAGES
    while has_frame and answer.status_code == 504:  # the time was up before the frame
        answer = hasty.ask(path, {**body, "stream": True}, waits_after)

    assert "no answer within 0.3 s: --timeout (request_timeout_s)" in last_error(path, answer)
    assert answer.status_code == (200 if has_frame else 504)


@pytest.mark.parametrize(("path", "body"), BODIES, ids=IDS)
def test_an_answer_without_a_stream_is_limited_as_a_whole(hasty, path, body):
    answer = hasty.ask(path, body, "content")

    if body == BY_TOKENS:
        assert answer.status_code == 504
    assert "no answer within 0.3 s: --timeout (request_timeout_s)" in last_error(path, answer)


@pytest.mark.parametrize(("path", "body"), BODIES, ids=IDS)
def test_a_stream_that_has_begun_may_last_longer(hasty, path, body):
    def ask():
        """A busy machine may need the whole time until the content."""
        got = hasty.ask(path, {**body, "stream": True}, "content", waits_s=2 * SHORT_S)
        return None if b"no answer within" in got.content else got

    answer = until(ask)
    assert answer.status_code == 200
    end = b"data: [DONE]\n\n" if body == BY_TOKENS else CONTENT[path] + END[path]
    assert answer.content.endswith(end)


@pytest.mark.parametrize(("path", "body"), BODIES, ids=IDS)
def test_a_stream_that_stands_still_names_the_limit(lively, path, body):
    answer = lively.ask(path, {**body, "stream": True}, "content")

    assert answer.status_code == 200
    assert "no event for 0.3 s: --idle-timeout (idle_timeout_s)" in last_error(path, answer)


@pytest.mark.parametrize("path", FRAME)
def test_the_frame_of_an_answer_is_no_content(path):
    frame = b"".join(FRAME[path]) + b": a sign of life\n\n"

    assert not has_content(frame)
    assert not has_content(frame + CONTENT[path][:-1])
    assert has_content(frame + CONTENT[path])
    assert has_content(frame.replace(b"\n\n", b"\r\n\r\n") + CONTENT[path] + END[path])


@pytest.mark.parametrize(
    "events",
    [
        b"data: [DONE]\n\n",
        b'data: {"text": "of SGLang"}\n\n',
        typed("response.function_call_arguments.done"),
        b'data: {"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}\n\n',
        b": " + b"x" * (1 << 20),
    ],
)
def test_other_parts_of_an_answer_are_content(events):
    assert has_content(events)
