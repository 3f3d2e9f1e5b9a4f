"""The memory of one rank's cache, as its transports know it: on the host or on a device.

Every transport has the regions under the same ids, so that one description of the rank's memory
holds for all. Of a cache on a device, transports for devices serve the regions themselves; the
others serve a mirror of them in host memory, where anything is to be lent::

                    cache on the host    cache on a device
    shm, tcp, ...   the cache            a mirror of what is lent
    cuda_ipc        (refused)            the cache
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.connectors.base import TransferRecord
from kvferry.connectors.pull.loads import as_load_error
from kvferry.connectors.pull.metadata import LentSpec
from kvferry.errors import ConfigError, KVFerryError, TransferError
from kvferry.layouts.arrays import HOST, MemorySpan
from kvferry.layouts.device import CopyEvent, CopyStream, HostMirror
from kvferry.layouts.tiles import Runs, Tiles, num_bytes
from kvferry.lifetimes import Closing
from kvferry.topology import GroupGeometry
from kvferry.topology.binding import bind_own
from kvferry.topology.lowering import own_tiles
from kvferry.topology.tensors import RankMemory
from kvferry.topology.windows import num_leading_nulls
from kvferry.transports.base import DeviceTransport, Transport

BUFFER_DEVICES = ("cpu", "cuda")
"""What ``kv_buffer_device`` may be."""


class RankRegions:
    """Collects the regions, then registers them."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        """Args: transports by name, best first; they stay the caller's."""
        self.spans: list[MemorySpan] = []
        """By region id."""
        self._transports = tuple(transports.values())
        self._registered = 0
        self._allocated: list[npt.NDArray[np.uint8]] = []

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory of the first transport, which the others serve as well.

        Raises:
            SharedMemoryError: no room for ``nbytes``.
            TransferError: a transport that is not the first one cannot serve foreign memory.
        """
        first, *others = self._transports
        region, memory = first.allocate(nbytes)
        for transport in others:
            assert transport.register(memory) == region  # ids count alike on every transport
        self._allocated.append(memory)
        self.spans.append(MemorySpan(memory.ctypes.data, memory.nbytes, HOST))
        self._registered += 1
        return memory

    def place(self, span: MemorySpan) -> tuple[int, int]:
        """The region in which a span lies, a new one if need be, and the offset in it."""
        for index, known in enumerate(self.spans):
            offset = span.address - known.address
            if offset >= 0 and offset + span.nbytes <= known.nbytes and span.device == known.device:
                return index, offset
        self.spans.append(span)
        return len(self.spans) - 1, 0

    def register_host(self) -> None:
        """Registers what lies in host memory and is not known to the transports yet."""
        for span in self.spans[self._registered :]:
            for transport in self._transports:
                transport.register(span.as_array())
        self._registered = len(self.spans)

    def register_device(self, mirror: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Registers a cache on a device.

        Args:
            mirror: what transports for host memory serve, by region id; empty where nothing is
                lent.

        Raises:
            TransferError: a transport for devices cannot serve this memory, or is for another one.
            ConfigError: a transport for host memory cannot serve a mirror.
        """
        for transport in self._transports:
            if isinstance(transport, DeviceTransport):
                for span in self.spans:
                    transport.register_device(span)
                continue
            try:
                for array in mirror:
                    transport.register(array)
            except TransferError as error:
                raise ConfigError(
                    f"transport: {transport.name!r} cannot serve copies of a KV cache on "
                    f"{self.spans[0].device}: {error}; name tcp or vm in its place"
                ) from error


def check_buffer_device(buffer_device: str) -> None:
    """Checks ``kv_buffer_device`` before anything is known of the cache.

    Raises:
        ConfigError: there is no such device.
    """
    if buffer_device not in BUFFER_DEVICES:
        raise ConfigError(
            f"kv_buffer_device: {buffer_device!r} is not one of {', '.join(BUFFER_DEVICES)}; write "
            "cpu: it serves every cache that the PullConnector does"
        )


def device_of(spans: Iterable[MemorySpan], rank: int) -> str:
    """The one device on which a rank's cache lies; the host for a rank without any.

    Raises:
        ConfigError: it lies on several.
    """
    devices = sorted({span.device for span in spans}) or [HOST]
    if len(devices) > 1:
        raise ConfigError(
            f"rank {rank}: the KV cache lies on {', '.join(devices)}; put it on one of them"
        )
    return devices[0]


