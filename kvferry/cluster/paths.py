"""What becomes of each path that vLLM's servers have, all releases together."""

import enum
from collections.abc import Mapping


class Way(enum.Enum):
    """Who answers."""

    BOTH = "a prefill and a decode server"
    DECODE = "a decode server"
    ONE = "a decode server, which computes or reads"
    ALL = "every server, to the operator"
    NOBODY = "nobody"
    ROUTER = "the router itself"


PATHS: Mapping[Way, tuple[str, ...]] = {
    Way.BOTH: ("POST /v1/completions", "POST /v1/chat/completions"),
    Way.DECODE: (
        "POST /v1/chat/completions/batch",
        "POST /v1/responses",
        "POST /v1/messages",
        "POST /v1/systemone",
        "POST /inference/v1/generate",
        "POST /invocations",
        "POST /cohere/v2/chat",
        "POST /v1/audio/transcriptions",
        "POST /v1/audio/translations",
    ),
    Way.ONE: (
        "GET /v1/models",
        "GET /v1/models/{model:path}",
        "GET /v1/responses/{response_id}",
        "POST /v1/responses/{response_id}/cancel",
        "GET /version",
        "GET /ping",
        "POST /ping",
        "GET /openapi.json",
        "GET /docs",
        "GET /docs/oauth2-redirect",
        "GET /redoc",
        "GET /tokenizer_info",
        "POST /tokenize",
        "POST /detokenize",
        "POST /v1/messages/count_tokens",
        "POST /v1/completions/render",
        "POST /v1/chat/completions/render",
        "POST /v1/responses/render",
        "POST /v1/messages/render",
        "POST /cohere/v2/chat/render",
        "POST /v1/completions/derender",
        "POST /v1/chat/completions/derender",
        "POST /generative_scoring",
        "POST /v1/embeddings",
        "POST /v2/embed",
        "POST /pooling",
        "POST /classify",
        "POST /score",
        "POST /v1/score",
        "POST /rerank",
        "POST /v1/rerank",
        "POST /v2/rerank",
    ),
    Way.ALL: (
        "POST /pause",
        "POST /resume",
        "GET /is_paused",
        "POST /sleep",
        "POST /wake_up",
        "GET /is_sleeping",
        "POST /release_kv_cache_memory",
        "POST /v1/load_lora_adapter",
        "POST /v1/unload_lora_adapter",
        "POST /adapters",
        "DELETE /adapters/{adapter_name}",
        "POST /reset_prefix_cache",
        "POST /reset_mm_cache",
        "POST /reset_encoder_cache",
        "POST /collective_rpc",
        "POST /start_profile",
        "POST /stop_profile",
        "POST /abort_requests",
        "POST /inference/v1/abort_requests",
        "GET /weight_info",
        "POST /weight_checker",
        "POST /update_weight_version",
        "GET /get_world_size",
        "GET /load",
        "GET /server_info",
        "GET /kv_event_sources",
        "POST /is_scaling_elastic_ep",
        "GET /fault_tolerance/status",
    ),
    Way.NOBODY: (
        "POST /init_weight_transfer_engine",
        "POST /shutdown_weight_transfer_engine",
        "POST /start_weight_update",
        "POST /start_draft_weight_update",
        "POST /update_weights",
        "POST /finish_weight_update",
        "POST /scale_elastic_ep",
        "POST /fault_tolerance/apply",
        "GET /v1/realtime",
    ),
    Way.ROUTER: ("GET /health", "GET /metrics"),
}
"""Way → method and path. A path that is in none of them is a 404."""

FORMS = frozenset({"/v1/audio/transcriptions", "/v1/audio/translations"})
"""Paths whose bodies are forms with files, and no JSON."""
_NESTED = frozenset({"sampling_params", "extra_args", "vllm_xargs"})
"""Fields in which a server looks for transfer parameters too."""


def without_transfer(body: Mapping[str, object]) -> dict[str, object]:
    """A client's body without transfer parameters: only engines may say where KV lies."""
    return {
        name: without_transfer(value) if name in _NESTED and isinstance(value, dict) else value
        for name, value in body.items()
        if name != "kv_transfer_params"
    }
