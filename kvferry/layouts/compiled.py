"""How kernels are compiled, and kept on disk."""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from types import ModuleType
from typing import Any, TypeVar

import numba
from numba.core.caching import FunctionCache

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compiles a function for use without the interpreter lock; keeps the result on disk."""
    compiled: Any = numba.njit(nogil=True)(function)
    compiled._cache = _Cache(function)  # noqa: SLF001 - what `cache=True` does with Numba's own
    return compiled  # type: ignore[no-any-return]


class _Cache(FunctionCache):  # type: ignore[misc]
    """Numba's own looks at the file of a function, and not at those of what is compiled into it."""

    def _index_key(self, *args: Any) -> tuple[object, ...]:
        return (*super()._index_key(*args), _digest(self._py_func.__module__))


@cache
def _digest(module: str) -> str:
    """Of the sources of a module and of all modules whose kernels its own may call."""
    found: set[str] = set()
    new = {module}
    while new:
        found |= new
        new = {name for each in new for name in _called(each)} - found
    texts = [inspect.getsource(sys.modules[name]) for name in sorted(found)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _called(module: str) -> Iterator[str]:
    """The modules of its package, or ours, that a module has, or has kernels or intrinsics of."""
    ours = {__name__.partition(".")[0], module.partition(".")[0]}
    for value in vars(sys.modules[module]).values():
        if isinstance(value, ModuleType):
            name = value.__name__
        elif hasattr(value, "__wrapped__"):  # as all have that Numba makes of functions
            name = value.__module__
        else:
            continue
        if name.partition(".")[0] in ours:
            yield name
