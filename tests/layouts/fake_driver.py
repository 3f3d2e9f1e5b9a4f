"""CUDA's driver as a handful of Python functions."""

import ctypes

from kvferry.transports.cuda_ipc_memory import HANDLE_BYTES

BASE, SIZE, MAPPED = 0x7F00_0000_0000, 1 << 20, 0x7E00_0000_0000


def at(reference, kind):
    """What a reference leads to, as the driver sees it."""
    return ctypes.cast(reference, ctypes.POINTER(kind)).contents


class FakeDriver:
    """What the driver would do; ``errors`` maps the name of a function to the code it returns."""

    def __init__(self, **errors):
        self.errors = errors
        self.lead = 0
        self.opened, self.closed = [], []
        self.reached = []
        """Contexts whose memory kernels may use."""
        self.contexts = []
        """Contexts that were made current."""
        self.depth = 0
        """Number of contexts that are current and are not given back."""
        self.recorded = []
        """Number of times that each event was recorded; an event that is given up has None."""
        self.are_done = True
        """Whether events that were recorded are done."""
        self.uploads = []
        self.downloads = []
        self.pinned = []
        """Addresses of the memory that is pinned."""

    def cuInit(self, flags):  # noqa: N802
        return self.errors.get("cuInit", 0)

    def cuDeviceGet(self, number, ordinal):  # noqa: N802
        at(number, ctypes.c_int).value = ordinal
        return self.errors.get("cuDeviceGet", 0)

    def cuDevicePrimaryCtxRetain(self, context, number):  # noqa: N802
        at(context, ctypes.c_void_p).value = 0xC0 + number.value
        return 0

    def cuCtxPushCurrent_v2(self, context):  # noqa: N802
        if error := self.errors.get("cuCtxPushCurrent_v2", 0):
            return error
        self.contexts.append(context.value)
        self.depth += 1
        return 0

    def cuCtxPopCurrent_v2(self, context):  # noqa: N802
        self.depth -= 1
        return 0

    def cuMemcpyHtoDAsync_v2(self, target, source, nbytes, stream):  # noqa: N802
        assert self.depth
        self.uploads.append((target.value, source.value, nbytes.value, stream.value))
        return self.errors.get("cuMemcpyHtoDAsync_v2", 0)

    def cuMemcpyDtoHAsync_v2(self, target, source, nbytes, stream):  # noqa: N802
        assert self.depth
        self.downloads.append((target.value, source.value, nbytes.value, stream.value))
        return self.errors.get("cuMemcpyDtoHAsync_v2", 0)

    def cuCtxEnablePeerAccess(self, context, flags):  # noqa: N802
        assert self.depth
        assert flags == 0
        if context.value in self.reached:
            return 704
        self.reached.append(context.value)
        return self.errors.get("cuCtxEnablePeerAccess", 0)

    def cuMemHostRegister_v2(self, address, nbytes, flags):  # noqa: N802
        assert self.depth
        assert address.value not in self.pinned
        assert flags == 3  # for all contexts, and mapped
        if error := self.errors.get("cuMemHostRegister_v2", 0):
            return error
        self.pinned.append(address.value)
        return 0

    def cuMemHostUnregister(self, address):  # noqa: N802
        assert self.depth
        self.pinned.remove(address.value)
        return 0

    def cuEventCreate(self, event, flags):  # noqa: N802
        assert self.depth
        assert flags == 2  # without a time, which makes events dear
        self.recorded.append(0)
        at(event, ctypes.c_void_p).value = len(self.recorded)
        return self.errors.get("cuEventCreate", 0)

    def cuEventRecord(self, event, stream):  # noqa: N802
        assert self.depth
        self.recorded[event.value - 1] += 1
        return self.errors.get("cuEventRecord", 0)

    def cuEventQuery(self, event):  # noqa: N802
        assert self.depth
        is_done = self.are_done or not self.recorded[event.value - 1]
        return self.errors.get("cuEventQuery", 0 if is_done else 600)

    def cuEventDestroy_v2(self, event):  # noqa: N802
        assert self.recorded[event.value - 1] is not None
        self.recorded[event.value - 1] = None
        return 0

    def cuMemGetAddressRange_v2(self, base, nbytes, address):  # noqa: N802
        at(base, ctypes.c_uint64).value = BASE if address.value >= BASE else MAPPED
        at(nbytes, ctypes.c_size_t).value = SIZE
        return self.errors.get("cuMemGetAddressRange_v2", 0)

    def cuIpcGetMemHandle(self, handle, address):  # noqa: N802
        assert self.depth
        assert address.value == BASE
        ctypes.memset(handle, 7, HANDLE_BYTES)
        return self.errors.get("cuIpcGetMemHandle", 0)

    def cuIpcOpenMemHandle_v2(self, pointer, handle, flags):  # noqa: N802
        assert self.depth
        self.opened.append((bytes(handle.reserved), flags.value))
        at(pointer, ctypes.c_uint64).value = MAPPED + self.lead
        return self.errors.get("cuIpcOpenMemHandle_v2", 0)

    def cuIpcCloseMemHandle(self, pointer):  # noqa: N802
        assert self.depth
        self.closed.append(pointer.value)
        return 0

    def cuGetErrorString(self, result, text):  # noqa: N802
        at(text, ctypes.c_char_p).value = b"peer access is not supported"
        return 0
