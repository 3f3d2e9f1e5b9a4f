"""The halves of a connector that does what each request's ``kv_transfer_params`` say.

It works on the toy cache of :mod:`tests.engine.toy_cache`, moves no bytes between processes,
and misbehaves on demand: answers late, fails, writes after an abort, reports twice. See
:class:`ScriptedParams`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvferry.connectors.base import (
    BlocksView,
    KVConnectorMetadata,
    KVConnectorOutput,
    RequestView,
    SchedulerConnector,
    SchedulerOutputView,
    WorkerConnector,
)
from kvferry.errors import TicketError, TransferError
from kvferry.observe.records import TransferRecord
from kvferry.topology.windows import first_kept_token
from tests.engine.toy_cache import ToyCache, spoil_tokens, write_tokens


class ScriptedParams(msgspec.Struct, frozen=True, kw_only=True):
    """What happens to one request; the fields are the keys of its ``kv_transfer_params``."""

    refuse: bool = False
    """Whether ``on_new_request`` raises ``TicketError``."""
    external: int = 0
    """Leading prompt tokens that lie outside."""
    ask_later: int = 0
    """How often the connector answers "ask later" first."""
    impossible: bool = False
    """Whether ``get_num_new_matched_tokens`` then raises ``TransferError``."""
    load_async: bool = True
    load_steps: int = 1
    """Steps until the load ends on rank 0; each further rank takes one more."""
    valid: int | None = None
    """When given, the load fails, with the prompt's first ``valid`` tokens in place."""
    report_blocks: bool = True
    """Whether a failed load is reported as ``invalid_block_ids``; never with several groups."""
    report_failed: bool = False
    """Whether a failed load is reported as ``failed_recving``."""
    lend_steps: int = 0
    """Steps for which the blocks are needed after a clean end."""
    repeat: int = 0
    """How often the finished reports are made again, in later steps."""


class ScriptedLoad(msgspec.Struct, kw_only=True):
    """A load, as the ranks are told of it."""

    request_id: str
    token_ids: list[int]
    first: int
    end: int
    """The load fills the tokens ``[first, end)``."""
    block_ids: tuple[list[int], ...]
    """The whole block tables, one per KV cache group."""
    script: ScriptedParams


class ScriptedMetadata(KVConnectorMetadata, kw_only=True):
    """One step's news for the ranks."""

    loads: list[ScriptedLoad] = msgspec.field(default_factory=list)
    lent: dict[str, ScriptedParams] = msgspec.field(default_factory=dict)


def _script(request: RequestView) -> ScriptedParams:
    return msgspec.convert(request.kv_transfer_params or {}, ScriptedParams)


