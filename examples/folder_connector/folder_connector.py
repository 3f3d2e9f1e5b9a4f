"""An example connector: the KV of prompts travels through a folder that all engines share.

The folder holds one file per prompt, always in the same geometry (a single rank, NHD). Each rank of
a producer copies its cells of a finished prompt into the file. Each rank of a consumer copies the
cells that it needs out of the file. So engines of any parallelism, block size and layout exchange
KV. The name of a file is a hash of everything that decides the KV: the model, its weights, the
tokens, and the request's other content, such as an adapter. Old files are never deleted.
"""

import hashlib
import logging
import time
import uuid
from array import array
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from kvferry import connectors as kv
from kvferry.layouts import Layout
from kvferry.topology import EngineGeometry, ParallelShape, plan_transfer, run_copies

logger = logging.getLogger(__name__)


class FolderConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The allowed keys of ``kv_connector_extra_config``."""

    folder: str
    """Path of a folder that every process of every engine sees."""
    chunk_tokens: int = 16
    """Unit in tokens in which prompts are saved and found; equal in all engines."""
    wait_s: float = 10.0
    """Seconds that a request waits for a prompt that its prefill engine is still writing."""


class Job(msgspec.Struct, frozen=True):
    """Copies the tokens ``[first, end)`` between a request's blocks and a file."""

    request_id: str
    path: str
    file_tokens: int
    """Number of tokens in the whole file."""
    saves: bool
    block_ids: list[int]
    first: int
    end: int


class FolderMetadata(kv.KVConnectorMetadata):
    """The jobs that the ranks start in a step."""

    jobs: list[Job]


