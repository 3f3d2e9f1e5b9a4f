"""The memory of one rank's cache, as its transports know it: on the host or on a device.

All transports have the regions under the same ids, so that one description of the rank's memory
serves all. For a cache on a device, transports for devices serve the regions themselves. Transports
of wires serve blocks that the device packs for them when the blocks are read
(:mod:`~kvferry.transports.packing`)::

                    cache on the host    cache on a device
    cuda_ipc        (refused)            serves the cache
    tcp, ucx        serve the cache      serve packed blocks
    shm, vm         serve the cache      (refused, if anything is lent)
"""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull.metadata import LentSpec
from kvferry.errors import ConfigError, KVFerryError
from kvferry.layouts.arrays import HOST, MemorySpan
from kvferry.layouts.device import CopyEvent
from kvferry.observe.records import TransferRecord
from kvferry.transports.base import DeviceTransport, Transport
from kvferry.transports.packing import Packer, PackingTransport

BUFFER_DEVICES = ("cpu", "cuda")
"""Allowed values of ``kv_buffer_device``."""


class RankRegions:
    """Collects the regions, then registers them."""

    def __init__(self, transports: Mapping[str, Transport]) -> None:
        """Args: transports by name, best first; they stay the caller's, who may add transports
        before the first region is registered.
        """
        self.spans: list[MemorySpan] = []
        """Memory spans, by region id."""
        self._transports = transports.values()
        self._registered = 0
        self._allocated: list[npt.NDArray[np.uint8]] = []

    def allocate(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Host memory of the first transport, which the other transports serve as well.

        Raises:
            SharedMemoryError: no room for ``nbytes``.
            TransferError: a transport that is not the first cannot serve foreign memory.
        """
        first, *others = self._transports
        region, memory = first.allocate(nbytes)
        for transport in others:
            registered = transport.register(memory)
            assert registered == region  # ids count alike on every transport
        self._allocated.append(memory)
        self.spans.append(MemorySpan(memory.ctypes.data, memory.nbytes, HOST))
        self._registered += 1
        return memory

    def place(self, span: MemorySpan) -> tuple[int, int]:
        """The region in which a span lies, a new region if need be, and the offset in the
        region.
        """
        for index, known in enumerate(self.spans):
            offset = span.address - known.address
            if offset >= 0 and offset + span.nbytes <= known.nbytes and span.device == known.device:
                return index, offset
        self.spans.append(span)
        return len(self.spans) - 1, 0

    def register_host(self) -> None:
        """Registers the host memory that the transports do not know yet."""
        for span in self.spans[self._registered :]:
            for transport in self._transports:
                transport.register(span.as_array())
        self._registered = len(self.spans)

    def register_device(self, transport: Transport, packer: Packer | None) -> None:
        """Registers a cache on a device with a transport.

        Args:
            transport: a transport that :func:`check_device` has found to serve the cache.
            packer: packs blocks for transports of host memory; ``None`` if nothing is lent over
                such a transport.

        Raises:
            TransferError: a transport for devices cannot serve this memory, or is for another
                device.
        """
        for span in self.spans:
            if isinstance(transport, DeviceTransport):
                transport.register_device(span)
            elif packer is not None:
                assert isinstance(transport, PackingTransport)  # see check_device
                transport.register_packed(span, packer)


def check_buffer_device(buffer_device: str | None) -> None:
    """Checks ``kv_buffer_device`` before anything is known of the cache.

    Raises:
        ConfigError: there is no such device.
    """
    if buffer_device not in (None, *BUFFER_DEVICES):
        raise ConfigError(
            f"kv_buffer_device: {buffer_device!r} is not one of {', '.join(BUFFER_DEVICES)}; "
            "delete the key: the device of the KV cache is found"
        )


def device_of(spans: Iterable[MemorySpan], rank: int) -> str:
    """The single device on which a rank's cache lies; the host for a rank without a cache.

    Raises:
        ConfigError: the cache lies on several devices.
    """
    devices = sorted({span.device for span in spans}) or [HOST]
    if len(devices) > 1:
        raise ConfigError(
            f"rank {rank}: the KV cache lies on {', '.join(devices)}; put it on one of them"
        )
    return devices[0]


def check_device(
    device: str,
    config: KVTransferConfig,
    transports: Mapping[str, Transport] | Mapping[str, type[Transport]],
) -> None:
    """Checks that the transports serve a cache on ``device``, as ``kv_buffer_device`` asks, and
    serve the cache to other engines if this engine lends.

    Args:
        device: the device of the cache.
        config: the configuration of this engine.
        transports: transports by name, or the classes of transports that are not open.

    Raises:
        ConfigError: the transports do not serve the cache; the message says what would.
    """
    buffer_device = config.kv_buffer_device
    kinds = {
        name: each if isinstance(each, type) else type(each) for name, each in transports.items()
    }
    for_devices = [name for name, kind in kinds.items() if issubclass(kind, DeviceTransport)]
    if device == HOST and buffer_device not in (None, HOST):
        raise ConfigError(
            f"kv_buffer_device: {buffer_device!r}, but the KV cache is in host memory; delete the "
            "key"
        )
    named = f"transport names {' and '.join(for_devices)}"
    if device == HOST and for_devices:
        raise ConfigError(
            f"transport: the KV cache is in host memory, and {named}, for memory of a GPU; delete "
            "it there"
        )
    if buffer_device == HOST and for_devices:
        raise ConfigError(
            f"kv_buffer_device: 'cpu' asks for transports of host memory, the KV cache is on "
            f"{device}, and {named}; delete kv_buffer_device, or delete it there"
        )
    for name, kind in kinds.items():
        serves = device == HOST or issubclass(kind, DeviceTransport | PackingTransport)
        if config.is_producer and not serves:
            raise ConfigError(
                f"transport: {name!r} serves host memory, and the KV cache is on {device}; name "
                "cuda_ipc, tcp or ucx in its place"
            )


@dataclass(slots=True, eq=False)
class Writing:
    """Write of a step to a prompt that is lent already, until it is complete."""

    lent: LentSpec
    event: CopyEvent | None
    """Event after which the write is complete; ``None`` for a complete write."""
    started: float = field(default_factory=time.time)
    """Unix seconds at which the write began."""
    error: KVFerryError | None = None

    def record(self, rank: int) -> TransferRecord:
        """The record of the write's result."""
        return self.lent.record(rank, self.started, error=self.error)

    def is_over(self) -> bool:
        """Whether the write is complete, or failed. Never waits."""
        if self.error is not None or self.event is None:
            return True
        try:
            return self.event.done()
        except KVFerryError as error:
            self.error = error
            return True
