"""The reference pages that are made from the code are up to date."""

import pytest

from kvferry.cli.app import COMMANDS
from tests.pages import ROOT
from tests.reference_pages import REFERENCE_PAGES, command_page, python_page, router_page


@pytest.mark.parametrize("file", REFERENCE_PAGES)
def test_a_made_page_says_what_the_code_says(file):
    shown = (ROOT / "docs/reference" / file).read_text(encoding="utf-8")
    assert shown == REFERENCE_PAGES[file](), "python -m tests.reference_pages writes it again"


def test_a_command_has_a_section_and_its_options_have_rows():
    page = command_page() + router_page()
    assert [name for name in COMMANDS if f"\n## kvferry {name}\n" not in page] == []
    assert "\n## kvferry router drain\n" in page
    assert "| `--decode-only <fallback\\|never>` | Whether decode servers compute" in page


def test_a_name_has_the_first_sentence_of_its_docstring():
    page = python_page()
    assert "| `KVCacheBlock` | A block of a `BlockPool`. |" in page
    assert "| `ByteArray` | An array of bytes in host memory. |" in page
