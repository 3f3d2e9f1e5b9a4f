"""The steps of the Dockerfile work, and the result serves as in a container."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import yaml

from examples.container.root import NEEDED, Root, stages_of

HERE = Path(__file__).parent

STAGES = stages_of((HERE / "Dockerfile").read_text(encoding="utf-8"))
CLUSTER = "/etc/kvferry/cluster.toml"


def test_the_manifests_use_the_images_that_are_built():
    text = (HERE / "Dockerfile").read_text(encoding="utf-8")
    built = dict(re.findall(r"--target (\S+) -t (\S+) ", text))
    assert built.keys() == STAGES.keys()
    manifests = [
        manifest
        for file in ("servers.yaml", "router.yaml")
        for manifest in yaml.safe_load_all(
            (HERE.parent / "kubernetes" / file).read_text(encoding="utf-8")
        )
    ]
    used = {
        container["image"]
        for manifest in manifests
        if manifest["kind"] == "Deployment"
        for container in manifest["spec"]["template"]["spec"]["containers"]
    }
    assert used == set(built.values())


@pytest.fixture(scope="module")
def root():
    """The root of the first image; its files have times as in an image's layers."""
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if os.getuid() != 0 or missing:
        pytest.skip(f"a root is made as root, with {', '.join(NEEDED)}; missing: {missing}")
    with tempfile.TemporaryDirectory(prefix="kvferry-image-") as folder:
        made = Root(Path(folder) / "root", HERE.parents[1])
        made.build(STAGES["kvferry"])
        for file in (made.folder / "opt").rglob("*.py"):
            os.utime(file, (0, int(file.stat().st_mtime)))
        yield made


@pytest.mark.container
@pytest.mark.timeout(2400)
def test_a_user_without_a_home_plans_and_serves_under_a_root_that_is_read_only(root):
    inside = (HERE / "inside.py").read_text(encoding="utf-8")
    ended = root.contain(["python3", "-c", inside, CLUSTER, *root.command])
    assert ended.returncode == 0
    result = json.loads(ended.stdout.splitlines()[-1])
    assert "decode-0 reads 2048 tokens from prefill-0" in result["plan"]
    assert result["loaded"] == 200.0
    assert result["answers"][-1]["usage"]["prompt_tokens"] == 200
    assert sum(result["shm"].values()) == 128 * (16 + 24) * 2 * 3 * 16 * 4 * 4  # both caches
    logs = "".join(result["logs"])
    assert "reading from engine prefill-0: shm" in logs
    # The engines use the kernels that the build compiled.
    assert "cannot be kept" not in logs + result["plan_said"]
    assert result["exit"] == 0


@pytest.mark.container
@pytest.mark.timeout(2400)
def test_where_nothing_was_compiled_one_warning_tells_the_price(root):
    ended = root.contain(["env", "NUMBA_CPU_NAME=generic", "kvferry", "plan", CLUSTER])
    assert ended.returncode == 0
    assert ended.stdout.count("compiled kernels cannot be kept") == 1
    assert "set NUMBA_CACHE_DIR" in ended.stdout


@pytest.mark.container
@pytest.mark.timeout(2400)
def test_caches_that_do_not_fit_into_dev_shm_are_one_error(root):
    ended = root.contain(root.command, shm="2m")
    assert ended.returncode == 2
    assert re.search(r"kvferry: .*/dev/shm: \d+ bytes needed, \d+ free", ended.stdout)
    assert "lower num_blocks" in ended.stdout


@pytest.mark.container
@pytest.mark.timeout(2400)
def test_what_vllms_image_is_given_installs_beside_what_is_there(root):
    root.build(STAGES["vllm"])
    kept = {file.suffix for file in (root.folder / "opt").rglob("kernels.source_at-*")}
    assert kept == {".nbi", ".nbc"}
