"""The moving half of the PullConnector: this rank's memory, transports and loads."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
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
from kvferry.connectors.pull.digests import RankDigests
from kvferry.connectors.pull.loads import Loads, RankLoad
from kvferry.connectors.pull.memory import (
    Lending,
    RankMirror,
    RankRegions,
    check_buffer_device,
    check_device,
    device_of,
)
from kvferry.connectors.pull.metadata import LentSpec, PullMetadata
from kvferry.connectors.pull.peer import TargetRank
from kvferry.control.client import ControlClient
from kvferry.layouts.arrays import HOST
from kvferry.layouts.device import CopyStream
from kvferry.layouts.digest import warm as warm_digest
from kvferry.topology import GroupGeometry
from kvferry.topology.description import RankDescription
from kvferry.topology.heads import HeadDigests
from kvferry.topology.memory import locate_memory
from kvferry.topology.tensors import RankMemory
from kvferry.transports.base import DeviceTransport, Transport, TransportOptions
from kvferry.transports.local import host_digest
from kvferry.transports.registry import open_transport
from kvferry.transports.staged import StagedTransport, Staging
from kvferry.transports.staging import StagingNumbers


@dataclass(frozen=True, slots=True, eq=False)
class _Cache:
    """The rank's cache once it is registered, and what works on it."""

    target: TargetRank
    loads: Loads
    digests: RankDigests | None
    """With ``record_digests``."""
    stream: CopyStream | None
    """Of the device on which the cache is, if that is not the host."""
    mirror: RankMirror | None
    """Where a wire that cannot read the device serves what is lent."""

    def close(self) -> None:
        """Ends loads and what is unpacked; the transports are closed by now."""
        self.target.staging.stop()  # what is being unpacked uses the stream
        if self.stream is not None:
            self.stream.close()
        self.target.staging.close()
        if self.mirror is not None:  # by now no copy is under way
            self.mirror.close()


