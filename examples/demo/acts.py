"""The demo without the display: prompts, the undivided engine, the cluster, the comparison.

The demo has two acts. In the first act, all prompts come at once, and each goes from the prefill
engine to the decode engine. The second act is a conversation over the same engines and a router
that knows the engines' caches.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import msgspec

from kvferry.cluster.launcher import Cluster
from kvferry.config import ClusterConfig, EngineConfig, RouterConfig
from kvferry.connectors.records import digest_mismatch
from kvferry.engine.messages import RequestTimings, SamplingParams
from kvferry.errors import ConfigError, EngineError
from kvferry.observe.records import TransferRecord
from kvferry.router.answer import TextCodec
from kvferry.serving import web
from kvferry.serving.metrics import Records, RequestSummary

if TYPE_CHECKING:
    import httpx

    from kvferry.engine.engine import Engine

T = TypeVar("T")

PROMPT_FOLDER = Path(__file__).parent / "prompts"
CONVERSATION_FOLDER = Path(__file__).parent / "conversation"
TURN_TOKENS = 48
"""Number of tokens in an answer of the conversation at most."""
CHUNK_TOKENS = 128
"""Number of tokens per step of the prefill engine at most, so that long prompts take several
steps."""
DIRECT_TOKENS = 128
"""``direct_tokens`` of the second act's router: two turns are shorter, and the others are
longer."""
PAUSE_S = 0.5
"""Seconds between two turns, in which the router learns of cached blocks; people take longer."""
RECORDS_TIMEOUT_S = 30.0
"""Seconds within which the engines must report their transfers after the last answer."""

Advance: TypeAlias = Callable[[int, int], None]
"""Function called with the finished number and the total number."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question."""

    name: str
    text: str


@dataclass(slots=True)
class Reference:
    """Answer of the undivided engine."""

    token_ids: list[int]
    gaps: list[float]
    """Difference between the two best logits, for each token."""
    prompt_tokens: int


@dataclass(slots=True)
class Answer:
    """A request as the client sees it. Times are Unix seconds."""

    name: str
    sent: float = 0.0
    first_token: float | None = None
    finished: float | None = None
    request_id: str = ""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    route: str = ""
    """The router's text about the engines it chose; empty if the router does not explain."""


@dataclass(frozen=True, slots=True)
class Difference:
    """First difference between an answer and the undivided engine's answer."""

    position: int
    """Index of the first token that differs."""
    expected: int | None
    """Token of the undivided engine at this index; ``None`` if that answer has ended."""
    got: int | None
    reference_gap: float | None
    """Difference between the two best logits at this index, in the undivided engine."""
    cluster_gap: float | None
    """Difference between the two best logits at this index, in the engine that sampled the
    token."""


@dataclass(frozen=True, slots=True)
class Result:
    """All facts about a request."""

    name: str
    answer: Answer
    prefill: RequestSummary
    decode: RequestSummary | None
    """Summary of the decode engine; ``None`` if the first token was the whole answer."""
    loads: tuple[TransferRecord, ...]
    """Transfer records of the loads, one per decode rank."""
    difference: Difference | None
    damage: str
    """Error in the loaded KV; empty if the loaded KV equals the lent KV."""

    @property
    def ok(self) -> bool:
        """Whether tokens and KV equal those of the undivided engine."""
        return self.difference is None and not self.damage

    @property
    def nbytes(self) -> int:
        """Number of bytes moved, over all ranks."""
        return sum(load.nbytes for load in self.loads)

    @property
    def copies(self) -> int:
        """Number of contiguous copies after merging, over all ranks."""
        return sum(load.copies for load in self.loads)

    @property
    def tokens_moved(self) -> int:
        """Number of tokens whose KV has moved."""
        return max((load.tokens for load in self.loads), default=0)

    @property
    def transfer_s(self) -> float:
        """Seconds in which bytes moved, for the rank with the longest time."""
        return max((load.moved_s for load in self.loads), default=0.0)


@dataclass(frozen=True, slots=True)
class Turn:
    """The question of a turn of the conversation."""

    name: str
    messages: list[dict[str, str]]
    """Whole conversation so far; the assistant's answers are those of the undivided engine."""
    reference: Reference
    """The undivided engine's answer in this turn."""


