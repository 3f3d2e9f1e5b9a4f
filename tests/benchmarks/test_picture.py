"""The README's figures beside NixlConnector are the figures of the newest results."""

import re

from benchmarks.remote import ROOT
from benchmarks.vllm_pair.picture import PAGE, draw, first_tokens


def test_the_ranges_of_the_readme_are_those_of_the_page():
    cases = first_tokens(PAGE.read_text(encoding="utf-8"))
    assert len(cases) == 16
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    told = re.search(
        r"needs ([\d.]+)\s+to\s+([\d.]+) times.*?and ([\d.]+) to ([\d.]+) times", readme, re.S
    )
    assert told is not None
    ratios = [
        [case.ratio for case in cases if case.at_once is at_once] for at_once in (False, True)
    ]
    ends = [f"{end(each):.1f}" for each in ratios for end in (min, max)]
    assert list(told.groups()) == ends


def test_the_picture_is_drawn(tmp_path):
    draw(first_tokens(PAGE.read_text(encoding="utf-8")), tmp_path / "picture.svg")
    text = (tmp_path / "picture.svg").read_text(encoding="utf-8")
    for words in ("NixlConnector", "kvferry, at once", "tokens of the prompt"):
        assert words in text
