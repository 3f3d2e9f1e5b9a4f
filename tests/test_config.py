"""A mistake in the configuration is named with its place, what was written and what to write."""

import json
from pathlib import Path
from typing import Annotated, Any

import msgspec
import pytest

from kvferry.config import (
    DEPRECATED_KEYS,
    ClusterConfig,
    EngineConfig,
    KVEventsConfig,
    KVTransferConfig,
    load_cluster,
    parse_struct,
    split_endpoint,
)
from kvferry.errors import ConfigError

MINIMAL = {"kv_connector": "PullConnector", "kv_role": "kv_both"}


def transfer_error(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        KVTransferConfig.from_mapping({**MINIMAL, **changes})
    return str(caught.value)


class TestKVTransferConfig:
    def test_vllm_json_is_accepted(self):
        config = KVTransferConfig.from_json(
            """{"kv_connector": "PullConnector", "kv_role": "kv_producer", "engine_id": "p0",
                "kv_buffer_device": "cpu", "kv_port": 20001,
                "kv_connector_module_path": "my.module", "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"lease_duration_s": 30}}"""
        )
        assert config.engine_id == "p0"
        assert config.kv_port == 20001
        assert config.kv_connector_module_path == "my.module"
        assert config.kv_load_failure_policy == "recompute"
        assert config.kv_connector_extra_config == {"lease_duration_s": 30}

    def test_defaults_are_those_of_vllm(self):
        config = KVTransferConfig.from_mapping(MINIMAL)
        assert config.kv_port == 14579
        assert config.kv_load_failure_policy == "fail"
        assert config.kv_connector_extra_config == {}

    def test_engine_ids_are_unique_unless_given(self):
        first, second = (KVTransferConfig.from_mapping(MINIMAL).engine_id for _ in range(2))
        assert first != second

    @pytest.mark.parametrize(
        ("role", "producer", "consumer"),
        [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
    )
    def test_roles(self, role, producer, consumer):
        config = KVTransferConfig.from_mapping({**MINIMAL, "kv_role": role})
        assert (config.is_producer, config.is_consumer) == (producer, consumer)

    def test_a_misspelt_key_names_the_nearest_known_one(self):
        assert transfer_error(kv_conector_extra_config={}) == (
            "kv_transfer_config: unknown key 'kv_conector_extra_config'; "
            "did you mean 'kv_connector_extra_config'?"
        )

    def test_a_key_like_no_other_lists_the_known_ones(self):
        message = transfer_error(zzz=1)
        assert "unknown key 'zzz'; known keys: engine_id, kv_buffer_device" in message

    def test_a_missing_role_says_what_to_write(self):
        with pytest.raises(ConfigError) as caught:
            KVTransferConfig.from_mapping({"kv_connector": "PullConnector"})
        assert str(caught.value) == (
            "kv_transfer_config: kv_role is missing; write kv_producer, kv_consumer or kv_both"
        )

    def test_a_missing_connector_is_named(self):
        with pytest.raises(ConfigError, match="kv_transfer_config: kv_connector is missing"):
            KVTransferConfig.from_mapping({"kv_role": "kv_both"})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"kv_port": "20001"}, "kv_port is '20001': expected `int`, got `str`"),
            ({"kv_port": True}, "kv_port is True: expected `int`, got `bool`"),
            ({"kv_port": 70000}, "kv_port: 70000 is not a TCP port; write 1 to 65535, or 0"),
            ({"kv_role": "producer"}, "kv_role is 'producer': write kv_both, kv_consumer or"),
            ({"kv_role": 3}, "kv_role is 3: write kv_both, kv_consumer or kv_producer"),
            ({"kv_load_failure_policy": "retry"}, "is 'retry': write fail or recompute"),
            ({"kv_connector": None}, "kv_connector is None: expected `str`, got `null`"),
            ({"kv_connector_extra_config": [1]}, "is [1]: expected `object`, got `array`"),
            ({"engine_id": ""}, "engine_id is empty; delete the key to get a random one"),
            ({"kv_connector_module_path": ""}, "kv_connector_module_path is empty; delete"),
        ],
    )
    def test_a_wrong_value_is_shown_with_what_is_expected(self, changes, message):
        found = transfer_error(**changes)
        assert found.startswith("kv_transfer_config: ")
        assert message in found

    def test_a_long_wrong_value_is_shown_in_part(self):
        message = transfer_error(kv_port="9" * 10_000)
        assert "kv_port is '9999" in message
        assert len(message) < 200

    @pytest.mark.parametrize("key", sorted(DEPRECATED_KEYS))
    def test_a_deprecated_key_is_accepted_and_the_warning_says_what_to_write(self, key):
        with pytest.warns(DeprecationWarning, match=key) as caught:
            config = KVTransferConfig.from_mapping({**MINIMAL, key: 1, "engine_id": "e"})
        assert config == KVTransferConfig.from_mapping({**MINIMAL, "engine_id": "e"})
        [warning] = caught
        assert f"{key!r} has no effect any more; {DEPRECATED_KEYS[key]}" in str(warning.message)

    @pytest.mark.parametrize("text", ["{", "", b"\xff", b'{"kv_role": "\xff"}'])
    def test_text_that_is_not_json_is_refused(self, text):
        with pytest.raises(ConfigError, match="kv_transfer_config: not JSON"):
            KVTransferConfig.from_json(text)

    @pytest.mark.parametrize("text", ["null", "3", '"x"', "[{}]", "[[1]]"])
    def test_json_that_is_not_a_table_is_refused(self, text):
        with pytest.raises(ConfigError, match="expected a table of keys, got "):
            KVTransferConfig.from_json(text)


