"""Each wrong turn ends in one line of vLLM's log, the one that docs/vllm/connector.md explains."""

import shutil

import msgspec
import pytest

from kvferry.testing.waiting import until

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.control.tickets import sign, verify
from kvferry.errors import KVFerryError
from tests.integrations.vllm import conftest
from tests.wrong_turns import assert_told

KEY = {"cluster_key": "a key of the whole cluster"}
OTHER_KEY = {"cluster_key": "a key of another cluster"}
POLICIES = ("fail", "recompute")


@pytest.fixture
def lines(caplog):
    """``lines()`` is what kvferry has warned of since it was called last."""
    caplog.set_level("WARNING", logger="kvferry")

    def take():
        records = dict.fromkeys(caplog.records)  # pytest also listens at vLLM's logger
        caplog.clear()
        return [each.getMessage() for each in records if each.name.startswith("kvferry")]

    return take


def port_of(engine):
    return engine.connector.connector_scheduler.pull.port


def settings(prefill=KEY, decode=KEY, **both):
    return {"p_extra": {**prefill, **both}, "d_extra": {**decode, **both}}


def as_it_came(params, prefill, decode):
    return params


def of_an_engine_that_this_host_does_not_reach(params, prefill, decode):
    prefill.close()
    return params


def that_leads_back(params, prefill, decode):
    key = KEY["cluster_key"].encode()
    ticket = msgspec.structs.replace(verify(params["ticket"], key), port=port_of(decode))
    return params | {"ticket": sign(ticket, key)}


def without_a_ticket(params, prefill, decode):
    return {"do_remote_prefill": True}


REFUSED = [
    (
        "prefill has `host` at 127.0.0.1, decode is on another machine",
        {},
        of_an_engine_that_this_host_does_not_reach,
    ),
    ("both have `host` at 127.0.0.1 and one `kv_port`, on two machines", {}, that_leads_back),
    (
        "`peers` lacks the prefill server, and there is no cluster key",
        settings({}, {"peers": ["127.0.0.1:1"]}),
        as_it_came,
    ),
    ("the cluster keys differ", settings(decode=OTHER_KEY), as_it_came),
    ("the decode server alone has a cluster key", settings({}, KEY), as_it_came),
    ("the proxy writes parameters of its own", {}, without_a_ticket),
    ("the decode server has the role of prefill", {"d_role": "kv_producer"}, as_it_came),
]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("turn", "options", "change"), REFUSED, ids=[each[0] for each in REFUSED])
def test_a_load_that_is_refused(
    start, lines, random_prompt, reference, turn, options, change, policy
):
    options = settings() | options
    prefill = start("kv_producer", extra=options["p_extra"], policy=policy)
    role = options.get("d_role", "kv_consumer")
    decode = start(role, extra=options["d_extra"], policy=policy)
    prompt = random_prompt(100)
    (params,) = prefill.prefill([prompt])
    started = [line for line in lines() if "handshake with 127.0.0.1:1:" not in line]
    assert started == []
    (output,) = decode.generate([prompt], [change(params, prefill, decode)])
    (line,) = [line for line in lines() if "handshake with 127.0.0.1:1:" not in line]
    assert_told(turn, line)
    assert line.startswith("request r")
    if policy == "fail":
        assert "was refused and it will fail: " in line
        assert output.outputs[0].finish_reason == "error"
    else:
        assert "was refused and it will be recomputed: " in line
        assert list(output.outputs[0].token_ids) == reference([prompt])[0]


def test_other_weights(start_pair, make_model, lines, random_prompt):
    prefill, decode = start_pair(d_model=make_model(seed=99), **settings(), policy="recompute")
    prompt = random_prompt(100)
    decode.generate([prompt], prefill.prefill([prompt]))
    (line,) = lines()
    assert_told("the models differ", line)


def test_other_weights_of_a_peer(start, tiny_llama, make_model, lines):
    other = make_model(seed=99)
    prefill = start("kv_producer", extra=KEY)
    peers = {"peers": [f"127.0.0.1:{port_of(prefill)}"]}
    start("kv_consumer", model=other, extra=KEY | peers)
    (line,) = until(lines)  # before the first request
    assert_told("the models differ, and `peers` names the prefill server", line)
    assert f"({tiny_llama})" in line
    assert f"({other})" in line


def test_two_paths_to_one_model_are_no_wrong_turn(
    start_pair, tiny_llama, lines, random_prompt, tmp_path
):
    copy = shutil.copytree(tiny_llama, tmp_path / "copy")
    prefill, decode = start_pair(d_model=copy, **settings())
    prompt = random_prompt(100)
    decode.generate([prompt], prefill.prefill([prompt]))
    assert decode.prompt_tokens_from("external_kv_transfer") == 99
    assert lines() == []


def metric(engine, name):
    for stat_logger in engine.llm.llm_engine.logger_manager.stat_loggers:
        found = getattr(stat_logger, "kv_connector_prom", None)
        if found is not None:
            counters = found.prom_metrics._counters
            (family,) = counters[name][0].collect()
            return family.samples[0].value
    raise AssertionError("vLLM keeps no Prometheus figures")


def test_a_proxy_that_drops_the_parameters(start_pair, lines, random_prompt, reference):
    prefill, decode = start_pair(**settings())
    prompts = [random_prompt(100) for _ in range(3)]
    prefill.prefill(prompts)
    before = metric(decode, "plain")
    outputs = decode.generate(prompts)
    assert [list(each.outputs[0].token_ids) for each in outputs] == reference(prompts)
    (line,) = lines()
    assert_told("the proxy drops the parameters", line)
    decode.step()
    assert metric(decode, "plain") - before == 3


NOT_LENT = [
    (
        "the prompt has more blocks than all leases may hold",
        "kv_producer",
        {"max_leased_blocks": 1},
    ),
    (
        "leases hold too many blocks just now",
        "kv_producer",
        {"max_leased_blocks": 2, "lease_duration_s": 600.0},
    ),
    ("the prefill server has the role of decode", "kv_consumer", {}),
]


@pytest.mark.parametrize(("turn", "role", "extra"), NOT_LENT, ids=[each[0] for each in NOT_LENT])
def test_a_prompt_that_is_not_lent(start, lines, random_prompt, turn, role, extra):
    prefill = start(role, extra=KEY | extra)
    if "just now" in turn:
        assert prefill.prefill([random_prompt(100)]) != [None]
    assert prefill.prefill([random_prompt(100)]) == [None]
    (line,) = lines()
    assert_told(turn, line)
    assert line.startswith("request r")


def test_a_server_that_does_not_start(start, lines, monkeypatch, tmp_path):
    taken = port_of(start("kv_producer", extra=KEY))
    monkeypatch.setattr(conftest, "free_port", lambda: taken)
    wrong = {
        "two servers of one host have one port": ("kv_consumer", KEY),
        "`host` is a wildcard": ("kv_producer", KEY | {"host": "0.0.0.0"}),
        "`host` is another machine's": ("kv_producer", KEY | {"host": "203.0.113.7"}),
        "the key file is not there": ("kv_producer", {"cluster_key_file": str(tmp_path / "no")}),
    }
    for turn, (role, extra) in wrong.items():
        with pytest.raises(KVFerryError):
            start(role, extra=extra)
        (line,) = lines()
        assert_told(turn, line)
        assert line.startswith(f"engine {role}-")
        assert " does not start: " in line
