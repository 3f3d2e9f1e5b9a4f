"""OpenAI's request bodies, checked: what is served, what is ignored, what is refused.

A field that would change the answer and that we do not serve is refused with a 400 that names it,
so that nobody takes an ordinary answer for a constrained one. Fields that cannot change the
answer are ignored. Unknown fields are refused with the nearest known name.

Served by one prefill and one decode per choice: ``n`` and lists of prompts. Refused: log
probabilities, structured output, tools, penalties, ``logit_bias``, ``echo``, ``suffix``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvferry.config import parse_struct, shown
from kvferry.engine.messages import (
    MaxTokens,
    SamplingParams,
    Seed,
    StopTokenIds,
    Temperature,
    TokenId,
    TopK,
    TopP,
)
from kvferry.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)

MAX_CHOICES = 128
"""Choices (prompts times ``n``) of one request at most."""


class ApiError(Exception):
    """An error that is answered to the HTTP client in OpenAI's form."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        super().__init__(message)

    def body(self) -> dict[str, Any]:
        """OpenAI's error JSON."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code if self.code is not None else self.status,
            }
        }


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False


_Text = Annotated[str, Meta(min_length=1)]
_TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class _Common(msgspec.Struct, kw_only=True):
    """Fields of both request kinds."""

    model: Annotated[str, Meta(max_length=1024)] | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    seed: Seed | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=16)] | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool = False
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: MaxTokens | None = None
    return_token_ids: bool | None = None
    kv_transfer_params: Any = None
    """Dropped: only engines may say where KV lies."""
    # Cannot change the answer: ignored.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    # Would change the answer: refused unless neutral, see `_NEUTRAL`.
    logit_bias: Any = None
    presence_penalty: Any = None
    frequency_penalty: Any = None
    repetition_penalty: Any = None
    logprobs: Any = None
    min_p: Any = None
    min_tokens: Any = None
    best_of: Any = None
    response_format: Any = None


class CompletionRequest(_Common, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: _Text | Annotated[list[TokenId | _Text | _TokenIds], Meta(min_length=1)]
    """A string, token ids, or a list of either."""
    echo: Any = None
    suffix: Any = None


class ChatRequest(_Common, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None
    top_logprobs: Any = None
    tools: Any = None
    tool_choice: Any = None
    parallel_tool_calls: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None


_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logprobs": (False,),
    "min_p": (0,),
    "min_tokens": (0,),
    "best_of": (1,),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": ([],),
    "function_call": ("none",),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Field → values with which it changes nothing; ``None`` is always among them."""


@dataclass(frozen=True, slots=True)
class Generation:
    """What a client wants, both request kinds alike."""

    kind: str
    """``"completion"`` or ``"chat"``."""
    prompts: tuple[str | tuple[int, ...], ...]
    """Text or token ids, for a completion."""
    messages: tuple[dict[str, Any], ...]
    """The conversation, for a chat."""
    n: int
    sampling: SamplingParams
    """``max_tokens`` is 0 when the client left it open."""
    model: str | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    written: frozenset[str] = frozenset()
    """Sampling fields that the client wrote; the others have the defaults of this API."""


def parse_completion(body: Any) -> Generation:
    """Checks the body of ``/v1/completions``.

    Raises:
        ApiError: 400, with the field and what it may be.
    """
    request = _parse(CompletionRequest, body)
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    return _generation("completion", request, max_tokens, prompts=_prompts(request.prompt))


def parse_chat(body: Any) -> Generation:
    """Checks the body of ``/v1/chat/completions``.

    Raises:
        ApiError: 400, with the field and what it may be.
    """
    request = _parse(ChatRequest, body)
    max_tokens = request.max_completion_tokens or request.max_tokens
    messages = tuple(_message(message, place) for place, message in enumerate(request.messages))
    return _generation("chat", request, max_tokens, messages=messages)


def _parse(kind: type[T], body: Any) -> T:
    if not isinstance(body, Mapping):
        raise ApiError(400, f"the body must be a JSON object, not {type(body).__name__}")
    try:
        request = parse_struct(kind, body, "request")
    except ConfigError as error:
        raise ApiError(400, str(error)) from error
    for name, neutral in _NEUTRAL.items():
        value = getattr(request, name, None)
        if _is_neutral(value, neutral):
            continue
        raise ApiError(
            400, f"{name}: {shown(value)} is not supported here; leave it out", param=name
        )
    return request


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # `True == 1` in Python, yet `"logprobs": true` and `1` are different requests.
    return value is None or any(
        value == same and isinstance(value, bool) == isinstance(same, bool) for same in neutral
    )


def _generation(
    kind: str,
    request: CompletionRequest | ChatRequest,
    max_tokens: int | None,
    *,
    prompts: tuple[str | tuple[int, ...], ...] = (),
    messages: tuple[dict[str, Any], ...] = (),
) -> Generation:
    n = request.n or 1
    choices = n * max(1, len(prompts))
    if choices > MAX_CHOICES:
        raise ApiError(
            400, f"n: {n} gives {choices} choices; 1 to {MAX_CHOICES} can be asked for", param="n"
        )
    options = request.stream_options
    if options is not None and not request.stream:
        raise ApiError(400, "stream_options: needs stream to be true", param="stream_options")
    return Generation(
        kind=kind,
        prompts=prompts,
        messages=messages,
        n=n,
        sampling=_sampling(request, max_tokens or 0),
        model=request.model,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        stream=bool(request.stream),
        include_usage=options is not None and options.include_usage,
        return_token_ids=bool(request.return_token_ids),
        written=frozenset(
            name
            for name in SamplingParams.__struct_fields__
            if getattr(request, name, None) is not None
        ),
    )


def _sampling(request: CompletionRequest | ChatRequest, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=1.0 if request.temperature is None else request.temperature,
        top_p=1.0 if request.top_p is None else request.top_p,
        top_k=max(0, request.top_k or 0),
        seed=request.seed,
        stop_token_ids=request.stop_token_ids or (),
        ignore_eos=request.ignore_eos,
    )


def _prompts(prompt: str | list[Any]) -> tuple[str | tuple[int, ...], ...]:
    if isinstance(prompt, str):
        return (prompt,)
    numbers = [isinstance(entry, int) for entry in prompt]
    if all(numbers):
        return (tuple(prompt),)
    if any(numbers):
        raise ApiError(400, "prompt: token ids among whole prompts", param="prompt")
    return tuple(entry if isinstance(entry, str) else tuple(entry) for entry in prompt)


def _message(message: dict[str, Any], place: int) -> dict[str, Any]:
    """One message with its content as one string, for the chat template."""
    where = f"messages[{place}]"
    if not isinstance(message.get("role"), str):
        raise ApiError(400, f"{where}: role is missing", param="messages")
    content = message.get("content")
    if isinstance(content, list):
        content = "".join(_text_part(part, where) for part in content)
    elif content is None:
        content = ""
    elif not isinstance(content, str):
        raise ApiError(400, f"{where}: content is neither text nor parts", param="messages")
    return {**message, "content": content}


def _text_part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text":
        text = part.get("text")
        if isinstance(text, str):
            return text
    raise ApiError(400, f"{where}: only content parts of type 'text' are served", param="messages")