class Inner(msgspec.Struct, kw_only=True):
    depth: int
    rate: float = 1.0


class Extra(msgspec.Struct, kw_only=True):
    lease_duration_s: Annotated[float, msgspec.Meta(gt=0)] = 30.0
    peers: tuple[str, ...] = ()
    inner: Inner | None = None


class TestExtraConfig:
    def test_lists_become_tuples_and_integers_floats(self):
        extra = parse_struct(Extra, {"lease_duration_s": 5, "peers": ["a:1"]}, "extra")
        assert extra == Extra(lease_duration_s=5.0, peers=("a:1",))

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"lease_duration": 3}, "unknown key 'lease_duration'; did you mean 'lease_duration_s"),
            ({"lease_duration_s": 0}, "lease_duration_s is 0: expected `float` > 0.0"),
            ({"peers": "a:1"}, "peers is 'a:1': expected `array`, got `str`"),
            ({"peers": ["a:1", 2]}, "peers[1] is 2: expected `str`, got `int`"),
            ({"inner": {"depht": 1}}, "inner: unknown key 'depht'; did you mean 'depth'?"),
            ({"inner": {}}, "inner.depth is missing"),
            ({"inner": {"depth": "deep"}}, "inner.depth is 'deep': expected `int`, got `str`"),
            ({3: 4}, "unknown key '3'"),
        ],
    )
    def test_mistakes_are_placed(self, values, message):
        with pytest.raises(ConfigError) as caught:
            parse_struct(Extra, values, "kv_connector_extra_config")
        assert str(caught.value).startswith("kv_connector_extra_config: ")
        assert message in str(caught.value)

    def test_a_plugin_without_keys_says_so(self):
        class NoKeys(msgspec.Struct):
            pass

        with pytest.raises(ConfigError, match="unknown key 'a'; no keys are known here"):
            parse_struct(NoKeys, {"a": 1}, "kv_connector_extra_config")


def engine(name: str, role: str, kv_port: int = 0, **changes) -> dict:
    transfer = {"kv_connector": "PullConnector", "kv_role": role, "kv_port": kv_port}
    transfer |= changes.pop("transfer", {})
    return {"name": name, "kv_transfer_config": transfer, **changes}


