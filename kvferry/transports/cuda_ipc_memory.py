"""Memory of a GPU that another process reads: the handles of CUDA IPC.

This module calls :class:`~kvferry.layouts.cuda_driver.CudaDriver`. torch's own sharing of storages
is not used: that code is private, and counts a single reader per handle, although ranks have many
readers.

A handle stands for a whole allocation, and torch cuts tensors out of allocations. So memory travels
as the handle of its allocation and an offset. Memory from CUDA's virtual memory management has no
such handle (torch's ``expandable_segments``, vLLM's sleep mode).
"""

import ctypes
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from contextlib import suppress

from kvferry.errors import KVFerryError, PeerLostError, TransferError
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.cuda_driver import CudaDriver

HANDLE_BYTES = 64
"""Number of bytes of CUDA's ``CUipcMemHandle``."""
_LAZY_PEER_ACCESS = 1
"""Flag: another GPU of this host may hold the memory; CUDA sets up access if possible."""


class IpcMemory(ABC):
    """Memory of one device, as other processes reach the memory. Thread-safe."""

    @abstractmethod
    def export(self, memory: MemorySpan) -> tuple[bytes, int]:
        """Handle of the allocation that holds ``memory``, and offset in the allocation, in bytes.

        Raises:
            TransferError: this memory cannot be shared.
        """

    @abstractmethod
    def open(self, handle: bytes) -> MemorySpan:
        """Maps the whole allocation of a handle that another process, or this process, exported.

        Raises:
            PeerLostError: the allocation cannot be mapped: its process is gone, or out of reach.
        """

    @abstractmethod
    def release(self, memory: MemorySpan) -> None:
        """Undoes one :meth:`open`, once no copy uses the memory any more. Never raises."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


#: Objects that have exported memory in this process: CUDA cannot open a handle in its own process.
_exporters: "weakref.WeakSet[CudaIpcMemory]" = weakref.WeakSet()
_exporters_lock = threading.Lock()


class CudaIpcMemory(IpcMemory):
    """CUDA IPC for the memory of one device; also maps the memory of peers."""

    def __init__(self, driver: CudaDriver) -> None:
        self.driver = driver
        """The driver, in the context of the device."""
        self._device = driver.device
        self._exported: dict[bytes, MemorySpan] = {}
        self._opened: Counter[int] = Counter()
        self._lock = threading.Lock()
        with _exporters_lock:
            _exporters.add(self)

    def export(self, memory: MemorySpan) -> tuple[bytes, int]:
        """See :meth:`IpcMemory.export`."""
        if memory.device != self._device:
            raise TransferError(
                f"memory: is on {memory.device}, and this transport serves {self._device}; open "
                "one for that device"
            )
        doing = f"sharing {memory.nbytes} bytes of {self._device}"
        with self.driver:
            return self._export(memory, doing)

    def _export(self, memory: MemorySpan, doing: str) -> tuple[bytes, int]:
        allocation = self._allocation(memory.address, doing, TransferError)
        offset = memory.address - allocation.address
        if offset + memory.nbytes > allocation.nbytes:
            raise TransferError(
                f"{doing}: they lie in several allocations, the first of {allocation.nbytes} "
                "bytes; CUDA IPC shares one: unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
            )
        handle = _Handle()
        self.driver.call(
            "cuIpcGetMemHandle",
            ctypes.byref(handle),
            ctypes.c_uint64(allocation.address),
            doing=f"{doing} (memory of expandable_segments or of sleep mode cannot be shared)",
            error=TransferError,
        )
        raw = bytes(handle.reserved)
        with self._lock:
            self._exported[raw] = allocation
        return raw, offset

    def open(self, handle: bytes) -> MemorySpan:
        """See :meth:`IpcMemory.open`."""
        with _exporters_lock:
            exporters = list(_exporters)
        for exporter in exporters:
            if (own := exporter.exported(handle)) is not None:
                if own.device != self._device:
                    self._reach(exporter)
                return own
        with self.driver:
            return self._open(handle)

    def _reach(self, exporter: "CudaIpcMemory") -> None:
        """Lets this device read the other device's memory, as the mapping of a handle would."""
        try:
            with self.driver:
                self.driver.reach(exporter.driver)
        except TransferError as error:
            raise PeerLostError(f"{error}; use another transport") from error

    def _open(self, handle: bytes) -> MemorySpan:
        doing = "mapping the memory of a peer"
        pointer = ctypes.c_uint64()
        self.driver.call(
            "cuIpcOpenMemHandle_v2",
            ctypes.byref(pointer),
            _Handle.from_buffer_copy(handle),
            ctypes.c_uint(_LAZY_PEER_ACCESS),
            doing=f"{doing} (its process may be gone, run in a container without --ipc=host, or "
            "use a GPU that this one cannot read; use another transport)",
            error=PeerLostError,
        )
        with self._lock:
            self._opened[pointer.value] += 1
        try:
            mapped = self._allocation(pointer.value, doing, PeerLostError)
        except PeerLostError:
            self.release(MemorySpan(pointer.value, 0, self._device))
            raise
        # CUDA cuts small allocations out of larger allocations, and maps the whole larger
        # allocation.
        before = pointer.value - mapped.address
        return MemorySpan(pointer.value, mapped.nbytes - before, self._device)

    def exported(self, handle: bytes) -> MemorySpan | None:
        """The allocation of this process for a handle, or ``None``."""
        with self._lock:
            return self._exported.get(handle)

    def release(self, memory: MemorySpan) -> None:
        """See :meth:`IpcMemory.release`."""
        with self._lock:
            mapped = self._opened[memory.address] > 0  # memory of this process never was
            self._opened[memory.address] -= mapped
        if mapped:
            with suppress(TransferError), self.driver:
                pointer = ctypes.c_uint64(memory.address)
                doing = "closing the memory of a peer"
                self.driver.call("cuIpcCloseMemHandle", pointer, doing=doing, error=TransferError)

    def _allocation(self, address: int, doing: str, error: type[KVFerryError]) -> MemorySpan:
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self.driver.call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(nbytes),
            ctypes.c_uint64(address),
            doing=doing,
            error=error,
        )
        return MemorySpan(base.value, nbytes.value, self._device)
