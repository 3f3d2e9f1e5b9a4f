"""Transports around another transport that change one behaviour and nothing else."""

from typing import Any, ClassVar, Self

from kvferry.transports.base import Transport, TransportAround


class WrappedTransport(TransportAround):
    """A transport that opens and closes an inner transport."""

    inner_class: ClassVar[type[Transport]]

    @classmethod
    def around(cls, transport: type[Transport], kind: str, **attributes: Any) -> type[Self]:
        """Makes a transport class around ``transport``, under the same name.

        Args:
            transport: class of the inner transport.
            kind: prefix of the class name.
            attributes: more class attributes.
        """
        names = ("name", "addressing", "fences", "ExtraConfig")
        kept = {name: getattr(transport, name) for name in names}
        own = {"__doc__": f"{kind} {transport.__name__}.", "inner_class": transport}
        return type(f"{kind}{transport.__name__}", (cls,), {**kept, **own, **attributes})

    def close(self) -> None:
        """Closes the inner transport."""
        self._inner.close()
