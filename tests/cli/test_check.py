"""``kvferry check``: whether running engines fit, before any request."""

import contextlib
import json
import secrets
import socket

import pytest

from kvferry.control.leases import LeaseTable
from kvferry.control.server import ControlServer
from kvferry.topology import EngineGeometry, ParallelShape
from kvferry.topology.description import (
    EngineDescription,
    ModelFingerprint,
    RankDescription,
    tagged_groups,
)

SECRET = b"what a peer connects with"


def describe(
    engine_id,
    *,
    weights="w0",
    dtype="float32",
    convert_dtype=False,
    transports=("shm", "tcp"),
    host="h0",
    **shape,
):
    values = {
        "num_layers": 4,
        "num_kv_heads": 4,
        "head_size": 8,
        "dtype": dtype,
        "block_size": 16,
        "layout": "NHD",
        "parallel": ParallelShape(),
    }
    geometry = EngineGeometry(**values | shape)
    return EngineDescription(
        engine_id=engine_id,
        incarnation=secrets.token_hex(4),
        model=ModelFingerprint(
            name="tiny",
            architecture="LlamaForCausalLM",
            num_layers=4,
            num_kv_heads=4,
            head_size=8,
            dtype=dtype,
            rope="{}",
            config_digest="c0",
            weights_digest=weights,
        ),
        groups=tagged_groups([geometry]),
        ranks=tuple(
            RankDescription(
                rank=rank,
                endpoints=dict.fromkeys(transports, SECRET),
                memory=(geometry.memory(rank, 10),),
                host=host,
            )
            for rank in range(geometry.world_size)
        ),
        convert_dtype=convert_dtype,
    )


@pytest.fixture
def engine():
    """Runs the control channel of an engine; returns its server."""
    with contextlib.ExitStack() as stack:

        def run(engine_id, role, *, ready=True, **values):
            description = describe(engine_id, **values)
            server = stack.enter_context(
                ControlServer(
                    engine_id=engine_id,
                    incarnation=description.incarnation,
                    role=role,
                    leases=LeaseTable(max_blocks=100, duration_s=30.0),
                )
            )
            if ready:
                server.set_description(description)
            return server

        yield run


def address(server):
    return f"127.0.0.1:{server.port}"


def test_engines_that_fit_are_explained_and_end_with_0(kvferry, engine):
    prefill = engine("p0", "kv_producer", parallel=ParallelShape(tp=2), layout="HND")
    decode = engine("d0", "kv_consumer", block_size=64, transports=("tcp",))

    outcome = kvferry("check", address(decode), address(prefill), "--tokens", "64")

    assert outcome.code == 0, outcome.err
    assert "p0 → d0: will work, over tcp" in outcome.out
    assert "block: 16 tokens become 64; 4 prefill blocks fill a decode block" in outcome.out
    assert "d0 reads 64 tokens from p0" in outcome.out
    assert "tcp writes the cells where they belong" in outcome.out
    assert "1 of 1 pairs will work" in outcome.out


def test_a_dtype_that_the_decode_engine_rounds_is_explained(kvferry, engine):
    windowed = {"sliding_window": 32}
    prefill = engine("p0", "kv_producer", **windowed)
    decode = engine("d0", "kv_consumer", dtype="float16", convert_dtype=True, **windowed)

    outcome = kvferry("check", address(prefill), address(decode), "--tokens", "64")

    assert outcome.code == 0, outcome.err
    assert "p0 → d0: will work" in outcome.out
    assert "staged" in outcome.out
    assert "float32 becomes float16" in outcome.out
    assert "window: of layers 0-3 only the last 32 tokens move" in outcome.out


def test_heads_that_no_weights_prove_are_told_with_the_reason(kvferry, engine):
    prefill, decode = engine("p0", "kv_producer"), engine("d0", "kv_consumer")
    outcome = kvferry("check", address(decode), address(prefill))
    assert outcome.code == 0, outcome.err
    assert "are not proved by their weights (ranks 0 and 0, for one)" in outcome.out
    assert "an engine, or a release, that digests no weights" in outcome.out


