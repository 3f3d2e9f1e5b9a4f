"""The chart gives the plain manifests by default, and valid manifests for other values.

``make release`` runs these tests, with Helm in an environment of its own.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from kvferry import __version__
from kvferry.config import KVTransferConfig, parse_struct
from kvferry.connectors.pull.config import PullConfig

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
CHART = HERE / "kvferry-vllm"
TOOLS = ROOT / os.environ.get("KVFERRY_TEST_TOOLS", ".venv-release") / "bin" / "python"
PLAIN = [
    manifest
    for name in ("router.yaml", "servers.yaml")
    for manifest in yaml.safe_load_all((HERE.parent / "kubernetes" / name).read_text("utf-8"))
]
OTHER_VALUES = {
    "images": {"router": "registry.example/kvferry:1", "server": "registry.example/vllm:1"},
    "imagePullSecrets": [{"name": "registry"}],
    "model": "some/model",
    "drainSeconds": 30,
    "prefill": {
        "replicas": 8,
        "port": 9100,
        "args": ["--max-model-len=8192", "--gpu-memory-utilization=0.8"],
        "resources": {"limits": {"nvidia.com/gpu": 4}},
        "nodeSelector": {"pool": "gpus"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
    },
    "decode": {"extraConfig": {"mover_threads": 4}, "loadFailurePolicy": "fail"},
    "router": {"port": 8080, "args": ["--workers=2"], "resources": {"requests": {"cpu": "2"}}},
}

_HELM = """
import json, sys, helm_python as helm
doing, chart, values = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
try:
    if doing == "lint":
        told = helm.lint(chart, values, strict=True)["messages"]
    else:
        with helm.Chart.load(chart) as loaded:
            loaded.validate_schema(values)
            told = loaded.render(values, name="test")
except helm.HelmError as error:
    sys.exit(str(error))
print(json.dumps(told))
"""

pytestmark = pytest.mark.release


def helm(doing, values):
    """Lints or renders the chart; an error of Helm is an ``AssertionError``."""
    command = [TOOLS, "-c", _HELM, doing, CHART, json.dumps(values)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def rendered(values):
    """The manifests of the chart, router first."""
    texts = [text for _, text in sorted(helm("render", values).items())]
    return [manifest for text in texts for manifest in yaml.safe_load_all(text) if manifest]


def with_parsed_config(manifest):
    """The manifest, with the transfer config as a mapping: the order of its keys has no meaning."""
    for container in containers(manifest):
        arguments = container.get("args", [])
        if "--kv-transfer-config" in arguments:
            arguments[-1] = json.loads(arguments[-1])
    return manifest


def containers(manifest):
    return manifest["spec"].get("template", {}).get("spec", {}).get("containers", [])


@pytest.mark.parametrize("values", [{}, OTHER_VALUES], ids=["default", "other"])
def test_the_chart_passes_helms_lint(values):
    errors = [each for each in helm("lint", values) if each["severity"] > 1]  # 1: a chart's icon
    assert errors == []


def test_the_default_manifests_are_the_plain_manifests():
    found = [with_parsed_config(manifest) for manifest in rendered({})]
    assert found == [with_parsed_config(manifest) for manifest in PLAIN]


@pytest.mark.parametrize("values", [{}, OTHER_VALUES], ids=["default", "other"])
def test_the_manifests_fit_kubernetes_schema(values):
    manifests = rendered(values)
    assert len(manifests) == len(PLAIN)
    for manifest in manifests:
        kubernetes_validate.validate(manifest, kubernetes_validate.latest_version(), strict=True)


def test_other_values_reach_the_pods():
    by_name = {
        manifest["metadata"]["name"]: manifest
        for manifest in rendered(OTHER_VALUES)
        if manifest["kind"] == "Deployment"
    }
    prefill, decode = by_name["vllm-prefill"]["spec"], by_name["vllm-decode"]["spec"]
    pod = prefill["template"]["spec"]
    (server,) = pod["containers"]
    assert prefill["replicas"] == 8
    assert pod["terminationGracePeriodSeconds"] == 90
    assert pod["nodeSelector"] == {"pool": "gpus"}
    assert pod["tolerations"] == [{"key": "gpu", "operator": "Exists"}]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert server["resources"] == {"limits": {"nvidia.com/gpu": 4}}
    assert server["args"][:4] == [
        "some/model",
        "--port=9100",
        "--max-model-len=8192",
        "--gpu-memory-utilization=0.8",
    ]
    drain = server["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert drain.partition(";")[0].split()[3:] == [
        *("prefill", '"$POD_IP:9100"', "--router", "http://kvferry-router:8080"),
        *("--timeout", "30"),
    ]
    config = KVTransferConfig.from_mapping(
        json.loads(decode["template"]["spec"]["containers"][0]["args"][-1]), "decode"
    )
    extra = parse_struct(PullConfig, config.kv_connector_extra_config, "decode")
    assert config.kv_load_failure_policy == "fail"
    assert extra.mover_threads == 4
    pod = by_name["kvferry-router"]["spec"]["template"]["spec"]
    (router,) = pod["containers"]
    assert {"--port=8080", "--prefill=http://vllm-prefill:9100", "--workers=2"} <= {*router["args"]}
    assert "--drain-timeout=30" in router["args"]
    assert pod["terminationGracePeriodSeconds"] == 90


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"prefil": {}}, "prefil"),
        ({"prefill": {"replicas": "two"}}, "replicas"),
        ({"decode": {"loadFailurePolicy": "retry"}}, "loadFailurePolicy"),
        ({"router": {"port": 0}}, "port"),
    ],
)
def test_a_value_that_makes_no_sense_is_named(values, named):
    with pytest.raises(AssertionError, match=named):
        helm("render", values)


def test_the_chart_has_the_release_of_the_package():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text("utf-8"))
    values = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__
    assert {image.rpartition(":")[2] for image in values["images"].values()} == {__version__}


def test_the_readme_shows_values_that_the_chart_takes():
    shown = re.findall(r"```yaml\n(.*?)```", (HERE / "README.md").read_text("utf-8"), re.DOTALL)
    assert len(shown) == 1
    assert rendered(yaml.safe_load(shown[0]))
