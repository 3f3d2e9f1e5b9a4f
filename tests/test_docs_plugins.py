"""The connector and the transport of docs/plugins.md pass the conformance suites."""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "plugins.md"
_NAMED_BLOCK = re.compile(r"^```python\n(# (\w+)\.py\n.*?)^```$", re.DOTALL | re.MULTILINE)

# Files, because the transport is opened by another process too. Removed when the session ends.
_folder = tempfile.TemporaryDirectory(prefix="kvferry-docs-")


def load(name: str):
    """The module that the page shows as ``name``, with all that stand on the page."""
    folder = Path(_folder.name)
    for source, module in _NAMED_BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        (folder / f"{module}.py").write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


@pytest.fixture(autouse=True)
def _on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(_folder.name)


class TestTheConnectorOfThePage(load("test_prompt_files").TestPromptFiles):
    """As the page shows it."""


def may_read_processes() -> bool:
    """Whether this host lets a process call process_vm_readv at all; some containers do not."""
    cross_memory = load("cross_memory")
    transport = cross_memory.CrossMemoryTransport.open(cross_memory.TransportOptions())
    try:
        return transport.connect(transport.endpoint()).error() is None
    finally:
        transport.close()


@pytest.mark.slow
class TestTheTransportOfThePage(load("test_cross_memory").TestCrossMemoryTransport):
    """As the page shows it."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _is_permitted(cls):
        if not may_read_processes():
            pytest.skip("process_vm_readv is not permitted here")
