"""Answers through the router, field by field beside those of a lone server.

The servers have a chat template of their own, a reasoning parser and a tool parser. A random model
thinks and calls tools because structured output leaves it no other words.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.vllm_servers.connectors import KVFerry
from benchmarks.vllm_servers.models import Model, tiny_model
from benchmarks.vllm_servers.pair import Pair, Shape, pair_options
from benchmarks.vllm_servers.server import ServerOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
KEY = "of one test run alone"
SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>")
FIRST_SPECIAL = 257
TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"
GRAMMARS = {"backend": "xgrammar", "enable_in_reasoning": True, "disable_any_whitespace": True}
OPTIONS = (
    # DeepSeek R1's parser, which a request can turn off.
    *("--reasoning-parser", "holo2"),
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--structured-outputs-config", json.dumps(GRAMMARS)),
    *("--enable-prompt-tokens-details", "--enable-scale-out"),
)
ROUTERS = {
    "in turn": ("never", False),
    "in turn, with a tokenizer": ("never", True),
    "at once": ("always", False),
    "at once, with a tokenizer": ("always", True),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model; four of its tokens have the names that the parsers look for."""
    folder = tmp_path_factory.mktemp("model") / "thinks"
    shutil.copytree(tiny_model().folder, folder)
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_text()
    for place, name in enumerate(SPECIAL, FIRST_SPECIAL):
        text = text.replace(f'"<{place}>"', f'"{name}"')
    tokenizer.write_text(text)
    return Model("thinks", folder, tiny_model().vocab_size)