def test_every_mismatch_of_every_pair_is_listed_and_ends_with_1(kvferry, engine):
    engines = [
        engine("p0", "kv_producer"),
        engine("p1", "kv_producer", weights="w1", dtype="int32"),
        engine("d0", "kv_consumer", transports=("shm",)),
        engine("d1", "kv_both", transports=("nixl",)),
    ]

    outcome = kvferry("check", *map(address, engines))

    assert outcome.code == 1, outcome.err
    lines = outcome.out.splitlines()
    assert [line for line in lines if "will" in line] == [
        "p0 → d0: will work, over shm",
        "p0 → d1: will not work",
        "p1 → d0: will not work",
        "p1 → d1: will not work",
        "d1 → d0: will not work",
        "1 of 5 pairs will work",
    ]
    first = lines.index("p1 → d1: will not work") + 1
    found = [line.strip().split(":")[0] for line in lines[first : first + 4]]
    assert found == ["model.dtype", "model.weights_digest", "dtype of layers 0-3", "transports"]


@pytest.mark.parametrize(
    ("lent", "read", "told"),
    [
        (("tcp", "shm"), ("shm", "tcp"), "will work, over shm, else tcp"),
        (("shm", "tcp"), ("tcp", "shm"), "will work, over tcp, else shm"),
        (("shm", "ucx", "tcp"), ("tcp", "nixl", "shm"), "will work, over tcp, else shm"),
    ],
)
def test_transports_are_told_as_the_decode_engine_prefers_them(kvferry, engine, lent, read, told):
    servers = (
        engine("p0", "kv_producer", transports=lent),
        engine("d0", "kv_consumer", transports=read),
    )
    assert f"p0 → d0: {told}\n" in kvferry("check", *map(address, servers)).out


def test_an_engine_that_offers_cuda_ipc_is_told_of_as_one_on_a_gpu(kvferry, engine):
    offered = ("cuda_ipc", "tcp")
    servers = (
        engine("p0", "kv_producer", transports=offered),
        engine("d0", "kv_consumer", transports=offered),
    )
    outcome = kvferry("check", *map(address, servers))
    assert outcome.code == 0, outcome.err
    assert "cuda_ipc writes the cells where they belong" in outcome.out
    assert "tcp does not write memory on cuda" in outcome.out


def test_what_does_not_reach_another_host_is_not_told(kvferry, engine):
    near = engine("near", "kv_producer")
    far = engine("far", "kv_producer", host="h1")
    alone = engine("alone", "kv_producer", host="h1", transports=("shm", "vm"))
    old = engine("old", "kv_producer", host="")
    decode = engine("d0", "kv_consumer", transports=("vm", "shm", "tcp"))

    out = kvferry("check", *map(address, (near, far, alone, old, decode))).out

    for told in (
        "near → d0: will work, over shm, else tcp\n",
        "far → d0: will work, over tcp\n",
        "alone → d0: will not work\n  transports: shm, vm: both have them",
        "old → d0: will work, over shm, else tcp\n",
    ):
        assert told in out


def test_pairs_can_be_seen_from_one_engine(kvferry, engine):
    prefill = engine("p0", "kv_producer")
    both, decode = engine("b0", "kv_both"), engine("d0", "kv_consumer")
    others = map(address, (prefill, both))

    document = json.loads(kvferry("check", *others, "--from", address(decode), "--json").out)

    assert [(one["prefill"], one["decode"]) for one in document] == [("p0", "d0"), ("b0", "d0")]
    assert [one["transport"] for one in document] == ["shm", "shm"]
    wrong = kvferry("check", address(decode), "--from", address(prefill))
    assert (wrong.code, wrong.out) == (2, "")
    assert "kv_producer, which loads from nobody" in wrong.err


def test_an_engine_that_loads_and_lends_but_has_no_source_is_told_what_is_missing(kvferry, engine):
    both, decode = engine("b0", "kv_both"), engine("d0", "kv_consumer")

    outcome = kvferry("check", address(decode), "--from", address(both))

    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err == (
        f"kvferry: --from: {address(both)} is kv_both, and no other engine lends to it: 'd0' is "
        "kv_consumer; name at least one producer\n"
    )


def test_the_answer_for_programs(kvferry, engine):
    prefill, decode = engine("p0", "kv_producer"), engine("d0", "kv_consumer", weights="w9")
    other = engine("d1", "kv_consumer", parallel=ParallelShape(pp=2))

    outcome = kvferry("check", *map(address, (prefill, decode, other)), "--json")

    assert outcome.code == 1
    bad, good = json.loads(outcome.out)
    assert (bad["prefill"], bad["decode"], bad["fits"], bad["plan"]) == ("p0", "d0", False, None)
    assert [text.split(":")[0] for text in bad["mismatches"]] == ["model.weights_digest"]
    assert (good["decode"], good["fits"], good["transports"]) == ("d1", True, ["shm", "tcp"])
    assert {name: way["way"] for name, (way,) in good["plan"]["ways"].items()} == {
        "shm": "placed",
        "tcp": "placed",
    }
    assert [transfer["layers"] for transfer in good["plan"]["transfers"]] == [[0, 1], [2, 3]]


