"""vLLM's own request classes take a prefill server's copy exactly where they take the body itself.

Not judged here are rules that need a server, because the classes do not know them:

- lengths: the prompt plus ``max_tokens`` beside the longest sequence, ``min_tokens`` beside the
  room that is left, the server's own default of ``max_tokens``;
- limits: ``--max-logprobs``, the number of prompts, ``priority`` without a scheduler for it;
- parsers: ``tool_choice`` without a tool parser, ``reasoning_effort`` without a reasoning parser,
  grammars that the backend of structured outputs does not know;
- the vocabulary (token ids, ``bad_words``), and names of models and adapters.

Of these only lengths and ``prompt_logprobs`` beyond the limit depend on a field that the copy
changes.
"""

import copy
import itertools
import warnings
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # vLLM's are not ours
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.exceptions import VLLMValidationError

from kvferry.router.apis import APIS
from kvferry.router.rooms import REMOTE_DECODE

ROOM = 512
"""Tokens that are left for an answer."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CLASSES = {CHAT: ChatCompletionRequest, COMPLETIONS: CompletionRequest}
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "?"}]},
    COMPLETIONS: {"prompt": "a"},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

VALUES = {
    "stream": (None, False, True),
    "stream_options": (None, {}, {"include_usage": True}, {"include_usage": "perhaps"}, 1),
    "max_tokens": (None, 0, 1, 5, -1, "many"),
    "max_completion_tokens": (None, 0, 5),
    "min_tokens": (None, 0, 1, 5, 6, 17, -1, "few"),
    "prompt_logprobs": (None, 0, 2, -1, -2, "2"),
    "echo": (None, False, True),
    "logprobs": (None, False, True, 0, 2, -1, -2),
    "top_logprobs": (None, 0, 2, -1, -2),
    "logprob_token_ids": (None, [], [3, 7]),
    "use_beam_search": (False, True),
    "n": (None, 1),
    "best_of": (1,),
    "return_token_ids": (True,),
    "stop": ("x", [""]),
    "tools": ([], TOOLS),
    "tool_choice": ("auto", "none", "required", {"function": {"name": "g"}}),
    "response_format": ({"type": "json_object"}, {"type": "json_schema"}),
    "continue_final_message": (True,),
    "stream_interval": (0, 2),
    "temperature": (0, 3),
}
"""Field → values of the generated bodies."""
UNUSUAL = ({"stream": "true"}, {"stream": 1}, {"max_tokens": "5"}, {"max_tokens": 5.0})
"""Values that vLLM takes for values of another type."""


def bodies(path, most_fields):
    """All bodies with so many of the fields."""
    for count in range(most_fields + 1):
        for names in itertools.combinations(VALUES, count):
            for values in itertools.product(*(VALUES[name] for name in names)):
                yield LEAST[path] | dict(zip(names, values, strict=True))


def is_taken(path, body):
    """Whether the request class, and the sampling parameters that it makes, take a body."""
    try:
        request = CLASSES[path].model_validate(copy.deepcopy(body))
        most = request.max_tokens
        if path == CHAT and request.max_completion_tokens is not None:
            most = request.max_completion_tokens
        most = ROOM if most is None else most
        if request.use_beam_search:
            # The handlers, not the classes, refuse this.
            return not request.stream and bool(request.to_beam_search_params(most, {}))
        return bool(request.to_sampling_params(most, {}))
    except (VLLMValidationError, ValueError, TypeError, LookupError, AttributeError):
        return False


def needs_no_copy(path, body):
    """Whether a body that a release takes has no copy: prefill could not help, or releases differ
    in what ``null`` means.
    """
    if body.get("use_beam_search"):
        return True
    is_null = body.get("max_tokens", 16) is None and body.get("min_tokens") == 17
    return path == COMPLETIONS and (body.get("max_tokens") == 0 or is_null)


@pytest.mark.parametrize("path", CLASSES)
def test_a_copy_is_taken_exactly_where_the_body_is(path):
    taken = refused = 0
    for body in bodies(path, 3):
        made, expected = APIS[path].copy(body), is_taken(path, body)
        if made is None:
            assert not expected or needs_no_copy(path, body), body
        else:
            lends = {**made, "kv_transfer_params": REMOTE_DECODE}
            assert is_taken(path, lends) is expected, (body, made)
        taken += expected
        refused += not expected
    assert min(taken, refused) > 5000


@pytest.mark.parametrize("path", CLASSES)
@pytest.mark.parametrize("values", UNUSUAL, ids=str)
def test_a_value_of_another_type_is_left_to_the_decode_server(path, values):
    body = LEAST[path] | values
    assert is_taken(path, body)
    assert APIS[path].copy(body) is None


@pytest.mark.parametrize("path", CLASSES)
def test_a_copy_asks_for_nothing_that_takes_long(path):
    for made in filter(None, (APIS[path].copy(body) for body in bodies(path, 2))):
        if is_taken(path, made):
            request = CLASSES[path].model_validate(copy.deepcopy(made))
            params = request.to_sampling_params(request.max_tokens, {})
            assert (params.max_tokens, params.prompt_logprobs, request.stream) == (1, None, False)


# ---- token ids -----------------------------------------------------------------------------------

GENERATE = "/inference/v1/generate"
OF_TOKENS = {
    "stream": VALUES["stream"],
    "stream_options": VALUES["stream_options"],
    "return_token_ids": (True,),
    "cache_salt": ("x", ""),
}
SAMPLING = {
    "max_tokens": VALUES["max_tokens"],
    "min_tokens": VALUES["min_tokens"],
    "prompt_logprobs": VALUES["prompt_logprobs"],
    "logprobs": (None, 0, 2, -1, -2),
    "n": (1,),
    "stop": ("x", [""]),
    "temperature": (0, 3),
    "ignore_eos": (True,),
    "stop_token_ids": ([1], ["a"]),
    "structured_outputs": ({"regex": "a"}, {"regex": "a", "choice": ["b"]}),
    "extra_args": ({"a": 1},),
}


def generate_bodies():
    for names in itertools.combinations(OF_TOKENS, 1):
        for values in itertools.product(*(OF_TOKENS[name] for name in names)):
            for count in range(3):
                for inner in itertools.combinations(SAMPLING, count):
                    for each in itertools.product(*(SAMPLING[name] for name in inner)):
                        sampling = dict(zip(inner, each, strict=True))
                        outer = dict(zip(names, values, strict=True))
                        yield {"token_ids": [1, 2], "sampling_params": sampling} | outer


def is_of(request_class, body):
    """Whether a request class takes a body."""
    try:
        return bool(request_class.model_validate(copy.deepcopy(body)))
    except (VLLMValidationError, ValueError, TypeError, AssertionError):
        return False


def test_a_copy_of_token_ids_is_taken_exactly_where_the_body_is():
    counts = {True: 0, False: 0}
    for body in generate_bodies():
        sampling = body["sampling_params"]
        made, expected = APIS[GENERATE].copy(body), is_of(GenerateRequest, body)
        if made is None:
            is_null = sampling.get("max_tokens", 16) is None and sampling.get("min_tokens") == 17
            of_prompt = sampling.get("prompt_logprobs") is not None
            assert not expected or is_null or of_prompt, body
        else:
            lends = {**made, "kv_transfer_params": REMOTE_DECODE}
            assert is_of(GenerateRequest, lends) is expected, body
            if expected:
                params = GenerateRequest.model_validate(copy.deepcopy(made)).sampling_params
                assert (params.max_tokens, params.min_tokens < 2) == (1, True)
        counts[expected] += 1
    assert min(counts.values()) > 500


# ---- Anthropic's messages ------------------------------------------------------------------------

MESSAGES = "/v1/messages"
OF_MESSAGES = {
    "max_tokens": (None, 0, 1, 2048, -1, "many"),
    "stream": (None, False, True),
    "thinking": (
        None,
        {"type": "enabled", "budget_tokens": 1024},
        {"type": "enabled", "budget_tokens": 2048},
        {"type": "enabled", "budget_tokens": 1},
        {"type": "enabled"},
        {"type": "disabled"},
        {"type": "adaptive"},
        {"type": "perhaps"},
        "enabled",
    ),
    "tools": ([], [{"name": "f", "input_schema": {}}], [{"name": "f"}]),
    "tool_choice": ({"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "f"}, {}, "auto"),
    "system": ("Be brief.", [{"type": "text", "text": "Be brief."}], 1),
    "output_config": ({"effort": "low"}, {"effort": "none"}),
    "stop_sequences": (["x"], "x"),
}


def test_a_copy_of_messages_is_taken_exactly_where_the_body_is():
    counts = {True: 0, False: 0}
    least = {"model": "m", "messages": [{"role": "user", "content": "?"}], "max_tokens": 2000}
    # Releases before 0.31 do not read `thinking`: they take budgets that newer ones refuse.
    known = [name for name in OF_MESSAGES if name in AnthropicMessagesRequest.model_fields]
    for count in range(4):
        for names in itertools.combinations(known, count):
            for values in itertools.product(*(OF_MESSAGES[name] for name in names)):
                body = least | dict(zip(names, values, strict=True))
                made, expected = APIS[MESSAGES].copy(body), is_of(AnthropicMessagesRequest, body)
                if made is None:
                    is_named = body.get("tool_choice") == {"type": "tool", "name": "f"}
                    assert not expected or is_named, body
                else:
                    lends = {**made, "kv_transfer_params": REMOTE_DECODE}
                    assert is_of(AnthropicMessagesRequest, lends) is expected, body
                counts[expected] += 1
    assert min(counts.values()) > 300


# ---- responses -----------------------------------------------------------------------------------

RESPONSES = "/v1/responses"
OF_RESPONSES = {
    "max_output_tokens": (None, 0, 1, 5, -1, "many"),
    "stream": (None, False, True),
    "store": (None, False, True, "perhaps"),
    "background": (None, False, True),
    "previous_response_id": (None, "resp_1"),
    "truncation": (None, "disabled", "auto", "perhaps"),
    "tools": (
        [],
        [{"type": "function", "name": "f", "parameters": {}}],
        [{"type": "custom", "name": "f"}],
        [{"type": "mcp", "server_label": "a"}],
        [{"type": "function"}],
    ),
    "tool_choice": ("auto", "required", *({"type": "function", "name": name} for name in "fg")),
    "text": ({"format": {"type": "json_object"}}, {"format": {"type": "perhaps"}}),
    "structured_outputs": ({"regex": "a"},),
    "include": (["message.output_text.logprobs"], ["perhaps"]),
    "top_logprobs": (2, -1),
    "temperature": (0, 3),
    "reasoning": ({"effort": "low"}, {"effort": 1}),
    "request_id": ("a", 1, None),
}


def is_response(body):
    """Whether the request class, and the sampling parameters that it makes, take a body."""
    try:
        request = ResponsesRequest.model_validate(copy.deepcopy(body))
        return bool(request.to_sampling_params(ROOM, {}))
    except (VLLMValidationError, ValueError, TypeError, LookupError, AttributeError):
        return False


def test_a_copy_of_a_response_is_taken_exactly_where_the_body_is():
    counts = {True: 0, False: 0}
    for count in range(4):
        for names in itertools.combinations(OF_RESPONSES, count):
            for values in itertools.product(*(OF_RESPONSES[name] for name in names)):
                body = {"input": "?"} | dict(zip(names, values, strict=True))
                made, expected = APIS[RESPONSES].copy(body), is_response(body)
                if made is None:
                    is_kept = body.get("background") or body.get("previous_response_id")
                    is_kept = is_kept or body.get("truncation") == "auto"
                    is_kept = is_kept or "mcp" in str(body.get("tools"))
                    assert not expected or is_kept, body
                else:
                    lends = {**made, "kv_transfer_params": REMOTE_DECODE}
                    assert is_response(lends) is expected, body
                counts[expected] += 1
    assert min(counts.values()) > 500
