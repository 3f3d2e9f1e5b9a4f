"""Requests that lie about KV: each must be refused, or answered with the right tokens.

They go to a decode member itself, past the router, which drops what clients say of KV.
"""

import itertools
import time
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from benchmarks.faults.load import Answer, ask
from benchmarks.faults.system import System
from benchmarks.vllm_servers.pair import REMOTE_DECODE

BILLION = 1_000_000_000


def lend(system: System, index: int) -> dict[str, Any]:
    """Has a prompt computed and its KV lent; what a decode member is to be told."""
    body = {**system.prompts.body(index), "max_tokens": 1, "kv_transfer_params": REMOTE_DECODE}
    _, content = system.of("prefill")[0].http.ask("POST", "/v1/completions", body)
    params: dict[str, Any] = msgspec.json.decode(content)["kv_transfer_params"]
    return params


def load(system: System, index: int, params: Mapping[str, Any], salt: str) -> Answer:
    """What a decode member answers to a prompt and these parameters."""
    member = system.of("decode")[0]
    fields = {"kv_transfer_params": params, **system.unshared(salt)}
    return ask(member.http, system.prompts, index, **fields)


def incomplete(system: System) -> Iterator[Answer]:
    """Each field is left out, is null, and is of another type; then all but one are left out."""
    params = lend(system, 0)
    number = itertools.count()
    for key, value in params.items():
        less = {name: value for name, value in params.items() if name != key}
        odd = 7 if isinstance(value, str | list) else "x"
        for changed in (less, {**less, key: None}, {**less, key: odd}):
            yield load(system, 0, changed, f"incomplete-{next(number)}")
    yield load(system, 0, {"do_remote_prefill": True}, "incomplete-last")


def lists(system: System) -> Iterator[Answer]:
    """Two prompts in one request, with the parameters of one of them, and through the router."""
    params = lend(system, 1)
    for endpoint in (system.of("decode")[0].http, system.router):
        both = [system.prompts.body(index)["prompt"] for index in (1, 2)]
        fields = {"prompt": both, "kv_transfer_params": params, **system.unshared("lists")}
        began = time.monotonic()
        status, content = endpoint.ask("POST", "/v1/completions", system.prompts.body(1) | fields)
        if status != 200:
            yield Answer(1, began).end(began, f"HTTP {status}: {content.decode()[:200]}")
            continue
        choices = msgspec.json.decode(content)["choices"]
        for index, choice in zip((1, 2), choices, strict=True):
            yield Answer(index, began, tokens=choice["token_ids"]).end(began)


def sizes(system: System) -> Iterator[Answer]:
    """The sizes that a prefill member told, and some that it might have, are absurd."""
    for number, key in enumerate(("tp_size", "pp_size", "dcp_size", "remote_num_tokens")):
        params = lend(system, 3 + number)
        yield load(system, 3 + number, {**params, key: BILLION}, f"sizes-{number}")
        yield load(system, 3 + number, {**params, key: -1}, f"sizes-{number}-negative")


def stale(system: System) -> Iterator[Answer]:
    """References to KV that was fetched already, to that of an earlier start, to an ended lease."""
    params = lend(system, 8)
    for time_of_use in ("once", "twice"):
        yield load(system, 8, params, f"stale-{time_of_use}")
    params, late = lend(system, 9), lend(system, 10)
    system.restart(system.of("prefill")[0])
    yield load(system, 9, params, "stale-restart")
    params = lend(system, 11)
    time.sleep(system.lease_s)
    yield load(system, 10, late, "stale-late-restart")
    yield load(system, 11, params, "stale-late")
