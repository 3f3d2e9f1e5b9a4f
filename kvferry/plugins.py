"""Finds connectors and transports by name.

Plugins are entry points; the built-in plugins use entry points too::

    [project.entry-points."kvferry.transports"]
    carrier_pigeon = "pigeons.transport:PigeonTransport"

The module of a plugin is imported when its name is first requested, never before.
"""

import difflib
import importlib
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from kvferry.errors import PluginError

T = TypeVar("T")

TRANSPORTS = "kvferry.transports"
"""Entry-point group of the transports."""
CONNECTORS = "kvferry.connectors"
"""Entry-point group of the connectors."""

#: (group, name) → class, during a ``with temporary_plugin(...)`` block.
_temporary: dict[tuple[str, str], type] = {}


def installed_plugins(group: str) -> tuple[str, ...]:
    """The names of the installed plugins, sorted; imports nothing."""
    names = {entry.name for entry in entry_points(group=group)}
    return tuple(sorted(names | {name for owner, name in _temporary if owner == group}))


def load_plugin(group: str, name: str, base: type[T]) -> type[T]:
    """Loads the plugin ``name`` of ``group``, a subclass of ``base``.

    Raises:
        PluginError: the name is unknown, two packages claim it, its module does not import, or the
            named object is no subclass of ``base``.
    """
    if (group, name) in _temporary:
        return _checked(_temporary[group, name], base, f"{name!r}")
    entry = _entry_point(group, name)
    where = f"{_kind(group)} {name!r} ({entry.value}{_package(entry)})"
    try:
        found = entry.load()
    except Exception as error:  # a plugin's module may raise anything during its import
        raise PluginError(f"{where}: cannot be loaded: {_told(error)}") from error
    return _checked(found, base, where)


def load_from_module(module_path: str, class_name: str, base: type[T]) -> type[T]:
    """Loads the class ``class_name`` of the importable module ``module_path``.

    Raises:
        PluginError: the module is missing or does not import, it lacks the class, or the class is
            no subclass of ``base``; the message says how to correct this.
    """
    where = f"class {class_name!r} of module {module_path!r}"
    try:
        module = importlib.import_module(module_path)
    except Exception as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name is not None
        if missing and f"{module_path}.".startswith(f"{error.name}."):  # type: ignore[attr-defined]
            raise PluginError(f"{where}: {_no_module(module_path)}") from error
        raise PluginError(f"{where}: the module does not import: {_told(error)}") from error
    if not hasattr(module, class_name):
        fitting = sorted(
            found
            for found, value in vars(module).items()
            if inspect.isclass(value) and issubclass(value, base) and value is not base
        )
        near = difflib.get_close_matches(class_name, fitting, n=1)
        told = f"; did you mean {near[0]!r}?" if near else ""
        listing = ", ".join(fitting) if fitting else f"none is a subclass of {_full_name(base)}"
        raise PluginError(f"{where}: the module has no such class{told} (it has: {listing})")
    return _checked(getattr(module, class_name), base, where)


@contextmanager
def temporary_plugin(group: str, name: str, plugin: type) -> Iterator[None]:
    """Makes ``name`` mean ``plugin`` within the block, in this process. For tests.

    Raises:
        PluginError: the name is taken by another temporary plugin.
    """
    if (group, name) in _temporary:
        raise PluginError(f"{_kind(group)} {name!r}: is a temporary plugin already; end that first")
    _temporary[group, name] = plugin
    try:
        yield
    finally:
        del _temporary[group, name]


def _entry_point(group: str, name: str) -> EntryPoint:
    found = {
        (entry.value, _package(entry)): entry
        for entry in entry_points(group=group)
        if entry.name == name
    }
    if not found:
        raise PluginError(_unknown(group, name))
    if len(found) > 1:
        claims = " and ".join(f"{value}{package}" for value, package in sorted(found))
        raise PluginError(
            f"{_kind(group)} {name!r} is claimed by {claims}; uninstall one of the packages"
        )
    return next(iter(found.values()))


def _unknown(group: str, name: str) -> str:
    names = installed_plugins(group)
    if not names:
        return (
            f"{_kind(group)} {name!r}: no plugin of group {group!r} is installed, not even those "
            "that ship with kvferry; kvferry is not installed as a package: run `pip install -e .`"
        )
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    told = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"{_kind(group)} {name!r} is unknown; {told}Installed: {', '.join(names)}. A plugin in a "
        "source folder is found once that is installed: run `pip install -e .` there"
    )


def _no_module(module_path: str) -> str:
    if "/" in module_path or module_path.endswith(".py"):
        return (
            "that is a file name; write the dotted module name, with its folder on PYTHONPATH "
            "(`my_connector`, not `folder/my_connector.py`)"
        )
    return (
        "there is no such module; install its package (`pip install -e .` in its folder) or put "
        "its folder on PYTHONPATH"
    )


def _checked(found: Any, base: type[T], where: str) -> type[T]:
    if not inspect.isclass(found) or not issubclass(found, base):
        what = f"the class {_full_name(found)}" if inspect.isclass(found) else f"a {type(found)!r}"
        raise PluginError(f"{where}: is {what}; derive it from {_full_name(base)}")
    return found


def _full_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _kind(group: str) -> str:
    """``"transport"`` for ``"kvferry.transports"``."""
    return group.rpartition(".")[2].removesuffix("s")


def _package(entry: EntryPoint) -> str:
    return f" of package {entry.dist.name!r}" if entry.dist is not None else ""


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
