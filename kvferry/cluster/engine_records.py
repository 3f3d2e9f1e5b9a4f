"""What an engine tells of its past, over ``/kvferry/records``."""

import msgspec

from kvferry.connectors.base import TransferRecord
from kvferry.engine.messages import RequestTimings


class RequestSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One ended request, as ``/kvferry/records`` tells it."""

    request_id: str
    prompt_tokens: int
    token_ids: list[int]
    gaps: list[float]
    """For each token, the difference of the two best logits."""
    finish_reason: str
    error: str
    num_cached_tokens: int
    num_external_tokens: int
    timings: RequestTimings | None


class Records(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/kvferry/records``."""

    engine: str
    transfers: list[TransferRecord]
    requests: list[RequestSummary]
