"""vLLM's requests, blocks and steps in the form that kvferry's scheduler reads."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvferry.connectors.base import ScheduledPrompt, StepView
from kvferry.integrations.first_token import FirstToken, is_wanted
from kvferry.integrations.vllm.caches import CacheGroup
from kvferry.integrations.vllm.compat import RequestStatus
from kvferry.integrations.vllm.content import ContentKeys

_CLEAN = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED)


class VllmRequest:
    """A request of vLLM as a :class:`kvferry.connectors.base.RequestView`."""

    __slots__ = ("_content", "_num_cached", "_request")

    def __init__(self, request: Any, content: ContentKeys, num_cached: int | None = None) -> None:
        """``num_cached`` is the number of tokens found in the prefix cache, for a request that
        lends only these tokens.
        """
        self._request = request
        self._content = content
        self._num_cached = num_cached

    @property
    def request_id(self) -> str:
        """Id of the request, unique among the live requests of the engine."""
        request_id: str = self._request.request_id
        return request_id

    @property
    def num_tokens(self) -> int:
        """Number of prompt and output tokens so far."""
        num_tokens: int = self._request.num_tokens
        return num_tokens

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """The prompt; zeros if the prompt came as embeddings, which :meth:`content_keys` tells
        apart.
        """
        found: Sequence[int] | None = self._request.prompt_token_ids
        return [0] * int(self._request.num_prompt_tokens) if found is None else found

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """Adapter, multimodal inputs and embeddings that decide the KV of the first tokens."""
        return self._content.of(self._request, num_tokens)

    @property
    def num_computed_tokens(self) -> int:
        """Number of tokens whose KV is in this engine's cache."""
        computed = int(self._request.num_computed_tokens)
        return computed if self._num_cached is None else self._num_cached

    @property
    def note(self) -> bytes:
        """The first token of the answer, if the target of the prompt needs the token from here;
        empty if not, or if no token was sampled.
        """
        request = self._request
        if not is_wanted(request.kv_transfer_params) or not request.output_token_ids:
            return b""
        return FirstToken(token_id=request.output_token_ids[0]).note

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """The parameters that the router sent along."""
        params: dict[str, Any] | None = self._request.kv_transfer_params
        return params

    @property
    def traceparent(self) -> str:
        """The request's W3C trace context; vLLM has it with `--otlp-traces-endpoint`."""
        return str((self._request.trace_headers or {}).get("traceparent", ""))

    @property
    def received(self) -> float:
        """Time at which vLLM's API server began to process the prompt, in seconds since the
        epoch.
        """
        return float(self._request.arrival_time)

    @property
    def finished_cleanly(self) -> bool:
        """Whether the request ended by stop or by length."""
        return self._request.status in _CLEAN

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, ``abort`` or ``error``; ``None`` before the request has ended."""
        reason = self._request.get_finished_reason()
        return None if reason is None else str(reason)


class VllmBlocks:
    """Blocks of vLLM as a :class:`kvferry.connectors.base.BlocksView`."""

    __slots__ = ("_blocks", "_groups")

    def __init__(self, blocks: Any, groups: Sequence[CacheGroup]) -> None:
        self._blocks = blocks
        self._groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The whole block tables, one per group of kvferry."""
        tables = self._blocks.get_block_ids()
        return tuple(group.block_ids(tables) for group in self._groups)


@dataclass(slots=True)
class _Prompt:
    request: Any
    tables: tuple[list[int], ...] = ()
    """vLLM's block tables, as far as the steps have shown them."""


class Prompts:
    """The prompts lent during their computation, for which every step must be shown.

    A step of vLLM tells of new blocks only, and only some releases tell of preemptions outside a
    step. This class therefore follows both.
    """

    def __init__(self, groups: Sequence[CacheGroup]) -> None:
        self._groups = groups
        self._prompts: dict[str, _Prompt] = {}

    def add(self, request: Any) -> None:
        """Starts to follow the prompt of a new request."""
        self._prompts[request.request_id] = _Prompt(request)

    def forget(self, request_id: str) -> None:
        """Forgets a request that has ended. Unknown requests are ignored."""
        self._prompts.pop(request_id, None)

    def show(self, scheduler_output: Any, wanted: Collection[str]) -> StepView:
        """The part of a step that computes the wanted prompts.

        The caller must call this method in each step while there are any.
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
                for table, ids in zip(prompt.tables, new, strict=False):  # empty if no block is new
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
                    resumed=False,  # preempted requests are skipped above
                )
            )
        return StepView(
            parts,
            scheduler_output.finished_req_ids,
            preempted,
            scheduler_output.num_scheduled_tokens,
        )

    def _tables(self, prompt: _Prompt) -> tuple[list[int], ...]:
        """The block tables, one per group of kvferry."""
        if not prompt.tables:
            return tuple([] for _ in self._groups)
        return tuple(group.block_ids(prompt.tables) for group in self._groups)


def _parts(scheduler_output: Any) -> Iterator[tuple[str, int, Sequence[Sequence[int]], bool]]:
    """Yields each request of a step: id, position of the first token, new blocks, and whether these
    are all blocks of the request.
    """
    for new in scheduler_output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens, new.block_ids, True
    cached = scheduler_output.scheduled_cached_reqs
    each = zip(cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True)
    for name, position, blocks in each:
        yield name, position, blocks or (), False
