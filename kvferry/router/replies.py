"""Answers of engines: a reply with tokens, bytes for the client, or an error.

The fields on the wire are the fields of vLLM's ``/v1/completions`` (``return_token_ids``,
``kv_transfer_params``); no code here depends on the reference engine.
"""

import re
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec

from kvferry.config import printable
from kvferry.decoding import UNDECODED
from kvferry.errors import DrainingError, TransferError
from kvferry.router.engine_client import ClientError, Response
from kvferry.router.pace import Count
from kvferry.serving.messages import MOST_NAME_CHARACTERS
from kvferry.serving.openai import ApiError

_EVENT_ENDS = re.compile(rb"\r?\n\r?\n")
"""End of an event in a stream, also of servers that end a line with two characters."""
_MOST_BEGINNING = 1 << 20
"""Number of bytes after which a stream has begun, whatever its events are. The first two events of
a response repeat its instructions and its tools."""
VLLM_LOAD_FAILED = "Internal server error"
"""The whole message of a vLLM server after a failed load under the policy ``fail``."""


class Refusal(msgspec.Struct):
    """Error message of an engine."""

    message: str = ""
    code: int | str | None = None


class EngineDownError(ApiError):
    """An engine cannot be reached or went away; another engine may serve the request."""

    def __init__(self, engine: str, reason: str, *, reached: bool, is_well: bool = False) -> None:
        self.reached = reached
        """Whether the engine may have seen the request."""
        self.is_well = is_well
        """Whether the engine answers other requests: only the connection broke."""
        super().__init__(503, f"{engine}: {reason}", code="engine_unavailable")


class EngineRefusedError(EngineDownError):
    """An engine answers a request with 503, but its health check with 200: the engine does not take
    this request now, and another engine may.
    """

    def __init__(
        self, engine: str, error: Refusal, content: bytes, headers: list[tuple[bytes, bytes]]
    ) -> None:
        # A draining kvferry engine has not looked at the request. A paused vLLM server has its
        # connector give back the KV of the request.
        super().__init__(engine, error.message, reached=error.code != DrainingError.__name__)
        self.code = code_of(error) or self.code
        self.content, self.headers = content, headers


