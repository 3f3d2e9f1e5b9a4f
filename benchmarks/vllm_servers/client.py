"""Requests to vLLM's servers, and their metrics."""

import math
import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import httpx
import msgspec
from prometheus_client.parser import text_string_to_metric_families

ANSWER_S = 120.0
"""Seconds after which a server that does not answer counts as hung."""
KEPT_S = 2.0
"""Seconds for which an idle connection is kept, as a router keeps its own; vLLM's servers close
theirs after five."""
_http = httpx.Client(
    verify=False, trust_env=False, limits=httpx.Limits(keepalive_expiry=KEPT_S), timeout=ANSWER_S
)
"""One for all: each would read all certificates of the machine, which takes longer than most of
what is measured."""


class Choice(msgspec.Struct, frozen=True):
    """The only choice of a completion."""

    token_ids: list[int] | None
    finish_reason: str | None


class Completion(msgspec.Struct, frozen=True):
    """What a server answered, as far as anybody here looks."""

    choices: list[Choice]
    kv_transfer_params: dict[str, Any] | None = None

    @property
    def tokens(self) -> list[int]:
        """Generated ones; none where the server was not asked for them."""
        return self.choices[0].token_ids or []


class RefusalError(Exception):
    """A server answered a request with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


def complete(
    url: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    kv_transfer_params: Mapping[str, Any] | None = None,
    request_id: str | None = None,
    cache_salt: str | None = None,
    data_parallel_rank: int | None = None,
    timeout_s: float = ANSWER_S,
    return_token_ids: bool = True,
) -> Completion:
    """Greedy tokens after a prompt of token ids, at one data-parallel engine or whichever.

    Raises:
        RefusalError: the server answered with an error.
        httpx.HTTPError: it did not answer.
    """
    body = _body(prompt, max_tokens, kv_transfer_params)
    if cache_salt is not None:
        body["cache_salt"] = cache_salt
    if not return_token_ids:  # it would answer with those of the prompt, too
        del body["return_token_ids"]
    headers = _headers(request_id)
    if data_parallel_rank is not None:
        headers["X-data-parallel-rank"] = str(data_parallel_rank)
    answer = _http.post(
        f"{url}/v1/completions",
        content=msgspec.json.encode(body),
        headers=headers,
        timeout=timeout_s,
    )
    if answer.status_code != httpx.codes.OK:
        raise RefusalError(answer.status_code, answer.text)
    return msgspec.json.decode(answer.content, type=Completion)


def less_likely(url: str, prompt: Sequence[int], token: int) -> float:
    """By how many nats a token is less likely after a prompt than the likeliest one; infinite
    where it is not among the first twenty.

    Raises:
        httpx.HTTPError: the server answered with an error, or not at all.
    """
    body = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0.0,
        "logprobs": 20,
        "return_tokens_as_token_ids": True,
    }
    answer = _http.post(f"{url}/v1/completions", json=body)
    (choice,) = answer.raise_for_status().json()["choices"]
    chances: dict[str, float] = choice["logprobs"]["top_logprobs"][0]
    return max(chances.values()) - chances.get(f"token_id:{token}", -math.inf)


def stream(
    url: str, prompt: Sequence[int], max_tokens: int, **options: Any
) -> tuple[float, list[int]]:
    """The same as a stream: when the first token arrived (``time.perf_counter``), and all.

    Raises:
        RefusalError: the server answered with an error.
        httpx.HTTPError: it did not answer.
    """
    first = 0.0
    tokens: list[int] = []
    for drawn in events(url, prompt, max_tokens, **options):
        first = first or time.perf_counter()
        tokens += drawn
    return first, tokens


def events(
    url: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    kv_transfer_params: Mapping[str, Any] | None = None,
    model: str = "model",
    request_id: str | None = None,
) -> Generator[list[int], None, None]:
    """The tokens of each event of a stream as it comes; closed early, it ends the request.

    Raises:
        RefusalError, httpx.HTTPError: see :func:`stream`.
    """
    body = _body(prompt, max_tokens, kv_transfer_params) | {"stream": True, "model": model}
    with _http.stream(
        "POST",
        f"{url}/v1/completions",
        content=msgspec.json.encode(body),
        headers=_headers(request_id),
    ) as answer:
        if answer.status_code != httpx.codes.OK:
            raise RefusalError(answer.status_code, answer.read().decode(errors="replace"))
        for line in answer.iter_lines():
            data = line.removeprefix("data: ")
            if data not in ("", "[DONE]"):
                yield msgspec.json.decode(data, type=Completion).tokens


def _headers(request_id: str | None) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    return headers if request_id is None else {**headers, "X-Request-Id": request_id}


def _body(
    prompt: Sequence[int], max_tokens: int, kv_transfer_params: Mapping[str, Any] | None
) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "model",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    if kv_transfer_params is not None:
        body["kv_transfer_params"] = dict(kv_transfer_params)
    return body


def metrics(url: str) -> dict[str, float]:
    """All samples of a server's ``/metrics``, see :func:`samples_in`."""
    return samples_in(_http.get(f"{url}/metrics").text)


def samples_in(text: str) -> dict[str, float]:
    """Samples by name and labels without the model, added up over a server's engines."""
    samples: dict[str, float] = {}
    for engine in _engines_in(text).values():
        for name, value in engine.items():
            samples[name] = samples.get(name, 0.0) + value
    return samples


def engine_metrics(url: str) -> dict[str, dict[str, float]]:
    """The same by data-parallel engine: "0", "1", and "" for what is of none."""
    return _engines_in(_http.get(f"{url}/metrics").text)


def _engines_in(text: str) -> dict[str, dict[str, float]]:
    engines: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {
                key: value
                for key, value in sample.labels.items()
                if key not in ("engine", "model_name")
            }
            shown = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
            name = f"{sample.name}{{{shown}}}" if shown else sample.name
            engines.setdefault(sample.labels.get("engine", ""), {})[name] = sample.value
    return engines
