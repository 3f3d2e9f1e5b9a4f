"""Objects with a ``close`` method are context managers."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """An object that is opened, used and closed; a ``with`` block closes it.

    >>> class Door(Closing):
    ...     is_open = True
    ...     def close(self) -> None:
    ...         self.is_open = False
    >>> with Door() as door:
    ...     assert door.is_open
    >>> door.is_open
    False
    """

    @abstractmethod
    def close(self) -> None:
        """Releases all resources that the object owns. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