def cluster(**changes) -> dict:
    return {
        "model": {"source": "tiny"},
        "prefill": [engine("p", "kv_producer")],
        "decode": [engine("d", "kv_consumer")],
        **changes,
    }


def cluster_error(**changes) -> str:
    with pytest.raises(ConfigError) as caught:
        ClusterConfig.from_mapping(cluster(**changes), "c.toml")
    assert str(caught.value).startswith("c.toml: ")
    return str(caught.value).removeprefix("c.toml: ")


class TestClusterConfig:
    def test_a_minimal_cluster(self):
        config = ClusterConfig.from_mapping(cluster())
        assert [e.name for e in config.engines] == ["p", "d"]
        assert config.router.port == 8000
        assert config.prefill[0].transfer_config().engine_id == "p"

    def test_a_given_engine_id_wins_over_the_name(self):
        tables = [engine("p", "kv_producer", transfer={"engine_id": "other"})]
        config = ClusterConfig.from_mapping(cluster(prefill=tables))
        assert config.prefill[0].transfer_config().engine_id == "other"

    def test_one_engine_may_do_both(self):
        ClusterConfig.from_mapping(
            cluster(prefill=[engine("p", "kv_both")], decode=[engine("d", "kv_both")])
        )

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"roter": {}}, "unknown key 'roter'; did you mean 'router'?"),
            ({"model": {"sorce": "x"}}, "[model]: unknown key 'sorce'; did you mean 'source'?"),
            ({"model": {}}, "[model]: source is missing"),
            ({"model": "tiny"}, "[model]: expected a table of keys, got 'tiny'"),
            (
                {"model": {"source": "tiny", "dtype": "fp16"}},
                "dtype is 'fp16': write bfloat16, float16, float32 or float64",
            ),
            ({"prefill": []}, "write at least one [[prefill]] table (double brackets)"),
            ({"decode": {"name": "d"}}, "write at least one [[decode]] table (double brackets)"),
            ({"decode": [3]}, "[[decode]] number 1: expected a table of keys, got 3"),
            (
                {"prefill": [engine("p", "kv_producer", blocksize=16)]},
                "[[prefill]] number 1: unknown key 'blocksize'; did you mean 'block_size'?",
            ),
            (
                {"prefill": [engine("p", "kv_producer"), {"name": "q"}]},
                "[[prefill]] number 2: kv_transfer_config is missing",
            ),
            ({"prefill": [engine("", "kv_producer")]}, "name is empty; give the engine a name"),
            ({"prefill": [engine("p", "kv_producer", tp=0)]}, "tp: 0 is less than 1"),
            ({"prefill": [engine("p", "kv_producer", tp="3")]}, "tp is '3': expected `int`"),
            (
                {"prefill": [engine("p", "kv_producer", max_num_batched_tokens=0)]},
                "max_num_batched_tokens: 0 is less than 1",
            ),
            (
                {"prefill": [engine("p", "kv_producer", num_blocks=1)]},
                "num_blocks: 1 leaves no room beside the null block; write 2 or more",
            ),
            ({"prefill": [engine("p", "kv_producer", port=-1)]}, "port: -1 is not a TCP port"),
            ({"prefill": [engine("p", "kv_producer", device="gpu")]}, "device is 'gpu': write cpu"),
            (
                {"router": {"host": ""}},
                "[router]: host: '' is no address; name one of this machine's, or write 0.0.0.0",
            ),
            ({"router": {"port": 65536}}, "[router]: port: 65536 is not a TCP port"),
            ({"router": {"request_timeout_s": 0}}, "request_timeout_s: 0.0 is not a number of s"),
            (
                {"router": {"request_timeout_s": float("nan")}},
                "request_timeout_s: nan is not a number of seconds above 0",
            ),
            (
                {"decode": [engine("d", "kv_consumer", transfer={"kv_rol": 1})]},
                "engine 'd': kv_transfer_config: unknown key 'kv_rol'; did you mean 'kv_role'?",
            ),
        ],
    )
    def test_a_mistake_is_placed_and_explained(self, changes, message):
        assert message in cluster_error(**changes)

    @pytest.mark.parametrize(
        ("missing", "brackets"),
        [("model", "[model]"), ("prefill", "[[prefill]]"), ("decode", "[[decode]]")],
    )
    def test_a_missing_section_is_shown_as_it_is_written(self, missing, brackets):
        values = cluster()
        del values[missing]
        with pytest.raises(ConfigError) as caught:
            ClusterConfig.from_mapping(values)
        assert f"the section {brackets} is missing" in str(caught.value)

    def test_two_engines_of_one_name(self):
        assert cluster_error(decode=[engine("p", "kv_consumer")]) == (
            "[[prefill]] 'p' and [[decode]] 'p' have the same name 'p'; "
            "engines are told apart by it"
        )

    def test_two_engines_of_one_id(self):
        message = cluster_error(decode=[engine("d", "kv_consumer", transfer={"engine_id": "p"})])
        assert "[[prefill]] 'p' and [[decode]] 'd' have the same engine_id 'p'" in message

    def test_two_engines_on_the_default_control_port(self):
        tables = {
            section: [{"name": section, "kv_transfer_config": {**MINIMAL}}]
            for section in ("prefill", "decode")
        }
        assert cluster_error(**tables) == (
            "[[prefill]] 'prefill' (kv_port) and [[decode]] 'decode' (kv_port) have the same "
            "port 14579; give each its own, or 0 for a free one"
        )

    def test_an_engine_on_the_routers_port(self):
        message = cluster_error(prefill=[engine("p", "kv_producer", kv_port=8000)])
        assert "[router] and [[prefill]] 'p' (kv_port) have the same port 8000" in message

    @pytest.mark.parametrize("place", [{"host": "10.0.0.2"}, {"nodes": ["10.0.0.2"]}])
    def test_engines_of_two_hosts_may_have_the_same_ports(self, place):
        prefill = engine("p", "kv_producer", kv_port=14579, port=9000, host="10.0.0.1")
        decode = engine("d", "kv_consumer", kv_port=14579, port=9000, **place)
        ClusterConfig.from_mapping(cluster(prefill=[prefill], decode=[decode]))
        decode = engine("d", "kv_consumer", kv_port=14579, host="10.0.0.1")
        message = cluster_error(prefill=[prefill], decode=[decode])
        assert "have the same port 14579" in message

    def test_names_of_this_machine_are_one_host(self):
        prefill = engine("p", "kv_producer", kv_port=14579, host="localhost")
        decode = engine("d", "kv_consumer", kv_port=14579, host="127.0.0.2")
        assert "have the same port 14579" in cluster_error(prefill=[prefill], decode=[decode])

    def test_free_ports_never_clash(self):
        config = ClusterConfig.from_mapping(cluster(router={"port": 0}))
        assert [e.transfer_config().kv_port for e in config.engines] == [0, 0]

    @pytest.mark.parametrize(
        ("section", "role", "remedy"),
        [("prefill", "kv_consumer", "kv_producer"), ("decode", "kv_producer", "kv_consumer")],
    )
    def test_a_role_that_does_not_fit_its_section(self, section, role, remedy):
        message = cluster_error(**{section: [engine("e", role)]})
        assert message == (f"[[{section}]] 'e' has kv_role '{role}'; write {remedy} or kv_both")

    def test_a_deprecated_key_in_a_cluster_warns_once_with_its_engine(self):
        tables = [engine("p", "kv_producer", transfer={"kv_rank": 0})]
        with pytest.warns(DeprecationWarning, match="engine 'p'.*'kv_rank' has no effect") as all_:
            ClusterConfig.from_mapping(cluster(prefill=tables))
        assert len(all_) == 1

    def test_a_kv_events_table_is_vllms_config(self):
        events: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "tcp://*:5557",
            "replay_endpoint": "tcp://[::1]:0",
            "topic": "kv-events",
        }
        config = ClusterConfig.from_mapping(
            cluster(prefill=[engine("p", "kv_producer", kv_events=events)])
        )
        (prefill,) = config.prefill
        assert prefill.kv_events == KVEventsConfig(**events)
        assert prefill.kv_events.replay_endpoint is not None
        assert split_endpoint(prefill.kv_events.replay_endpoint) == ("::1", 0)
        assert config.decode[0].kv_events is None

    @pytest.mark.parametrize(
        ("key", "value", "message"),
        [
            ("endpoint", "127.0.0.1:5557", "endpoint: '127.0.0.1:5557' is not tcp://host:port"),
            ("endpoint", "ipc:///tmp/x", "is not tcp://host:port; tcp://127.0.0.1:5557, say"),
            ("replay_endpoint", "tcp://a:65536", "replay_endpoint: 65536 is not a TCP port"),
            ("buffer_steps", 0, "buffer_steps: 0 is not 1 to 1000000000"),
            ("hwm", 1 << 31, "hwm: 2147483648 is not 1 to 1000000000"),
            ("topics", "x", "kv_events: unknown key 'topics'; did you mean 'topic'?"),
        ],
    )
    def test_a_wrong_value_in_a_kv_events_table(self, key, value, message):
        tables = [engine("p", "kv_producer", kv_events={key: value})]
        assert message in cluster_error(prefill=tables)

    @pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
    def test_events_take_ports_that_nobody_else_may_have(self, key):
        tables = [engine("d", "kv_consumer", kv_events={key: "tcp://*:8000"})]
        assert cluster_error(decode=tables) == (
            f"[router] and [[decode]] 'd' (kv_events.{key}) have the same port 8000; give each "
            "its own, or 0 for a free one"
        )
        tables[0]["kv_events"]["enable_kv_cache_events"] = False
        ClusterConfig.from_mapping(cluster(decode=tables))


