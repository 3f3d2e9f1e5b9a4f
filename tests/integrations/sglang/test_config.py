"""The keys of kvferry inside SGLang, and the rows beside a prompt."""

import ctypes
import json
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang", reason="SGLang is not installed; `make test-sglang` has it")

from kvferry.errors import ConfigError, DecodeError, TransferError
from kvferry.integrations.sglang.config import VARIABLE, transfer_config
from kvferry.integrations.sglang.opening import served_shape
from kvferry.integrations.sglang.rows import Rows


@pytest.fixture
def given(monkeypatch):
    return lambda text: monkeypatch.setenv(VARIABLE, text)


def test_nothing_needs_to_be_given(monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    config, extra = transfer_config("kv_consumer", 3)
    assert (config.kv_role, config.kv_port, extra.early_load) == ("kv_consumer", 0, "now")


def test_data_parallel_engines_have_ports_and_names_of_their_own(given):
    given('{"kv_port": 7000, "engine_id": "p"}')
    assert [
        (config.kv_port, config.engine_id)
        for config, _ in (transfer_config("kv_producer", rank) for rank in (0, 2))
    ] == [(7000, "p-0"), (7002, "p-2")]


def test_keys_may_lie_in_a_file(given, tmp_path):
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"lease_duration_s": 5.0}))
    given(str(file))
    assert transfer_config("kv_producer", 0)[1].lease_duration_s == 5.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"kv_prot": 1}', "kv_prot.*kv_port"),
        ('{"kv_port": "x"}', "kv_port"),
        ("{", "is not JSON"),
        ("/nothing/there.json", "cannot be read: No such file"),
    ],
)
def test_wrong_keys_are_named(given, text, message):
    given(text)
    with pytest.raises(ConfigError, match=f"{VARIABLE}.*{message}"):
        transfer_config("kv_producer", 0)


def test_a_file_without_an_object_is_refused(given, tmp_path):
    file = tmp_path / "keys.json"
    file.write_text("[]")
    given(str(file))
    with pytest.raises(ConfigError, match="expected a JSON object, got list"):
        transfer_config("kv_producer", 0)


ONE = {"pp_size": 1, "attn_cp_size": 1, "attn_dcp_size": 1, "attn_dp_size": 1, "nnodes": 1}
REFUSED = [name for name in ONE if name != "pp_size"]


def test_several_ranks_are_served():
    assert served_shape(SimpleNamespace(attn_tp_size=3, **(ONE | {"pp_size": 2}))).world_size == 6


@pytest.mark.parametrize("ranks", [{"attn_tp_size": 2}, {"attn_tp_size": 1, "pp_size": 2}])
@pytest.mark.parametrize("name", REFUSED)
def test_other_shapes_are_refused_by_name(name, ranks):
    more = SimpleNamespace(**(ONE | ranks | {name: 2}))
    with pytest.raises(ConfigError, match=rf"{name}.*: 2; this backend serves 1 so far"):
        served_shape(more)


@pytest.mark.parametrize("name", ["attn_dp_size", "nnodes"])
def test_engines_of_one_rank_may_be_many(name):
    assert served_shape(SimpleNamespace(attn_tp_size=1, **(ONE | {name: 2}))).world_size == 1


def buffers(*sizes, rows=3):
    made = [ctypes.create_string_buffer(bytes(range(size * rows))) for size in sizes]
    return made, Rows([ctypes.addressof(each) for each in made], sizes)


def test_a_row_is_written_where_it_belongs_and_nowhere_else():
    _, source = buffers(4, 8)
    (one, two), target = buffers(4, 8)
    target.write(2, target.check(source.read(1)))
    assert one.raw[:8] == bytes(range(8))
    assert one.raw[8:12] == bytes(range(4, 8))
    assert two.raw[16:24] == bytes(range(8, 16))


def test_rows_of_other_sizes_are_refused():
    _, source = buffers(4, 8)
    _, target = buffers(4, 9)
    with pytest.raises(TransferError, match=r"have \(4, 8\) bytes, here they have \(4, 9\)"):
        target.check(source.read(0))


def test_bytes_that_are_no_row_are_refused():
    _, rows = buffers(4)
    with pytest.raises(DecodeError, match="holds no rows"):
        rows.check(b"\xc1")


def test_rows_that_no_note_holds_are_refused():
    with pytest.raises(ConfigError, match="a row has 300000 bytes"):
        Rows([0], [300_000])
