"""A request of the reference engine: its tokens, where it stands, and what a new one must be."""

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvferry.cache import KVCacheManager, Request
from kvferry.config import LoadFailurePolicy, parse_struct
from kvferry.engine.messages import EngineOutput, RequestTimings, SamplingParams
from kvferry.errors import ConfigError, OutOfBlocksError, RequestError


class RequestStatus(enum.Enum):
    """Where a request stands. The finished states are terminal."""

    WAITING = "waiting"
    """For blocks, for a seat in the batch, or for an answer of the connector."""
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    """It holds blocks that the connector fills."""
    RUNNING = "running"
    PREEMPTED = "preempted"
    """It gave its blocks up and will be computed again."""
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
    # A request whose blocks were loaded waits again, and can lose them before it runs.
    RequestStatus.WAITING: _WAITING_MAY_BECOME | {RequestStatus.PREEMPTED},
    RequestStatus.PREEMPTED: _WAITING_MAY_BECOME,
    RequestStatus.WAITING_FOR_REMOTE_KVS: _FINISHED | {RequestStatus.WAITING},
    RequestStatus.RUNNING: _FINISHED | {RequestStatus.PREEMPTED},
}


@dataclass(slots=True)
class Load:
    """What the connector fills of a request's blocks: its offer, what failed, and the outcome."""

    local_tokens: int
    """Tokens of the local prefix hit, which the load leaves alone."""
    external_tokens: int = 0
    """Tokens that follow them and come from outside; 0 where there is nothing to load."""
    is_async: bool = False
    """Whether the request is parked until the tokens are there."""
    under_way: bool = False
    """Whether ranks may still write to the blocks, or have yet to say that they do not."""
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks that a rank reported as not filled."""
    error: str = ""
    """Why it failed; once it has ended, empty if it did not."""
    valid_tokens: int = 0
    """Once it has ended, leading tokens of the request whose KV is in its blocks."""


class EngineRequest(Request):
    """What the cache core knows of a request, and how the engine runs it."""

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
    ) -> None:
        super().__init__(request_id, prompt_token_ids, cache_salt=cache_salt)
        self.traceparent = traceparent
        self.sampling = sampling
        self.kv_transfer_params = kv_transfer_params
        self.timings = RequestTimings(arrival=time.time() if arrival is None else arrival)
        #: Place in the order of arrival; given by the scheduler.
        self.sequence = 0
        #: Tokens that the allocated blocks have room for and are meant for.
        self.allocated_tokens = 0
        #: The last load that the connector offered.
        self.load = Load(local_tokens=0)
        #: Cleared once a load failed: the rest is computed here.
        self.may_load = True
        #: Whether nothing is computed for it: the connector lends what is cached of it.
        self.only_cached = False
        self.num_cached_tokens = 0
        self.num_external_tokens = 0
        #: Whether it lost its blocks after a step in which it had computed.
        self.resumed = False
        self._noted_blocks: tuple[int, ...] = ()
        self._status = RequestStatus.WAITING

    @property
    def status(self) -> RequestStatus:
        """Where the request stands; see :class:`RequestStatus`."""
        return self._status

    def advance(self, status: RequestStatus) -> None:
        """Enters the next state; only the transitions of the state machine are legal."""
        assert status in _MAY_BECOME.get(self._status, ()), f"{self._status} to {status}"
        self._status = status

    @property
    def received(self) -> float:
        """When it came, in Unix seconds."""
        return self.timings.arrival

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error`` once it has ended."""
        return self._status.value if self._status in _FINISHED else None

    @property
    def finished_cleanly(self) -> bool:
        """Whether it ended by stop or by length, not by abort or error."""
        return self._status in (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH)

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """Nothing: this engine has neither adapters nor inputs that are not tokens."""
        return {}

    @property
    def num_remaining_tokens(self) -> int:
        """Known tokens whose KV is yet to be computed."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        """Tokens drawn here so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_index(self) -> int:
        """Index of the next output token, those drawn elsewhere included."""
        return self.num_output_tokens + self.sampling.seed_offset

    def note_blocks(self, block_ids: tuple[list[int], ...]) -> tuple[int, ...]:
        """How many blocks each table has gained since the last call, one number per group."""
        lengths = tuple(map(len, block_ids))
        noted = self._noted_blocks or (0,) * len(lengths)
        self._noted_blocks = lengths
        return tuple(now - before for now, before in zip(lengths, noted, strict=True))

    def forget_blocks(self) -> None:
        """Its blocks were freed: nothing of it is computed any more."""
        self.resumed = self.resumed or bool(self._noted_blocks)
        self._noted_blocks = ()
        self.num_computed_tokens = 0
        self.allocated_tokens = 0

    def news(self) -> EngineOutput:
        """An output that names the request and holds nothing new yet."""
        return EngineOutput(
            request_id=self.request_id,
            num_cached_tokens=self.num_cached_tokens,
            num_external_tokens=self.num_external_tokens,
        )


class SchedulerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Limits and rules of the scheduler."""

    max_model_len: int = 4096
    """Longest sequence, prompt and answer, in tokens."""
    max_num_batched_tokens: int = 512
    """Tokens computed per step at most."""
    max_num_seqs: int = 32
    """Requests computed per step at most."""
    eos_token_ids: tuple[int, ...] = ()
    """Tokens that end an answer unless the request ignores them."""
    vocab_size: int | None = None
    """When given, token ids of a prompt must lie below it."""
    enable_prefix_caching: bool = True
    load_failure_policy: LoadFailurePolicy = "fail"
    """What happens to a request whose KV could not be loaded."""

    def __post_init__(self) -> None:
        for name in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: {getattr(self, name)} is less than 1")


def output_limit(request: EngineRequest, options: SchedulerOptions) -> int:
    """Output tokens that end the request: ``max_tokens``, or what the model has room for."""
    return min(request.sampling.max_tokens, options.max_model_len - request.num_prompt_tokens)


def check_request(
    request: EngineRequest, options: SchedulerOptions, manager: KVCacheManager
) -> None:
    """Refuses what could never end well; nothing was allocated yet.

    Args:
        request: new, nothing computed.
        options: the engine's limits.
        manager: of the engine's blocks.

    Raises:
        RequestError: token ids outside the vocabulary, sampling parameters outside their range.
        OutOfBlocksError: the prompt exceeds ``max_model_len``, or prompt and answer together
            need more blocks at once than the whole pool has.
    """
    _check_token_ids(request.prompt_token_ids, options.vocab_size)
    _check_sampling(request.sampling)
    num_prompt = request.num_prompt_tokens
    if num_prompt >= options.max_model_len:
        raise OutOfBlocksError(
            f"the prompt has {num_prompt} tokens, max_model_len is {options.max_model_len}, and "
            "the answer needs one at least; shorten the prompt or raise max_model_len"
        )
    # The last output token is never computed, so it needs no room.
    longest = num_prompt + output_limit(request, options) - 1
    needed = manager.peak_blocks(longest, options.max_num_batched_tokens)
    usable_blocks = manager.kv_cache_config.num_blocks - 1
    if needed > usable_blocks:
        raise OutOfBlocksError(
            f"prompt and answer of up to {longest} tokens need {needed} KV blocks, the whole pool "
            f"has {usable_blocks}; shorten the prompt, lower max_tokens or raise num_blocks"
        )


def _check_token_ids(token_ids: Sequence[int], vocab_size: int | None) -> None:
    # An id beyond the embedding would take a rank down, and all requests with it.
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
