"""A request of the reference engine: its tokens, how they are drawn, and where it stands."""

import enum
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.cache import Request
from kvferry.engine.messages import EngineOutput, RequestTimings, SamplingParams


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

    @property
    def is_finished(self) -> bool:
        """Whether nothing of the request will be computed any more."""
        return self in _FINISHED

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error`` for the finished states."""
        return self.value if self.is_finished else None


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
class RemoteLoad:
    """What the connector is to fill of a request's blocks."""

    local_tokens: int
    """Tokens of the local prefix hit, which the load leaves alone."""
    external_tokens: int
    """Tokens that follow them and come from outside."""
    invalid_block_ids: set[int] = field(default_factory=set)
    """Blocks that a rank reported as not filled."""


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
    ) -> None:
        super().__init__(request_id, prompt_token_ids, cache_salt=cache_salt)
        self.sampling = sampling
        self.kv_transfer_params = kv_transfer_params
        self.timings = RequestTimings(arrival=time.time() if arrival is None else arrival)
        #: Place in the order of arrival; given by the scheduler.
        self.sequence = 0
        #: Tokens that the allocated blocks have room for and are meant for.
        self.allocated_tokens = 0
        #: Set from the allocation of a load to its end.
        self.load: RemoteLoad | None = None
        #: Cleared once a load failed: the rest is computed here.
        self.may_load = True
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
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error`` once it has ended."""
        return self._status.finish_reason

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