@pytest.fixture(scope="module")
def servers(model, start, tmp_path_factory):
    """A lone server, and a pair."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text(TEMPLATE)
    arguments = (*OPTIONS, "--chat-template", str(template))
    path = (Path(__file__).parent / "absent",)
    connector = KVFerry(extra={"cluster_key": KEY})
    shape = Shape(64, arguments=arguments)
    pair = pair_options(model, shape, shape, connector, path=path)
    lone = ServerOptions(name="lone", model=model, block_size=64, arguments=arguments, path=path)
    with start([lone, *pair]) as (alone, *both):
        yield alone, Pair(*both)


@pytest.fixture(scope="module", params=ROUTERS.values(), ids=list(ROUTERS))
def urls(request, servers, model, start_router, tmp_path_factory):
    """Those of the lone server and of the router."""
    lone, pair = servers
    at_once, takes_apart = request.param
    arguments = ["--at-once", at_once, *(("--tokenizer", str(model.folder)) if takes_apart else ())]
    if at_once != "never":
        key = tmp_path_factory.mktemp("key") / "cluster.key"
        key.write_text(KEY)
        arguments += ["--cluster-key-file", str(key)]
        for server in (pair.prefill, pair.decode):
            arguments += ["--control", f"127.0.0.1:{server.options.transfer['kv_port']}"]
    with start_router(pair, *arguments) as url:
        yield lone.url, url


# ---- what is asked -------------------------------------------------------------------------------

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES, GENERATE = "/v1/responses", "/v1/messages", "/inference/v1/generate"
COUNTED = "/v1/messages/count_tokens"
LIKELY = {str(FIRST_SPECIAL + place): 50 for place in range(len(SPECIAL))}
THINKS = "<think>[a-z]{4,8}</think>"
CALL = r'<tool_call>\{"name": "look", "arguments": \{"x": [0-9]\}\}</tool_call>'
SCHEMA = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["x"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
RESPONSE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def words(regex):
    """What makes the model say something of this form."""
    return {"structured_outputs": {"regex": regex}, "logit_bias": LIKELY, "max_tokens": 90}


PARTS = [{"role": "user", "content": [{"type": "text", "text": part} for part in ("Six", "7?")]}]
GOES_ON = [{"role": "user", "content": "Six times 7?"}, {"role": "assistant", "content": "It is"}]
NO_ANSWER_BEGINS = {"continue_final_message": True, "add_generation_prompt": False}

SILENT = {"chat_template_kwargs": {"thinking": False}}
MESSAGE_TOOL = {"name": "look", "input_schema": SCHEMA, "strict": True}
MESSAGE_TOOLS = {"tools": [MESSAGE_TOOL], "max_tokens": 90, **SILENT}
RESPONSE_TOOLS = {"tools": [{"type": "function", "name": "look", "parameters": SCHEMA}]}
GREEDY = {"temperature": 0, "max_tokens": 12}


def response_words(regex):
    """The same as :func:`words`, for a response."""
    said = words(regex)
    return {"max_output_tokens": said.pop("max_tokens"), **said}


TURNS = [
    {"role": "user", "content": "Look!"},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Where?", "signature": "a"},
            {"type": "tool_use", "id": "a", "name": "look", "input": {"x": 1}},
        ],
    },
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "7"}]},
]
AGENTS = {
    "responses": (RESPONSES, {"max_output_tokens": 8, "instructions": "Count."}),
    "responses that think": (RESPONSES, response_words(f"{THINKS}[0-9]{{2}}")),
    "responses that call a tool": (RESPONSES, {**RESPONSE_TOOLS, **response_words(THINKS + CALL)}),
    "responses that must call a tool": (
        RESPONSES,
        {**RESPONSE_TOOLS, "tool_choice": "required", "max_output_tokens": 90, **SILENT},
    ),
    "responses that must call this tool": (
        RESPONSES,
        {
            **RESPONSE_TOOLS,
            "tool_choice": {"type": "function", "name": "look"},
            "max_output_tokens": 90,
            **SILENT,
        },
    ),
    "responses of a schema": (
        RESPONSES,
        {
            "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}},
            "max_output_tokens": 60,
            **SILENT,
        },
    ),
    "responses with log probabilities": (
        RESPONSES,
        {
            "include": ["message.output_text.logprobs"],
            "top_logprobs": 2,
            "max_output_tokens": 8,
            **SILENT,
        },
    ),
    "messages": (MESSAGES, {"system": "Count."}),
    "messages that do not think": (MESSAGES, {"thinking": {"type": "disabled"}, **SILENT}),
    "messages after a tool": (MESSAGES, {"messages": TURNS, "thinking": {"type": "adaptive"}}),
    "messages that must call a tool": (
        MESSAGES,
        {**MESSAGE_TOOLS, "tool_choice": {"type": "any"}},
    ),
    "messages that must call this tool": (
        MESSAGES,
        {**MESSAGE_TOOLS, "tool_choice": {"type": "tool", "name": "look"}},
    ),
    "messages of a schema": (
        MESSAGES,
        {
            "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
            "max_tokens": 60,
            **SILENT,
        },
    ),
    "tokens": (GENERATE, {}),
    "tokens of text": (GENERATE, {"output_mode": "text", "return_token_ids": True}),
    "tokens with log probabilities": (
        GENERATE,
        {"sampling_params": {**GREEDY, "logprobs": 2, "min_tokens": 5}},
    ),
    "messages that are too long": (MESSAGES, {"max_tokens": 4000}),
    "messages of no role": (MESSAGES, {"messages": [{"content": "?"}]}),
    "responses of another model": (RESPONSES, {"model": "unknown"}),
    "tokens that are too few": (GENERATE, {"token_ids": []}),
}
CASES = {
    "text": (COMPLETIONS, {}),
    "token ids": (COMPLETIONS, {"return_token_ids": True}),
    "one token": (COMPLETIONS, {"max_tokens": 1}),
    "two prompts": (COMPLETIONS, {"prompt": ["One", "Another"]}),
    "two answers": (COMPLETIONS, {"n": 2, "seed": 3, "temperature": 1.0}),
    "log probabilities": (COMPLETIONS, {"logprobs": 2}),
    "a stop string": (COMPLETIONS, {"stop": ["7", "<3"], "max_tokens": 40}),
    "broken characters": (COMPLETIONS, {"logit_bias": {str(i): 30 for i in range(128, 256)}}),
    "too long": (COMPLETIONS, {"max_tokens": 4000}),
    "another model": (COMPLETIONS, {"model": "unknown"}),
    "two greedy answers": (COMPLETIONS, {"n": 2}),
    "chat": (CHATS, {}),
    "chat in parts": (CHATS, {"messages": PARTS}),
    "chat with token ids": (CHATS, {"return_token_ids": True}),
    "chat with its text": (CHATS, {"echo": True, "messages": GOES_ON, **NO_ANSWER_BEGINS}),
    "chat that is too long": (CHATS, {"max_tokens": 4000}),
    "chat with two answers": (CHATS, {"n": 2, "seed": 5, "temperature": 1.0}),
    "chat with log probabilities": (CHATS, {"logprobs": True, "top_logprobs": 2}),
    "chat that thinks": (CHATS, words(f"{THINKS}[0-9]{{2}}")),
    "chat that calls a tool": (CHATS, {"tools": TOOLS, **words(THINKS + CALL)}),
    "chat of a schema": (CHATS, {"response_format": RESPONSE_FORMAT, "max_tokens": 60}),
    **AGENTS,
    "tokenize": ("/tokenize", {}),
    "tokens counted": (COUNTED, {"model": "model"}),
    "models": ("/v1/models", None),
    "version": ("/version", None),
}
NO_STREAMS = {
    "too long",
    "chat that is too long",
    "another model",
    "two greedy answers",
    "messages that are too long",
    "messages of no role",
    "responses of another model",
    "tokens that are too few",
    "tokenize",
    "tokens counted",
}
ALONE = {"messages that must call this tool"}
"""Those whose prompt the decode server computes."""
STREAMS = [name for name, (_, body) in CASES.items() if body is not None and name not in NO_STREAMS]
FORMS = [(name, False) for name in CASES] + [(name, True) for name in STREAMS]


def body_of(path, body, text, *, stream):
    """A request; ``text`` is another one for each, so that nothing of it is cached anywhere."""
    chat = {"messages": [{"role": "user", "content": text}]}
    limits = {"max_tokens": 12, "temperature": 0}
    asked = {
        COMPLETIONS: {"prompt": text, **limits},
        "/tokenize": {"prompt": text},
        COUNTED: chat,
        RESPONSES: {"input": text, "temperature": 0, "max_output_tokens": 12},
        MESSAGES: {"model": "model", **chat, **limits},
        GENERATE: {"token_ids": [*text.encode()], "sampling_params": GREEDY},
    }.get(path, {**chat, **limits})
    if path not in ("/tokenize", COUNTED):
        asked["stream"] = stream
    if stream and path in (COMPLETIONS, CHATS, GENERATE):
        asked["stream_options"] = {"include_usage": True}
    return asked | body


def unlike_others(request):
    """A text of the test that begins unlike those of all others, so that nothing is cached."""
    return request.node.name[::-1]


# ---- what is compared ----------------------------------------------------------------------------

CHANGES = frozenset(
    {
        *("id", "item_id", "call_id", "request_id", "created", "created_at"),
        *("signature", "system_fingerprint"),
    }
)
"""Fields that differ between any two answers, or servers of unlike options."""


def masked(told):
    """A value without what differs; whether it is there stays."""
    if isinstance(told, dict):
        return {
            name: "?" if name in CHANGES and value is not None else masked(value)
            for name, value in told.items()
        }
    return [masked(each) for each in told] if isinstance(told, list) else told


def fields(told, at=""):
    """Names of all fields, each with those that it lies in."""
    if isinstance(told, dict):
        for name, value in told.items():
            yield f"{at}.{name}"
            yield from fields(value, f"{at}.{name}")
    if isinstance(told, list):
        for each in told:
            yield from fields(each, at)


def pieces(told, at=""):
    """All values, each with its place; pieces of a text are joined wherever a server ends them."""
    if isinstance(told, dict):
        at += f"[{told['index']}]" if "index" in told else ""
        for name, value in told.items():
            yield from pieces(value, f"{at}.{name}")
    elif isinstance(told, list):
        for each in told:
            yield from pieces(each, at)
    elif told is not None:
        yield at, told


PIECES = (".text", ".content", ".reasoning", ".arguments", ".thinking", ".delta", "_reason")
"""Fields of which each event has a piece."""


def stream_of(text):
    """What events say together: their fields, and what each place of them gained."""
    events = [json.loads(line[5:]) for line in text.splitlines() if line.startswith("data: {")]
    kinds = {event.get("type", "") for event in events}
    gained: dict[Any, Any] = {}
    for event in map(masked, events):
        for place, value in pieces(event, event.get("type", "")):
            if isinstance(value, str) and place.endswith(PIECES):
                gained[place] = gained.get(place, "") + value
    # Servers leave the token out only if it comes alone: a busy server sends two tokens at once.
    texts = [(place, text.removeprefix("<think>")) for place, text in gained.items()]
    return {
        "kinds": kinds,
        "fields": set(fields(events)),
        "texts": texts,
        "usage": [masked(event["usage"]) for event in events if event.get("usage")][-1:],
        "ends": text.rstrip().endswith("data: [DONE]"),
    }


def ask(url, path, body):
    if body is None:
        return httpx.get(f"{url}{path}", timeout=60, trust_env=False)
    return httpx.post(f"{url}{path}", json=body, timeout=60, trust_env=False)


def whole_of(told):
    """The fields of an answer, and all that they hold."""
    return {"fields": set(fields(told)), "values": list(pieces(masked(told)))}


def said(answer):
    """All of an answer that must be equal."""
    kind = answer.headers["content-type"]
    is_stream = kind.startswith("text/event-stream")
    told = stream_of(answer.text) if is_stream else whole_of(answer.json())
    return {"status": answer.status_code, "kind": kind, **told}


def differences(lone, ours):
    """What the two do not say alike."""
    told, expected = said(ours), said(lone)
    found = {}
    for name in told.keys() | expected.keys():
        one, other = expected.get(name), told.get(name)
        if one != other and isinstance(one, set | list) and isinstance(other, set | list):
            one, other = [v for v in one if v not in other], [v for v in other if v not in one]
        if one != other:
            found[name] = {"lone": one, "router": other}
    return found


@pytest.mark.parametrize(("name", "stream"), FORMS)
def test_an_answer_has_the_fields_and_the_text_of_a_lone_servers(urls, request, name, stream):
    path, wanted = CASES[name]
    text = f"{unlike_others(request)}: what is six times seven?"
    body = None if wanted is None else body_of(path, wanted, text, stream=stream)
    lone, ours = (ask(url, path, body) for url in urls)
    assert differences(lone, ours) == {}


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES, MESSAGES, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
def test_what_was_cached_is_told_as_by_a_lone_server(urls, request, path, stream):
    text = f"{request.node.name}: {'what is six times seven? ' * 12}"
    for more in ("", "And eight times nine? " * 5):
        body = body_of(path, {}, text + more, stream=stream)
        lone, ours = (ask(url, path, body) for url in urls)
        assert differences(lone, ours) == {}
    told = re.findall(r'"(?:cached|cache_read_input)_tokens":(\d+)', lone.text) or [0]
    assert max(map(int, told)) >= 64, "the second prompt has the first one's beginning"


@pytest.mark.parametrize("name", [name for name in AGENTS if name not in {*NO_STREAMS, *ALONE}])
@pytest.mark.parametrize("stream", [False, True])
def test_the_decode_server_loads_the_prompt(urls, servers, request, name, stream):
    """Else it would have computed the prompt itself, and the answers above would show nothing."""
    _, pair = servers
    path, wanted = CASES[name]
    text = f"{unlike_others(request)}: {'what is six times seven? ' * 12}"
    wanted = {name: value for name, value in wanted.items() if name != "messages"}
    loaded = pair.external_tokens()
    assert ask(urls[1], path, body_of(path, wanted, text, stream=stream)).status_code == 200
    assert pair.external_tokens() - loaded >= len(text) - 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_message_calls_a_tool_as_a_lone_servers_does(urls, request, stream):
    """The random model often goes on with white space, so several are asked."""
    path, wanted = CASES["messages that must call a tool"]
    told = []
    for count in range(16):
        body = body_of(path, wanted, f"{count} {unlike_others(request)}", stream=stream)
        lone, ours = (ask(url, path, body) for url in urls)
        assert differences(lone, ours) == {}
        told.append(lone.text)
    assert any('"tool_use"' in text for text in told)


def test_a_response_of_an_agents_turn_says_the_tool(servers):
    """Else the cases with tools would compare answers without any."""
    lone, _ = servers
    for name, tool in {
        "responses that call a tool": "function_call",
        "responses that must call a tool": "function_call",
        "responses that must call this tool": "function_call",
    }.items():
        path, wanted = CASES[name]
        answer = ask(lone.url, path, body_of(path, wanted, name, stream=False)).json()
        kinds = [part["type"] for part in answer["output" if path == RESPONSES else "content"]]
        assert kinds[-1] == tool, (name, answer)
    path, wanted = CASES["messages"]
    answer = ask(lone.url, path, body_of(path, wanted, "?", stream=False)).json()
    assert [part["type"] for part in answer["content"]] == ["thinking"]


def test_the_cases_think_and_call_tools(servers):
    """Else answers without either would have been compared."""
    lone, _ = servers
    for name in ("chat that thinks", "chat that calls a tool"):
        path, wanted = CASES[name]
        answer = ask(lone.url, path, body_of(path, wanted, name, stream=False)).json()
        message = answer["choices"][0]["message"]
        assert message["reasoning"].isalpha()
        assert "<" not in (message["content"] or "")
        if "tool" in name:
            assert message["tool_calls"][0]["function"]["name"] == "look"
