"""Memory of a GPU that another process reads: the handles of CUDA IPC.

The calls are those of CUDA's driver, through ctypes: nine functions that every machine with
an NVIDIA driver has, whichever CUDA runtime torch brings. torch's own sharing of storages is not
used: it is private, and counts one reader per handle, where ranks have many.

A handle stands for a whole allocation, of which torch cuts tensors, so memory travels as the handle
of its allocation and an offset. Memory from CUDA's virtual memory management has no such handle
(torch's ``expandable_segments``, vLLM's sleep mode).
"""

import ctypes
import threading
import weakref
from abc import ABC, abstractmethod
from collections import Counter
from typing import Any

from kvferry.errors import HostError, KVFerryError, PeerLostError, TransferError
from kvferry.layouts.arrays import MemorySpan

HANDLE_BYTES = 64
"""Size of CUDA's ``CUipcMemHandle``."""
_LIBRARY = "libcuda.so.1"
_LAZY_PEER_ACCESS = 1
"""Another GPU of this host may hold the memory; access is set up where it can be."""


class IpcMemory(ABC):
    """Memory of one device, as other processes get at it. Thread-safe."""

    @abstractmethod
    def export(self, memory: MemorySpan) -> tuple[bytes, int]:
        """The handle of the allocation that holds ``memory``, and the offset in it, in bytes.

        Raises:
            TransferError: this memory cannot be shared.
        """

    @abstractmethod
    def open(self, handle: bytes) -> MemorySpan:
        """Maps the whole allocation of a handle that another process exported, or this one.

        Raises:
            PeerLostError: it cannot be mapped: its process is gone, or out of reach.
        """

    @abstractmethod
    def release(self, memory: MemorySpan) -> None:
        """Undoes one :meth:`open`, once no copy uses the memory any more. Never raises."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


#: Who has exported memory in this process. A handle cannot be opened where it was made.
_exporters: "weakref.WeakSet[CudaIpcMemory]" = weakref.WeakSet()


class CudaIpcMemory(IpcMemory):
    """CUDA IPC for the memory of one device; reads of peers' memory are made by it, too."""

    def __init__(self, device: int, library: Any = None) -> None:
        """Args:
        device: its number, as torch counts.
        library: the driver, for tests; the machine's unless given.

        Raises:
            HostError: there is no driver, or no such device.
        """
        self._device = f"cuda:{device}"
        self._cuda = _load() if library is None else library
        self._exported: dict[bytes, MemorySpan] = {}
        self._opened: Counter[int] = Counter()
        self._lock = threading.Lock()
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        doing = f"{self._device}: opening CUDA's driver"
        self._call("cuInit", 0, doing=doing, error=HostError)
        self._call("cuDeviceGet", ctypes.byref(number), device, doing=doing, error=HostError)
        # The context that torch works in; it stays for the life of the process.
        context = ctypes.byref(self._context)
        self._call("cuDevicePrimaryCtxRetain", context, number, doing=doing, error=HostError)
        _exporters.add(self)

    def export(self, memory: MemorySpan) -> tuple[bytes, int]:
        """See :meth:`IpcMemory.export`."""
        if memory.device != self._device:
            raise TransferError(
                f"memory: is on {memory.device}, and this transport serves {self._device}; open "
                "one for that device"
            )
        doing = f"sharing {memory.nbytes} bytes of {self._device}"
        self._enter(doing)
        allocation = self._allocation(memory.address, doing, TransferError)
        offset = memory.address - allocation.address
        if offset + memory.nbytes > allocation.nbytes:
            raise TransferError(
                f"{doing}: they lie in several allocations, the first of {allocation.nbytes} "
                "bytes; CUDA IPC shares one: unset expandable_segments in PYTORCH_CUDA_ALLOC_CONF"
            )
        handle = _Handle()
        self._call(
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
        for exporter in list(_exporters):
            if (own := exporter.exported(handle)) is not None:
                return own
        doing = "mapping the memory of a peer"
        self._enter(doing)
        pointer = ctypes.c_uint64()
        self._call(
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
        # CUDA cuts small allocations out of larger ones, and maps all of that.
        before = pointer.value - mapped.address
        return MemorySpan(pointer.value, mapped.nbytes - before, self._device)

    def exported(self, handle: bytes) -> MemorySpan | None:
        """The allocation of this process that a handle stands for."""
        with self._lock:
            return self._exported.get(handle)

    def release(self, memory: MemorySpan) -> None:
        """See :meth:`IpcMemory.release`."""
        with self._lock:
            mapped = self._opened[memory.address] > 0  # memory of our own never was
            self._opened[memory.address] -= mapped
        if mapped:
            self._cuda.cuCtxSetCurrent(self._context)
            self._cuda.cuIpcCloseMemHandle(ctypes.c_uint64(memory.address))

    def _enter(self, doing: str) -> None:
        """Makes the device's context the calling thread's: CUDA keeps one per thread."""
        self._call("cuCtxSetCurrent", self._context, doing=doing, error=TransferError)

    def _allocation(self, address: int, doing: str, error: type[KVFerryError]) -> MemorySpan:
        base, nbytes = ctypes.c_uint64(), ctypes.c_size_t()
        self._call(
            "cuMemGetAddressRange_v2",
            ctypes.byref(base),
            ctypes.byref(nbytes),
            ctypes.c_uint64(address),
            doing=doing,
            error=error,
        )
        return MemorySpan(base.value, nbytes.value, self._device)

    def _call(self, name: str, *arguments: Any, doing: str, error: type[KVFerryError]) -> None:
        result = getattr(self._cuda, name)(*arguments)
        if result != 0:
            raise error(f"{doing}: {name}: {self._text(result)}")

    def _text(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._cuda.cuGetErrorString(result, ctypes.byref(text))
        return f"CUDA error {result} ({(text.value or b'unknown').decode()})"


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise HostError(
            f"{_LIBRARY}: {error}; install NVIDIA's driver, or use a transport for host memory"
        ) from error
