"""Requests of the reference engine: tokens, state, loads, and the checks of a new request."""

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.cache import KVCacheManager, Request
from kvferry.config import LoadFailurePolicy, parse_struct, shown
from kvferry.engine.messages import EngineOutput, RequestTimings, SamplingParams
from kvferry.errors import ConfigError, OutOfBlocksError, RequestError


class RequestStatus(enum.Enum):
    """State of a request. The finished states are terminal."""

    WAITING = "waiting"
    """The request waits for blocks, for a seat in the batch, or for an answer of the connector."""
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    """The request holds blocks that the connector fills."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """The request has lost its blocks and will be computed again."""
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"


_FINISHED = frozenset(
    {
        RequestStatus.FINISHED_STOPPED,
        RequestStatus.FINISHED_LENGTH,
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_ERROR,
    }
)

_WAITING_MAY_BECOME = _FINISHED | {RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS}

_MAY_BECOME: dict[RequestStatus, frozenset[RequestStatus]] = {
    # A request waits again after its load, and can lose the loaded blocks before it runs.
    RequestStatus.WAITING: _WAITING_MAY_BECOME | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: _WAITING_MAY_BECOME,
    RequestStatus.WAITING_FOR_REMOTE_KVS: _FINISHED | {RequestStatus.WAITING},
    RequestStatus.RUNNING: _FINISHED | {RequestStatus.PREEMPTED},
}


@dataclass(slots=True)
class ExternalLoad:
    """A connector's load into the blocks of a request: the offer, the failures and the result."""

    local_tokens: int
    """Number of tokens in the local prefix hit, which the load does not change."""
    external_tokens: int = 0
    """Number of tokens after the local prefix hit that come from outside; 0 for no load."""
    is_async: bool = False
    """Whether the request waits without a seat until the tokens have arrived."""
    under_way: bool = False
    """Whether ranks may still write to the blocks, or have not yet reported the end of the load."""
    invalid_block_ids: set[int] = field(default_factory=set)
    """Ids of the blocks that a rank reported as not filled."""
    error: str = ""
    """Reason of the failure; empty after a load that succeeded."""
    valid_tokens: int = 0
    """Number of leading tokens of the request with valid KV in its blocks, after the load."""


class EngineRequest(Request):
    """A request with the fields of the cache core and the state that the engine needs."""

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        kv_transfer_params: dict[str, Any] | None = None,
        cache_salt: str | None = None,
        arrival: float | None = None,
        traceparent: str = "",
        weights_digest: str = "",
    ) -> None:
        super().__init__(request_id, prompt_token_ids, cache_salt=cache_salt)
        self.traceparent = traceparent
        self._content = {"weights": weights_digest} if weights_digest else {}
        self.sampling = sampling
        self.kv_transfer_params = kv_transfer_params
        self.timings = RequestTimings(arrival=time.time() if arrival is None else arrival)
        #: Position in the order of arrival; the scheduler sets this number.
        self.sequence = 0
        #: Number of tokens for which blocks are allocated, and that will be computed or loaded.
        self.allocated_tokens = 0
        #: The connector's last offer of a load.
        self.load = ExternalLoad(local_tokens=0)
        #: False after a failed load: the engine computes the remaining tokens.
        self.may_load = True
        #: Whether the engine computes nothing: the connector lends the cached part of the prompt.
        self.only_cached = False
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        #: Whether the request lost its blocks after a step in which it was computed.
        self.resumed = False
        self._noted_blocks: tuple[int, ...] = ()
        self._status = RequestStatus.WAITING

    @property
    def status(self) -> RequestStatus:
        """The current state; see :class:`RequestStatus`."""
        return self._status

    def advance(self, status: RequestStatus) -> None:
        """Enters another state; the transition must be in the table ``_MAY_BECOME``."""
        assert status in _MAY_BECOME.get(self._status, ()), f"{self._status} to {status}"
        self._status = status

    @property
    def received(self) -> float:
        """Time of arrival in Unix seconds."""
        return self.timings.arrival

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error``; ``None`` before the end of the request."""
        return self._status.value if self._status in _FINISHED else None

    @property
    def finished_cleanly(self) -> bool:
        """Whether the request ended by stop or by length, not by abort or error."""
        return self._status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """The weights, as they may change; this engine has no adapters and no other inputs."""
        return self._content

    @property
    def num_remaining_tokens(self) -> int:
        """Number of known tokens whose KV is not computed yet."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that this engine has sampled so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_index(self) -> int:
        """Index of the next output token; tokens that another engine sampled count too."""
        return self.num_output_tokens + self.sampling.seed_offset

    def note_blocks(self, block_ids: tuple[list[int], ...]) -> tuple[int, ...]:
        """Number of blocks that each group's table has gained since the last call."""
        lengths = tuple(map(len, block_ids))
        noted = self._noted_blocks or (0,) * len(lengths)
        self._noted_blocks = lengths
        return tuple(now - before for now, before in zip(lengths, noted, strict=True))

    def forget_blocks(self) -> None:
        """Resets the computed tokens, because the blocks of the request were freed."""
        self.resumed = self.resumed or bool(self._noted_blocks)
        self._noted_blocks = ()
        self.num_computed_tokens = 0
        self.allocated_tokens = 0

    def news(self) -> EngineOutput:
        """An output for this request, without new tokens."""
        return EngineOutput(
            request_id=self.request_id,
            num_cached_tokens=self.num_cached_tokens,
            num_external_tokens=self.num_external_tokens,
        )


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and rules of the scheduler."""

    max_model_len: int = 4096
    """Maximum length of a sequence (prompt plus answer) in tokens."""
    max_num_batched_tokens: int = 512
    """Maximum number of tokens computed per step."""
    max_num_seqs: int = 32
    """Maximum number of requests computed per step."""
    eos_token_ids: tuple[int, ...] = ()
    """Ids of tokens that end an answer unless the request ignores these tokens."""
    vocab_size: int | None = None
    """Upper bound (exclusive) for the token ids of a prompt; ``None`` for no check."""
    enable_prefix_caching: bool = True
    load_failure_policy: LoadFailurePolicy = "fail"
    """Treatment of a request whose KV could not be loaded."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")


