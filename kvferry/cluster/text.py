"""Text to token ids and back, token by token, with stop strings.

Two things are held back from the client: bytes that are not yet a whole character, and text that
may still become a stop string.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvferry.errors import ModelError


class TextStream:
    """The text of one answer, fed token by token."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.stopped = False
        """Whether a stop string has been met; nothing may be pushed after it."""
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._decoded = 0
        """Characters that `_stream` has given so far."""
        self._held = ""
        """Decoded text that may be the start of a stop string."""
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is now certain, often none."""
        self._tokens.append(token_id)
        text = self._stream.step(self._tokenizer, token_id) or ""
        self._decoded += len(text)
        return self._release(text)

    def finish(self) -> str:
        """The text still held back, once no token follows; incomplete characters become U+FFFD."""
        if self.stopped:
            return ""
        whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        text = self._release(whole[self._decoded :])
        held, self._held = self._held, ""  # empty when that met a stop string
        return text + held

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [place for place in (text.find(stop) for stop in self._stop) if place >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)]
        keep = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a proper start of ``stop``."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextCodec:
    """The tokenizer and the chat template of a model folder."""

    def __init__(self, tokenizer: Any) -> None:
        """Takes a fast tokenizer of transformers."""
        self._chat = tokenizer
        self._tokenizer: Tokenizer = tokenizer.backend_tokenizer

    @classmethod
    def open(cls, folder: str | Path) -> "TextCodec":
        """Loads the tokenizer of ``folder``.

        Raises:
            ModelError: there is none, or it is not a fast one.
        """
        from transformers import AutoTokenizer

        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder}: no tokenizer can be loaded: {error}") from error
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"{folder}: the tokenizer is not a fast one (tokenizer.json)")
        return cls(tokenizer)

    @property
    def vocab_size(self) -> int:
        """Ids that the tokenizer knows, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens the tokenizer puts around it."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
            ValueError: there is no chat template, or it refuses these messages.
        """
        import jinja2

        if not self._chat.chat_template:
            raise ValueError("this model has no chat template; use /v1/completions")
        try:
            text = self._chat.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except jinja2.TemplateError as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self, stop: Sequence[str] = ()) -> TextStream:
        """The text of a new answer, token by token."""
        return TextStream(self._tokenizer, stop)
