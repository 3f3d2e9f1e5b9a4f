"""Answers in OpenAI's two forms, whole or in chunks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.cluster.answer import ChoiceDelta


@dataclass(slots=True)
class WholeChoice:
    """A choice as it adds up."""

    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None

    def add(self, delta: ChoiceDelta) -> None:
        """Takes news of this choice."""
        self.text.append(delta.text)
        self.token_ids.extend(delta.token_ids)
        self.finish_reason = delta.finish_reason


@dataclass(slots=True)
class Shape:
    """The form of one answer."""

    kind: str
    """``"completion"`` or ``"chat"``."""
    request_id: str
    model: str
    include_usage: bool
    return_token_ids: bool
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    """Choices of a chat whose role has been sent."""

    @property
    def is_chat(self) -> bool:
        """Whether it is a chat's form."""
        return self.kind == "chat"

    def whole(self, choices: Sequence[WholeChoice], usage: dict[str, object]) -> dict[str, Any]:
        """The answer of a request without streaming."""
        return {
            **self._head("chat.completion" if self.is_chat else "text_completion"),
            "choices": [self._whole_choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage,
        }

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """The chunk of ``delta``; ``None`` when there is nothing to tell the client yet."""
        first = self.is_chat and delta.index not in self._begun
        has_tokens = self.return_token_ids and delta.token_ids
        if not (delta.text or delta.finish_reason or first or has_tokens):
            return None
        self._begun.add(delta.index)
        choice: dict[str, Any] = {"index": delta.index}
        if self.is_chat:
            role = {"role": "assistant"} if first else {}
            content = {"content": delta.text} if delta.text or first else {}
            choice["delta"] = {**role, **content}
        else:
            choice["text"] = delta.text
        choice["logprobs"] = None
        choice["finish_reason"] = delta.finish_reason
        if self.return_token_ids:
            choice["token_ids"] = list(delta.token_ids)
        usage = {"usage": None} if self.include_usage else {}
        return {**self._chunk_head(), "choices": [choice], **usage}

    def usage_chunk(self, usage: dict[str, object]) -> dict[str, Any]:
        """The last chunk of a stream that asked for its usage."""
        return {**self._chunk_head(), "choices": [], "usage": usage}

    def _whole_choice(self, index: int, choice: WholeChoice) -> dict[str, Any]:
        text = "".join(choice.text)
        body: dict[str, Any] = {"index": index}
        if self.is_chat:
            body["message"] = {"role": "assistant", "content": text}
        else:
            body["text"] = text
        body["logprobs"] = None
        body["finish_reason"] = choice.finish_reason
        if self.return_token_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}
