"""Transports around another one, which change what they were written for and nothing else."""

from typing import Any, ClassVar, Self

from kvferry.transports.base import ByteArray, Peer, Transport


class WrappedTransport(Transport):
    """Does what the inner transport does, except what a subclass does otherwise."""

    inner_class: ClassVar[type[Transport]]

    def __init__(self, inner: Transport) -> None:
        self._inner = inner

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

    def allocate(self, nbytes: int) -> tuple[int, ByteArray]:
        """As the inner transport."""
        return self._inner.allocate(nbytes)

    def register(self, memory: ByteArray, *, serve: bool = True) -> int:
        """As the inner transport."""
        return self._inner.register(memory, serve=serve)

    def endpoint(self) -> bytes:
        """As the inner transport."""
        return self._inner.endpoint()

    def connect(self, endpoint: bytes) -> Peer:
        """As the inner transport."""
        return self._inner.connect(endpoint)

    def close(self) -> None:
        """Closes the inner transport."""
        self._inner.close()
