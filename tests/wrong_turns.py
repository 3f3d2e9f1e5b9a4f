"""The wrong turns that docs/vllm.md knows, and what its table says that the log says of each."""

import re
from pathlib import Path

_PAGE = (Path(__file__).parents[1] / "docs" / "vllm.md").read_text(encoding="utf-8")
_TABLE = _PAGE.partition("### Wrong turns\n")[2].partition("\n#")[0]
LINES: dict[str, str] = dict(re.findall(r"^\| ([^|]+) \| `([^`|]+)` \|", _TABLE, re.MULTILINE))
"""Wrong turn → the line, of which ``…`` may be anything."""


def assert_told(turn: str, line: str) -> None:
    """The page has this line, which is one, for a wrong turn; what stands before it is free."""
    assert "\n" not in line
    wanted = ".*".join(re.escape(part) for part in LINES[turn].split("…"))
    assert re.search(rf"(^|: ){wanted}$", line), (
        f"{turn}: the page has {wanted!r}, this is {line!r}"
    )


def assert_all_are_provoked(test_file: str) -> None:
    """A file of tests has a call of :func:`assert_told` for every wrong turn of the page."""
    source = Path(test_file).read_text(encoding="utf-8")
    assert set(re.findall(r'told\(\s*"([^"]+)"', source)) == set(LINES)
