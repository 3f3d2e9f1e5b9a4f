"""A decode server of vLLM that cannot render a chat answers with the prefill server's tokens."""

from pathlib import Path

import pytest

from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.pair import Pair, Shape, pair_options
from benchmarks.vllm_servers.server import ServerOptions
from tests.vllm_servers.test_answers import (
    CASES,
    CHATS,
    OPTIONS,
    PARTS,
    TEMPLATE,
    ask,
    body_of,
    differences,
    model,
)

__all__ = ["model"]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
RAISES = "{{ raise_exception('this server renders no chat') }}"
CHANGED = {"chat with its text", "chat with two answers", "chat that is too long"}
"""Chats that the decode server must render."""
NAMES = sorted({name for name, (path, _) in CASES.items() if path == CHATS} - CHANGED)


@pytest.fixture(scope="module")
def servers(model, start, tmp_path_factory):
    """A lone server, and a pair whose decode server has a template that raises."""
    folder = tmp_path_factory.mktemp("templates")
    shapes = []
    for name, text in (("good", TEMPLATE), ("raises", RAISES)):
        template = folder / name
        template.write_text(text)
        shapes.append(Shape(64, arguments=(*OPTIONS, "--chat-template", str(template))))
    path = (Path(__file__).parent / "absent",)
    prefill, decode = shapes
    pair = pair_options(model, prefill, decode, KVFerry(), path=path)
    lone = ServerOptions(
        name="lone", model=model, block_size=64, arguments=prefill.arguments, path=path
    )
    with start([lone, *pair]) as (alone, *both):
        yield alone, Pair(*both)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_chat_of_text_is_rendered_by_the_prefill_server_alone(
    servers, start_router, request, name, stream
):
    lone, pair = servers
    path, wanted = CASES[name]
    body = body_of(path, wanted, f"{request.node.name}: six times seven?", stream=stream)
    with start_router(pair) as url:
        assert differences(ask(lone.url, path, body), ask(url, path, body)) == {}


def test_the_decode_server_cannot_render_a_chat(servers, start_router):
    """Else the other tests would show nothing."""
    _, pair = servers
    body = body_of(CHATS, {"echo": True, "messages": PARTS}, "", stream=False)
    with start_router(pair) as url:
        answer = ask(url, CHATS, body)
    assert answer.status_code == 400
    assert "this server renders no chat" in answer.text
