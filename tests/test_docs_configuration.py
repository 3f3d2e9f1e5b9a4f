"""The pages of docs/reference name every key, with its type, its default and its unit."""

import importlib
import json
import re

import msgspec
import msgspec.inspect as inspect
import pytest

from kvferry.config import (
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    RouterConfig,
)
from kvferry.connectors.pull.config import PullConfig
from kvferry.control.options import ControlOptions, CurveKeys
from kvferry.layouts import LAYOUT_NAMES
from kvferry.transports.cuda_ipc import CudaIpcExtraConfig
from kvferry.transports.nixl import NixlExtraConfig
from kvferry.transports.shm import ShmExtraConfig
from kvferry.transports.tcp import TcpExtraConfig
from kvferry.transports.ucx import UcxExtraConfig
from kvferry.transports.vm import VmExtraConfig
from tests.pages import text_of

PAGE = text_of("reference")
STRUCTS = [
    KVTransferConfig,
    PullConfig,
    ShmExtraConfig,
    TcpExtraConfig,
    NixlExtraConfig,
    UcxExtraConfig,
    VmExtraConfig,
    CudaIpcExtraConfig,
    CurveKeys,
    ModelConfig,
    EngineConfig,
    KVEventsConfig,
    RouterConfig,
    ControlOptions,
]
UNITS = {"_s": "s", "_bytes": "bytes", "_blocks": "blocks", "_threads": "threads"}


def table_after(text: str) -> list[list[str]]:
    """The cells of the first table behind ``text`` on the page, its heading left out."""
    _, found, rest = PAGE.partition(text)
    assert found, f"the page does not say {text!r}"
    table = re.search(r"(?:^\|.*\n)+", rest, re.MULTILINE)
    assert table is not None
    rows = [line.strip("|").split("|") for line in table[0].splitlines()]
    return [[cell.strip() for cell in row] for row in rows[2:]]


def shown_type(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(shown_type(t) for t in types if not isinstance(t, inspect.NoneType))
        case inspect.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case inspect.VarTupleType(item_type=item):
            return f"list of {shown_type(item)}"
        case inspect.DictType() | inspect.StructType():
            return "table"
    names = {"StrType": "text", "IntType": "integer", "FloatType": "number", "BoolType": "boolean"}
    return names[type(kind).__name__]


def in_order(alternatives: str) -> list[str]:
    """msgspec sorts the values of a choice, the page lists them as people think of them."""
    return sorted(alternatives.split(" or "))


def shown_default(field: inspect.Field) -> str:
    if field.default_factory is dict:
        return "`{}`"
    if field.default_factory is not msgspec.NODEFAULT:
        return "random"
    if field.default is msgspec.NODEFAULT:
        return "required"
    if field.default is None:
        return "none"
    is_whole = isinstance(field.default, float) and field.default.is_integer()
    return f"`{json.dumps(int(field.default) if is_whole else field.default)}`"


def fields_of(struct):
    """The keys of a struct, as msgspec knows them."""
    described = inspect.type_info(struct)
    assert isinstance(described, inspect.StructType)
    return described.fields


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_every_key_is_on_the_page_with_its_type_and_default(struct):
    rows = table_after(f"truct `{struct.__name__}`:")
    assert {key: (in_order(kind), default) for key, kind, default, *_ in rows} == {
        f"`{field.encode_name}`": (in_order(shown_type(field.type)), shown_default(field))
        for field in fields_of(struct)
    }


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_units_follow_from_the_names_of_keys(struct):
    for key, _, _, unit, meaning in table_after(f"truct `{struct.__name__}`:"):
        assert meaning.endswith((".", ")")), f"{key}: write a sentence"
        for ending, expected in UNITS.items():
            if key.strip("`").endswith(ending):
                assert unit == expected, key


def test_values_that_are_not_keys_are_those_of_the_code():
    for name, value, *_ in table_after("## Values that are not keys"):
        path, _, attribute = name.strip("`").rpartition(".")
        module, _, struct = path.rpartition(".")
        if struct[0].isupper():
            fields = fields_of(getattr(importlib.import_module(module), struct))
            actual = next(field.default for field in fields if field.name == attribute)
        else:
            actual = getattr(importlib.import_module(path), attribute)
        assert actual == float(value), name


def test_every_layout_name_is_on_the_page():
    missing = [name for name in LAYOUT_NAMES if f"`{name}`" not in PAGE]
    assert missing == []


def test_a_changed_default_is_noticed(monkeypatch):
    changed = PAGE.replace(
        "| number | `30` | s | How long a lease", "| number | `31` | s | How long a lease"
    )
    assert changed != PAGE
    monkeypatch.setitem(globals(), "PAGE", changed)
    with pytest.raises(AssertionError, match="lease_duration_s"):
        test_every_key_is_on_the_page_with_its_type_and_default(PullConfig)
