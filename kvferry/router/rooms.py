"""Pairs with an SGLang server: both engines get a request at once, joined by a room.

A room is a number that the router draws. An SGLang server gets it beside the address of the source
(``bootstrap_host``, ``bootstrap_port``, ``bootstrap_room``); any other engine gets the transfer
that kvferry makes of the room, in its transfer parameters::

    source, target     the source gets          the target gets
    SGLang, SGLang     bootstrap server, room   bootstrap server, room
    SGLang, vLLM       bootstrap server, room   transfer of the room
    vLLM, SGLang       transfer of the room     control channel of the source, room

An SGLang decode server computes no prompt. Its first token comes from the source, so a vLLM server
writes its first token into the note of the lease. The answer of the source does not count.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from kvferry.control.tickets import CHANNEL_SCHEME, NOTE_PARAMETER, TransferId
from kvferry.router.engines import Engine
from kvferry.router.health import OURS
from kvferry.serving.openai import ApiError
from kvferry.zeromq import split_address

REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""Transfer parameters with which a prefill engine keeps the prompt's KV for another engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """The fields that join two engines which work on one request at the same time."""

    lends: Mapping[str, Any]
    """Fields of the body for the source."""
    loads: Mapping[str, Any]
    """Fields of the body for the target."""

    @property
    def lent(self) -> Mapping[str, Any]:
        """The KV that is lent, in the form in which the source takes it back."""
        found: Mapping[str, Any] = self.loads.get("kv_transfer_params") or self.loads
        return found


def by_transfer(source: Engine, key: bytes | None) -> Joined:
    """Joins two engines by a new transfer, for which the target requests a ticket from the source.

    Args:
        source: the prefill engine; its control channel is known.
        key: the key of the cluster; ``None`` without a key.
    """
    transfer = TransferId.begin(source.told.control, key).text
    return Joined(
        lends={"kv_transfer_params": {**REMOTE_DECODE, "transfer": transfer}},
        loads={"kv_transfer_params": {"do_remote_prefill": True, "transfer": transfer}},
    )


def by_room(source: Engine, target: Engine, key: bytes | None) -> Joined:
    """Joins two engines by a new room; at least one of the two is an SGLang server.

    Args:
        source: the prefill engine.
        target: the decode engine.
        key: the key of the cluster; ``None`` without a key.

    Raises:
        ApiError: 503, the two engines cannot be joined; the message has the reason and the remedy.
    """
    reason = _why_apart(source, target)
    if reason:
        message = f"{source.health.title} and {target.health.title}: {reason}"
        raise ApiError(503, message, code="engine_unavailable")
    room = 1 + secrets.randbelow((1 << 62) - 1)
    server, control = source.told.sglang, source.told.control
    if server is not None:
        host, port = urlsplit(source.url).hostname, server.disaggregation_bootstrap_port
    else:
        host, port = split_address(control)
        host = CHANNEL_SCHEME + (f"[{host}]" if ":" in host else host)
    named = {"bootstrap_host": host, "bootstrap_port": port, "bootstrap_room": room}
    if server is not None and target.needs_room:
        return Joined(lends=named, loads=named)
    params = {"do_remote_prefill": True} if server else {**REMOTE_DECODE, NOTE_PARAMETER: True}
    transfer = TransferId.of_room(control, room, key).text
    other = {"kv_transfer_params": {**params, "transfer": transfer}}
    return Joined(lends=named, loads=other) if server else Joined(lends=other, loads=named)


def why_unserved(path: str, body: Mapping[str, Any], source: Engine, target: Engine) -> str:
    """Reason why two engines in a room cannot serve a body; empty if they can."""
    for engine in (source, target):
        if path == "/generate" and not engine.needs_room:
            return f"/generate: {engine.health.title} is no SGLang server; ask /v1/completions"
    of_prompt = {
        "logprob_start_len": body.get("return_logprob")
        and body.get("logprob_start_len") not in (None, -1),
        "echo": body.get("echo") and body.get("logprobs") is not None,
    }
    for field, is_wanted in of_prompt.items():
        if is_wanted and target.needs_room:
            return (
                f"{field}: the log-probabilities of the prompt stay at the prefill server; ask for "
                "those of the answer alone"
            )
    return ""


def _why_apart(source: Engine, target: Engine) -> str:
    """Reason why two engines cannot be joined by a room; empty if they can."""
    lends, loads = source.told.sglang, target.told.sglang
    backends = [each.disaggregation_transfer_backend if each else OURS for each in (lends, loads)]
    if backends[0] != backends[1]:
        return (
            f"--disaggregation-transfer-backend: {' and '.join(backends)}; give both the same, and "
            f"{OURS} to an SGLang server beside another engine"
        )
    if lends is not None and loads is not None:
        return ""
    if lends is not None and lends.dp_size > 1:
        return f"--dp-size: {lends.dp_size}; before an engine that is no SGLang server it is 1"
    if loads is not None and source.told.is_ours:
        return (
            "a reference engine does not tell its first token; take a vLLM server with "
            "KVFerryConnector before an SGLang decode server"
        )
    if not source.told.control:
        return (
            "the control channel of the prefill engine is not known; name it in the list of "
            "engines (control), and let the router reach the bootstrap server of an SGLang server"
        )
    return ""
