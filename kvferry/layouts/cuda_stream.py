"""The copy stream of a CUDA device, beside the stream on which the engine computes."""

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvferry.errors import HostError, TransferError
from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.copier_triton import copy_tiles_device, warm_device
from kvferry.layouts.device import CopyEvent, CopyStream
from kvferry.layouts.tiles import Runs, Tiles

#: Address → how many streams of this process have pinned the memory there; CUDA refuses the second.
_pins: Counter[int] = Counter()
_pin_lock = threading.Lock()

LOOK_S = 0.0005
"""Seconds for which a thread looks at an event before it sleeps until the event is done: the driver
takes 0.1 to 0.3 ms to wake it, as long as a copy of some hundred megabytes takes."""


class CudaEvent(CopyEvent):
    """An event of CUDA for which the *calling thread* waits.

    ``torch.cuda.Event.wait`` makes a stream wait and returns at once, so a bare event of torch is
    nothing that a transport may be given as ``after``.
    """

    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    @classmethod
    def of_engine(cls, device: str) -> "CudaEvent":
        """After what the calling thread's current stream of ``device`` holds so far."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with cuda_errors(f"{device}: recording an event"):
            event.record(torch.cuda.current_stream(device))
        return cls(event)

    def done(self) -> bool:
        """See :meth:`CopyEvent.done`."""
        with cuda_errors("a copy on the device"):
            return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See :meth:`CopyEvent.wait`; the thread looks for a while, and then sleeps."""
        deadline = time.monotonic() + LOOK_S
        while not self.done():
            if time.monotonic() >= deadline:
                with cuda_errors("a copy on the device"):
                    self._event.synchronize()
                return
            time.sleep(0)  # other threads take the interpreter lock


class CudaCopyStream(CopyStream):
    """A stream of its own; copies are :func:`~kvferry.layouts.copier_triton.copy_tiles_device`."""

    def __init__(self, device: int) -> None:
        self.device = f"cuda:{device}"
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._allocated: list[torch.Tensor] = []
        self._lock = threading.Lock()

    @classmethod
    def open(cls, device: int | None = None) -> "CudaCopyStream":
        """A stream of the given device, or of the current one; compiles the kernel.

        Raises:
            HostError: there is no such device.
        """
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        wanted = (torch.cuda.current_device() if count else 0) if device is None else device
        if not 0 <= wanted < count:
            raise HostError(
                f"device: cuda:{wanted} is not one of the {count} CUDA devices that torch sees; "
                "give another, or use a transport for host memory (shm, tcp)"
            )
        with cuda_errors(f"cuda:{wanted}: opening a stream"):
            stream = cls(wanted)
            warm_device(stream._stream)
            return stream

    def allocate(self, nbytes: int) -> MemorySpan:
        """See :meth:`CopyStream.allocate`."""
        if nbytes <= 0:
            raise ValueError(f"nbytes: {nbytes} is not positive")
        with cuda_errors(f"{self.device}: allocating {nbytes} bytes"):
            tensor = torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
            torch.cuda.current_stream(self.device).synchronize()  # ours did not order the zeros
        with self._lock:
            self._allocated.append(tensor)
        return MemorySpan(tensor.data_ptr(), nbytes, self.device)

    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.pin`. Two pieces of memory must not share a page."""
        address = memory.ctypes.data
        with _pin_lock:
            if _pins[address] == 0:
                result = _runtime().cudaHostRegister(address, memory.nbytes, 0)
                if int(result) != 0:
                    raise HostError(
                        f"{memory.nbytes} bytes of host memory cannot be pinned: {result}; the "
                        "limit of locked memory (`ulimit -l`) may be too low"
                    )
            _pins[address] += 1

    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.unpin`."""
        address = memory.ctypes.data
        with _pin_lock:
            _pins[address] -= 1
            if _pins[address] == 0:
                del _pins[address]
                _runtime().cudaHostUnregister(address)

    def upload(self, source: npt.NDArray[np.uint8], target: int) -> None:
        """See :meth:`CopyStream.upload`."""
        span = MemorySpan(target, source.nbytes, self.device)
        with cuda_errors(f"{self.device}: an upload"), torch.cuda.stream(self._stream):
            torch.as_tensor(span).copy_(torch.from_numpy(source), non_blocking=True)

    def download(self, source: int, target: npt.NDArray[np.uint8]) -> None:
        """See :meth:`CopyStream.download`."""
        span = MemorySpan(source, target.nbytes, self.device)
        with cuda_errors(f"{self.device}: a download"), torch.cuda.stream(self._stream):
            torch.from_numpy(target).copy_(torch.as_tensor(span), non_blocking=True)

    def copy(
        self,
        source_addresses: Sequence[int] | npt.NDArray[np.int64],
        target_addresses: Sequence[int] | npt.NDArray[np.int64],
        tiles: Tiles,
        runs: Runs,
    ) -> None:
        """See :meth:`CopyStream.copy`."""
        with cuda_errors(f"{self.device}: a copy"):
            copy_tiles_device(source_addresses, target_addresses, tiles, runs, self._stream)

    def follow_engine(self) -> None:
        """See :meth:`CopyStream.follow_engine`: the calling thread's current stream."""
        with cuda_errors(f"{self.device}: waiting for the engine's stream"):
            self._stream.wait_stream(torch.cuda.current_stream(self.device))

    def record(self) -> CopyEvent:
        """See :meth:`CopyStream.record`."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        with cuda_errors(f"{self.device}: recording an event"):
            event.record(self._stream)
        return CudaEvent(event)

    def engine_event(self) -> CopyEvent:
        """See :meth:`CopyStream.engine_event`: of the calling thread's current stream."""
        return CudaEvent.of_engine(self.device)

    def close(self) -> None:
        """See :meth:`CopyStream.close`."""
        with cuda_errors(f"{self.device}: closing"):
            self._stream.synchronize()
        with self._lock:
            self._allocated.clear()


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


@contextmanager
def cuda_errors(doing: str) -> Iterator[None]:
    """Raises what torch raises for CUDA in the block as the error of ours that it means."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise HostError(
            f"{doing}: the device's memory is full; lower num_blocks, or what else is on it"
        ) from error
    except RuntimeError as error:
        raise TransferError(f"{doing}: {str(error).splitlines()[0]}") from error
