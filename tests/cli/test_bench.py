"""``kvferry bench``: its two sides on this machine, with a cache of a few blocks."""

import contextlib
import json
import re
import secrets
import signal
import subprocess
import sys
from typing import Any

import msgspec
import pytest

from kvferry.cli import bench
from kvferry.cli.bench_server import BARE, BareEndpoint
from kvferry.control.client import ControlClient
from kvferry.control.leases import LeaseTable
from kvferry.control.options import ControlOptions, CurveKeys, make_keys
from kvferry.control.server import ControlServer
from kvferry.errors import NotReadyError, PluginError
from kvferry.explain.limits import TOKEN_BYTES, dial
from kvferry.transports.regions import private_memory

TINY = ("--model", "smollm2-135m", "--tokens", "40", "--block", "8")


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """A file of CURVE keys."""
    path = tmp_path_factory.mktemp("keys") / "curve.json"
    path.write_bytes(msgspec.json.encode(make_keys()))
    return path


@pytest.fixture(scope="module")
def served(keys):
    """The address of a serving side with those keys, which Ctrl-C then ends."""
    command = [sys.executable, "-m", "kvferry.cli", "bench", "--serve", "--port", "0"]
    with subprocess.Popen(
        [*command, *TINY, "--keys", str(keys)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        said = ""
        assert process.stdout is not None
        for line in process.stdout:
            said += line
            if found := re.search(r"kvferry bench (\S+) \(Ctrl-C", line):
                break
        else:
            pytest.fail(f"it does not serve: {said}")
        yield found[1]
        process.send_signal(signal.SIGINT)
        assert "stopping" in process.stdout.read()
        assert process.wait() == 0


def described(address, keys):
    """What the serving side describes itself as, before and after a handshake."""
    curve = msgspec.json.decode(keys.read_bytes(), type=CurveKeys)
    options = ControlOptions(curve=curve)
    theirs = bench.describe_there(address, options)
    offered: dict[str, Any] = dict.fromkeys(["tcp"])
    ours = bench.describe_here(theirs, offered)
    with ControlClient(
        engine_id=ours.engine_id, incarnation=ours.incarnation, options=options
    ) as client:
        return client.handshake(address, ours).result()


@pytest.mark.processes
def test_each_transport_is_measured_beside_its_limit(kvferry, served, keys):
    outcome = kvferry("bench", served, "--keys", keys, "--rounds", 2, "--threads", 2, "--json")
    assert outcome.code == 0, outcome.err
    found = json.loads(outcome.out)
    assert (found["tokens"], found["block_size"], found["rounds"]) == (40, 8, 2)
    assert found["nbytes"] == 40 * 30 * 2 * 3 * 64 * 2
    assert found["small_load_bytes"] == found["nbytes"] // 5
    limits = {each["transport"]: each["limit"] for each in found["transports"]}
    assert next(iter(limits)) == "shm"
    assert limits.items() >= {"shm": "memcpy", "tcp": "bare sockets"}.items()
    for each in found["transports"]:
        assert each["limit_gb_per_s"] > 0
        assert each["small_load_s"] > 0
        assert [(case["layouts"], case["shuffled"]) for case in each["cases"]] == [
            ("NHD→NHD", False),
            ("NHD→NHD", True),
            ("NHD→HND", False),
            ("NHD→HND", True),
        ]
        for case in each["cases"]:
            assert len(case["seconds"]) == 2
            assert case["share"] > 0


@pytest.mark.processes
def test_people_get_a_table_and_the_number_of_rounds(kvferry, served, keys):
    outcome = kvferry("bench", served, "--keys", keys, "--rounds", 1)
    assert outcome.code == 0, outcome.err
    assert "smollm2-135m, bfloat16: 40 tokens in blocks of 8" in outcome.out
    assert "Medians of interleaved rounds: 1" in outcome.out


@pytest.mark.processes
def test_where_no_transport_reaches_the_error_tells_of_each(kvferry, served, keys, monkeypatch):
    left_out = {"nixl": PluginError("it is not installed")}
    monkeypatch.setattr(bench, "open_transports", lambda *_: ({}, left_out))
    outcome = kvferry("bench", served, "--keys", keys)
    assert outcome.code == 2
    assert "(nixl: it is not installed); serve with --transport tcp" in outcome.err


@pytest.mark.processes
def test_wrong_cells_are_no_figure(kvferry, served, keys, monkeypatch):
    monkeypatch.setattr(bench, "pattern", private_memory)
    outcome = kvferry("bench", served, "--keys", keys, "--rounds", 1)
    assert outcome.code == 2
    assert "40 of 40 tokens differ" in outcome.err


@pytest.mark.processes
def test_a_second_client_is_refused(kvferry, served, keys):
    endpoint = described(served, keys).ranks[0].endpoints[BARE]
    bare = msgspec.msgpack.decode(endpoint, type=BareEndpoint)
    first = None
    while first is None:  # who measured before may not be forgotten yet
        with contextlib.suppress(NotReadyError):
            first = dial("127.0.0.1", bare.port, bare.token, secrets.token_bytes(TOKEN_BYTES))
    with first:
        outcome = kvferry("bench", served, "--keys", keys, "--timeout", 0.5)
    assert outcome.code == 2
    assert "serves another reader; try again when that has ended" in outcome.err


@pytest.mark.processes
def test_without_the_keys_there_is_no_answer(kvferry, served):
    outcome = kvferry("bench", served, "--timeout", 2)
    assert outcome.code == 2
    assert "curve_keys" in outcome.err


@pytest.mark.processes
def test_an_engine_is_not_measured(kvferry, served, keys):
    theirs = described(served, keys)
    server = ControlServer(
        engine_id="p0", incarnation="i0", role="kv_producer", leases=LeaseTable(max_blocks=1)
    )
    with server:
        server.set_description(msgspec.structs.replace(theirs, engine_id="p0", incarnation="i0"))
        outcome = kvferry("bench", server.port)
    assert outcome.code == 2
    assert "engine 'p0' is no `kvferry bench --serve`; start one there" in outcome.err


def test_where_nobody_serves_the_error_says_what_to_start(kvferry):
    outcome = kvferry("bench", "127.0.0.1:1")
    assert outcome.code == 2
    assert "start `kvferry bench --serve` there" in outcome.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "neither given"),
        (("--serve", "127.0.0.1:1"), "both given"),
        (("--serve", "--rounds", 3), "--rounds: belongs to the other side"),
        (("127.0.0.1:1", "--tokens", 3), "give it to `kvferry bench --serve`"),
        (("--serve", "--json"), "--json: belongs to the other side"),
        (("--serve", "--host", "192.0.2.1"), "or say --insecure on a network that you trust"),
        (("--serve", "--host", "0.0.0.0", "--insecure"), "every address of this machine"),
        (("--serve", "--tokens", 10**7), "bench moves 8.0 GiB at most; give 65520 at most"),
        (("--serve", "--model", "granite-4.0-h-tiny"), "bench moves attention only"),
        (("--serve", "--model", "nope"), "known models"),
        (("--serve", "--transport", "nope", *TINY), "nope"),
    ],
)
def test_what_cannot_be_is_refused_with_its_remedy(kvferry, arguments, said):
    outcome = kvferry("bench", *arguments)
    assert outcome.code == 2
    assert said in outcome.err


def test_a_model_whose_layers_have_unlike_heads_is_refused(kvferry, tmp_path):
    own = {"num_hidden_layers": 2, "num_key_value_heads": [2, 4], "head_dim": 8}
    path = tmp_path / "config.json"
    path.write_bytes(msgspec.json.encode(own))

    outcome = kvferry("bench", "--serve", "--model", path)

    assert outcome.code == 2
    assert "its layers have unlike heads, and bench moves layers of one kind" in outcome.err
