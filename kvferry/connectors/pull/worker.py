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
from kvferry.connectors.pull.mirror import RankMirror
from kvferry.connectors.pull.peer import RankIdentity
from kvferry.connectors.pull.reads import TargetMemory
from kvferry.connectors.pull.regions import (
    RankRegions,
    check_buffer_device,
    check_device,
    device_of,
)
from kvferry.connectors.pull.routes import RouteOptions
from kvferry.connectors.pull.staging import StagingNumbers
from kvferry.control.client import ControlClient
from kvferry.layouts.arrays import HOST
from kvferry.layouts.device import CopyStream
from kvferry.layouts.digest import warm as warm_digest
from kvferry.layouts.host_staging import DevicePlacer, HostPlacer, Placer
from kvferry.layouts.postprocess import warm as warm_repack
from kvferry.topology import GroupGeometry
from kvferry.topology.description import RankDescription
from kvferry.topology.memory import locate_memory
from kvferry.topology.tensors import RankMemory
from kvferry.transports.base import Transport, TransportOptions
from kvferry.transports.device import DeviceTransport
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
        self._regions = RankRegions(transports)
        self._stream: CopyStream | None = None
        self._mirror: RankMirror | None = None
        self._placer: Placer | None = None
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
            ConfigError: ``kv_buffer_device``, ``curve_keys``, ``control_config`` or
                ``calibration`` cannot be used.
            PortInUseError: a configured data port is taken.
        """
        extra = context.extra
        assert isinstance(extra, PullConfig)  # the registry checked it
        # Before anything is open that a wrong key would leave.
        check_buffer_device(context.config.kv_buffer_device)
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
        return self._regions.allocate(nbytes)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describes the tensors and starts the loader.

        Raises:
            ValueError: the tensors do not fit the geometry.
            ConfigError: the transports, or ``kv_buffer_device``, do not serve the device on which
                the tensors are.
            TransferError: a transport cannot serve the memory in which they are.
            HostError: host memory for what is lent cannot be pinned.
        """
        groups = self._context.groups
        described = [
            locate_memory(group, self._rank, _tensors_of(group, self._rank, kv_caches))
            for group in groups
        ]
        places = [[self._regions.place(span) for span in spans] for _, spans in described]
        self._register(device_of(self._regions.spans, self._rank))
        sizes = tuple(span.nbytes for span in self._regions.spans)
        self._memory = tuple(
            _moved(memory, where, sizes)
            for (memory, _), where in zip(described, places, strict=True)
        )
        if self._mirror is not None:
            self._mirror.describe(self._memory)
        self._start_loader()

    def _register(self, device: str) -> None:
        """Makes the cache known to the transports, and opens what a device needs beside them."""
        check_device(
            device,
            self._context.config.kv_buffer_device,
            self._transports,
            record_digests=self._extra.record_digests,
        )
        spans = self._regions.spans
        addresses = [span.address for span in spans]
        if device == HOST:
            self._regions.register_host()
            self._placer = HostPlacer(addresses)
            return
        self._stream = open_stream(device)
        self._placer = DevicePlacer(self._stream, addresses)
        needs_mirror = any(not isinstance(t, DeviceTransport) for t in self._transports.values())
        if self._context.config.is_producer and needs_mirror:
            self._mirror = RankMirror(self._stream, spans, self._rank, self._context.groups)
        self._regions.register_device(() if self._mirror is None else self._mirror.arrays)

    def _start_loader(self) -> None:
        assert self._placer is not None  # _register() made it
        spans = self._regions.spans
        identity = RankIdentity(
            engine_id=self._context.config.engine_id,
            rank=self._rank,
            groups=self._context.groups,
            memory=self._memory,
        )
        if self._extra.record_digests:
            addresses = [span.address for span in spans]
            self._digests = RankDigests(self._context, self._rank, self._memory, addresses)
        self._target = TargetMemory(
            spans,
            self._placer,
            staging_bytes=self._extra.staging_bytes,
            stall_timeout_s=self._extra.stall_timeout_s,
            threads=self._extra.mover_threads,
        )
        self._loader = Loader(
            identity,
            self._target,
            self._transports,
            self._client,
            None if self._digests is None else self._digests.loaded,
            self._options,
        )

    def handshake_metadata(self) -> bytes:
        """The rank's description, for the handshake."""
        endpoints = {name: transport.endpoint() for name, transport in self._transports.items()}
        description = RankDescription(
            rank=self._rank,
            endpoints=endpoints,
            memory=self._memory,
            mirrored=self._mirror is not None,
        )
        return msgspec.msgpack.encode(description)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Hands this step's news to the loader; begins to copy, or digests, what was just lent."""
        assert isinstance(metadata, PullMetadata)  # the engine decoded it as our Metadata
        assert self._loader is not None  # the engine registered its caches first
        for lent in metadata.lent:
            if self._mirror is not None:
                self._mirror.lend(lent)
            if self._digests is not None:
                self._records.append(self._record_lent(lent, self._digests))
        for description in metadata.peers:
            self._loader.meet(description)
        # Steps under way may still use the blocks that are loaded into.
        writable = self._stream.engine_event() if self._stream and metadata.loads else None
        for spec in metadata.loads:
            self._loader.load(spec, writable)
        for lease_id in metadata.cancels:
            self._loader.cancel(lease_id)
        self._released.update(metadata.released)

    def _record_lent(self, lent: LentSpec, digests: RankDigests) -> TransferRecord:
        """The digest of blocks that were just lent; they cannot change before it is done."""
        now = time.time()
        return TransferRecord(
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
            token_digests=digests.lent(lent),
        )

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """What ended since the last step; see :meth:`WorkerConnector.get_transfer_results`."""
        output = KVConnectorOutput()
        if self._loader is not None:
            for load in self._loader.take_ended():
                self._report(load, output)
            output.transfer_progress = self._loader.progress()
            self._report_staging(self._loader.staging, output)
        if self._mirror is not None:
            output.transfer_records += self._mirror.take_records()
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
        if self._stream is not None:
            self._stream.close()
        for pinned in (self._placer, self._mirror):  # by now no copy is under way
            if pinned is not None:
                pinned.close()
        if self._target is not None:
            self._target.staging.close()


def _tensors_of(group: GroupGeometry, rank: int, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of one group: under their own names, or under those of its layers.

    The latter where one tensor holds the layers of several groups.
    """
    own = set(group.tensor_names(rank)) & kv_caches.keys()
    layers = {group.layer_name(layer) for layer in group.layers(rank)} & kv_caches.keys()
    return {name: kv_caches[name] for name in own or layers}


def open_stream(device: str) -> CopyStream:
    """A stream of the device on which a cache lies.

    Raises:
        HostError: there is no such device.
    """
    from kvferry.layouts.cuda_stream import CudaCopyStream  # imports torch

    return CudaCopyStream.open(int(device.removeprefix("cuda:")))


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
