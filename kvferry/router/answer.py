"""All choices of one client's request: concurrent runs, text, and OpenAI's two forms of answers.

Tokens become text one by one, with stop strings. Two things are held back from the client: bytes of
an incomplete character, and text that may still become a stop string.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from kvferry.errors import ModelError
from kvferry.router.hand_over import HandOver
from kvferry.router.replies import Reply
from kvferry.router.token_request import TokenRequest
from kvferry.router.words import Words, without_nulls
from kvferry.serving import web
from kvferry.serving.openai import ApiError, Generation

COUNT_WAIT_S = 2.0
"""Maximum number of seconds that a complete answer waits for the prefill engine at work beside the
decode engine: only the prefill engine knows the number of cached prompt tokens."""


_CONTEXT = 32
"""Number of the prompt's last tokens that may change the text of the next token, such as its
leading space."""
_NO_PREFIX = "Invalid prefix encountered"
"""Beginning of the error of ``DecodeStream`` for a token that changes the text before it: bytes of
a character are followed by another character."""


class TextStream:
    """The text of one answer, token by token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str] = (),
        prompt: Sequence[int] | None = None,
    ) -> None:
        """Begins a text. With a prompt, the text is equal to vLLM's text for the same tokens: the
        text continues the prompt, and a character that never becomes complete is left out.
        """
        self.stopped_by: str | None = None
        """The stop string found in the text; afterwards, no token may be pushed."""
        self._is_after_prompt = prompt is not None
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._tokens: list[int] = []
        self._decoded = 0
        """Number of characters that `_stream` has returned so far."""
        self._held = ""
        """Decoded text that may be the start of a stop string."""
        self._stream = DecodeStream(list((prompt or ())[-_CONTEXT:]), skip_special_tokens=True)

    @property
    def stopped(self) -> bool:
        """Whether the text contains a stop string."""
        return self.stopped_by is not None

    def push(self, token_id: int) -> str:
        """Takes the next token; returns the text that is now certain, often the empty text. Bytes
        that never become a character are left out if other text follows.
        """
        try:
            text = self._stream.step(self._tokenizer, token_id) or ""
        except Exception as error:  # the library raises no class of its own
            if not str(error).startswith(_NO_PREFIX):
                raise
            self._stream = DecodeStream(skip_special_tokens=True)
            self._tokens, self._decoded = [], 0
            text = self._stream.step(self._tokenizer, token_id) or ""
        self._tokens.append(token_id)
        self._decoded += len(text)
        return self._release(text)

    def finish(self) -> str:
        """Returns the text still held back after the last token; incomplete characters become
        U+FFFD.
        """
        if self.stopped:
            return ""
        rest = ""
        if not self._is_after_prompt:
            whole = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
            rest = whole[self._decoded :]
        text = self._release(rest)
        held, self._held = self._held, ""  # empty if the text contains a stop string
        return text + held

    def _release(self, text: str) -> str:
        text = self._held + text
        found = [(text.find(stop), stop) for stop in self._stop if stop in text]
        if found:
            place, self.stopped_by = min(found)
            self._held = ""
            return text[:place]
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
        self.longest_token = max(map(len, self._tokenizer.get_vocab()), default=1)
        """Maximum number of characters in a token."""

    @classmethod
    def open(cls, folder: str | Path) -> "TextCodec":
        """Loads the tokenizer of ``folder``.

        Raises:
            ModelError: the folder has no tokenizer, or only a slow tokenizer (no
                ``tokenizer.json``).
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
        """Number of token ids of the tokenizer, including added tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds."""
        return list(self._tokenizer.encode(text, add_special_tokens=True).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's answer.

        Raises:
            ValueError: there is no chat template, or the template refuses these messages.
        """
        if not self._chat.chat_template:
            raise ValueError("this model has no chat template; use /v1/completions")
        try:
            text = self._chat.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template may raise any error for a client's fields
            raise ValueError(f"the chat template refuses these messages: {error}") from error
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of ``token_ids``, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def stream(self, stop: Sequence[str] = (), prompt: Sequence[int] | None = None) -> TextStream:
        """The text of a new answer, token by token; see :class:`TextStream`."""
        return TextStream(self._tokenizer, stop, prompt)


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New text and tokens of one choice."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    words: Words = field(default_factory=Words)
    """Further fields of the foreign engines' replies so far."""

    @classmethod
    def joined(cls, deltas: "Sequence[ChoiceDelta]") -> "ChoiceDelta":
        """Joins all deltas of a choice; there must be at least one delta."""
        text = "".join(delta.text for delta in deltas)
        token_ids = tuple(token for delta in deltas for token in delta.token_ids)
        last = deltas[-1]
        return cls(last.index, text, token_ids, last.finish_reason, last.words)


