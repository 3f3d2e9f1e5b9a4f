"""How kernels are compiled and cached on disk."""

import contextlib
import fcntl
import hashlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TextIO, TypeVar

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.compiler import CompileResult
from numba.core.compiler_lock import global_compiler_lock

logger = logging.getLogger(__name__)

LONGEST_TURN_S = 300.0
"""Seconds after which a process compiles although another process has not ended its turn."""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def kernel(function: _Function) -> _Function:
    """Compiles a function for use without the interpreter lock; keeps the result on disk.

    Of several processes that need the same kernels, one compiles them. The others wait for it, and
    then find the results on disk.
    """
    compiled: Any = numba.njit(nogil=True)(function)
    compiled._cache = _Cache(function)  # noqa: SLF001 - what `cache=True` does with Numba's own
    compile_or_load = compiled.compile

    def compile_in_turn(signature: Any) -> Any:
        with global_compiler_lock, _turn:
            return compile_or_load(signature)

    compiled.compile = compile_in_turn
    return compiled  # type: ignore[no-any-return]


def is_kept() -> bool:
    """Whether all kernels of this process were found on disk or are now on disk."""
    return not _Cache.failed


class _Turn:
    """The right to compile, which one process at a time has.

    The context is entered for each kernel that a kernel calls too. A process takes its turn when it
    first misses a result, and ends it with the outermost kernel. The right is a lock of a file that
    the operating system frees when the process dies. The caller must hold Numba's compiler lock.
    """

    def __init__(self) -> None:
        self._depth = 0
        """Number of kernels that are now compiled, one for the sake of another."""
        self._file: TextIO | None = None
        """The locked file; ``None`` before the turn, and where no file can be locked."""

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth and self._file is not None:
            self._file.close()
            self._file = None

    def take(self, folders: Iterable[str]) -> bool:
        """Waits for the turn; returns whether the turn has just begun.

        Args:
            folders: folders for results. The lock is in the first folder that can hold it.
        """
        if self._file is not None:
            return False
        for folder in folders:
            with contextlib.suppress(OSError):  # the folder cannot be written, or cannot lock
                Path(folder).mkdir(parents=True, exist_ok=True)
                with contextlib.ExitStack() as opened:
                    file = opened.enter_context(Path(folder, "compiling.lock").open("a"))
                    _lock(file)
                    opened.pop_all()
                self._file = file
                return True
        return False


def _lock(file: TextIO) -> None:
    """Waits until no other process has locked the file, for at most ``LONGEST_TURN_S``.

    Raises:
        OSError: files in this folder cannot be locked.
    """
    deadline = time.monotonic() + LONGEST_TURN_S
    while time.monotonic() < deadline:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(0.05)


_turn = _Turn()


class KernelFiles(IndexDataCacheFile):  # type: ignore[misc]
    """The files of a kernel in one folder; each result has a file that its key names.

    Numba numbers the files of the results. Two processes that save different results at the same
    time choose the same number, and one of them would later run the code of the other.
    """

    def save(self, key: Any, data: Any) -> None:
        """Saves a result under its key. If processes save at once, the index may lose a result,
        which is compiled again then.
        """
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        name = self._data_name_pattern.replace("{number:d}", digest)
        self._save_data(name, data)
        self._save_index({**self._load_index(), key: name})


class _Cache(FunctionCache):  # type: ignore[misc]
    """Disk cache of a kernel: read from any of its folders, written to the first writable folder.

    This class differs from Numba's own cache in three ways. A process without a writable folder
    goes on without a cache; Numba's cache raises as soon as the function is defined. Folders that
    cannot be written are still read, so that all users can use kernels compiled while an image was
    built. A result is valid as long as the sources have the same text. Numba's cache ignores the
    kernels that are compiled into the function, and looks at the time of the file, which changes
    when the layers of an image are unpacked.
    """

    failed: ClassVar[bool] = False
    """Whether this process has compiled a kernel that cannot be cached, and has logged a
    warning."""

    def __init__(self, function: Callable[..., Any]) -> None:
        # Numba's __init__ is left out: it looks for a writable folder, and raises without one.
        self._py_func = function
        code, version = function.__code__, sys.version_info
        # Environments with other releases of Numba may use the same checkout at the same time. With
        # the same name, each release would overwrite the files of the other, and could not read its
        # code.
        name = (
            f"{Path(code.co_filename).stem}.{function.__qualname__.replace('<locals>', 'locals')}-"
            f"{code.co_firstlineno}.py{version.major}{version.minor}{sys.abiflags}"
            f".numba{numba.__version__}"
        )
        stamp = _text_digest(function.__module__)
        self._files = {
            folder: KernelFiles(folder, name, stamp)
            for folder in kernel_folders(Path(code.co_filename))
        }
        self._cache_path = next(iter(self._files))  # for the kernel's `stats`

    def _load_overload(self, signature: Any, target: Any) -> Any:
        found = self._find(signature, target)
        if found is None and _turn.take(self._files):
            found = self._find(signature, target)
            if found is None:
                logger.info("compiling kernels: up to a minute of one core, once on this machine")
        return found

    def _find(self, signature: Any, target: Any) -> Any:
        key = self._index_key(signature, target.codegen())
        for file in self._files.values():
            with contextlib.suppress(OSError):  # a file of another user, for example
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


def kernel_folders(source: Path) -> Iterator[str]:
    """Folders for the results of a file's kernels, in Numba's order and with Numba's names."""
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
    """Digest of the sources of a module and of all modules whose kernels its kernels may call."""
    found: set[str] = set()
    new = {module}
    while new:
        found |= new
        new = {name for each in new for name in _called(each)} - found
    texts = [_text_digest(name) for name in sorted(found)]
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@cache
def _text_digest(module: str) -> str:
    """Digest of the source of one module."""
    return hashlib.sha256(inspect.getsource(sys.modules[module]).encode()).hexdigest()


def _called(module: str) -> Iterator[str]:
    """Modules of kvferry or of the module's package: imported, or imported from, by the module."""
    ours = {__name__.partition(".")[0], module.partition(".")[0]}
    for value in vars(sys.modules[module]).values():
        if isinstance(value, ModuleType):
            name = value.__name__
        elif hasattr(value, "__wrapped__"):  # true for all functions that Numba has wrapped
            name = value.__module__
        else:
            continue
        if name.partition(".")[0] in ours:
            yield name