def test_asking_changes_nothing_and_no_secret_is_told(kvferry, engine):
    from kvferry.control.client import fetch_descriptions
    from kvferry.control.messages import DescriptionReply

    prefill, decode = engine("p0", "kv_producer"), engine("d0", "kv_consumer", weights="w9")

    kvferry("check", address(prefill), address(decode))
    (answer,) = fetch_descriptions([address(prefill)])

    assert isinstance(answer, DescriptionReply)
    assert answer.role == "kv_producer"
    for rank in answer.description.ranks:
        assert rank.endpoints == {"shm": b"", "tcp": b""}
    for server in (prefill, decode):
        status = server.status()
        assert (status.peers, status.errors) == ((), ())


def test_every_engine_that_does_not_answer_is_named(kvferry, engine):
    prefill = engine("p0", "kv_producer")
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        ports = [server.getsockname()[1] for server in silent]
        outcome = kvferry(
            "check", address(prefill), *(f"127.0.0.1:{p}" for p in ports), "--timeout", "3"
        )

    assert outcome.code == 2
    assert outcome.out == ""
    assert outcome.err.count("kvferry:") == 1
    for port in ports:
        assert outcome.err.count(f"127.0.0.1:{port}: ") == 1
    assert str(prefill.port) not in outcome.err
    assert "is it the kv_port of an engine of this release?" in outcome.err


def test_an_engine_that_still_starts_is_told_from_a_silent_one(kvferry, engine):
    prefill, decode = engine("p0", "kv_producer"), engine("d0", "kv_consumer", ready=False)

    outcome = kvferry("check", address(prefill), address(decode))

    assert outcome.code == 2
    assert f"{address(decode)}: the peer answers: engine 'd0' is still starting" in outcome.err
    assert "kv_port" not in outcome.err


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (["kv_producer"], "'e0' is kv_producer; name at least one producer and one consumer"),
        (["kv_consumer", "kv_consumer"], "'e0' is kv_consumer, 'e1' is kv_consumer"),
        (["kv_both"], "'e0' is kv_both"),
    ],
)
def test_engines_that_make_no_pair_are_an_error(kvferry, engine, roles, message):
    servers = [engine(f"e{index}", role) for index, role in enumerate(roles)]

    outcome = kvferry("check", *map(address, servers))

    assert outcome.code == 2
    assert message in outcome.err


def test_two_engines_of_one_id_are_a_mismatch(kvferry, engine):
    servers = engine("same", "kv_producer"), engine("same", "kv_consumer")

    outcome = kvferry("check", *map(address, servers))

    assert outcome.code == 1
    assert "engine_id: both engines are named 'same'" in outcome.out


def test_an_address_is_named_once_and_is_an_address(kvferry, engine):
    prefill = engine("p0", "kv_producer")

    twice = kvferry("check", address(prefill), address(prefill))
    wrong = kvferry("check", "localhost")

    assert (twice.code, wrong.code) == (2, 2)
    assert f"{address(prefill)} stands twice" in twice.err
    assert "HOST:PORT" in wrong.err


def test_the_memory_that_engines_describe_is_what_is_explained(kvferry, engine, monkeypatch):
    monkeypatch.setattr(EngineGeometry, "memory", _padded(EngineGeometry.memory), raising=True)
    servers = engine("p0", "kv_producer"), engine("d0", "kv_consumer")
    monkeypatch.undo()

    document = json.loads(kvferry("check", *map(address, servers), "--tokens", "32", "--json").out)

    (transfer,) = document[0]["plan"]["transfers"]
    # Each token is followed by a gap: a segment per layer, part and token.
    assert transfer["segments_ordered"] == 4 * 2 * 32


def _padded(memory):
    """Memory whose tokens are twice as far apart as dense ones."""

    def spaced(self, rank, num_blocks, **more):
        wide = EngineGeometry(
            num_layers=self.num_layers,
            num_kv_heads=2 * self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            block_size=self.block_size,
            layout=self.layout,
            parallel=self.parallel,
        )
        return memory(wide, rank, num_blocks, **more)

    return spaced
