"""Transports around another transport that change one behaviour and nothing else."""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from kvferry.layouts.arrays import MemorySpan
from kvferry.transports.base import DeviceTransport, Transport, TransportAround
from kvferry.transports.packing import Packer, PackingTransport


class _AroundDevice(DeviceTransport):
    """The methods for device memory of a transport around another."""

    _inner: DeviceTransport

    def allocate_device(self, nbytes: int) -> tuple[int, MemorySpan]:
        return self._inner.allocate_device(nbytes)

    def register_device(self, memory: MemorySpan, *, serve: bool = True) -> int:
        return self._inner.register_device(memory, serve=serve)


class _AroundPacking(PackingTransport):
    """The method for packed memory of a transport around another."""

    _inner: PackingTransport

    def register_packed(self, memory: MemorySpan, packer: Packer) -> int:
        return self._inner.register_packed(memory, packer)


_OPTIONAL: Mapping[type[Transport], type[Transport]] = {
    DeviceTransport: _AroundDevice,
    PackingTransport: _AroundPacking,
}
"""Contract that a transport may keep → the class that forwards its methods."""


class WrappedTransport(TransportAround):
    """A transport that opens and closes an inner transport."""

    inner_class: ClassVar[type[Transport]]
    kind: ClassVar[str]
    """Prefix of the class name."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.fences = type(self).fences and inner.fences

    @classmethod
    def around(cls, transport: type[Transport], kind: str, **attributes: Any) -> type[Self]:
        """Makes a transport class around ``transport``, under the same name.

        The class declares what ``transport`` declares, and keeps the same contracts, so that a
        connector reads with both in the same way.

        Args:
            transport: class of the inner transport.
            kind: prefix of the class name.
            attributes: more class attributes.
        """
        members = {
            **{name: getattr(transport, name) for name in Transport.__annotations__},
            "__doc__": f"{kind} {transport.__name__}.",
            "inner_class": transport,
            "kind": kind,
            **attributes,
        }
        bases = [around for base, around in _OPTIONAL.items() if issubclass(transport, base)]
        return type(f"{kind}{transport.__name__}", (cls, *bases), members)

    @classmethod
    def with_keys(cls, extra: Mapping[str, Any]) -> type[Self]:
        """See :meth:`Transport.with_keys`."""
        inner = cls.inner_class.with_keys(extra)
        if inner is cls.inner_class:
            return cls
        fences = cls.fences and inner.fences
        return cls.around(inner, cls.kind, name=cls.name, fences=fences)

    def close(self) -> None:
        """Closes the inner transport."""
        self._inner.close()
