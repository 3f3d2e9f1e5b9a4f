"""Transports of device memory."""

from abc import abstractmethod

from kvferry.layouts.arrays import MemorySpan
from kvferry.transports.base import Transport


class DeviceTransport(Transport):
    """A transport that also serves, and reads into, memory that the host cannot touch.

    Region ids count up over the methods here and those for host memory together.
    """

    @abstractmethod
    def allocate_device(self, nbytes: int) -> tuple[int, MemorySpan]:
        """Allocates zeroed memory of the device that peers may read; returns its region id.

        It lives until ``close``.

        Raises:
            HostError: there is no room for ``nbytes``.
        """

    @abstractmethod
    def register_device(self, memory: MemorySpan, *, serve: bool = True) -> int:
        """Makes memory of the device a region; returns its id. The caller keeps it alive.

        With ``serve=False`` it is only a place for this side's own reads to land.

        Raises:
            TransferError: this memory cannot be served, or is that of another device.
        """
