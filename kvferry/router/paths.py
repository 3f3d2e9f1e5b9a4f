"""Treatment of each path that any release of vLLM's servers has, and of SGLang's ``/generate``."""

import enum
from collections.abc import Mapping


class Answerer(enum.Enum):
    """Servers that answer a path."""

    BOTH = "a prefill and a decode server"
    DECODE = "a decode server"
    ONE = "a decode server, which computes or reads"
    ALL = "every server, to the operator"
    NOBODY = "nobody"
    ROUTER = "the router itself"


def _each(**paths: str) -> tuple[str, ...]:
    """Makes ``METHOD path`` for each path listed after a method."""
    return tuple(f"{method} {path}" for method, listed in paths.items() for path in listed.split())


PATHS: Mapping[Answerer, tuple[str, ...]] = {
    Answerer.BOTH: _each(
        POST="""
            /v1/completions /v1/chat/completions /v1/messages /v1/responses /inference/v1/generate
            /generate
        """,
    ),
    Answerer.DECODE: _each(
        POST="""
            /v1/chat/completions/batch /v1/systemone
            /v1/decisions /invocations /cohere/v2/chat
            /v1/audio/transcriptions /v1/audio/translations
        """,
    ),
    Answerer.ONE: _each(
        GET="""
            /v1/models /v1/models/{model:path} /v1/responses/{response_id} /version
            /ping /openapi.json /docs /docs/oauth2-redirect /redoc /tokenizer_info
        """,
        POST="""
            /v1/responses/{response_id}/cancel /ping /tokenize /detokenize
            /v1/messages/count_tokens /v1/completions/render /v1/chat/completions/render
            /v1/responses/render /v1/messages/render /cohere/v2/chat/render
            /v1/completions/derender /v1/chat/completions/derender /generative_scoring
            /v1/embeddings /v2/embed /pooling /classify /score /v1/score /rerank
            /v1/rerank /v2/rerank
        """,
    ),
    Answerer.ALL: _each(
        GET="""
            /is_paused /is_sleeping /weight_info /get_world_size /load /server_info
            /kv_event_sources /fault_tolerance/status
        """,
        POST="""
            /pause /resume /sleep /wake_up /release_kv_cache_memory
            /v1/load_lora_adapter /v1/unload_lora_adapter /adapters /reset_prefix_cache
            /reset_mm_cache /reset_encoder_cache /collective_rpc /start_profile
            /stop_profile /abort_requests /inference/v1/abort_requests /weight_checker
            /update_weight_version /is_scaling_elastic_ep
        """,
        DELETE="/adapters/{adapter_name}",
    ),
    Answerer.NOBODY: _each(
        GET="/v1/realtime",
        POST="""
            /init_weight_transfer_engine /shutdown_weight_transfer_engine
            /start_weight_update /start_draft_weight_update /update_weights
            /finish_weight_update /scale_elastic_ep /fault_tolerance/apply
        """,
    ),
    Answerer.ROUTER: _each(
        GET="/health /metrics",
    ),
}
"""Way → methods and paths. Any other path is a 404."""

QUEUED = frozenset(
    each.partition(" ")[2] for way in (Answerer.BOTH, Answerer.DECODE) for each in PATHS[way]
)
"""Paths whose requests wait for room at the servers."""
FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Paths whose bodies are forms with files instead of JSON."""
SGLANGS = "/generate"
"""Path of SGLang's servers alone."""
_NESTED = frozenset({"sampling_params", "extra_args", "vllm_xargs"})
"""Fields in which servers look for transfer parameters too."""


_TRANSFER = frozenset(
    {
        "kv_transfer_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "disagg_prefill_dp_rank",
    }
)
"""Fields by which a router tells servers where KV lies, in vLLM and in SGLang."""


def without_transfer(body: Mapping[str, object]) -> dict[str, object]:
    """Removes transfer parameters from a client's body: only engines may say where KV lies."""
    return {
        name: without_transfer(value) if name in _NESTED and isinstance(value, dict) else value
        for name, value in body.items()
        if name not in _TRANSFER
    }
