"""Checks plain tables against structs, with error messages in the user's words."""

import difflib
import functools
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from kvferry.decoding import decoder_for
from kvferry.errors import ConfigError

T = TypeVar("T", bound=msgspec.Struct)


def parse_struct(kind: type[T], values: Mapping[str, Any], where: str) -> T:
    """Checks ``values`` against the struct ``kind`` and builds the struct.

    Nested structs are checked in the same way.

    Args:
        kind: a msgspec Struct class; the fields of the class are the known keys.
        values: the user's table: plain dicts, lists, strings and numbers.
        where: the place of the table for the user, for example ``"kv_connector_extra_config"``.

    Raises:
        ConfigError: an unknown key (with the nearest known key), a missing key, a wrong type, or
            a value out of range.
    """
    check_table(values, where)
    _check_keys(kind, values, where)
    decoder_for(kind)  # from here on, several threads may convert at once
    try:
        return msgspec.convert(values, kind, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where}: {_explain(str(error), kind, values)}") from error


def check_table(values: object, where: str) -> None:
    """Raises a ConfigError if ``values`` is not a mapping."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where}: expected a table of keys, got {shown(values)}")


def _check_keys(kind: type[msgspec.Struct], values: Mapping[Any, Any], where: str) -> None:
    fields = {field.encode_name: field.type for field in fields_of(kind)}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(unknown_key(str(key), list(fields), where))
        inner = _struct_in(fields[key])
        if inner is not None and isinstance(value, Mapping):
            _check_keys(inner, value, f"{where}: {key}")


@functools.cache
def fields_of(kind: type[msgspec.Struct]) -> tuple[msgspec.inspect.Field, ...]:
    """The fields of a struct, with their types."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return info.fields


def _struct_in(hint: msgspec.inspect.Type) -> type[msgspec.Struct] | None:
    """The struct class in the type of a field; ``None`` if the type has no struct."""
    kinds = hint.types if isinstance(hint, msgspec.inspect.UnionType) else (hint,)
    for kind in kinds:
        if isinstance(kind, msgspec.inspect.StructType):
            return kind.cls
    return None


def unknown_key(key: str, known: list[str], where: str) -> str:
    """The error message for a key that is not in ``known``."""
    near = difflib.get_close_matches(key[:_SHOWN_LENGTH], known, n=1, cutoff=0.6)
    listed = f"known keys: {', '.join(sorted(known))}" if known else "no keys are known here"
    hint = f"did you mean {near[0]!r}?" if near else listed
    return f"{where}: unknown key {shown(key)}; {hint}"


def _explain(reason: str, kind: type[msgspec.Struct], values: Mapping[str, Any]) -> str:
    """The error message of msgspec, with the user's value and, for a ``Literal``, the choices."""
    missing = re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.?(.*)`)?", reason)
    if missing:
        return f"{'.'.join(filter(None, (missing[2], missing[1])))} is missing"
    placed = re.fullmatch(r"(.*) - at `\$\.?(.*)`", reason, re.DOTALL)
    if not placed or not placed[2]:
        return reason
    expected, path = placed.groups()
    choices = {f.encode_name: f.type for f in fields_of(kind)}.get(path)
    if isinstance(choices, msgspec.inspect.LiteralType):
        expected = f"write {_listed(choices.values)}"
    return f"{path}{_written(values, path)}: {expected[0].lower()}{expected[1:]}"


def _written(values: Any, path: str) -> str:
    """The user's value at a path such as ``stop_token_ids[3]``; empty if there is no value."""
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        try:
            values = values[int(index) if index else name]
        except (LookupError, TypeError):
            return ""
    return f" is {shown(values)}"


def _listed(choices: Sequence[object]) -> str:
    *first, last = map(str, choices)
    return f"{', '.join(first)} or {last}" if first else last


_SHOWN_LENGTH = 60
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _SHOWN_LENGTH


def shown(value: object) -> str:
    """A short representation of ``value`` for messages, at most 60 characters."""
    text = _SHORT.repr(value)
    return text if len(text) <= _SHOWN_LENGTH else f"{text[: _SHOWN_LENGTH - 3]}..."


def printable(text: str, keep: str = "") -> str:
    r"""Escapes the characters of ``text`` that a terminal or a log cannot print.

    >>> print(printable("one\x1b[31m\ntwo"))
    one\x1b[31m\ntwo

    Args:
        text: text of a peer or a client.
        keep: characters that are not escaped, such as line feeds.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )
