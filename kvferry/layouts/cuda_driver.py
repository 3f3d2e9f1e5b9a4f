"""CUDA's driver, called through ctypes, in the context in which torch works.

Every machine with an NVIDIA GPU has the driver's functions, whichever CUDA runtime torch brings.
They also cost less than torch: torch takes three times as long to switch streams as the driver
takes to enqueue an upload, and a read of a short prompt is made of little else.
"""

import ctypes
import functools
import threading
from collections import Counter
from typing import Any

from kvferry.errors import HostError, KVFerryError, TransferError

_LIBRARY = "libcuda.so.1"
_NO_TIMING = 2
_PINNED_FOR_ALL = 1 | 2
"""Flags: the memory is pinned for the contexts of all devices, and mapped into their addresses."""
_NOT_READY = 600
_ALREADY_REACHED = 704

#: Address → number of times that the memory at the address is pinned; CUDA refuses a second time.
_pins: Counter[int] = Counter()
_pin_lock = threading.Lock()


class CudaDriver:
    """The driver's functions for one device. Thread-safe.

    In a ``with`` block, the device's context is the current context of the calling thread, as most
    functions need; afterwards the thread's context is as before. Calls of torch belong in such a
    block too, on threads that the engine has not started: on a thread without a context, CUDA's
    runtime opens a context on device 0, which takes half a GiB of that device.
    """

    def __init__(self, device: int, library: Any = None) -> None:
        """Args:
        device: number of the device, as torch counts.
        library: the driver, for tests; ``None`` stands for the machine's driver.

        Raises:
            HostError: there is no driver, or no such device.
        """
        self.device = f"cuda:{device}"
        """Name of the device."""
        self._library = _load() if library is None else library
        number, self._context = ctypes.c_int(), ctypes.c_void_p()
        doing = f"{self.device}: opening CUDA's driver"
        self.call("cuInit", 0, doing=doing, error=HostError)
        self.call("cuDeviceGet", ctypes.byref(number), device, doing=doing, error=HostError)
        # The context that torch works in; the context stays for the life of the process.
        context = ctypes.byref(self._context)
        self.call("cuDevicePrimaryCtxRetain", context, number, doing=doing, error=HostError)
        self._push, self._pop = self._library.cuCtxPushCurrent_v2, self._library.cuCtxPopCurrent_v2
        self._popped = ctypes.byref(ctypes.c_void_p())  # written at each end of a block, never read
        self._upload = self._library.cuMemcpyHtoDAsync_v2
        self._download = self._library.cuMemcpyDtoHAsync_v2

    def __enter__(self) -> None:
        self.check("cuCtxPushCurrent_v2", self._push(self._context))

    def __exit__(self, *_: object) -> None:
        self._pop(self._popped)

    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy of pinned host memory to the device; the context must be current.

        Args:
            target: address on the device.
            source: address in the host's memory.
            nbytes: number of bytes.
            stream: handle of the stream.

        Raises:
            TransferError: the device failed.
        """
        self.check("an upload", self._upload(*_copy_arguments(target, source, nbytes, stream)))

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Enqueues a copy of device memory to pinned host memory; the context must be current.

        Args:
            target: address in the host's memory.
            source: address on the device.
            nbytes: number of bytes.
            stream: handle of the stream.

        Raises:
            TransferError: the device failed.
        """
        self.check("a download", self._download(*_copy_arguments(target, source, nbytes, stream)))

    def pin(self, address: int, nbytes: int) -> None:
        """Keeps host memory in place for all devices; the context must be current.

        The devices reach the memory under the same address. A refusal by CUDA's runtime, in place
        of the driver, would also fail the next kernel that torch launches on the calling thread.

        Raises:
            HostError: the memory cannot be pinned.
        """
        doing = f"pinning {nbytes} bytes of host memory (`ulimit -l` may be too low)"
        numbers = ctypes.c_uint64(address), ctypes.c_size_t(nbytes), _PINNED_FOR_ALL
        with _pin_lock:
            if _pins[address] == 0:
                self.call("cuMemHostRegister_v2", *numbers, doing=doing, error=HostError)
            _pins[address] += 1

    def unpin(self, address: int) -> None:
        """Undoes one :meth:`pin`, once nothing copies to or from the memory any more."""
        with _pin_lock:
            _pins[address] -= 1
            if _pins[address] == 0:
                del _pins[address]
                self._library.cuMemHostUnregister(ctypes.c_uint64(address))

    def reach(self, other: "CudaDriver") -> None:
        """Lets kernels of this device use all memory of another device of this process.

        The context must be current. Idempotent.

        Raises:
            TransferError: this device cannot reach the other device.
        """
        result = self._library.cuCtxEnablePeerAccess(other._context, 0)  # noqa: SLF001 - its own
        if result != _ALREADY_REACHED:
            self.check(f"access to the memory of {other.device}", result)

    def event(self) -> "DriverEvent":
        """A new event; the context must be current.

        Raises:
            TransferError: the device failed.
        """
        return DriverEvent(self, self._library)

    def check(self, doing: str, result: int) -> None:
        """Raises a ``TransferError``, unless a function of the driver returned 0."""
        if result != 0:
            raise TransferError(f"{self.device}: {doing}: {self._text(result)}")

    def call(self, name: str, *arguments: Any, doing: str, error: type[KVFerryError]) -> None:
        """Calls a function of the driver.

        Args:
            name: name of the function.
            arguments: arguments, as ctypes takes them.
            doing: start of the error message.
            error: kind of the error to raise.

        Raises:
            KVFerryError: of the given kind: the function failed.
        """
        result = getattr(self._library, name)(*arguments)
        if result != 0:
            raise error(f"{doing}: {name}: {self._text(result)}")

    def _text(self, result: int) -> str:
        text = ctypes.c_char_p()
        self._library.cuGetErrorString(result, ctypes.byref(text))
        return f"CUDA error {result} ({(text.value or b'unknown').decode()})"


class DriverEvent:
    """An event of the driver that its owner shows to nobody else; done until it is recorded.

    The device's context must be current in each call.
    """

    def __init__(self, driver: CudaDriver, library: Any) -> None:
        """See :meth:`CudaDriver.event`."""
        self.handle = ctypes.c_void_p()
        self._driver = driver
        made = library.cuEventCreate(ctypes.byref(self.handle), _NO_TIMING)
        driver.check("making an event", made)
        self._record, self._query = library.cuEventRecord, library.cuEventQuery
        self._destroy = library.cuEventDestroy_v2

    def record(self, stream: int) -> None:
        """Records the event after all work so far on a stream.

        Args:
            stream: handle of the stream.

        Raises:
            TransferError: the device failed.
        """
        self._driver.check("an event", self._record(self.handle, ctypes.c_uint64(stream)))

    def query(self) -> bool:
        """Whether all work before the event is done.

        Raises:
            TransferError: the device failed.
        """
        result: int = self._query(self.handle)
        if result not in (0, _NOT_READY):
            self._driver.check("an event", result)
        return result == 0

    def close(self) -> None:
        """Gives the event up; the driver frees the event once it is done."""
        self._destroy(self.handle)


@functools.cache
def driver_of(device: int, /) -> CudaDriver:
    """The driver of a device, which all objects of this process that work on the device share.

    Raises:
        HostError: there is no driver, or no such device.
    """
    return CudaDriver(device)


def _copy_arguments(target: int, source: int, nbytes: int, stream: int) -> tuple[Any, ...]:
    return tuple(map(ctypes.c_uint64, (target, source, nbytes, stream)))


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise HostError(
            f"{_LIBRARY}: {error}; install NVIDIA's driver, or use a transport for host memory"
        ) from error
