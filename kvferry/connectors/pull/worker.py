"""The moving half of the PullConnector: this rank's memory, transports and loads."""

import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvferry.connectors.base import (
    ConnectorContext,
    KVConnectorMetadata,
    KVConnectorOutput,
    TransferRecord,
    WorkerConnector,
)
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.control import control_options
from kvferry.connectors.pull.digests import RankDigests
from kvferry.connectors.pull.load import RankLoad
from kvferry.connectors.pull.loader import Loader
from kvferry.connectors.pull.metadata import LentSpec, PullMetadata
from kvferry.connectors.pull.peer import RankIdentity
from kvferry.connectors.pull.reads import TargetMemory
from kvferry.connectors.pull.routes import RouteOptions
from kvferry.connectors.pull.staging import StagingNumbers
from kvferry.control.client import ControlClient
from kvferry.layouts.digest import warm as warm_digest
from kvferry.layouts.postprocess import warm as warm_repack
from kvferry.topology import EngineGeometry, memory_of
from kvferry.topology.description import RankDescription, RankMemory
from kvferry.topology.memory import Regions
from kvferry.transports.base import Transport, TransportOptions
from kvferry.transports.registry import open_transport


class PullWorker(WorkerConnector):
    """Worker half; see :class:`~kvferry.connectors.pull.PullConnector`."""

    def __init__(
        self,
        context: ConnectorContext,
        rank: int,
        transports: dict[str, Transport],
        client: ControlClient,
        options: RouteOptions,
    ) -> None:
        """Takes ownership of transports and client; use :meth:`open`."""
        extra = context.extra
        assert isinstance(extra, PullConfig)  # the registry checked it
        self._context = context
        self._extra = extra
        self._rank = rank
        self._transports = transports
        self._client = client
        self._options = options
        self._memory: tuple[RankMemory, ...] = ()
        self._regions: list[npt.NDArray[np.uint8]] = []
        self._digests: RankDigests | None = None
        self._target: TargetMemory | None = None
        self._loader: Loader | None = None
        self._reported = StagingNumbers()
        self._records: list[TransferRecord] = []
        self._released: set[str] = set()

    @classmethod
    def open(cls, context: ConnectorContext, rank: int) -> "PullWorker":
        """Opens the transports.

        Raises:
            ConfigError: ``curve_keys``, ``control_config`` or ``calibration`` cannot be used.
            PortInUseError: a configured data port is taken.
        """
        extra = context.extra
        assert isinstance(extra, PullConfig)  # the registry checked it
        # Before anything is open that a wrong key would leave.
        options = control_options(extra)
        routes = RouteOptions(extra.forced_strategy, extra.convert_dtype, extra.costs())
        if extra.record_digests:
            warm_digest()
        warm_repack()  # blocks may be moved whole and permuted in their places
        transports: dict[str, Transport] = {}
        try:
            for name in extra.transports:
                transports[name] = _open_transport(name, extra)
        except BaseException:
            for transport in transports.values():
                transport.close()
            raise
        client = ControlClient(
            engine_id=context.config.engine_id,
            incarnation=context.incarnation,
            options=options,
        )
        return cls(context, rank, transports, client, routes)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of the first transport, which the others serve as well.

        Raises:
            SharedMemoryError: no room for ``nbytes``.
            TransferError: a transport that is not the first one cannot serve foreign memory; name
                it first.
        """
        first, *others = self._transports.values()
        region, memory = first.allocate(nbytes)
        for transport in others:
            assert transport.register(memory) == region  # ids count alike on every transport
        self._regions.append(memory)
        return memory

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describes the tensors and starts the loader."""
        described = []
        for group in self._context.groups:
            tensors = _tensors_of(group, self._rank, kv_caches)
            described.append(memory_of(group, self._rank, tensors))
        regions = [self._placed(found) for _, found in described]
        sizes = tuple(region.nbytes for region in self._regions)
        self._memory = tuple(
            _moved(memory, places, sizes)
            for (memory, _), places in zip(described, regions, strict=True)
        )
        identity = RankIdentity(
            engine_id=self._context.config.engine_id,
            rank=self._rank,
            groups=self._context.groups,
            memory=self._memory,
        )
        addresses = [region.ctypes.data for region in self._regions]
        self._digests = RankDigests(self._context, self._rank, self._memory, addresses)
        digest = self._digests.loaded if self._extra.record_digests else None
        self._target = TargetMemory(
            self._regions,
            staging_bytes=self._extra.staging_bytes,
            stall_timeout_s=self._extra.stall_timeout_s,
            threads=self._extra.mover_threads,
        )
        self._loader = Loader(
            identity,
            self._target,
            self._transports,
            self._client,
            digest,
            self._options,
        )

    def _placed(self, regions: Regions) -> list[tuple[int, int]]:
        """For each region of the tensors, the transports' region and the offset in it."""
        return [self._place(region) for region in regions]

    def _place(self, region: npt.NDArray[np.uint8]) -> tuple[int, int]:
        address = region.ctypes.data
        for index, known in enumerate(self._regions):
            offset = address - known.ctypes.data
            if offset >= 0 and offset + region.nbytes <= known.nbytes:
                return index, offset
        for transport in self._transports.values():
            transport.register(region)
        self._regions.append(region)
        return len(self._regions) - 1, 0

    def handshake_metadata(self) -> bytes:
        """The rank's description, for the handshake."""
        endpoints = {name: transport.endpoint() for name, transport in self._transports.items()}
        description = RankDescription(rank=self._rank, endpoints=endpoints, memory=self._memory)
        return msgspec.msgpack.encode(description)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Hands this step's news to the loader; computes digests of what was just lent."""
        assert isinstance(metadata, PullMetadata)  # the engine decoded it as our Metadata
        assert self._loader is not None  # the engine registered its caches first
        for lent in metadata.lent:
            self._record_lent(lent)
        for description in metadata.peers:
            self._loader.meet(description)
        for spec in metadata.loads:
            self._loader.load(spec)
        for lease_id in metadata.cancels:
            self._loader.cancel(lease_id)
        self._released.update(metadata.released)

    def _record_lent(self, lent: LentSpec) -> None:
        """Notes the digest of blocks that were just lent; they cannot change before it is done."""
        assert self._digests is not None  # the engine registered its caches first
        now = time.time()
        self._records.append(
            TransferRecord(
                request_id=lent.request_id,
                lease_id=lent.lease_id,
                rank=self._rank,
                peer="",
                direction="send",
                first_token=0,
                tokens=lent.num_tokens,
                nbytes=0,
                copies=0,
                started=now,
                finished=now,
                ok=True,
                token_digests=self._digests.lent(lent),
            )
        )

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """What ended since the last step; see :meth:`WorkerConnector.get_transfer_results`."""
        output = KVConnectorOutput()
        if self._loader is not None:
            for load in self._loader.take_ended():
                self._report(load, output)
            output.transfer_progress = self._loader.progress()
            self._report_staging(self._loader.staging, output)
        output.transfer_records += self._records
        output.finished_sending = self._released
        self._records, self._released = [], set()
        return output

    def _report(self, load: RankLoad, output: KVConnectorOutput) -> None:
        output.finished_recving.add(load.spec.request_id)
        output.transfer_records.append(load.record(self._rank))
        if load.error is None:
            return
        output.failed_recving.add(load.spec.request_id)
        if len(self._context.groups) == 1:
            block_size = self._context.groups[0].virtual_block_size
            loaded = load.spec.target_block_ids[0][load.spec.first_token // block_size :]
            output.invalid_block_ids.update(block for block in loaded if block != 0)

    def _report_staging(self, now: StagingNumbers, output: KVConnectorOutput) -> None:
        if now == StagingNumbers():
            return  # it was never used
        output.kv_connector_gauges = {
            "staging_used_bytes": now.used_bytes,
            "staging_quarantined_bytes": now.quarantined_bytes,
            "staging_waiting": now.waiting,
        }
        before, self._reported = self._reported, now
        news = {
            "staging_quarantined": now.quarantined - before.quarantined,
            "staging_refused": now.refused - before.refused,
        }
        output.kv_connector_stats = {name: value for name, value in news.items() if value}

    def close(self) -> None:
        """Ends loads, connections and memory. Idempotent."""
        if self._loader is not None:
            self._loader.close()
        self._client.close()
        for transport in self._transports.values():
            transport.close()
        if self._target is not None:
            self._target.staging.close()


def _tensors_of(group: EngineGeometry, rank: int, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of one group: under their own names, or under those of its layers.

    The latter where one tensor holds the layers of several groups.
    """
    own = set(group.tensor_names(rank)) & kv_caches.keys()
    layers = {group.layer_name(layer) for layer in group.layers(rank)} & kv_caches.keys()
    return {name: kv_caches[name] for name in own or layers}


def _open_transport(name: str, extra: PullConfig) -> Transport:
    options = TransportOptions(
        host=extra.host,
        threads=extra.mover_threads,
        stall_timeout_s=extra.stall_timeout_s,
        extra=extra.transport_config.get(name, {}),
    )
    return open_transport(name, options)


def _moved(
    memory: RankMemory, places: list[tuple[int, int]], region_bytes: tuple[int, ...]
) -> RankMemory:
    """The memory with its regions named as the transports name them."""
    tensors = []
    for tensor in memory.tensors:
        region, offset = places[tensor.region]
        tensors.append(replace(tensor, region=region, offset=tensor.offset + offset))
    return replace(memory, tensors=tuple(tensors), region_bytes=region_bytes)