@dataclass(frozen=True, slots=True)
class TurnResult:
    """Sources of the KV of a turn's prompt, from the engines' reports."""

    name: str
    answer: Answer
    engine: str
    """Engine that computed the missing tokens: ``prefill`` or ``decode``."""
    prompt_tokens: int
    cached: int
    """Number of tokens in this engine's own cache."""
    borrowed: int
    """Number of tokens borrowed from the other engine."""
    decode_cached: int
    """Number of tokens in the decode engine's own cache."""
    moved: int
    """Number of tokens loaded from the prefill engine by the decode engine."""
    prefill: RequestTimings | None
    """Times of the prefill engine; ``None`` if the decode engine computed alone."""
    decode: RequestTimings | None
    loads: tuple[TransferRecord, ...]
    """Transfer records of the loads, one per decode rank."""
    difference: Difference | None

    @property
    def computed(self) -> int:
        """Number of computed tokens of the prompt."""
        return self.prompt_tokens - self.cached - self.borrowed


def load_prompts(folder: Path | None = None) -> list[Prompt]:
    """The prompts in a folder of text files, by name; the shipped prompts if left out.

    Raises:
        ConfigError: the folder does not exist, or holds no text files.
    """
    folder = folder or PROMPT_FOLDER
    files = sorted(folder.glob("*.txt"))
    if not files:
        raise ConfigError(f"{folder}: holds no prompts; put one text file per prompt there")
    return [Prompt(file.stem, file.read_text(encoding="utf-8").strip()) for file in files]


