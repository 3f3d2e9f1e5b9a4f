"""A connector that moves nothing and notes the order in which it is called."""

import os
import signal
import time

import msgspec

from kvferry.connectors.base import (
    KVConnector,
    KVConnectorMetadata,
    KVConnectorOutput,
    SchedulerConnector,
    WorkerConnector,
)


class Metadata(KVConnectorMetadata):
    tell: str = ""
    fail_rank: int = -1
    hang_rank: int = -1
    kill_rank: int = -1


class ExtraConfig(msgspec.Struct, forbid_unknown_fields=True):
    too_little_memory: bool = False


class RecordingWorker(WorkerConnector):
    def __init__(self, context, rank):
        self.rank = rank
        self.short = context.extra.too_little_memory
        self.incarnation = context.incarnation
        self.calls = []
        self.names = ()

    def allocate(self, nbytes):
        self.calls.append("allocate")
        return super().allocate(nbytes - 1 if self.short else nbytes)

    def register_kv_caches(self, kv_caches):
        self.calls.append("register_kv_caches")
        self.names = tuple(kv_caches)

    def handshake_metadata(self):
        return msgspec.json.encode([self.rank, self.incarnation, self.names])

    def start_load_kv(self, metadata):
        self.calls.append(f"start_load_kv {metadata.tell}".strip())
        if self.rank == metadata.fail_rank:
            raise RuntimeError("this connector is broken")
        if self.rank == metadata.hang_rank:
            time.sleep(60)
        if self.rank == metadata.kill_rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def wait_for_layer_load(self, layer_name):
        self.calls.append(f"wait_for_layer_load {layer_name}")

    def save_kv_layer(self, layer_name):
        self.calls.append(f"save_kv_layer {layer_name}")

    def wait_for_save(self):
        self.calls.append("wait_for_save")

    def get_transfer_results(self, finished_req_ids):
        self.calls.append(f"get_transfer_results {','.join(sorted(finished_req_ids))}".strip())
        calls, self.calls = self.calls, []
        return KVConnectorOutput(finished_sending=set(finished_req_ids), kv_cache_events=calls)

    def close(self):
        pass


class RecordingConnector(KVConnector):
    ExtraConfig = ExtraConfig
    Metadata = Metadata

    @classmethod
    def scheduler(cls, context) -> SchedulerConnector:
        raise NotImplementedError("only workers are tested")

    @classmethod
    def worker(cls, context, rank):
        return RecordingWorker(context, rank)