class ScriptedScheduler(SchedulerConnector):
    """The deciding half."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        """(method, request id), in order."""
        self.closed = False
        self.handshakes: tuple[bytes, ...] = ()
        """What the ranks had to say at the start."""
        self.scheduled_tokens = 0
        """Tokens of all steps so far."""
        self._asked: dict[str, int] = {}
        self._loading: set[str] = set()
        self._next = ScriptedMetadata()

    def set_worker_handshakes(self, handshakes: Sequence[bytes]) -> None:
        self.handshakes = tuple(handshakes)

    def on_new_request(self, request: RequestView) -> None:
        self.calls.append(("on_new_request", request.request_id))
        if _script(request).refuse:
            raise TicketError(f"the ticket of {request.request_id!r} is not for us")

    def get_num_new_matched_tokens(
        self, request: RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self.calls.append(("get_num_new_matched_tokens", request.request_id))
        script = _script(request)
        asked = self._asked.get(request.request_id, 0)
        self._asked[request.request_id] = asked + 1
        if asked < script.ask_later:
            return None, False
        if script.impossible:
            raise TransferError(f"nobody holds the KV of {request.request_id!r}")
        end = min(script.external, len(request.prompt_token_ids))
        tokens = max(0, end - num_computed_tokens)
        return tokens, script.load_async and tokens > 0

    def update_state_after_alloc(
        self, request: RequestView, blocks: BlocksView, num_external_tokens: int
    ) -> None:
        self.calls.append(("update_state_after_alloc", request.request_id))
        if not num_external_tokens:
            return
        script = _script(request)
        first = request.num_computed_tokens
        self._next.loads.append(
            ScriptedLoad(
                request_id=request.request_id,
                token_ids=list(request.prompt_token_ids),
                first=first,
                end=first + num_external_tokens,
                block_ids=blocks.get_block_ids(),
                script=script,
            )
        )
        if script.load_async:
            self._loading.add(request.request_id)

    def build_connector_meta(self, scheduler_output: SchedulerOutputView) -> ScriptedMetadata:
        self.scheduled_tokens += sum(scheduler_output.num_scheduled_tokens.values())
        metadata, self._next = self._next, ScriptedMetadata()
        return metadata

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self._loading -= output.finished_recving

    def take_back(self, kv_transfer_params: Mapping[str, Any]) -> None:
        self.calls.append(("take_back", str(dict(kv_transfer_params))))

    def request_finished(
        self, request: RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self.calls.append(("request_finished", request.request_id))
        self._asked.pop(request.request_id, None)
        script = _script(request)
        if request.request_id in self._loading:
            return True, None
        if not request.finished_cleanly or not script.lend_steps:
            return False, None
        self._next.lent[request.request_id] = script
        return True, {"lent_blocks": sum(block != 0 for ids in block_ids for block in ids)}

    def close(self) -> None:
        self.closed = True


class ScriptedWorker(WorkerConnector):
    """The moving half of one rank."""

    def __init__(self, rank: int = 0, windows: Sequence[int | None] = (None,)) -> None:
        """Args:
        rank: which one it is.
        windows: for each KV cache group, the tokens that it keeps; ``None`` for all.
        """
        self._rank = rank
        self._windows = tuple(windows)
        self._caches: tuple[ToyCache, ...] = ()
        self._loads: list[tuple[int, ScriptedLoad]] = []
        self._lent: dict[str, int] = {}
        self._repeats: dict[str, tuple[int, str]] = {}
        self.finished_req_ids: list[str] = []
        """Every request that this rank was told has ended."""

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._caches = tuple(kv_caches[f"layer.{group}"] for group in range(len(self._windows)))

    def handshake_metadata(self) -> bytes:
        return b"scripted rank %d" % self._rank

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        assert isinstance(metadata, ScriptedMetadata)
        for load in metadata.loads:
            steps = load.script.load_steps + self._rank if load.script.load_async else 1
            self._loads.append((max(1, steps), load))
            # A rank that knows of a new load of a request has done with the one before it: a
            # report carries no more than the request's id.
            self._repeats.pop(load.request_id, None)
            if not load.script.load_async:
                self._land(load)
        for request_id, script in metadata.lent.items():
            self._lent[request_id] = script.lend_steps
            self._repeats[request_id] = (script.repeat, "finished_sending")

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        self.finished_req_ids += sorted(finished_req_ids)
        output = KVConnectorOutput()
        self._repeat(output)
        running = []
        for steps, load in self._loads:
            if steps > 1:
                running.append((steps - 1, load))
            else:
                self._report(load, output)
        self._loads = running
        for request_id in list(self._lent):
            self._lent[request_id] -= 1
            if self._lent[request_id] <= 0:
                del self._lent[request_id]
                output.finished_sending.add(request_id)
        return output

    def close(self) -> None:
        self._caches = ()

    def _repeat(self, output: KVConnectorOutput) -> None:
        for request_id, (count, kind) in list(self._repeats.items()):
            if request_id in self._lent:
                continue
            if count == 0:
                del self._repeats[request_id]
                continue
            self._repeats[request_id] = (count - 1, kind)
            getattr(output, kind).add(request_id)

    def _land(self, load: ScriptedLoad) -> None:
        """Writes the load's cells at the last moment, whatever became of the request."""
        valid = load.end if load.script.valid is None else load.script.valid
        for cache, ids, window in zip(self._caches, load.block_ids, self._windows, strict=True):
            first = max(load.first, first_kept_token(load.end, sliding_window=window))
            middle = min(max(valid, first), load.end)
            write_tokens(cache, ids, load.token_ids, first, middle)
            spoil_tokens(cache, ids, middle, load.end)

    def _report(self, load: ScriptedLoad, output: KVConnectorOutput) -> None:
        script = load.script
        failed = script.valid is not None and script.valid < load.end
        if script.load_async:
            self._land(load)
            output.finished_recving.add(load.request_id)
            self._repeats[load.request_id] = (script.repeat, "finished_recving")
        if failed:
            assert script.valid is not None
            reports_blocks = script.report_blocks and len(self._caches) == 1
            if reports_blocks:
                block_size = self._caches[0].shape[2]
                first_bad = max(script.valid, load.first) // block_size
                last = (load.end - 1) // block_size
                output.invalid_block_ids |= set(load.block_ids[0][first_bad : last + 1]) - {0}
            if script.report_failed or not reports_blocks:
                output.finished_recving.add(load.request_id)
                output.failed_recving.add(load.request_id)
        output.transfer_records.append(self._record(load, failed))

    def _record(self, load: ScriptedLoad, failed: bool) -> TransferRecord:
        return TransferRecord(
            request_id=load.request_id,
            lease_id=f"lease of {load.request_id}",
            rank=self._rank,
            peer="script",
            direction="recv",
            first_token=load.first,
            tokens=load.end - load.first,
            nbytes=16 * (load.end - load.first),
            copies=1,
            started=0.0,
            finished=0.0,
            ok=not failed,
            error="the script says so" if failed else "",
        )