class PullWorker(WorkerConnector):
    """Worker half; see :class:`~kvferry.connectors.pull.PullConnector`."""

    def __init__(
        self,
        context: ConnectorContext,
        rank: int,
        transports: dict[str, Transport],
        client: ControlClient,
    ) -> None:
        """Takes ownership of transports and client; use :meth:`open`."""
        extra = context.extra
        assert isinstance(extra, PullConfig)  # the registry checked it
        self._context = context
        self._extra = extra
        self._rank = rank
        self._transports = transports
        self._client = client
        self._regions = RankRegions(transports)
        self._registered: _Cache | None = None
        self._heads: HeadDigests | None = None
        self._reported = StagingNumbers()
        self._records: list[TransferRecord] = []
        self._released: set[str] = set()
        self._writes: list[LentSpec] = []
        """What this step writes of prompts that are lent already."""
        self._unreported: list[Lending] = []
        """What steps have written of them, and was not there when it was last looked at."""

    @classmethod
    def open(cls, context: ConnectorContext, rank: int) -> "PullWorker":
        """Opens the transports.

        Raises:
            ConfigError: ``kv_buffer_device``, ``curve_keys`` or ``control_config`` cannot be used.
            PortInUseError: a configured data port is taken.
        """
        extra = context.extra
        assert isinstance(extra, PullConfig)  # the registry checked it
        # Before anything is open that a wrong key would leave.
        check_buffer_device(context.config.kv_buffer_device)
        options = extra.control_options()
        if extra.record_digests:
            warm_digest()
        transports: dict[str, Transport] = {}
        try:
            for name in extra.transports:
                transports[name] = open_transport(
                    name,
                    TransportOptions(
                        host=extra.host,
                        advertise_host=extra.advertise_host,
                        rank=rank,
                        threads=extra.mover_threads,
                        stall_timeout_s=extra.stall_timeout_s,
                        extra=extra.transport_config.get(name, {}),
                    ),
                )
        except BaseException:
            for transport in transports.values():
                transport.close()
            raise
        client = ControlClient(
            engine_id=context.config.engine_id,
            incarnation=context.incarnation,
            options=options,
        )
        return cls(context, rank, transports, client)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of the first transport, which the others serve as well.

        Raises:
            SharedMemoryError: no room for ``nbytes``.
            TransferError: a transport that is not the first one cannot serve foreign memory; name
                it first.
        """
        return self._regions.allocate(nbytes)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describes the tensors, and is ready to load into them.

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
        spans = self._regions.spans
        sizes = tuple(span.nbytes for span in spans)
        memory = tuple(
            _moved(found, where, sizes) for (found, _), where in zip(described, places, strict=True)
        )
        device = device_of(spans, self._rank)
        check_device(
            device,
            self._context.config.kv_buffer_device,
            self._transports,
            record_digests=self._extra.record_digests,
        )
        stream, mirror = None, None
        if device == HOST:
            self._regions.register_host()
        else:
            stream = open_stream(device)
            mirror = self._open_mirror(stream, memory)
            try:
                self._regions.register_device(() if mirror is None else mirror.arrays)
            except BaseException:
                stream.close()
                if mirror is not None:
                    mirror.close()
                raise
        self._registered = self._open_cache(memory, stream, mirror)

    def _open_mirror(self, stream: CopyStream, memory: tuple[RankMemory, ...]) -> RankMirror | None:
        """Host memory for what is lent, where a transport cannot read the device."""
        needed = any(not isinstance(t, DeviceTransport) for t in self._transports.values())
        if not (self._context.config.is_producer and needed):
            return None
        spans, groups = self._regions.spans, self._context.groups
        return RankMirror(stream, spans, self._rank, groups, memory)

    def _open_cache(
        self,
        memory: tuple[RankMemory, ...],
        stream: CopyStream | None,
        mirror: RankMirror | None,
    ) -> _Cache:
        staging = Staging(
            self._regions.spans,
            nbytes=self._extra.staging_bytes,
            stall_timeout_s=self._extra.stall_timeout_s,
            threads=self._extra.mover_threads,
            stream=stream,
        )
        target = TargetRank(
            engine_id=self._context.config.engine_id,
            rank=self._rank,
            groups=self._context.groups,
            memory=memory,
            staging=staging,
            transports=self._transports,
            staged={name: StagedTransport(t, staging) for name, t in self._transports.items()},
            convert_dtype=self._extra.convert_dtype,
        )
        digests = None
        if self._extra.record_digests:
            addresses = [span.address for span in self._regions.spans]
            digests = RankDigests(self._context, self._rank, memory, addresses)
        loads = Loads(target, self._client, None if digests is None else digests.loaded)
        return _Cache(target, loads, digests, stream, mirror)

    @property
    def _cache(self) -> _Cache:
        assert self._registered is not None  # the engine registers its caches first
        return self._registered

    def set_head_digests(self, heads: HeadDigests) -> None:
        """See :meth:`WorkerConnector.set_head_digests`."""
        self._heads = heads

    def handshake_metadata(self) -> bytes:
        """The rank's description, for the handshake."""
        endpoints = {name: transport.endpoint() for name, transport in self._transports.items()}
        description = RankDescription(
            rank=self._rank,
            endpoints=endpoints,
            memory=self._cache.target.memory,
            mirrored=self._cache.mirror is not None,
            host=host_digest(),
            heads=self._heads,
        )
        return msgspec.msgpack.encode(description)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Starts this step's loads; begins to copy, or digests, what was just lent."""
        assert isinstance(metadata, PullMetadata)  # the engine decoded it as our Metadata
        cache = self._cache
        for lent in metadata.lent:
            if cache.mirror is not None:
                cache.mirror.lend(lent)
            if cache.digests is not None:
                # They cannot change before this is done.
                digests = cache.digests.lent(lent)
                record = lent.record(self._rank, time.time(), token_digests=digests)
                self._records.append(record)
        for engine_id, incarnation in metadata.gone.items():
            cache.loads.forget(engine_id, incarnation)
        for description in metadata.peers:
            cache.loads.meet(description)
        # Steps under way may still use the blocks that are loaded into.
        writable = cache.stream.engine_event() if cache.stream and metadata.loads else None
        for spec in metadata.loads:
            cache.loads.start(spec, writable)
        for spec in metadata.parts:
            cache.loads.read_on(spec)
        for lease_id, reason in metadata.cancels.items():
            cache.loads.cancel(lease_id, reason)
        self._released.update(metadata.released)
        self._writes = metadata.writes

    @property
    def is_on_host(self) -> bool:
        """Whether the cache lies in host memory."""
        return self._cache.stream is None

    @property
    def awaits_device(self) -> bool:
        """Whether something was written that has to be looked at again."""
        return bool(self._unreported)

    def written(self) -> dict[str, dict[int, int]]:
        """What has come to be there of what was not in the last report, which may be told at once;
        the next report tells it again. For any thread.
        """
        return self._reports([one for one in list(self._unreported) if one.is_over()])

    def _reports(self, over: Iterable[Lending]) -> dict[str, dict[int, int]]:
        there = [one.lent for one in over if one.error is None]  # of one lease, the last one counts
        return {lent.lease_id: {self._rank: lent.num_tokens} for lent in there}

    def _take_written(self, cache: _Cache) -> dict[str, dict[int, int]]:
        """What is there by now of what was written, of this step and those before it."""
        writes, self._writes = self._writes, []
        if cache.mirror is not None:
            self._unreported += map(cache.mirror.written, writes)
        elif writes:
            # Behind all that this step has asked of the device, which may not have begun with it.
            event = None if cache.stream is None else cache.stream.engine_event()
            self._unreported += [Lending(lent, event=event) for lent in writes]
        over = [one for one in self._unreported if one.is_over()]
        self._unreported = [one for one in self._unreported if one not in over]
        # Whoever lends them has to know: what is written later may be there all the same.
        self._records += [one.record(self._rank) for one in over if one.error is not None]
        return self._reports(over)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """What ended since the last step; see :meth:`WorkerConnector.get_transfer_results`."""
        output = KVConnectorOutput()
        if (cache := self._registered) is not None:
            for load in cache.loads.take_ended():
                self._report(load, output)
            output.transfer_progress = cache.loads.progress()
            self._report_staging(cache.target.staging.numbers, output)
            if cache.mirror is not None:
                output.transfer_records += cache.mirror.take_records()
            output.written = self._take_written(cache)
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
        cache = self._registered
        if cache is not None:
            cache.loads.close()
            for staged in cache.target.staged.values():
                staged.close()
        self._client.close()
        for transport in self._transports.values():
            transport.close()
        if cache is not None:
            cache.close()


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


def _moved(
    memory: RankMemory, places: list[tuple[int, int]], region_bytes: tuple[int, ...]
) -> RankMemory:
    """The memory with its regions named as the transports name them."""
    tensors = []
    for tensor in memory.tensors:
        region, offset = places[tensor.region]
        tensors.append(replace(tensor, region=region, offset=tensor.offset + offset))
    return replace(memory, tensors=tuple(tensors), region_bytes=region_bytes)
