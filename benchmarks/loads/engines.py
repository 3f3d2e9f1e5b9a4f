"""kvferry's two engines: one lends prompts, the other loads them.

Imported with the ``kvferry`` of the checkout that is measured, so this uses only what every
checkout has: the plugin API, the configuration and the geometry.
"""

import dataclasses
import itertools
import random
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from benchmarks.loads.shared import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Cache,
    KnownBlocks,
    Lent,
    Loads,
    draw_table,
    pausing,
)
from kvferry.config import KVTransferConfig
from kvferry.connectors import ConnectorContext, connector_context
from kvferry.topology import EngineGeometry, ParallelShape

_WAIT_S = 30.0
"""Seconds after which something that is waited for has failed."""


@dataclass(eq=False)
class Request:
    """A request, as a connector sees it; it is also its own blocks."""

    request_id: str
    prompt_token_ids: list[int]
    kv_transfer_params: dict[str, Any]
    table: list[int]
    num_computed_tokens: int = 0
    finish_reason: str | None = None
    traceparent: str = ""
    received: float = 0.0

    @property
    def num_tokens(self) -> int:
        """Of the prompt; nothing more is ever computed."""
        return len(self.prompt_token_ids)

    @property
    def finished_cleanly(self) -> bool:
        """Whether it ended by length."""
        return self.finish_reason == "length"

    def content_keys(self, num_tokens: int) -> Mapping[str, str]:
        """Nothing but the tokens decides its KV."""
        return {}

    def get_block_ids(self) -> tuple[list[int], ...]:
        """The block table of the only group."""
        return (list(self.table),)


@dataclass
class Step:
    """A step in which nothing is computed."""

    finished_req_ids: set[str] = field(default_factory=set)
    preempted_req_ids: set[str] = field(default_factory=set)
    requests: tuple[()] = ()
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)


class Engine:
    """Both halves of a PullConnector with one rank, in this process."""

    def __init__(self, role: str, transport: str, cache: Cache) -> None:
        geometry = EngineGeometry(
            num_layers=cache.layers,
            num_kv_heads=cache.heads,
            head_size=cache.head_size,
            dtype="float16",
            block_size=BLOCK_SIZE,
            layout="NHD",
            parallel=ParallelShape(),
        )
        extra = {"transport": transport, "cluster_key": "k" * 32, "max_leased_blocks": 1 << 20}
        plugin, context = connector_context(
            KVTransferConfig(
                kv_connector="PullConnector",
                kv_role="kv_producer" if role == "prefill" else "kv_consumer",
                engine_id=role,
                kv_port=0,
                kv_connector_extra_config=extra,
            ),
            incarnation=uuid.uuid4().hex,
            groups=(geometry,),
            model=_model(cache),
            num_blocks=NUM_BLOCKS,
            world_size=1,
        )
        self._metadata = plugin.Metadata
        self.worker = plugin.worker(context, 0)
        memory = self.worker.allocate(cache.nbytes)
        self.blocks = KnownBlocks(cache, memory)
        if role == "prefill":
            self.blocks.fill()
        shape = geometry.cache_shape(0, NUM_BLOCKS)
        tensors = memory.view(np.float16).reshape(-1, *shape)
        self.worker.register_kv_caches(dict(zip(geometry.tensor_names(0), tensors, strict=True)))
        self.scheduler = plugin.scheduler(context)
        self.scheduler.set_worker_handshakes([self.worker.handshake_metadata()])

    def metadata(self, finished: set[str] | None = None) -> Any:
        """A step's metadata, as a rank in another process would get it."""
        built = self.scheduler.build_connector_meta(Step(finished or set()))
        return msgspec.msgpack.decode(msgspec.msgpack.encode(built), type=self._metadata)

    def step(self, finished: set[str] | None = None) -> Any:
        """A whole step without a request; what the rank reported."""
        self.worker.start_load_kv(self.metadata(finished))
        output = self.worker.get_transfer_results(finished or set())
        self.scheduler.update_connector_output(output)
        return output

    def close(self) -> None:
        """Closes both halves."""
        self.scheduler.close()
        self.worker.close()


def _model(cache: Cache) -> Any:
    """The fingerprint of a model; its class is named where it is asked for, in every checkout."""
    (fingerprint,) = (
        each.type for each in dataclasses.fields(ConnectorContext) if each.name == "model"
    )
    assert not isinstance(fingerprint, str)
    return fingerprint(
        name="loads",
        architecture="loads",
        num_layers=cache.layers,
        num_kv_heads=cache.heads,
        head_size=cache.head_size,
        dtype="float16",
        rope="none",
        config_digest="loads",
        weights_digest="loads",
    )


