"""A connector is found by name or by module, and its extra keys are checked before it is built."""

import subprocess
import sys
from dataclasses import replace

import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors import connector_context, load_connector
from kvferry.errors import ConfigError, PluginError
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.description import ModelFingerprint


def config(name: str, **changes) -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_role="kv_both", **changes)


def test_an_entry_point_of_another_package_is_found(outside_package):
    found = load_connector(config("Outside"))
    assert (found.__module__, found.__name__) == ("outside_plugin", "Outside")


def test_a_module_path_is_found(outside_package):
    found = load_connector(config("Outside", kv_connector_module_path="outside_plugin"))
    assert found.__name__ == "Outside"


def test_the_connector_that_ships_comes_through_the_same_door():
    from kvferry.connectors import PullConnector

    assert load_connector(config("PullConnector")) is PullConnector


def test_a_module_path_wins_over_an_entry_point(outside_package, tmp_path):
    (tmp_path / "nearer.py").write_text(
        "from outside_plugin import Outside as Base\nclass Outside(Base): pass\n"
    )
    found = load_connector(config("Outside", kv_connector_module_path="nearer"))
    assert found.__module__ == "nearer"
    del sys.modules["nearer"]


def test_an_unknown_name_lists_what_is_installed(outside_package):
    with pytest.raises(PluginError, match=r"'Outsid'.*did you mean 'Outside'.*PullConnector"):
        load_connector(config("Outsid"))


@pytest.mark.parametrize(
    ("name", "module", "message"),
    [
        ("Misfit", None, r"derive it from kvferry\.connectors\.base\.KVConnector"),
        ("Gone", None, r"outside_plugin_gone.*cannot be loaded"),
        ("Outside", "no_such_module", r"there is no such module"),
        ("Outsid", "outside_plugin", r"did you mean 'Outside'"),
        ("NoConnector", "outside_plugin", r"derive it from"),
        ("Undeclared", "outside_plugin", r"'Undeclared': ExtraConfig is None; declare a subclass"),
        ("WrongMetadata", "outside_plugin", r"'WrongMetadata': Metadata is .*KVConnectorMetadata"),
    ],
)
def test_what_does_not_fit_is_refused(outside_package, name, module, message):
    with pytest.raises(PluginError, match=message):
        load_connector(config(name, kv_connector_module_path=module))


GEOMETRY = EngineGeometry(
    num_layers=2,
    num_kv_heads=2,
    head_size=4,
    dtype="float32",
    block_size=4,
    layout="NHD",
    parallel=ParallelShape(tp=2),
)
MODEL = ModelFingerprint(
    name="m",
    architecture="a",
    num_layers=2,
    num_kv_heads=2,
    head_size=4,
    dtype="float32",
    rope="r",
    config_digest="c",
    weights_digest="w",
)


def context_of(extra: dict, groups=(GEOMETRY,)):
    return connector_context(
        config("Outside", kv_connector_extra_config=extra),
        incarnation="i",
        groups=groups,
        model=MODEL,
        num_blocks=8,
        world_size=2,
    )


def test_a_context_carries_the_checked_extra_keys(outside_package):
    connector, context = context_of({"folder": "/kv"})
    assert context.extra == connector.ExtraConfig(folder="/kv", depth=1)
    assert context.groups == (GEOMETRY,)
    assert (context.num_blocks, context.world_size, context.incarnation) == (8, 2, "i")


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"foldr": "/kv"}, "unknown key 'foldr'; did you mean 'folder'"),
        ({}, "folder is missing"),
        ({"folder": "/kv", "depth": "two"}, "depth is 'two': expected `int`, got `str`"),
    ],
)
def test_extra_keys_are_checked_against_the_plugins_struct(outside_package, extra, message):
    with pytest.raises(ConfigError, match=f"kv_connector_extra_config of Outside: {message}"):
        context_of(extra)


WINDOWED = replace(GEOMETRY, sliding_window=8)
GROUPS = (
    replace(WINDOWED, num_layers=2, layer_indices=(0, 2)),
    replace(GEOMETRY, num_layers=1, layer_indices=(1,)),
)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (GROUPS, "has 2 (layers 0, 2: sliding_window 8; layers 1: all tokens)"),
        ((WINDOWED,), "has 1 (layers 0-1: sliding_window 8)"),
        (
            (replace(GEOMETRY, attention_chunk_size=16),),
            "has 1 (layers 0-1: attention_chunk_size 16)",
        ),
    ],
)
def test_a_connector_that_knows_no_groups_is_refused_with_the_remedy(
    outside_package, groups, message
):
    with pytest.raises(ConfigError, match="hybrid_kv_cache = false") as error:
        context_of({"folder": "/kv"}, groups)
    assert message in str(error.value)


def test_a_connector_that_declares_so_gets_all_groups(outside_package, monkeypatch):
    connector, _ = context_of({"folder": "/kv"})
    monkeypatch.setattr(connector, "supports_groups", True)
    assert context_of({"folder": "/kv"}, GROUPS)[1].groups == GROUPS


def test_the_plugin_api_loads_neither_torch_nor_zmq_nor_the_connector_that_ships():
    program = """
import sys
from dataclasses import replace
sys.modules["torch"] = sys.modules["zmq"] = None
import kvferry.connectors
assert not [name for name in sys.modules if name.startswith("kvferry.connectors.pull")]
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=240)
