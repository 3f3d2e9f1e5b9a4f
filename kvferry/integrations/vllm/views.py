"""vLLM's requests, blocks and steps in the shape in which our scheduler half looks at them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.integrations.vllm.caches import CacheGroup
from kvferry.integrations.vllm.compat import RequestStatus
from kvferry.integrations.vllm.content import ContentKeys

_CLEAN = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class RequestView:
    """A request of vLLM's as a :class:`kvferry.connectors.base.RequestView`."""

    __slots__ = ("_content", "_num_cached", "_request")

    def __init__(self, request: Any, content: ContentKeys, num_cached: int | None = None) -> None:
        """``num_cached`` is how many tokens were found in the prefix cache, for a request of which
        only these are lent.
        """
        self._request = request
        self._content = content
        self._num_cached = num_cached

    @property
    def request_id(self) -> str:
        """Unique among the live requests of the engine."""
        request_id: str = self._request.request_id
        return request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens so far."""
        num_tokens: int = self._request.num_tokens
        return num_tokens

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt; zeros where it came as embeddings, which :meth:`content_keys` tells apart."""
        found: Sequence[int] | None = self._request.prompt_token_ids
        return [0] * int(self._request.num_prompt_tokens) if found is None else found

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """Adapter, multimodal inputs and embeddings that the first tokens' KV depends on."""
        return self._content.of(self._request, num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is in this engine's cache."""
        computed = int(self._request.num_computed_tokens)
        return computed if self._num_cached is None else self._num_cached

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What the router sent along."""
        params: dict[str, Any] | None = self._request.kv_transfer_params
        return params

    @property
    def traceparent(self) -> str:
        """The W3C trace context that it came with; vLLM has it with `--otlp-traces-endpoint`."""
        return str((self._request.trace_headers or {}).get("traceparent", ""))

    @property
    def received(self) -> float:
        """When vLLM's API server began to look at its prompt."""
        return float(self._request.arrival_time)

    @property
    def finished_cleanly(self) -> bool:
        """Whether it ended by stop or by length."""
        return self._request.status in _CLEAN

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error`` once it has ended."""
        reason = self._request.get_finished_reason()
        return None if reason is None else str(reason)


class BlocksView:
    """Blocks of vLLM's as a :class:`kvferry.connectors.base.BlocksView`."""

    __slots__ = ("_blocks", "_groups")

    def __init__(self, blocks: Any, groups: Sequence[CacheGroup]) -> None:
        self._blocks = blocks
        self._groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The whole block tables, one per group of ours."""
        tables = self._blocks.get_block_ids()
        return tuple(group.block_ids(tables) for group in self._groups)


@dataclass(frozen=True, slots=True)
class ScheduledPrompt:
    """A part of a prompt as a :class:`kvferry.connectors.base.ScheduledRequestView`."""

    request_id: str
    first_position: int
    block_ids: tuple[list[int], ...]
    num_new_blocks: tuple[int, ...]
    resumed: bool


@dataclass(frozen=True, slots=True)
class StepView:
    """What a step computes of some prompts, a :class:`kvferry.connectors.base.SchedulerOutputView`.

    The other requests of the step are left out.
    """

    requests: list[ScheduledPrompt]
    finished_req_ids: set[str]
    preempted_req_ids: set[str]
    num_scheduled_tokens: Mapping[str, int]


@dataclass(slots=True)
class _Prompt:
    request: Any
    tables: tuple[list[int], ...] = ()
    """vLLM's block tables, as far as its steps have told of them."""


class Prompts:
    """The prompts of which every step is shown, because they are lent while they are computed.

    A step of vLLM's tells of new blocks only, and not in every release of preemptions outside of
    it, so both are followed here.
    """

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups
        self._prompts: dict[str, _Prompt] = {}

    def add(self, request: Any) -> None:
        """A new request has such a prompt."""
        self._prompts[request.request_id] = _Prompt(request)

    def forget(self, request_id: str) -> None:
        """A request has ended. Unknown ones are ignored."""
        self._prompts.pop(request_id, None)

    def show(self, scheduler_output: Any, wanted: Collection[str]) -> StepView:
        """What a step computes of the wanted prompts. To be called in each step while there are
        any.
        """
        known = self._prompts
        preempted = {name for name in wanted if known[name].request.num_preemptions}
        parts = []
        for name, position, new, is_whole in _parts(scheduler_output):
            if name not in wanted or name in preempted:
                continue
            prompt = known[name]
            before = self._tables(prompt)
            if is_whole:
                prompt.tables = tuple(list(ids) for ids in new)
            else:
                for table, ids in zip(prompt.tables, new, strict=False):  # none: no new ones
                    table.extend(ids)
            tables = self._tables(prompt)
            parts.append(
                ScheduledPrompt(
                    request_id=name,
                    first_position=position,
                    block_ids=tables,
                    num_new_blocks=tuple(
                        len(now) - len(then) for now, then in zip(tables, before, strict=True)
                    ),
                    resumed=False,  # whoever was preempted is not looked at any more
                )
            )
        return StepView(
            parts,
            scheduler_output.finished_req_ids,
            preempted,
            scheduler_output.num_scheduled_tokens,
        )

    def _tables(self, prompt: _Prompt) -> tuple[list[int], ...]:
        """The block tables, one per group of ours."""
        if not prompt.tables:
            return tuple([] for _ in self._groups)
        return tuple(group.block_ids(prompt.tables) for group in self._groups)


def _parts(scheduler_output: Any) -> Iterator[tuple[str, int, Sequence[Sequence[int]], bool]]:
    """Each request of a step: its id, the position of its first token, its new blocks, and whether
    these are all that it has.
    """
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, new.block_ids, True
    cached = scheduler_output.scheduled_cached_reqs
    each = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    for name, position, blocks in each:
        yield name, position, blocks or (), False
