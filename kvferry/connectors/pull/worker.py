"""The worker half of the PullConnector: this rank's memory, transports and loads."""

import dataclasses
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from kvferry.connectors.base import (
    ConnectorContext,
    KVConnectorMetadata,
    KVConnectorOutput,
    WorkerConnector,
)
from kvferry.connectors.pull.config import PullConfig
from kvferry.connectors.pull.digests import RankDigests
from kvferry.connectors.pull.loads import Loads, RankLoad
from kvferry.connectors.pull.memory import (
    RankRegions,
    Writing,
    check_buffer_device,
    check_device,
    device_of,
)
from kvferry.connectors.pull.metadata import LentSpec, PullMetadata, ids_of
from kvferry.connectors.pull.peer import TargetRank
from kvferry.control.client import ControlClient
from kvferry.errors import ConfigError, HostError, PortInUseError, TransferError
from kvferry.layouts.arrays import HOST
from kvferry.layouts.device import CopyStream
from kvferry.layouts.digest import warm as warm_digest
from kvferry.topology import GroupGeometry
from kvferry.topology.description import RankDescription
from kvferry.topology.heads import HeadDigests
from kvferry.topology.memory import locate_memory
from kvferry.topology.tensors import RankMemory
from kvferry.transports.base import Transport, TransportOptions
from kvferry.transports.local import host_digest
from kvferry.transports.packing import Packer, PackingTransport
from kvferry.transports.registry import (
    ALLOCATED,
    IN_HOST_MEMORY,
    ON_A_DEVICE,
    device_keys,
    open_transport,
    transport_class,
)
from kvferry.transports.staged import StagedTransport, Staging
from kvferry.transports.staging import StagingNumbers

logger = logging.getLogger(__name__)

_PACKING_STREAMS = 2
"""Number of streams of a device that pack: one packs while the other downloads."""
_STREAMS = _PACKING_STREAMS + 2
"""Number of streams of a device: of the streams that do not pack, one uploads while the other
unpacks."""


@dataclass(frozen=True, slots=True, eq=False)
class RegisteredCache:
    """The rank's cache after its registration, and the objects that work on the cache."""

    target: TargetRank
    loads: Loads
    digests: RankDigests | None
    """Digests of this rank's cells, with ``record_digests``; else ``None``."""
    streams: Sequence[CopyStream]
    """Streams that copy on the device of the cache; empty for a cache in host memory."""
    packer: Packer | None
    """Packs blocks of a device for the transports of host memory that serve these blocks."""

    def close(self) -> None:
        """Ends loads, unpacking and packing; the caller has closed the transports."""
        with ExitStack() as last_first:  # close all, even if a device has failed
            last_first.callback(self.loads.end)
            last_first.callback(self.target.staging.close)
            for stream in self.streams:
                last_first.callback(stream.close)
            if self.packer is not None:
                last_first.callback(self.packer.close)
            last_first.callback(self.target.staging.stop)  # unpacking uses the streams


