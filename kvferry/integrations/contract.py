"""Looks in an installed serving engine for the names that an adapter needs.

An adapter was tested with some releases of its engine. For another release, the adapter checks
before serving that every name still exists and that every method still takes the same parameters.
The behaviour behind the names is not checked.
"""

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any


def num_needed(needed: Mapping[str, tuple[str, ...]]) -> int:
    """Number of checked names and members."""
    return len(needed) + sum(len(members) for members in needed.values())


def gone(needed: Mapping[str, tuple[str, ...]], base: str = "") -> list[str]:
    """Names that the installed engine lacks: ``module:name`` or ``name.member``; and methods of the
    base of connectors that every connector must have now.

    An entry for a method with other parameters also names the actual parameters.

    Args:
        needed: module and name → members; methods stand with their parameters.
        base: module and name of the base of connectors, a key of ``needed``; empty if the engine
            has no such class.
    """
    found = [each for place, members in needed.items() for each in _gone_of(place, members)]
    if not base or base in found:
        return found
    known = {member.partition("(")[0] for member in needed[base]}
    return found + [
        f"{base.partition(':')[2]} without {method}, which every connector must have now"
        for method in sorted(owner_of(base).__abstractmethods__ - known)
    ]


def owner_of(place: str) -> Any:
    """The object that ``module:name`` names.

    Raises:
        ImportError, AttributeError: there is no such object.
    """
    module, name = place.split(":")
    return getattr(importlib.import_module(module), name)


def _gone_of(place: str, members: tuple[str, ...]) -> Iterator[str]:
    name = place.partition(":")[2]
    try:
        owner = owner_of(place)
    except (ImportError, AttributeError):
        yield place
        return
    for member in members:
        wanted, _, parameters = member.partition("(")
        if not _has(owner, wanted):
            yield f"{name}.{wanted}"
        elif parameters:
            taken = _parameters(getattr(owner, wanted))
            if taken != parameters.removesuffix(")"):
                yield f"{name}.{member}, which takes ({taken})"


def _has(owner: Any, member: str) -> bool:
    """Whether a name is a member of a class, a field of the class, or set by a constructor."""
    if hasattr(owner, member):
        return True
    return any(
        member in vars(each).get("__annotations__", ())
        or member in _assigned(vars(each).get("__init__"))
        for each in getattr(owner, "__mro__", ())
    )


def _assigned(constructor: Any) -> tuple[str, ...]:
    """Names of attributes in a constructor's code."""
    return constructor.__code__.co_names if inspect.isfunction(constructor) else ()


def _parameters(method: Any) -> str:
    names = inspect.signature(method).parameters
    return ", ".join(name for name in names if name != "self")