class TestClusterFile:
    def write(self, folder: Path, text: str | bytes) -> Path:
        path = folder / "cluster.toml"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def test_a_file_is_read(self, tmp_path):
        path = self.write(
            tmp_path,
            """
            [model]
            source = "tiny"
            [[prefill]]
            name = "p"
            tp = 3
            kv_transfer_config = {kv_connector = "C", kv_role = "kv_producer", kv_port = 0}
            [[decode]]
            name = "d"
            kv_transfer_config = {kv_connector = "C", kv_role = "kv_consumer", kv_port = 0}
            """,
        )
        config = load_cluster(path)
        assert isinstance(config.prefill[0], EngineConfig)
        assert config.prefill[0].tp == 3

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
            load_cluster(tmp_path / "nowhere.toml")

    @pytest.mark.parametrize("text", ["[model", "model = {", b"\xff\xfe", "a = 1\na = 2"])
    def test_a_file_that_is_not_toml(self, tmp_path, text):
        with pytest.raises(ConfigError, match=r"cluster\.toml: not TOML: "):
            load_cluster(self.write(tmp_path, text))

    def test_a_mistake_names_the_file(self, tmp_path):
        path = self.write(tmp_path, "[modle]\n")
        with pytest.raises(ConfigError) as caught:
            load_cluster(path)
        assert str(caught.value) == f"{path}: unknown key 'modle'; did you mean 'model'?"


def test_json_and_mapping_agree():
    values = {**MINIMAL, "engine_id": "e", "kv_connector_extra_config": {"a": [1, {"b": None}]}}
    assert KVTransferConfig.from_json(json.dumps(values)) == KVTransferConfig.from_mapping(values)
