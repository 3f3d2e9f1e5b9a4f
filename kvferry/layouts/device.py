"""What is asked of a device that copies: a stream that works in order, and events on it.

:class:`~kvferry.layouts.cuda_stream.CudaCopyStream` is that of a CUDA device. Whoever copies on a
device is written against this contract, so that all of it but the device itself is tested with
``kvferry.testing.HostCopyStream``, a thread that takes the place of one.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvferry.layouts.arrays import MemorySpan
from kvferry.layouts.tiles import Runs, Tiles
from kvferry.lifetimes import Closing


class CopyEvent(ABC):
    """A point of a stream. Errors of the device surface here, as it works behind our back."""

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before it has been carried out. Never waits.

        Raises:
            TransferError: the device failed; nothing that was enqueued is carried out any more.
        """

    @abstractmethod
    def wait(self) -> None:
        """Returns when everything before it has been carried out; the calling thread waits.

        Raises:
            TransferError: the device failed.
        """


class CopyStream(Closing):
    """Copies that one device carries out in the order in which they were enqueued.

    Nothing waits but ``close``. Addresses are those that the device sees; whoever owns the memory
    keeps it until an event recorded after the last copy is done. Thread-safe.
    """

    device: str
    """For example ``cuda:0``."""

    @abstractmethod
    def allocate(self, nbytes: int) -> MemorySpan:
        """Zeroed memory of the device, which lives until ``close``.

        Raises:
            HostError: there is no room for ``nbytes``.
        """

    @abstractmethod
    def pin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Keeps host memory in place, so that the device reaches it under the same address.

        Raises:
            HostError: it cannot be pinned.
        """

    @abstractmethod
    def unpin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Undoes :meth:`pin`, once no copy uses the memory any more."""

    @abstractmethod
    def upload(self, source: npt.NDArray[np.uint8], target: int) -> None:
        """Enqueues a copy of pinned host bytes to an address of the device."""

    @abstractmethod
    def download(self, source: int, target: npt.NDArray[np.uint8]) -> None:
        """Enqueues a copy from an address of the device into pinned host bytes."""

    @abstractmethod
    def copy(
        self,
        source_addresses: Sequence[int] | npt.NDArray[np.int64],
        target_addresses: Sequence[int] | npt.NDArray[np.int64],
        tiles: Tiles,
        runs: Runs,
    ) -> None:
        """Enqueues the copy of ``tiles`` × ``runs``, unchecked; the tables may change afterwards.

        Args:
            source_addresses: address of each source region.
            target_addresses: address of each target region.
            tiles: a 1-d array of ``TILE_DTYPE``.
            runs: a 1-d array of ``RUN_DTYPE``.

        Raises:
            TransferError: the device failed; nothing of this copy was enqueued.
        """

    @abstractmethod
    def record(self) -> CopyEvent:
        """An event after everything that was enqueued so far.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def engine_event(self) -> CopyEvent:
        """An event after what the engine has asked of the device so far, from the calling thread.

        Recorded on the step thread, it is the ``after`` of reads into blocks that an earlier step
        may still use.

        Raises:
            TransferError: the device failed.
        """

    @abstractmethod
    def close(self) -> None:
        """Waits for what was enqueued, then frees what was allocated. Idempotent."""