def demo_config(
    model: str,
    transports: Sequence[str],
    sequences: Sequence[int] = (),
    *,
    converses: bool = False,
) -> ClusterConfig:
    """Two engines that differ in everything: TP 3 and PP 2, blocks of 16 and 24, HND and NHD.

    Args:
        model: source of the model.
        transports: transports of the KV, best first.
        sequences: number of tokens of each request, including the answer. Every engine has room for
            all requests and half as much again, because leases must not pin the whole pool.
        converses: whether there is a second act. If so, both engines may lend and load, also while
            a prompt is computed, and both publish their cached blocks. The router of the first act
            ignores these.
    """

    def num_blocks(block_size: int) -> int:
        return 64 + sum(-(-tokens // block_size) for tokens in sequences) * 3 // 2

    extra = {"transport": list(transports), "record_digests": True}
    if converses:
        extra["early_load"] = "now"
    connector = {
        "kv_connector": "PullConnector",
        "kv_port": 0,
        "kv_connector_extra_config": extra,
    }
    free = "tcp://127.0.0.1:0"
    told = {"kv_events": {"endpoint": free, "replay_endpoint": free}} if converses else {}
    roles = ("kv_both", "kv_both") if converses else ("kv_producer", "kv_consumer")
    return ClusterConfig.from_mapping(
        {
            "model": {"source": model, "dtype": "float32"},
            "prefill": [
                {
                    "name": "prefill",
                    "tp": 3,
                    "block_size": 16,
                    "layout": "HND",
                    "num_blocks": num_blocks(16),
                    "max_num_batched_tokens": CHUNK_TOKENS,
                    "kv_transfer_config": {**connector, "kv_role": roles[0]},
                    **told,
                }
            ],
            "decode": [
                {
                    "name": "decode",
                    "pp": 2,
                    "block_size": 24,
                    "layout": "NHD",
                    "num_blocks": num_blocks(24),
                    "kv_transfer_config": {**connector, "kv_role": roles[1]},
                    **told,
                }
            ],
            "router": {"port": 0, "route_by": "requests"},
        },
        "demo",
    )


SECOND_ROUTER = RouterConfig(port=0, direct_tokens=DIRECT_TOKENS, explain=True, at_once="always")
"""Router of the second act: chooses by cost, explains, and sends a request to both engines at
once."""


def run_reference(
    folder: str,
    dtype: str,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    advance: Advance,
    said: Sequence[Prompt] = (),
) -> tuple[list[Reference], list[Turn]]:
    """The answers of an undivided engine, TP 1 and PP 1, in this process; closes the engine.

    Args:
        folder: folder of the converted model.
        dtype: dtype of the cluster.
        prompts: token ids.
        max_tokens: longest answer in tokens.
        advance: called with the number of computed tokens of prompts and answers.
        said: the user's messages in a conversation, which follows the prompts.

    Raises:
        EngineError: a prompt failed.
    """
    import torch

    from kvferry.engine.builder import build_engine

    # One thread, as for each rank of the cluster: several threads wait for each other at every
    # operation, which takes many times as long on a busy machine.
    torch.set_num_threads(1)
    blocks = 64 + sum((len(prompt) + max_tokens) // 16 + 1 for prompt in prompts)
    config = EngineConfig(name="undivided", kv_transfer_config={}, num_blocks=blocks)
    blocks += config.max_model_len // 16 if said else 0
    config = msgspec.structs.replace(config, num_blocks=blocks)
    answers = {str(index): Reference([], [], len(p)) for index, p in enumerate(prompts)}
    total = sum(len(prompt) + max_tokens for prompt in prompts)
    with build_engine(config, folder, dtype=dtype, executor="inprocess", connect=False) as engine:
        for name, prompt in zip(answers, prompts, strict=True):
            engine.add_request(name, prompt, SamplingParams(max_tokens=max_tokens))
        left = len(prompts)
        while left:
            for output in engine.step():
                answer = answers[output.request_id]
                answer.token_ids += output.token_ids
                answer.gaps += output.gaps
                if output.finish_reason == "error":
                    raise EngineError(f"the undivided engine failed: {output.error}")
                left -= output.finish_reason is not None
            advance(engine.stats().computed_tokens, total)
        advance(total, total)
        turns = _converse(engine, TextCodec.open(folder), said, min(max_tokens, TURN_TOKENS))
    return list(answers.values()), turns


def _converse(
    engine: "Engine", codec: TextCodec, said: Sequence[Prompt], max_tokens: int
) -> list[Turn]:
    """Holds a conversation with the undivided engine."""
    turns: list[Turn] = []
    messages: list[dict[str, str]] = []
    for each in said:
        messages = [*messages, {"role": "user", "content": each.text}]
        prompt = codec.encode_chat(messages)
        (answer,) = engine.generate([prompt], SamplingParams(max_tokens=max_tokens))
        if answer.error:
            raise EngineError(f"the undivided engine failed: {answer.error}")
        reference = Reference(answer.token_ids, answer.gaps, len(prompt))
        turns.append(Turn(each.name, messages, reference))
        text = codec.decode(answer.token_ids)
        messages = [*messages, {"role": "assistant", "content": text}]
    return turns


async def send_all(
    cluster: Cluster, prompts: Sequence[Prompt], max_tokens: int, changed: Callable[[Answer], None]
) -> list[Answer]:
    """Sends all prompts at once as streaming chats; returns when the last chat has ended.

    Args:
        cluster: the cluster whose router is asked.
        prompts: the questions.
        max_tokens: longest answer in tokens.
        changed: called with every answer that has changed.
    """
    answers = [Answer(prompt.name) for prompt in prompts]
    async with _client(cluster) as client:
        await asyncio.gather(
            *(
                _ask(
                    client,
                    [{"role": "user", "content": prompt.text}],
                    max_tokens,
                    answer,
                    changed,
                )
                for prompt, answer in zip(prompts, answers, strict=True)
            )
        )
    return answers


async def hold(
    cluster: Cluster, turns: Sequence[Turn], max_tokens: int, changed: Callable[[Answer], None]
) -> list[Answer]:
    """Holds the conversation turn by turn; ends with the first turn that fails.

    Args:
        cluster: the cluster whose router is asked.
        turns: the questions.
        max_tokens: longest answer in tokens.
        changed: called with every answer that has changed.
    """
    answers: list[Answer] = []
    async with _client(cluster) as client:
        for turn in turns:
            await asyncio.sleep(PAUSE_S)
            answers.append(Answer(turn.name))
            tokens = min(max_tokens, TURN_TOKENS)
            await _ask(client, turn.messages, tokens, answers[-1], changed)
            if answers[-1].error:
                break
    return answers


def _client(cluster: Cluster) -> "httpx.AsyncClient":
    import httpx

    return httpx.AsyncClient(
        base_url=cluster.url,
        timeout=httpx.Timeout(None, connect=10.0),
        headers=web.bearer(cluster.api_key),
        trust_env=False,
    )


async def _ask(
    client: "httpx.AsyncClient",
    messages: Sequence[Mapping[str, str]],
    max_tokens: int,
    answer: Answer,
    changed: Callable[[Answer], None],
) -> None:
    body = {
        "messages": messages,
        "max_completion_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "return_token_ids": True,
    }
    answer.sent = time.time()
    changed(answer)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            answer.error = (await response.aread()).decode(errors="replace")
        else:
            answer.route = response.headers.get("x-kvferry-route", "")
            async for chunk in _chunks(response.aiter_lines()):
                _take(chunk, answer)
                changed(answer)
    answer.finished = time.time()
    changed(answer)


async def _chunks(lines: AsyncIterator[str]) -> AsyncGenerator[dict[str, Any], None]:
    async for payload in web.sse_payloads(line.encode() async for line in lines):
        if payload != b"[DONE]":
            yield msgspec.json.decode(payload)


def _take(chunk: Mapping[str, Any], answer: Answer) -> None:
    if "error" in chunk:
        answer.error = str(chunk["error"])
        return
    answer.request_id = str(chunk["id"])
    for choice in chunk["choices"]:
        answer.text += choice["delta"].get("content", "")
        answer.token_ids += choice["token_ids"]
        answer.finish_reason = choice["finish_reason"]
        if answer.token_ids and answer.first_token is None:
            answer.first_token = time.time()


def fetch_records(cluster: Cluster, answers: Sequence[Answer]) -> dict[str, Records]:
    """Role → records of the role's engine, once every rank has reported each request that moved.

    Raises:
        EngineError: a report does not come.
    """
    moved = [answer.request_id for answer in answers if len(answer.token_ids) > 1]
    return _records(cluster, moved, lambda name, found: _is_reported(name, found, cluster))


def _records(
    cluster: Cluster, ids: Sequence[str], is_told: Callable[[str, Mapping[str, Records]], bool]
) -> dict[str, Records]:
    """Role → records of the role's engine, once all requests are fully reported."""
    import httpx

    deadline = time.monotonic() + RECORDS_TIMEOUT_S
    headers = web.bearer(cluster.api_key)
    with httpx.Client(trust_env=False, timeout=RECORDS_TIMEOUT_S, headers=headers) as client:
        while True:
            found: dict[str, Records] = {}
            for engine in cluster.engines:
                response = client.get(f"{engine.url}/kvferry/records")
                response.raise_for_status()
                found[engine.role] = msgspec.json.decode(response.content, type=Records)
            missing = [id for id in ids if not is_told(id, found)]
            if not missing:
                return found
            if time.monotonic() > deadline:
                raise EngineError(f"no transfer records of {len(missing)} requests: {missing}")
            time.sleep(0.2)


def _is_reported(request_id: str, found: Mapping[str, Records], cluster: Cluster) -> bool:
    return all(
        sum(record.request_id == request_id for record in found[engine.role].transfers)
        == engine.config.tp * engine.config.pp
        for engine in cluster.engines
    ) and all(
        any(request.request_id == request_id for request in records.requests)
        for records in found.values()
    )


def fetch_turns(
    cluster: Cluster, turns: Sequence[Turn], answers: Sequence[Answer]
) -> list[TurnResult]:
    """The sources of the KV in each turn, and the comparison with the undivided engine's answer.

    Raises:
        EngineError: an engine does not report.
    """
    by_id = {answer.request_id: answer for answer in answers}
    num_ranks = sum(
        engine.config.tp * engine.config.pp for engine in cluster.engines if engine.role == "decode"
    )

    def is_told(request_id: str, found: Mapping[str, Records]) -> bool:
        answer = by_id[request_id]
        asked = {"prefill"} if "prefill=-" not in answer.route else set()
        if not asked or len(answer.token_ids) > 1:  # otherwise the first token was the whole answer
            asked.add("decode")
        ended = {role: _summary(found[role], request_id) for role in asked}
        if not all(ended.values()):
            return False
        decode = ended.get("decode")
        is_loaded = len(asked) == 2 and decode is not None and decode.num_external_tokens > 0
        return not is_loaded or len(_loads(found["decode"], request_id)) == num_ranks

    found = _records(cluster, list(by_id), is_told)
    return [turn_result(turn, answer, found) for turn, answer in zip(turns, answers, strict=True)]


def turn_result(turn: Turn, answer: Answer, found: Mapping[str, Records]) -> TurnResult:
    prefill, decode = (_summary(found[role], answer.request_id) for role in ("prefill", "decode"))
    first = prefill or decode
    assert first is not None  # fetch_turns has waited for the summary
    gaps = decode.gaps if decode else []
    if prefill and len(gaps) < len(answer.token_ids):  # otherwise both sampled the first token
        gaps = prefill.gaps + gaps
    return TurnResult(
        name=turn.name,
        answer=answer,
        engine="decode" if prefill is None else "prefill",
        prompt_tokens=first.prompt_tokens,
        cached=first.num_cached_tokens,
        borrowed=first.num_external_tokens,
        decode_cached=decode.num_cached_tokens if decode else 0,
        moved=decode.num_external_tokens if prefill and decode else 0,
        prefill=prefill.timings if prefill else None,
        decode=decode.timings if decode else None,
        loads=_loads(found["decode"], answer.request_id) if prefill else (),
        difference=find_difference(turn.reference, answer.token_ids, gaps),
    )


def _summary(records: Records, request_id: str) -> RequestSummary | None:
    return next((one for one in records.requests if one.request_id == request_id), None)


def _loads(records: Records, request_id: str) -> tuple[TransferRecord, ...]:
    return tuple(
        record
        for record in records.transfers
        if record.request_id == request_id and record.direction == "recv"
    )


def compare(
    references: Sequence[Reference], answers: Sequence[Answer], records: Mapping[str, Records]
) -> list[Result]:
    """Compares each answer with the undivided engine's, and the loaded KV with the lent KV."""
    return [
        _result(reference, answer, records)
        for reference, answer in zip(references, answers, strict=True)
    ]


def _result(reference: Reference, answer: Answer, records: Mapping[str, Records]) -> Result:
    prefill, decode = (_summary(records[role], answer.request_id) for role in ("prefill", "decode"))
    assert prefill is not None, "it drew the first token"
    lent = [r for r in records["prefill"].transfers if r.request_id == answer.request_id]
    loads = _loads(records["decode"], answer.request_id)
    return Result(
        name=answer.name,
        answer=answer,
        prefill=prefill,
        decode=decode,
        loads=loads,
        difference=find_difference(
            reference, answer.token_ids, prefill.gaps + (decode.gaps if decode else [])
        ),
        damage=_damage(lent, loads),
    )


def find_difference(
    reference: Reference, token_ids: Sequence[int], gaps: Sequence[float]
) -> Difference | None:
    """The first token that differs; ``None`` if all tokens are equal.

    Args:
        reference: the undivided engine's answer.
        token_ids: the cluster's answer.
        gaps: difference between the two best logits, for each token of ``token_ids``.
    """
    if token_ids == reference.token_ids:
        return None
    longest = max(len(token_ids), len(reference.token_ids))
    pairs = [(_at(reference.token_ids, i), _at(token_ids, i)) for i in range(longest)]
    position = next(index for index, (expected, got) in enumerate(pairs) if expected != got)
    expected, got = pairs[position]
    return Difference(position, expected, got, _at(reference.gaps, position), _at(gaps, position))


def _at(values: Sequence[T], index: int) -> T | None:
    return values[index] if index < len(values) else None


def _damage(lent: Sequence[TransferRecord], loads: Sequence[TransferRecord]) -> str:
    if not loads:
        return ""  # nothing had to move: the first token was the whole answer
    failed = next((load for load in loads if not load.ok), None)
    if failed is not None:
        return f"rank {failed.rank} could not load: {failed.error}"
    if {record.lease_id for record in lent} != {record.lease_id for record in loads}:
        return "the records speak of different leases"
    token = digest_mismatch(lent, loads)
    return "" if token is None else f"the KV of token {token} is not that which was lent"
