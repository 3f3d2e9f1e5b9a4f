"""OpenAI's request bodies: parsing, and the decision which fields are served, ignored or refused.

A field that would change the answer and that kvferry does not serve is refused with a 400 that
names the field; otherwise a client might take an ordinary answer for a constrained answer. Fields
that cannot change the answer are ignored. Unknown fields are refused with the nearest known name.

``n`` and lists of prompts are served with a prefill and a decode per choice. Refused are log
probabilities, structured output, tools, penalties, ``logit_bias``, ``echo`` and ``suffix``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvferry.config import parse_struct, shown
from kvferry.engine.messages import (
    MaxTokens,
    ModelName,
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
"""Maximum number of choices (prompts times ``n``) of a request."""


MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
"""Paths of Anthropic's API, and of OpenAI's API of responses."""
_ANTHROPIC: Mapping[int, str] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""HTTP status → type of an error in Anthropic's API, unless the type is the general one."""


class ApiError(Exception):
    """An error that the HTTP client receives in the format of the API that it uses."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.content: bytes | None = None
        """Body of a foreign server's answer, for the client in place of kvferry's own body."""
        self.headers: list[tuple[bytes, bytes]] = []
        """Headers of the foreign server's answer for the client, such as ``retry-after``."""
        super().__init__(message)

    def body(self, path: str = "") -> dict[str, Any]:
        """The error as JSON, in the form of the API of ``path``: Anthropic's or OpenAI's."""
        if path.startswith(MESSAGES):
            kind = "invalid_request_error" if self.status < 500 else "api_error"
            kind = _ANTHROPIC.get(self.status, kind)
            return {"type": "error", "error": {"type": kind, "message": self.message}}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code if self.code is not None else self.status,
            }
        }


def try_again(message: str, code: str, status: int = 503, after_s: int = 1) -> ApiError:
    """The error for a client that should send its request again after this number of seconds."""
    error = ApiError(status, message, code=code)
    error.headers = [(b"retry-after", b"%d" % after_s)]
    return error


class StreamOptions(msgspec.Struct, frozen=True):
    """OpenAI's ``stream_options``."""

    include_usage: bool = False
    include_obfuscation: bool = False


_Text = Annotated[str, Meta(min_length=1)]
_TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class _Common(msgspec.Struct, kw_only=True):
    """Fields of both kinds of requests."""

    model: ModelName | None = None
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


class CompletionRequest(_Common, kw_only=True):
    """The body of ``POST /v1/completions``."""

    prompt: _Text | Annotated[list[TokenId | _Text | _TokenIds], Meta(min_length=1)]
    """A string, token ids, or a list of strings or of lists of token ids."""


class ChatRequest(_Common, kw_only=True):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    max_completion_tokens: MaxTokens | None = None


_IGNORED = frozenset(
    {
        "kv_transfer_params",  # only engines may set these
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Fields that cannot change the answer."""
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
"""Field that is not served → values (besides ``None``) with which the field changes nothing."""


@dataclass(frozen=True, slots=True)
class Generation:
    """A client's request in a common form for both kinds of requests."""

    kind: str
    """``"completion"`` or ``"chat"``."""
    prompts: tuple[str | tuple[int, ...], ...]
    """Text or token ids of each prompt of a completion."""
    messages: tuple[dict[str, Any], ...]
    """The conversation of a chat."""
    n: int
    sampling: SamplingParams
    """Sampling parameters; ``max_tokens`` is 0 if the client did not give it."""
    model: str | None = None
    """Name of the model for the engines, if any."""
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False
    return_token_ids: bool = False
    are_ours: bool = False
    """Whether kvferry's own engines sample the answer."""
    named: frozenset[str] = frozenset()
    """Sampling fields that the router sends to engines besides ``max_tokens``: only the client's
    fields, because a foreign engine has its own defaults."""


def parse_completion(body: Mapping[str, Any]) -> Generation:
    """Checks the body of ``/v1/completions``.

    Raises:
        ApiError: 400, with the field and its permitted values.
    """
    request = _parse(CompletionRequest, body)
    max_tokens = 16 if request.max_tokens is None else request.max_tokens
    return _generation("completion", request, max_tokens, prompts=_prompts(request.prompt))


def parse_chat(body: Mapping[str, Any]) -> Generation:
    """Checks the body of ``/v1/chat/completions``.

    Raises:
        ApiError: 400, with the field and its permitted values.
    """
    request = _parse(ChatRequest, body)
    max_tokens = request.max_completion_tokens or request.max_tokens
    messages = tuple(_message(message, place) for place, message in enumerate(request.messages))
    return _generation("chat", request, max_tokens, messages=messages)


def _parse(kind: type[T], body: Mapping[str, Any]) -> T:
    wanted = {}
    for name, value in body.items():
        if name in _NEUTRAL and not _is_neutral(value, _NEUTRAL[name]):
            message = f"{name}: {shown(value)} is not supported here; leave it out"
            raise ApiError(400, message, param=name)
        if name not in _NEUTRAL and name not in _IGNORED:
            wanted[name] = value
    return parse_body(kind, wanted)


def parse_body(kind: type[T], body: Mapping[str, Any]) -> T:
    """Checks a body against its schema.

    Raises:
        ApiError: 400, with the field, its value and its bound.
    """
    try:
        return parse_struct(kind, body, "request")
    except ConfigError as error:
        raise ApiError(400, str(error)) from error


def _is_neutral(value: Any, neutral: tuple[Any, ...]) -> bool:
    # `True == 1` in Python, but `"logprobs": true` and `"logprobs": 1` are different requests.
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
    written = {
        name: value
        for name in SamplingParams.__struct_fields__
        if (value := getattr(request, name, None)) is not None
    }
    return Generation(
        kind=kind,
        prompts=prompts,
        messages=messages,
        n=n,
        sampling=SamplingParams(**{"temperature": 1.0, **written, "max_tokens": max_tokens or 0}),
        model=request.model,
        stop=(request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ()),
        stream=bool(request.stream),
        include_usage=options is not None and options.include_usage,
        return_token_ids=bool(request.return_token_ids),
        named=frozenset(written),
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
    """A message whose content is a single string, for the chat template."""
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
