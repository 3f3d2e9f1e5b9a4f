"""Fields of foreign servers' replies besides the tokens.

The router makes one answer from the replies of two servers. A client that reads a field of the
server's own answer (the stop reason, the server's fingerprint) finds this field in every release of
the server. So the router copies each field that it does not write itself from the replies: the
first value of the field other than ``null``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

_WRITTEN = frozenset({"id", "object", "created", "choices", "usage"})
"""Fields of an answer that the router writes."""
_ABOUT_ONE_SERVER = frozenset({"kv_transfer_params", "ec_transfer_params", "metrics"})
"""Fields about the work of a single server, of no use to a client."""
_OF_ONE_BODY = frozenset({b"content-type", b"cache-control"})
_CHOICE_WRITTEN = frozenset({"index", "text", "message", "delta", "logprobs", "finish_reason"})
_ONLY_OF_WHOLE_ANSWERS = frozenset({"prompt_logprobs", "routed_experts"})


@dataclass(slots=True)
class Words:
    """Fields of the servers' replies for one choice."""

    answer: dict[str, Any] = field(default_factory=dict)
    choice: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    """Headers of the first server's answer."""

    def take(self, reply: Mapping[str, Any], headers: list[tuple[bytes, bytes]]) -> None:
        """Takes a reply, whole or a chunk."""
        self.headers = self.headers or [each for each in headers if each[0] not in _OF_ONE_BODY]
        _fill(self.answer, {name: reply[name] for name in reply.keys() - _WRITTEN})
        self.answer |= dict.fromkeys(_ABOUT_ONE_SERVER & self.answer.keys())
        for choice in (reply.get("choices") or [])[:1]:
            _fill(self.choice, {name: choice[name] for name in choice.keys() - _CHOICE_WRITTEN})
        _fill(self.usage, reply.get("usage") or {})

    def of_choice(self, token_ids: tuple[int, ...] | None, *, is_whole: bool) -> dict[str, Any]:
        """The fields of a choice; ``token_ids`` is ``None`` if the client did not ask for ids."""
        left_out = frozenset() if is_whole else _ONLY_OF_WHOLE_ANSWERS
        told = {name: value for name, value in self.choice.items() if name not in left_out}
        if token_ids is None:
            told |= dict.fromkeys({"token_ids", "prompt_token_ids"} & told.keys())
        elif "token_ids" in told:
            told["token_ids"] = token_ids
        return told

    def of_usage(self, counts: Mapping[str, Any], cached_tokens: int | None) -> dict[str, Any]:
        """The usage of the whole answer."""
        details = self.usage.get("prompt_tokens_details")
        if cached_tokens is not None:
            details = {**(details or {}), "cached_tokens": cached_tokens}
        return {**self.usage, **counts, "prompt_tokens_details": details}


def without_nulls(told: Mapping[str, Any]) -> dict[str, Any]:
    """Removes the ``null`` values of a whole answer, for the last event of a stream."""
    return {
        name: without_nulls(value) if isinstance(value, Mapping) else value
        for name, value in told.items()
        if value is not None
    }


def _fill(known: dict[str, Any], told: Mapping[str, Any]) -> None:
    """Copies the fields still missing or ``null``, also within objects."""
    for name, value in told.items():
        if isinstance(value, Mapping) and isinstance(known.get(name), dict):
            _fill(known[name], value)
        elif known.get(name) is None:
            known[name] = value
