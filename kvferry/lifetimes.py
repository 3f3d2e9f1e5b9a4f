"""One ``close``, and a context manager for free."""

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Closing(ABC):
    """What is opened, used and closed; ``with`` closes it.

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
        """Gives back what is owned. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