class Answer:
    """The choices of one client's request; counts the tokens as they pass."""

    def __init__(
        self,
        requests: Sequence[TokenRequest],
        generation: Generation,
        *,
        hand_over: HandOver,
        codec: TextCodec,
        patience: Callable[[], web.Patience],
    ) -> None:
        """Makes the answer. ``requests`` has a request for each choice: all choices of the first
        prompt, then all choices of the next prompt.
        """
        self.completion_tokens = 0
        self.routes: list[str] = []
        """Routes, as header values, of the choices with a token and a known route."""
        self._requests = requests
        self._counted = requests[:: generation.n]
        """The first request for each prompt, which learns the number of cached prompt tokens."""
        self._generation = generation
        self._hand_over = hand_over
        self._codec = codec
        self._patience = patience

    @property
    def num_choices(self) -> int:
        """Number of choices of all prompts."""
        return len(self._requests)

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in all prompts. Each prompt counts once, for any number of choices."""
        return sum(len(request.prompt) for request in self._counted)

    @property
    def words(self) -> Words:
        """Further fields of the foreign engines' replies for the first choice."""
        return self._requests[0].words

    def usage(self) -> dict[str, object]:
        """OpenAI's usage of the tokens so far."""
        counts = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        told = [each.cached_tokens for each in self._counted if each.cached_tokens is not None]
        cached = sum(told) if told or self._generation.are_ours else None
        return self.words.of_usage(counts, cached)

    async def deltas(self) -> AsyncGenerator[ChoiceDelta, None]:
        """Yields the deltas of all choices as they come. If the generator is closed or a choice
        fails, all choices end.

        Raises:
            ApiError: the first failure of any choice.
        """
        queue: asyncio.Queue[ChoiceDelta | Exception | None] = asyncio.Queue()
        count = self.num_choices
        tasks = [asyncio.create_task(self._run(index, queue)) for index in range(count)]
        try:
            while count:
                news = await queue.get()
                if news is None:
                    count -= 1
                elif isinstance(news, Exception):
                    raise news
                else:
                    self.completion_tokens += len(news.token_ids)
                    yield news
        finally:
            for task in tasks:
                task.cancel()

    async def _run(
        self, index: int, queue: "asyncio.Queue[ChoiceDelta | Exception | None]"
    ) -> None:
        """Runs one choice in a task of its own; the queue receives each delta, and the error or
        ``None`` at the end.
        """
        try:
            await self._choice(index, queue)
        except Exception as error:
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    async def _choice(
        self, index: int, queue: "asyncio.Queue[ChoiceDelta | Exception | None]"
    ) -> None:
        request = self._requests[index]
        text = self._codec.stream(
            self._generation.stop, None if self._generation.are_ours else request.prompt
        )
        patience = self._patience()
        is_first = True
        async with aclosing(self._hand_over.run(request)) as replies:
            async with patience.waiting() as timeout:
                async for reply in replies:
                    if self._generation.stream and (patience.has_begun or reply.token_ids):
                        timeout.reschedule(patience.heard())
                    if is_first and request.route is not None:
                        self.routes.append(request.route.header)
                    is_first = False
                    news = _absorb(index, reply, text, request.words)
                    queue.put_nowait(news)
                    if news.finish_reason is not None:
                        break
                else:
                    message = "the engine ended it without a finish_reason"
                    raise ApiError(502, f"request {request.request_id}: {message}")
            await _count(request, replies, is_stopped=text.stopped)


