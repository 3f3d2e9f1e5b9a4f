"""The adapter against the connector API of the vLLM that is installed."""

import inspect
import re
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm", reason="vllm is not installed here; `make test-vllm` has it")

import kvferry
from kvferry.integrations.vllm import KVFerryConnector
from kvferry.integrations.vllm.compat import KVConnectorBase_V1, SupportsHMA
from kvferry.integrations.vllm.release import check_release

CONNECTOR = Path(kvferry.__file__).parent / "integrations" / "vllm" / "connector.py"


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
    """Method → reason, from the connector's table of methods that it leaves out."""
    return dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", CONNECTOR.read_text(), re.MULTILINE))


def test_every_method_is_implemented_or_listed_with_its_reason():
    own = set(vars(KVFerryConnector))
    assert set(api()) - own == set(listed())


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


def test_the_installed_release_fits():
    check_release(vllm.__version__)


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.32.0", "dev"])
def test_another_release_is_refused_by_name(version):
    with pytest.raises(ImportError, match=rf"this is vLLM {version}.*made for vLLM 0\.32"):
        check_release(version)