class EngineFailedError(ApiError):
    """An engine fails a request with 500 before the first part of the answer, and answers its
    health check with 200.
    """

    def __init__(
        self,
        engine: str,
        status: int,
        error: Refusal,
        content: bytes,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        super().__init__(status, f"{engine}: {error.message}", code=code_of(error))
        self.own = content, headers
        """Body and headers of the engine's answer, for clients whose own bodies the engine got."""


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class Reply(msgspec.Struct):
    """A completion of an engine, whole or a chunk; unknown fields are ignored."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    kv_transfer_params: dict[str, Any] | None = None
    usage: dict[str, Any] | None = None
    error: Refusal | None = None
    own: dict[str, Any] | None = None
    """All fields of a foreign engine's reply. Neither this field nor the next field comes from the
    wire."""
    headers: list[tuple[bytes, bytes]] = msgspec.field(default_factory=list)
    """Headers of the engine's answer for the client."""

    @classmethod
    def ended(cls, finish_reason: str) -> "Reply":
        """The end of an answer, without another token."""
        return cls([_Choice([], finish_reason)])

    @property
    def token_ids(self) -> list[int]:
        """The new tokens."""
        return (self.choices[0].token_ids or []) if self.choices else []

    @property
    def finish_reason(self) -> str | None:
        """Reason of the answer's end; ``None`` before the end."""
        return self.choices[0].finish_reason if self.choices else None

    @property
    def cached_tokens(self) -> int | None:
        """Number of prompt tokens from the engine's cache; ``None`` if the engine does not report
        the number. vLLM's servers report it only with ``--enable-prompt-tokens-details``, or if
        they lend KV.
        """
        details = (self.usage or {}).get("prompt_tokens_details")
        told = details.get("cached_tokens") if isinstance(details, dict) else None
        if told is None:
            told = (self.kv_transfer_params or {}).get("remote_prefill_cached_tokens")
        return told if isinstance(told, int) else None

    def cached_or(self, expected: int) -> int:
        """:attr:`cached_tokens`, or ``expected`` if the engine does not report the number."""
        told = self.cached_tokens
        return expected if told is None else told


class Computed(Reply):
    """A prefill engine's reply to a body in the client's own words."""

    prompt_token_ids: msgspec.Raw = msgspec.Raw()
    """JSON of the prompt's token ids, which is handed on unread; empty or ``null`` if the engine
    did not return them."""

    @property
    def prompt_tokens(self) -> int | None:
        """Number of tokens of the prompt; ``None`` if the engine does not report the number."""
        told = (self.usage or {}).get("prompt_tokens")
        return told if isinstance(told, int) else None


class _Failed(msgspec.Struct):
    """A response of the Responses API that has failed."""

    error: Refusal | None = None


class _Event(Reply):
    """An event of a stream, or a whole answer, that may be an error."""

    type: str = ""
    message: str | dict[str, Any] = ""
    code: int | str | None = None
    response: _Failed | None = None


class Forwarded:
    """An engine's answer to a body in the client's own words. The reader closes the answer at the
    end.
    """

    def __init__(
        self,
        response: Response,
        first: bytes,
        requests: Count,
        lost: Callable[[ClientError], EngineDownError],
    ) -> None:
        """Takes over an answer whose first bytes are read.

        Args:
            response: the engine's answer.
            first: the bytes read so far.
            requests: counter of the engine's current requests.
            lost: notes the loss of the engine and returns the error to raise.
        """
        self.status = response.status
        self.headers = response.headers
        """Headers of the answer for the client."""
        self.is_stream = is_stream(response)
        """Whether the answer is a stream of events."""
        self._requests = requests
        self._lost = lost
        self._response = response
        self._first = first
        self._open = True
        requests.add(1)

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yields the answer as it comes.

        Raises:
            EngineDownError: the engine went away.
        """
        yield self._first
        try:
            async for chunk in self._response.chunks():
                yield chunk
        except ClientError as error:
            raise self._lost(error) from error

    async def read(self) -> bytes:
        """Reads the whole answer and closes it.

        Raises:
            EngineDownError: the engine went away.
        """
        try:
            return self._first + await self._response.read()
        except ClientError as error:
            raise self._lost(error) from error
        finally:
            self.close()

    def close(self) -> None:
        """Drops the connection, unless the answer is read; the engine then ends the request.

        Idempotent.
        """
        if self._open:
            self._open = False
            self._requests.add(-1)
            self._response.close()


def is_stream(response: Response) -> bool:
    """Whether an answer is a stream of events."""
    return response.content_type.startswith("text/event-stream")


async def beginning(response: Response, events: int) -> tuple[bytes, bytes | None]:
    """Reads the first bytes of an answer; of a stream, the first ``events`` events, or as many
    bytes as an error does not have.

    Returns:
        The bytes; and the event that reports an error of the engine, ``None`` if there is none.

    Raises:
        ClientError: the answer broke off.
    """
    first = await response.some()
    if not is_stream(response):
        return first, None
    while len(whole := _EVENT_ENDS.split(first, events)) <= events and len(first) < _MOST_BEGINNING:
        if not (more := await response.some()):
            break
        first += more
    told = [event.partition(b"data:")[2] for event in whole[:events]]
    errors = [event for event in told if (error := said_error(event)) and status_of(error) >= 500]
    return first, errors[0] if errors else None


def whole_events(received: bytes) -> tuple[bytes, bytes]:
    r"""The whole events in the bytes of a stream, and the beginning of the next event.

    >>> whole_events(b"data: 1\r\n\r\ndata: 2\n\ndata:")
    (b'data: 1\r\n\r\ndata: 2\n\n', b'data:')
    """
    rest = min(received.rpartition(b"\n\n")[2], received.rpartition(b"\n\r\n")[2], key=len)
    return received[: len(received) - len(rest)], rest


class _PieceOfChoice(msgspec.Struct):
    text: Any = None
    token_ids: Any = None
    finish_reason: Any = None
    delta: dict[str, Any] | None = None


class _Piece(msgspec.Struct):
    type: str = ""
    choices: list[_PieceOfChoice] | None = None


def has_content(events: bytes) -> bool:
    """Whether the events of a stream so far have a part of the answer: a text, a token, a call of a
    tool, the end. A speaker's role, the frame of an answer and signs of life are no part.
    """
    if len(events) >= _MOST_BEGINNING:
        return True
    begin = 0
    for end in _EVENT_ENDS.finditer(events):
        payload = events[begin : end.start()].partition(b"data:")[2]
        if payload and _has_content(payload):
            return True
        begin = end.end()
    return False


def _has_content(payload: bytes) -> bool:
    try:
        event = msgspec.json.decode(payload, type=_Piece)
    except UNDECODED:
        return True  # the end of the stream, or no API of ours
    if event.type:  # of Anthropic's and Cohere's APIs, and of OpenAI's responses
        return event.type.endswith(("delta", "done"))
    if event.choices is None:
        return True
    return any(
        choice.text
        or choice.token_ids
        or choice.finish_reason
        or any(said for name, said in (choice.delta or {}).items() if name != "role")
        for choice in event.choices
    )


def status_of(error: Refusal) -> int:
    """The HTTP status of an error in a stream: 500 if the error names no status."""
    return error.code if isinstance(error.code, int) and 400 <= error.code < 600 else 500


def said_error(content: bytes) -> Refusal | None:
    """The error in an answer or an event of OpenAI's and Anthropic's APIs; ``None`` if there is
    none.
    """
    try:
        told = msgspec.json.decode(content, type=_Event)
    except UNDECODED:
        return None
    if told.type == "error" and told.error is None:
        return Refusal(str(told.message), told.code)
    return told.error or (told.response.error if told.response is not None else None)


def error_in(content: bytes) -> Refusal:
    """The error in an engine's answer: OpenAI's form, or the answer's first 200 bytes."""
    return said_error(content) or Refusal(message=content[:200].decode(errors="replace"))


def code_of(error: Refusal) -> str | None:
    """The name of an engine's error; ``None`` for an error without a name."""
    if error.message == VLLM_LOAD_FAILED:
        return TransferError.__name__
    return printable(error.code[:MOST_NAME_CHARACTERS]) if isinstance(error.code, str) else None


def reason_of(error: ClientError) -> str:
    """Message about a broken connection."""
    return str(error) or type(error).__name__
