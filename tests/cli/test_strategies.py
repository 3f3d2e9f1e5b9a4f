"""Strategies in ``kvferry plan``, and ``kvferry bench --calibrate``."""

import json

import msgspec
import pytest

from kvferry.cli import calibration
from kvferry.topology.machine_costs import Calibration, MachineCosts, WireCosts, load_costs

PLAN = "plan", "--prefill", "layout=HND", "--decode", "tp=2", "--model", "smollm2-135m"


def planned(kvferry, *options):
    text = kvferry(*PLAN, *options)
    assert text.code == 0, text.err
    (pair,) = json.loads(kvferry(*PLAN, *options, "--json").out)["pairs"]
    return text.out, pair["strategies"]


def test_every_known_transport_has_its_choice_beside_the_others(kvferry):
    text, strategies = planned(kvferry)
    assert list(strategies) == ["shm", "vm", "cuda_ipc", "tcp", "ucx", "nixl"]
    for name, (found,) in strategies.items():
        assert found["layers"] == list(range(30))
        assert any(name in line and found["strategy"] in line for line in text.splitlines())
        assert {found["strategy"], *(other["strategy"] for other in found["alternatives"])} == {
            "strided",
            "direct",
            "in place",
            "staged",
        }
        assert all(
            other["seconds"] is None or other["seconds"] >= found["seconds"]
            for other in found["alternatives"]
        )
    reasons = {other["reason"] for other in strategies["nixl"][0]["alternatives"]}
    assert reasons == {"nixl cannot fence: its reads may only land in staging memory"}


def test_one_transport_is_shown_in_full(kvferry):
    text, strategies = planned(kvferry, "--transport", "tcp")
    assert list(strategies) == ["tcp"]
    assert "Strategies over tcp" in text
    assert "strided (chosen)" in text
    assert "tcp moves strided boxes; nothing is gained by single pieces" in text


def test_groups_choose_each_for_itself(kvferry):
    command = "plan", "--prefill", "layout=HND", "--decode", "layout=NHD", "--model", "gemma-3-27b"
    (pair,) = json.loads(kvferry(*command, "--json").out)["pairs"]
    layers = [group["layers"] for group in pair["strategies"]["shm"]]
    assert len(layers) > 1
    assert sorted(layer for group in layers for layer in group) == list(range(62))
    shown = kvferry(*command, "--transport", "shm").out
    assert shown.count("Strategies over shm for layers ") == len(layers)


def test_an_unknown_transport_is_an_error_that_lists_the_installed_ones(kvferry):
    found = kvferry(*PLAN, "--transport", "pigeon")
    assert found.code == 2
    assert "'pigeon'" in found.err
    assert "shm" in found.err


def test_a_conversion_is_staged_over_everything(kvferry):
    narrow, wide = "dtype=bfloat16", "dtype=float32"
    model = "--model", "smollm2-135m"
    found = kvferry("plan", "--prefill", narrow, "--decode", wide, *model, "--json")
    (pair,) = json.loads(found.out)["pairs"]
    for (choice,) in pair["strategies"].values():
        assert choice["strategy"] == "staged"
        assert "bfloat16 to float32" in choice["reason"]
    lossy = kvferry("plan", "--prefill", wide, "--decode", narrow, *model)
    assert lossy.code == 2
    assert "float32, target has bfloat16" in lossy.err


def test_costs_of_the_machine_decide(kvferry, tmp_path):
    """Where pieces cost a thousand times more, blocks that shatter are staged."""
    dear = MachineCosts(wires={"shm": WireCosts(transfer_s=0, byte_s=1e-10, operation_s=1e-5)})
    path = tmp_path / "costs.json"
    path.write_bytes(Calibration(machine={}, costs=dear).encode())
    _, cheap = planned(kvferry, "--transport", "shm")
    _, found = planned(kvferry, "--transport", "shm", "--costs", str(path))
    assert cheap["shm"][0]["strategy"] == "strided"
    assert found["shm"][0]["strategy"] != "strided"


def test_calibration_measures_what_is_installed_and_plan_reads_it(kvferry, tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "NBYTES", 1 << 20)
    monkeypatch.setattr(calibration, "installed_plugins", lambda _: ("shm", "tcp", "pigeon"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = kvferry("bench", "--calibrate")
    assert found.code == 0, found.err
    path = tmp_path / "kvferry" / "costs.json"
    assert f"costs: {path}" in found.out
    assert "pigeon: not measured: " in found.out
    written = msgspec.json.decode(path.read_bytes(), type=Calibration)
    assert {"cpu", "date", "kvferry", "numpy"} <= set(written.machine)
    costs = load_costs()
    assert costs == written.costs
    assert set(costs.wires) == {"shm", "tcp"}
    assert 1e-12 < costs.copy_byte_s < 1e-7
    assert kvferry(*PLAN, "--transport", "shm").code == 0


def test_what_cannot_be_measured_or_written_is_said(kvferry, tmp_path, monkeypatch):
    found = kvferry("bench")
    assert found.code == 2
    assert "kvferry bench --calibrate" in found.err
    monkeypatch.setattr(calibration, "NBYTES", 1 << 16)
    monkeypatch.setattr(calibration, "installed_plugins", lambda _: ())
    (tmp_path / "file").write_text("")
    found = kvferry("bench", "--calibrate", "--output", tmp_path / "file" / "costs.json")
    assert found.code == 2
    assert "cannot be written" in found.err


@pytest.mark.parametrize("length", [64, 256])
def test_measured_pieces_do_not_merge(length):
    from kvferry.layouts.copier import expand

    found = expand(*calibration.pieces(4096, length))
    assert found["nbytes"].tolist() == [length] * (4096 // length)
    assert len(expand(*calibration.pieces(4096, 4096))) == 1
