"""What a connector sees of the fake engine: its requests and its steps."""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvferry.errors import KVFerryError


class Stage(enum.Enum):
    """Where a request of the fake engine stands."""

    WAITING = "waiting"
    LOADING = "loading"
    COMPUTING = "computing"
    FINISHED = "finished"


@dataclass(eq=False)
class FakeRequest:
    """A request: computed in one step, ended after one token."""

    request_id: str
    prompt_token_ids: Sequence[int]
    kv_transfer_params: dict[str, Any] | None = None
    local_tokens: int = 0
    """Tokens of the local prefix hit."""
    stage: Stage = Stage.WAITING
    output_token_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    tables: list[list[int]] = field(default_factory=list)
    """Its block tables while it holds blocks, one per KV cache group; 0 is the null block."""
    external_tokens: int = 0
    """Tokens that the connector was to fill."""
    loads_in_step: bool = False
    """Whether these are filled within the step that computes it."""
    failed: bool = False
    """Whether that load failed."""
    error: KVFerryError | None = None
    """Why the connector refused to load for it."""
    response_params: dict[str, Any] | None = None
    """What ``request_finished`` returned."""
    started: bool = False
    """Whether a step with its tokens has been scheduled."""
    content: Mapping[str, str] = field(default_factory=dict)
    """What :meth:`content_keys` answers, whatever the tokens."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def finished_cleanly(self) -> bool:
        """Whether it ended by length."""
        return self.finish_reason == "length"

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """What else than its tokens decides its KV."""
        return self.content

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The block tables, as the connector sees them."""
        return tuple(list(table) for table in self.tables)


@dataclass(frozen=True)
class FakePart:
    """A request's part of a step."""

    request_id: str
    first_position: int
    block_ids: tuple[list[int], ...]
    num_new_blocks: tuple[int, ...]
    resumed: bool = False


@dataclass(frozen=True)
class FakeSchedule:
    """One step."""

    requests: Sequence[FakePart]
    num_scheduled_tokens: dict[str, int]
    finished_req_ids: set[str]
