"""Plugins are found by name, and every way of not finding one says what would work."""

import importlib.metadata
import sys
import textwrap
from importlib.metadata import EntryPoint, EntryPoints

import pytest

from kvferry import plugins
from kvferry.errors import PluginError
from kvferry.plugins import (
    CONNECTORS,
    TRANSPORTS,
    installed_plugins,
    load_from_module,
    load_plugin,
    temporary_plugin,
)
from kvferry.transports.base import Transport
from kvferry.transports.registry import open_transport
from kvferry.transports.shm import ShmTransport


@pytest.fixture
def entries(monkeypatch):
    """Replaces the installed entry points of the transports by a list of (name, value)."""

    def install(*pairs):
        found = EntryPoints(EntryPoint(name, value, TRANSPORTS) for name, value in pairs)
        monkeypatch.setattr(plugins, "entry_points", lambda group: found.select(group=group))

    return install


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes an importable module; returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(text):
        name = f"plugin_module_{len(names)}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        return name

    yield write
    for name in names:
        sys.modules.pop(name, None)


def test_the_built_in_transports_come_through_their_entry_points():
    assert {"shm", "tcp"} <= set(installed_plugins(TRANSPORTS))
    assert load_plugin(TRANSPORTS, "shm", Transport) is ShmTransport


def test_listing_imports_nothing(entries):
    entries(("pigeon", "no.such.module:Pigeon"))
    assert installed_plugins(TRANSPORTS) == ("pigeon",)


def test_an_unknown_name_is_answered_with_the_nearest_and_the_installed_ones():
    with pytest.raises(PluginError, match=r"did you mean 'shm'\?.*Installed: .*shm, .*tcp"):
        open_transport("shmm")


def test_a_name_near_to_none_is_answered_with_the_installed_ones():
    with pytest.raises(PluginError, match=r"'pigeon' is unknown; Installed: .*pip install -e"):
        open_transport("pigeon")


def test_without_any_entry_point_the_error_says_how_to_install(entries):
    entries()
    with pytest.raises(PluginError, match=r"kvferry is not installed.*pip install -e \."):
        load_plugin(TRANSPORTS, "shm", Transport)


def test_a_name_claimed_twice_is_refused_with_both_claims(entries):
    entries(("shm", "kvferry.transports.shm:ShmTransport"), ("shm", "other.place:Shm"))
    with pytest.raises(PluginError, match=r"claimed by kvferry.*ShmTransport and other\.place:Shm"):
        load_plugin(TRANSPORTS, "shm", Transport)


def test_one_plugin_listed_twice_is_no_duplicate(entries):
    entries(*[("shm", "kvferry.transports.shm:ShmTransport")] * 2)
    assert load_plugin(TRANSPORTS, "shm", Transport) is ShmTransport


def test_a_plugin_that_does_not_import_is_named_with_its_error(entries):
    entries(("pigeon", "no.such.module:Pigeon"))
    with pytest.raises(PluginError, match=r"'pigeon'.*ModuleNotFoundError.*no") as raised:
        load_plugin(TRANSPORTS, "pigeon", Transport)
    assert isinstance(raised.value.__cause__, ModuleNotFoundError)


@pytest.mark.parametrize(
    ("value", "what"),
    [("pathlib:Path", "the class pathlib.Path"), ("os:getcwd", "builtin_function")],
)
def test_a_plugin_of_the_wrong_kind_is_told_its_base(entries, value, what):
    entries(("pigeon", value))
    with pytest.raises(PluginError, match=rf"{what}.*derive it from .*base\.Transport"):
        load_plugin(TRANSPORTS, "pigeon", Transport)


def test_a_class_is_loaded_from_a_module(module):
    name = module(
        """
        from kvferry.transports.shm import ShmTransport
        class Pigeon(ShmTransport): pass
        """
    )
    assert issubclass(load_from_module(name, "Pigeon", Transport), ShmTransport)


def test_a_missing_class_is_answered_with_those_that_would_work(module):
    name = module(
        """
        from kvferry.transports.shm import ShmTransport
        class PigeonTransport(ShmTransport): pass
        class Feather: pass
        """
    )
    with pytest.raises(PluginError, match=r"did you mean 'PigeonTransport'\?") as raised:
        load_from_module(name, "PigeonTransprot", Transport)
    assert "Feather" not in str(raised.value)


def test_a_class_of_the_wrong_base_is_refused(module):
    name = module("class Pigeon: pass")
    with pytest.raises(PluginError, match=r"derive it from kvferry\.transports\.base\.Transport"):
        load_from_module(name, "Pigeon", Transport)


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("no_such_module_at_all", "no such module.*PYTHONPATH"),
        ("kvferry.no_such_module", "no such module.*PYTHONPATH"),
        ("folder/my_connector.py", "file name; write the dotted module name"),
    ],
)
def test_a_missing_module_is_told_apart_and_hinted_at(path, hint):
    with pytest.raises(PluginError, match=hint):
        load_from_module(path, "Pigeon", Transport)


def test_a_module_that_fails_at_import_is_not_called_missing(module):
    name = module("import a_module_that_is_not_there")
    with pytest.raises(PluginError, match=r"does not import: ModuleNotFoundError.*not_there"):
        load_from_module(name, "Pigeon", Transport)
    name = module("raise RuntimeError('feathers')")
    with pytest.raises(PluginError, match="RuntimeError: feathers"):
        load_from_module(name, "Pigeon", Transport)


def test_a_temporary_plugin_ends_with_its_block():
    with temporary_plugin(TRANSPORTS, "pigeon", ShmTransport):
        assert load_plugin(TRANSPORTS, "pigeon", Transport) is ShmTransport
        assert "pigeon" in installed_plugins(TRANSPORTS)
        assert "pigeon" not in installed_plugins(CONNECTORS)
        with (
            pytest.raises(PluginError, match="temporary plugin already"),
            temporary_plugin(TRANSPORTS, "pigeon", ShmTransport),
        ):
            pass
    assert "pigeon" not in installed_plugins(TRANSPORTS)


def test_the_entry_points_of_this_package_are_the_ones_that_ship():
    names = {entry.name for entry in importlib.metadata.entry_points(group=CONNECTORS)}
    assert "PullConnector" in names
