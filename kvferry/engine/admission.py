"""What is asked of a request before the engine takes it in."""

from collections.abc import Sequence

import msgspec

from kvferry.cache import KVCacheManager
from kvferry.config import LoadFailurePolicy
from kvferry.engine.messages import SamplingParams
from kvferry.engine.request import EngineRequest
from kvferry.errors import OutOfBlocksError, RequestError


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
        for field in ("max_model_len", "max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}: {getattr(self, field)} is less than 1")


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
    wrong = ""
    if sampling.max_tokens < 1:
        wrong = f"max_tokens: {sampling.max_tokens} is less than 1"
    elif not 0.0 <= sampling.temperature < float("inf"):
        wrong = f"temperature: {sampling.temperature} is not a number from 0 upwards"
    elif not 0.0 < sampling.top_p <= 1.0:
        wrong = f"top_p: {sampling.top_p} is outside 0 (excluded) to 1"
    elif sampling.top_k < 0:
        wrong = f"top_k: {sampling.top_k} is negative; 0 keeps all tokens"
    elif sampling.seed_offset < 0:
        wrong = f"seed_offset: {sampling.seed_offset} is negative"
    if wrong:
        raise RequestError(wrong)
