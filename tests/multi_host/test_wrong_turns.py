"""A prefill engine whose `host` was left at 127.0.0.1, and a decode engine on another machine."""

import json
import re

import msgspec
import pytest

from kvferry.config import EngineConfig, KVTransferConfig
from kvferry.engine.weights import prepare_model
from kvferry.engine.weights_folder import TinyConfig
from kvferry.errors import HostError
from kvferry.testing.host_engines import HostEngine, HostPair
from kvferry.testing.hosts import Network
from kvferry.testing.multi_host_conformance import MAX_TOKENS, prompt
from tests.wrong_turns import assert_told

pytestmark = pytest.mark.processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("decode_host", "turn"),
    [
        (None, "prefill has `host` at 127.0.0.1, decode is on another machine"),
        ("127.0.0.1", "both have `host` at 127.0.0.1 and one `kv_port`, on two machines"),
    ],
)
def test_host_left_at_127_0_0_1(tmp_path, decode_host, turn):
    try:
        network = Network.open()
    except HostError as error:
        pytest.skip(str(error))
    model = prepare_model("tiny", tiny=TinyConfig(), cache=tmp_path / "models")
    with network:
        hosts = dict(
            zip(("p", "d", "client"), map(network.add_host, ("p", "d", "client")), strict=True)
        )

        def engine(name, role, port, host):
            transfer = KVTransferConfig(
                kv_connector="PullConnector",
                kv_role=role,
                kv_port=port,
                kv_connector_extra_config={
                    "host": host,
                    "cluster_key": "k" * 32,
                    "transport": "tcp",
                },
            )
            config = EngineConfig(
                name=name, kv_transfer_config=msgspec.to_builtins(transfer), num_blocks=64
            )
            log = tmp_path / name
            return HostEngine(hosts[name], hosts["client"], config, model=model, log=log)

        pair = HostPair(
            network,
            engine("p", "kv_producer", 14579, "127.0.0.1"),
            engine("d", "kv_consumer", 14579, decode_host or hosts["d"].ipv4),
            MAX_TOKENS,
        )
        pair.start()
        answer = pair.serve(prompt(60, seed=1))
        told = json.loads(re.sub(r"^d: \d+ ", "", answer.error))["error"]
        assert_told(turn, f"{told['code']}: {told['message']}")