def check_device(
    device: str, buffer_device: str, transports: Mapping[str, Transport], *, record_digests: bool
) -> None:
    """Checks that the transports serve a cache on ``device``, as ``kv_buffer_device`` asks.

    Raises:
        ConfigError: they do not; says what would.
    """
    for_devices = [name for name, kind in transports.items() if isinstance(kind, DeviceTransport)]
    if device == HOST and buffer_device != HOST:
        raise ConfigError(
            f"kv_buffer_device: {buffer_device!r}, but the KV cache is in host memory; write 'cpu'"
        )
    if buffer_device == HOST and for_devices:
        where = "in host memory" if device == HOST else f"on {device}"
        remedy = "" if device == HOST else "write kv_buffer_device: 'cuda', or "
        raise ConfigError(
            f"kv_buffer_device: 'cpu' asks for transports of host memory, the KV cache is {where}, "
            f"and transport names {' and '.join(for_devices)}; {remedy}delete it there"
        )
    if device != HOST and record_digests:
        raise ConfigError(
            f"record_digests: true, but digests are computed in host memory and the KV cache is on "
            f"{device}; delete the key"
        )


@dataclass(slots=True, eq=False)
class Lending:
    """Blocks of one lease on their way to where they are read: written, or copied to the host."""

    lent: LentSpec
    started: float = field(default_factory=time.time)
    """Unix seconds."""
    nbytes: int = 0
    """Bytes that are copied."""
    event: CopyEvent | None = None
    """When they are there; ``None`` where they are."""
    error: KVFerryError | None = None

    def record(self, rank: int) -> TransferRecord:
        """What became of them."""
        return self.lent.record(rank, self.started, nbytes=self.nbytes, error=self.error)

    def is_over(self) -> bool:
        """Whether the blocks are there, or never will be. Never waits."""
        if self.error is not None or self.event is None:
            return True
        try:
            return self.event.done()
        except KVFerryError as error:
            self.error = error
            return True


class RankMirror(Closing):
    """One rank's copies of what it lends. Called from the step thread only.

    A record for each lease says when its copies are there; nobody reads under the lease before
    every rank has said so, nor what of it was not :meth:`written` and copied before.
    """

    def __init__(
        self,
        stream: CopyStream,
        spans: Sequence[MemorySpan],
        rank: int,
        groups: Sequence[GroupGeometry],
        memory: Sequence[RankMemory],
    ) -> None:
        """Takes as much host memory as the cache has.

        Args:
            stream: copies on the cache's device; stays the caller's.
            spans: the cache's regions, by region id.
            rank: which rank this is.
            groups: its KV cache groups.
            memory: where the cells of each lie.

        Raises:
            HostError: that much host memory cannot be pinned.
        """
        self._stream = stream
        self._mirror = HostMirror(stream, spans)
        self.arrays = self._mirror.arrays
        """What wires serve, by region id."""
        self._rank = rank
        self._groups = groups
        self._tiles = tuple(
            own_tiles(group, rank, described)
            for group, described in zip(groups, memory, strict=True)
        )
        self._under_way: list[Lending] = []

    def lend(self, lent: LentSpec) -> None:
        """Begins to copy blocks that were just lent. Never raises; returns at once."""
        self._under_way.append(self._copied(lent, is_part=False))

    def written(self, lent: LentSpec) -> Lending:
        """Begins to copy what the step just enqueued writes of a prompt, as soon as it has.

        Of groups that keep a part of the tokens nothing is copied: a later step may write their
        blocks anew before it is read, so these move when the prompt is whole. Never raises; returns
        at once.
        """
        return self._copied(lent, is_part=True)

    def _copied(self, lent: LentSpec, *, is_part: bool) -> Lending:
        copy = Lending(lent)
        try:
            if is_part:
                self._stream.follow_engine()
            for tiles, runs in self._bound(lent, is_part=is_part):
                copy.event = self._mirror.copy_out(tiles, runs)
                copy.nbytes += num_bytes(tiles, runs)
            if copy.event is None:
                # Nothing of it is this rank's, but what was before it, which is reported with it,
                # may be on its way.
                copy.event = self._stream.record()
        except Exception as error:
            copy.error = as_load_error(error, "lent blocks could not be copied to host memory")
        return copy

    def take_records(self) -> list[TransferRecord]:
        """One record for each lease whose blocks are there by now, or could not be copied."""
        over = [copy for copy in self._under_way if copy.is_over()]
        self._under_way = [copy for copy in self._under_way if copy not in over]
        return [copy.record(self._rank) for copy in over]

    def close(self) -> None:
        """Unpins the memory. The stream was closed before. Idempotent."""
        self._mirror.close()

    def _bound(self, lent: LentSpec, *, is_part: bool) -> Iterator[tuple[Tiles, Runs]]:
        """What is to be copied of what the rank holds of a lease: every block of its tables, but
        for what was copied before.
        """
        for group, tiles, ids in zip(self._groups, self._tiles, lent.block_ids, strict=True):
            first = num_leading_nulls(ids) * group.virtual_block_size
            if group.first_kept_token(lent.num_tokens) == 0:
                first = max(first, lent.first_token)
            elif is_part:
                continue
            if first < lent.num_tokens and len(tiles):
                runs, _ = bind_own(group, self._rank, ids, lent.num_tokens, first)
                if len(runs):
                    yield tiles, runs
