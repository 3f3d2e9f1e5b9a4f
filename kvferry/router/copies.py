"""The prefill engine's copy of a body in the client's own words.

The prefill engine computes the prompt and samples a single token, which does not count. So its copy
asks for one token, no stream, and no log probabilities of the prompt. All other fields stay as the
client wrote them, the log probabilities of the answer too: for one token these cost little, and
other fields need them (``logprob_token_ids``).

A server that refuses the client's body must refuse the copy too, or the prompt would be computed
for nothing. So there is a copy only if the fields that the router changes are valid, alone and
together. Any other body goes to a decode engine alone, which says in its own words what is wrong.

Some rules need the server: the number of prompt tokens plus ``max_tokens`` beside the longest
sequence, ``min_tokens`` beside the server's own default of ``max_tokens``, and the server's limit
for log probabilities of the prompt. A body that breaks one of these is computed by the prefill
engine, and refused by the decode engine.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from kvferry.decoding import UNDECODED

_DEFAULT_MAX_TOKENS = 16
"""``max_tokens`` of a completion without this field. Releases of vLLM differ in the meaning of
``null``: 16, or as many tokens as there is room for."""


_RENDERED = (
    "echo",
    "return_prompt_text",
    "return_token_offsets",
    "truncate_prompt_tokens",
    "chat_template",
)
"""Fields for which a server needs the text of a chat, or judges it."""

_OF_PROMPT = ("prompt_logprobs", "prompt_logprob_token_ids")
"""Sampling parameters with which an answer has log probabilities of the prompt."""


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    """A part of a message that has only text."""

    type: Literal["text"]
    text: str


class _Message(msgspec.Struct):
    """A message of a chat that has only text."""

    role: str
    content: str | list[_Text] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Changed(msgspec.Struct):
    """The fields of a body that a copy changes, with the types that JSON has for them."""

    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    prompt_logprobs: Annotated[int, Meta(ge=-1)] | None = None
    echo: bool | None = None
    truncate_prompt_tokens: int | None = None
    use_beam_search: bool | None = None


class _Typed(msgspec.Struct):
    """A choice of a tool, or of a way to think."""

    type: str = ""
    budget_tokens: int = 0


class _ChangedMessages(msgspec.Struct):
    """The fields of Anthropic's body that decide on its copy."""

    max_tokens: Annotated[int, Meta(ge=1)]
    stream: bool | None = None
    thinking: _Typed | None = None
    tool_choice: _Typed | None = None


class _ClientsTool(msgspec.Struct):
    """A tool that the client runs."""

    type: Literal["function", "custom"]


class _WithTools(msgspec.Struct):
    """A body of the Responses API of which the server runs no tool."""

    tools: list[_ClientsTool] | None = None


class _ChangedResponses(_WithTools):
    """The fields of a body of the Responses API that decide on its copy."""

    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    request_id: str = ""
    previous_response_id: None = None
    truncation: Literal["disabled"] | None = None


def text_copy(body: Mapping[str, Any], *, is_chat: bool) -> dict[str, Any] | None:
    """The copy of a completion or a chat.

    Returns:
        ``None`` if a decode engine should get the body alone: servers refuse the body, or sample no
        token, or search with beams, for which servers lend no KV; or they cut the prompt to a
        length that depends on the number of new tokens.

    >>> text_copy({"prompt": "a", "max_tokens": 9, "min_tokens": 3}, is_chat=False)
    {'prompt': 'a', 'max_tokens': 1, 'min_tokens': 1, 'stream': False}
    >>> text_copy({"prompt": "a", "max_tokens": 9, "min_tokens": 10}, is_chat=False)
    >>> text_copy({"messages": [], "truncate_prompt_tokens": -1}, is_chat=True)
    """
    try:
        wanted = msgspec.convert(body, _Changed)
    except msgspec.ValidationError:
        return None
    most = most_new_tokens(body) if is_chat else wanted.max_tokens
    if most is None and not is_chat:
        most = _DEFAULT_MAX_TOKENS
    if most is not None and (most < 1 or most < (wanted.min_tokens or 0)):
        return None
    # An object without fields is allowed without a stream.
    if body.get("stream_options") if not wanted.stream else wanted.prompt_logprobs:
        return None
    if wanted.use_beam_search or wanted.truncate_prompt_tokens == -1:
        return None
    left_out = ("stream_options", "prompt_logprobs")
    copy = {name: value for name, value in body.items() if name not in left_out}
    copy |= {"max_tokens": 1, "stream": False}
    if "max_completion_tokens" in body:
        copy["max_completion_tokens"] = 1
    if wanted.min_tokens:
        # The first token may count: it may not be the end where the client forbids that.
        copy["min_tokens"] = 1
    if wanted.echo:
        copy["echo"] = False  # it would bring the log probabilities of the prompt
    return copy


