"""vLLM's requests and blocks in the shape in which our scheduler half looks at them."""

from collections.abc import Mapping, Sequence
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