def _prompt(request_id: str, tokens: int) -> list[int]:
    return list(random.Random(request_id).choices(range(50_000), k=tokens))


class Prefill:
    """The engine that lends. Between two calls it waits, as an engine without a request does."""

    def __init__(self, transport: str, cache: Cache) -> None:
        self._engine = Engine("prefill", transport, cache)
        self._shuffle = random.Random(1)
        self._numbers = itertools.count()
        self._held: set[str] = set()

    def lend(self, tokens: int, count: int) -> list[Lent]:
        """Prompts of so many tokens, each with a ticket of its own; all lent before are over."""
        self._settle()
        return [self._lend(f"load-{next(self._numbers)}", tokens) for _ in range(count)]

    def _lend(self, request_id: str, tokens: int) -> Lent:
        scheduler = self._engine.scheduler
        table = draw_table(self._shuffle, tokens)
        wants = {"do_remote_decode": True}
        request = Request(request_id, _prompt(request_id, tokens + 1)[:-1], wants, table)
        scheduler.on_new_request(request)
        scheduler.get_num_new_matched_tokens(request, 0)
        scheduler.update_state_after_alloc(request, request, 0)
        request.num_computed_tokens = tokens
        request.finish_reason = "length"
        kept, params = scheduler.request_finished(request, request.get_block_ids())
        assert kept
        assert params is not None
        self._held.add(request_id)
        return request_id, params, table

    def _settle(self) -> None:
        """Steps until nothing is lent any more."""
        deadline = time.monotonic() + _WAIT_S
        while self._held:
            self._held -= self._engine.step().finished_sending
            assert time.monotonic() < deadline, f"still lent: {self._held}"
            time.sleep(0.0005)

    def close(self) -> None:
        """Closes the engine."""
        self._engine.close()


class Decode:
    """The engine that loads."""

    def __init__(self, transport: str, cache: Cache) -> None:
        self._engine = Engine("decode", transport, cache)
        self._shuffle = random.Random(2)

    def load(self, lent: Sequence[Lent], tokens: int, work_rounds: int) -> Loads:
        """Loads all of them, one after the other.

        Raises:
            WrongBytesError: a load left wrong bytes.
        """
        requests = [self._arrived(*each[:2], tokens) for each in lent]
        for request in requests:
            self._wait_for_lease(request, tokens)
        measured = []
        with pausing(work_rounds) as pause:
            for request, (_, _, source) in zip(requests, lent, strict=True):
                measured.append(self._load(request, tokens, pause))
                self._engine.blocks.check(source, request.table, tokens)
        return measured

    def _arrived(self, request_id: str, params: dict[str, Any], tokens: int) -> Request:
        """The request with its prompt and the token that prefill has sampled."""
        table = draw_table(self._shuffle, tokens + 1)
        request = Request(request_id, _prompt(request_id, tokens + 1), params, table)
        self._engine.scheduler.on_new_request(request)
        return request

    def _wait_for_lease(self, request: Request, tokens: int) -> None:
        deadline = time.monotonic() + _WAIT_S
        ready = (tokens, True)
        while self._engine.scheduler.get_num_new_matched_tokens(request, 0) != ready:
            assert time.monotonic() < deadline, f"{request.request_id}: no lease"
            time.sleep(0.0005)

    def _load(
        self, request: Request, tokens: int, pause: Callable[[], object]
    ) -> tuple[float, float, float]:
        scheduler, worker = self._engine.scheduler, self._engine.worker
        scheduler.update_state_after_alloc(request, request, tokens)
        metadata = self._engine.metadata()
        pause()
        wall = time.time()
        began = time.perf_counter()
        worker.start_load_kv(metadata)
        called = time.perf_counter()
        while (
            request.request_id
            not in (output := worker.get_transfer_results(set())).finished_recving
        ):
            if time.perf_counter() - began > _WAIT_S:
                raise TimeoutError(f"{request.request_id}: no result")
            pause()
        ended = time.perf_counter()
        (record,) = output.transfer_records
        assert not output.failed_recving, record.error
        scheduler.update_connector_output(output)
        request.num_computed_tokens, request.finish_reason = tokens, "length"
        scheduler.request_finished(request, request.get_block_ids())
        self._engine.step({request.request_id})
        return ended - began, called - began, record.finished - wall

    def close(self) -> None:
        """Closes the engine."""
        self._engine.close()
