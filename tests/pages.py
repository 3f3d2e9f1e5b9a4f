"""The pages of the docs, as tests read them."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])


def text_of(folder: str) -> str:
    """The pages of a folder of ``docs``, one after the other."""
    pages = sorted((ROOT / "docs" / folder).glob("*.md"))
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)
