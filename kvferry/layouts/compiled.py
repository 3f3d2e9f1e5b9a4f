"""How kernels are compiled, and kept on disk."""

import contextlib
import hashlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler import CompileResult

logger = logging.getLogger(__name__)

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compiles a function for use without the interpreter lock; keeps the result on disk."""
    compiled: Any = numba.njit(nogil=True)(function)
    compiled._cache = _Cache(function)  # noqa: SLF001 - what `cache=True` does with Numba's own
    return compiled  # type: ignore[no-any-return]


def is_kept() -> bool:
    """Whether all that this process has compiled was found on disk or is there now."""
    return not _Cache.failed


class _Cache(FunctionCache):  # type: ignore[misc]
    """What is kept of one kernel: found in any of its folders, written to the first that allows it.

    It differs from Numba's own in three ways. A process that may write no folder goes on without;
    Numba's raises as soon as the function is defined. A folder that cannot be written is read, so
    that what was compiled while an image was built is of use to any user. A result counts as long
    as the sources say the same: Numba's own does not look at what is compiled into the function,
    and looks at the time of the file, which changes when the layers of an image are unpacked.
    """

    failed: ClassVar[bool] = False
    """Whether this process compiled what it cannot keep, and has said so."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # Numba's own is left out: it looks for a folder that can be written, and raises.
        self._py_func = function
        code, version = function.__code__, sys.version_info
        # Environments with other releases of Numba may use one checkout at the same time: a file of
        # one's would be overwritten by the other, and its code be none that this Numba reads.
        name = (
            f"{Path(code.co_filename).stem}.{function.__qualname__.replace('<locals>', 'locals')}-"
            f"{code.co_firstlineno}.py{version.major}{version.minor}{sys.abiflags}"
            f".numba{numba.__version__}"
        )
        stamp = _text_digest(function.__module__)
        self._files = {
            folder: IndexDataCacheFile(folder, name, stamp)
            for folder in _folders(Path(code.co_filename))
        }
        self._cache_path = next(iter(self._files))  # for the kernel's `stats`

    def _load_overload(self, signature: Any, target: Any) -> Any:
        key = self._index_key(signature, target.codegen())
        for file in self._files.values():
            with contextlib.suppress(OSError):  # another user's, say
                kept = file.load(key)
                if kept is not None:
                    return CompileResult._rebuild(target, *kept)  # noqa: SLF001 - see Numba's own
        return None

    def _save_overload(self, signature: Any, result: Any) -> None:
        if result.library.has_dynamic_globals:  # addresses of this process
            return
        key, kept = self._index_key(signature, result.codegen), result._reduce()  # noqa: SLF001
        failures = []
        for folder, file in self._files.items():
            try:
                Path(folder).mkdir(parents=True, exist_ok=True)
                file.save(key, kept)
            except OSError as error:
                failures.append(f"{folder}: {error.strerror}")
            else:
                return
        self._warn(failures)

    @classmethod
    def _warn(cls, failures: list[str]) -> None:
        if cls.failed:
            return
        cls.failed = True
        logger.warning(
            "compiled kernels cannot be kept (%s), so each start of a process such as this one "
            "compiles them again, for 10 to 60 seconds of one core; set NUMBA_CACHE_DIR to a "
            "folder that the process can write, or to one that `kvferry prepare` has filled",
            "; ".join(failures),
        )

    def _index_key(self, *args: Any) -> tuple[object, ...]:
        return (*super()._index_key(*args), _digest(self._py_func.__module__))


def _folders(source: Path) -> Iterator[str]:
    """Where results of the kernels in a file may lie, in Numba's order and with its names."""
    folder = source.absolute().parent
    hashed = hashlib.sha1(str(folder).encode(), usedforsecurity=False).hexdigest()
    name = f"{folder.name}_{hashed}"
    if numba.config.CACHE_DIR:  # NUMBA_CACHE_DIR
        yield str(Path(numba.config.CACHE_DIR, name))
    yield str(folder / "__pycache__")
    user = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    with contextlib.suppress(RuntimeError):  # a user without a home
        yield str(user.expanduser() / "numba" / name)


@cache
def _digest(module: str) -> str:
    """Of the sources of a module and of all modules whose kernels its own may call."""
    found: set[str] = set()
    new = {module}
    while new:
        found |= new
        new = {name for each in new for name in _called(each)} - found
    texts = [_text_digest(name) for name in sorted(found)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@cache
def _text_digest(module: str) -> str:
    """Of the source of one module."""
    return hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()


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
