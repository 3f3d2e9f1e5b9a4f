"""How ``kvferry plan`` tells by which way cells come over each transport, and why."""

import json
from typing import Any

import pytest

from kvferry.config import KVTransferConfig
from kvferry.connectors.pull.memory import check_device
from kvferry.errors import ConfigError
from kvferry.plugins import TRANSPORTS, installed_plugins, temporary_plugin
from kvferry.topology.typical import TYPICAL_TOKENS
from kvferry.transports.registry import transport_class
from kvferry.transports.tcp import TcpTransport
from kvferry.transports.ways import choose_way

PLAN = ("plan", "--prefill", "layout=HND", "--decode", "layout=NHD", "--model", "smollm2-135m")


@pytest.fixture
def planned(kvferry):
    """Plans; returns the text for people, and the ways of the JSON."""

    def run(*args):
        text = kvferry(*args)
        assert text.code == 0, text.err
        (pair,) = json.loads(kvferry(*args, "--json").out)["pairs"]
        return text.out, pair["ways"]

    return run


@pytest.mark.parametrize(("device", "refused"), [("cpu", {"cuda_ipc"}), ("cuda", set())])
def test_the_way_over_every_transport_is_the_one_that_the_connector_takes(planned, device, refused):
    text, ways = planned(*PLAN, "--device", device)
    assert tuple(ways) == installed_plugins(TRANSPORTS)
    assert {name for name, (found,) in ways.items() if found["way"] == "refused"} == refused
    for name, (found,) in ways.items():
        if name in refused:
            continue
        way = choose_way(
            transport_class(name).with_keys({"device_memory": device == "cuda"}),
            device=device,
            conversion=None,
            segment_bytes=found["segment_bytes"],
            source_bytes=16 * found["segment_bytes"],  # a head of a block: the layouts differ
        )
        assert (found["way"], found["reason"]) == (str(way), way.reason)
        assert found["layers"] == list(range(30))
        assert found["segment_bytes"] == 64 * 2  # of a head in bfloat16
        assert any(
            name in line and found["way"] in line and way.reason in line
            for line in text.splitlines()
        )
    assert ways["shm"][0]["way"] == ("placed" if device == "cpu" else "staged")


def test_a_transport_that_the_engine_would_refuse_is_refused_in_the_engines_words(planned):
    text, ways = planned(*PLAN, "--transport", "cuda_ipc")
    (found,) = ways["cuda_ipc"]
    config = KVTransferConfig(kv_connector="PullConnector", kv_role="kv_consumer", kv_port=0)
    with pytest.raises(ConfigError) as refusal:
        check_device("cpu", config, {"cuda_ipc": transport_class("cuda_ipc")})
    assert (found["way"], found["reason"]) == ("refused", str(refusal.value))
    assert "refused" in text
    assert "writes the cells" not in text


def test_on_a_gpu_nixl_is_told_with_the_keys_that_engines_give_it(planned):
    alike = "plan", "--prefill", "block=64", "--decode", "block=64", "--model", "llama-3-8b"
    _, ways = planned(*alike, "--device", "cuda")
    assert [found["way"] for found in ways["nixl"]] == ["placed"]
    assert [found["way"] for found in ways["tcp"]] == ["staged"]
    _, short = planned(*PLAN, "--device", "cuda", "--transport", "nixl")
    assert "nixl places those of 32,768 and more" in short["nixl"][0]["reason"]


def test_a_device_that_is_not_known_is_refused_with_those_that_are(kvferry):
    found = kvferry(*PLAN, "--device", "cdua")
    assert (found.code, found.out) == (2, "")
    assert "'cdua' is not one of 'cpu', 'cuda'" in found.err


def test_segments_are_those_of_a_typical_request(planned):
    command = "plan", "--prefill", "tp=2", "--decode", "tp=2", "--model", "llama-3-8b"
    _, ways = planned(*command, "--transport", "shm")
    _, typical = planned(*command, "--transport", "shm", "--tokens", TYPICAL_TOKENS)
    assert ways == typical
    assert ways["shm"][0]["segment_bytes"] == pytest.approx(16 * 4 * 128 * 2, rel=0.02)


def test_one_transport_is_told_alone(planned):
    text, ways = planned(*PLAN, "--transport", "tcp")
    assert list(ways) == ["tcp"]
    assert "tcp writes the cells where they belong" in text


def test_each_pair_of_groups_has_its_way_and_those_alike_share_a_line(planned):
    command = "plan", "--prefill", "layout=HND", "--decode", "layout=NHD", "--model", "gemma-3-27b"
    text, ways = planned(*command, "--transport", "shm")
    layers = [group["layers"] for group in ways["shm"]]
    assert len(layers) > 1
    assert sorted(layer for group in layers for layer in group) == list(range(62))
    assert text.count("shm writes the cells") == 1
    assert "0-61" in text


def test_an_unknown_transport_is_an_error_that_lists_the_installed_ones(kvferry):
    found = kvferry(*PLAN, "--transport", "pigeon")
    assert found.code == 2
    assert "'pigeon'" in found.err
    assert "shm" in found.err


def test_a_transport_of_somebody_else_is_told_of_like_those_that_ship(planned):
    class Pigeon(TcpTransport):
        name = "pigeon"
        least_segment_bytes = 4096

    with temporary_plugin(TRANSPORTS, "pigeon", Pigeon):
        _, ways = planned(*PLAN)
    assert ways["pigeon"][0]["way"] == "staged"
    assert "128 bytes" in ways["pigeon"][0]["reason"]


def test_a_conversion_is_staged_over_everything(kvferry, planned):
    narrow, wide = "dtype=bfloat16", "dtype=float32"
    model = "--model", "smollm2-135m"
    _, alike = planned("plan", "--prefill", narrow, "--decode", narrow, *model)
    _, ways = planned("plan", "--prefill", narrow, "--decode", wide, *model)
    assert ways.pop("cuda_ipc")[0]["way"] == "refused"  # for host memory, whatever the dtype
    for name, (found,) in ways.items():
        assert found["way"] == "staged"
        assert "bfloat16 becomes float32" in found["reason"]
        assert found["segment_bytes"] == alike[name][0]["segment_bytes"]
    lossy = kvferry("plan", "--prefill", wide, "--decode", narrow, *model)
    assert lossy.code == 2
    assert "float32, target has bfloat16" in lossy.err


def test_short_segments_are_placed_where_staging_brings_no_longer_ones():
    lengths: dict[str, Any] = {"device": "cpu", "conversion": None, "segment_bytes": 512}
    nixl = transport_class("nixl")
    assert choose_way(nixl, source_bytes=512, **lengths).placed
    assert not choose_way(nixl, source_bytes=8192, **lengths).placed