def output_limit(request: EngineRequest, options: SchedulerOptions) -> int:
    """Number of output tokens that ends the request: ``max_tokens``, or the model's remaining
    room.
    """
    return min(request.sampling.max_tokens, options.max_model_len - request.num_prompt_tokens)


def check_request(
    request: EngineRequest, options: SchedulerOptions, manager: KVCacheManager
) -> None:
    """Refuses a request that could never end well, before any allocation.

    Args:
        request: a new request.
        options: the limits of the engine.
        manager: the manager of the engine's blocks.

    Raises:
        RequestError: an id or a cache salt that is no text in UTF-8, token ids outside the
            vocabulary, or sampling parameters out of range.
        OutOfBlocksError: the prompt exceeds ``max_model_len``, or prompt and answer together
            need more blocks at once than the whole pool has.
    """
    _check_text("request_id", request.request_id)
    _check_text("cache_salt", request.cache_salt or "")
    _check_token_ids(request.prompt_token_ids, options.vocab_size)
    _check_sampling(request.sampling)
    num_prompt = request.num_prompt_tokens
    if num_prompt >= options.max_model_len:
        raise OutOfBlocksError(
            f"the prompt has {num_prompt} tokens, max_model_len is {options.max_model_len}, and "
            "the answer needs one at least; shorten the prompt or raise max_model_len"
        )
    # The KV of the last output token is never computed, so the token needs no room.
    longest = num_prompt + output_limit(request, options) - 1
    needed = manager.peak_blocks(longest, options.max_num_batched_tokens)
    usable_blocks = manager.kv_cache_config.num_blocks - 1
    if needed > usable_blocks:
        raise OutOfBlocksError(
            f"prompt and answer of up to {longest} tokens need {needed} KV blocks, the whole pool "
            f"has {usable_blocks}; shorten the prompt, lower max_tokens or raise num_blocks"
        )


def _check_text(name: str, text: object) -> None:
    # A step that names this request could not be sent, and the hash of its blocks not be computed.
    try:
        msgspec.convert(text, str).encode()
    except (msgspec.ValidationError, UnicodeEncodeError) as error:
        raise RequestError(
            f"{name}: {shown(text)} is no text in UTF-8: {error}; give text without surrogates"
        ) from error


def _check_token_ids(token_ids: Sequence[int], vocab_size: int | None) -> None:
    # A token id beyond the embedding would crash a rank, and with the rank all requests.
    end = 1 << 32 if vocab_size is None else vocab_size
    tokens: Sequence[object] = token_ids  # the list may have come from a client's JSON
    for token in tokens:
        if not isinstance(token, int) or not 0 <= token < end:
            raise RequestError(f"the prompt holds the token id {token!r}; ids are 0 to {end - 1}")


def _check_sampling(sampling: SamplingParams) -> None:
    try:
        parse_struct(SamplingParams, msgspec.to_builtins(sampling), "request")
    except ConfigError as error:
        raise RequestError(str(error)) from error
