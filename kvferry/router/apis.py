"""The APIs that a prefill and a decode server serve together, one for each path.

Of an API the router knows only what it must change or judge: how the prefill engine's copy is made,
where an answer begins, and the names of the numbers about caches.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from kvferry.router import copies
from kvferry.router.replies import Reply
from kvferry.serving.openai import MESSAGES, RESPONSES


class Counts:
    """The numbers about caches in the usage of an answer. The decode engine counts all loaded
    tokens as cached, so the prefill engine's numbers replace its numbers.
    """

    def __init__(self, details: str, cached: str, *others: str) -> None:
        """Compiles the patterns of an API. In a generated text, the quotation marks would have
        backslashes.

        Args:
            details: name of the object within the usage that has the numbers; empty for the usage.
            cached: name of the number of tokens from the cache.
            others: names of the other numbers, or lists of numbers, to replace.
        """
        self._details, self._cached = details, cached
        before = r"(?:[^{}]|\{[^{}]*\})*?" + rf'"{details}":\s*{{' if details else ""
        found = rf'"usage":\s*{{{before}[^{{}}]*"{cached}":[^{{}}]*}}'
        self._object = re.compile(found.encode())
        names = "|".join((cached, *others))
        self._numbers = re.compile(rf'"({names})":\s*(?:\d+|\[[^\]]*\])'.encode())

    def are_in(self, content: bytes) -> bool:
        """Whether a part of an answer has the numbers."""
        return self._object.search(content) is not None

    def put(self, content: bytes, reply: Reply) -> bytes:
        """Puts the numbers of the prefill engine's reply into a part of an answer. What the part
        has before its usage may be the client's own JSON, or the model's.
        """
        usage = reply.usage or {}
        details = usage.get(self._details)
        told = details if isinstance(details, dict) and details else usage
        if told.get(self._cached) is None:
            told = {**told, self._cached: reply.cached_tokens}
        if told[self._cached] is None:
            return content

        def number(found: re.Match[bytes]) -> bytes:
            value = msgspec.json.encode(told.get(found[1].decode()))
            return found[0] if value == b"null" else b'"%b":%b' % (found[1], value)

        *_, last = self._object.finditer(content)
        numbers = self._numbers.sub(number, last[0])
        return content[: last.start()] + numbers + content[last.end() :]


_OPENAIS = Counts("prompt_tokens_details", "cached_tokens", "created_cache_tokens")
_ANTHROPICS = Counts("", "cache_read_input_tokens", "cache_creation_input_tokens", "input_tokens")
_RESPONSES = Counts(
    "input_tokens_details", "cached_tokens", "cache_write_tokens", "cached_tokens_per_turn"
)


@dataclass(frozen=True, slots=True)
class Api:
    """One API of servers."""

    copy: Callable[[Mapping[str, Any]], dict[str, Any] | None]
    """Makes the body with which a prefill engine computes the prompt, without transfer parameters;
    ``None`` if a decode engine should get the body alone."""
    events: int = 1
    """Number of events up to the first event with a part of the answer."""
    by_tokens: Callable[[Mapping[str, Any]], bool] = lambda _: False
    """Whether a vLLM decode server needs only the token ids of a body's prompt."""
    counts: Counts = _OPENAIS
    """Where an answer tells what was cached."""
    breaks_off: bool = False
    """Whether servers break a stream off, without an event, if they fail its request."""
    in_rooms: bool = True
    """Whether SGLang servers know the path; otherwise, beside an SGLang server a decode engine gets
    the body alone."""


APIS: Mapping[str, Api] = {
    "/v1/completions": Api(partial(copies.text_copy, is_chat=False)),
    # The first event of a chat contains only the role of the speaker.
    "/v1/chat/completions": Api(
        partial(copies.text_copy, is_chat=True), events=2, by_tokens=copies.has_text_alone
    ),
    "/inference/v1/generate": Api(copies.tokens_copy, in_rooms=False),
    # The first event contains only the role of the speaker, here too.
    MESSAGES: Api(copies.messages_copy, events=2, counts=_ANTHROPICS, in_rooms=False),
    # Two events say that the request has come.
    RESPONSES: Api(
        copies.responses_copy, events=3, counts=_RESPONSES, breaks_off=True, in_rooms=False
    ),
}
"""Path → API."""
OTHER = Api(partial(copies.text_copy, is_chat=False))
"""API of every other path; only SGLang's ``/generate`` has a prefill engine."""
