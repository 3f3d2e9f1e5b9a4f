"""The wrong turns of docs/vllm/connector.md, and what its table says of the log of each."""

import re
from collections.abc import Iterable
from pathlib import Path

_PAGE = (Path(__file__).parents[1] / "docs" / "vllm" / "connector.md").read_text(encoding="utf-8")
_TABLE = _PAGE.partition("### Wrong turns\n")[2].partition("\n#")[0]
LINES: dict[str, str] = dict(re.findall(r"^\| ([^|]+) \| `([^`|]+)` \|", _TABLE, re.MULTILINE))
"""Wrong turn → the line, of which ``…`` may be anything."""


def told_among(turn: str, lines: Iterable[str]) -> list[str]:
    """Those that end as the page says for a wrong turn; what stands before is free."""
    wanted = ".*".join(re.escape(part) for part in LINES[turn].split("…"))
    return [line for line in lines if re.search(rf"(^|: |\] ){wanted}$", line)]


def assert_told(turn: str, line: str) -> None:
    """A message is one line, and the one that the page has for a wrong turn."""
    assert "\n" not in line
    assert told_among(turn, [line]), f"{turn}: the page has {LINES[turn]!r}, this is {line!r}"


def assert_all_are_provoked(test_file: str) -> None:
    """A file of tests has a call of :func:`assert_told` for every wrong turn of the page."""
    source = Path(test_file).read_text(encoding="utf-8")
    assert set(re.findall(r'told\(\s*"([^"]+)"', source)) == set(LINES)