def tokens_copy(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The copy of a body that has token ids, with the fields of a completion in an object of their
    own.

    Returns:
        ``None`` if a decode engine should get the body alone, as in :func:`text_copy`; or if it
        must look at the prompt: for log probabilities, or for media that a server may keep.

    >>> tokens_copy({"token_ids": [1, 2], "sampling_params": {"max_tokens": 9, "min_tokens": 3}})
    {'token_ids': [1, 2], 'sampling_params': {'max_tokens': 1, 'min_tokens': 1}, 'stream': False}
    """
    sampling = body.get("sampling_params")
    if not isinstance(sampling, dict) or body.get("features") is not None:
        return None
    if any(sampling.get(name) is not None for name in _OF_PROMPT):
        return None
    copy = text_copy({**sampling, "stream": body.get("stream")}, is_chat=False)
    if copy is None:
        return None
    del copy["stream"]
    return {**body, "sampling_params": copy, "stream": False}


def messages_copy(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The copy of a body of Anthropic's Messages API.

    Returns:
        ``None`` if a decode engine should get the body alone: servers refuse the body; or it names
        the tool to call. Then a server reads all that it samples as the JSON of the arguments, and
        fails if that is a single token.

    >>> messages_copy({"messages": [], "max_tokens": 9})
    {'messages': [], 'max_tokens': 1, 'stream': False}
    >>> messages_copy({"messages": [], "max_tokens": 9, "tool_choice": {"type": "tool"}})
    """
    try:
        wanted = msgspec.convert(body, _ChangedMessages)
    except msgspec.ValidationError:
        return None
    thinking, choice = wanted.thinking or _Typed(), wanted.tool_choice or _Typed()
    is_too_long = thinking.type == "enabled" and thinking.budget_tokens >= wanted.max_tokens
    if is_too_long or choice.type == "tool":
        return None
    return {**body, "max_tokens": 1, "stream": False}


def responses_copy(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """The copy of a body of OpenAI's Responses API. It has an id of its own, as servers make the
    engine's id of this field.

    Returns:
        ``None`` if a decode engine should get the body alone: servers refuse the body; or the
        answer belongs to the server that keeps it (``background``, ``previous_response_id``); or
        the server itself runs a tool, so it computes several prompts; or the prompt depends on the
        number of new tokens (``truncation``).

    >>> responses_copy({"input": "a", "request_id": "b"})
    {'input': 'a', 'max_output_tokens': 1, 'store': False, 'background': False, 'stream': False}
    >>> responses_copy({"input": "a", "tools": [{"type": "mcp"}]})
    """
    try:
        wanted = msgspec.convert(body, _ChangedResponses)
    except msgspec.ValidationError:
        return None
    if wanted.background:
        return None
    kept = {name: value for name, value in body.items() if name != "request_id"}
    return {**kept, "max_output_tokens": 1, "store": False, "background": False, "stream": False}


def runs_tools(body: bytes) -> bool:
    """Whether a server that gets this body of the Responses API may run a tool itself.

    >>> runs_tools(b'{"input": "a", "tools": [{"type": "function"}]}')
    False
    >>> runs_tools(b'{"input": "a", "tools": [{"type": "mcp"}]}')
    True
    """
    try:
        msgspec.json.decode(body, type=_WithTools)
    except UNDECODED:
        return True
    return False


def has_text_alone(chat: Mapping[str, Any]) -> bool:
    """Whether the token ids of its prompt can stand for a chat. If so, a vLLM decode server that
    gets them renders no template, and no tokenizer runs a second time.

    vLLM's servers before 0.32 take the token ids whatever the chat is. So this is the only check:
    images and other media would be lost.

    >>> chat = {"messages": [{"role": "user", "content": "a"}]}
    >>> has_text_alone(chat)
    True
    >>> has_text_alone(chat | {"echo": True})
    False
    """
    if any(chat.get(name) for name in _RENDERED):
        return False
    try:
        msgspec.convert(chat.get("messages"), list[_Message])
    except msgspec.ValidationError:
        return False
    return True


def most_new_tokens(chat: Mapping[str, Any]) -> int | None:
    """Maximum number of tokens that a valid chat asks for; ``None`` if it leaves it to the
    server.
    """
    most: int | None = chat.get("max_completion_tokens")
    return chat.get("max_tokens") if most is None else most
