"""The manifests fit Kubernetes' schema, and the commands and files in them exist and fit
together.
"""

import json
import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kvferry.cli.app import load_command
from kvferry.config import KVTransferConfig, parse_struct
from kvferry.connectors.pull.config import PullConfig

HERE = Path(__file__).parent
MANIFESTS = [
    manifest
    for name in ("servers.yaml", "router.yaml")
    for manifest in yaml.safe_load_all((HERE / name).read_text(encoding="utf-8"))
]
PORTS = {"vllm-prefill": 8100, "vllm-decode": 8200}


def containers(kind="Deployment"):
    return {
        manifest["metadata"]["name"]: manifest["spec"]["template"]["spec"]["containers"][0]
        for manifest in MANIFESTS
        if manifest["kind"] == kind
    }


def options(*names):
    """The options of a kvferry command."""
    command = load_command(names[0])
    for name in names[1:]:
        command = command.commands[name]
    return {option for parameter in command.params for option in parameter.opts}


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}"
)
def test_a_manifest_fits_the_schema(manifest):
    kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_the_router_is_started_with_options_that_exist_and_servers_that_are_there():
    arguments = dict(
        argument.partition("=")[::2] for argument in containers()["kvferry-router"]["args"]
    )
    assert arguments.keys() <= options("router")
    for role in ("prefill", "decode"):
        assert arguments[f"--{role}"] == f"http://vllm-{role}:{PORTS[f'vllm-{role}']}"


@pytest.mark.parametrize("name", PORTS)
def test_a_server_has_a_configuration_that_is_valid_and_drains_before_it_stops(name):
    container, port = containers()[name], PORTS[name]
    config = KVTransferConfig.from_mapping(json.loads(container["args"][-1]), name)
    parse_struct(PullConfig, config.kv_connector_extra_config, name)
    assert config.kv_role == {"vllm-prefill": "kv_producer", "vllm-decode": "kv_consumer"}[name]
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert ports == {"http": port, "control": config.kv_port}
    assert f"--port={port}" in container["args"]
    routers, own = (
        part.split() for part in container["lifecycle"]["preStop"]["exec"]["command"][-1].split(";")
    )
    assert own[:3] == ["kvferry", "drain", f'"$POD_IP:{config.kv_port}"']
    assert own[-1] == config.kv_connector_extra_config["curve_keys"]
    assert {word for word in own if word.startswith("--")} <= options("drain")
    script = routers
    role = name.removeprefix("vllm-")
    assert script[:4] == ["kvferry", "router", "drain", role]
    assert script[4] == f'"$POD_IP:{port}"'
    assert {word for word in script if word.startswith("--")} <= options("router", "drain")


@pytest.mark.parametrize("name", PORTS)
def test_a_pod_may_take_as_long_as_its_drain(name):
    (pod,) = (
        manifest["spec"]["template"]["spec"]
        for manifest in MANIFESTS
        if manifest["kind"] == "Deployment" and manifest["metadata"]["name"] == name
    )
    script = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][-1]
    timeouts = [float(found) for found in re.findall(r"--timeout (\d+)", script)]
    assert len(timeouts) == 2
    assert pod["terminationGracePeriodSeconds"] > sum(timeouts)
