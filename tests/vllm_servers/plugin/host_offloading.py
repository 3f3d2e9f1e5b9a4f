"""vLLM's CPU tier on a machine without a GPU: OffloadingConnector loads it by this module's name.

Keys, tables, jobs and eviction are vLLM's own (``CPUOffloadingSpec``); only the copies between KV
cache and tier are made here, as vLLM's worker for them asks for a GPU. They are late on purpose, by
the extra key ``copy_steps``: a store that nobody waits for finds another request's KV.
"""

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec


class HostOffloadingSpec(CPUOffloadingSpec):
    """See the module."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """The worker that copies."""
        assert self.blocks_per_chunk == 1
        return HostWorker(kv_caches, self.num_chunks, self.extra_config.get("copy_steps", 2))


class HostWorker(OffloadingWorker):
    """Copies between two tensors of the host."""

    def __init__(self, kv_caches: Any, num_chunks: int, steps: int) -> None:
        self._steps = steps
        self._groups = kv_caches.group_data_refs
        self._cache = [each.tensor for each in kv_caches.tensors]
        self._tier = [
            torch.zeros(num_chunks, each.shape[1], dtype=each.dtype) for each in self._cache
        ]
        self._jobs: dict[int, list[Any]] = {}
        """Job → steps to wait, block ids by group, chunk ids, whether it stores."""
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See vLLM."""
        self._jobs[job_id] = [self._steps, src_spec, dst_spec, True]
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """See vLLM."""
        self._jobs[job_id] = [self._steps, dst_spec, src_spec, False]
        return True

    def get_finished(self) -> list[TransferResult]:
        """See vLLM; one step has passed."""
        for job_id in list(self._jobs):
            self._jobs[job_id][0] -= 1
            if self._jobs[job_id][0] <= 0:
                self._run(job_id)
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        """See vLLM."""
        for job_id in job_ids & self._jobs.keys():
            self._run(job_id)

    def _run(self, job_id: int) -> None:
        _, blocks, chunks, stores = self._jobs.pop(job_id)
        first = nbytes = 0
        for refs, size in zip(self._groups, blocks.group_sizes, strict=True):
            block_ids = torch.from_numpy(blocks.block_ids[first : first + size]).long()
            chunk_ids = torch.from_numpy(chunks.block_ids[first : first + size]).long()
            first += size
            for ref in refs:
                cache, tier = self._cache[ref.tensor_idx], self._tier[ref.tensor_idx]
                if stores:
                    tier[chunk_ids] = cache[block_ids]
                else:
                    cache[block_ids] = tier[chunk_ids]
                nbytes += size * ref.page_size_bytes
        self._done.append(TransferResult(job_id, True, nbytes, 1e-3))
