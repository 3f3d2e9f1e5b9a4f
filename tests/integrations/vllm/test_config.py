"""vLLM's config as ours."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

from kvferry.errors import ConfigError
from kvferry.integrations.vllm.config import transfer_config


def engine(extra=None, *, kv_port=15000, dp_index=0, pcp=1):
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector="KVFerryConnector",
            kv_role="kv_consumer",
            engine_id="decode",
            kv_port=kv_port,
            kv_buffer_device="cpu",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=extra or {},
        ),
        parallel_config=SimpleNamespace(
            data_parallel_index=dp_index,
            prefill_context_parallel_size=pcp,
            tensor_parallel_size=2,
            pipeline_parallel_size=1,
        ),
    )


def test_an_unknown_key_is_refused_by_the_nearest_name():
    with pytest.raises(ConfigError, match=r"unknown key 'transprot'; did you mean 'transport'\?"):
        transfer_config(engine({"transprot": "tcp"}))


def test_a_wrong_value_is_refused():
    with pytest.raises(ConfigError, match="weights_check is 'some': write config, full or sample"):
        transfer_config(engine({"weights_check": "some"}))


def test_engines_of_one_data_parallel_group_listen_on_ports_of_their_own():
    ports = [transfer_config(engine(dp_index=index))[0].kv_port for index in range(3)]
    assert ports == [15000, 15001, 15002]


def test_ports_that_are_told_and_those_of_ranks_count_on_over_the_group():
    tcp = {"port": 14600, "advertise_port": 30600, "connections": 3}
    extra = {"transport_config": {"tcp": tcp}, "advertise_port": 30579}
    _, first = transfer_config(engine(extra))
    assert (first.advertise_port, first.transport_config) == (30579, {"tcp": tcp})
    _, third = transfer_config(engine(extra, dp_index=2))
    assert third.advertise_port == 30581
    assert third.transport_config["tcp"] == {**tcp, "port": 14604, "advertise_port": 30604}
    _, plain = transfer_config(engine(dp_index=2))
    assert (plain.advertise_port, plain.transport_config) == (0, {})


def test_port_0_stays_a_free_one():
    assert transfer_config(engine(kv_port=0, dp_index=2))[0].kv_port == 0


def test_prefill_context_parallelism_is_refused():
    with pytest.raises(ConfigError, match="prefill_context_parallel_size: 2"):
        transfer_config(engine(pcp=2))


def test_what_vllm_says_is_kept():
    config, extra = transfer_config(engine({"lease_duration_s": 60}))
    assert (config.engine_id, config.kv_role) == ("decode", "kv_consumer")
    assert config.kv_load_failure_policy == "recompute"
    assert extra.lease_duration_s == 60