async def _count(
    request: TokenRequest, replies: AsyncGenerator[Reply, None], *, is_stopped: bool
) -> None:
    """Waits for the number of cached prompt tokens, for at most :data:`COUNT_WAIT_S`. All tokens of
    the answer are sampled by now.
    """
    with contextlib.suppress(TimeoutError, ApiError):
        async with asyncio.timeout(COUNT_WAIT_S):
            if not is_stopped:  # otherwise the engine would continue after the stop string
                async for _ in replies:
                    pass
            if request.computing is not None:
                await asyncio.wait((request.computing,))


def _absorb(index: int, reply: Reply, text: TextStream, words: Words) -> ChoiceDelta:
    pieces: list[str] = []
    taken = 0
    for token in reply.token_ids:
        taken += 1
        if reply.finish_reason == "stop" and taken == len(reply.token_ids):
            break  # the stop token ends the text and is not a part of the text
        pieces.append(text.push(token))
        if text.stopped:
            break
    if reply.finish_reason is not None:
        pieces.append(text.finish())
    finish_reason = reply.finish_reason
    if text.stopped:
        finish_reason = "stop"
        if "stop_reason" in words.choice:
            words.choice["stop_reason"] = text.stopped_by
    token_ids = tuple(reply.token_ids[:taken])
    return ChoiceDelta(index, "".join(pieces), token_ids, finish_reason, words)


@dataclass(slots=True)
class Shape:
    """The form of one answer."""

    generation: Generation
    request_id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))
    _begun: set[int] = field(default_factory=set)
    """Choices of a chat whose role has been sent."""

    @property
    def is_chat(self) -> bool:
        """Whether the form is the form of a chat."""
        return self.generation.kind == "chat"

    def whole(
        self, choices: Sequence[ChoiceDelta], usage: dict[str, object], words: Words
    ) -> dict[str, Any]:
        """The answer of a request without streaming."""
        told = [self._choice(choice, self._said(choice.text), is_whole=True) for choice in choices]
        head = self._head("chat.completion" if self.is_chat else "text_completion")
        return {**head, **words.answer, "choices": told, "usage": usage}

    def chunk(self, delta: ChoiceDelta) -> dict[str, Any] | None:
        """The chunk of ``delta``; ``None`` if there is no news for the client yet."""
        is_first = delta.index not in self._begun
        first = self.is_chat and is_first
        has_tokens = self.generation.return_token_ids and delta.token_ids
        if not (delta.text or delta.finish_reason or first or has_tokens):
            return None
        self._begun.add(delta.index)
        said: dict[str, Any] = {"text": delta.text}
        if self.is_chat:
            role = {"role": "assistant"} if first else {}
            content = {"content": delta.text} if delta.text or first else {}
            said = {"delta": {**role, **content}}
        choice = self._choice(delta, said)
        if not is_first and "prompt_token_ids" in choice:
            choice["prompt_token_ids"] = None
        last: dict[str, Any] = {}
        if self.generation.include_usage:
            last = {"usage": None} if self.generation.are_ours else {}
        elif delta.finish_reason is not None:
            last = without_nulls(delta.words.answer)
        return {**self._chunk_head(), **self._model(delta.words), "choices": [choice], **last}

    def usage_chunk(self, usage: dict[str, object], words: Words) -> dict[str, Any]:
        """The last chunk of a stream with usage."""
        told = usage if self.generation.are_ours else without_nulls(usage)
        own = without_nulls(words.answer)
        return {**self._chunk_head(), **own, "choices": [], "usage": told}

    def _said(self, text: str) -> dict[str, Any]:
        return (
            {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        )

    def _choice(
        self, choice: ChoiceDelta, said: dict[str, Any], *, is_whole: bool = False
    ) -> dict[str, Any]:
        asked = choice.token_ids if self.generation.return_token_ids else None
        body = {"index": choice.index, **said, "logprobs": None}
        body["finish_reason"] = choice.finish_reason
        if asked is not None:
            body["token_ids"] = asked
        return body | choice.words.of_choice(asked, is_whole=is_whole)

    def _model(self, words: Words) -> dict[str, Any]:
        """The model's name according to its server."""
        return {name: value for name, value in words.answer.items() if name == "model"}

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self.is_chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.request_id, "object": kind, "created": self.created, "model": self.model}