class FolderScheduler(kv.SchedulerConnector):
    """Knows which prompts are in the folder."""

    def __init__(self, context: kv.ConnectorContext) -> None:
        self._config, self._extra, self._model = context.config, extra_of(context), context.model
        self._shared = shared_geometry(context)
        self._jobs: list[Job] = []
        self._under_way: dict[str, Job] = {}
        self._asked: dict[str, float] = {}
        self._offered: dict[str, tuple[int, Path]] = {}
        Path(self._extra.folder).mkdir(parents=True, exist_ok=True)

    def get_num_new_matched_tokens(
        self, request: kv.RequestView, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if not self._config.is_consumer:
            return 0, False
        # The file may be one of a longer prompt when the blocks are there: load what was offered.
        saved, _ = self._offered[request.request_id] = self._find(request)
        promised = (request.kv_transfer_params or {}).get("saved_tokens")
        if isinstance(promised, int) and saved < promised:  # it may still be written: ask later
            since = self._asked.setdefault(request.request_id, time.monotonic())
            if time.monotonic() < since + self._extra.wait_s:
                return None, False
        tokens = max(0, min(saved, request.num_tokens - 1) - num_computed_tokens)
        return tokens, tokens > 0

    def update_state_after_alloc(
        self, request: kv.RequestView, blocks: kv.BlocksView, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            first = request.num_computed_tokens
            end, (table,) = first + num_external_tokens, blocks.get_block_ids()
            saved, path = self._offered[request.request_id]
            self._start(Job(request.request_id, str(path), saved, False, table, first, end))

    def request_finished(
        self, request: kv.RequestView, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        for known in (self._asked, self._offered):
            known.pop(request.request_id, None)
        if request.request_id in self._under_way:  # aborted: keep the blocks until the end
            return True, None
        prefixes = self._prefixes(request)
        if not (prefixes and self._config.is_producer and request.finished_cleanly):
            return False, None
        end, path = prefixes[-1]
        if path.exists():
            return False, {"saved_tokens": end}
        part = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            with part.open("wb") as file:
                file.truncate(self._shared.nbytes(0, num_file_blocks(end, self._shared)))
        except OSError as error:
            logger.error("request %s is not saved: %s", request.request_id, error)
            return False, None
        self._start(Job(request.request_id, str(part), end, True, block_ids[0], 0, end))
        return True, {"saved_tokens": end}

    def build_connector_meta(self, scheduler_output: kv.SchedulerOutputView) -> FolderMetadata:
        jobs, self._jobs = self._jobs, []
        return FolderMetadata(jobs)

    def update_connector_output(self, output: kv.KVConnectorOutput) -> None:
        for id in (output.finished_sending | output.finished_recving) & self._under_way.keys():
            job = self._under_way.pop(id)
            part = Path(job.path)
            if job.saves and part.exists():  # a failed rank has removed the file
                part.rename(part.with_suffix(".kv"))  # every rank has written: publish the file

    def close(self) -> None:
        """Does nothing, as there is nothing to end."""

    def _start(self, job: Job) -> None:
        self._under_way[job.request_id] = job
        self._jobs.append(job)

    def _find(self, request: kv.RequestView) -> tuple[int, Path]:
        prefixes = [(0, Path()), *self._prefixes(request)]
        return next(found for found in reversed(prefixes) if found[0] == 0 or found[1].exists())

    def _prefixes(self, request: kv.RequestView) -> list[tuple[int, Path]]:
        """Number of tokens and file of every prefix that can be saved, shortest first."""
        chunk, model, tokens = self._extra.chunk_tokens, self._model, request.prompt_token_ids
        digest = hashlib.sha256(f"{model.config_digest} {model.weights_digest}".encode())
        digest.update(f"{self._shared.dtype} {chunk}".encode())
        prefixes = []
        for end in range(chunk, len(tokens) + 1, chunk):
            digest.update(array("q", tokens[end - chunk : end]).tobytes())
            whole = digest.copy()
            whole.update(repr(sorted(request.content_keys(end).items())).encode())
            prefixes.append((end, Path(self._extra.folder, f"{whole.hexdigest()}.kv")))
        return prefixes


class FolderWorker(kv.WorkerConnector):
    """Copies between the rank's cache and mapped files, outside of the step thread."""

    def __init__(self, context: kv.ConnectorContext, rank: int) -> None:
        self._rank, (self._geometry,) = rank, context.groups
        self._shared = shared_geometry(context)
        self._caches: Mapping[str, Any] = {}
        self._copies: list[tuple[Job, Future[int]]] = []
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="folder")

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, metadata: kv.KVConnectorMetadata) -> None:
        assert isinstance(metadata, FolderMetadata)
        self._copies += [(job, self._pool.submit(self._copy, job)) for job in metadata.jobs]

    def get_transfer_results(self, finished_req_ids: set[str]) -> kv.KVConnectorOutput:
        output = kv.KVConnectorOutput()
        ended = [(job, copy) for job, copy in self._copies if copy.done()]
        self._copies = [pair for pair in self._copies if pair not in ended]
        for job, copy in ended:
            (output.finished_sending if job.saves else output.finished_recving).add(job.request_id)
            if error := copy.exception():
                logger.error("%s of request %s: %s", job.path, job.request_id, error)
                if job.saves:
                    Path(job.path).unlink(missing_ok=True)
                else:
                    output.failed_recving.add(job.request_id)
        return output

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _copy(self, job: Job) -> int:
        shape = self._shared.cache_shape(0, num_file_blocks(job.file_tokens, self._shared))
        names, dtype = self._shared.tensor_names(0), np.dtype(f"u{self._shared.itemsize}")
        file = np.memmap(job.path, dtype, "r+" if job.saves else "r", 0, (len(names), *shape))
        tensors, blocks = dict(zip(names, file, strict=True)), range(1, shape[1])
        if job.saves:
            out = plan_transfer(source=self._geometry, target=self._shared)
            copies = out.for_source(self._rank).bind(job.block_ids, blocks, job.end)
            return run_copies(copies, {self._rank: self._caches}, tensors)
        into = plan_transfer(source=self._shared, target=self._geometry, target_rank=self._rank)
        copies = into.bind(blocks, job.block_ids, job.end, job.first)
        return run_copies(copies, {0: tensors}, self._caches)


class FolderConnector(kv.KVConnector):
    """The plugin."""

    ExtraConfig = FolderConfig
    Metadata = FolderMetadata

    @classmethod
    def scheduler(cls, context: kv.ConnectorContext) -> kv.SchedulerConnector:
        return FolderScheduler(context)

    @classmethod
    def worker(cls, context: kv.ConnectorContext, rank: int) -> kv.WorkerConnector:
        return FolderWorker(context, rank)


def extra_of(context: kv.ConnectorContext) -> FolderConfig:
    assert isinstance(context.extra, FolderConfig)
    return context.extra


def shared_geometry(context: kv.ConnectorContext) -> EngineGeometry:
    """The geometry of every file: one rank, with blocks of one chunk."""
    (group,) = context.groups
    assert isinstance(group, EngineGeometry)  # no states, as this connector does not support groups
    return replace(
        group,
        parallel=ParallelShape(),
        layout=Layout.named("NHD"),
        block_size=extra_of(context).chunk_tokens,
        layer_split=None,
        layer_names=None,
    )


def num_file_blocks(num_tokens: int, shared: EngineGeometry) -> int:
    """Number of blocks in a file; the first is the null block, which is never copied from."""
    return 1 + -(-num_tokens // shared.block_size)