class PullWorker(WorkerConnector):
    """Worker half; see :class:`~kvferry.connectors.pull.PullConnector`."""

    def __init__(
        self,
        context: ConnectorContext,
        rank: int,
        transports: dict[str, Transport],
        client: ControlClient,
        output: KVConnectorOutput | None = None,
    ) -> None:
        """Takes ownership of transports and client; use :meth:`open`."""
        extra = context.extra
        assert isinstance(extra, PullConfig)  # the registry checked it
        self._context = context
        self._extra = extra
        self._rank = rank
        self._transports = transports
        self.client = client
        self._regions = RankRegions(transports)
        self._registered: RegisteredCache | None = None
        self._heads: HeadDigests | None = None
        self._reported = StagingNumbers()
        self._output = output or KVConnectorOutput()
        """The next report, as far as its content is known."""
        self._writes: list[LentSpec] = []
        """Writes of this step to prompts that are lent already."""
        self._unreported: list[Writing] = []
        """Writes of past steps to prompts that are lent already; complete writes are taken out."""

    @classmethod
    def open(
        cls, context: ConnectorContext, rank: int, output: KVConnectorOutput | None = None
    ) -> "PullWorker":
        """Opens the transports that the configuration names; other transports are opened once the
        cache is known.

        Args:
            context: the context of the engine.
            rank: index of the rank.
            output: part of the first report; ``None`` for an empty first report.

        Raises:
            ConfigError: ``kv_buffer_device``, ``curve_keys`` or ``control_config`` cannot be used,
                or a named transport does not serve an engine that sleeps.
            PortInUseError: a configured data port is taken.
        """
        extra = context.extra
        assert isinstance(extra, PullConfig)  # the registry checked it
        # Check first, before anything is open that a wrong key would leave open.
        check_buffer_device(context.config.kv_buffer_device)
        if context.may_sleep:
            extra.check_sleep()
        options = extra.control_options()
        if extra.record_digests:
            warm_digest()
        transports = _opened(context, rank, extra.transports)
        client = ControlClient(
            engine_id=context.config.engine_id, incarnation=context.incarnation, options=options
        )
        return cls(context, rank, transports, client, output)

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of the first transport, which the other transports serve as well.

        Raises:
            SharedMemoryError: no room for ``nbytes``.
            TransferError: a transport that is not the first cannot serve foreign memory; name it
                first.
        """
        if not self._transports:
            self._extra.check_keys(ALLOCATED)
            self._transports |= _opened(self._context, self._rank, ALLOCATED)
        return self._regions.allocate(nbytes)

    def register_kv_caches(self, kv_caches: Mapping[str, Any]) -> None:
        """Describes the tensors and prepares this rank to load into them.

        Raises:
            ValueError: the tensors do not fit the geometry.
            ConfigError: the transports, or ``kv_buffer_device``, do not serve the device of the
                tensors.
            TransferError: a transport cannot serve the memory of the tensors.
            HostError: ``packing_bytes`` of host memory cannot be pinned.
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
        if device == HOST and not self._transports:
            self._extra.check_keys(IN_HOST_MEMORY)
            self._transports |= _opened(self._context, self._rank, IN_HOST_MEMORY)
        check_device(device, self._context.config, self._transports)
        if device == HOST:
            self._regions.register_host()
            self._registered = self._open_cache(memory, (), None)
            return
        with ExitStack() as opened:
            streams = [opened.enter_context(open_stream(device)) for _ in range(_STREAMS)]
            packer = None
            if self._lends_packed:
                packing = streams[:_PACKING_STREAMS]
                packer = opened.enter_context(Packer(packing, self._extra.packing_bytes))
            if self._transports:
                for transport in self._transports.values():
                    self._regions.register_device(transport, packer)
            else:
                self._open_on_device(device, packer)
            self._registered = self._open_cache(memory, streams, packer)
            opened.pop_all()

    def _open_on_device(self, device: str, packer: Packer | None) -> None:
        """Opens the transports that serve the cache on its device, if the configuration names none.

        A transport with special needs is left out if these needs are not met.

        Raises:
            PortInUseError: a configured data port is taken.
            ConfigError: ``host`` is no address that peers can use.
        """
        self._extra.check_keys(ON_A_DEVICE)
        keys = device_keys(device)
        for name, needs in ON_A_DEVICE.items():
            if self._context.may_sleep and not transport_class(name).may_sleep:
                logger.info("%s is left out: peers would read memory that sleep mode lets go", name)
                continue
            try:
                opened = _opened(self._context, self._rank, [name], keys)
                try:
                    check_device(device, self._context.config, opened)
                    self._regions.register_device(opened[name], packer)
                except BaseException:
                    opened[name].close()
                    raise
            except PortInUseError:
                raise
            except (ConfigError, HostError, TransferError) as error:
                if not needs:
                    raise
                # Memory that cannot be served is a warning, as the user can change it; missing
                # hardware is not.
                level = logging.WARNING if isinstance(error, TransferError) else logging.INFO
                logger.log(level, "%s is left out: %s. It needs %s", name, error, needs)
            else:
                self._transports |= opened

    @property
    def _lends_packed(self) -> bool:
        """Whether a transport of host memory serves the lent blocks."""
        transports = self._transports.values()  # if none is named, tcp will be opened
        packing = not transports or any(isinstance(each, PackingTransport) for each in transports)
        return self._context.config.is_producer and packing

    def _open_cache(
        self, memory: tuple[RankMemory, ...], streams: Sequence[CopyStream], packer: Packer | None
    ) -> RegisteredCache:
        staging = Staging(
            self._regions.spans,
            nbytes=self._extra.staging_bytes,
            stall_timeout_s=self._extra.stall_timeout_s,
            threads=self._extra.mover_threads,
            streams=streams[_PACKING_STREAMS:],
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
            stream = streams[0] if streams else None
            digests = RankDigests(self._context, self._rank, memory, addresses, stream)
        loads = Loads(target, self.client, None if digests is None else digests.loaded)
        return RegisteredCache(target, loads, digests, streams, packer)

    @property
    def cache(self) -> RegisteredCache:
        """The registered cache, with the transports and threads that move its blocks."""
        assert self._registered is not None  # the engine registers its caches first
        return self._registered

    def set_head_digests(self, heads: HeadDigests) -> None:
        """See :meth:`WorkerConnector.set_head_digests`."""
        self._heads = heads

    def handshake_metadata(self) -> bytes:
        """The rank's description, for the handshake."""
        description = RankDescription(
            rank=self._rank,
            endpoints={name: transport.endpoint() for name, transport in self._transports.items()},
            memory=self.cache.target.memory,
            host=host_digest(),
            heads=self._heads,
        )
        return msgspec.msgpack.encode(description)

    def start_load_kv(self, metadata: KVConnectorMetadata) -> None:
        """Starts this step's loads; with ``record_digests``, digests the blocks that were just
        lent.
        """
        assert isinstance(metadata, PullMetadata)  # the engine decoded it as our Metadata
        cache = self.cache
        for lent in metadata.lent:
            if cache.digests is not None:
                self._output.transfer_records.append(cache.digests.record_lent(lent))
        for engine_id, incarnation in metadata.gone.items():
            cache.loads.forget(engine_id, incarnation)
        for description in metadata.peers:
            cache.loads.meet(description)
        # Steps under way may still use the target blocks of the loads.
        writable = cache.streams[0].engine_event() if cache.streams and metadata.loads else None
        for spec in metadata.loads:
            cache.loads.start(spec, writable)
        for spec in metadata.parts:
            cache.loads.read_on(spec)
        for lease_id, reason in metadata.cancels.items():
            cache.loads.cancel(lease_id, reason)
        self._output.finished_sending.update(metadata.released)
        self._writes = metadata.writes

    @property
    def is_on_host(self) -> bool:
        """Whether the cache lies in host memory."""
        return not self.cache.streams

    @property
    def awaits_device(self) -> bool:
        """Whether a write was not complete when it was last looked at."""
        return bool(self._unreported)

    def written(self) -> dict[str, dict[int, int]]:
        """Writes that are complete now and not in the last report. They may be reported at once;
        the next report tells them again. For any thread.
        """
        return self._reports([one for one in list(self._unreported) if one.is_over()])

    def _reports(self, over: Iterable[Writing]) -> dict[str, dict[int, int]]:
        there = [one.lent for one in over if one.error is None]  # per lease, the last write counts
        return {lent.lease_id: {self._rank: lent.num_tokens} for lent in there}

    def _take_written(
        self, cache: RegisteredCache, output: KVConnectorOutput
    ) -> dict[str, dict[int, int]]:
        """Writes of this step and of earlier steps that are complete by now."""
        writes, self._writes = self._writes, []
        if writes:
            # The event follows all work that this step has queued on the device and that may not
            # have begun.
            event = cache.streams[0].engine_event() if cache.streams else None
            self._unreported += [Writing(lent, event) for lent in writes]
        over = [one for one in self._unreported if one.is_over()]
        self._unreported = [one for one in self._unreported if one not in over]
        # The lender must know of failures: tokens that are written later may arrive all the same.
        failed = [one for one in over if one.error is not None]
        output.transfer_records += [one.record(self._rank) for one in failed]
        return self._reports(over)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorOutput:
        """Reports the loads that ended since the last step; see
        :meth:`WorkerConnector.get_transfer_results`.
        """
        output, self._output = self._output, KVConnectorOutput()
        if (cache := self._registered) is not None:
            for load in cache.loads.take_ended():
                self._report(load, output)
            output.transfer_progress = cache.loads.progress()
            self._report_staging(cache.target.staging.numbers, output)
            output.written = self._take_written(cache, output)
        return output

    def _report(self, load: RankLoad, output: KVConnectorOutput) -> None:
        output.finished_recving.add(load.spec.request_id)
        output.transfer_records.append(load.record(self._rank))
        if load.error is None:
            return
        output.failed_recving.add(load.spec.request_id)
        if len(self._context.groups) == 1:
            block_size = self._context.groups[0].virtual_block_size
            table = ids_of(load.spec.target_tables[0])
            loaded = table[load.spec.first_token // block_size :]
            output.invalid_block_ids.update(loaded[loaded != 0].tolist())

    def _report_staging(self, now: StagingNumbers, output: KVConnectorOutput) -> None:
        if now == StagingNumbers():
            return  # the staging memory was never used
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

    def successor(self, incarnation: str) -> "PullWorker":
        """A worker of this rank for another incarnation of the engine, without caches so far. The
        first report of the new worker also holds all that this worker has not reported: loads that
        were under way have failed. The caller must have closed this worker.

        Raises:
            ConfigError, PortInUseError: see :meth:`open`.
        """
        context = dataclasses.replace(self._context, incarnation=incarnation)
        return PullWorker.open(context, self._rank, self.get_transfer_results(set()))

    def close(self) -> None:
        """Ends loads, connections and memory. Idempotent.

        After the call, no thread and no device of this rank reads or writes the caches, and peers
        can read nothing from the rank: the caller may let the memory go.
        """
        with ExitStack() as last_first:
            if (cache := self._registered) is not None:
                last_first.callback(cache.close)
            for transport in reversed(self._transports.values()):
                last_first.callback(transport.close)
            last_first.callback(self.client.close)
            if cache is not None:
                for staged in cache.target.staged.values():
                    last_first.callback(staged.close)
                last_first.callback(cache.loads.close)


def _opened(
    context: ConnectorContext,
    rank: int,
    names: Iterable[str],
    keys: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Transport]:
    """Opens transports, all or none. The ``keys`` are defaults for the keys that the user has not
    written.
    """
    extra = context.extra
    assert isinstance(extra, PullConfig)  # the registry checked it
    transports: dict[str, Transport] = {}
    with ExitStack() as opened:
        for name in names:
            options = TransportOptions(
                host=extra.host,
                advertise_host=extra.advertise_host,
                rank=rank,
                threads=extra.mover_threads,
                stall_timeout_s=extra.stall_timeout_s,
                extra={**keys.get(name, {}), **extra.transport_config.get(name, {})},
            )
            transports[name] = open_transport(name, options)
            opened.callback(transports[name].close)
        opened.pop_all()
    return transports


def _tensors_of(group: GroupGeometry, rank: int, kv_caches: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of one group, found by their own names or by the names of the group's layers.

    The names of layers are used if one tensor holds the layers of several groups.
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
