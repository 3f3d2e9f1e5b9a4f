"""Transports around another one, which change what they were written for and nothing else."""

from typing import Any, ClassVar, Self

from kvferry.transports.base import Transport, TransportAround


class WrappedTransport(TransportAround):
    """A transport around one that it opens and closes."""

    inner_class: ClassVar[type[Transport]]

    @classmethod
    def around(cls, transport: type[Transport], kind: str, **attributes: Any) -> type[Self]:
        """A transport class that is ``transport`` in disguise; it keeps the name.

        Args:
            transport: what it is opened around.
            kind: said before the name of the class.
            attributes: more class attributes.
        """
        names = ("name", "addressing", "fences", "ExtraConfig")
        kept = {name: getattr(transport, name) for name in names}
        own = {"__doc__": f"{kind} {transport.__name__}.", "inner_class": transport}
        return type(f"{kind}{transport.__name__}", (cls,), {**kept, **own, **attributes})

    def close(self) -> None:
        """Closes the inner transport."""
        self._inner.close()
